//! The decision: which casts an operation needs, given the dtypes of its operands.

use std::ops::RangeInclusive;

use super::Class;
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

/// The float dtypes among an operation's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operands<D> {
    first: D,
    seen: u8,
    constants: u8,
    widened: bool,
}

const F64: u8 = 1 << 4;
const F32: u8 = 1 << 3;
const FLEX32: u8 = 1 << 2;
const F16: u8 = 1 << 1;
const BF16: u8 = 1;
const HALF_BITS: u8 = F16 | BF16;

impl<D: FloatDType> Operands<D> {
    /// The first operand, whose dtype `Fp32Inside` restores.
    pub fn one(dtype: D) -> Self {
        Self {
            first: dtype,
            seen: bit(dtype),
            constants: 0,
            widened: false,
        }
    }

    /// As [`one`](Operands::one), for an FP32 operand that fits in the half dtype in force.
    pub fn widened() -> Self {
        Self {
            widened: true,
            ..Self::one(D::F32)
        }
    }

    /// As [`one`](Operands::one), for a constant that fits in half.
    pub fn constant(dtype: D) -> Self {
        Self {
            seen: 0,
            constants: bit(dtype),
            ..Self::one(dtype)
        }
    }

    /// Adds an operand: a constant that fits in half.
    pub fn and_constant(mut self, dtype: D) -> Self {
        self.constants |= bit(dtype);
        self
    }

    /// The operands, with constants counted like any other operand.
    fn whole(mut self) -> Self {
        self.seen |= self.constants;
        self.constants = 0;
        self
    }

    /// The half dtype that constants follow, if any.
    fn followed(self) -> Option<D> {
        self.half_alone().filter(|_| self.constants != 0)
    }

    /// Adds an operand.
    pub fn and(mut self, dtype: D) -> Self {
        self.seen |= bit(dtype);
        self
    }

    /// Whether any operand is F16 or BF16.
    pub fn any_half(self) -> bool {
        (self.seen | self.constants) & HALF_BITS != 0
    }

    /// The half dtype of all operands; `None` if any has another dtype.
    pub fn only_half(self) -> Option<D> {
        self.whole().half_alone()
    }

    /// As [`only_half`](Operands::only_half), of the operands that are no constants.
    fn half_alone(self) -> Option<D> {
        self.half().filter(|_| self.seen & !HALF_BITS == 0)
    }

    fn mixed(self) -> bool {
        !self.seen.is_power_of_two()
    }

    /// The half dtype among the operands; `None` if they have none or both.
    fn half(self) -> Option<D> {
        match self.seen & HALF_BITS {
            F16 => Some(D::F16),
            BF16 => Some(D::BF16),
            _ => None,
        }
    }

    /// The widest dtype: F64, then F32, Flex32, half. F16 with BF16 gives F32, which holds both.
    pub fn widest(self) -> D {
        match self.seen | self.constants {
            seen if seen & F64 != 0 => D::F64,
            seen if seen & F32 != 0 => D::F32,
            seen if seen & FLEX32 != 0 => D::FLEX32,
            _ => self.whole().half().unwrap_or(D::F32),
        }
    }
}

#[inline]
fn bit<D: FloatDType>(dtype: D) -> u8 {
    match dtype {
        _ if dtype == D::F64 => F64,
        _ if dtype == D::FLEX32 => FLEX32,
        _ if dtype == D::F16 => F16,
        _ if dtype == D::BF16 => BF16,
        _ => F32,
    }
}

/// The casts of an operation's operands and result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan<D> {
    /// Cast every operand to this dtype; `None` casts no operand.
    pub operands: Option<D>,
    /// Cast the result to this dtype; `None` leaves it.
    pub result: Option<D>,
}

impl<D> Default for Plan<D> {
    /// No cast.
    fn default() -> Self {
        Self {
            operands: None,
            result: None,
        }
    }
}

impl<D: FloatDType> Plan<D> {
    /// Casts every operand, and leaves the result.
    pub fn cast(dtype: D) -> Self {
        Self {
            operands: Some(dtype),
            result: None,
        }
    }

    fn cast_if(condition: bool, dtype: D) -> Self {
        match condition {
            true => Self::cast(dtype),
            false => Self::default(),
        }
    }
}

/// Decides an operation's casts. Calls `support` only if a half dtype is involved.
pub fn plan<D: FloatDType>(
    class: Class,
    operands: Operands<D>,
    mode: Mode<D>,
    support: impl Fn() -> Support,
) -> Plan<D> {
    if mode == Mode::Off {
        return Plan::default();
    }
    let computes_in = |dtype: D| support().of(dtype) == HalfSupport::Arithmetic;
    if let (Mode::On(_), Class::Promote, Some(half)) = (mode, class, operands.followed()) {
        return Plan::cast(match computes_in(half) {
            true => half,
            false => D::F32,
        });
    }
    let operands = operands.whole();
    if operands.seen & (F64 | FLEX32) != 0 {
        return Plan::cast_if(operands.mixed(), operands.widest());
    }
    match class {
        Class::LowerPrecision => {
            let half = match mode {
                Mode::On(dtype) => Some(dtype),
                _ => operands.half(),
            };
            match half {
                None => Plan::cast_if(operands.any_half(), D::F32),
                Some(dtype) => Plan {
                    operands: Some(dtype),
                    result: (!computes_in(dtype)).then_some(D::F32),
                },
            }
        }
        Class::Fp32 => Plan::cast_if(operands.any_half(), D::F32),
        Class::Fp32Inside => Plan {
            operands: operands.any_half().then_some(D::F32),
            result: (operands.first != D::F32 && computes_in(operands.first))
                .then_some(operands.first),
        },
        Class::Activation if operands.widened => match mode {
            Mode::On(dtype) => Plan::cast_if(computes_in(dtype), dtype),
            _ => Plan::default(),
        },
        Class::Promote | Class::PromoteSum | Class::Keep | Class::Activation => {
            let widest = operands.widest();
            match operands.half() == Some(widest) && !computes_in(widest) {
                true => Plan::cast(D::F32),
                false => Plan::cast_if(operands.mixed(), widest),
            }
        }
        Class::Move => Plan::cast_if(operands.mixed(), operands.widest()),
    }
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

/// From the smallest normal value to the largest finite one.
const F16_RANGE: RangeInclusive<f64> = 6.103515625e-5..=65504.0;

/// As [`F16_RANGE`]: bf16 is the upper half of FP32.
const BF16_RANGE: RangeInclusive<f64> =
    f32::MIN_POSITIVE as f64..=f32::from_bits(0x7f7f_0000) as f64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;
    use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};

    const ALL: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Arithmetic,
    };
    const CONTRACTIONS: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Contractions,
    };
    const NEVER: Plan<DType> = Plan {
        operands: None,
        result: None,
    };

    fn of(dtypes: &[DType]) -> Operands<DType> {
        dtypes[1..]
            .iter()
            .fold(Operands::one(dtypes[0]), |all, dtype| all.and(*dtype))
    }

    fn on(class: Class, dtypes: &[DType]) -> Plan<DType> {
        plan(class, of(dtypes), Mode::On(DType::F16), || ALL)
    }

    fn follow(class: Class, dtypes: &[DType]) -> Plan<DType> {
        plan(class, of(dtypes), Mode::KeepDtypes, || ALL)
    }

    #[test]
    fn off_does_nothing() {
        for class in [
            LowerPrecision,
            Fp32,
            Fp32Inside,
            Promote,
            PromoteSum,
            Keep,
            Activation,
            Move,
        ] {
            let operands = of(&[DType::F32, DType::F16]);
            assert_eq!(plan(class, operands, Mode::Off, || ALL), NEVER);
        }
    }

    #[test]
    fn half_demotes_every_operand() {
        for dtypes in [
            &[DType::F32, DType::F32][..],
            &[DType::F32, DType::F16],
            &[DType::BF16, DType::F32],
            &[DType::F16, DType::F16],
        ] {
            assert_eq!(on(LowerPrecision, dtypes), Plan::cast(DType::F16));
        }
    }

    #[test]
    fn half_follows_its_operands_below_autodiff() {
        assert_eq!(follow(LowerPrecision, &[DType::F32, DType::F32]), NEVER);
        for half in [DType::F16, DType::BF16] {
            assert_eq!(
                follow(LowerPrecision, &[DType::F32, half]),
                Plan::cast(half)
            );
            assert_eq!(follow(LowerPrecision, &[half, half]), Plan::cast(half));
        }
        assert_eq!(
            follow(LowerPrecision, &[DType::F16, DType::BF16]),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn half_without_arithmetic_gives_fp32_and_nothing_else_is_half() {
        let bf16 = |class, dtypes: &[DType]| {
            plan(class, of(dtypes), Mode::On(DType::BF16), || CONTRACTIONS)
        };
        let contraction = Plan {
            operands: Some(DType::BF16),
            result: Some(DType::F32),
        };
        assert_eq!(bf16(LowerPrecision, &[DType::F32, DType::F32]), contraction);
        assert_eq!(
            plan(LowerPrecision, of(&[DType::BF16]), Mode::KeepDtypes, || {
                CONTRACTIONS
            }),
            contraction
        );
        for class in [Fp32, Fp32Inside, Promote, Keep, Activation] {
            assert_eq!(bf16(class, &[DType::BF16]), Plan::cast(DType::F32));
        }
        assert_eq!(bf16(Move, &[DType::BF16]), NEVER);
    }

    #[test]
    fn full_promotes_and_stays_wide() {
        assert_eq!(on(Fp32, &[DType::F32, DType::F32]), NEVER);
        assert_eq!(on(Fp32, &[DType::F16]), Plan::cast(DType::F32));
        assert_eq!(
            follow(Fp32, &[DType::F32, DType::BF16]),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn wide_gives_back_the_first_operands_dtype() {
        assert_eq!(on(Fp32Inside, &[DType::F32, DType::F32]), NEVER);
        assert_eq!(
            on(Fp32Inside, &[DType::BF16, DType::F32]),
            Plan {
                operands: Some(DType::F32),
                result: Some(DType::BF16)
            }
        );
        assert_eq!(
            on(Fp32Inside, &[DType::F32, DType::F16]),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn widest_brings_mixed_operands_together() {
        assert_eq!(on(Promote, &[DType::F16, DType::F16]), NEVER);
        assert_eq!(
            on(Promote, &[DType::F16, DType::F32]),
            Plan::cast(DType::F32)
        );
        assert_eq!(
            on(Promote, &[DType::F16, DType::BF16]),
            Plan::cast(DType::F32)
        );
        assert_eq!(on(Keep, &[DType::F16]), NEVER);
        assert_eq!(on(Move, &[DType::F16]), NEVER);
    }

    #[test]
    fn an_activation_brings_what_half_holds_to_half() {
        let widened = |mode| plan(Activation, Operands::widened(), mode, || ALL);
        assert_eq!(widened(Mode::On(DType::BF16)), Plan::cast(DType::BF16));
        assert_eq!(widened(Mode::KeepDtypes), NEVER);
        assert_eq!(on(Activation, &[DType::F32]), NEVER);
        assert_eq!(on(Activation, &[DType::F16]), NEVER);
        let (operands, mode) = (Operands::widened(), Mode::On(DType::BF16));
        assert_eq!(plan(Activation, operands, mode, || CONTRACTIONS), NEVER);
        assert_eq!(plan(Keep, operands, mode, || ALL), NEVER);
    }

    #[test]
    fn constants_follow_a_half_tensor_and_nothing_else() {
        let on = |operands| plan(Promote, operands, Mode::On(DType::F16), || ALL);
        let half = Operands::one(DType::F16).and_constant(DType::F32);
        assert_eq!(on(half), Plan::cast(DType::F16));
        assert_eq!(
            on(Operands::constant(DType::F32).and(DType::F16)),
            Plan::cast(DType::F16)
        );
        assert_eq!(on(half.and(DType::F32)), Plan::cast(DType::F32));
        assert_eq!(on(half.and(DType::BF16)), Plan::cast(DType::F32));
        assert_eq!(
            on(Operands::one(DType::F32).and_constant(DType::F32)),
            NEVER
        );
        assert_eq!(on(Operands::constant(DType::F32)), NEVER);
        assert_eq!(
            plan(Promote, half, Mode::KeepDtypes, || ALL),
            Plan::cast(DType::F32)
        );
        let bf16 = Operands::one(DType::BF16).and_constant(DType::F32);
        assert_eq!(
            plan(Promote, bf16, Mode::On(DType::BF16), || CONTRACTIONS),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn constants_do_not_follow_in_a_sum() {
        for half in [DType::F16, DType::BF16] {
            let operands = Operands::one(half).and_constant(DType::F32);
            let sum = plan(PromoteSum, operands, Mode::On(half), || ALL);
            assert_eq!(sum, Plan::cast(DType::F32));
        }
        let same = on(PromoteSum, &[DType::F16, DType::F16]);
        assert_eq!(same, NEVER);
    }

    #[test]
    fn f64_is_left_alone_but_for_mixed_operands() {
        for class in [
            LowerPrecision,
            Fp32,
            Fp32Inside,
            Promote,
            PromoteSum,
            Keep,
            Activation,
            Move,
        ] {
            assert_eq!(on(class, &[DType::F64, DType::F64]), NEVER);
            assert_eq!(on(class, &[DType::F16, DType::F64]), Plan::cast(DType::F64));
            assert_eq!(on(class, &[DType::Flex32]), NEVER);
        }
    }

    #[test]
    fn scalars_beyond_the_half_range_are_not_held() {
        for scalar in [0.0, -0.0, 1.0, -65504.0, 6.2e-5, f64::INFINITY, f64::NAN] {
            assert!(holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
        }
        for scalar in [-1e9, 65520.0, 1e-5, 1e-8] {
            assert!(!holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
            assert!(holds(DType::F32, scalar), "{scalar}");
        }
        for scalar in [f32::MIN as f64, 1e-40, 1e300] {
            assert!(!holds(DType::BF16, scalar), "{scalar}");
        }
    }
}
