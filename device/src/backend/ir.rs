//! [`Amp`] as a backend that runs Burn's intermediate representation, as a server does.

use burn_backend::Backend;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_ir::{BackendIr, HandleKind, TensorHandle};

use super::Amp;
use crate::device::Session;

/// A handle is the tensor itself, with the client's dtype: data read back has this dtype.
impl<B: Backend, P: Session> BackendIr for Amp<B, P> {
    burn_amp_core::ir_handles! {
        "The feature `fusion` of Burn's client, which its feature `vision` enables, causes this: turn `fusion` off in the \
         client. Otherwise use the same version of Burn in client and server",
        ::core::convert::identity
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps, QTensorOps};
    use burn_backend::{BoolDType, DType, FloatDType, IntDType, Shape, TensorMetadata};
    use burn_dispatch::{backends::Flex, devices::FlexDevice};

    use super::*;

    type B = Amp<Flex>;

    fn of(handle: HandleKind<B>) -> TensorHandle<HandleKind<B>> {
        let shape = Shape::new([2]);
        TensorHandle { handle, shape }
    }

    #[test]
    fn a_tensor_of_each_kind_comes_back_from_its_handle() {
        let shape = || Shape::new([2]);
        let float = B::float_ones(shape(), &FlexDevice, FloatDType::F32);
        let int = B::int_ones(shape(), &FlexDevice, IntDType::I32);
        let boolean = B::bool_zeros(shape(), &FlexDevice, BoolDType::Native);
        let quantized = Flex::quantize_dynamic(
            Flex::float_ones(Shape::new([2, 32]), &FlexDevice, FloatDType::F32),
            &Default::default(),
        );

        let float = B::float_tensor(of(B::float_tensor_handle(float)));
        assert_eq!(float.dtype(), DType::F32);
        let int = B::int_tensor(of(B::int_tensor_handle(int)));
        assert_eq!(int.dtype(), DType::I32);
        let boolean = B::bool_tensor(of(B::bool_tensor_handle(boolean)));
        assert!(boolean.dtype().is_bool());
        let quantized = B::quantized_tensor(of(B::quantized_tensor_handle(quantized)));
        assert!(matches!(quantized.dtype(), DType::QFloat(_)));
    }

    #[test]
    #[should_panic(expected = "an operation on int tensors was given the handle of a float tensor")]
    fn a_handle_of_another_kind_is_refused() {
        let float = B::float_ones(Shape::new([2]), &FlexDevice, FloatDType::F32);
        B::int_tensor(of(B::float_tensor_handle(float)));
    }
}
