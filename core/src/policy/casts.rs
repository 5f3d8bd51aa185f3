//! The casts of an operation, in the order of PyTorch's autocast: its class, the mode, the dtypes of its operands; and
//! then whether the device is exact.

use super::decision::{Call, Operand, Site};
use super::values::TERMS;
use super::{Case, Class, Fits, OpPrecision, Role, TensorFlags};
use crate::FloatDType;
use crate::dtype::{DTypes, holds, holds_exactly, is_half};

/// A device's support for one half dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HalfSupport {
    /// Nothing that AMP could use.
    None,
    /// Storage and accelerated contractions, no arithmetic.
    Contractions,
    /// Storage and arithmetic.
    Arithmetic,
}

/// A device's support for the two half dtypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Support {
    /// Support for F16.
    pub f16: HalfSupport,
    /// Support for BF16.
    pub bf16: HalfSupport,
}

impl Support {
    /// Support for `dtype`; every dtype other than the two half dtypes has arithmetic.
    #[inline]
    pub fn of<D: FloatDType>(self, dtype: D) -> HalfSupport {
        match dtype {
            _ if dtype == D::F16 => self.f16,
            _ if dtype == D::BF16 => self.bf16,
            _ => HalfSupport::Arithmetic,
        }
    }
}

/// How the policy is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode<D> {
    /// The policy is off.
    Off,
    /// FP32 operands of `LowerPrecision` operations are demoted to this dtype.
    On(D),
    /// FP32 is never demoted: a `LowerPrecision` operation runs in half only if an operand is half.
    /// Applies below autodiff (the upper layer has already decided), in the backward pass and to
    /// gradients.
    KeepDtypes,
}

/// The casts of an operation's operands and result.
#[derive(Debug, Clone, Copy)]
pub(super) struct Casts<D> {
    /// The half dtype that every operand is rounded to first.
    pub(super) rounded: Option<D>,
    pub(super) operands: Option<D>,
    pub(super) result: Option<D>,
}

impl<D: FloatDType> Casts<D> {
    /// Casts every operand to this dtype, if there is one, and leaves the result.
    fn to(operands: Option<D>) -> Self {
        Self {
            rounded: None,
            operands,
            result: None,
        }
    }

    /// The values of an exact device, computed in FP32.
    fn widened(half: D, result: D) -> Self {
        Self {
            rounded: Some(half),
            operands: Some(D::F32),
            result: Some(result),
        }
    }

    /// Whether these are the casts of a contraction on a device that only contracts in half.
    pub(super) fn only_contracts(self, class: Class) -> bool {
        let is_half = self.operands.is_some_and(is_half);
        class == Class::LowerPrecision && is_half && self.result == Some(D::F32)
    }
}

impl<D: FloatDType, S: Site<D>> Call<'_, D, S> {
    /// The precision that the configuration gives the operation, if it applies.
    pub(super) fn change(&self) -> Option<OpPrecision> {
        let Mode::On(half) = self.mode else {
            return None;
        };
        let precision = self.layer.changed?;
        let applies = match precision {
            OpPrecision::F32 => true,
            OpPrecision::Half => {
                // Arithmetic on two FP32 tensors may be an optimizer's update of parameters.
                let follows = matches!(self.op.class, Class::Promote | Class::PromoteSum);
                self.computes_in(half)
                    && self.is_held(half)
                    && (!follows || self.operands.iter().any(|o| o.dtype == half))
            }
        };
        (applies && self.is_ours()).then_some(precision)
    }

    /// The row's class, or the class that the row names for a case that applies, or the changed class.
    pub(super) fn class(&self) -> Class {
        match self.changed {
            Some(OpPrecision::F32) => return Class::Fp32,
            Some(OpPrecision::Half) => return Class::LowerPrecision,
            None => {}
        }
        let class = self.op.class;
        let Some((other, case)) = self.op.otherwise else {
            return class;
        };
        let is_beyond = || {
            let first = self.operands[0].dtype;
            let computed = || self.by_class(class).operands.unwrap_or(first);
            self.mode != Mode::Off && !(self.is_held(first) && self.is_held(computed()))
        };
        let holds = match case {
            Case::UnheldScalar => is_beyond(),
            Case::InexactScalar => {
                let is_filled = self.operands[0].has(TensorFlags::FILLED);
                !is_filled && self.operands.iter().any(|o| o.is_demoted()) && is_beyond()
            }
            Case::OnlyContracts => self.by_class(class).only_contracts(class),
            Case::WithoutAutodiff => self.layer.is_kernel,
            Case::Accumulates => false,
        };
        if holds { other } else { class }
    }

    fn computes_in(&self, dtype: D) -> bool {
        self.layer.support.of(dtype) == HalfSupport::Arithmetic
    }

    /// Whether a dtype holds the scalars as the operation needs them.
    pub(super) fn is_held(&self, half: D) -> bool {
        let holds = match self.op.otherwise {
            Some((_, Case::InexactScalar)) => holds_exactly,
            _ => holds,
        };
        self.scalars.iter().all(|scalar| holds(half, *scalar))
    }

    /// Whether every operand is FP32 or half.
    fn is_ours(&self) -> bool {
        let is_ours = |o: &Operand<D>| o.dtype == D::F32 || is_half(o.dtype);
        self.operands.iter().all(is_ours)
    }

    fn dtypes(&self) -> DTypes {
        self.operands.iter().map(|o| DTypes::of(o.dtype)).collect()
    }

    /// The casts that follow from class, mode and dtypes.
    pub(super) fn by_class(&self, class: Class) -> Casts<D> {
        let dtypes = self.dtypes();
        let widest = dtypes.widest();
        let promoted = Casts::to((dtypes.iter().count() > 1).then_some(widest));
        let half_to_f32 = dtypes.intersects(DTypes::HALVES).then_some(D::F32);
        let in_force = match (self.mode, self.layer.declared) {
            // The device is no longer in half.
            (Mode::Off, Some(dtype)) => {
                let is_other = self.operands.iter().any(|o| o.dtype != dtype);
                return Casts::to(is_other.then_some(dtype));
            }
            // Half tensors that the policy made return to FP32. The user's own half tensors stay half, unless
            // they meet FP32: `x.zeros_like()` of a half `x` counts as the user's own. Operations that only
            // move data also stay in half.
            (Mode::Off, None) => {
                let is_demoted = self.operands.iter().any(|o| o.is_demoted());
                let returns = is_demoted && class != Class::Move || promoted.operands.is_some();
                let dtype = if widest == D::F64 { D::F64 } else { D::F32 };
                return Casts::to(returns.then_some(dtype));
            }
            (Mode::On(half), _) => Some(half),
            (Mode::KeepDtypes, _) => None,
        };
        if class == Class::Promote
            && let Some(half) = self.followed()
        {
            return Casts::to(Some(if self.computes_in(half) { half } else { D::F32 }));
        }
        if dtypes.intersects(DTypes::F64 | DTypes::FLEX32) {
            return promoted;
        }
        match class {
            Class::LowerPrecision => match in_force.or(dtypes.half()) {
                None => Casts::to(half_to_f32),
                Some(half) => Casts {
                    result: (!self.computes_in(half)).then_some(D::F32),
                    ..Casts::to(Some(half))
                },
            },
            Class::Fp32 => Casts::to(half_to_f32),
            Class::Fp32Inside => {
                let restored = if self.op.is_backward() {
                    widest
                } else {
                    self.operands[0].dtype
                };
                let is_restored = is_half(restored) && self.computes_in(restored);
                Casts {
                    result: is_restored.then_some(restored),
                    ..Casts::to(half_to_f32)
                }
            }
            Class::Activation if self.first_fits() => {
                Casts::to(in_force.filter(|half| self.computes_in(*half)))
            }
            Class::Promote | Class::PromoteSum | Class::Keep | Class::Activation
                if !self.computes_in(widest) =>
            {
                Casts::to(Some(D::F32))
            }
            _ => promoted,
        }
    }

    /// Whether the first operand is FP32 that fits in the half dtype in force.
    fn first_fits(&self) -> bool {
        let first = self.operands[0];
        let fits = matches!(self.mode, Mode::On(half) if first.dtype != half && first.fits(half));
        fits && !self.op.is_backward()
    }

    /// The half dtype that constants follow, if any. The quotient of a constant and a small number, or of a number and a
    /// small constant, may be beyond half.
    fn followed(&self) -> Option<D> {
        let is_on = matches!(self.mode, Mode::On(_)) && !self.op.is_backward();
        if !is_on || self.op.fits() == Fits::Quotient || !self.any.contains(TensorFlags::CONSTANT) {
            return None;
        }
        let fits = self.first_fits();
        let operands = self.operands.iter().enumerate();
        let others = operands.filter(|(i, o)| !o.has(TensorFlags::CONSTANT) || *i == 0 && fits);
        let others: DTypes = others.map(|(_, o)| DTypes::of(o.dtype)).collect();
        others.only_half()
    }

    /// The casts of this call, derived from the casts of the class.
    pub(super) fn casts(&self, class: Class, by_class: Casts<D>) -> Casts<D> {
        let role = self.op.role;
        if let (Some(OpPrecision::Half), Class::Fp32 | Class::Fp32Inside, Some(half)) =
            (self.changed, self.op.class, by_class.operands)
        {
            return self.narrowed(half);
        }
        let mut casts = by_class;
        if class == Class::Fp32Inside {
            let is_taken_whole =
                self.mode != Mode::Off && !self.layer.is_kernel && role != Role::Composed;
            let half = || self.dtypes().only_half();
            if is_taken_whole || half().is_some_and(|half| self.is_exact(half) == Some(true)) {
                casts = Casts::to(None);
            }
        }
        if role == Role::ParameterGradient && self.mode != Mode::Off {
            casts.result = self.layer.declared.or(casts.result);
        }
        if !self.op.is_backward()
            && !matches!(class, Class::Move | Class::LowerPrecision)
            && let Some(half) = self.half_gradient().filter(|half| self.computes_in(*half))
        {
            casts.result = Some(half);
        }
        if class == Class::PromoteSum && self.summed().is_some_and(|terms| terms > TERMS) {
            casts = Casts::to(Some(D::F32));
        }
        let computed = casts.operands.unwrap_or(self.operands[0].dtype);
        let is_inexact = || is_half(computed) && self.is_exact(computed) == Some(false);
        if class != Class::Fp32Inside && is_inexact() {
            casts = Casts::widened(computed, casts.result.unwrap_or(computed));
        }
        casts
    }

    /// The casts of an operation that the table computes in FP32 and a configuration in half. Below autodiff
    /// the table applies, so an operation that autodiff does not compose only needs half operands.
    fn narrowed(&self, half: D) -> Casts<D> {
        let is_widened = if self.layer.is_kernel {
            self.is_exact(half) != Some(true)
        } else {
            self.op.role == Role::Composed
        };
        if is_widened {
            return Casts::widened(half, half);
        }
        Casts {
            result: Some(half),
            ..Casts::to(Some(half))
        }
    }

    /// Whether a trial showed the device to be exact in half; `None` if nothing is tried. Nothing
    /// is tried above autodiff: the operands are cast to half anyway, so that the tape keeps half.
    fn is_exact(&self, half: D) -> Option<bool> {
        let is_tried = self.layer.is_kernel && self.mode != Mode::Off;
        let tried = self.op.tried.filter(|_| is_tried)?;
        self.site.is_exact(tried, half)
    }

    /// The half dtype in force, if the policy itself records the operation.
    pub(super) fn recorded(&self) -> Option<D> {
        match self.mode {
            // Burn's own form keeps FP32 operands in FP32.
            Mode::On(_) if self.changed == Some(OpPrecision::F32) => None,
            Mode::On(half) if !self.layer.is_kernel && self.is_ours() => {
                self.op.recorded.map(|_| half)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;
    use crate::policy::Op;
    use crate::policy::decision::tests::*;
    use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};
    use DType::{BF16, F16, F32, F64};

    #[test]
    fn a_bound_that_half_does_not_hold_exactly_is_fp32() {
        let by_policy = |flags| [with(F16, TensorFlags::DEMOTED | flags)];
        let decided = |name, operands: &[_], scalar: f64, here| {
            let decision = decide(&Op::named(name), operands, &[scalar], &here);
            (
                decision.operands,
                decision.flags.contains(TensorFlags::FITS_F16),
            )
        };
        let none = TensorFlags::empty();
        for name in ["float_clamp_min", "float_greater_elem"] {
            for here in [ON, BELOW] {
                let of = |operands: &[_], scalar| decided(name, operands, scalar, here);
                assert_eq!(of(&by_policy(none), 0.999), (Some(F32), false), "{name}");
                assert_eq!(of(&by_policy(none), 1e-6), (Some(F32), false));
                for held in [0.5, -1.0, 2048.0, f64::INFINITY] {
                    assert_eq!(of(&by_policy(none), held), (None, true), "{name} {held}");
                }
                // The user's own, and what was filled with a rounded scalar.
                assert_eq!(of(&plain(&[F16]), 0.999).0, None);
                assert_eq!(of(&by_policy(TensorFlags::FILLED), 0.999).0, None);
                assert_eq!(of(&plain(&[F32]), 0.999).0, None);
            }
        }
        // What half rounds is equal to what half rounded.
        assert_eq!(
            decided("float_equal_elem", &by_policy(none), 0.999, ON).0,
            None
        );
    }

    #[test]
    fn off_does_nothing_but_to_undo_what_the_policy_did() {
        for class in CLASSES {
            // The user's own half stays; the policy's returns to FP32, unless the operation only moves data.
            assert_eq!(casts(class, &[F16, F16], OFF), NONE);
            assert_eq!(casts(class, &[F32, F16], OFF), (Some(F32), None));
            let demoted = [with(F16, TensorFlags::DEMOTED)];
            let expected = (class != Move).then_some(F32);
            assert_eq!(of(class, &demoted, OFF).operands, expected, "{class:?}");
            let wide = [demoted[0], with(F64, TensorFlags::empty())];
            assert_eq!(of(class, &wide, OFF).operands, Some(F64));
            // On a device that is no longer in half, all tensors return to the user's dtype.
            for (declared, dtype) in [(F32, F16), (BF16, F32), (F32, F32)] {
                let here = Here {
                    declared: Some(declared),
                    ..OFF
                };
                let expected = (dtype != declared).then_some(declared);
                assert_eq!(casts(class, &[dtype], here), (expected, None));
            }
        }
    }

    #[test]
    fn lower_precision_demotes_every_operand() {
        for dtypes in [&[F32, F32][..], &[F32, F16], &[BF16, F32], &[F16, F16]] {
            assert_eq!(casts(LowerPrecision, dtypes, ON), (Some(F16), None));
        }
    }

    #[test]
    fn lower_precision_follows_its_operands_below_autodiff() {
        assert_eq!(casts(LowerPrecision, &[F32, F32], BELOW), NONE);
        for half in [F16, BF16] {
            let to_half = (Some(half), None);
            assert_eq!(casts(LowerPrecision, &[F32, half], BELOW), to_half);
            assert_eq!(casts(LowerPrecision, &[half, half], BELOW), to_half);
        }
        let both = casts(LowerPrecision, &[F16, BF16], BELOW);
        assert_eq!(both, (Some(F32), None));
    }

    #[test]
    fn a_gradient_is_never_demoted() {
        let gradient = with(F32, TensorFlags::GRADIENT);
        let decision = of(LowerPrecision, &[gradient, plain(&[F32])[0]], ON);
        assert_eq!((decision.operands, decision.result), NONE);
        assert!(decision.flags.contains(TensorFlags::GRADIENT));
    }

    #[test]
    fn a_device_that_only_contracts_in_half_does_nothing_else_in_half() {
        let contraction = (Some(BF16), Some(F32));
        for dtypes in [&[F32, F32][..], &[BF16, F32]] {
            assert_eq!(casts(LowerPrecision, dtypes, CONTRACTS), contraction);
        }
        let below = Here {
            mode: Mode::KeepDtypes,
            ..CONTRACTS
        };
        assert_eq!(casts(LowerPrecision, &[BF16], below), contraction);
        assert!(of(LowerPrecision, &plain(&[F32]), CONTRACTS).only_contracts);
        assert!(!of(LowerPrecision, &plain(&[F32]), ON).only_contracts);
        let kernel = Here {
            is_kernel: true,
            ..CONTRACTS
        };
        for class in [Fp32, Fp32Inside, Promote, PromoteSum, Keep, Activation] {
            assert_eq!(casts(class, &[BF16], kernel), (Some(F32), None));
        }
        assert_eq!(casts(Move, &[BF16], CONTRACTS), NONE);
        // PReLU is not a contraction, whatever its class.
        let prelu = named("prelu", &plain(&[F32, F32]), CONTRACTS);
        assert_eq!((prelu.operands, prelu.only_contracts), (None, false));
        assert_eq!(named("prelu", &plain(&[F32, F32]), ON).operands, Some(F16));
    }

    #[test]
    fn fp32_promotes_and_stays_wide() {
        assert_eq!(casts(Fp32, &[F32, F32], ON), NONE);
        assert_eq!(casts(Fp32, &[F16], ON), (Some(F32), None));
        assert_eq!(casts(Fp32, &[F32, BF16], BELOW), (Some(F32), None));
    }

    #[test]
    fn fp32_inside_gives_back_the_first_operands_dtype() {
        let kernel = Here {
            is_kernel: true,
            ..ON
        };
        let on = |dtypes: &[DType]| casts(Fp32Inside, dtypes, kernel);
        assert_eq!(on(&[F32, F32]), NONE);
        assert_eq!(on(&[BF16, F32]), (Some(F32), Some(BF16)));
        assert_eq!(on(&[F32, F16]), (Some(F32), None));
        // Above autodiff the tape keeps half: the layer below widens the operation.
        assert_eq!(casts(Fp32Inside, &[F16], ON), NONE);
        // An operation that autodiff composes from other steps is widened above autodiff.
        let unfold = named("float_unfold", &plain(&[F16]), ON);
        assert_eq!((unfold.operands, unfold.result), (Some(F32), Some(F16)));
        // Without autodiff, no gradient is summed.
        let unfold = named("float_unfold", &plain(&[F16]), kernel);
        assert_eq!((unfold.operands, unfold.result), NONE);
    }

    #[test]
    fn a_backward_function_gives_back_the_widest_dtype() {
        let op = Op::custom("", Fp32Inside, Role::Backward);
        let on = |dtypes: &[DType]| {
            let decision = decide(&op, &plain(dtypes), &[], &BELOW);
            (decision.operands, decision.result)
        };
        assert_eq!(on(&[F16, F32]), (Some(F32), None));
        assert_eq!(on(&[F16, F16]), (Some(F32), Some(F16)));
        assert_eq!(on(&[F16, BF16]), (Some(F32), None));
    }

    #[test]
    fn the_gradient_of_a_parameter_has_the_dtype_that_the_user_knows() {
        let here = Here {
            declared: Some(F32),
            ..BELOW
        };
        let backward = |name, here| named(name, &plain(&[F16, F16]), here).result;
        assert_eq!(backward("linear_weight_backward", here), Some(F32));
        assert_eq!(backward("linear_weight_backward", BELOW), None);
        assert_eq!(backward("linear_x_backward", here), None);
    }

    #[test]
    fn promotion_brings_mixed_operands_together() {
        assert_eq!(casts(Promote, &[F16, F16], ON), NONE);
        assert_eq!(casts(Promote, &[F16, F32], ON), (Some(F32), None));
        assert_eq!(casts(Promote, &[F16, BF16], ON), (Some(F32), None));
        assert_eq!(casts(Keep, &[F16], ON), NONE);
        assert_eq!(casts(Move, &[F16], ON), NONE);
    }

    #[test]
    fn an_activation_brings_what_fits_to_half() {
        let fits = [with(F32, TensorFlags::FITS_BF16)];
        let bf16 = Here {
            mode: Mode::On(BF16),
            ..ON
        };
        assert_eq!(of(Activation, &fits, bf16).operands, Some(BF16));
        assert_eq!(of(Activation, &fits, ON).operands, None);
        assert_eq!(of(Activation, &fits, BELOW).operands, None);
        assert_eq!(of(Activation, &fits, CONTRACTS).operands, None);
        assert_eq!(of(Keep, &fits, bf16).operands, None);
        assert_eq!(casts(Activation, &[F32], ON), NONE);
        assert_eq!(casts(Activation, &[F16], ON), NONE);
    }

    #[test]
    fn constants_follow_a_half_tensor_and_nothing_else() {
        let constant = with(F32, TensorFlags::CONSTANT);
        let and = |dtypes: &[DType]| [vec![constant], plain(dtypes)].concat();
        let on = |operands: &[_]| of(Promote, operands, ON).operands;
        assert_eq!(on(&and(&[F16])), Some(F16));
        assert_eq!(on(&[plain(&[F16])[0], constant]), Some(F16));
        assert_eq!(on(&and(&[F16, F32])), Some(F32));
        assert_eq!(on(&and(&[F16, BF16])), Some(F32));
        assert_eq!(on(&and(&[F32])), None);
        assert_eq!(on(&[constant]), None);
        // 10 / 1e-4 is beyond f16.
        for operands in [and(&[F16]), vec![plain(&[F16])[0], constant]] {
            assert_eq!(named("float_mul", &operands, ON).operands, Some(F16));
            assert_eq!(named("float_div", &operands, ON).operands, Some(F32));
        }
        assert_eq!(of(Promote, &and(&[F16]), BELOW).operands, Some(F32));
        assert_eq!(of(Promote, &and(&[BF16]), CONTRACTS).operands, Some(F32));
        // An accumulator that starts from zeros would stop at 2,048.
        assert_eq!(of(PromoteSum, &and(&[F16]), ON).operands, Some(F32));
        assert_eq!(of(PromoteSum, &plain(&[F16, F16]), ON).operands, None);
    }

    #[test]
    fn f64_is_left_alone_but_for_mixed_operands() {
        for class in CLASSES {
            let kernel = Here {
                is_kernel: true,
                ..ON
            };
            assert_eq!(casts(class, &[F64, F64], kernel), NONE);
            assert_eq!(casts(class, &[F16, F64], kernel), (Some(F64), None));
            assert_eq!(casts(class, &[DType::Flex32], kernel), NONE);
        }
    }

    #[test]
    fn a_device_that_is_not_exact_computes_in_fp32_and_gives_half() {
        let inexact = Here {
            is_kernel: true,
            exact: Some(false),
            ..ON
        };
        let conv = |here| named("conv2d", &plain(&[F32, F32]), here);
        let decision = conv(inexact);
        assert_eq!(decision.rounded, Some(F16));
        assert_eq!((decision.operands, decision.result), (Some(F32), Some(F16)));
        assert!(decision.flags.contains(TensorFlags::FROM_F16));
        for exact in [Some(true), None] {
            let decision = conv(Here { exact, ..inexact });
            assert_eq!((decision.rounded, decision.operands), (None, Some(F16)));
        }
        // Above autodiff the operands are cast to half, so that the tape keeps half.
        let above = conv(Here {
            is_kernel: false,
            ..inexact
        });
        assert_eq!((above.rounded, above.operands), (None, Some(F16)));
    }

    #[test]
    fn a_device_that_is_exact_needs_no_casts_where_the_class_widens() {
        let gelu_backward = |exact, dtypes: &[DType]| {
            let here = Here { exact, ..BELOW };
            let decision = named("gelu_backward", &plain(dtypes), here);
            (decision.operands, decision.result)
        };
        let widened = (Some(F32), Some(F16));
        assert_eq!(gelu_backward(Some(true), &[F16, F16]), NONE);
        assert_eq!(gelu_backward(Some(false), &[F16, F16]), widened);
        assert_eq!(gelu_backward(None, &[F16, F16]), widened);
        // Half and FP32 operands have no common half dtype to compute in.
        assert_eq!(gelu_backward(Some(true), &[F16, F32]), (Some(F32), None));
    }

    #[test]
    fn a_scalar_that_half_does_not_hold_takes_the_operation_to_fp32() {
        let add = |operand, scalar: f64, here| {
            decide(&Op::named("float_add_scalar"), &[operand], &[scalar], &here)
        };
        let f16 = plain(&[F16])[0];
        assert_eq!(add(f16, 1.0, ON).operands, None);
        assert_eq!(add(f16, 1e-8, ON).operands, Some(F32));
        assert_eq!(add(plain(&[BF16])[0], 1e-8, ON).operands, None);
        assert_eq!(add(f16, 1e-8, OFF).operands, None);
        // A result with a scalar beyond f16 no longer fits in f16.
        let fits = add(with(F32, TensorFlags::FITS), -1e9, ON).flags & TensorFlags::FITS;
        assert_eq!(fits, TensorFlags::FITS_BF16);
        // With a smaller scalar too, a large value may leave the range of f16.
        let fits = |name, scalar| {
            let operands = [with(F32, TensorFlags::FITS)];
            decide(&Op::named(name), &operands, &[scalar], &ON).flags & TensorFlags::FITS
        };
        for (name, stays, leaves) in [
            ("float_mul_scalar", -2.0, 4096.0),
            ("float_div_scalar", 4096.0, -0.25),
        ] {
            assert!(fits(name, stays).contains(TensorFlags::FITS_F16), "{name}");
            assert_eq!(fits(name, leaves), TensorFlags::FITS_BF16, "{name}");
        }
        // A constant that is padded with a scalar that does not follow half is no constant.
        let padded = |scalar| {
            let operands = [with(F32, TensorFlags::CONSTANT)];
            let flags = decide(&Op::named("float_pad"), &operands, &[scalar], &ON).flags;
            flags.contains(TensorFlags::CONSTANT)
        };
        assert!(padded(0.0) && padded(0.5) && padded(f64::NEG_INFINITY));
        assert!(!padded(2.0) && !padded(40_000.0) && !padded(-1e9) && !padded(1e-8));
        // bf16 rounds these to 1 and to 0.0699.
        assert!(!padded(0.999) && !padded(0.07));
        // A step of a backward formula still returns the gradient's dtype.
        let gradient = add(with(F16, TensorFlags::BACKWARD), 1e-8, BELOW);
        assert_eq!((gradient.operands, gradient.result), (Some(F32), Some(F16)));
        let below = named("float_pad", &[f16], BELOW);
        assert_eq!((below.operands, below.result), NONE);
        let pad = decide(&Op::named("float_pad"), &[f16], &[-1e9], &BELOW);
        assert_eq!(pad.operands, Some(F32));
    }

    /// An activation would compute in the half dtype in force, whatever its operand's dtype.
    #[test]
    fn a_scalar_has_to_be_held_by_the_dtype_that_an_operation_computes_in() {
        let fits = [with(F32, TensorFlags::FITS)];
        let leaky = |slope: f64| decide(&Op::named("leaky_relu"), &fits, &[slope], &ON).operands;
        assert_eq!(leaky(0.01), Some(F16));
        assert_eq!(leaky(1e-8), None);
    }

    #[test]
    fn an_operation_accumulates_where_its_caller_says_so() {
        let scatter = Op::named("float_scatter_nd");
        let f16 = plain(&[F16, F16]);
        let of = |op| decide(&op, &f16, &[], &ON).operands;
        assert_eq!(of(scatter), None);
        assert_eq!(of(scatter.that_accumulates()), Some(F32));
    }

    #[test]
    fn a_step_on_a_half_gradient_gives_half() {
        let gradient = |dtype| with(dtype, TensorFlags::BACKWARD);
        for class in CLASSES {
            let of = |operands: &[_], here| of(class, operands, here).result;
            let expected = match class {
                Move | LowerPrecision => None,
                _ => Some(F16),
            };
            assert_eq!(of(&[gradient(F16)], BELOW), expected, "{class:?}");
            let wide = [gradient(F16), plain(&[F32])[0]];
            assert_eq!(of(&wide, BELOW), expected, "{class:?}");
            assert_eq!(of(&[gradient(F32), gradient(F16)], BELOW), None);
            let contracts = Here {
                mode: Mode::KeepDtypes,
                is_kernel: true,
                ..CONTRACTS
            };
            let expected = (class == LowerPrecision).then_some(F32);
            assert_eq!(of(&[gradient(BF16)], contracts), expected, "{class:?}");
        }
        // The FP32 values are kept for a formula that sums them up.
        assert!(of(Fp32Inside, &[gradient(F16)], BELOW).keeps_wide);
        assert!(!of(Fp32, &[gradient(F16)], BELOW).keeps_wide);
        // Backward functions return the dtype that they compute in.
        let sum = named("linear_bias_backward", &[gradient(F16)], BELOW);
        assert_eq!((sum.operands, sum.result), (Some(F32), None));
    }

    #[test]
    fn the_policy_records_its_own_rows_above_autodiff_where_it_is_on() {
        let recorded = |name, dtypes: &[DType], here| named(name, &plain(dtypes), here).recorded;
        assert_eq!(recorded("relu", &[F32], ON), Some(F16));
        assert_eq!(recorded("float_exp", &[F32], ON), None);
        assert_eq!(recorded("relu", &[F64], ON), None);
        assert_eq!(recorded("relu", &[F32], BELOW), None);
        assert_eq!(recorded("relu", &[F32], OFF), None);
        assert!(of(Keep, &plain(&[F32]), ON).keeps_dtypes);
        assert!(!of(Keep, &plain(&[F32]), OFF).keeps_dtypes);
        assert!(!of(Keep, &plain(&[F32]), BELOW).keeps_dtypes);
    }

    /// A site whose configuration gives the operation this precision.
    fn with_op(changed: OpPrecision, here: Here) -> Here {
        Here {
            changed: Some(changed),
            ..here
        }
    }

    #[test]
    fn a_change_to_fp32_makes_every_class_fp32_and_records_nothing() {
        for class in CLASSES {
            let fp32 =
                |dtypes: &[DType], here| casts(class, dtypes, with_op(OpPrecision::F32, here));
            let kernel = Here {
                is_kernel: true,
                ..ON
            };
            for here in [ON, kernel] {
                assert_eq!(fp32(&[F16, F32], here), (Some(F32), None), "{class:?}");
                assert_eq!(fp32(&[F16], here), (Some(F32), None), "{class:?}");
                assert_eq!(fp32(&[F32], here), NONE, "{class:?}");
                assert_eq!(fp32(&[F64], here), NONE, "{class:?}");
            }
        }
        let fp32 = with_op(OpPrecision::F32, ON);
        for name in ["relu", "layer_norm", "float_mul", "linear", "attention"] {
            let decision = named(name, &plain(&[F16]), fp32);
            assert_eq!(decision.recorded, None, "{name}");
            assert!(!decision.flags.intersects(TensorFlags::FITS), "{name}");
        }
        // An FP32 operation does not depend on whether the device is exact.
        let inexact = Here {
            is_kernel: true,
            exact: Some(false),
            ..fp32
        };
        let conv = named("conv2d", &plain(&[F16, F32]), inexact);
        assert_eq!(
            (conv.rounded, conv.operands, conv.result),
            (None, Some(F32), None)
        );
    }

    #[test]
    fn a_change_to_half_rounds_once_where_the_table_has_fp32() {
        let half = with_op(OpPrecision::Half, ON);
        let of = |name, dtype, here| {
            let decision = named(name, &plain(&[dtype]), here);
            (decision.rounded, decision.operands, decision.result)
        };
        for name in ["softmax", "float_exp", "float_sum", "float_sqrt"] {
            for dtype in [F16, F32] {
                // Above autodiff the tape keeps half, and the layer below widens the operation.
                assert_eq!(
                    of(name, dtype, half),
                    (None, Some(F16), Some(F16)),
                    "{name}"
                );
                let kernel = |exact| Here {
                    is_kernel: true,
                    exact,
                    ..half
                };
                let widened = (Some(F16), Some(F32), Some(F16));
                for exact in [None, Some(false)] {
                    assert_eq!(of(name, dtype, kernel(exact)), widened, "{name}");
                }
                if name == "float_sqrt" {
                    let exact = of(name, dtype, kernel(Some(true)));
                    assert_eq!(exact, (None, Some(F16), Some(F16)));
                }
            }
            assert_eq!(of(name, F64, half), (None, None, None), "{name}");
        }
        // Autodiff composes these operations from steps, which would run in half.
        for composed in ["layer_norm", "float_powi_scalar", "float_powf_scalar"] {
            let widened = (Some(F16), Some(F32), Some(F16));
            assert_eq!(of(composed, F16, half), widened, "{composed}");
        }
        let recorded = |name| named(name, &plain(&[F32]), half).recorded;
        assert_eq!(recorded("softmax"), Some(F16));
        let flags = named("float_exp", &plain(&[F32]), half).flags;
        assert!(flags.contains(TensorFlags::FROM_F16 | TensorFlags::DEMOTED));
    }

    #[test]
    fn a_change_to_half_casts_an_activation_and_leaves_two_fp32_tensors_of_arithmetic() {
        let half = with_op(OpPrecision::Half, ON);
        let of = |name, dtypes: &[DType]| {
            let decision = named(name, &plain(dtypes), half);
            (decision.operands, decision.result)
        };
        for name in ["relu", "gelu", "max_pool2d"] {
            assert_eq!(of(name, &[F32]), (Some(F16), None), "{name}");
        }
        for name in ["float_add", "float_mul", "float_cat"] {
            assert_eq!(of(name, &[F16, F32]), (Some(F16), None), "{name}");
            assert_eq!(of(name, &[F32, F32]), NONE, "{name}");
            assert_eq!(of(name, &[BF16, F32]), (Some(F32), None), "{name}");
        }
    }

    #[test]
    fn what_goes_before_a_change() {
        let half = |here| with_op(OpPrecision::Half, here);
        let fp32 = |here| with_op(OpPrecision::F32, here);
        let exp = |here| casts(Fp32, &[F32], here);
        // A change to half does not apply with FP32 in force, in the backward pass, without half arithmetic,
        // or to a gradient.
        for here in [OFF, BELOW, CONTRACTS] {
            assert_eq!(exp(half(here)), NONE);
        }
        assert_eq!(
            casts(LowerPrecision, &[F16], fp32(BELOW)),
            (Some(F16), None)
        );
        let gradient = [with(F32, TensorFlags::GRADIENT)];
        assert_eq!(of(Fp32, &gradient, half(ON)).operands, None);
        // A scalar that half does not hold.
        let leaky = |slope: f64| {
            let op = Op::named("leaky_relu");
            decide(&op, &plain(&[F32]), &[slope], &half(ON)).operands
        };
        assert_eq!((leaky(0.01), leaky(1e-8)), (Some(F16), None));
    }
}
