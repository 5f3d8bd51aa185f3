//! Integer operations: the backend's own.

use std::ops::Range;

use burn_backend::backend::ExecutionError;
use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, DeviceOps, Distribution, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData,
};

use crate::Amp;
use crate::call::{create, delegate, delegate_on_device, ends_pass};
use crate::tensor::Side;

impl<B: Backend, S: Side<B>> IntTensorOps<Self> for Amp<B, S> {
    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        ends_pass::<B, S>(|| B::int_device(&tensor));
        B::int_into_data(tensor).await
    }

    fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        let device = B::int_device(&tensor);
        let make = |_: &_, dtype| B::int_into_float(tensor, dtype);
        create(&device, out_dtype, make)
    }

    delegate_on_device! {
        fn int_empty(shape: Shape; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_from_data(data: TensorData; device) -> IntTensor<Self>;
        fn int_to_device(tensor: IntTensor<Self>; device) -> IntTensor<Self>;
        fn int_zeros(shape: Shape; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_ones(shape: Shape; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_full(shape: Shape, fill_value: Scalar; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_random(shape: Shape, distribution: Distribution; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange_step(range: Range<i64>, step: usize; device, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange(range: Range<i64>; device, dtype: IntDType) -> IntTensor<Self>;
    }

    delegate! {
        fn int_device(tensor: &IntTensor<Self>) -> Device<Self>;
        fn int_scatter_add(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self>;
        fn int_select_add(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self>;
    }

    burn_amp_core::int_operations! { delegate }
}
