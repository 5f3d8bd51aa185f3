//! The decision: everything that happens to an operation.

#[cfg(test)]
mod tests;

use super::casts::{Mode, Support};
use super::trials::TriedOp;
use super::values::KEPT;
use super::{Class, Known, Op, OpPrecision, Role, TensorFlags};
use crate::FloatDType;
use crate::dtype::is_half;

/// A float operand of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand<D> {
    /// Its real dtype.
    pub dtype: D,
    /// The policy's record of the tensor.
    pub flags: TensorFlags,
    /// How many gradients the tensor is the sum of, if it is a half gradient; how many half values, if it is FP32 that
    /// fits in f16.
    pub terms: u8,
}

impl<D: FloatDType> Operand<D> {
    /// Whether the dtype is `half`, or FP32 that fits in `half`.
    pub fn fits(self, half: D) -> bool {
        self.dtype == half || self.dtype == D::F32 && self.has(TensorFlags::fits(half))
    }

    /// Whether this is the state of a recurrence, or the zeros that one begins with.
    pub fn is_state(self) -> bool {
        self.dtype == D::F32 && self.has(TensorFlags::STATE)
    }

    pub(super) fn has(self, flag: TensorFlags) -> bool {
        self.flags.contains(flag)
    }

    pub(super) fn is_demoted(self) -> bool {
        let by_policy = TensorFlags::DEMOTED | TensorFlags::WEIGHT;
        self.flags.intersects(by_policy) && is_half(self.dtype)
    }
}

/// The layer that an operation runs on.
#[derive(Debug, Clone, Copy)]
pub struct Layer<D> {
    /// How the policy applies, before the operands are considered.
    pub mode: Mode<D>,
    /// Whether no autodiff lies below: the backend's operation is a kernel.
    pub is_kernel: bool,
    /// What the device supports.
    pub support: Support,
    /// Whether a contraction in which nothing [learned](TensorFlags::LEARNED) takes part is demoted, too.
    pub data_in_half: bool,
    /// The dtype of operands and result in the user's program; `None` if this is the real dtype.
    pub declared: Option<D>,
    /// What the exceptions of the device say of the operation.
    pub known: Known,
}

/// What a decision asks only where it needs the answer.
pub trait Site<D> {
    /// Tries an operation in `half` that is not known yet. Returns whether the device is exact in it; `None` if it is
    /// not to be tried.
    fn tried(&self, op: TriedOp, half: D) -> Option<bool>;

    /// The number of elements of an operand, by its place.
    fn elements(&self, operand: usize) -> usize;

    /// The inner dimension of a product of matrices: the last dimension of the first operand.
    fn inner_dimension(&self) -> usize;

    /// Whether a gradient flows to an operand, by its place; `None` if autodiff runs elsewhere.
    fn is_tracked(&self, operand: usize) -> Option<bool>;
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
    /// How many gradients the result is the sum of, if it is a half gradient; how many half values, if it is FP32 that
    /// fits in f16.
    pub terms: u8,
    /// The half dtype in force, if the policy itself records the operation.
    pub records_in: Option<D>,
    /// Whether the layer below autodiff keeps the dtypes that this decision gives it.
    pub keeps_dtypes: bool,
    /// Whether the operation contracts in half on a device that does nothing else in half.
    pub only_contracts: bool,
    /// Whether the FP32 values of a half result are kept for a formula that sums in FP32. This saves a cast
    /// and a rounding.
    pub keeps_wide: bool,
    /// Whether the operation is a contraction that stays FP32 because nothing learned takes part.
    pub is_of_data: bool,
    /// Whether the policy has half computed from a half operand that it made: FP32 might have more digits.
    pub is_in_half: bool,
}

/// Decides an operation of a layer on these operands, of which there is at least one, and these scalars.
///
/// - The mode is the layer's, but gradients are never demoted.
/// - The class is the row's class, or the class that the row names for a case that applies. A configuration
///   changes the class in the forward pass, where its half dtype is in force: the backward pass follows the
///   dtypes of the forward pass, and the steps of a formula follow the table. A change to half does not apply
///   where the device does not compute in half or where half does not hold a scalar.
/// - A contraction of FP32 data, in which nothing learned takes part, is no contraction to the policy: its values
///   may be of any size and need all their bits, as positions, indices or covariances do.
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
    layer: &Layer<D>,
    site: &impl Site<D>,
) -> Decision<D> {
    let call = Request::of(op, operands, scalars, layer, site);
    if call.is_fp32_alone() {
        call.alone()
    } else {
        call.by_row()
    }
}

/// The flags of the result of an operation on FP32 operands, which have the flags `any` together, in a mode that demotes
/// nothing: no row changes such an operation. `None` in a mode that may demote, and if an operand has a trace of half.
#[inline]
pub fn fp32_alone<D: FloatDType>(any: TensorFlags, mode: Mode<D>) -> Option<TensorFlags> {
    const TRACES: TensorFlags = KEPT
        .union(TensorFlags::DEMOTED)
        .union(TensorFlags::UNBOUNDED);
    let is_alone = !matches!(mode, Mode::On(_)) && TRACES.contains(any);
    is_alone.then(|| of_fp32(any, mode))
}

/// The flags of an FP32 result in a mode that demotes nothing.
#[inline]
fn of_fp32<D: FloatDType>(any: TensorFlags, mode: Mode<D>) -> TensorFlags {
    let mut flags = any & KEPT | TensorFlags::DEMOTED;
    flags.set(TensorFlags::UNBOUNDED, mode == Mode::Off);
    flags
}

/// The inputs of a decision.
pub(super) struct Request<'a, D, S> {
    pub(super) op: &'a Op,
    pub(super) operands: &'a [Operand<D>],
    pub(super) scalars: &'a [f64],
    pub(super) layer: &'a Layer<D>,
    pub(super) site: &'a S,
    /// The flags that any operand has.
    pub(super) any: TensorFlags,
    pub(super) mode: Mode<D>,
    /// The precision that the configuration gives the operation here.
    pub(super) changed: Option<OpPrecision>,
}

impl<'a, D: FloatDType, S: Site<D>> Request<'a, D, S> {
    fn of(
        op: &'a Op,
        operands: &'a [Operand<D>],
        scalars: &'a [f64],
        layer: &'a Layer<D>,
        site: &'a S,
    ) -> Self {
        let any: TensorFlags = operands.iter().map(|o| o.flags).collect();
        let mut call = Self {
            op,
            operands,
            scalars,
            layer,
            site,
            any,
            mode: if any.contains(TensorFlags::GRADIENT) {
                Mode::KeepDtypes
            } else {
                layer.mode
            },
            changed: None,
        };
        call.changed = call.change();
        call
    }

    /// Whether no row changes the operation. Most operations of a step in FP32 take this shortcut.
    fn is_fp32_alone(&self) -> bool {
        self.op.role != Role::ParameterGradient
            && self.layer.declared.is_none_or(|dtype| dtype == D::F32)
            && fp32_alone(self.any, self.mode).is_some()
            && self.are_fp32()
    }

    fn alone(&self) -> Decision<D> {
        Decision {
            rounded: None,
            operands: None,
            result: None,
            flags: of_fp32(self.any, self.mode),
            terms: 1,
            records_in: None,
            keeps_dtypes: self.mode != Mode::Off && !self.layer.is_kernel,
            only_contracts: false,
            keeps_wide: false,
            is_of_data: false,
            is_in_half: false,
        }
    }

    /// The facts of the operands, then the casts, then the facts of the result.
    fn by_row(&self) -> Decision<D> {
        let is_of_data = self.is_of_data();
        let class = if is_of_data {
            Class::Promote
        } else {
            self.class()
        };
        let by_class = self.by_class(class);
        let casts = self.casts(class, by_class);
        let is_inside = class == Class::Fp32Inside && self.any.contains(TensorFlags::BACKWARD);
        let computed = casts.rounded.or(casts.operands);
        let flags = self.facts(class, computed);
        let dtype = casts.result.or(computed).unwrap_or(self.operands[0].dtype);
        let fits = dtype == D::F32 && flags.contains(TensorFlags::FITS_F16);
        Decision {
            rounded: casts.rounded,
            operands: casts.operands,
            result: casts.result,
            flags,
            terms: self.terms(class, fits),
            records_in: self.records_in(),
            only_contracts: by_class.only_contracts(class),
            keeps_wide: is_inside && casts.result.is_some_and(is_half),
            is_of_data,
            is_in_half: matches!(self.mode, Mode::On(_))
                && is_half(dtype)
                && self.operands[0].is_demoted(),
            ..self.alone()
        }
    }
}
