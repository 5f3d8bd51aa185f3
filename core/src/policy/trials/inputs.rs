//! The operands of a trial.

use std::ops::RangeInclusive;

use super::TrialDevice;
use crate::FloatDType;

/// The number of terms in a sum: beyond what f16 (2,048) and bf16 (256) can count to.
pub const N: usize = 4096;
/// Enough values to detect two roundings where one is allowed.
pub const SPREAD: usize = 512;
/// A scalar that both half dtypes round by nearly as much as they can: to 1.0078 in bf16, by 2^-11 in f16.
pub const ROUNDED: f64 = 1.0 + 0.00390625 + 0.00048828125;

/// Points at which precision is lost: near zero, at a bend and at the end of the range.
const POINTS: [f32; 12] = [
    6.2e-5, -1e-3, 0.02, -0.1, 0.5, -1.0, 1.7, -3.0, 3.93, -7.0, 256.0, 60_000.0,
];

/// Makes the operands of a trial.
pub struct TrialInputs<'a, D: TrialDevice> {
    pub(super) device: &'a D,
    pub(super) half: D::DType,
    /// The dtype that the trial computes in: `half` or FP32.
    pub(super) dtype: D::DType,
}

impl<D: TrialDevice> TrialInputs<'_, D> {
    /// These values, rounded to half even if the trial computes in FP32.
    pub fn values<const R: usize>(&self, values: Vec<f32>, shape: [usize; R]) -> D::Tensor {
        let values = self.device.tensor(values, shape.into());
        let rounded = self.device.cast(values, self.half);
        self.device.cast(rounded, self.dtype)
    }

    /// Ones.
    pub fn ones<const R: usize>(&self, shape: [usize; R]) -> D::Tensor {
        self.values(vec![1.0; shape.iter().product()], shape)
    }

    /// A convolution's weight: a large value in the middle, from which half cannot count in steps of one, and values that
    /// sum to one over the second dimension. For sums of few terms, in any order, also where a kernel sums over channels
    /// before it adds up in half.
    pub fn peak<const R: usize>(&self, shape: [usize; R]) -> D::Tensor {
        let mut values = vec![1.0 / shape[1] as f32; shape.iter().product()];
        let middle = values.len() / 2;
        values[middle] = if self.half == D::DType::F16 {
            2048.0
        } else {
            256.0
        };
        self.values(values, shape)
    }

    /// Twelve points at which precision is lost.
    pub fn points(&self) -> D::Tensor {
        self.values(POINTS.into(), [POINTS.len()])
    }

    /// Positive values of four orders of magnitude, in no order.
    pub fn varied<const R: usize>(&self, shape: [usize; R]) -> D::Tensor {
        let fraction = |i: usize| (i as f32 * 0.618_034).fract();
        let value = |i: usize| fraction(i) * 10f32.powi((i * i % 4) as i32 - 2);
        let count = shape.iter().product();
        self.values((1..=count).map(value).collect(), shape)
    }

    /// The end of f16's range, where a sum of two values overflows.
    pub fn ends<const R: usize>(&self, shape: [usize; R]) -> D::Tensor {
        self.values(vec![60_000.0; shape.iter().product()], shape)
    }

    /// Values spread evenly over a range.
    pub fn spread(&self, range: RangeInclusive<f32>) -> D::Tensor {
        let (from, to) = range.into_inner();
        let value = |i: usize| from + (to - from) * i as f32 / (SPREAD - 1) as f32;
        self.values((0..SPREAD).map(value).collect(), [SPREAD])
    }
}
