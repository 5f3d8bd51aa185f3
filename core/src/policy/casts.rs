//! The casts of an operation, in the order of PyTorch's autocast: its class, the mode, the dtypes of its operands; and
//! then whether the device is exact.

use super::decision::{Operand, Request, Site};
use super::values::TERMS;
use super::{Case, Class, Effect, Fits, OpPrecision, Role, TensorFlags};
use crate::FloatDType;
use crate::dtype::{DTypes, holds, holds_exactly, is_half};

/// The flags of constants with which a product of unknown length may begin.
const BEGINS: TensorFlags = TensorFlags::ONES.union(TensorFlags::STATE);

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
pub(super) struct OperandCasts<D> {
    /// The half dtype that every operand is rounded to first.
    pub(super) rounded: Option<D>,
    pub(super) operands: Option<D>,
    pub(super) result: Option<D>,
}

impl<D: FloatDType> OperandCasts<D> {
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

impl<D: FloatDType, S: Site<D>> Request<'_, D, S> {
    /// The precision that the exceptions give the operation, if it applies.
    pub(super) fn change(&self) -> Option<OpPrecision> {
        let Mode::On(half) = self.mode else {
            return None;
        };
        let known = self.layer.known;
        let precision = match half == D::F16 && known.overflowed() {
            true => OpPrecision::F32,
            false => known.configured()?,
        };
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
        let is_beyond = || {
            let first = self.operands[0].dtype;
            let computed = || self.by_class(class).operands.unwrap_or(first);
            self.mode != Mode::Off && !(self.is_held(first) && self.is_held(computed()))
        };
        let applies = |case| match case {
            Case::UnheldScalar => is_beyond(),
            Case::InexactScalar => {
                let first = self.operands[0];
                let holds = |scalar: &f64| holds(first.dtype, *scalar);
                // A comparison finds what was filled, also behind a bound. A small bound is no scalar of a fill.
                let is_large = |scalar: &f64| scalar.abs() >= 1.0;
                let finds = first.has(TensorFlags::FILLED)
                    && self.scalars.iter().all(holds)
                    && (self.op.effect == Effect::Reads || self.scalars.iter().all(is_large));
                !finds && self.operands.iter().any(|o| o.is_demoted()) && is_beyond()
            }
            Case::OnlyContracts => self.by_class(class).only_contracts(class),
            Case::WithoutAutodiff => self.layer.is_kernel,
            Case::Accumulates | Case::RoundedScalar => false,
            Case::OneTerm => self.are_fp32() && self.site.inner_dimension() == 1,
        };
        let mut others = self.op.otherwise.iter();
        let other = others.find(|(_, case)| applies(*case));
        other.map_or(class, |(class, _)| *class)
    }

    /// Whether a contraction would round FP32 data: nothing learned takes part. The user's own operation gets what its
    /// class says.
    pub(super) fn is_of_data(&self) -> bool {
        matches!(self.mode, Mode::On(_))
            && self.op.class == Class::LowerPrecision
            && self.op.place.is_some()
            && self.changed.is_none()
            && !self.layer.data_in_half
            && !self.any.contains(TensorFlags::LEARNED)
            && !self.op.is_backward()
            && self.are_fp32()
    }

    /// Whether every operand is FP32.
    pub(super) fn are_fp32(&self) -> bool {
        self.operands.iter().all(|o| o.dtype == D::F32)
    }

    fn computes_in(&self, dtype: D) -> bool {
        self.layer.support.of(dtype) == HalfSupport::Arithmetic
    }

    /// Whether a dtype holds the scalars as the operation needs them.
    pub(super) fn is_held(&self, half: D) -> bool {
        let holds = match self.op.otherwise {
            [(_, Case::InexactScalar)] => holds_exactly,
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
    pub(super) fn by_class(&self, class: Class) -> OperandCasts<D> {
        let dtypes = self.dtypes();
        let widest = dtypes.widest();
        let promoted = OperandCasts::to((dtypes.iter().count() > 1).then_some(widest));
        let half_to_f32 = dtypes.intersects(DTypes::HALVES).then_some(D::F32);
        let in_force = match (self.mode, self.layer.declared) {
            // The device is no longer in half.
            (Mode::Off, Some(dtype)) => {
                let is_other = self.operands.iter().any(|o| o.dtype != dtype);
                return OperandCasts::to(is_other.then_some(dtype));
            }
            // Half tensors that the policy made return to FP32. The user's own half tensors stay half, unless
            // they meet FP32: `x.zeros_like()` of a half `x` counts as the user's own. Operations that only
            // move data also stay in half.
            (Mode::Off, None) => {
                let is_demoted = self.operands.iter().any(|o| o.is_demoted());
                let returns = is_demoted && class != Class::Move || promoted.operands.is_some();
                let dtype = if widest == D::F64 { D::F64 } else { D::F32 };
                return OperandCasts::to(returns.then_some(dtype));
            }
            (Mode::On(half), _) => Some(half),
            (Mode::KeepDtypes, _) => None,
        };
        if class == Class::Promote
            && let Some(half) = self.followed()
        {
            return OperandCasts::to(Some(if self.computes_in(half) { half } else { D::F32 }));
        }
        if dtypes.intersects(DTypes::F64 | DTypes::FLEX32) {
            return promoted;
        }
        match class {
            Class::LowerPrecision => match in_force.or(dtypes.half()) {
                None => OperandCasts::to(half_to_f32),
                Some(half) => OperandCasts {
                    result: (!self.computes_in(half)).then_some(D::F32),
                    ..OperandCasts::to(Some(half))
                },
            },
            Class::Fp32 => OperandCasts::to(half_to_f32),
            Class::Fp32Inside => {
                let restored = if self.op.is_backward() {
                    widest
                } else {
                    self.operands[0].dtype
                };
                let is_restored = is_half(restored) && self.computes_in(restored);
                OperandCasts {
                    result: is_restored.then_some(restored),
                    ..OperandCasts::to(half_to_f32)
                }
            }
            Class::Activation if self.first_fits() => {
                OperandCasts::to(in_force.filter(|half| self.computes_in(*half)))
            }
            Class::Promote | Class::PromoteSum | Class::Keep | Class::Activation
                if !self.computes_in(widest) =>
            {
                OperandCasts::to(Some(D::F32))
            }
            _ => promoted,
        }
    }

    /// Whether the first operand is FP32 that fits in the half dtype in force, or may be rounded to it.
    fn first_fits(&self) -> bool {
        let Mode::On(half) = self.mode else {
            return false;
        };
        let first = self.operands[0];
        // The result for a number beyond f16 is that for infinity.
        let holds = half != D::F16 || self.op.effect == Effect::Saturates;
        let is_state = first.is_state() && holds;
        let fits = first.dtype != half && (first.fits(half) || is_state);
        fits && !self.op.is_backward()
    }

    /// The half dtype that constants and, in a product, gates follow, if any. The quotient of a constant and a small number, or
    /// of a number and a small constant, may be beyond half. So may a product of unknown length that begins with ones: in
    /// f16, eight factors of a tenth are 0. A product with zeros may be the first step of a recurrence.
    fn followed(&self) -> Option<D> {
        let follows = match self.op.fits() {
            Fits::Quotient => return None,
            Fits::Product if self.any.intersects(BEGINS) => return None,
            _ if self.begins_table() => return None,
            Fits::Product => TensorFlags::CONSTANT | TensorFlags::GATE,
            _ => TensorFlags::CONSTANT,
        };
        let is_on = matches!(self.mode, Mode::On(_));
        if !is_on || self.op.is_backward() || !self.any.intersects(follows) {
            return None;
        }
        let followed = self
            .operands
            .iter()
            .filter(|o| !o.flags.intersects(follows));
        let followed: DTypes = followed.map(|o| DTypes::of(o.dtype)).collect();
        let half = followed.only_half()?;
        let holds = |o: &Operand<D>| !o.has(TensorFlags::GATE) || o.fits(half);
        self.operands.iter().all(holds).then_some(half)
    }

    /// Whether a program begins to fill a table of zeros. It may compute each row from the row before. A write to more than a
    /// small part of the zeros pads a tensor. Where autodiff runs elsewhere, the write may be the gradient of a slice.
    fn begins_table(&self) -> bool {
        self.op.effect == Effect::Assigns
            && self.operands[0].is_state()
            && self.site.is_tracked(0).is_some()
            && self.is_small(1, 0)
    }

    /// The casts of this call, derived from the casts of the class.
    pub(super) fn casts(&self, class: Class, by_class: OperandCasts<D>) -> OperandCasts<D> {
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
                casts = OperandCasts::to(None);
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
            casts = OperandCasts::to(Some(D::F32));
        }
        let computed = casts.operands.unwrap_or(self.operands[0].dtype);
        if class != Class::Fp32Inside && is_half(computed) && self.is_inexact(computed) {
            casts = OperandCasts::widened(computed, casts.result.unwrap_or(computed));
        }
        casts
    }

    /// Whether FP32 computes what the class leaves in half: the device is not exact in it, or was not shown to be exact with
    /// a scalar that half rounds.
    fn is_inexact(&self, half: D) -> bool {
        if !self.op.is_widened() {
            return self.is_exact(half) == Some(false);
        }
        let is_rounded = |scalar: &f64| !holds_exactly(half, *scalar);
        self.is_tried() && self.scalars.iter().any(is_rounded) && self.is_exact(half) != Some(true)
    }

    /// The casts of an operation that the table computes in FP32 and a configuration in half. Below autodiff
    /// the table applies, so an operation that autodiff does not compose only needs half operands.
    fn narrowed(&self, half: D) -> OperandCasts<D> {
        let is_widened = if self.layer.is_kernel {
            self.is_exact(half) != Some(true)
        } else {
            self.op.role == Role::Composed
        };
        if is_widened {
            return OperandCasts::widened(half, half);
        }
        OperandCasts {
            result: Some(half),
            ..OperandCasts::to(Some(half))
        }
    }

    /// Whether operations are tried here. Nothing is tried above autodiff: the operands are cast to half anyway, so
    /// that the tape keeps half.
    fn is_tried(&self) -> bool {
        self.layer.is_kernel && self.mode != Mode::Off
    }

    /// Whether a trial showed the device to be exact in half; `None` if nothing is tried.
    fn is_exact(&self, half: D) -> Option<bool> {
        let tried = self.op.tried.filter(|_| self.is_tried())?;
        let known = self.layer.known.is_exact(tried.kind(), half);
        known.or_else(|| self.site.tried(tried, half))
    }

    /// The half dtype in force, if the policy itself records the operation.
    pub(super) fn records_in(&self) -> Option<D> {
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
