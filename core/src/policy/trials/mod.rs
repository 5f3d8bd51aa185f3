//! Trials: which operations a device computes in half as exactly as half allows.
//!
//! An operation is *tried* when it first computes in half on a device. The trial shows whether the device is
//! *exact* in the operation.
//!
//! Some kernels accumulate products in half, so that 4,096 ones sum to 2,048. Others compute a function in
//! half throughout and lose its last bits or its small results. An operation in which a device is not exact
//! runs in FP32: its operands are rounded to half first, and its result is half, so the values are those of
//! an exact device. An operation that could not be tried runs the same way.
//!
//! Other kernels, such as LibTorch's, compute in FP32 inside: operations of class `Fp32Inside` need no casts
//! there. An operation of this class runs in half where the device is exact in it.

mod inputs;
mod list;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};

use super::{Class, Convolution, HalfSupport, Op, class, same, short};
use crate::FloatDType;

pub use inputs::{N, ROUNDED, SPREAD, TrialInputs};
pub use list::TRIED;

/// A device of some version of Burn, as a trial uses it.
pub trait TrialDevice: Sized {
    /// Burn's dtype.
    type DType: FloatDType;
    /// A float tensor on the device.
    type Tensor;

    /// The device's name in the log.
    fn name(&self) -> String;

    /// An FP32 tensor of these values.
    fn tensor(&self, values: Vec<f32>, shape: Vec<usize>) -> Self::Tensor;

    /// A tensor in `dtype`.
    fn cast(&self, tensor: Self::Tensor, dtype: Self::DType) -> Self::Tensor;

    /// The values of an FP32 tensor; `None` if they cannot be read back.
    fn read(&self, tensor: Self::Tensor) -> Option<Vec<f32>>;

    /// The trials of an operation. `burn_amp_core::trials!` writes this function.
    fn trials(op: TriedOp) -> Vec<Trial<Self>>;
}

/// Creates operands and calls an operation on them.
pub type Trial<D> = fn(&TrialInputs<D>) -> <D as TrialDevice>::Tensor;

/// The calls of an operation that a trial stands for. A device may have kernels of its own for some
/// convolutions: CubeCL's for groups, and for the gradient of the input at a stride, add up in half (burn-cubecl
/// 0.21: `conv_direct`, `transpose_direct`, `col2im`), and those of the others in FP32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// All calls that no other kind is for.
    Usual,
    /// A convolution of fewer than 16 channels, or to fewer.
    FewChannels,
    /// A convolution of several groups, such as a depthwise one.
    Grouped,
    /// The gradient of a convolution's weight over a batch of fewer than 16. A backend without a kernel for this
    /// gradient convolves with the batch in the place of channels. So Flex 0.21 adds a batch of up to four up in f16, and
    /// oneDNN on CPUs with AMX leaves terms of a batch of 2, 4 or 8 out.
    SmallBatch,
    /// A transposed convolution, or a gradient of an input, with a stride.
    Strided,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 5] = [
        Self::Usual,
        Self::FewChannels,
        Self::Grouped,
        Self::SmallBatch,
        Self::Strided,
    ];

    /// The kind of a convolution, of any dimensions: `[out, in / groups, ..]` is the shape of its weight, or
    /// `[in, out / groups, ..]` if it is transposed. `spreads`: each value is spread over values of the result at the
    /// distance of the stride. Kernels that gather values do not depend on it. `summed`: the batch that is summed over, for
    /// the gradient of the weight.
    pub(crate) fn of_convolution(
        weight: &[usize],
        options: &Convolution,
        spreads: bool,
        summed: Option<usize>,
    ) -> Self {
        let groups = options.groups();
        let channels = (weight[0] / groups.max(1)).min(weight[1]);
        match groups {
            2.. => Self::Grouped,
            _ if summed.is_some_and(|batch| batch < FEW) => Self::SmallBatch,
            _ if spreads && options.strides() => Self::Strided,
            _ if channels < FEW => Self::FewChannels,
            _ => Self::Usual,
        }
    }
}

/// What stands behind an operation's name.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Usual => "",
            Kind::FewChannels => " of few channels",
            Kind::Grouped => " in groups",
            Kind::SmallBatch => " of a small batch",
            Kind::Strided => " with a stride",
        })
    }
}

/// Fewer channels, or examples of a batch, are few.
const FEW: usize = 16;

/// A tried operation and a kind of its calls, by their place in [`TRIED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TriedOp(usize);

impl TriedOp {
    /// The usual calls of the operation of this name; `None` if it is not tried.
    pub const fn named(name: &str) -> Option<Self> {
        let mut i = 0;
        while i < TRIED.len() {
            if same(TRIED[i].0, name) && matches!(TRIED[i].1, Kind::Usual) {
                return Some(Self(i));
            }
            i += 1;
        }
        None
    }

    /// All of them, in the table's order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..TRIED.len()).map(Self)
    }

    /// The calls of this kind; the usual ones if no trial is about this kind.
    pub(crate) fn of_kind(self, kind: Kind) -> Self {
        let is_it = |op: &Self| op.name() == self.name() && op.kind() == kind;
        Self::all().find(is_it).unwrap_or(self)
    }

    /// The operation's name, which is a method of Burn's backend traits.
    pub const fn name(self) -> &'static str {
        TRIED[self.0].0
    }

    /// The kind of the calls.
    pub const fn kind(self) -> Kind {
        TRIED[self.0].1
    }

    /// Tries the operation on a device, in `half`. Returns whether the device is exact in the operation:
    /// false if the trial panics or its results cannot be read back. Logs an operation that moves from half
    /// to FP32.
    ///
    /// - `support`: the device's. A device that only contracts in half computes no other operation in half,
    ///   and is only tried on contractions.
    /// - `or`: a further remedy if the trial fails. Empty, or a sentence after a space.
    pub fn tried<D: TrialDevice>(
        self,
        device: &D,
        half: D::DType,
        support: HalfSupport,
        or: &str,
    ) -> bool {
        if support != HalfSupport::Arithmetic && class(self.name()) != Class::LowerPrecision {
            return false;
        }
        let trials = D::trials(self);
        assert!(!trials.is_empty(), "{self} has no trial");
        let passes = || self.passes(&trials, device, half);
        let exact = catch_unwind(AssertUnwindSafe(passes)).unwrap_or(None);
        let (op, device) = (self, device.name());
        let half = if half == D::DType::F16 { "f16" } else { "bf16" };
        let is_widened = Op::named(self.name()).is_widened();
        match exact {
            Some(false) if !is_widened => log::info!(
                "burn-amp: {op} in {half} loses precision on {device}: burn-amp computes {op} in FP32 \
                 and rounds the result to {half}"
            ),
            None if !is_widened => log::warn!(
                "burn-amp: {op} in {half} could not be tried on {device}: the trial panicked, or its \
                 result could not be read back. burn-amp computes {op} in FP32 and rounds the \
                 result to {half}.{or}"
            ),
            Some(true) if is_widened => log::debug!(
                "burn-amp: {op} in {half} is as exact as in FP32 on {device}: burn-amp computes {op} in {half}"
            ),
            Some(_) | None => {}
        }
        exact == Some(true)
    }

    /// Whether the device passes all trials. `None` if a result cannot be read back.
    fn passes<D: TrialDevice>(
        self,
        trials: &[Trial<D>],
        device: &D,
        half: D::DType,
    ) -> Option<bool> {
        for trial in trials {
            let computed = |dtype| {
                let inputs = TrialInputs {
                    device,
                    half,
                    dtype,
                };
                device.read(device.cast(trial(&inputs), D::DType::F32))
            };
            let (computed, expected) = (computed(half)?, computed(D::DType::F32)?);
            if !agree(self.name(), half, &computed, &expected) {
                return Some(false);
            }
        }
        Some(true)
    }
}

impl fmt::Display for TriedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", short(self.name()), self.kind())
    }
}

/// Whether every value that `op` computed in `half` equals the rounded FP32 value.
fn agree<D: FloatDType>(op: &str, half: D, values: &[f32], expected: &[f32]) -> bool {
    let (bits, roundings) = if half == D::F16 {
        (11, 1)
    } else {
        (8, Op::named(op).roundings)
    };
    // A quarter of a rounding more, because FP32 is not exact either.
    let relative = (f32::from(roundings) + 0.25) * 2f32.powi(-bits);
    // 6e-8 is the smallest number of f16.
    let close = |(h, e): (&f32, &f32)| (h - e).abs() <= e.abs() * relative + 6e-8;
    values.iter().zip(expected).all(close)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::dtype::tests::DType;
    use crate::exceptions::Exceptions;
    use crate::policy::OpPrecision;

    /// A device that reads these values: those of each trial in half, and then those in FP32. It
    /// panics after the last.
    struct Reads(RefCell<Vec<Option<f32>>>);

    impl TrialDevice for Reads {
        type DType = DType;
        type Tensor = ();

        fn name(&self) -> String {
            "a device".into()
        }

        fn tensor(&self, _: Vec<f32>, _: Vec<usize>) {}

        fn cast(&self, (): (), _: DType) {}

        fn read(&self, (): ()) -> Option<Vec<f32>> {
            Some(vec![self.0.borrow_mut().remove(0)?])
        }

        fn trials(_: TriedOp) -> Vec<Trial<Self>> {
            vec![|inputs| inputs.ones([1]), |inputs| inputs.points()]
        }
    }

    const SAME: [Option<f32>; 2] = [Some(1.0), Some(1.0)];
    const OTHER: [Option<f32>; 2] = [Some(2.0), Some(1.0)];
    const UNREAD: [Option<f32>; 2] = [Some(1.0), None];

    /// The exceptions in FP32 and those in half, after a trial of `op` that reads these values.
    fn tried(op: &str, support: HalfSupport, read: &[[Option<f32>; 2]]) -> [String; 2] {
        let op = TriedOp::named(op).unwrap();
        let exceptions = Exceptions::default();
        let device = Reads(RefCell::new(read.concat()));
        let try_it = || op.tried(&device, DType::F16, support, "");
        let found = exceptions.tried(op, DType::F16, try_it);
        let known = exceptions.of(&Op::named(op.name()), || 1);
        assert_eq!(known.is_exact(op.kind(), DType::F16), found);
        [OpPrecision::F32, OpPrecision::Half].map(|precision| {
            let mut list = exceptions.list();
            list.retain(|exception| exception.precision == precision);
            let list: Vec<_> = list.iter().map(ToString::to_string).collect();
            list.join(" ")
        })
    }

    #[test]
    fn a_trial_takes_half_away_and_gives_it() {
        let found = |op, read: &[_]| tried(op, HalfSupport::Arithmetic, read);
        assert_eq!(found("conv2d", &[SAME, SAME]), ["", ""]);
        assert_eq!(found("gelu_backward", &[SAME, SAME]), ["", "gelu_backward"]);
        // A failed trial is the last one. The device panics when it has no more values.
        let panics: &[_] = &[SAME];
        for read in [&[OTHER], &[SAME, OTHER][..], &[UNREAD], panics, &[]] {
            assert_eq!(found("conv2d", read), ["conv2d", ""], "{read:?}");
            assert_eq!(found("gelu_backward", read), ["", ""], "{read:?}");
        }
    }

    #[test]
    fn a_device_that_only_contracts_is_tried_on_contractions() {
        let found = |op, read: &[_]| tried(op, HalfSupport::Contractions, read);
        assert_eq!(found("conv2d", &[OTHER]), ["conv2d", ""]);
        assert_eq!(found("conv2d", &[SAME, SAME]), ["", ""]);
        assert_eq!(found("gelu_backward", &[SAME, SAME]), ["", ""]);
    }

    #[test]
    fn a_trial_within_a_trial_of_the_same_operation_ends() {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let op = TriedOp::named("conv2d").unwrap();
            let exceptions = Exceptions::default();
            let within = || exceptions.tried(op, DType::F16, || true) == Some(true);
            let found = exceptions.tried(op, DType::F16, within);
            done.send(found).unwrap();
        });
        let ended = ended.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(ended, Ok(Some(true)));
    }

    #[test]
    fn one_rounding_is_exact() {
        let agrees = |op, half, value, expected| agree(op, half, &[value], &[expected]);
        let ulp = 2f32.powi(-8);
        assert!(agrees("conv2d", DType::BF16, 1.0 + ulp, 1.0));
        assert!(!agrees("conv2d", DType::BF16, 1.0 + 2.0 * ulp, 1.0));
        let composed = "sigmoid_backward";
        assert!(agrees(composed, DType::BF16, 1.0 + 3.0 * ulp, 1.0));
        assert!(!agrees(composed, DType::BF16, 1.0 + 4.0 * ulp, 1.0));
        let three = 1.0 + 3.0 * 2f32.powi(-11);
        assert!(!agrees(composed, DType::F16, three, 1.0));
        assert!(!agrees("conv2d", DType::F16, 1.0 + ulp, 1.0));
        assert!(!agrees("conv2d", DType::F16, f32::INFINITY, 60_000.0));
        assert!(!agrees("conv2d", DType::F16, f32::NAN, 1.0));
    }

    #[test]
    fn every_tried_operation_has_a_row_and_a_name() {
        for op in TriedOp::all() {
            // Panics without a row.
            class(op.name());
            let usual = TriedOp::named(op.name()).expect("usual calls");
            assert_eq!(usual.of_kind(op.kind()), op);
        }
        assert_eq!(TriedOp::named("no such operation"), None);
    }

    #[test]
    fn a_convolution_has_the_answer_of_its_kind() {
        let of = |weight: [usize; 4], groups, stride: usize| {
            let options = Convolution::of([stride, 1], [0; 2], [1; 2], groups);
            [false, true].map(|spreads| Kind::of_convolution(&weight, &options, spreads, None))
        };
        assert_eq!(of([64, 16, 3, 3], 1, 1), [Kind::Usual; 2]);
        assert_eq!(of([64, 64, 3, 3], 1, 2), [Kind::Usual, Kind::Strided]);
        assert_eq!(of([64, 3, 3, 3], 1, 1), [Kind::FewChannels; 2]);
        assert_eq!(of([3, 64, 3, 3], 1, 1), [Kind::FewChannels; 2]);
        assert_eq!(of([64, 1, 3, 3], 64, 2), [Kind::Grouped; 2]);
        let gradient = |batch, channels| {
            let op = Op::named("conv2d_weight_backward");
            let options = Convolution::of([1; 2], [0; 2], [1; 2], 1);
            let x = [batch, channels, 9, 9];
            op.convolving(&x, &[64, channels, 3, 3], options).kind()
        };
        assert_eq!(gradient(15, 64), Kind::SmallBatch);
        assert_eq!(gradient(15, 3), Kind::SmallBatch);
        assert_eq!(gradient(16, 64), Kind::Usual);
        assert_eq!(gradient(16, 3), Kind::FewChannels);

        let conv = TriedOp::named("conv2d").unwrap();
        let exceptions = Exceptions::default();
        exceptions.tried(conv.of_kind(Kind::Grouped), DType::F16, || false);
        exceptions.tried(conv, DType::F16, || true);
        let list: Vec<_> = exceptions.list().iter().map(ToString::to_string).collect();
        assert_eq!(list, ["conv2d in groups"]);
        // It gathers: a stride makes no difference.
        assert_eq!(conv.of_kind(Kind::Strided), conv);
        let matmul = TriedOp::named("float_matmul").unwrap();
        assert_eq!(matmul.of_kind(Kind::Grouped), matmul);
    }
}
