//! Every module and every loss of burn-nn, forward and backward: in FP32 equal to plain Burn bit
//! for bit, in half within a few roundoffs of it, in inference and under both checkpointing
//! strategies.

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
mod cases;
#[macro_use]
mod harness;
mod values;

mod activation;
mod attention;
mod conv;
mod coverage;
mod layers;
mod loss;
mod new;
mod norm;
mod pool;
mod rnn;
