//! The decorator as a backend: [`Amp`] is a backend wherever `B` is one.

use burn_backend::backend::{Backend, BackendTypes, DTypeUsageSet, ExecutionError};
use burn_backend::tensor::Device;
use burn_backend::{DType, DeviceOps, TensorData};

use crate::call::{assert_one_autodiff, delegate, delegate_on_device, ends_pass};
use crate::precision::creating_parameter;
use crate::tensor::Side;
use crate::{Amp, AmpTensor};

#[cfg(feature = "distributed")]
mod distributed;
mod ir;

impl<B: Backend, S: Side<B>> BackendTypes for Amp<B, S> {
    type Device = B::Device;

    type FloatTensorPrimitive = AmpTensor<B, S>;
    type FloatElem = B::FloatElem;

    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;

    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;

    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend, S: Side<B>> Backend for Amp<B, S> {
    /// Depends only on the type of `B`. A device that enables autodiff by itself, such as one of
    /// `DispatchDevice::autodiff`, is used without its autodiff:
    /// [`AmpAutodiff`](crate::AmpAutodiff) has its own, and one tape is enough.
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device.inner())
    }

    /// `func` creates a parameter: Burn calls this for nothing else.
    fn memory_persistent_allocations<
        Output: Send,
        Input: Send,
        Func: Fn(Input) -> Output + Send,
    >(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output {
        let func = move |input| creating_parameter(|| func(input));
        B::memory_persistent_allocations(device.inner(), input, func)
    }

    fn name(device: &Self::Device) -> String {
        format!("amp<{}>", B::name(device.inner()))
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device.inner())
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        ends_pass::<B, S>(|| device.inner().clone());
        B::sync(device.inner())
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        let device = device.inner();
        assert_one_autodiff::<B, S>(device);
        B::dtype_usage(device, dtype)
    }

    delegate_on_device! {
        fn memory_cleanup(; device);
        fn seed(; device, seed: u64);
        fn supports_dtype(; device, dtype: DType) -> bool;
    }

    delegate! {
        fn device_count(type_id: u16) -> usize;
    }
}
