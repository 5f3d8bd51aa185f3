//! A half tensor as FP32 computes it. Burn's autodiff keeps the operands of a sigmoid and a hyperbolic tangent in the
//! client, so that they take no more memory here.

use std::sync::Arc;

use burn_amp_core::policy::{Function, Functions, SMALL};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, Scalar, TensorMetadata};

use super::converted;

/// The most steps, with moves.
const MOST: usize = 4 * Function::MOST;

/// Steps from a half tensor, in the order in which they were computed in half.
pub(crate) struct Unrounded<B: Backend> {
    operand: FloatTensor<B>,
    steps: Vec<Step<B>>,
}

#[derive(Clone)]
enum Step<B: Backend> {
    Function(Function),
    /// Brings values to another place.
    Move(Move<B>),
    /// Writes a scalar in places.
    Fill(BoolTensor<B>, Scalar),
}

type Move<B> = Arc<dyn Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync>;

impl<B: Backend> Unrounded<B> {
    /// Functions of a half tensor.
    pub(crate) fn of(operand: FloatTensor<B>, functions: &[Function]) -> Self {
        Self {
            operand,
            steps: functions.iter().copied().map(Step::Function).collect(),
        }
    }

    /// This step of the result. `None` if there are too many.
    fn then(&self, steps: impl IntoIterator<Item = Step<B>>) -> Option<Self> {
        let steps: Vec<_> = self.steps.iter().cloned().chain(steps).collect();
        let computed = steps.iter().filter(|step| !step.is_move()).count();
        (computed <= Function::MOST && steps.len() <= MOST).then(|| Self {
            operand: self.operand.clone(),
            steps,
        })
    }

    /// These functions of the result. `None` after too many steps.
    pub(crate) fn computed(&self, functions: &[Function]) -> Option<Self> {
        self.then(functions.iter().copied().map(Step::Function))
    }

    /// The result with a scalar in places. `None` after too many steps.
    pub(crate) fn filled(&self, mask: BoolTensor<B>, value: Scalar) -> Option<Self> {
        self.then([Step::Fill(mask, value)])
    }

    /// The result in another place, with this number of elements. `None` after too many steps.
    pub(crate) fn moved(
        &self,
        to: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
        elements: usize,
    ) -> Option<Self> {
        let is_filled = self.steps.iter().any(|step| matches!(step, Step::Fill(..)));
        let moved = self.then([Step::Move(Arc::new(to))])?;
        // A few values would keep the whole operand.
        let is_small = elements * SMALL <= self.operand.shape().num_elements();
        Some(match is_small && !is_filled {
            true => Self {
                operand: moved.at_place(moved.steps.len()),
                steps: moved
                    .steps
                    .into_iter()
                    .filter(|step| !step.is_move())
                    .collect(),
            },
            false => moved,
        })
    }

    pub(crate) fn functions(&self) -> Functions<impl Iterator<Item = &Function> + Clone> {
        Functions(self.steps.iter().filter_map(Step::function))
    }

    /// The operand after the moves among the first steps. Functions are computed element by element, so that they may wait.
    fn at_place(&self, steps: usize) -> FloatTensor<B> {
        let moves = self.steps[..steps].iter().filter(|step| step.is_move());
        moves.fold(self.operand.clone(), |operand, to| to.run(operand))
    }

    /// The values in a wide dtype, for the operation `op`. FP64 gets FP32's.
    pub(super) fn wide(&self, dtype: DType, op: &'static str) -> FloatTensor<B> {
        let is_fill = |step: &Step<B>| matches!(step, Step::Fill(..));
        let filled = self.steps.iter().position(is_fill);
        // A mask is not moved.
        let (before, after) = self.steps.split_at(filled.unwrap_or(self.steps.len()));
        let wide = converted::<B>(self.at_place(before.len()), DType::F32, op);
        let functions = before.iter().filter(|step| !step.is_move());
        let values = functions
            .chain(after)
            .fold(wide, |values, step| step.run(values));
        match dtype {
            DType::F32 => values,
            _ => converted::<B>(values, dtype, op),
        }
    }
}

impl<B: Backend> Step<B> {
    fn is_move(&self) -> bool {
        matches!(self, Self::Move(_))
    }

    fn function(&self) -> Option<&Function> {
        match self {
            Self::Function(function) => Some(function),
            Self::Move(_) | Self::Fill(..) => None,
        }
    }

    fn run(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Function(function) => burn_amp_core::computed!(B, function, tensor),
            Self::Move(to) => to(tensor),
            Self::Fill(mask, value) => B::float_mask_fill(tensor, mask.clone(), *value),
        }
    }
}
