//! The decision: which casts an operation needs, given the dtypes of its operands.

use burn_backend::DType;

use super::Class;

/// The half dtypes.
pub(crate) const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Whether a dtype is one of [`HALVES`].
#[inline(always)]
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
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
    pub fn of(self, dtype: DType) -> HalfSupport {
        match dtype {
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
            _ => HalfSupport::Arithmetic,
        }
    }
}

/// How the policy is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The policy is off.
    Off,
    /// FP32 operands of `LowerPrecision` operations are demoted to this dtype.
    On(DType),
    /// FP32 is never demoted: a `LowerPrecision` operation runs in half only if an operand is half.
    /// Applies below autodiff (the upper layer has already decided), in the backward pass and to
    /// gradients.
    KeepDtypes,
}

/// The float dtypes among an operation's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operands {
    first: DType,
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

impl Operands {
    /// The first operand, whose dtype `Fp32Inside` restores.
    pub fn one(dtype: DType) -> Self {
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
            ..Self::one(DType::F32)
        }
    }

    /// As [`one`](Operands::one), for a constant that fits in half.
    pub fn constant(dtype: DType) -> Self {
        Self {
            seen: 0,
            constants: bit(dtype),
            ..Self::one(dtype)
        }
    }

    /// Adds an operand: a constant that fits in half.
    pub fn and_constant(mut self, dtype: DType) -> Self {
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
    fn followed(self) -> Option<DType> {
        let only_half = self.seen & !HALF_BITS == 0;
        self.half().filter(|_| self.constants != 0 && only_half)
    }

    /// Adds an operand.
    pub fn and(mut self, dtype: DType) -> Self {
        self.seen |= bit(dtype);
        self
    }

    /// Whether any operand is F16 or BF16.
    pub fn any_half(self) -> bool {
        (self.seen | self.constants) & HALF_BITS != 0
    }

    /// The half dtype of all operands; `None` if any has another dtype.
    pub fn only_half(self) -> Option<DType> {
        self.whole()
            .half()
            .filter(|_| self.whole().seen & !HALF_BITS == 0)
    }

    fn mixed(self) -> bool {
        !self.seen.is_power_of_two()
    }

    /// The half dtype among the operands; `None` if they have none or both.
    fn half(self) -> Option<DType> {
        match self.seen & HALF_BITS {
            F16 => Some(DType::F16),
            BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// The widest dtype: F64, then F32, Flex32, half. F16 with BF16 gives F32, which holds both.
    pub fn widest(self) -> DType {
        match self.seen | self.constants {
            seen if seen & F64 != 0 => DType::F64,
            seen if seen & F32 != 0 => DType::F32,
            seen if seen & FLEX32 != 0 => DType::Flex32,
            _ => self.whole().half().unwrap_or(DType::F32),
        }
    }
}

fn bit(dtype: DType) -> u8 {
    match dtype {
        DType::F64 => F64,
        DType::Flex32 => FLEX32,
        DType::F16 => F16,
        DType::BF16 => BF16,
        _ => F32,
    }
}

/// The casts of an operation's operands and result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plan {
    /// Cast every operand to this dtype; `None` casts no operand.
    pub operands: Option<DType>,
    /// Cast the result to this dtype; `None` leaves it.
    pub result: Option<DType>,
}

impl Plan {
    pub(crate) fn cast(dtype: DType) -> Self {
        Self {
            operands: Some(dtype),
            result: None,
        }
    }

    fn cast_if(condition: bool, dtype: DType) -> Self {
        match condition {
            true => Self::cast(dtype),
            false => Self::default(),
        }
    }
}

/// Decides an operation's casts. Calls `support` only if a half dtype is involved.
pub fn plan(class: Class, operands: Operands, mode: Mode, support: impl Fn() -> Support) -> Plan {
    if mode == Mode::Off {
        return Plan::default();
    }
    let computes_in = |dtype| support().of(dtype) == HalfSupport::Arithmetic;
    if let (Mode::On(_), Class::Promote, Some(half)) = (mode, class, operands.followed()) {
        return Plan::cast(match computes_in(half) {
            true => half,
            false => DType::F32,
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
                None => Plan::cast_if(operands.any_half(), DType::F32),
                Some(dtype) => Plan {
                    operands: Some(dtype),
                    result: (!computes_in(dtype)).then_some(DType::F32),
                },
            }
        }
        Class::Fp32 => Plan::cast_if(operands.any_half(), DType::F32),
        Class::Fp32Inside => Plan {
            operands: operands.any_half().then_some(DType::F32),
            result: (operands.first != DType::F32 && computes_in(operands.first))
                .then_some(operands.first),
        },
        Class::Activation if operands.widened => match mode {
            Mode::On(dtype) => Plan::cast_if(computes_in(dtype), dtype),
            _ => Plan::default(),
        },
        Class::Promote | Class::PromoteSum | Class::Keep | Class::Activation => {
            let widest = operands.widest();
            match operands.half() == Some(widest) && !computes_in(widest) {
                true => Plan::cast(DType::F32),
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
pub fn holds(dtype: DType, scalar: f64) -> bool {
    if !is_half(dtype) || scalar == 0.0 || !scalar.is_finite() {
        return true;
    }
    let info = dtype.finfo().expect("a float dtype");
    (info.min_positive..=info.max).contains(&scalar.abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};

    const ALL: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Arithmetic,
    };
    const CONTRACTIONS: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Contractions,
    };
    const NEVER: Plan = Plan {
        operands: None,
        result: None,
    };

    fn of(dtypes: &[DType]) -> Operands {
        dtypes[1..]
            .iter()
            .fold(Operands::one(dtypes[0]), |all, dtype| all.and(*dtype))
    }

    fn on(class: Class, dtypes: &[DType]) -> Plan {
        plan(class, of(dtypes), Mode::On(DType::F16), || ALL)
    }

    fn follow(class: Class, dtypes: &[DType]) -> Plan {
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
