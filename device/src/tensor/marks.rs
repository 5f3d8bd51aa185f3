//! What a tensor takes from the operations before it: the region that it is in, and whether it is a
//! gradient. Burn's operations have no argument for either. A client marks a tensor with a clamp
//! between bounds that no finite FP32 number exceeds, which is the identity on every other device.

use burn_amp_core::Precision;
use burn_backend::Scalar;

/// A mark that a client sends with a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The tensor enters a region of this precision.
    Enter(Precision),
    /// It leaves the innermost region that it is in.
    Leave,
    /// It is the gradient that a backward pass begins with.
    Gradient,
    /// It is of no region and no backward pass.
    Clear,
}

impl Mark {
    const ALL: [Self; 7] = [
        Self::Enter(Precision::F32),
        Self::Enter(Precision::F16),
        Self::Enter(Precision::Bf16),
        Self::Enter(Precision::Auto),
        Self::Leave,
        Self::Gradient,
        Self::Clear,
    ];

    const LOWER: f64 = -f64::MAX;

    /// The bounds of the clamp.
    pub(crate) fn bounds(self) -> [Scalar; 2] {
        let place = Self::ALL.iter().position(|mark| *mark == self);
        let below = 1 + place.expect("every mark is in the list") as u64;
        let upper = f64::from_bits(f64::MAX.to_bits() - below);
        [Self::LOWER.into(), upper.into()]
    }

    /// The mark with these bounds, if they are a mark's.
    pub(crate) fn of(lower: Scalar, upper: Scalar) -> Option<Self> {
        if lower.elem::<f64>() != Self::LOWER {
            return None;
        }
        let below = f64::MAX
            .to_bits()
            .checked_sub(upper.elem::<f64>().to_bits())?;
        let place = usize::try_from(below.checked_sub(1)?).ok()?;
        Self::ALL.get(place).copied()
    }
}

/// The marks of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Marks {
    /// The regions that the tensor is in, the innermost in the lowest three bits: one more than the
    /// place of its precision in [`Mark::ALL`].
    regions: u32,
    is_gradient: bool,
}

/// Of a region in [`Marks`].
const BITS: u32 = 3;

impl Marks {
    /// The precision of the innermost region; `None` outside of all, or if it is the device's own.
    pub(crate) fn region(self) -> Option<Precision> {
        let innermost = (self.regions & ((1 << BITS) - 1)) as usize;
        match Mark::ALL.get(innermost.checked_sub(1)?)? {
            Mark::Enter(Precision::Auto) => None,
            Mark::Enter(precision) => Some(*precision),
            _ => None,
        }
    }

    /// Whether the tensor is computed from the gradient of a scaled loss.
    pub(crate) fn is_gradient(self) -> bool {
        self.is_gradient
    }

    /// With one mark more.
    pub(crate) fn with(self, mark: Mark) -> Self {
        match mark {
            Mark::Enter(_) => {
                let place = Mark::ALL.iter().position(|other| *other == mark);
                let region = 1 + place.expect("every mark is in the list") as u32;
                // Of more than ten regions within each other, the outermost is lost.
                Self {
                    regions: self.regions << BITS | region,
                    ..self
                }
            }
            Mark::Leave => Self {
                regions: self.regions >> BITS,
                ..self
            },
            Mark::Gradient => Self {
                is_gradient: true,
                ..self
            },
            Mark::Clear => Self::default(),
        }
    }

    /// Those of an operation's result. Of operands in different regions, the one in more of them
    /// decides, then the one in FP32.
    pub(crate) fn of(operands: impl Iterator<Item = Self>) -> Self {
        operands.reduce(Self::joined).unwrap_or_default()
    }

    fn joined(self, other: Self) -> Self {
        let is_fp32 = |marks: Self| marks.region() == Some(Precision::F32);
        let rank = |marks: Self| (u32::BITS - marks.regions.leading_zeros()).div_ceil(BITS);
        let key = |marks: Self| (rank(marks), is_fp32(marks));
        Self {
            regions: if key(other) > key(self) {
                other.regions
            } else {
                self.regions
            },
            is_gradient: self.is_gradient || other.is_gradient,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_comes_back_from_its_bounds_and_no_other_bounds_are_a_mark() {
        for mark in Mark::ALL {
            let [lower, upper] = mark.bounds();
            assert_eq!(Mark::of(lower, upper), Some(mark));
            // On another device, and in FP32, the clamp is the identity.
            assert_eq!(upper.elem::<f32>(), f32::INFINITY);
        }
        for [lower, upper] in [
            [-f64::MAX, f64::MAX],
            [-f64::MAX, 1.0],
            [-f64::MAX, f64::INFINITY],
            [-f64::MAX, f64::NAN],
            [f64::NEG_INFINITY, f64::MAX.next_down()],
            [0.0, 6.0],
        ] {
            assert_eq!(
                Mark::of(lower.into(), upper.into()),
                None,
                "{lower} {upper}"
            );
        }
    }

    #[test]
    fn regions_end_in_the_order_in_which_they_began() {
        let none = Marks::default();
        let fp32 = none.with(Mark::Enter(Precision::F32));
        let bf16 = fp32.with(Mark::Enter(Precision::Bf16));
        let own = bf16.with(Mark::Enter(Precision::Auto));
        assert_eq!(none.region(), None);
        assert_eq!(fp32.region(), Some(Precision::F32));
        assert_eq!(bf16.region(), Some(Precision::Bf16));
        assert_eq!(own.region(), None);
        assert_eq!(own.with(Mark::Leave), bf16);
        assert_eq!(bf16.with(Mark::Leave), fp32);
        assert_eq!(fp32.with(Mark::Leave), none);
        assert_eq!(none.with(Mark::Leave), none);
        assert_eq!(own.with(Mark::Gradient).with(Mark::Clear), none);
    }

    #[test]
    fn the_inner_region_decides_and_then_fp32() {
        let none = Marks::default();
        let [fp32, f16] = [Precision::F32, Precision::F16].map(|p| none.with(Mark::Enter(p)));
        let inner = fp32.with(Mark::Enter(Precision::F16));
        for (operands, region) in [
            ([none, f16], Some(Precision::F16)),
            ([f16, fp32], Some(Precision::F32)),
            ([inner, fp32], Some(Precision::F16)),
            ([none, none], None),
        ] {
            for operands in [operands, [operands[1], operands[0]]] {
                assert_eq!(Marks::of(operands.into_iter()).region(), region);
            }
        }
        let gradient = none.with(Mark::Gradient);
        let joined = Marks::of([f16, gradient].into_iter());
        assert!(joined.is_gradient() && joined.region() == Some(Precision::F16));
    }
}
