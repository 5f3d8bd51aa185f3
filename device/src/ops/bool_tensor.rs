//! Boolean operations, which go to the backend unchanged.

use burn_backend::ops::BoolTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{
    Backend, BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata,
};

use super::delegate;
use super::float::{constant, create};
use super::this_burn::bool_operations;
use crate::Amp;
use crate::device::Session;

impl<B: Backend, P: Session> BoolTensorOps<Self> for Amp<B, P> {
    async fn bool_into_data(tensor: BoolTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::bool_into_data(tensor).await
    }

    fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        let device = tensor.device();
        let make = |dtype| B::bool_into_float(tensor, dtype);
        constant(create::<B>("bool_into_float", &device, out_dtype, make))
    }

    delegate! {
        fn bool_empty(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_zeros(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_ones(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self>;
        fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self>;
        fn bool_mask_select(tensor: BoolTensor<Self>, mask: BoolTensor<Self>) -> impl Future<Output = BoolTensor<Self>> + 'static + Send;
        fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> impl Future<Output = IntTensor<Self>> + 'static + Send;
    }

    bool_operations! { delegate }

    burn_amp_core::bool_operations! { delegate }
}
