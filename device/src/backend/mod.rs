//! The decorator as a backend: [`Amp`] is a backend wherever `B` is one.

use std::marker::PhantomData;

use burn_backend::{
    Backend, BackendGraph, BackendTypes, DType, DTypeUsageSet, ExecutionError, MemoryPoolUsage,
    ProfileDuration, ProfileOptions, ProfileToken, SlicedPoolReport, TensorData,
};

use crate::AmpTensor;
use crate::device::{OfDevice, Session};
use crate::ops::delegate;

mod ir;

/// Automatic mixed precision on a backend.
///
/// Each operation runs in the precision that the [policy](crate::policy) gives it: contractions in f16 or
/// bf16, sensitive operations in FP32. Operations on only F64 tensors, and on integer and boolean tensors, go
/// to `B` unchanged. The devices are `B`'s devices. A float tensor is an [`AmpTensor`].
///
/// [`configure`](crate::configure) sets the precision of a device. In FP32 every operation gives `B`'s own
/// result, bit for bit. `P` is only for this crate: write `Amp<B>`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Amp<B, P = OfDevice> {
    backend: PhantomData<(B, P)>,
}

impl<B: Backend, P: Session> BackendTypes for Amp<B, P> {
    type Device = B::Device;

    type FloatTensorPrimitive = AmpTensor<B>;
    type IntTensorPrimitive = B::IntTensorPrimitive;
    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;

    type GraphPrimitive = B::GraphPrimitive;
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend, P: Session> Backend for Amp<B, P> {
    fn name(device: &Self::Device) -> String {
        format!("amp<{}>", B::name(device))
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

    fn profile<O: Send + 'static>(
        device: &Self::Device,
        options: ProfileOptions,
        func: impl FnOnce() -> O + Send,
    ) -> Result<(O, ProfileDuration), ExecutionError> {
        B::profile(device, options, func)
    }

    unsafe fn graph_replay(
        device: &Self::Device,
        graph: &BackendGraph<Self>,
    ) -> Result<(), ExecutionError> {
        // Safety: as the caller's.
        unsafe { B::graph_replay(device, graph) }
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device)
    }

    delegate! {
        fn ad_enabled(device: &Self::Device) -> bool;
        fn memory_cleanup(device: &Self::Device);
        fn memory_pool_report(device: &Self::Device) -> Option<Vec<SlicedPoolReport>>;
        #[cfg(feature = "burn-0-23")]
        fn memory_capacity(device: &Self::Device) -> Option<u64>;
        fn memory_pool_usage(device: &Self::Device) -> Option<MemoryPoolUsage>;
        fn seed(device: &Self::Device, seed: u64);
        fn sync(device: &Self::Device) -> Result<(), ExecutionError>;
        fn flush(device: &Self::Device) -> Result<(), ExecutionError>;
        fn profile_start(device: &Self::Device) -> Result<Option<ProfileToken>, ExecutionError>;
        fn profile_end(device: &Self::Device, token: ProfileToken, options: ProfileOptions) -> Result<ProfileDuration, ExecutionError>;
        fn profile_abandon(device: &Self::Device, token: ProfileToken);
        fn graph_prepare(device: &Self::Device) -> Result<(), ExecutionError>;
        fn graph_start_capture(device: &Self::Device) -> Result<(), ExecutionError>;
        fn graph_stop_capture(device: &Self::Device) -> Result<BackendGraph<Self>, ExecutionError>;
        fn supports_dtype(device: &Self::Device, dtype: DType) -> bool;
        fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet;
        fn device_count(type_id: u16) -> usize;
    }
}
