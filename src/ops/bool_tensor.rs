//! Boolean operations: the backend's own.

use burn_backend::backend::ExecutionError;
use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{
    Backend, BoolDType, DeviceOps, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
};

use crate::Amp;
use crate::call::{constant, create, delegate, delegate_on_device, ends_pass};
use crate::tensor::Side;

impl<B: Backend, S: Side<B>> BoolTensorOps<Self> for Amp<B, S> {
    async fn bool_into_data(tensor: BoolTensor<Self>) -> Result<TensorData, ExecutionError> {
        ends_pass::<B, S>(|| B::bool_device(&tensor));
        B::bool_into_data(tensor).await
    }

    fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        let device = B::bool_device(&tensor);
        let make = |_: &_, dtype| B::bool_into_float(tensor, dtype);
        constant(create(&device, out_dtype, make))
    }

    delegate_on_device! {
        fn bool_empty(shape: Shape; device, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_zeros(shape: Shape; device, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_ones(shape: Shape; device, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_from_data(data: TensorData; device) -> BoolTensor<Self>;
        fn bool_to_device(tensor: BoolTensor<Self>; device) -> BoolTensor<Self>;
    }

    delegate! {
        fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self>;
        fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
        fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
        fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> impl Future<Output = IntTensor<Self>> + 'static + Send;
    }

    burn_amp_core::bool_operations! { delegate }
}
