//! Integer operations, which go to the backend unchanged.

use std::ops::Range;

use burn_backend::ops::IntTensorOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor};
use burn_backend::{
    Backend, BoolDType, Distribution, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice,
    TensorData, TensorMetadata,
};
use burn_std::ops::PadMode;

use super::delegate;
use super::float::create;
use crate::Amp;
use crate::device::Session;

impl<B: Backend, P: Session> IntTensorOps<Self> for Amp<B, P> {
    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::int_into_data(tensor).await
    }

    fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self> {
        let device = tensor.device();
        create::<B>("int_into_float", &device, out_dtype, |dtype| {
            B::int_into_float(tensor, dtype)
        })
    }

    delegate! {
        fn int_empty(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_from_data(data: TensorData, device: &Device<Self>) -> IntTensor<Self>;
        fn int_to_device(tensor: IntTensor<Self>, device: &Device<Self>) -> IntTensor<Self>;
        fn int_mask_select(tensor: IntTensor<Self>, mask: BoolTensor<Self>) -> impl Future<Output = IntTensor<Self>> + 'static + Send;
        fn int_scatter(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>, value: IntTensor<Self>, update: IndexingUpdateOp) -> IntTensor<Self>;
        fn int_select_assign(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>, value: IntTensor<Self>, update: IndexingUpdateOp) -> IntTensor<Self>;
        fn int_square(tensor: IntTensor<Self>) -> IntTensor<Self>;
        fn int_zeros(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_ones(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_topk_with_indices(tensor: IntTensor<Self>, dim: usize, k: usize) -> (IntTensor<Self>, IntTensor<Self>);
        fn int_random(shape: Shape, distribution: Distribution, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange(range: Range<i64>, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_pad(tensor: IntTensor<Self>, padding: &[(usize, usize)], mode: PadMode) -> IntTensor<Self>;
    }

    burn_amp_core::int_operations! { delegate }
}
