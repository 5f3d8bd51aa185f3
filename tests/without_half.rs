//! A process in which no half precision is in force: a program's own half tensors are those of Burn. A file of its
//! own, since other tests put half precision in force.

use burn::backend::{Autodiff, Flex};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_amp::{Amp, AmpAutodiff};
use shared as _; // with what it instantiates

/// Values of tensors that f16 holds in few digits or not at all, beside tensors in f16.
fn own_half<B: Backend>() -> Vec<TensorData> {
    let device = Default::default();
    let x = Tensor::<B, 1>::from_data([1.0, 2.0], &device).cast(DType::F16);
    let mask = Tensor::<B, 1, Bool>::from_data([true, false], &device);
    [
        x.full_like(1e-5),
        x.clone() + x.full_like(1e-5),
        x.clone().mask_where(mask, x.full_like(-1e9)),
        Tensor::full([3], 1e6, (&device, DType::F16)),
    ]
    .map(Tensor::into_data)
    .into()
}

#[test]
fn a_program_in_its_own_half_computes_as_in_burn() {
    let expected = own_half::<Flex>();
    assert!(expected.iter().all(|data| data.dtype == DType::F16));
    assert_eq!(own_half::<Amp<Flex>>(), expected);
    assert_eq!(own_half::<Autodiff<Flex>>(), expected);
    assert_eq!(own_half::<AmpAutodiff<Flex>>(), expected);
}
