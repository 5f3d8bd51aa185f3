//! What the policy knows of a tensor, and what an operation makes of it: an abstract interpretation of the program,
//! one operation at a time.
//!
//! Each flag is a lattice of two. *Unknown* is above *known*, and operands of which one is unknown are unknown together:
//!
//! | flag | it says | unknown | together |
//! |---|---|---|---|
//! | `GRADIENT`, `BACKWARD` | may be a gradient | set | any operand |
//! | `FROM_F16`, `USED_IN_HALF` | may depend on f16, on a parameter that is cast | set | any operand |
//! | `DEMOTED` | may be half by the policy's decision | set | any operand that is not the user's own half |
//! | `FILLED` | may hold a scalar that half rounded | set | any operand |
//! | `UNBOUNDED` | may be of any size, although a gradient flows to it | set | any operand in FP32 |
//! | `FITS_F16`, `FITS_BF16` | fits in this half dtype | unset | all operands, by the column `fits` |
//! | `CONSTANT`, `WEIGHT` | follows half, is a half weight | unset | all operands |
//! | `SIGMOID`, `MINUS_SIGMOID` | is a sigmoid, is one times -1 | unset | the first operand |
//! | terms | how many gradients a half gradient is the sum of | more | their sum |
//!
//! `BINARY` and `EXACT_*` are known of a new tensor only. What each class passes on stands in [`of_any`] and [`of_all`]. A
//! scalar, a cast or the operation's effect may add a fact or take it away: [`Call::facts`].

use super::decision::{Call, Operand, Site};
use super::{Class, Effect, Fits, Mode, TensorFlags};
use crate::FloatDType;
use crate::dtype::{follows_half, holds, holds_exactly, is_half};

/// The most terms of a sum in half. Autodiff adds up the gradients of a tensor in the tensor's dtype, and a
/// sum of many half numbers stops growing. With this limit, a sum has the error of at most this many terms.
pub const TERMS: u8 = 16;

/// A tracked operand that is this many times smaller than the other operand is a statistic or a parameter of
/// the other's channels.
pub const SMALL: usize = 16;

/// The flags that every result has if any operand has them.
pub(super) const KEPT: TensorFlags = TensorFlags::GRADIENT
    .union(TensorFlags::FROM_F16)
    .union(TensorFlags::BACKWARD)
    .union(TensorFlags::USED_IN_HALF);

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
        Class::Move => TensorFlags::WEIGHT | TensorFlags::CONSTANT,
        Class::Keep | Class::Promote | Class::PromoteSum => TensorFlags::WEIGHT,
        Class::LowerPrecision | Class::Fp32 | Class::Fp32Inside | Class::Activation => {
            TensorFlags::empty()
        }
    }
}

impl<D: FloatDType, S: Site<D>> Call<'_, D, S> {
    /// The flags of the result, of an operation of this class on operands that are `cast` to this dtype.
    pub(super) fn facts(&self, class: Class, cast: Option<D>) -> TensorFlags {
        let computed = cast.unwrap_or(self.operands[0].dtype);
        let all = self.operands.iter().map(|o| o.flags);
        let all = all.fold(TensorFlags::all(), TensorFlags::intersection);
        let mut flags = self.any & of_any(class) | all & of_all(class);
        if cast == Some(D::F16) {
            flags |= TensorFlags::FROM_F16;
        }
        let is_own = |o: &Operand<D>| is_half(o.dtype) && !o.is_demoted();
        let is_demoted = !flags.contains(TensorFlags::WEIGHT) && !self.operands.iter().all(is_own);
        flags.set(TensorFlags::DEMOTED, is_demoted);
        // Padding adds a constant of its own.
        if !self.scalars.iter().all(|scalar| follows_half::<D>(*scalar)) {
            flags -= TensorFlags::CONSTANT;
        }
        let is_rounded = |scalar: &f64| !holds_exactly(computed, *scalar);
        if self.op.effect == Effect::Fills && self.scalars.iter().any(is_rounded) {
            flags |= TensorFlags::FILLED;
        }
        if !is_half(computed) {
            flags -= TensorFlags::FILLED;
        }
        flags |= self.sigmoid(class, computed);
        flags.set(TensorFlags::UNBOUNDED, self.is_unbounded(class));
        for half in D::HALVES {
            let fits = self.is_held(half) && self.fits(half, class);
            flags.set(TensorFlags::fits(half), fits);
        }
        flags
    }

    /// Whether the result is a sigmoid in half, or a sigmoid times -1.
    fn sigmoid(&self, class: Class, computed: D) -> TensorFlags {
        let is_ours = is_half(computed) && self.mode != Mode::Off;
        let of = self.operands[0].flags & (TensorFlags::SIGMOID | TensorFlags::MINUS_SIGMOID);
        // A bound at some distance from 0 and 1 keeps the values away from them.
        let is_narrow = |bound: &f64| (0.01..=0.99).contains(&bound.abs());
        match self.op.effect {
            Effect::IsSigmoid if is_ours => TensorFlags::SIGMOID,
            Effect::Negates if of.contains(TensorFlags::SIGMOID) => TensorFlags::MINUS_SIGMOID,
            Effect::Shifts => of,
            Effect::Clamps if !self.scalars.iter().any(is_narrow) => of,
            _ if class == Class::Move => of,
            _ => TensorFlags::empty(),
        }
    }

    pub(super) fn is_log_of_one_minus_sigmoid(&self) -> bool {
        let operand = self.operands[0];
        self.op.effect == Effect::TakesLogarithm && operand.has(TensorFlags::MINUS_SIGMOID)
    }

    /// The number of gradients in the result: in a sum; in a view of a sum, as the backward pass of a reshape is; or in a
    /// multiple of a sum, such as the momentum of an optimizer, whose gradients are half: the momentum becomes FP32
    /// after a few steps. 1 for any other operation.
    pub(super) fn terms(&self, class: Class) -> u8 {
        let is_same = self.is_multiple() || class == Class::Move;
        let first = &self.operands[0];
        match self.summed() {
            Some(terms) if class == Class::PromoteSum && terms <= TERMS => terms,
            None if is_same && self.may_be_gradient(first) => first.terms,
            _ => 1,
        }
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
        match self.op.fits() {
            Fits::Never => false,
            Fits::WithOperands => all && !(half == D::F16 && self.leaves_f16()),
            Fits::Mean => all && self.site.is_tracked(0).is_none(),
            Fits::Sum => all || self.is_beside_statistic(half, true),
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
            let (operand, site) = (self.operands[i], self.site);
            !(operand.dtype == D::F32 && operand.has(TensorFlags::UNBOUNDED))
                && site.elements(i) * SMALL <= site.elements(beside)
                && site.is_tracked(i) == Some(true)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;
    use crate::policy::decision::tests::*;
    use crate::policy::{Op, OpPrecision};
    use Class::{LowerPrecision, Move};
    use DType::{BF16, F16, F32};

    #[test]
    fn a_mask_of_a_rounded_scalar_is_marked_until_it_is_computed_with() {
        let half = [with(F16, TensorFlags::DEMOTED)];
        let filled = |name, operands: &[_], scalars: &[f64]| {
            let decision = decide(&Op::named(name), operands, scalars, &ON);
            decision.flags.contains(TensorFlags::FILLED)
        };
        assert!(filled("float_mask_fill", &half, &[-10_001.0]));
        assert!(!filled("float_mask_fill", &half, &[-10_000.0]));
        // In FP32, and so not rounded.
        assert!(!filled("float_mask_fill", &half, &[-1e9]));
        assert!(!filled("float_mul_scalar", &half, &[-10_001.0]));
        let masked = [with(F16, TensorFlags::DEMOTED | TensorFlags::FILLED)];
        assert!(
            filled("float_reshape", &masked, &[]) && filled("float_mul_scalar", &masked, &[1.0])
        );
        assert!(!filled("float_exp", &masked, &[]));
    }

    #[test]
    fn one_minus_a_sigmoid_in_half_is_recognized() {
        const SIGMOID: TensorFlags = TensorFlags::SIGMOID;
        const MINUS: TensorFlags = TensorFlags::MINUS_SIGMOID;
        let out = |name, flags, scalars: &[f64]| {
            let operand = [with(F16, flags)];
            decide(&Op::named(name), &operand, scalars, &ON).flags & (SIGMOID | MINUS)
        };
        const NONE: TensorFlags = TensorFlags::empty();
        assert_eq!(out("sigmoid", NONE, &[]), SIGMOID);
        let half = Here {
            changed: Some(OpPrecision::Half),
            ..ON
        };
        let changed = named("sigmoid", &plain(&[F32]), half).flags;
        assert!(changed.contains(SIGMOID));
        assert_eq!(out("float_neg", SIGMOID, &[]), MINUS);
        assert_eq!(out("float_neg", MINUS, &[]), NONE);
        for flags in [SIGMOID, MINUS, NONE] {
            assert_eq!(out("float_add_scalar", flags, &[1.0]), flags);
            assert_eq!(out("float_clamp", flags, &[1e-7, 1.0 - 1e-7]), flags);
            assert_eq!(out("float_clamp", flags, &[0.05, 0.95]), NONE);
            assert_eq!(out("float_reshape", flags, &[]), flags);
            for name in ["float_tanh", "float_exp", "float_log", "float_log1p"] {
                assert_eq!(out(name, flags, &[]), NONE, "{name}");
            }
        }
        let is_warned = |name, flags| {
            let decision = named(name, &[with(F16, flags)], ON);
            decision.is_log_of_one_minus_sigmoid
        };
        for name in ["float_log", "float_log1p"] {
            assert!(
                is_warned(name, MINUS) && !is_warned(name, SIGMOID),
                "{name}"
            );
        }
        assert!(!is_warned("float_exp", MINUS));
        // In FP32, and in the user's own half, the policy has no part in it.
        for (dtype, here) in [(F32, ON), (F16, OFF)] {
            let out = named("sigmoid", &plain(&[dtype]), here).flags;
            assert!(!out.contains(SIGMOID), "{dtype:?}");
        }
    }

    #[test]
    fn a_sum_of_many_half_gradients_goes_on_in_fp32() {
        let gradient = |terms| Operand {
            terms,
            ..with(BF16, TensorFlags::BACKWARD)
        };
        let sum = |a, b| named("float_add", &[gradient(a), gradient(b)], BELOW);
        for (a, b) in [(1, 1), (15, 1), (8, 8)] {
            let sum = sum(a, b);
            assert_eq!((sum.operands, sum.result), (None, Some(BF16)));
            assert_eq!(sum.terms, a + b);
        }
        for (a, b) in [(16, 1), (9, 8), (16, 16)] {
            let sum = sum(a, b);
            assert_eq!((sum.operands, sum.result), (Some(F32), None));
            assert_eq!(sum.terms, 1);
        }
        // A view of a sum, and a multiple of it, have its terms.
        for same in ["float_reshape", "float_swap_dims", "float_mul_scalar"] {
            let same = named(same, &[gradient(16)], BELOW);
            assert_eq!((same.operands, same.terms), (None, 16));
        }
    }

    #[test]
    fn where_autodiff_runs_elsewhere_any_sum_may_be_of_gradients() {
        let untold = Here {
            sizes: [(1, None); 2],
            ..ON
        };
        let half = |flags, terms| Operand {
            terms,
            ..with(BF16, flags)
        };
        let sum = |flags, a, b, here| named("float_add", &[half(flags, a), half(flags, b)], here);
        let demoted = TensorFlags::DEMOTED;
        let few = sum(demoted, 15, 1, untold);
        assert_eq!((few.operands, few.terms), (None, 16));
        let many = sum(demoted, 16, 1, untold);
        assert_eq!((many.operands, many.result), (Some(F32), None));
        assert_eq!(many.terms, 1);
        // A half tensor of the user's own, and a tensor on this tape.
        for (flags, here) in [(TensorFlags::empty(), untold), (demoted, ON)] {
            assert_eq!(sum(flags, 16, 1, here).operands, None);
        }
        // A multiple of a sum has the terms of the sum.
        for multiple in ["float_mul_scalar", "float_div_scalar"] {
            let multiple = named(multiple, &[half(demoted, 16)], untold);
            assert_eq!((multiple.operands, multiple.terms), (None, 16));
        }
        // And so does a view of it.
        for view in ["float_swap_dims", "float_reshape", "float_slice"] {
            let view = named(view, &[half(demoted, 16)], untold);
            assert_eq!((view.operands, view.terms), (None, 16));
        }
        // Another operation restarts the count.
        let negative = named("float_neg", &[half(demoted, 16)], untold);
        assert_eq!(negative.terms, 1);
        let product = named("float_mul", &[half(demoted, 16), half(demoted, 16)], untold);
        assert_eq!((product.operands, product.terms), (None, 1));
    }

    #[test]
    fn flags_follow_the_values() {
        let fits = |operation, operands: &[_], here| {
            named(operation, operands, here).flags & TensorFlags::FITS
        };
        let (f16, f32) = (plain(&[F16])[0], plain(&[F32])[0]);
        let small = with(F32, TensorFlags::FITS);
        let (none, both) = (TensorFlags::empty(), TensorFlags::FITS);
        for operation in ["relu", "float_neg", "float_reshape", "float_max"] {
            assert_eq!(fits(operation, &[small], ON), both, "{operation}");
            assert_eq!(fits(operation, &[f32], ON), none, "{operation}");
        }
        for operation in ["float_exp", "float_sum", "softmax", "float_matmul"] {
            assert_eq!(fits(operation, &[small], ON), none, "{operation}");
        }
        assert_eq!(fits("float_cat", &[small, small], ON), both);
        assert_eq!(fits("float_cat", &[small, f16], ON), TensorFlags::FITS_F16);
        assert_eq!(fits("float_cat", &[small, f32], ON), none);
        // A sum of two operands that fit also fits. A product of two operands may be of any size.
        assert_eq!(fits("float_add", &[small, small], ON), both);
        assert_eq!(fits("float_mul", &[small, small], ON), none);
        // Where the policy is off, the result of arithmetic stays FP32 permanently.
        assert_eq!(fits("float_add", &[f16, f16], OFF), none);
        assert_eq!(fits("float_add", &[small, small], OFF), none);
        assert_eq!(fits("float_reshape", &[small], OFF), both);
        // A mean is bounded. Where autodiff runs elsewhere, a mean may be a tracked statistic.
        assert_eq!(fits("float_mean", &[small], ON), none);
        let untold = Here {
            sizes: [(1, None); 2],
            ..ON
        };
        assert_eq!(fits("float_mean", &[small], untold), both);
    }

    #[test]
    fn what_stands_beside_a_statistic_fits() {
        let operands = [with(F32, TensorFlags::FITS), plain(&[F32])[0]];
        let fits = |name, sizes, mode| {
            let here = Here { sizes, mode, ..ON };
            named(name, &operands, here).flags & TensorFlags::FITS == TensorFlags::FITS
        };
        for name in ["float_add", "float_mul", "float_div"] {
            assert!(fits(name, [(32, Some(false)), (2, Some(true))], ON.mode));
            assert!(!fits(name, [(32, Some(false)), (3, Some(true))], ON.mode));
            assert!(!fits(name, [(32, Some(false)), (2, Some(false))], ON.mode));
            assert!(!fits(name, [(2, Some(true)), (32, Some(false))], ON.mode));
            assert!(!fits(
                name,
                [(32, Some(false)), (2, Some(true))],
                Mode::KeepDtypes
            ));
        }
        // A statistic that is divided by what fits, which may be close to zero.
        let swapped = |name| {
            let sizes = [(2, Some(true)), (32, Some(false))];
            let flags = named(name, &[operands[1], operands[0]], Here { sizes, ..ON }).flags;
            flags & TensorFlags::FITS == TensorFlags::FITS
        };
        assert!(swapped("float_mul") && !swapped("float_div"));
        // A statistic with a mask in it, or a mask.
        let sizes = [(32, Some(false)), (2, Some(true))];
        let masked = named("float_add", &plain(&[F32, F32]), Here { sizes, ..ON });
        assert!(masked.flags.contains(TensorFlags::UNBOUNDED));
        let beside = [operands[0], with(F32, masked.flags)];
        for name in ["float_add", "float_mul", "float_div"] {
            let here = Here { sizes, ..ON };
            let sum = named(name, &beside, here).flags;
            assert!(!sum.intersects(TensorFlags::FITS), "{name}");
        }
        let is_unbounded = |name, scalar, mode| {
            let here = Here {
                sizes: [(2, Some(true)); 2],
                mode,
                ..ON
            };
            let flags = decide(&Op::named(name), &operands[1..], &[scalar], &here).flags;
            flags.contains(TensorFlags::UNBOUNDED)
        };
        for (scalar, is_beyond) in [(-1e9, true), (0.0, false), (1e-8, false)] {
            assert_eq!(is_unbounded("float_mask_fill", scalar, ON.mode), is_beyond);
            // Where the policy is off, any FP32 may be of any size. A gradient has no statistics.
            assert!(is_unbounded("float_mask_fill", scalar, Mode::Off));
            assert!(!is_unbounded("float_mask_fill", scalar, Mode::KeepDtypes));
        }
        // The number of elements in a mean, and a small divisor.
        assert!(!is_unbounded("float_div_scalar", 65536.0, ON.mode));
        assert!(is_unbounded("float_div_scalar", 1e-8, ON.mode));
        // Only arithmetic has statistics as operands.
        assert!(!fits(
            "float_atan2",
            [(32, Some(false)), (2, Some(true))],
            ON.mode
        ));
    }

    #[test]
    fn other_flags_are_kept_and_set() {
        let kept = TensorFlags::GRADIENT | TensorFlags::FROM_F16 | TensorFlags::BACKWARD;
        let lost = TensorFlags::BINARY | TensorFlags::EXACT_F16 | TensorFlags::EXACT_BF16;
        for class in CLASSES {
            let flags = of(class, &[with(F32, kept | lost)], ON).flags;
            assert_eq!(flags & (kept | lost), kept, "{class:?}");
            let constant = of(class, &[with(F32, TensorFlags::CONSTANT)], ON).flags;
            assert_eq!(constant.contains(TensorFlags::CONSTANT), class == Move);
            // A result is the user's own half only if all its operands are.
            let demoted = |operands: &[_]| {
                let flags = of(class, operands, ON).flags;
                flags.contains(TensorFlags::DEMOTED)
            };
            let f16 = plain(&[F16])[0];
            assert!(!demoted(&[f16, f16]));
            assert!(demoted(&[f16, with(F16, TensorFlags::DEMOTED)]));
            assert!(demoted(&[f16, plain(&[F32])[0]]));
        }
        let from_f16 = |mode| {
            let here = Here { mode, ..ON };
            let flags = of(LowerPrecision, &plain(&[F32]), here).flags;
            flags.contains(TensorFlags::FROM_F16)
        };
        assert!(from_f16(Mode::On(F16)));
        assert!(!from_f16(Mode::On(BF16)));
    }
}
