//! Quantized operations: the backend's own. Their float operands and float results are FP32.

use burn_backend::backend::ExecutionError;
use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{
    Backend, BoolDType, DeviceOps, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
};

use super::tensor::create;
use super::{Call, by_policy, delegate, delegate_on_device, float_ops, op};
use crate::autodiff::tape::registered;
use crate::precision::half_wanted;
use crate::{Amp, AmpTensor};

/// Operations that return a quantized tensor or, if the scheme does not propagate, a float tensor.
macro_rules! dequantizing_ops {
    ($(fn $op:ident($($a:ident: $ty:ty),*);)*) => {$(
        fn $op($($a: $ty),*) -> TensorPrimitive<Self> {
            raised(B::$op($($a),*))
        }
    )*};
}

impl<B: Backend> QTensorOps<Self> for Amp<B> {
    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let quantize = |tensor, scales| {
            B::quantize(tensor, scheme, QuantizationParametersPrimitive { scales })
        };
        match half_wanted() {
            false => quantize(tensor.into_primitive(), qparams.scales.into_primitive()),
            true => by_policy(|| {
                let call = Call::new(op!(quantize), [&tensor, &qparams.scales]);
                let (tensor, scales) = (call.operand(tensor), call.operand(qparams.scales));
                call.run(|| quantize(tensor, scales))
            }),
        }
    }

    float_ops! {
        quantize_dynamic([tensor], scheme: &QuantScheme) -> QuantizedTensor;
    }

    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = B::q_device(&tensor);
        create(&device, dtype, |_, dtype| B::dequantize(tensor, dtype))
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::q_into_data(tensor).await
    }

    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        let lower = |tensor: TensorPrimitive<Self>| match tensor {
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(match half_wanted() {
                false => tensor.into_primitive(),
                true => by_policy(|| Call::new(op!(q_matmul), [&tensor]).operand(tensor)),
            }),
        };
        raised(B::q_matmul(lower(lhs), lower(rhs)))
    }

    dequantizing_ops! {
        fn q_add(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
        fn q_add_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
        fn q_clamp_min(tensor: QuantizedTensor<Self>, min: Scalar);
        fn q_clamp_max(tensor: QuantizedTensor<Self>, max: Scalar);
        fn q_clamp(tensor: QuantizedTensor<Self>, min: Scalar, max: Scalar);
        fn q_sub(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
        fn q_sub_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
        fn q_mul(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
        fn q_mul_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
        fn q_div(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
        fn q_div_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
        fn q_powf(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
        fn q_powi(lhs: QuantizedTensor<Self>, rhs: IntTensor<Self>);
        fn q_powi_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
        fn q_powf_scalar(tensor: QuantizedTensor<Self>, value: Scalar);
        fn q_sum_dim(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_prod_dim(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_mean_dim(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_cumsum(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_cumprod(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_cummin(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_cummax(tensor: QuantizedTensor<Self>, dim: usize);
        fn q_neg(tensor: QuantizedTensor<Self>);
        fn q_recip(tensor: QuantizedTensor<Self>);
        fn q_sum(tensor: QuantizedTensor<Self>);
        fn q_prod(tensor: QuantizedTensor<Self>);
        fn q_mean(tensor: QuantizedTensor<Self>);
        fn q_exp(tensor: QuantizedTensor<Self>);
        fn q_log(tensor: QuantizedTensor<Self>);
        fn q_log1p(tensor: QuantizedTensor<Self>);
        fn q_sqrt(tensor: QuantizedTensor<Self>);
        fn q_cos(tensor: QuantizedTensor<Self>);
        fn q_sin(tensor: QuantizedTensor<Self>);
        fn q_tan(tensor: QuantizedTensor<Self>);
        fn q_cosh(tensor: QuantizedTensor<Self>);
        fn q_sinh(tensor: QuantizedTensor<Self>);
        fn q_tanh(tensor: QuantizedTensor<Self>);
        fn q_erf(tensor: QuantizedTensor<Self>);
    }

    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> {
        registered::<B>(device);
        B::q_from_data(data, device.inner())
    }

    delegate_on_device! {
        fn q_to_device(tensor: QuantizedTensor<Self>; device) -> QuantizedTensor<Self>;
    }

    delegate! {
        fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self>;
        fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self>;
        fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool;
        fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
        fn q_transpose(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self>;
        fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
        fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self>;
        fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
        fn q_repeat_dim(tensor: QuantizedTensor<Self>, dim: usize, times: usize) -> QuantizedTensor<Self>;
        fn q_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_cat(tensors: Vec<QuantizedTensor<Self>>, dim: usize) -> QuantizedTensor<Self>;
        fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_argtopk(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_topk(tensor: QuantizedTensor<Self>, dim: usize, k: usize) -> QuantizedTensor<Self>;
        fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
        fn q_max(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_max_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_min(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_min_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_max_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_max_abs_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
        fn q_any(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_any_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_all_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self>;
        fn q_sort_with_indices(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_argsort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self>;
    }
}

/// Wraps a result of the backend below.
fn raised<B: Backend>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Amp<B>> {
    match tensor {
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(AmpTensor::plain(tensor)),
    }
}
