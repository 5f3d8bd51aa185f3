//! [`Amp`] as a backend that runs Burn's intermediate representation, as a `burn-remote` server
//! does.

use burn_backend::Backend;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_ir::{BackendIr, HandleKind, TensorHandle};

use crate::Amp;
use crate::tensor::{Side, TensorFlags};

/// A handle is the tensor itself. A client treats every float tensor as FP32, and data read back is
/// FP32. A client's parameters are not known here: every tensor counts as learned.
impl<B: Backend, S: Side<B>> BackendIr for Amp<B, S> {
    burn_amp_core::ir_handles! {
        "Use the same version of Burn in the client and the server",
        |tensor: FloatTensor<Self>| tensor.and(TensorFlags::LEARNED)
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::{DType, Shape, TensorMetadata};

    use super::*;

    type B = Amp<burn::backend::Flex>;

    fn of(handle: HandleKind<B>) -> TensorHandle<HandleKind<B>> {
        let shape = Shape::new([2]);
        TensorHandle { handle, shape }
    }

    #[test]
    fn a_tensor_of_each_kind_comes_back_from_its_handle() {
        use burn_backend::QTensorPrimitive;
        use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps, QTensorOps};
        use burn_backend::quantization::QuantizationParametersPrimitive;

        let (device, shape) = (Default::default(), || Shape::new([2]));
        let float = B::float_ones(shape(), &device, burn_backend::FloatDType::F32);
        let scale = B::float_ones(Shape::new([1]), &device, burn_backend::FloatDType::F32);
        let scheme = <B as burn_backend::BackendTypes>::QuantizedTensorPrimitive::default_scheme();
        let scales = QuantizationParametersPrimitive { scales: scale };
        let quantized = B::quantize(float.clone(), &scheme, scales);
        let int = B::int_ones(shape(), &device, burn_backend::IntDType::I32);
        let boolean = B::bool_zeros(shape(), &device, burn_backend::BoolDType::Native);

        let float = B::float_tensor(of(B::float_tensor_handle(float)));
        assert_eq!(float.dtype(), DType::F32);
        let int = B::int_tensor(of(B::int_tensor_handle(int)));
        assert_eq!(int.dtype(), DType::I32);
        let boolean = B::bool_tensor(of(B::bool_tensor_handle(boolean)));
        assert!(boolean.dtype().is_bool());
        let quantized = B::quantized_tensor(of(B::quantized_tensor_handle(quantized)));
        assert!(matches!(quantized.dtype(), DType::QFloat(_)));
    }

    /// As a server has it: weights and data of a client look alike.
    #[test]
    fn what_a_client_names_is_learned() {
        use burn_backend::ops::FloatTensorOps;

        let float = || {
            let ones = B::float_ones(
                Shape::new([2, 2]),
                &Default::default(),
                burn_backend::FloatDType::F32,
            );
            let shape = Shape::new([2, 2]);
            B::float_tensor(TensorHandle {
                handle: B::float_tensor_handle(ones),
                shape,
            })
        };
        crate::with_precision(crate::Precision::Bf16, || {
            assert_eq!(B::float_matmul(float(), float()).dtype(), DType::BF16);
        });
    }

    #[test]
    #[should_panic(expected = "an operation on int tensors was given the handle of a float tensor")]
    fn a_handle_of_another_kind_is_refused() {
        use burn_backend::ops::FloatTensorOps;

        let dtype = burn_backend::FloatDType::F32;
        let float = B::float_ones(Shape::new([2]), &Default::default(), dtype);
        B::int_tensor(of(B::float_tensor_handle(float)));
    }
}
