//! The checking backend panics for calls that burn-amp must not make, and counts the others.

use burn::tensor::module::linear;
use burn::tensor::{DType, Tensor};
use burn_backend::ops::FloatTensorOps;
use burn_backend::{DTypeUsage, DTypeUsageSet};

use crate::steps::input;
use shared::checked::{Casts, Checked, CheckedDevice};

/// A tensor in `dtype` on a device that only contracts in bf16 and has no f16.
fn tensor(dtype: DType) -> Tensor<Checked, 2> {
    let contractions = DTypeUsage::Storage | DTypeUsage::Accelerated;
    let device = CheckedDevice::with_support(DTypeUsageSet::empty(), contractions);
    input([4, 4], 1, &device).cast(dtype)
}

#[test]
fn a_contraction_and_moves_of_bare_halves_are_fine() {
    let x = tensor(DType::BF16);
    let y = x.clone().transpose().matmul(x.clone().slice([0..4, 0..2]));
    let y = linear(y.reshape([2, 4]), x, None).cast(DType::F32) + 1.0;
    assert_eq!(y.device().counts().ran_in("linear", DType::BF16), 1);
}

#[test]
#[should_panic(expected = "float_add: operands of different dtypes, BF16 and F32")]
fn mixed_dtypes_are_refused() {
    let x = tensor(DType::BF16);
    let _ = x.clone() + x.cast(DType::F32);
}

#[test]
#[should_panic(expected = "float_add: operands on different devices")]
fn mixed_devices_are_refused() {
    let [a, b] = [(); 2].map(|()| tensor(DType::F32).into_primitive().tensor());
    <Checked>::float_add(a, b);
}

#[test]
#[should_panic(expected = "float_add in BF16")]
fn arithmetic_of_bare_halves_is_refused() {
    let x = tensor(DType::BF16);
    let _ = x.clone() + x;
}

#[test]
#[should_panic(expected = "linear in BF16")]
fn a_bias_added_to_bare_halves_is_refused() {
    let x = tensor(DType::BF16);
    let bias = x.clone().slice([0..1, 0..4]).reshape([4]);
    let _ = linear(x.clone(), x, Some(bias));
}

#[test]
#[should_panic(expected = "float_cast in F16")]
fn a_dtype_that_does_not_exist_is_refused() {
    tensor(DType::F16);
}

#[test]
fn casts_and_reads_are_counted() {
    let device = CheckedDevice::new();
    let x = input::<Checked, 2>([4, 4], 1, &device);
    device.reset();
    let halves = [x.clone(), x.clone(), x.clone() + 1.0].map(|x| x.cast(DType::F16));
    let _ = x.cast(DType::BF16).sum().into_data();
    let _ = halves.map(|half| half.cast(DType::F16));
    let counts = device.counts();
    let expected = Casts {
        count: 3,
        elements: 48,
    };
    assert_eq!(counts.casts_between(DType::F32, DType::F16), expected);
    assert_eq!(counts.casts(), 4);
    let twice: Vec<_> = counts.cast_twice().iter().map(|c| (c.1, c.2)).collect();
    assert_eq!(twice, [(DType::F16, 2)]);
    assert_eq!((counts.reads.float, counts.reads.total()), (1, 1));
}
