//! The marks that a tensor inherits from earlier operations: its region, and whether it is a gradient. Burn's
//! operations have no argument for marks. So a client marks a tensor with a clamp between bounds that no
//! finite FP32 number exceeds. On every other device, this clamp is the identity.

use burn_amp_core::Precision;
use burn_backend::Scalar;

/// A mark that a client sends with a tensor. The depth of a region is the number of regions around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The tensor enters a region of this precision, at this depth.
    Enter(Precision, u32),
    /// The tensor leaves the region at this depth, and the regions within it.
    Leave(u32),
    /// The tensor is the gradient that a backward pass begins with.
    Gradient,
    /// The tensor is in no region and no backward pass.
    Clear,
    /// The device keeps the tensor in this half precision from now on.
    Half(Precision),
}

/// How many regions may be nested.
pub(crate) const DEPTHS: u32 = u32::BITS / BITS;

/// The precisions of regions. [`Marks`] stores a region as its place here plus one.
const PRECISIONS: [Precision; 4] = [
    Precision::F32,
    Precision::F16,
    Precision::Bf16,
    Precision::Auto,
];

impl Mark {
    const LOWER: f64 = -f64::MAX;

    /// All marks, in the order of their bounds.
    fn all() -> impl Iterator<Item = Self> {
        let of_depth = |depth| {
            let enter = PRECISIONS.map(|precision| Self::Enter(precision, depth));
            enter.into_iter().chain([Self::Leave(depth)])
        };
        let without_depth = [Self::Gradient, Self::Clear].into_iter();
        let halves = [Precision::F16, Precision::Bf16].map(Self::Half);
        let regions = (0..DEPTHS).flat_map(of_depth);
        without_depth.chain(regions).chain(halves)
    }

    /// The bounds of the clamp.
    pub(crate) fn bounds(self) -> [Scalar; 2] {
        let place = Self::all().position(|mark| mark == self);
        let below = 1 + place.expect("every mark is among all") as u64;
        let upper = f64::from_bits(f64::MAX.to_bits() - below);
        [Self::LOWER.into(), upper.into()]
    }

    /// The mark with these bounds, if there is one.
    pub(crate) fn of(lower: Scalar, upper: Scalar) -> Option<Self> {
        if lower.elem::<f64>() != Self::LOWER {
            return None;
        }
        let below = f64::MAX
            .to_bits()
            .checked_sub(upper.elem::<f64>().to_bits())?;
        let place = usize::try_from(below.checked_sub(1)?).ok()?;
        Self::all().nth(place)
    }
}

/// The marks of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Marks {
    /// The tensor's region at each depth, the outermost in the lowest bits; 0 if there is none at a depth.
    regions: u32,
    is_gradient: bool,
}

/// The bits of a region in [`Marks`].
const BITS: u32 = 3;

/// The bits of the regions that lie around a depth.
fn around(depth: u32) -> u32 {
    (1 << (BITS * depth)) - 1
}

impl Marks {
    /// The depth of the innermost region, from 1 on; 0 outside of all.
    fn depth(self) -> u32 {
        (u32::BITS - self.regions.leading_zeros()).div_ceil(BITS)
    }

    /// The precision of the innermost region; `None` outside of all, or if it is the device's own.
    pub(crate) fn region(self) -> Option<Precision> {
        let innermost = self.regions >> (BITS * self.depth().checked_sub(1)?);
        let precision = PRECISIONS[innermost as usize - 1];
        (precision != Precision::Auto).then_some(precision)
    }

    /// Whether the tensor is computed from the gradient of a scaled loss.
    pub(crate) fn is_gradient(self) -> bool {
        self.is_gradient
    }

    /// These marks after one more mark.
    pub(crate) fn with(self, mark: Mark) -> Self {
        match mark {
            Mark::Enter(precision, depth) => {
                let place = PRECISIONS.iter().position(|other| *other == precision);
                let region = 1 + place.expect("a precision") as u32;
                Self {
                    regions: self.regions & around(depth) | region << (BITS * depth),
                    ..self
                }
            }
            Mark::Leave(depth) => Self {
                regions: self.regions & around(depth),
                ..self
            },
            Mark::Gradient => Self {
                is_gradient: true,
                ..self
            },
            Mark::Clear => Self::default(),
            Mark::Half(_) => self,
        }
    }

    /// The marks of an operation's result. If operands are in different regions, the inner region decides,
    /// then the region in FP32.
    pub(crate) fn of(operands: impl Iterator<Item = Self>) -> Self {
        operands.reduce(Self::joined).unwrap_or_default()
    }

    fn joined(self, other: Self) -> Self {
        let key = |marks: Self| (marks.depth(), marks.region() == Some(Precision::F32));
        let (first, second) = if key(other) > key(self) {
            (other, self)
        } else {
            (self, other)
        };
        // Around the inner region, the result is in the regions of either operand.
        let mut regions = first.regions;
        for depth in 0..first.depth() {
            let here = around(depth + 1) & !around(depth);
            if regions & here == 0 {
                regions |= second.regions & here;
            }
        }
        Self {
            regions,
            is_gradient: self.is_gradient || other.is_gradient,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_comes_back_from_its_bounds_and_no_other_bounds_are_a_mark() {
        let marks = Mark::all().count();
        assert_eq!(marks, 4 + 5 * DEPTHS as usize);
        for mark in Mark::all() {
            let [lower, upper] = mark.bounds();
            assert_eq!(Mark::of(lower, upper), Some(mark));
            // On another device, and in FP32, the clamp is the identity.
            assert_eq!(upper.elem::<f32>(), f32::INFINITY);
        }
        let next = f64::from_bits(f64::MAX.to_bits() - 1 - marks as u64);
        for [lower, upper] in [
            [-f64::MAX, f64::MAX],
            [-f64::MAX, next],
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
    fn a_tensor_leaves_the_region_at_a_depth_and_those_within_it() {
        let none = Marks::default();
        let fp32 = none.with(Mark::Enter(Precision::F32, 0));
        let bf16 = fp32.with(Mark::Enter(Precision::Bf16, 1));
        let own = bf16.with(Mark::Enter(Precision::Auto, 2));
        assert_eq!(none.region(), None);
        assert_eq!(fp32.region(), Some(Precision::F32));
        assert_eq!(bf16.region(), Some(Precision::Bf16));
        assert_eq!(own.region(), None);
        assert_eq!(own.with(Mark::Leave(2)), bf16);
        assert_eq!(own.with(Mark::Leave(1)), fp32);
        assert_eq!(own.with(Mark::Leave(0)), none);
        assert_eq!(none.with(Mark::Leave(1)), none);
        assert_eq!(own.with(Mark::Gradient).with(Mark::Clear), none);
        // A tensor that never entered the inner region stays in the outer region.
        assert_eq!(fp32.with(Mark::Leave(1)), fp32);
        // A tensor that was in no outer region is in no region after it leaves the inner one.
        let inner = none.with(Mark::Enter(Precision::F16, 3));
        assert_eq!(inner.region(), Some(Precision::F16));
        assert_eq!(inner.with(Mark::Leave(3)).region(), None);
        let deepest = none.with(Mark::Enter(Precision::F32, DEPTHS - 1));
        assert_eq!(deepest.region(), Some(Precision::F32));
    }

    #[test]
    fn the_inner_region_decides_and_then_fp32() {
        let none = Marks::default();
        let [fp32, f16] = [Precision::F32, Precision::F16].map(|p| none.with(Mark::Enter(p, 0)));
        let inner = fp32.with(Mark::Enter(Precision::F16, 1));
        let alone = none.with(Mark::Enter(Precision::F16, 1));
        for (operands, region, around) in [
            ([none, f16], Some(Precision::F16), None),
            ([f16, fp32], Some(Precision::F32), None),
            ([inner, fp32], Some(Precision::F16), Some(Precision::F32)),
            ([alone, fp32], Some(Precision::F16), Some(Precision::F32)),
            ([none, none], None, None),
        ] {
            for operands in [operands, [operands[1], operands[0]]] {
                let joined = Marks::of(operands.into_iter());
                assert_eq!(joined.region(), region);
                if around.is_some() {
                    assert_eq!(joined.with(Mark::Leave(1)).region(), around);
                }
            }
        }
        let gradient = none.with(Mark::Gradient);
        let joined = Marks::of([f16, gradient].into_iter());
        assert!(joined.is_gradient() && joined.region() == Some(Precision::F16));
    }
}
