//! A guide for readers who know automatic mixed precision from PyTorch, and for those who do not.
//! Every example runs as a test. The workspace packages `remote_server` and `all_reduce` run those
//! that need `burn-remote` or `burn-collective`.
//!
//! - [`quick_start`]: the type to change, and what you then see.
#![cfg_attr(
    feature = "train",
    doc = "- [`from_pytorch`]: PyTorch's names and ours, and what is different on purpose.
- [`coming_from`]: beside PyTorch, Accelerate, Lightning, fastai and Keras, and beside Burn's own half
  switches; the names of these, of flodl and shrew, and ours."
)]
//! - [`precision`]: f16, bf16 or FP32, for a device or for a piece of code.
#![cfg_attr(
    feature = "train",
    doc = "- [`training`]: clipping, accumulation, several models, schedules, checkpoints, Burn's `Learner`.
- [`several_devices`]: a batch over several devices, replicas, and peers that reduce their gradients.
- [`troubleshooting`]: a loss of NaN, a stuck scale, slow training, and what to do."
)]
//! - [`ops`]: which operation runs in which precision, compared with PyTorch.
//! - [`where_half_rounds`]: programs that half precision makes wrong, in PyTorch and here, and what to write instead.
//! - [`inference`]: running a trained model.
//! - [`custom_ops`]: operations of your own.
#![cfg_attr(
    feature = "train",
    doc = "- [`remote`]: training on a server that computes in half precision."
)]
//! - [`how_it_works`]: the layers, and who decides what.
//! - [`measurements`]: memory, overhead, speed and accuracy, and how to measure them again.
//! - [`limits`]: what is not possible, and what was not measured.
#![cfg_attr(
    feature = "train",
    doc = "- [`versions`]: Burn 0.21, 0.22 or 0.23, and what each has."
)]
//! - [`stability`]: what stays within a version, and what changes with Burn.

macro_rules! pages {
    ($($(#[$attribute:meta])* $page:ident)*) => {$(
        $(#[$attribute])*
        #[doc = include_str!(concat!(stringify!($page), ".md"))]
        pub mod $page {}
    )*};
}

pages! {
    #[cfg(feature = "train")] coming_from
    custom_ops
    #[cfg(feature = "train")] from_pytorch
    how_it_works
    inference
    limits
    ops
    precision
    quick_start
    stability
    #[cfg(feature = "train")] training
    #[cfg(feature = "train")] troubleshooting
    #[cfg(feature = "train")] versions
    where_half_rounds
}

#[doc = include_str!("measurements.md")]
#[doc = include_str!("digits.svg")]
pub mod measurements {}

#[cfg(feature = "train")]
#[cfg_attr(not(doctest), doc = include_str!("remote.md"))]
pub mod remote {}

#[cfg(feature = "train")]
#[cfg_attr(not(doctest), doc = include_str!("several_devices.md"))]
pub mod several_devices {}
