//! `Checked`: a backend over another one, Flex by default, that checks each operation: its operands
//! must have one device and one float dtype, which the device must support for that operation. It
//! counts operations by dtype, casts, and reads of data.

mod call;
mod ops;
mod registry;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Flex;
use burn_amp::AmpConfig;
use burn_backend::backend::{Backend, BackendTypes, DTypeUsageSet};
use burn_backend::quantization::QuantScheme;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{DType, QTensorPrimitive, Shape, TensorMetadata};

pub use call::{CONTRACTIONS, is_contraction};
pub use registry::{Casts, CheckedDevice, Counts, Fault, Reads, Wrong};

/// A configuration without trials: Flex is not exact in f16 in some operations, so trials would move
/// these to FP32.
pub fn config() -> AmpConfig {
    AmpConfig::new().with_trials(false).with_data_in_half(true)
}

/// The backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct Checked<B = Flex>(PhantomData<B>);

impl<B: Backend> BackendTypes for Checked<B> {
    type Device = CheckedDevice;

    type FloatTensorPrimitive = CheckedTensor<B>;
    type FloatElem = B::FloatElem;

    type IntTensorPrimitive = CheckedInt<B>;
    type IntElem = B::IntElem;

    type BoolTensorPrimitive = CheckedBool<B>;
    type BoolElem = B::BoolElem;

    type QuantizedTensorPrimitive = CheckedQ<B>;
}

impl<B: Backend> Backend for Checked<B> {
    fn name(device: &CheckedDevice) -> String {
        device.name().into()
    }

    fn seed(device: &CheckedDevice, seed: u64) {
        device.seed(seed);
    }

    fn dtype_usage(device: &CheckedDevice, dtype: DType) -> DTypeUsageSet {
        device
            .usage(dtype)
            .unwrap_or_else(|| B::dtype_usage(&B::Device::default(), dtype))
    }

    fn device_count(_type_id: u16) -> usize {
        1
    }
}

/// A float tensor. Clones keep its id, as they share its buffer.
#[derive(Debug, Clone)]
pub struct CheckedTensor<B: Backend = Flex> {
    pub inner: FloatTensor<B>,
    pub device: CheckedDevice,
    pub id: u64,
}

impl<B: Backend> CheckedTensor<B> {
    pub fn new(inner: FloatTensor<B>, device: CheckedDevice) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Self {
            inner,
            device,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        }
    }
}

/// Tensors of the other kinds, each with its device.
macro_rules! tensors {
    ($($name:ident: $inner:ty),*) => {$(
        #[derive(Debug, Clone)]
        pub struct $name<B: Backend = Flex> {
            inner: $inner,
            device: CheckedDevice,
        }

        impl<B: Backend> $name<B> {
            fn new(inner: $inner, device: CheckedDevice) -> Self {
                Self { inner, device }
            }
        }
    )*};
}

tensors! {
    CheckedInt: IntTensor<B>,
    CheckedBool: BoolTensor<B>,
    CheckedQ: QuantizedTensor<B>
}

macro_rules! metadata {
    ($($name:ident),*) => {$(
        impl<B: Backend> TensorMetadata for $name<B> {
            fn dtype(&self) -> DType {
                self.inner.dtype()
            }

            fn shape(&self) -> Shape {
                self.inner.shape()
            }
        }
    )*};
}

metadata!(CheckedTensor, CheckedInt, CheckedBool, CheckedQ);

impl<B: Backend> QTensorPrimitive for CheckedQ<B> {
    fn scheme(&self) -> &QuantScheme {
        self.inner.scheme()
    }

    fn default_scheme() -> QuantScheme {
        QuantizedTensor::<B>::default_scheme()
    }
}
