//! Every module and every loss of burn-nn, forward and backward: in FP32 equal bit for bit to plain
//! Burn over the same transport, in half within a few roundoffs of it, in inference and in training
//! with and without gradient checkpointing.
//!
//! The cases are those of the package for Burn 0.21, in the same files.
#![cfg(feature = "flex")]

include!("../../src/burn.rs");

// The name that the shared files use.
extern crate burn_amp_device as burn_amp;

mod common;
#[macro_use]
#[path = "../../../tests/modules/cases.rs"]
mod cases;
#[macro_use]
mod harness;
#[path = "../../../tests/modules/values.rs"]
mod values;

#[path = "../../../tests/modules/activation.rs"]
mod activation;
#[path = "../../../tests/modules/attention.rs"]
mod attention;
#[path = "../../../tests/modules/conv.rs"]
mod conv;
#[path = "../../../tests/modules/coverage.rs"]
mod coverage;
#[path = "../../../tests/modules/layers.rs"]
mod layers;
#[path = "../../../tests/modules/loss.rs"]
mod loss;
mod new;
#[path = "../../../tests/modules/norm.rs"]
mod norm;
#[path = "../../../tests/modules/pool.rs"]
mod pool;
#[path = "../../../tests/modules/rnn.rs"]
mod rnn;
