//! The FP32 values of a half gradient, computed again where they are read. Independent of individual
//! operations.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::{AmpTensor, at_least_f32};
use crate::precision::in_kernel;

/// An element-wise operation on tensors of one shape, which returns FP32.
///
/// A kernel that reads the values computes them from half operands: with fusion, no FP32 values are
/// written.
pub(crate) struct Formula<B: Backend> {
    operands: [AmpTensor<B>; 2],
    run: fn([FloatTensor<B>; 2]) -> FloatTensor<B>,
}

impl<B: Backend> Formula<B> {
    pub fn new(
        operands: [&AmpTensor<B>; 2],
        run: fn([FloatTensor<B>; 2]) -> FloatTensor<B>,
    ) -> Self {
        // If an operand has FP32 values itself, the operation reads those.
        let operands = operands.map(|t| t.wide().map_or_else(|| t.unshared(), AmpTensor::plain));
        Self { operands, run }
    }

    pub fn operands(&self) -> [&AmpTensor<B>; 2] {
        self.operands.each_ref()
    }

    /// The values, in the shape of the operands.
    pub fn values(&self) -> FloatTensor<B> {
        self.of(self.operands().map(AmpTensor::unshared))
    }

    /// The values, for these operands in another shape.
    pub fn of(&self, operands: [AmpTensor<B>; 2]) -> FloatTensor<B> {
        let operands = operands.map(|t| at_least_f32::<B>(t.into_primitive()));
        in_kernel(|| (self.run)(operands))
    }
}
