//! A device of Burn 0.21, for the trials of `burn-amp-core`.

use burn_amp_core::policy::HalfSupport;
use burn_amp_core::policy::trials::{TrialDevice, TriedOp};
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorData, try_read_sync};

/// Runs the trial of an operation in `half`. Returns whether the device is exact in the operation.
pub(super) fn tried<B: Backend>(
    device: &B::Device,
    half: DType,
    support: HalfSupport,
    op: TriedOp,
) -> bool {
    let or = " If the device is known to be exact in the operation, AmpConfig::with_trials(false) \
              runs it in half";
    op.tried(&Tried::<B>(device.clone()), half, support, or)
}

/// Whether Burn 0.21 has the operation.
pub(super) fn exists<B: Backend>(op: TriedOp) -> bool {
    !Tried::<B>::trials(op).is_empty()
}

struct Tried<B: Backend>(B::Device);

impl<B: Backend> TrialDevice for Tried<B> {
    type DType = DType;
    type Tensor = FloatTensor<B>;

    fn name(&self) -> String {
        super::name::<B>(&self.0)
    }

    fn tensor(&self, values: Vec<f32>, shape: Vec<usize>) -> FloatTensor<B> {
        B::float_from_data(TensorData::new(values, shape), &self.0)
    }

    fn cast(&self, tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
        B::float_cast(tensor, dtype.into())
    }

    fn read(&self, tensor: FloatTensor<B>) -> Option<Vec<f32>> {
        let data = try_read_sync(B::float_into_data(tensor))?.ok()?;
        Some(data.iter::<f32>().collect())
    }

    burn_amp_core::trials! { for Burn 0.21 }
}

fn conv<const D: usize>(stride: usize, groups: usize) -> ConvOptions<D> {
    ConvOptions::new([stride; D], [0; D], [1; D], groups)
}

fn transpose<const D: usize>(stride: usize, groups: usize) -> ConvTransposeOptions<D> {
    ConvTransposeOptions::new([stride; D], [0; D], [0; D], [1; D], groups)
}
