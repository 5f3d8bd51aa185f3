//! Code that is independent of the release of Burn, on a backend of Burn 0.21.

/// A module of these items, which may use `Tensor`, `device`, `data` and `numbers`.
macro_rules! on_backend {
    ($name:ident, $backend:ty, $($item:item)*) => {
        #[allow(dead_code, unused_imports)]
        mod $name {
            use burn::tensor::{Device, Float};

            use super::common::mlp::{data, numbers};

            type Tensor<const D: usize, K = Float> = burn::tensor::Tensor<$backend, D, K>;

            fn device() -> Device<$backend> {
                Default::default()
            }

            $($item)*
        }
    };
}

pub(crate) use on_backend;
