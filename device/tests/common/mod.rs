//! Shared code of the tests: Flex as the backend inside, one precision at a time, and seeded values.

#![allow(dead_code)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_amp_device::{Amp, Precision, configure};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, TensorMetadata, try_read_sync};
use burn_dispatch::{backends::Flex, devices::FlexDevice};

pub type A = Amp<Flex>;

/// Flex has one device: a test that configures it has exclusive use until the guard is dropped.
pub fn on(precision: Precision) -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(configure::<Flex>(&FlexDevice, precision), Ok(precision));
    guard
}

/// The half dtype of a precision.
pub fn half(precision: Precision) -> DType {
    precision.compute_dtype().expect("a half precision")
}

/// The largest relative error of one rounding.
pub fn rounding(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 2f32.powi(-11),
        DType::BF16 => 2f32.powi(-8),
        _ => 0.0,
    }
}

pub fn f32s<B: Backend<Device = FlexDevice>>(values: &[f32], shape: &[usize]) -> FloatTensor<B> {
    let data = TensorData::new(values.to_vec(), Shape::from(shape.to_vec()));
    B::float_from_data(data, &FlexDevice)
}

pub fn ints<B: Backend<Device = FlexDevice>>(values: &[i32], shape: &[usize]) -> IntTensor<B> {
    let data = TensorData::new(values.to_vec(), Shape::from(shape.to_vec()));
    B::int_from_data(data, &FlexDevice)
}

pub fn bools<B: Backend<Device = FlexDevice>>(values: &[bool], shape: &[usize]) -> BoolTensor<B> {
    let data = TensorData::new(values.to_vec(), Shape::from(shape.to_vec()));
    B::bool_from_data(data, &FlexDevice)
}

/// The values that a client reads.
pub fn data<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    try_read_sync(B::float_into_data(tensor))
        .expect("a CPU")
        .expect("values")
}

/// The values that a client reads, if the tensor is FP32 in the client.
pub fn values<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    data::<B>(tensor).try_to_vec().expect("FP32")
}

/// A tensor that the policy made half, with values that half represents exactly. In the client it is FP32. A product that
/// sums nothing would not be half.
pub fn demoted(tensor: FloatTensor<A>) -> FloatTensor<A> {
    let shape = tensor.shape();
    let column = A::float_reshape(tensor, Shape::new([shape.num_elements(), 1]));
    let rows = A::float_cat(vec![column, zeros(&[shape.num_elements(), 1])], 1);
    let half = A::float_matmul(rows, f32s::<A>(&[1.0, 0.0], &[2, 1]));
    assert_ne!(half.dtype(), DType::F32, "the policy is off");
    A::float_reshape(half, shape)
}

pub fn zeros(shape: &[usize]) -> FloatTensor<A> {
    A::float_zeros(Shape::from(shape.to_vec()), &FlexDevice, FloatDType::F32)
}
