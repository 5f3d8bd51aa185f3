//! The decision: everything that happens to an operation.

use std::ops::RangeInclusive;
use std::sync::Once;

use half::{bf16, f16};

use super::trials::TriedOp;
use super::{Case, Class, Fits, Op, OpPrecision, Role, TensorFlags};
use crate::FloatDType;

/// Whether a dtype is one of [`HALVES`](FloatDType::HALVES).
#[inline(always)]
pub fn is_half<D: FloatDType>(dtype: D) -> bool {
    dtype == D::F16 || dtype == D::BF16
}

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

/// A float operand of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand<D> {
    /// Its real dtype.
    pub dtype: D,
    /// The policy's record of the tensor.
    pub flags: TensorFlags,
}

impl<D: FloatDType> Operand<D> {
    /// Whether the dtype is `half`, or FP32 that fits in `half`.
    pub fn fits(self, half: D) -> bool {
        self.dtype == half || self.dtype == D::F32 && self.has(TensorFlags::fits(half))
    }

    fn has(self, flag: TensorFlags) -> bool {
        self.flags.contains(flag)
    }

    fn is_demoted(self) -> bool {
        let by_policy = TensorFlags::DEMOTED | TensorFlags::WEIGHT;
        self.flags.intersects(by_policy) && is_half(self.dtype)
    }
}

/// Where an operation runs. The decision reads no more than it needs.
pub trait Site<D> {
    /// How the policy applies, before the operands are considered.
    fn mode(&self) -> Mode<D>;

    /// Whether no autodiff lies below: the backend's operation is a kernel.
    fn is_kernel(&self) -> bool;

    /// What the device supports.
    fn support(&self) -> Support;

    /// Whether a trial showed the device to be exact in an operation in `half`; `None` if the device
    /// is not to be tried.
    fn is_exact(&self, op: TriedOp, half: D) -> Option<bool>;

    /// The number of elements of an operand, by its place.
    fn elements(&self, operand: usize) -> usize;

    /// Whether a gradient flows to an operand, by its place; `None` if autodiff runs elsewhere.
    fn is_tracked(&self, operand: usize) -> Option<bool>;

    /// The dtype of operands and result in the user's program; `None` if this is the real dtype.
    fn declared(&self) -> Option<D>;

    /// The precision that the configuration gives an operation, instead of the table's precision.
    fn changed(&self, op: &Op) -> Option<OpPrecision>;
}

/// Everything that happens to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<D> {
    /// Every operand is rounded to this half dtype first: the device is not exact in it.
    pub rounded: Option<D>,
    /// Every operand is cast to this dtype; `None` casts no operand.
    pub operands: Option<D>,
    /// The result is cast to this dtype; `None` leaves it.
    pub result: Option<D>,
    /// The flags of the result.
    pub flags: TensorFlags,
    /// The half dtype in force, if the policy itself records the operation.
    pub recorded: Option<D>,
    /// Whether the layer below autodiff keeps the dtypes that this decision gives it.
    pub keeps_dtypes: bool,
    /// Whether the operation contracts in half on a device that does nothing else in half.
    pub only_contracts: bool,
    /// Whether the FP32 values of a half result are kept for a formula that sums in FP32. This saves a cast
    /// and a rounding.
    pub keeps_wide: bool,
}

/// The most terms of a sum in half. Autodiff adds up the gradients of a tensor in the tensor's dtype, and a
/// sum of many half numbers stops growing. With this limit, a sum has the error of at most this many terms.
pub const TERMS: u8 = 16;

/// A tracked operand that is this many times smaller than the other operand is a statistic or a parameter of
/// the other's channels.
pub const SMALL: usize = 16;

/// Decides an operation on these operands, of which there is at least one, and these scalars.
///
/// - The mode is the site's, but gradients are never demoted.
/// - The class is the row's class, or the class that the row names for a case that applies. A configuration
///   changes the class in the forward pass, where its half dtype is in force: the backward pass follows the
///   dtypes of the forward pass, and the steps of a formula follow the table. A change to half does not apply
///   where the device does not compute in half or where half does not hold a scalar.
/// - Casts follow from class, mode and dtypes. A device that is exact in an operation that the class widens
///   gets no casts. A device that is not exact in half computes in FP32, from operands that are rounded to
///   half, and returns half: the values of an exact device.
/// - Above autodiff, an operation of class `Fp32Inside` that autodiff does not compose gets no casts, so that
///   the tape keeps half. The layer below autodiff widens the operation.
/// - A step of a backward formula on a half gradient returns half.
/// - Nothing overrides the decision afterwards.
pub fn decide<D: FloatDType>(
    op: &Op,
    operands: &[Operand<D>],
    scalars: &[f64],
    site: &impl Site<D>,
) -> Decision<D> {
    let any = |flag| operands.iter().any(|o| o.has(flag));
    let mode = if any(TensorFlags::GRADIENT) {
        Mode::KeepDtypes
    } else {
        site.mode()
    };
    if is_fp32_alone(op, operands, mode, site) {
        return Decision {
            rounded: None,
            operands: None,
            result: None,
            flags: kept_flags(operands)
                | TensorFlags::DEMOTED
                | match mode {
                    Mode::Off => TensorFlags::UNBOUNDED,
                    Mode::On(_) | Mode::KeepDtypes => TensorFlags::empty(),
                },
            recorded: None,
            keeps_dtypes: mode != Mode::Off && !site.is_kernel(),
            only_contracts: false,
            keeps_wide: false,
        };
    }
    by_row(op, operands, scalars, site, mode)
}

/// Whether the operands are FP32 without a trace of half, where nothing is demoted: no row changes such an
/// operation. Most operations of a step in FP32 take this shortcut.
fn is_fp32_alone<D: FloatDType>(
    op: &Op,
    operands: &[Operand<D>],
    mode: Mode<D>,
    site: &impl Site<D>,
) -> bool {
    const TRACES: TensorFlags = KEPT
        .union(TensorFlags::DEMOTED)
        .union(TensorFlags::UNBOUNDED);
    !matches!(mode, Mode::On(_))
        && op.row.role != Role::ParameterGradient
        && site.declared().is_none_or(|dtype| dtype == D::F32)
        && operands
            .iter()
            .all(|o| o.dtype == D::F32 && TRACES.contains(o.flags))
}

fn by_row<D: FloatDType>(
    op: &Op,
    operands: &[Operand<D>],
    scalars: &[f64],
    site: &impl Site<D>,
    mode: Mode<D>,
) -> Decision<D> {
    let any = |flag| operands.iter().any(|o| o.has(flag));
    let mut call = Call {
        op,
        operands,
        scalars,
        site,
        mode,
        changed: None,
        seen: Seen::of(op, operands, mode),
        terms: terms(operands, site),
    };
    call.changed = call.change();
    let class = call.class();
    let by_class = call.by_class(class);
    let (casts, rounded) = call.casts(class, by_class);
    let is_backward = any(TensorFlags::BACKWARD);
    Decision {
        rounded,
        operands: casts.operands,
        result: casts.result,
        flags: call.flags(class, rounded.or(casts.operands)),
        recorded: call.recorded(),
        keeps_dtypes: mode != Mode::Off && !site.is_kernel(),
        only_contracts: by_class.only_contracts(class),
        keeps_wide: class == Class::Fp32Inside && is_backward && casts.result.is_some_and(is_half),
    }
}

/// The inputs of a decision.
struct Call<'a, D, S> {
    op: &'a Op,
    operands: &'a [Operand<D>],
    scalars: &'a [f64],
    site: &'a S,
    mode: Mode<D>,
    /// The precision that the configuration gives the operation here.
    changed: Option<OpPrecision>,
    seen: Seen<D>,
    /// The number of gradients in a sum of two half gradients.
    terms: Option<u8>,
}

impl<D: FloatDType, S: Site<D>> Call<'_, D, S> {
    fn computes_in(&self, half: D) -> bool {
        self.site.support().of(half) == HalfSupport::Arithmetic
    }

    /// Whether a dtype holds the scalars as the operation needs them.
    fn is_held(&self, half: D) -> bool {
        let holds = match self.op.row.otherwise {
            Some((_, Case::InexactScalar)) => holds_exactly,
            _ => holds,
        };
        self.scalars.iter().all(|scalar| holds(half, *scalar))
    }

    /// The precision that the configuration gives the operation, if it applies.
    fn change(&self) -> Option<OpPrecision> {
        let Mode::On(half) = self.mode else {
            return None;
        };
        let precision = self.site.changed(self.op)?;
        let applies = match precision {
            OpPrecision::F32 => true,
            OpPrecision::Half => {
                // Arithmetic on two FP32 tensors may be an optimizer's update of parameters.
                let follows = matches!(self.op.row.class, Class::Promote | Class::PromoteSum);
                self.computes_in(half)
                    && self.is_held(half)
                    && (!follows || self.operands.iter().any(|o| o.dtype == half))
            }
        };
        (applies && self.is_ours()).then_some(precision)
    }

    /// Whether every operand is FP32 or half.
    fn is_ours(&self) -> bool {
        let is_ours = |o: &Operand<D>| o.dtype == D::F32 || is_half(o.dtype);
        self.operands.iter().all(is_ours)
    }

    /// The row's class, or the class that the row names for a case that applies, or the changed class.
    fn class(&self) -> Class {
        match self.changed {
            Some(OpPrecision::F32) => return Class::Fp32,
            Some(OpPrecision::Half) => return Class::LowerPrecision,
            None => {}
        }
        let class = self.op.row.class;
        let Some((other, case)) = self.op.row.otherwise else {
            return class;
        };
        let holds = match case {
            Case::InexactScalar
                if !self.seen.demoted || self.operands[0].has(TensorFlags::FILLED) =>
            {
                false
            }
            Case::UnheldScalar | Case::InexactScalar => {
                let first = self.operands[0].dtype;
                let computed = || self.by_class(class).operands.unwrap_or(first);
                self.mode != Mode::Off && !(self.is_held(first) && self.is_held(computed()))
            }
            Case::OnlyContracts => self.by_class(class).only_contracts(class),
            Case::WithoutAutodiff => self.site.is_kernel(),
            Case::Accumulates => false,
        };
        if holds { other } else { class }
    }

    /// The casts that follow from class, mode and dtypes.
    fn by_class(&self, class: Class) -> Casts<D> {
        match (self.mode, self.site.declared()) {
            // The device is no longer in half.
            (Mode::Off, Some(dtype)) => {
                Casts::of_if(self.operands.iter().any(|o| o.dtype != dtype), dtype)
            }
            _ => self
                .seen
                .casts(class, self.mode, |half| self.computes_in(half)),
        }
    }

    /// The casts of this call, derived from the casts of the class, and the dtype that every operand is
    /// rounded to first.
    fn casts(&self, class: Class, by_class: Casts<D>) -> (Casts<D>, Option<D>) {
        let mut casts = by_class;
        let role = self.op.row.role;
        if self.changed == Some(OpPrecision::Half)
            && matches!(self.op.row.class, Class::Fp32 | Class::Fp32Inside)
        {
            return self.narrowed(by_class);
        }
        if class == Class::Fp32Inside {
            let is_taken_whole =
                self.mode != Mode::Off && !self.site.is_kernel() && role != Role::Composed;
            let only_half = || {
                self.seen
                    .only_half()
                    .filter(|_| casts.operands == Some(D::F32))
            };
            if is_taken_whole || only_half().and_then(|half| self.is_exact(half)) == Some(true) {
                casts = Casts::NONE;
            }
        }
        if role == Role::ParameterGradient && self.mode != Mode::Off {
            casts.result = self.site.declared().or(casts.result);
        }
        let is_step = matches!(role, Role::Forward | Role::Composed);
        if is_step
            && !matches!(class, Class::Move | Class::LowerPrecision)
            && let Some(half) = half_gradient(self.operands).filter(|half| self.computes_in(*half))
        {
            casts.result = Some(half);
        }
        if class == Class::PromoteSum && self.terms.is_some_and(|terms| terms > TERMS) {
            casts = Casts::of(D::F32);
        }
        let computed = casts.operands.unwrap_or(self.operands[0].dtype);
        if class == Class::Fp32Inside
            || !is_half(computed)
            || self.is_exact(computed) != Some(false)
        {
            return (casts, None);
        }
        let casts = Casts {
            operands: Some(D::F32),
            result: casts.result.or(Some(computed)),
        };
        (casts, Some(computed))
    }

    /// The casts of an operation that the table computes in FP32 and a configuration in half. Below autodiff
    /// the table applies, so an operation that autodiff does not compose only needs half operands.
    fn narrowed(&self, to_half: Casts<D>) -> (Casts<D>, Option<D>) {
        let is_kernel = self.site.is_kernel();
        let is_widened = match to_half.operands {
            Some(half) if is_kernel => self.is_exact(half) != Some(true),
            _ => self.op.row.role == Role::Composed,
        };
        let casts = Casts {
            operands: if is_widened {
                Some(D::F32)
            } else {
                to_half.operands
            },
            result: to_half.operands,
        };
        (casts, to_half.operands.filter(|_| is_widened))
    }

    /// Whether a trial showed the device to be exact in half; `None` if nothing is tried. Nothing
    /// is tried above autodiff: the operands are cast to half anyway, so that the tape keeps half.
    fn is_exact(&self, half: D) -> Option<bool> {
        let tried = self
            .op
            .tried
            .filter(|_| self.site.is_kernel() && self.mode != Mode::Off);
        self.site.is_exact(tried?, half)
    }

    /// The flags of the result, of an operation that computes in this dtype.
    fn flags(&self, class: Class, computed: Option<D>) -> TensorFlags {
        let all = |is: fn(&Operand<D>) -> bool| self.operands.iter().all(is);
        let mut flags = kept_flags(self.operands);
        if computed == Some(D::F16) {
            flags |= TensorFlags::FROM_F16;
        }
        // Moved or in arithmetic with others alone, a weight stays one.
        let is_weight = matches!(
            class,
            Class::Move | Class::Keep | Class::Promote | Class::PromoteSum
        ) && all(|o| o.has(TensorFlags::WEIGHT));
        let is_own = all(|o| is_half(o.dtype) && !o.is_demoted());
        flags.set(TensorFlags::DEMOTED, !is_own && !is_weight);
        flags.set(TensorFlags::WEIGHT, is_weight);
        // Padding adds a constant of its own.
        let follow = || self.scalars.iter().all(|scalar| follows_half::<D>(*scalar));
        flags.set(
            TensorFlags::CONSTANT,
            class == Class::Move && all(|o| o.has(TensorFlags::CONSTANT)) && follow(),
        );
        flags |= self.sigmoid(class, computed);
        flags.set(TensorFlags::FILLED, self.is_filled(class, computed));
        flags.set(TensorFlags::UNBOUNDED, self.is_unbounded(class));
        for half in D::HALVES {
            flags.set(
                TensorFlags::fits(half),
                self.is_held(half) && self.fits(half, class),
            );
        }
        match self.terms {
            Some(terms) if class == Class::PromoteSum && terms <= TERMS => flags.with_terms(terms),
            None => flags.with_terms(self.terms_of_same(class)),
            _ => flags,
        }
    }

    /// Whether the result has a scalar in it that was rounded to half.
    fn is_filled(&self, class: Class, computed: Option<D>) -> bool {
        let half = computed.unwrap_or(self.operands[0].dtype);
        let fills = || self.op.name == "float_mask_fill";
        let is_rounded = || {
            self.scalars
                .iter()
                .any(|scalar| !holds_exactly(half, *scalar))
        };
        let passes = matches!(class, Class::Move | Class::Keep | Class::Promote);
        let any_filled = || self.operands.iter().any(|o| o.has(TensorFlags::FILLED));
        is_half(half) && (fills() && is_rounded() || passes && any_filled())
    }

    /// Whether the result is a sigmoid in half, or a sigmoid times -1. Warns if the operation is the logarithm
    /// of one minus a sigmoid.
    fn sigmoid(&self, class: Class, computed: Option<D>) -> TensorFlags {
        let name = self.op.name;
        let computes = matches!(class, Class::Activation | Class::LowerPrecision);
        if computes && name == "sigmoid" {
            let is_half = is_half(computed.unwrap_or(self.operands[0].dtype));
            return if is_half && self.mode != Mode::Off {
                TensorFlags::SIGMOID
            } else {
                TensorFlags::empty()
            };
        }
        let both = TensorFlags::SIGMOID | TensorFlags::MINUS_SIGMOID;
        let of = self.operands[0].flags & both;
        if of.is_empty() {
            return of;
        }
        // A bound at some distance from 0 and 1 keeps the values away from them.
        let is_wide = || {
            !self
                .scalars
                .iter()
                .any(|s| (0.01..=0.99).contains(&s.abs()))
        };
        match name {
            "float_log" | "float_log1p" if of.contains(TensorFlags::MINUS_SIGMOID) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    log::warn!(
                        "burn-amp: {name} of one minus a sigmoid in half precision: a sigmoid near 1 is \
                         rounded to 1, and a confident error then has no gradient in Burn's \
                         BinaryCrossEntropyLoss. Pass the logits to the loss, with \
                         BinaryCrossEntropyLossConfig::with_logits(true), use log_sigmoid, or compute the \
                         sigmoid in full_precision"
                    );
                });
                TensorFlags::empty()
            }
            "float_neg" if of.contains(TensorFlags::SIGMOID) => TensorFlags::MINUS_SIGMOID,
            "float_add_scalar" | "float_sub_scalar" => of,
            "float_clamp" | "float_clamp_min" | "float_clamp_max" if is_wide() => of,
            _ if class == Class::Move => of,
            _ => TensorFlags::empty(),
        }
    }

    /// The number of gradients in a view of a sum, as the backward pass of a reshape is, or in a multiple of a
    /// sum, such as the momentum of an optimizer, whose gradients are half: the momentum becomes FP32 after a
    /// few steps. 1 for any other operation.
    fn terms_of_same(&self, class: Class) -> u8 {
        let is_multiple = matches!(self.op.name, "float_mul_scalar" | "float_div_scalar");
        let operand = self
            .operands
            .first()
            .filter(|o| may_be_gradient(o, self.site));
        operand
            .filter(|_| is_multiple || class == Class::Move)
            .map_or(1, |o| o.flags.terms())
    }

    /// Whether a factor may take values of the range of f16 far beyond it. Twice the range is allowed, as for a
    /// sum: a dropout of one half doubles.
    fn leaves_f16(&self) -> bool {
        let leaves: fn(f64) -> bool = match self.op.name {
            "float_mul_scalar" => |by| by.abs() > 2.0,
            "float_div_scalar" => |by| by.abs() < 0.5,
            _ => return false,
        };
        self.scalars.iter().any(|scalar| leaves(*scalar))
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
        let divides = self.op.name == "float_div_scalar";
        let is_beyond = |scalar: &f64| {
            let factor = if divides { 1.0 / scalar } else { *scalar };
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
        // A result that a configuration sets to FP32 stays FP32 permanently.
        if self.changed.is_some() {
            return false;
        }
        // Where the policy is off, a result stays FP32 permanently.
        let flag = TensorFlags::fits(half);
        let is_fitting = |o: &Operand<D>| o.dtype == D::F32 && o.has(flag);
        if self.mode == Mode::Off && !(class == Class::Move && self.operands.iter().any(is_fitting))
        {
            return false;
        }
        let all = self.operands.iter().all(|o| o.fits(half));
        match self.op.row.fits {
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
        let site = self.site;
        let is_unbounded = |i: usize| {
            let operand = self.operands[i];
            operand.dtype == D::F32 && operand.has(TensorFlags::UNBOUNDED)
        };
        let is_statistic = |i, beside| {
            !is_unbounded(i)
                && site.elements(i) * SMALL <= site.elements(beside)
                && site.is_tracked(i) == Some(true)
        };
        match (self.operands, self.mode) {
            ([lhs, rhs], Mode::On(_)) => {
                lhs.fits(half) && is_statistic(1, 0)
                    || either && rhs.fits(half) && is_statistic(0, 1)
            }
            _ => false,
        }
    }

    /// The half dtype in force, if the policy itself records the operation.
    fn recorded(&self) -> Option<D> {
        match self.mode {
            // Burn's own form keeps FP32 operands in FP32.
            Mode::On(_) if self.changed == Some(OpPrecision::F32) => None,
            Mode::On(half) if !self.site.is_kernel() && self.is_ours() => {
                self.op.row.recorded.map(|_| half)
            }
            _ => None,
        }
    }
}

/// The casts of an operation's operands and result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Casts<D> {
    operands: Option<D>,
    result: Option<D>,
}

impl<D: FloatDType> Casts<D> {
    const NONE: Self = Self {
        operands: None,
        result: None,
    };

    /// Casts every operand, and leaves the result.
    fn of(dtype: D) -> Self {
        Self {
            operands: Some(dtype),
            result: None,
        }
    }

    fn of_if(condition: bool, dtype: D) -> Self {
        if condition {
            Self::of(dtype)
        } else {
            Self::NONE
        }
    }

    /// Whether these are the casts of a contraction on a device that only contracts in half.
    fn only_contracts(self, class: Class) -> bool {
        let is_half = self.operands.is_some_and(is_half);
        class == Class::LowerPrecision && is_half && self.result == Some(D::F32)
    }
}

/// The dtypes among an operation's operands.
#[derive(Debug, Clone, Copy)]
struct Seen<D> {
    /// The dtype that `Fp32Inside` restores.
    first: D,
    /// The dtypes of the operands that are not constants, and of the constants.
    others: u8,
    constants: u8,
    /// Whether the first operand is FP32 that fits in the half dtype in force.
    fits: bool,
    /// Whether the policy made an operand half.
    demoted: bool,
}

const F64: u8 = 1 << 4;
const F32: u8 = 1 << 3;
const FLEX32: u8 = 1 << 2;
const F16: u8 = 1 << 1;
const BF16: u8 = 1;
const HALVES: u8 = F16 | BF16;

fn bit<D: FloatDType>(dtype: D) -> u8 {
    match dtype {
        _ if dtype == D::F64 => F64,
        _ if dtype == D::FLEX32 => FLEX32,
        _ if dtype == D::F16 => F16,
        _ if dtype == D::BF16 => BF16,
        _ => F32,
    }
}

impl<D: FloatDType> Seen<D> {
    fn of(op: &Op, operands: &[Operand<D>], mode: Mode<D>) -> Self {
        let first = operands[0];
        let fits = match mode {
            Mode::On(half) => first.dtype == D::F32 && first.has(TensorFlags::fits(half)),
            Mode::Off | Mode::KeepDtypes => false,
        };
        let mut seen = Self {
            first: first.dtype,
            others: 0,
            constants: 0,
            fits,
            demoted: operands.iter().any(|o| o.is_demoted()),
        };
        // The quotient of a constant and a small number, or of a number and a small constant, may be beyond half.
        let is_quotient = op.name == "float_div";
        for (i, operand) in operands.iter().enumerate() {
            let follows = !is_quotient && (i > 0 || !fits);
            let is_constant = operand.has(TensorFlags::CONSTANT) && follows;
            if is_constant {
                seen.constants |= bit(operand.dtype);
            } else {
                seen.others |= bit(operand.dtype);
            }
        }
        match op.row.role {
            Role::Forward | Role::Composed => seen,
            Role::Backward | Role::ParameterGradient => Self {
                first: seen.widest(),
                others: seen.all(),
                constants: 0,
                fits: false,
                ..seen
            },
        }
    }

    fn all(self) -> u8 {
        self.others | self.constants
    }

    fn any_half(self) -> bool {
        self.all() & HALVES != 0
    }

    /// The half dtype of all operands; `None` if any has another dtype.
    fn only_half(self) -> Option<D> {
        half(self.all()).filter(|_| self.all() & !HALVES == 0)
    }

    /// The half dtype that constants follow, if any.
    fn followed(self) -> Option<D> {
        let is_followed = self.constants != 0 && self.others & !HALVES == 0;
        half(self.others).filter(|_| is_followed)
    }

    fn widest(self) -> D {
        widest_of(self.all())
    }

    /// The casts of an operation of a class on these operands.
    fn casts(self, class: Class, mode: Mode<D>, computes_in: impl Fn(D) -> bool) -> Casts<D> {
        let is_mixed = !self.all().is_power_of_two();
        if mode == Mode::Off {
            // Half tensors that the policy made return to FP32. The user's own half tensors stay half, unless
            // they meet FP32: `x.zeros_like()` of a half `x` counts as the user's own. Operations that only
            // move data also stay in half.
            let dtype = if self.widest() == D::F64 {
                D::F64
            } else {
                D::F32
            };
            return Casts::of_if(self.demoted && class != Class::Move || is_mixed, dtype);
        }
        if let (Mode::On(_), Class::Promote, Some(half)) = (mode, class, self.followed()) {
            return Casts::of(if computes_in(half) { half } else { D::F32 });
        }
        if self.all() & (F64 | FLEX32) != 0 {
            return Casts::of_if(is_mixed, self.widest());
        }
        match class {
            Class::LowerPrecision => {
                let demoted_to = match mode {
                    Mode::On(dtype) => Some(dtype),
                    Mode::Off | Mode::KeepDtypes => half(self.all()),
                };
                match demoted_to {
                    None => Casts::of_if(self.any_half(), D::F32),
                    Some(dtype) => Casts {
                        operands: Some(dtype),
                        result: (!computes_in(dtype)).then_some(D::F32),
                    },
                }
            }
            Class::Fp32 => Casts::of_if(self.any_half(), D::F32),
            Class::Fp32Inside => Casts {
                operands: self.any_half().then_some(D::F32),
                result: (self.first != D::F32 && computes_in(self.first)).then_some(self.first),
            },
            Class::Activation if self.fits => match mode {
                Mode::On(dtype) => Casts::of_if(computes_in(dtype), dtype),
                Mode::Off | Mode::KeepDtypes => Casts::NONE,
            },
            Class::Promote | Class::PromoteSum | Class::Keep | Class::Activation => {
                let widest = self.widest();
                if half(self.all()) == Some(widest) && !computes_in(widest) {
                    Casts::of(D::F32)
                } else {
                    Casts::of_if(is_mixed, widest)
                }
            }
            Class::Move => Casts::of_if(is_mixed, self.widest()),
        }
    }
}

/// The widest dtype: F64, then F32, Flex32, half. F16 with BF16 gives F32, which holds both.
pub fn widest<D: FloatDType>(dtypes: impl IntoIterator<Item = D>) -> D {
    widest_of(dtypes.into_iter().fold(0, |seen, dtype| seen | bit(dtype)))
}

fn widest_of<D: FloatDType>(seen: u8) -> D {
    match seen {
        _ if seen & F64 != 0 => D::F64,
        _ if seen & F32 != 0 => D::F32,
        _ if seen & FLEX32 != 0 => D::FLEX32,
        _ => half(seen).unwrap_or(D::F32),
    }
}

/// The half dtype among these; `None` if there are none or both.
fn half<D: FloatDType>(seen: u8) -> Option<D> {
    match seen & HALVES {
        F16 => Some(D::F16),
        BF16 => Some(D::BF16),
        _ => None,
    }
}

/// The flags that a result has if any operand has them.
const KEPT: TensorFlags = TensorFlags::GRADIENT
    .union(TensorFlags::FROM_F16)
    .union(TensorFlags::BACKWARD)
    .union(TensorFlags::USED_IN_HALF);

fn kept_flags<D: FloatDType>(operands: &[Operand<D>]) -> TensorFlags {
    let any: TensorFlags = operands.iter().map(|o| o.flags).collect();
    any & KEPT
}

/// The dtype of the gradients among the operands of a formula of the backward pass, if it is half.
fn half_gradient<D: FloatDType>(operands: &[Operand<D>]) -> Option<D> {
    let gradients = operands.iter().filter(|o| o.has(TensorFlags::BACKWARD));
    let mut dtypes = gradients.map(|o| o.dtype);
    let first = dtypes.next().filter(|dtype| is_half(*dtype))?;
    dtypes.all(|dtype| dtype == first).then_some(first)
}

/// The number of gradients in a sum of two half gradients. Where autodiff runs elsewhere, any tensor that the
/// policy made half may be a gradient.
fn terms<D: FloatDType>(operands: &[Operand<D>], site: &impl Site<D>) -> Option<u8> {
    let [lhs, rhs] = operands else {
        return None;
    };
    let are_gradients = [lhs, rhs].into_iter().all(|o| may_be_gradient(o, site));
    (lhs.dtype == rhs.dtype && are_gradients).then(|| lhs.flags.terms() + rhs.flags.terms())
}

/// Whether a half tensor is a gradient, or may be one.
fn may_be_gradient<D: FloatDType>(operand: &Operand<D>, site: &impl Site<D>) -> bool {
    let is_gradient = || {
        operand.has(TensorFlags::BACKWARD) || operand.is_demoted() && site.is_tracked(0).is_none()
    };
    is_half(operand.dtype) && is_gradient()
}

/// Whether `dtype` holds `scalar` at its usual precision: `scalar` neither overflows nor falls
/// among the subnormals, which lose precision. Zero, infinities and NaN count as held.
///
/// Bounds of F16: 6.1e-5 to 65504; of BF16: 1.2e-38 to 3.39e38.
pub fn holds<D: FloatDType>(dtype: D, scalar: f64) -> bool {
    let range = match dtype {
        _ if dtype == D::F16 => F16_RANGE,
        _ if dtype == D::BF16 => BF16_RANGE,
        _ => return true,
    };
    scalar == 0.0 || !scalar.is_finite() || range.contains(&scalar.abs())
}

/// Whether `dtype` holds the FP32 number `scalar` without an error, as infinities and NaN.
pub fn holds_exactly<D: FloatDType>(dtype: D, scalar: f64) -> bool {
    let scalar = scalar as f32;
    let held = match dtype {
        _ if dtype == D::F16 => f16::from_f32(scalar).to_f32(),
        _ if dtype == D::BF16 => bf16::from_f32(scalar).to_f32(),
        _ => return true,
    };
    held == scalar || scalar.is_nan()
}

/// Whether an FP32 tensor of this one value follows half tensors: both halves hold exactly this value, and a product
/// with it stays in the range of the other factor, or is infinite in any dtype.
pub fn follows_half<D: FloatDType>(value: f64) -> bool {
    let is_small = value.abs() <= 1.0 || !value.is_finite();
    // bf16 has the upper half of FP32's bits, and fewer digits than f16.
    let is_exact = (value as f32).to_bits() & 0xffff == 0;
    is_small && is_exact && D::HALVES.into_iter().all(|half| holds(half, value))
}

/// The largest number of a half dtype from `low` to below `high`, if there is one: random numbers below `high`
/// stay below it in half.
pub fn largest_within<D: FloatDType>(half: D, low: f64, high: f64) -> Option<f64> {
    let (digits, range) = if half == D::F16 {
        (10, F16_RANGE)
    } else {
        (7, BF16_RANGE)
    };
    let below = high.next_down().min(*range.end());
    // The distance of the numbers with this exponent; subnormal numbers have that of the smallest normal one.
    let exponent = |value: f64| (value.abs().to_bits() >> 52) as i32 - 1023;
    let step = 2_f64.powi(exponent(below).max(exponent(*range.start())) - digits);
    Some((below / step).floor() * step).filter(|largest| *largest >= low)
}

/// From the smallest normal value to the largest finite one.
const F16_RANGE: RangeInclusive<f64> = 6.103515625e-5..=65504.0;

/// As [`F16_RANGE`]: bf16 has the upper 16 bits of FP32.
const BF16_RANGE: RangeInclusive<f64> =
    f32::MIN_POSITIVE as f64..=f32::from_bits(0x7f7f_0000) as f64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;
    use crate::policy::table::{OPERATIONS, at};
    use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};
    use DType::{BF16, F16, F32, F64};

    const CLASSES: [Class; 8] = [
        LowerPrecision,
        Fp32,
        Fp32Inside,
        Promote,
        PromoteSum,
        Keep,
        Activation,
        Move,
    ];

    /// A device with full half support and without trials.
    #[derive(Clone, Copy)]
    struct Here {
        mode: Mode<DType>,
        is_kernel: bool,
        support: Support,
        exact: Option<bool>,
        /// Of each operand, its elements and whether it is tracked.
        sizes: [(usize, Option<bool>); 2],
        declared: Option<DType>,
        changed: Option<OpPrecision>,
    }

    const ON: Here = Here {
        mode: Mode::On(F16),
        is_kernel: false,
        support: Support {
            f16: HalfSupport::Arithmetic,
            bf16: HalfSupport::Arithmetic,
        },
        exact: None,
        sizes: [(1, Some(false)); 2],
        declared: None,
        changed: None,
    };
    const BELOW: Here = Here {
        mode: Mode::KeepDtypes,
        is_kernel: true,
        ..ON
    };
    const OFF: Here = Here {
        mode: Mode::Off,
        ..ON
    };
    /// A device that only contracts in bf16.
    const CONTRACTS: Here = Here {
        mode: Mode::On(BF16),
        support: Support {
            f16: HalfSupport::Arithmetic,
            bf16: HalfSupport::Contractions,
        },
        ..ON
    };

    impl Site<DType> for Here {
        fn mode(&self) -> Mode<DType> {
            self.mode
        }

        fn is_kernel(&self) -> bool {
            self.is_kernel
        }

        fn support(&self) -> Support {
            self.support
        }

        fn is_exact(&self, _: TriedOp, _: DType) -> Option<bool> {
            self.exact
        }

        fn elements(&self, operand: usize) -> usize {
            self.sizes[operand].0
        }

        fn is_tracked(&self, operand: usize) -> Option<bool> {
            self.sizes.get(operand).and_then(|size| size.1)
        }

        fn declared(&self) -> Option<DType> {
            self.declared
        }

        fn changed(&self, _: &Op) -> Option<OpPrecision> {
            self.changed
        }
    }

    fn with(dtype: DType, flags: TensorFlags) -> Operand<DType> {
        Operand { dtype, flags }
    }

    fn plain(dtypes: &[DType]) -> Vec<Operand<DType>> {
        let plain = |dtype: &DType| with(*dtype, TensorFlags::empty());
        dtypes.iter().map(plain).collect()
    }

    /// An operation of a class that no row names.
    fn of(class: Class, operands: &[Operand<DType>], here: Here) -> Decision<DType> {
        decide(&Op::custom("", class, Role::Forward), operands, &[], &here)
    }

    /// The casts of operands and result.
    fn casts(class: Class, dtypes: &[DType], here: Here) -> (Option<DType>, Option<DType>) {
        let decision = of(class, &plain(dtypes), here);
        (decision.operands, decision.result)
    }

    const NONE: (Option<DType>, Option<DType>) = (None, None);

    fn named(name: &'static str, operands: &[Operand<DType>], here: Here) -> Decision<DType> {
        decide(&Op::named(name), operands, &[], &here)
    }

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
        // In FP32, and in the user's own half, the policy has no part in it.
        for (dtype, here) in [(F32, ON), (F16, OFF)] {
            let out = named("sigmoid", &plain(&[dtype]), here).flags;
            assert!(!out.contains(SIGMOID), "{dtype:?}");
        }
    }

    #[test]
    fn the_shortcut_for_fp32_is_what_the_rows_say() {
        let flags = [KEPT, TensorFlags::DEMOTED, TensorFlags::CONSTANT];
        let flags = flags.iter().flat_map(TensorFlags::iter);
        let flags: Vec<_> = flags.chain([TensorFlags::empty(), KEPT]).collect();
        let pairs = flags.iter().flat_map(|a| flags.iter().map(|b| (*a, *b)));
        let operands = pairs.flat_map(|(a, b)| {
            let one = [F32, F16, F64].map(|dtype| vec![with(dtype, a)]);
            let two = [F32, F16].map(|dtype| vec![with(F32, a), with(dtype, b)]);
            one.into_iter().chain(two)
        });
        let operands: Vec<_> = operands.collect();
        let mut shortcuts = 0;
        for op in (0..OPERATIONS).map(|place| Op::named(at(place).1)) {
            for mode in [Mode::Off, Mode::KeepDtypes] {
                for (is_kernel, tracked, declared) in [
                    (true, Some(false), None),
                    (false, Some(true), None),
                    (true, None, Some(F32)),
                    (true, None, Some(F16)),
                ] {
                    let here = Here {
                        mode,
                        is_kernel,
                        declared,
                        sizes: [(1024, tracked), (1, tracked)],
                        ..ON
                    };
                    for operands in &operands {
                        let is_gradient = operands.iter().any(|o| o.has(TensorFlags::GRADIENT));
                        let mode = if is_gradient { Mode::KeepDtypes } else { mode };
                        if !is_fp32_alone(&op, operands, mode, &here) {
                            continue;
                        }
                        shortcuts += 1;
                        for scalars in [&[][..], &[1e-9, 1e9]] {
                            let by_row = by_row(&op, operands, scalars, &here, mode);
                            let decided = decide(&op, operands, scalars, &here);
                            assert_eq!(decided, by_row, "{} {operands:?}", op.name);
                        }
                    }
                }
            }
        }
        assert!(shortcuts > 10_000, "{shortcuts}");
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
    fn a_sum_of_many_half_gradients_goes_on_in_fp32() {
        let gradient = |terms| with(BF16, TensorFlags::BACKWARD.with_terms(terms));
        let sum = |a, b| named("float_add", &[gradient(a), gradient(b)], BELOW);
        for (a, b) in [(1, 1), (15, 1), (8, 8)] {
            let sum = sum(a, b);
            assert_eq!((sum.operands, sum.result), (None, Some(BF16)));
            assert_eq!(sum.flags.terms(), a + b);
        }
        for (a, b) in [(16, 1), (9, 8), (16, 16)] {
            let sum = sum(a, b);
            assert_eq!((sum.operands, sum.result), (Some(F32), None));
            assert_eq!(sum.flags.terms(), 1);
        }
        // A view of a sum, and a multiple of it, have its terms.
        for same in ["float_reshape", "float_swap_dims", "float_mul_scalar"] {
            let same = named(same, &[gradient(16)], BELOW);
            assert_eq!((same.operands, same.flags.terms()), (None, 16));
        }
    }

    #[test]
    fn where_autodiff_runs_elsewhere_any_sum_may_be_of_gradients() {
        let untold = Here {
            sizes: [(1, None); 2],
            ..ON
        };
        let half = |flags: TensorFlags, terms| with(BF16, flags.with_terms(terms));
        let sum = |flags, a, b, here| named("float_add", &[half(flags, a), half(flags, b)], here);
        let demoted = TensorFlags::DEMOTED;
        let few = sum(demoted, 15, 1, untold);
        assert_eq!((few.operands, few.flags.terms()), (None, 16));
        let many = sum(demoted, 16, 1, untold);
        assert_eq!((many.operands, many.result), (Some(F32), None));
        assert_eq!(many.flags.terms(), 1);
        // A half tensor of the user's own, and a tensor on this tape.
        for (flags, here) in [(TensorFlags::empty(), untold), (demoted, ON)] {
            assert_eq!(sum(flags, 16, 1, here).operands, None);
        }
        // A multiple of a sum has the terms of the sum.
        for multiple in ["float_mul_scalar", "float_div_scalar"] {
            let multiple = named(multiple, &[half(demoted, 16)], untold);
            assert_eq!((multiple.operands, multiple.flags.terms()), (None, 16));
        }
        // And so does a view of it.
        for view in ["float_swap_dims", "float_reshape", "float_slice"] {
            let view = named(view, &[half(demoted, 16)], untold);
            assert_eq!((view.operands, view.flags.terms()), (None, 16));
        }
        // Another operation restarts the count.
        let negative = named("float_neg", &[half(demoted, 16)], untold);
        assert_eq!(negative.flags.terms(), 1);
        let product = named("float_mul", &[half(demoted, 16), half(demoted, 16)], untold);
        assert_eq!((product.operands, product.flags.terms()), (None, 1));
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

    #[test]
    fn the_widest_dtype_holds_all() {
        assert_eq!(widest([F16, F16]), F16);
        assert_eq!(widest([F16, BF16]), F32);
        assert_eq!(widest([F16, DType::Flex32]), DType::Flex32);
        assert_eq!(widest([DType::Flex32, F32]), F32);
        assert_eq!(widest([F32, F64]), F64);
    }

    #[test]
    fn scalars_beyond_the_half_range_are_not_held() {
        for scalar in [0.0, -0.0, 1.0, -65504.0, 6.2e-5, f64::INFINITY, f64::NAN] {
            assert!(holds(F16, scalar), "{scalar}");
            assert!(holds(BF16, scalar), "{scalar}");
        }
        for scalar in [-1e9, 65520.0, 1e-5, 1e-8] {
            assert!(!holds(F16, scalar), "{scalar}");
            assert!(holds(BF16, scalar), "{scalar}");
            assert!(holds(F32, scalar), "{scalar}");
        }
        for scalar in [f32::MIN as f64, 1e-40, 1e300] {
            assert!(!holds(BF16, scalar), "{scalar}");
        }
    }

    #[test]
    fn a_scalar_is_held_exactly_or_not() {
        for scalar in [0.0, -1.0, 0.5, 256.0, f64::INFINITY, f64::NAN] {
            for dtype in [F16, BF16, F32] {
                assert!(holds_exactly(dtype, scalar), "{scalar}");
            }
        }
        // In FP32 every scalar is what the program gets.
        assert!(holds_exactly(F32, 0.1) && !holds_exactly(F16, 0.1) && !holds_exactly(BF16, 0.1));
        assert!(holds_exactly(F16, 257.0) && !holds_exactly(BF16, 257.0));
        assert!(!holds_exactly(F16, 70_000.0) && holds_exactly(BF16, 65_536.0));
        assert!(!holds_exactly(F16, 1e-9) && !holds_exactly(BF16, 1e-45));
    }

    #[test]
    fn the_largest_number_below_a_bound_is_the_last_before_it() {
        // Equal bounds, reversed ones, and no number of half between them.
        for (low, high) in [(0.0, 0.0), (0.5, 0.5), (1.0, -1.0), (0.9999, 1.0)] {
            assert_eq!(largest_within(F16, low, high), None);
            assert_eq!(largest_within(BF16, low, high), None);
        }
        for (bound, f16, bf16) in [
            (1.0, 1.0 - 2_f64.powi(-11), 1.0 - 2_f64.powi(-8)),
            (-1.0, -1.0 - 2_f64.powi(-10), -1.0 - 2_f64.powi(-7)),
            (0.999, 0.9985351562, 1.0 - 2_f64.powi(-8)),
            (1000.25, 1000.0, 1000.0),
            (1e6, 65504.0, 999424.0),
            (0.0, -2_f64.powi(-24), -2_f64.powi(-133)),
            (f64::INFINITY, 65504.0, f32::from_bits(0x7f7f_0000).into()),
        ] {
            for (half, expected) in [(F16, f16), (BF16, bf16)] {
                let below = largest_within(half, f64::MIN, bound).unwrap();
                assert!(
                    (below - expected).abs() <= 1e-10 * expected.abs(),
                    "{bound}: {below}"
                );
                assert!(below < bound);
            }
        }
    }
}
