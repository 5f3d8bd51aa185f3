//! Trials: which operations a device computes in half as exactly as half allows.
//!
//! Some kernels accumulate products in half, so that 4,096 ones sum to 2,048. Others compute a
//! function in half throughout and lose its last bits or its small results. An inexact operation
//! runs in FP32 on that device: operands are rounded to half first, and the result is half, so the
//! values are those of an exact device. An operation that could not be tried runs the same way.
//!
//! Other kernels compute in FP32 inside: what the policy widens needs no casts there. An operation
//! that is widened by its class runs in half where the trial shows it exact.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_amp_core::policy::{self, Class, HalfSupport, Support, same};
use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorData, try_read_sync};

/// A set of tried operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OpSet(u64);

impl OpSet {
    pub(crate) const NONE: Self = Self(0);

    /// The set of one named operation; empty if the operation is not tried.
    pub(crate) const fn of(name: &str) -> Self {
        let mut i = 0;
        while i < TRIED.len() {
            if same(TRIED[i], name) {
                return Self(1 << i);
            }
            i += 1;
        }
        Self::NONE
    }

    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }

    fn insert(&mut self, op: &str) {
        self.0 |= Self::of(op).0;
    }

    pub(crate) fn contains(self, op: Self) -> bool {
        self.0 & op.0 != 0
    }

    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
        TRIED
            .into_iter()
            .filter(move |op| self.contains(Self::of(op)))
    }
}

/// What the trials of a device found in one half dtype.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Found {
    /// Operations that the policy runs in half and that the device is not shown to compute exactly.
    pub inexact: OpSet,
    /// Operations that the policy widens and that the device computes exactly in half.
    pub native: OpSet,
}

/// Makes the operands of a trial.
struct TrialInputs<'a, B: Backend> {
    device: &'a B::Device,
    half: FloatDType,
    /// The dtype that the trial computes in: `half` or FP32.
    dtype: FloatDType,
}

impl<B: Backend> TrialInputs<'_, B> {
    fn ones<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(vec![1.0; shape.iter().product()], shape)
    }

    /// Ones, with 2,048 in the middle: from there, neither f16 nor bf16 can count in steps of one.
    /// For sums of few terms, in any order.
    fn peak<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        let mut values = vec![1.0; shape.iter().product()];
        let middle = values.len() / 2;
        values[middle] = 2048.0;
        self.values(values, shape)
    }

    /// Points at which precision is lost: near zero, at a bend and at the end of the range.
    fn points(&self) -> FloatTensor<B> {
        let points = [
            6.2e-5, -1e-3, 0.02, -0.1, 0.5, -1.0, 1.7, -3.0, 3.93, -7.0, 256.0, 60_000.0,
        ];
        self.values(points.to_vec(), [12])
    }

    /// Positive values of four orders of magnitude, in no order.
    fn varied<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        let count = shape.iter().product::<usize>();
        let fraction = |i: usize| (i as f32 * 0.618_034).fract();
        let values = (1..=count).map(|i| fraction(i) * 10f32.powi((i * i % 4) as i32 - 2));
        self.values(values.collect(), shape)
    }

    /// The end of f16's range, where a sum of two overflows.
    fn ends<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.values(vec![60_000.0; shape.iter().product()], shape)
    }

    /// Values spread evenly over a range.
    fn spread(&self, range: std::ops::RangeInclusive<f32>) -> FloatTensor<B> {
        let (from, to) = range.into_inner();
        let value = |i: usize| from + (to - from) * i as f32 / (SPREAD - 1) as f32;
        self.values((0..SPREAD).map(value).collect(), [SPREAD])
    }

    /// Values rounded to half, even if the trial computes in FP32.
    fn values<const D: usize>(&self, values: Vec<f32>, shape: [usize; D]) -> FloatTensor<B> {
        let values = B::float_from_data(TensorData::new(values, shape), self.device);
        B::float_cast(B::float_cast(values, self.half), self.dtype)
    }
}

type Trial<B> = fn(&TrialInputs<B>) -> FloatTensor<B>;

/// The tried operations, each with the arguments that try it.
macro_rules! trials {
    (|$make:ident| $($op:ident $(($($argument:expr),+))+;)*) => {
        const TRIED: [&str; [$(stringify!($op)),*].len()] = [$(stringify!($op)),*];

        struct Trials<B>(PhantomData<B>);

        impl<B: Backend> Trials<B> {
            const OF: [&'static [Trial<B>]; TRIED.len()] =
                [$(&[$(|$make| B::$op($($argument),+)),+]),*];
        }
    };
}

/// The number of terms in a sum: beyond what f16 (2,048) and bf16 (256) can count to.
const N: usize = 4096;
/// Enough values that two roundings show where one is allowed.
const SPREAD: usize = 512;

// One row selects a different kernel than many. So do few channels, and taps instead of channels.
#[rustfmt::skip]
trials! { |make|
    float_matmul
        (make.ones([1, N]), make.ones([N, 1]))
        (make.ones([1, N]), make.ones([N, 8]))
        (make.ones([8, N]), make.ones([N, 8]))
        (make.ones([2, 1, N]), make.ones([2, N, 8]));
    linear
        (make.ones([1, N]), make.ones([N, 8]), None)
        (make.ones([8, N]), make.ones([N, 8]), None);
    linear_x_backward
        (make.ones([8, N]), make.ones([1, N]))
        (make.ones([8, N]), make.ones([8, N]));
    linear_weight_backward
        (make.ones([N, 8]), make.ones([N, 8]))
        (make.ones([N, 1]), make.ones([N, 1]));
    conv1d
        (make.ones([1, N, 2]), make.ones([4, N, 1]), None, conv())
        (make.ones([1, 1, 64]), make.peak([1, 1, 64]), None, conv());
    conv1d_x_backward
        (make.ones([1, 4, 2]), make.ones([N, 4, 1]), make.ones([1, N, 2]), conv())
        (make.ones([1, 1, 127]), make.peak([1, 1, 64]), make.ones([1, 1, 64]), conv());
    conv1d_weight_backward
        (make.ones([2, 8, N / 2]), make.ones([8, 8, 1]), make.ones([2, 8, N / 2]), conv())
        (make.ones([2, 1, N / 2]), make.ones([1, 1, 1]), make.ones([2, 1, N / 2]), conv());
    conv2d
        (make.ones([1, N, 2, 2]), make.ones([4, N, 1, 1]), None, conv())
        (make.ones([1, 1, 8, 8]), make.peak([1, 1, 8, 8]), None, conv());
    conv2d_x_backward
        (make.ones([1, 4, 2, 2]), make.ones([N, 4, 1, 1]), make.ones([1, N, 2, 2]), conv())
        (make.ones([1, 1, 15, 15]), make.peak([1, 1, 8, 8]), make.ones([1, 1, 8, 8]), conv());
    conv2d_weight_backward
        (make.ones([4, 8, 32, 32]), make.ones([8, 8, 1, 1]), make.ones([4, 8, 32, 32]), conv())
        (make.ones([4, 1, 32, 32]), make.ones([1, 1, 1, 1]), make.ones([4, 1, 32, 32]), conv());
    conv3d
        (make.ones([1, N, 1, 2, 2]), make.ones([4, N, 1, 1, 1]), None, conv())
        (make.ones([1, 1, 4, 4, 4]), make.peak([1, 1, 4, 4, 4]), None, conv());
    conv3d_x_backward
        (make.ones([1, 4, 1, 2, 2]), make.ones([N, 4, 1, 1, 1]), make.ones([1, N, 1, 2, 2]), conv())
        (make.ones([1, 1, 7, 7, 7]), make.peak([1, 1, 4, 4, 4]), make.ones([1, 1, 4, 4, 4]), conv());
    conv3d_weight_backward
        (make.ones([1, 8, 16, 16, 16]), make.ones([8, 8, 1, 1, 1]), make.ones([1, 8, 16, 16, 16]), conv())
        (make.ones([1, 1, 16, 16, 16]), make.ones([1, 1, 1, 1, 1]), make.ones([1, 1, 16, 16, 16]), conv());
    conv_transpose1d
        (make.ones([1, N, 2]), make.ones([N, 4, 1]), None, transpose())
        (make.ones([1, 1, 64]), make.peak([1, 1, 64]), None, transpose());
    conv_transpose1d_x_backward
        (make.ones([4, N, 1]), make.ones([1, N, 2]), transpose())
        (make.peak([1, 1, 64]), make.ones([1, 1, 127]), transpose());
    conv_transpose1d_weight_backward
        (make.ones([2, 8, N / 2]), make.ones([8, 8, 1]), make.ones([2, 8, N / 2]), transpose())
        (make.ones([2, 1, N / 2]), make.ones([1, 1, 1]), make.ones([2, 1, N / 2]), transpose());
    conv_transpose2d
        (make.ones([1, N, 2, 2]), make.ones([N, 4, 1, 1]), None, transpose())
        (make.ones([1, 1, 8, 8]), make.peak([1, 1, 8, 8]), None, transpose());
    conv_transpose2d_x_backward
        (make.ones([4, N, 1, 1]), make.ones([1, N, 2, 2]), transpose())
        (make.peak([1, 1, 8, 8]), make.ones([1, 1, 15, 15]), transpose());
    conv_transpose2d_weight_backward
        (make.ones([4, 8, 32, 32]), make.ones([8, 8, 1, 1]), make.ones([4, 8, 32, 32]), transpose())
        (make.ones([4, 1, 32, 32]), make.ones([1, 1, 1, 1]), make.ones([4, 1, 32, 32]), transpose());
    conv_transpose3d
        (make.ones([1, N, 1, 2, 2]), make.ones([N, 4, 1, 1, 1]), None, transpose())
        (make.ones([1, 1, 4, 4, 4]), make.peak([1, 1, 4, 4, 4]), None, transpose());
    conv_transpose3d_x_backward
        (make.ones([4, N, 1, 1, 1]), make.ones([1, N, 1, 2, 2]), transpose())
        (make.peak([1, 1, 4, 4, 4]), make.ones([1, 1, 7, 7, 7]), transpose());
    conv_transpose3d_weight_backward
        (make.ones([1, 8, 16, 16, 16]), make.ones([8, 8, 1, 1, 1]), make.ones([1, 8, 16, 16, 16]), transpose())
        (make.ones([1, 1, 16, 16, 16]), make.ones([1, 1, 1, 1, 1]), make.ones([1, 1, 16, 16, 16]), transpose());
    float_tanh (make.points());
    gelu (make.points());
    float_atan (make.points());
    float_atan2 (make.points(), make.values(vec![256.0; 12], [12]));
    gelu_backward
        (make.points(), make.ones([12]))
        (make.spread(-6.0..=6.0), make.varied([SPREAD]));
    sigmoid_backward (make.spread(0.0..=1.0), make.varied([SPREAD]));
    log_sigmoid_backward
        (make.points(), make.ones([12]))
        (make.spread(-10.0..=10.0), make.varied([SPREAD]));
    float_sqrt (make.varied([64])) (make.ends([1]));
    layer_norm
        (make.varied([8, 256]), make.varied([256]), Some(make.varied([256])), 1e-5)
        (make.values((0..512).map(|i| i as f32 * 100.0).collect(), [1, 512]), make.ones([512]), None, 1e-5);
    avg_pool1d
        (make.varied([1, 2, N]), 64, 64, 0, true, false)
        (make.ones([1, 1, N]), N, N, 0, true, false)
        (make.ends([1, 1, 64]), 4, 4, 0, true, false);
    avg_pool2d
        (make.varied([1, 2, 64, 64]), [8, 8], [8, 8], [0, 0], true, false)
        (make.ones([1, 1, 64, 64]), [64, 64], [64, 64], [0, 0], true, false)
        (make.ends([1, 1, 8, 8]), [2, 2], [2, 2], [0, 0], true, false);
    avg_pool1d_backward
        (make.ones([1, 1, 127]), make.varied([1, 1, 64]), 64, 1, 0, true, false);
    avg_pool2d_backward
        (make.ones([1, 1, 15, 15]), make.varied([1, 1, 8, 8]), [8, 8], [1, 1], [0, 0], true, false);
    adaptive_avg_pool1d
        (make.varied([1, 2, N]), 64)
        (make.ones([1, 1, N]), 1)
        (make.ends([1, 1, 64]), 16);
    adaptive_avg_pool2d
        (make.varied([1, 2, 64, 64]), [8, 8])
        (make.ones([1, 1, 64, 64]), [1, 1])
        (make.ends([1, 1, 8, 8]), [4, 4]);
    adaptive_avg_pool1d_backward
        (make.ones([1, 1, 64]), make.varied([1, 1, 24]))
        (make.ones([1, 1, 1]), make.ones([1, 1, N]));
    adaptive_avg_pool2d_backward
        (make.ones([1, 1, 16, 16]), make.varied([1, 1, 12, 12]))
        (make.ones([1, 1, 1, 1]), make.ones([1, 1, 64, 64]));
    adaptive_avg_pool3d
        (make.varied([1, 2, 16, 16, 16]), [4, 4, 4])
        (make.ones([1, 1, 16, 16, 16]), [1, 1, 1])
        (make.ends([1, 1, 4, 4, 4]), [2, 2, 2]);
    adaptive_avg_pool3d_backward
        (make.ones([1, 1, 8, 8, 8]), make.varied([1, 1, 6, 6, 6]))
        (make.ones([1, 1, 1, 1, 1]), make.ones([1, 1, 16, 16, 16]));
}

fn conv<const D: usize>() -> ConvOptions<D> {
    ConvOptions::new([1; D], [0; D], [1; D], 1)
}

fn transpose<const D: usize>() -> ConvTransposeOptions<D> {
    ConvTransposeOptions::new([1; D], [0; D], [0; D], [1; D], 1)
}

/// What a device computes exactly in a half dtype. An operation whose trial panics or cannot be read
/// back is not shown to be exact.
pub(super) fn of<B: Backend>(device: &B::Device, half: DType, support: Support) -> Found {
    let (mut inexact, mut untried, mut native) = (OpSet::NONE, OpSet::NONE, OpSet::NONE);
    let arithmetic = support.of(half) == HalfSupport::Arithmetic;
    for (op, trials) in TRIED.into_iter().zip(Trials::<B>::OF) {
        let class = policy::class(op);
        // A device that only contracts in half computes no other operation in half.
        if !arithmetic && class != Class::LowerPrecision {
            continue;
        }
        let exact = || {
            let mut exact = trials.iter().map(|t| is_exact::<B>(*t, device, half));
            exact.try_fold(true, |all, exact| Some(all && exact?))
        };
        let found = catch_unwind(AssertUnwindSafe(exact)).unwrap_or(None);
        match (class == Class::Fp32Inside, found) {
            (true, Some(true)) => native.insert(op),
            (false, Some(false)) => inexact.insert(op),
            (false, None) => untried.insert(op),
            (false, Some(true)) | (true, Some(false) | None) => {}
        }
    }
    log_found::<B>(device, half, inexact, untried);
    Found {
        inexact: OpSet(inexact.0 | untried.0),
        native,
    }
}

/// Logs the result of a trial, once for each device and half dtype.
fn log_found<B: Backend>(device: &B::Device, half: DType, inexact: OpSet, untried: OpSet) {
    let (name, half) = (super::name::<B>(device), half.name());
    let listed = |ops: OpSet| ops.names().collect::<Vec<_>>().join(", ");
    if !inexact.is_none() {
        let ops = listed(inexact);
        log::info!(
            "burn-amp: {name} is not exact in {half} in {ops}: these compute in FP32 and give {half}"
        );
    }
    if !untried.is_none() {
        let ops = listed(untried);
        log::warn!(
            "burn-amp: {name} could not be tried in {half} in {ops}: the trial panicked, or its \
             result could not be read back. These compute in FP32 and give {half}"
        );
    }
}

/// Whether every value in half equals the rounded FP32 value. Allows 1.25 roundings, because FP32
/// is not exact either. `None` if the values cannot be read back.
fn is_exact<B: Backend>(trial: Trial<B>, device: &B::Device, half: DType) -> Option<bool> {
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
    let (half_values, expected) = (values(half)?, values(DType::F32)?);
    // 6e-8 is the smallest number of f16.
    let rounding = if half == DType::F16 { 11 } else { 8 };
    let relative = 1.25 * 2f32.powi(-rounding);
    let close = |(h, e): (&f32, &f32)| (h - e).abs() <= e.abs() * relative + 6e-8;
    Some(half_values.iter().zip(&expected).all(close))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in() {
        let mut set = OpSet::NONE;
        assert!(set.is_none() && !set.contains(OpSet::of("conv2d")));
        set.insert("conv2d");
        set.insert("no such operation");
        assert!(set.contains(OpSet::of("conv2d")) && !set.contains(OpSet::of("conv1d")));
        assert_eq!(set.names().collect::<Vec<_>>(), ["conv2d"]);
    }
}
