//! Quantized operations: the backend's own. Their float operands and float results are FP32.

use burn_backend::backend::ExecutionError;
use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{
    Backend, BoolDType, DeviceOps, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorPrimitive,
};

use crate::call::{Call, by_policy, create, delegate, delegate_on_device, float_ops, in_use, op};
use crate::precision::{half_wanted, in_kernel};
use crate::tensor::{Side, TensorFlags};
use crate::{Amp, AmpTensor};

/// Operations that return a quantized tensor or, if the scheme does not propagate, a float tensor.
macro_rules! dequantizing_ops {
    ($(fn $op:ident($($a:ident: $ty:ty),*);)*) => {$(
        fn $op($($a: $ty),*) -> TensorPrimitive<Self> {
            raised(in_kernel(|| B::$op($($a),*)))
        }
    )*};
}

impl<B: Backend, S: Side<B>> QTensorOps<Self> for Amp<B, S> {
    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let quantize = |tensor, scales| {
            B::quantize(tensor, scheme, QuantizationParametersPrimitive { scales })
        };
        if half_wanted() {
            by_policy(|| {
                let call = Call::new(op!(quantize), [&tensor, &qparams.scales]);
                let (tensor, scales) = (call.operand(tensor), call.operand(qparams.scales));
                call.run(|| quantize(tensor, scales))
            })
        } else {
            quantize(tensor.into_primitive(), qparams.scales.into_primitive())
        }
    }

    float_ops! {
        quantize_dynamic([tensor], scheme: &QuantScheme) -> QuantizedTensor;
    }

    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = B::q_device(&tensor);
        create(&device, dtype, |_, dtype| B::dequantize(tensor, dtype)).and(TensorFlags::LEARNED)
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::q_into_data(tensor).await
    }

    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        let lower = |tensor: TensorPrimitive<Self>| match tensor {
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
            TensorPrimitive::Float(tensor) => TensorPrimitive::Float(if half_wanted() {
                by_policy(|| Call::new(op!(q_matmul), [&tensor]).operand(tensor))
            } else {
                tensor.into_primitive()
            }),
        };
        let (lhs, rhs) = (lower(lhs), lower(rhs));
        raised(in_kernel(|| B::q_matmul(lhs, rhs)))
    }

    fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self> {
        in_use::<B, S>(device);
        B::q_from_data(data, device.inner())
    }

    delegate_on_device! {
        fn q_to_device(tensor: QuantizedTensor<Self>; device) -> QuantizedTensor<Self>;
    }

    delegate! {
        fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self>;
        fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self>;
        fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool;
    }

    burn_amp_core::quantized_operations! { delegate }

    burn_amp_core::dequantizing_operations! { dequantizing_ops }
}

/// Wraps a result of the backend below. What is quantized is a weight.
fn raised<B: Backend, S: Side<B>>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Amp<B, S>> {
    match tensor {
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        TensorPrimitive::Float(tensor) => {
            TensorPrimitive::Float(AmpTensor::new(tensor, TensorFlags::LEARNED))
        }
    }
}
