//! A half tensor as FP32 computes it: what reads a half tensor in FP32 may need digits that half has rounded away, as the
//! logarithm of one minus a sigmoid does.

use std::sync::Arc;

use super::{Class, Decision, Effect, Op, Operand, TensorFlags};
use crate::FloatDType;
use crate::dtype::is_half;

/// A function of each element: one that half rounds near a bound or in a sum, or one that may stand between two of those.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Function {
    /// A sigmoid.
    Sigmoid,
    /// A hyperbolic tangent.
    Tanh,
    /// The sum with a scalar.
    Plus(f64),
    /// The product with a scalar.
    Times(f64),
    /// The quotient by a scalar. A product with its reciprocal would be another number.
    Over(f64),
    /// The negative.
    Neg,
    /// At least a bound that half holds exactly.
    AtLeast(f64),
    /// At most a bound that half holds exactly.
    AtMost(f64),
}

impl Function {
    /// The most functions that are computed again.
    pub const MOST: usize = 8;

    /// A scalar up to this is an epsilon: beside it, no digits of a number are lost that matter.
    const EPSILON: f64 = 1e-3;

    /// A factor from this on may take a number beyond f16.
    const LARGE: f64 = 128.0;

    /// A factor so near to 1 may be 1 in bf16.
    const NEAR: f64 = 1.0 / 256.0;

    /// Whether half may round away what is left of a small number, or make it infinite.
    pub fn rounds(self) -> bool {
        let takes = |factor: f64| {
            let factor = factor.abs();
            factor >= Self::LARGE || factor != 1.0 && (factor - 1.0).abs() < Self::NEAR
        };
        match self {
            Self::Sigmoid | Self::Tanh => true,
            Self::Plus(scalar) => scalar.abs() > Self::EPSILON,
            Self::Times(factor) => takes(factor),
            Self::Over(divisor) => takes(divisor.recip()),
            Self::Neg | Self::AtLeast(_) | Self::AtMost(_) => false,
        }
    }
}

/// Functions of a half tensor, in the order in which they were computed in half.
#[derive(Debug, Clone, Copy)]
pub struct Functions<I>(pub I);

impl<'a, I: Iterator<Item = &'a Function> + Clone> Functions<I> {
    fn any(&self, is: impl Fn(&Function) -> bool) -> bool {
        self.0.clone().any(is)
    }

    /// Whether a scalar was added: nothing may be left of a small number.
    pub fn is_sum(&self) -> bool {
        self.any(|function| matches!(function, Function::Plus(_)))
    }

    /// Whether a number that f16 holds may be beyond f16 after them.
    pub fn leave_f16(&self) -> bool {
        self.leave(2.0, 1024.0)
    }

    /// Whether one of them is a product with more than this factor, or a sum with more than this scalar.
    fn leave(&self, most: f64, added: f64) -> bool {
        self.any(|function| match *function {
            Function::Times(factor) => factor.abs() > most,
            Function::Over(divisor) => divisor.abs() < most.recip(),
            Function::Plus(scalar) => scalar.abs() > added,
            _ => false,
        })
    }

    /// Whether a sigmoid is computed again.
    pub fn is_sigmoid(&self) -> bool {
        self.any(|function| *function == Function::Sigmoid)
    }

    /// The flags of the FP32 values of a half tensor beside another sigmoid: those of a gate, if the values are not much larger
    /// than 1.
    pub fn flags<D: FloatDType>(&self, half: D) -> TensorFlags {
        match self.is_gate() {
            true => TensorFlags::fits(half) | TensorFlags::GATE,
            false => TensorFlags::empty(),
        }
    }

    /// Whether it is computed to a number that is not much larger than 1.
    fn is_gate(&self) -> bool {
        self.is_sigmoid() && !self.leave(1.0, 1.0)
    }
}

/// How FP32 computes a half tensor: steps from a half operand, in the order in which half computed them. `T` is the operand, and
/// `M` the mask of a fill.
#[derive(Clone)]
pub struct Unrounded<T, M> {
    operand: T,
    /// To the place of the values. A step is computed element by element, so that it may wait.
    moves: Vec<Move<T>>,
    steps: Vec<Step<T, M>>,
}

/// A step of FP32. Values with a step that has a tensor are not moved: the tensor would have to go along.
#[derive(Clone)]
pub enum Step<T, M> {
    /// A function of each element.
    Function(Function),
    /// Writes a scalar in places.
    Fill(M, f64),
    /// The product with an FP32 constant.
    Mask(T),
}

/// Brings values to another place.
type Move<T> = Arc<dyn Fn(T) -> T + Send + Sync>;

impl<T: Clone, M: Clone> Unrounded<T, M> {
    /// The most moves that wait until FP32 reads the values.
    const MOVES: usize = 16;

    /// The result of functions of a half tensor, of which this is `known`. `None` if half rounds in none of them.
    pub fn after(
        known: Option<&Self>,
        functions: &[Function],
        operand: impl FnOnce() -> T,
    ) -> Option<Self> {
        match known {
            Some(known) => Some(known.computed(functions)),
            None => {
                let rounds = functions.iter().any(|function| function.rounds());
                rounds.then(|| Self::of(operand(), functions))
            }
        }
    }

    fn of(operand: T, functions: &[Function]) -> Self {
        Self {
            operand,
            moves: Vec::new(),
            steps: functions.iter().copied().map(Step::Function).collect(),
        }
    }

    /// Whether so many more steps are remembered. Otherwise the values go on in FP32.
    pub fn has_room(&self, steps: usize) -> bool {
        self.steps.len() + steps <= Function::MOST
    }

    fn computed(&self, functions: &[Function]) -> Self {
        self.then(functions.iter().copied().map(Step::Function))
    }

    /// The result with a scalar in places.
    pub fn filled(&self, mask: M, value: f64) -> Self {
        self.then([Step::Fill(mask, value)])
    }

    /// The result times an FP32 constant.
    pub fn masked(&self, mask: T) -> Self {
        self.then([Step::Mask(mask)])
    }

    fn then(&self, steps: impl IntoIterator<Item = Step<T, M>>) -> Self {
        let mut result = self.clone();
        result.steps.extend(steps);
        debug_assert!(result.has_room(0), "{} steps", result.steps.len());
        result
    }

    /// The result in another place, of values whose steps are functions. `to` runs where FP32 reads the values, unless there are many
    /// moves, or it runs `now`, as for a few values that would keep this whole operand.
    pub fn moved(
        &self,
        to: impl Fn(T) -> T + Send + Sync + 'static,
        now: impl FnOnce(&T) -> bool,
    ) -> Self {
        debug_assert!(!self.has_tensors(), "a mask is not moved");
        let mut moved = self.clone();
        moved.moves.push(Arc::new(to));
        match moved.moves.len() > Self::MOVES || now(&self.operand) {
            true => moved.elsewhere(|tensor| tensor, |mask| mask),
            false => moved,
        }
    }

    /// Whether a step has a tensor.
    pub fn has_tensors(&self) -> bool {
        self.steps.iter().any(Step::has_tensor)
    }

    /// The same steps of what `map` makes of the operand, in the same place.
    pub fn map(&self, map: impl FnOnce(T) -> T) -> Self {
        Self {
            operand: map(self.operand.clone()),
            ..self.clone()
        }
    }

    /// The same steps of what `tensor` makes of the operand in its last place, and of each constant, with what `mask` makes of
    /// each mask.
    pub fn elsewhere<U, N>(
        &self,
        tensor: impl Fn(T) -> U,
        mask: impl Fn(M) -> N,
    ) -> Unrounded<U, N> {
        let steps = self.steps.iter().cloned().map(|step| match step {
            Step::Function(function) => Step::Function(function),
            Step::Fill(places, value) => Step::Fill(mask(places), value),
            Step::Mask(constant) => Step::Mask(tensor(constant)),
        });
        Unrounded {
            steps: steps.collect(),
            operand: tensor(self.at_place()),
            moves: Vec::new(),
        }
    }

    /// The functions among the steps.
    pub fn functions(&self) -> Functions<impl Iterator<Item = &Function> + Clone> {
        Functions(self.steps.iter().filter_map(Step::function))
    }

    /// The operand in the place of the values, and the functions that are computed of it, if these are all steps.
    pub fn of_operand(&self) -> Option<(T, Vec<Function>)> {
        let functions = || self.functions().0.copied().collect();
        (!self.has_tensors()).then(|| (self.at_place(), functions()))
    }

    /// The operand in the place of the values, if they and these functions are one less a sigmoid: half computes the sigmoid of
    /// the negative, since of a small difference of half numbers near 1 no digit would be right.
    pub fn one_less_sigmoid(&self, functions: &[Function]) -> Option<T> {
        let steps = self.functions().0.chain(functions);
        let is_one_less = steps.eq(&[Function::Sigmoid, Function::Neg, Function::Plus(1.0)]);
        (is_one_less && !self.has_tensors()).then(|| self.at_place())
    }

    /// The operand in the place of the values.
    fn at_place(&self) -> T {
        let moves = self.moves.iter();
        moves.fold(self.operand.clone(), |operand, to| to(operand))
    }

    /// The values in FP32. `computed` computes functions of a half tensor, and `step` the steps of an FP32 one, from the first with
    /// a tensor on.
    pub fn values(
        &self,
        computed: impl FnOnce(T, Vec<Function>) -> T,
        step: impl Fn(T, &Step<T, M>) -> T,
    ) -> T {
        let first = self.steps.iter().position(Step::has_tensor);
        let (before, after) = self.steps.split_at(first.unwrap_or(self.steps.len()));
        let functions = before.iter().filter_map(Step::function).copied().collect();
        after
            .iter()
            .fold(computed(self.at_place(), functions), step)
    }
}

impl<T, M> Step<T, M> {
    fn has_tensor(&self) -> bool {
        self.function().is_none()
    }

    fn function(&self) -> Option<&Function> {
        match self {
            Self::Function(function) => Some(function),
            Self::Fill(..) | Self::Mask(_) => None,
        }
    }
}

/// Whether two tensors are sigmoids, of which half rounds one: `true` says that FP32 computes a half sigmoid again. Half would
/// keep nothing of a small difference or product.
pub fn are_sigmoids<D: FloatDType>(tensors: [(bool, Operand<D>); 2]) -> bool {
    let is_gate = |of: &Operand<D>| of.dtype == D::F32 && of.has(TensorFlags::GATE);
    tensors.iter().any(|(is_half, _)| *is_half)
        && tensors.iter().all(|(is_half, of)| *is_half || is_gate(of))
}

/// A [`Function`] of a tensor on a backend, in the tensor's dtype.
#[doc(hidden)]
#[macro_export]
macro_rules! computed {
    ($backend:ty, $function:expr, $tensor:expr) => {
        match *$function {
            $crate::policy::Function::Sigmoid => <$backend>::sigmoid($tensor),
            $crate::policy::Function::Tanh => <$backend>::float_tanh($tensor),
            $crate::policy::Function::Plus(scalar) => {
                <$backend>::float_add_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Times(scalar) => {
                <$backend>::float_mul_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Over(scalar) => {
                <$backend>::float_div_scalar($tensor, scalar.into())
            }
            $crate::policy::Function::Neg => <$backend>::float_neg($tensor),
            // With one bound, Flex 0.21 makes a number of NaN.
            $crate::policy::Function::AtLeast(bound) => {
                <$backend>::float_clamp($tensor, bound.into(), f64::INFINITY.into())
            }
            $crate::policy::Function::AtMost(bound) => {
                <$backend>::float_clamp($tensor, f64::NEG_INFINITY.into(), bound.into())
            }
        }
    };
}

impl<D: FloatDType> Decision<D> {
    /// The decision on an operation whose first operand, of this dtype, FP32 computes again: `first` are the functions. `all` is
    /// whether it computes each operand again.
    pub fn reading<'a>(
        mut self,
        op: &Op,
        dtype: D,
        first: Functions<impl Iterator<Item = &'a Function> + Clone>,
        all: bool,
    ) -> Self {
        let is_inside = op.class() == Class::Fp32Inside;
        let reads = match op.effect {
            // Values that differ in FP32 may be equal in half. Beside a half tensor, half is compared with half.
            Effect::Ranks => all,
            Effect::Reads | Effect::Reduces | Effect::FindsLargest => true,
            // Activations are pooled in half: FP32 would stay on the tape.
            Effect::Pools => first.is_sigmoid(),
            // A root may be that of a small number. f16 holds its square less well.
            Effect::Roots => first.is_sum() || first.is_sigmoid(),
            _ => is_inside && first.is_sum(),
        };
        // A configuration may ask for half.
        let is_asked = self.rounded.or(self.operands).is_some_and(is_half);
        if reads && self.is_in_half && !is_asked {
            self.operands = Some(D::F32);
            if first.leave_f16() {
                self.flags -= TensorFlags::FITS_F16;
            }
            // The root of a small sigmoid may be below f16. As a factor, it follows half.
            let is_small = op.effect == Effect::Roots && first.is_sigmoid();
            self.result = (is_inside && !is_small).then_some(dtype);
            if is_small {
                self.flags |= first.flags(dtype);
            }
        }
        self
    }

    /// The decision on a quotient in the half dtype `half` whose divisor FP32 computes again: it may be 0 in half.
    pub fn dividing(mut self, half: D) -> Self {
        if self.is_in_half && self.rounded.or(self.operands).is_none() {
            self.operands = Some(D::F32);
            self.result = Some(half);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type OfList = Unrounded<Vec<f64>, Vec<bool>>;

    /// The values of a list.
    fn values(of: &OfList) -> Vec<f64> {
        let compute = |function: &Function, list: Vec<f64>| -> Vec<f64> {
            let of = |x: f64| match *function {
                Function::Neg => -x,
                Function::Plus(scalar) => x + scalar,
                _ => unreachable!("no other is used here"),
            };
            list.into_iter().map(of).collect()
        };
        let all = |list, functions: Vec<_>| {
            let functions = functions.iter();
            functions.fold(list, |list, function| compute(function, list))
        };
        of.values(all, |list, step| match step {
            Step::Function(function) => compute(function, list),
            Step::Fill(mask, value) => {
                let places = list.into_iter().zip(mask);
                places
                    .map(|(x, fill)| if *fill { *value } else { x })
                    .collect()
            }
            Step::Mask(mask) => list
                .into_iter()
                .zip(mask)
                .map(|(x, factor)| x * factor)
                .collect(),
        })
    }

    fn reversed(mut list: Vec<f64>) -> Vec<f64> {
        list.reverse();
        list
    }

    #[test]
    fn steps_are_computed_in_their_order() {
        let plus = OfList::of(vec![1.0, 2.0, 4.0], &[Function::Plus(1.0)]);
        let moved = plus.moved(reversed, |_| false);
        assert_eq!(moved.operand, [1.0, 2.0, 4.0]);
        let filled = moved.filled(vec![true, false, false], 8.0);
        let filled = filled.computed(&[Function::Neg]);
        assert_eq!(values(&filled), [-8.0, -3.0, -2.0]);
        assert_eq!(values(&filled.map(|_| vec![0.0; 3])), [-8.0, -1.0, -1.0]);
        let elsewhere = filled.elsewhere(|list| list, |mask| mask);
        assert_eq!(elsewhere.operand, [4.0, 2.0, 1.0]);
        assert_eq!(values(&elsewhere), values(&filled));
        let masked = filled.masked(vec![0.0, 1.0, 0.5]);
        assert_eq!(values(&masked), [0.0, -3.0, -1.0]);
        let doubled = |list: Vec<f64>| list.into_iter().map(|x| 2.0 * x).collect::<Vec<_>>();
        assert_eq!(
            values(&masked.elsewhere(doubled, |mask| mask)),
            [0.0, -10.0, -3.0]
        );
        assert!(filled.has_tensors() && masked.has_tensors() && !moved.has_tensors());
    }

    #[test]
    fn a_few_values_do_not_keep_the_operand() {
        let plus = OfList::of(vec![1.0, 2.0, 4.0], &[Function::Plus(1.0)]);
        let first = plus.moved(|list| vec![list[0]], |list| list.len() > 2);
        assert_eq!((&first.operand, values(&first)), (&vec![1.0], vec![2.0]));
    }

    #[test]
    fn so_many_steps_are_remembered() {
        let mut functions = OfList::of(vec![1.0], &[]);
        for moves in 1..100 {
            functions = functions.moved(reversed, |_| false);
            assert!(functions.moves.len() <= OfList::MOVES, "{moves}");
        }
        for _ in 0..Function::MOST {
            assert!(functions.has_room(1));
            functions = functions.computed(&[Function::Neg]);
        }
        assert_eq!(values(&functions), [1.0]);
        assert!(!functions.has_room(1));
    }

    #[test]
    fn what_is_known_of_functions() {
        let functions = [Function::Sigmoid, Function::Plus(1.0)];
        assert!(Functions(functions.iter()).is_sum() && Functions(functions.iter()).is_sigmoid());
        assert!(!Functions([Function::Tanh].iter()).is_sigmoid());
        assert!(Functions(functions.iter()).is_gate());
        for large in [
            Function::Times(640.0),
            Function::Over(0.01),
            Function::Plus(-3.0),
        ] {
            assert!(!Functions([Function::Sigmoid, large].iter()).is_gate());
        }
        let functions = [
            Function::Sigmoid,
            Function::Tanh,
            Function::Plus(-0.25),
            Function::Times(40_000.0),
            Function::Times(1.0 - 1e-4),
            Function::Over(-1e-3),
            Function::Over(1.001),
        ];
        assert!(functions.into_iter().all(Function::rounds));
        let leaves = [
            Function::Times(40_000.0),
            Function::Over(-1e-3),
            Function::Plus(2048.0),
        ];
        assert!(leaves.iter().all(|of| Functions([*of].iter()).leave_f16()));
        let stays = [
            Function::Times(2.0),
            Function::Over(8.0),
            Function::Plus(-1.0),
        ];
        assert!(!Functions(stays.iter()).leave_f16());
        // An epsilon, a factor, a change of sign and a bound lose nothing that half held.
        let others = [
            Function::Plus(1e-6),
            Function::Times(2.0),
            Function::Times(-1.0),
            Function::Over(3.0),
            Function::Over(1000.0),
            Function::Neg,
            Function::AtLeast(0.0),
            Function::AtMost(1.0),
        ];
        assert!(!others.into_iter().any(Function::rounds));
    }
}
