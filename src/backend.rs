//! The decorator itself: [`Amp`] is a backend wherever `B` is one.

use std::marker::PhantomData;

use burn_backend::backend::{Backend, BackendTypes, DTypeUsageSet, ExecutionError};
use burn_backend::{DType, TensorData};

use crate::AmpTensor;
use crate::autodiff::tape;
use crate::qualification;

/// Automatic mixed precision on a backend.
///
/// Each operation runs in the precision that the [policy](crate::policy) gives it: contractions in
/// f16 or bf16, what is sensitive in FP32. Parameters, gradients and data that leaves are FP32.
/// Operations on F64 tensors alone, and on integer and boolean ones, are `B`'s own, and so are the
/// devices. A float tensor is an [`AmpTensor`].
///
/// For inference use `Amp<B>`; for training [`AmpAutodiff<B>`](crate::AmpAutodiff).
#[derive(Debug, Clone, Copy, Default)]
pub struct Amp<B> {
    backend: PhantomData<B>,
}

impl<B: Backend> BackendTypes for Amp<B> {
    type Device = B::Device;

    type FloatTensorPrimitive = AmpTensor<B>;
    type FloatElem = B::FloatElem;

    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;

    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;

    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

impl<B: Backend> Backend for Amp<B> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }

    fn memory_persistent_allocations<
        Output: Send,
        Input: Send,
        Func: Fn(Input) -> Output + Send,
    >(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output {
        B::memory_persistent_allocations(device, input, func)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device)
    }

    fn name(device: &Self::Device) -> String {
        format!("amp<{}>", B::name(device))
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed)
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device)
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device)
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        // The upper layer asks this, through an autodiff whose tape only this one can name.
        tape::register::<B>();
        qualification::register::<B>(device);
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}
