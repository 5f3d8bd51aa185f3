//! Quantized operations, which go to the backend. Their float operands and float results are FP32.

use burn_backend::ops::QTensorOps;
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{
    Backend, BoolDType, ExecutionError, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata, TensorPrimitive,
};

use super::float::create;
use super::{Call, delegate, float_ops, op};
use crate::device::{Session, enter};
use crate::tensor::Marks;
use crate::{Amp, AmpTensor};

/// Operations that return a quantized tensor or, if the scheme does not propagate, a float tensor.
macro_rules! dequantizing_ops {
    ($(fn $op:ident($($a:ident: $ty:ty),*);)*) => {$(
        fn $op($($a: $ty),*) -> TensorPrimitive<Self> {
            raised(B::$op($($a),*))
        }
    )*};
}

impl<B: Backend, P: Session> QTensorOps<Self> for Amp<B, P> {
    fn quantize(
        tensor: FloatTensor<Self>,
        scheme: &QuantScheme,
        qparams: QuantizationParametersPrimitive<Self>,
    ) -> QuantizedTensor<Self> {
        let _session = enter::<P>();
        let call = Call::new(op!(quantize), [&tensor]);
        // Scales have their own dtype, which the scheme sets.
        let own = |scale: AmpTensor<B>| scale.into_declared("quantize").into_primitive();
        let qparams = QuantizationParametersPrimitive {
            scales: own(qparams.scales),
            global: qparams.global.map(own),
        };
        B::quantize(call.operand(tensor), scheme, qparams)
    }

    float_ops! {
        quantize_dynamic([tensor], scheme: &QuantScheme) -> QuantizedTensor;
    }

    fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let device = tensor.device();
        create::<B>("dequantize", &device, dtype, |dtype| {
            B::dequantize(tensor, dtype)
        })
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        B::q_into_data(tensor).await
    }

    fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self> {
        let _session = enter::<P>();
        let lower = |tensor: TensorPrimitive<Self>| match tensor {
            TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
            TensorPrimitive::Float(tensor) => {
                let call = Call::new(op!(q_matmul), [&tensor]);
                TensorPrimitive::Float(call.operand(tensor))
            }
        };
        let marks = |tensor: &TensorPrimitive<Self>| match tensor {
            TensorPrimitive::QFloat(_) => None,
            TensorPrimitive::Float(tensor) => Some(tensor.marks()),
        };
        let marks = Marks::of([&lhs, &rhs].into_iter().filter_map(marks));
        match raised(B::q_matmul(lower(lhs), lower(rhs))) {
            TensorPrimitive::Float(product) => TensorPrimitive::Float(product.with_marks(marks)),
            quantized => quantized,
        }
    }

    delegate! {
        fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self>;
        fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self>;
        fn q_topk_with_indices(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
        fn q_detach(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
        fn q_set_require_grad(tensor: QuantizedTensor<Self>, require_grad: bool) -> QuantizedTensor<Self>;
        fn q_is_require_grad(tensor: &QuantizedTensor<Self>) -> bool;
    }

    burn_amp_core::quantized_operations! { delegate }

    burn_amp_core::dequantizing_operations! { dequantizing_ops }
}

/// Wraps a result of the backend below.
fn raised<B: Backend, P: Session>(tensor: TensorPrimitive<B>) -> TensorPrimitive<Amp<B, P>> {
    match tensor {
        TensorPrimitive::QFloat(tensor) => TensorPrimitive::QFloat(tensor),
        TensorPrimitive::Float(tensor) => TensorPrimitive::Float(AmpTensor::plain(tensor)),
    }
}
