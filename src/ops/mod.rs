//! The backend's operations, one file per Burn trait, and what the policy records of them.

// A method left to its default would silently lose the inner backend's own kernel.
#![deny(clippy::missing_trait_methods)]

mod activation;
mod arithmetic;
mod attention;
mod bool_tensor;
mod custom;
mod float;
mod int_tensor;
mod leaving;
mod module;
mod qtensor;
mod transaction;
mod unrounded;
