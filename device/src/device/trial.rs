//! Tries a device: which operations it computes in half as exactly as half allows.

use std::marker::PhantomData;
use std::ops::RangeInclusive;

use burn_amp_core::policy::Support;
use burn_amp_core::policy::trials::{self, N, POINTS, SPREAD, TriedOp};
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorData, try_read_sync};

/// Makes the operands of a trial.
struct TrialInputs<'a, B: Backend> {
    device: &'a B::Device,
    half: FloatDType,
    /// The dtype that the trial computes in: `half` or FP32.
    dtype: FloatDType,
}

impl<B: Backend> TrialInputs<'_, B> {
    fn ones<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(trials::ones(shape.iter().product()), shape)
    }

    fn peak<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(trials::peak(shape.iter().product()), shape)
    }

    fn points(&self) -> FloatTensor<B> {
        self.values(POINTS.to_vec(), [POINTS.len()])
    }

    fn varied<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(trials::varied(shape.iter().product()), shape)
    }

    fn ends<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(trials::ends(shape.iter().product()), shape)
    }

    fn spread(&self, range: RangeInclusive<f32>) -> FloatTensor<B> {
        self.values(trials::spread(range), [SPREAD])
    }

    /// Values rounded to half, even if the trial computes in FP32.
    fn values<const D: usize>(&self, values: Vec<f32>, shape: [usize; D]) -> FloatTensor<B> {
        let values = B::float_from_data(TensorData::new(values, shape), self.device);
        B::float_cast(B::float_cast(values, self.half), self.dtype)
    }
}

type Trial<B> = fn(&TrialInputs<B>) -> FloatTensor<B>;

struct Trials<B>(PhantomData<B>);

macro_rules! tried {
    (|$make:ident| $($op:ident $(($($argument:expr),+))+;)*) => {
        impl<B: Backend> Trials<B> {
            /// The tried operations, each with its trials.
            const OF: &'static [(&'static str, &'static [Trial<B>])] =
                &[$((stringify!($op), &[$(|$make| B::$op($($argument),+)),+])),*];
        }
    };
}

burn_amp_core::trials_0_22! { tried, |make| }

fn conv<const D: usize>() -> ConvOptions<D> {
    ConvOptions::new([1; D], [0; D], [1; D], 1)
}

fn transpose<const D: usize>() -> ConvTransposeOptions<D> {
    ConvTransposeOptions::new([1; D], [0; D], [0; D], [1; D], 1)
}

/// Whether a device computes an operation exactly in a half dtype.
pub(super) fn is_exact<B: Backend>(
    device: &B::Device,
    half: DType,
    support: Support,
    op: TriedOp,
) -> bool {
    let mut all = Trials::<B>::OF.iter();
    let (_, trials) = all
        .find(|(name, _)| *name == op.name())
        .expect("its trials");
    let trials = trials
        .iter()
        .map(|trial| computes_exactly::<B>(op, *trial, device, half));
    let names = [&*super::name::<B>(device), half.name()];
    op.tried(support.of(half), trials, names, "")
}

/// Whether the device computes a trial exactly. `None` if the values cannot be read back.
fn computes_exactly<B: Backend>(
    op: TriedOp,
    trial: Trial<B>,
    device: &B::Device,
    half: DType,
) -> Option<bool> {
    let values = |dtype: DType| {
        let (half, dtype) = (half.into(), dtype.into());
        let inputs = TrialInputs {
            device,
            half,
            dtype,
        };
        let result = B::float_cast(trial(&inputs), FloatDType::F32);
        let data = try_read_sync(B::float_into_data(result))?.ok()?;
        Some(data.iter::<f32>().collect::<Vec<_>>())
    };
    Some(trials::is_exact(
        op.name(),
        half,
        &values(half)?,
        &values(DType::F32)?,
    ))
}
