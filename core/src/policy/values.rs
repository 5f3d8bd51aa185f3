//! What the policy knows of a tensor, and what an operation makes of it: an abstract interpretation of the program,
//! one operation at a time.
//!
//! Each flag is a lattice of two. *Unknown* is above *known*, and operands of which one is unknown are unknown together:
//!
//! | flag | it says | unknown | together |
//! |---|---|---|---|
//! | `GRADIENT`, `BACKWARD` | may be a gradient | set | any operand |
//! | `FROM_F16`, `USED_IN_HALF` | may depend on f16, on a parameter that is cast | set | any operand |
//! | `LEARNED` | may depend on a parameter | set | any operand |
//! | `DEMOTED` | may be half by the policy's decision | set | any operand that is not the user's own half |
//! | `FILLED` | may hold a scalar that half rounded | set | any operand |
//! | `UNBOUNDED` | may be of any size, although a gradient flows to it | set | any operand in FP32 |
//! | `FITS_F16`, `FITS_BF16` | fits in this half dtype | unset | all operands, by the column `fits` |
//! | `CONSTANT`, `ONES`, `WEIGHT` | follows half, is one, is a half weight | unset | all operands |
//! | `GATE` | is a sigmoid in FP32 that fits in half | unset | all operands |
//! | `STATE` | is FP32 zeros or infinities, or what a recurrence made of them | unset | by the operation |
//! | terms | how many gradients a half gradient is the sum of, or how many half values FP32 that fits | more | their sum |
//!
//! `BINARY`, `DRAWN`, `DROPPED` and `EXACT_*` are known of a new tensor only. What each class passes on stands in
//! [`of_any`] and [`of_all`]. A scalar, a cast or the operation's effect may add a fact or take it away:
//! [`Request::facts`].

use super::decision::{Operand, Request, Site};
use super::{Class, Effect, Fits, Mode, TensorFlags};
use crate::FloatDType;
use crate::dtype::{follows_half, holds, holds_exactly, is_half};

/// The most terms of a sum in half. Autodiff adds up the gradients of a tensor in the tensor's dtype, and a
/// sum of many half numbers stops growing. With this limit, a sum has the error of at most this many terms.
pub const TERMS: u8 = 16;

/// The most half values that FP32 that fits in f16 may be the sum of: as many branches as a block of a network adds up. A
/// sum of more may be beyond f16, whose range each of them may take.
const BRANCHES: u8 = 4;

/// A tracked operand that is this many times smaller than the other operand is a statistic or a parameter of
/// the other's channels.
pub const SMALL: usize = 16;

/// The flags that every result has if any operand has them.
pub(super) const KEPT: TensorFlags = TensorFlags::GRADIENT
    .union(TensorFlags::FROM_F16)
    .union(TensorFlags::BACKWARD)
    .union(TensorFlags::USED_IN_HALF)
    .union(TensorFlags::LEARNED);

/// The flags that a result of this class has if any operand has them.
fn of_any(class: Class) -> TensorFlags {
    match class {
        Class::Move | Class::Keep | Class::Promote => KEPT | TensorFlags::FILLED,
        _ => KEPT,
    }
}

/// The flags that a result of this class has if all operands have them. Moved, or in arithmetic with others alone, a
/// weight stays one.
fn of_all(class: Class) -> TensorFlags {
    match class {
        Class::Move => TensorFlags::WEIGHT | TensorFlags::CONSTANT | TensorFlags::ONES,
        Class::Keep | Class::Promote | Class::PromoteSum => TensorFlags::WEIGHT,
        Class::LowerPrecision | Class::Fp32 | Class::Fp32Inside | Class::Activation => {
            TensorFlags::empty()
        }
    }
}

impl<D: FloatDType, S: Site<D>> Request<'_, D, S> {
    /// The flags of the result, of an operation of this class on operands that are `cast` to this dtype.
    pub(super) fn facts(&self, class: Class, cast: Option<D>) -> TensorFlags {
        let computed = cast.unwrap_or(self.operands[0].dtype);
        let all = self.operands.iter().map(|o| o.flags);
        let all = all.fold(TensorFlags::all(), TensorFlags::intersection);
        let mut flags = self.any & of_any(class) | all & of_all(class);
        if cast == Some(D::F16) {
            flags |= TensorFlags::FROM_F16;
        }
        if self.op.effect == Effect::IsSigmoid {
            flags -= TensorFlags::WEIGHT | TensorFlags::FILLED;
        }
        let is_own = |o: &Operand<D>| is_half(o.dtype) && !o.is_demoted();
        let is_demoted = !flags.contains(TensorFlags::WEIGHT) && !self.operands.iter().all(is_own);
        flags.set(TensorFlags::DEMOTED, is_demoted);
        // Padding adds a constant of its own.
        if !self.scalars.iter().all(|scalar| follows_half::<D>(*scalar)) {
            flags -= TensorFlags::CONSTANT | TensorFlags::ONES;
        }
        let is_rounded = |scalar: &f64| !holds_exactly(computed, *scalar);
        if self.op.effect == Effect::Fills && self.scalars.iter().any(is_rounded) {
            flags |= TensorFlags::FILLED;
        }
        if !is_half(computed) {
            flags -= TensorFlags::FILLED;
        }
        flags.set(TensorFlags::UNBOUNDED, self.is_unbounded(class));
        for half in D::HALVES {
            let fits = self.is_held(half) && self.fits(half, class);
            flags.set(TensorFlags::fits(half), fits);
        }
        let fits_in_fp32 = computed == D::F32 && flags.intersects(TensorFlags::FITS);
        flags.set(TensorFlags::GATE, fits_in_fp32 && self.is_gate(class));
        flags.set(TensorFlags::STATE, self.is_state(class, computed));
        flags
    }

    /// Whether the result is the state of a recurrence: a half factor, or a gate, times zeros or a state; the sum of a state and a
    /// half tensor; or a state in another place, masked or within bounds.
    fn is_state(&self, class: Class, computed: D) -> bool {
        let is_fp32 = computed == D::F32 && self.mode != Mode::Off && self.changed.is_none();
        if !is_fp32 || !self.any.contains(TensorFlags::STATE) {
            return false;
        }
        const MASKS: TensorFlags = TensorFlags::CONSTANT.union(TensorFlags::BINARY);
        let is_zeros = |o: &Operand<D>| o.is_state() && o.has(TensorFlags::CONSTANT);
        let has_begun = || self.operands.iter().any(|o| o.is_state() && !is_zeros(o));
        let is_held =
            |o: &Operand<D>| is_half(o.dtype) || o.is_state() || o.has(TensorFlags::CONSTANT);
        let is_factor = |o: &&Operand<D>| {
            let is_mask = || o.flags.intersects(MASKS) && has_begun();
            !o.is_state() && (is_half(o.dtype) || o.has(TensorFlags::GATE) || is_mask())
        };
        match self.op.effect {
            Effect::Multiplies => self.operands.iter().filter(is_factor).count() == 1,
            Effect::Scales | Effect::Divides => has_begun() && !self.leaves_f16(),
            Effect::Fills => {
                let is_within = |scalar: &f64| scalar.abs() <= 1.0 && follows_half::<D>(*scalar);
                has_begun() && self.scalars.iter().all(is_within)
            }
            _ if class == Class::PromoteSum => has_begun() && self.operands.iter().all(is_held),
            Effect::Negates
            | Effect::Other
            | Effect::Assigns
            | Effect::Reshapes
            | Effect::Transposes => {
                let is_same = matches!(class, Class::Move | Class::Promote | Class::Keep);
                is_same && self.op.fits() == Fits::WithOperands && self.operands.iter().all(is_held)
            }
            _ => false,
        }
    }

    /// Whether the result is a sigmoid, the sum or product of two, or one in another place or subtracted from a scalar.
    fn is_gate(&self, class: Class) -> bool {
        match self.op.effect {
            Effect::IsSigmoid => true,
            Effect::Negates | Effect::Shifts | Effect::Adds | Effect::Multiplies => {
                self.are_gates()
            }
            _ => self.are_gates() && class == Class::Move,
        }
    }

    fn are_gates(&self) -> bool {
        self.operands.iter().all(|o| o.has(TensorFlags::GATE))
    }

    /// The number of gradients in the result: in a sum; in a view of a sum, as the backward pass of a reshape is; or in a
    /// multiple of a sum, such as the momentum of an optimizer, whose gradients are half: the momentum becomes FP32
    /// after a few steps. In FP32 that fits in f16, the half values that the result is the sum of. 1 for any other result.
    pub(super) fn terms(&self, class: Class, fits: bool) -> u8 {
        let is_same = self.is_multiple() || class == Class::Move;
        let first = &self.operands[0];
        match self.summed() {
            Some(terms) if class == Class::PromoteSum && terms <= TERMS => terms,
            None if is_same && self.may_be_gradient(first) => first.terms,
            _ if fits => self.branches(),
            _ => 1,
        }
    }

    /// How many times as large as a half value the result may be, of operands that fit. A row or a column beside an operand,
    /// such as the shift of a norm, moves its values within their range, and a quotient is normalized.
    fn branches(&self) -> u8 {
        let branches = || self.operands.iter().map(|o| o.terms);
        let largest = branches().max().unwrap_or(1);
        let doubles = |scalar: &f64| self.factor(*scalar).abs() > 1.0;
        match self.op.fits() {
            Fits::Quotient => 1,
            Fits::Sum if !self.has_small_operand() => branches().fold(0, u8::saturating_add),
            _ if self.is_multiple() && self.scalars.iter().any(doubles) => {
                largest.saturating_mul(2)
            }
            _ => largest,
        }
    }

    /// Asks for sizes only where it has to: most sums are of two half tensors.
    fn are_few_branches(&self) -> bool {
        let all = self.operands.iter().map(|o| o.terms);
        all.fold(0, u8::saturating_add) <= BRANCHES / 2 || self.branches() <= BRANCHES
    }

    fn has_small_operand(&self) -> bool {
        let [_, _] = self.operands else {
            return false;
        };
        self.is_small(0, 1) || self.is_small(1, 0)
    }

    /// Whether an operand is small beside another one, by their places.
    pub(super) fn is_small(&self, operand: usize, beside: usize) -> bool {
        self.site.elements(operand) * SMALL <= self.site.elements(beside)
    }

    /// Whether the result is the operand times a number.
    fn is_multiple(&self) -> bool {
        matches!(self.op.effect, Effect::Scales | Effect::Divides)
    }

    /// A scalar as a factor.
    fn factor(&self, scalar: f64) -> f64 {
        match self.op.effect {
            Effect::Divides => 1.0 / scalar,
            _ => scalar,
        }
    }

    /// Whether a factor may take values of the range of f16 far beyond it. Twice the range is allowed, as for a
    /// sum: a dropout of one half doubles.
    fn leaves_f16(&self) -> bool {
        let leaves = |scalar: &f64| self.factor(*scalar).abs() > 2.0;
        self.is_multiple() && self.scalars.iter().any(leaves)
    }

    /// Whether an operand is FP32 data of the user's, or was computed from such data, or a scalar takes the
    /// result beyond the half dtype in force. A parameter is not data: its values are taken to be moderate. Where
    /// the policy is off, any FP32 operand counts as data.
    fn is_unbounded(&self, class: Class) -> bool {
        const BOUNDED: TensorFlags = TensorFlags::FITS
            .union(TensorFlags::CONSTANT)
            .union(TensorFlags::STATE)
            .union(TensorFlags::BINARY)
            .union(TensorFlags::EXACT_F16)
            .union(TensorFlags::EXACT_BF16);
        let is_fp32 = |o: &Operand<D>| o.dtype == D::F32 && !o.flags.intersects(BOUNDED);
        let half = match self.mode {
            Mode::On(half) if class != Class::LowerPrecision => half,
            Mode::Off => return self.operands.iter().any(is_fp32),
            Mode::On(_) | Mode::KeepDtypes => return false,
        };
        let is_beyond = |scalar: &f64| {
            let factor = self.factor(*scalar);
            factor.abs() > 1.0 && !holds(half, factor)
        };
        let is_data = |i, o: &Operand<D>| {
            o.has(TensorFlags::UNBOUNDED) || self.site.is_tracked(i) == Some(false)
        };
        let mut operands = self.operands.iter().enumerate();
        operands.any(|(i, o)| is_fp32(o) && is_data(i, o)) || self.scalars.iter().any(is_beyond)
    }

    /// Whether the result fits in `half`, where `half` holds the scalars.
    fn fits(&self, half: D, class: Class) -> bool {
        // What a configuration sets to FP32, or is computed where the policy is off, stays FP32 permanently.
        let is_fitting = |o: &Operand<D>| o.dtype == D::F32 && o.fits(half);
        let is_moved = || class == Class::Move && self.operands.iter().any(is_fitting);
        if self.changed.is_some() || self.mode == Mode::Off && !is_moved() {
            return false;
        }
        let all = self.operands.iter().all(|o| o.fits(half));
        let is_within = || half != D::F16 || !self.leaves_f16() && self.are_few_branches();
        match self.op.fits() {
            Fits::Never => false,
            Fits::WithOperands => all && is_within(),
            Fits::Mean => all && self.site.is_tracked(0).is_none(),
            Fits::Sum => all && is_within() || self.is_beside_statistic(half, true),
            // f16 would lose the product of two small ones.
            Fits::Product if all && self.any.contains(TensorFlags::GATE) => half != D::F16,

            Fits::Product => self.is_beside_statistic(half, true),
            Fits::Quotient => self.is_beside_statistic(half, false),
        }
    }

    /// Whether the first of two operands, or `either`, fits in `half`, and the other is a statistic.
    fn is_beside_statistic(&self, half: D, either: bool) -> bool {
        let ([lhs, rhs], Mode::On(_)) = (self.operands, self.mode) else {
            return false;
        };
        let is_statistic = |i: usize, beside| {
            let operand = self.operands[i];
            !(operand.dtype == D::F32 && operand.has(TensorFlags::UNBOUNDED))
                && self.is_small(i, beside)
                && self.site.is_tracked(i) == Some(true)
        };
        lhs.fits(half) && is_statistic(1, 0) || either && rhs.fits(half) && is_statistic(0, 1)
    }

    /// The dtype of the gradients among the operands of a formula of the backward pass, if it is half.
    pub(super) fn half_gradient(&self) -> Option<D> {
        let is_gradient = |o: &&Operand<D>| o.has(TensorFlags::BACKWARD);
        let mut dtypes = self.operands.iter().filter(is_gradient).map(|o| o.dtype);
        let first = dtypes.next().filter(|dtype| is_half(*dtype))?;
        dtypes.all(|dtype| dtype == first).then_some(first)
    }

    /// The number of gradients in a sum of two half gradients. Where autodiff runs elsewhere, any tensor that the
    /// policy made half may be a gradient.
    pub(super) fn summed(&self) -> Option<u8> {
        let [lhs, rhs] = self.operands else {
            return None;
        };
        let are_gradients = self.operands.iter().all(|o| self.may_be_gradient(o));
        (lhs.dtype == rhs.dtype && are_gradients).then(|| lhs.terms + rhs.terms)
    }

    /// Whether a half tensor is a gradient, or may be one.
    fn may_be_gradient(&self, operand: &Operand<D>) -> bool {
        let is_gradient = || {
            let is_elsewhere = || self.site.is_tracked(0).is_none();
            operand.has(TensorFlags::BACKWARD) || operand.is_demoted() && is_elsewhere()
        };
        is_half(operand.dtype) && is_gradient()
    }
}
