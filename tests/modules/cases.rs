//! A case, and the comparison of its results on two backends. Independent of the release of Burn.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn_amp::Precision;

use crate::common::{assert_close, roundoff};
use crate::harness::{Lab, Run, comparisons};

/// One use of a module.
pub trait Case {
    const NAME: &str;

    /// How far values and gradients may be from FP32, in roundoffs of the half dtype: on FP32
    /// inputs and on half ones.
    const ROUNDOFFS: [f64; 2];

    /// Makes the module and its inputs, and hands its outputs to the lab.
    fn run<B: Run>(lab: &mut Lab<B>);
}

/// The tolerance on FP32 inputs of an operation that is recorded otherwise than by Burn: FP32's own
/// roundings, a thousandth of f16's.
pub const RECORDED: f64 = 1e-3;

/// Cases, each with its tolerances, in roundoffs, on FP32 inputs and on half ones; the body gives
/// the module's output. Zero on FP32 inputs: nothing is demoted, and the result is Burn's own.
///
/// The errors are norms, in which independent roundings average out: one rounding is 0.5, a contraction
/// of rounded operands 0.8. Tolerances are about 1.5 times Flex's errors. A case may have attributes:
/// the feature of the Burn that has the module.
macro_rules! cases {
    ($($(#[$attribute:meta])* $name:ident($leaf:expr, $activation:expr) |$lab:ident| $body:expr;)*) => {
        $($(#[$attribute])* mod $name {
            use super::*;
            use $crate::{cases, harness};

            struct Case;

            impl cases::Case for Case {
                const NAME: &str = stringify!($name);
                const ROUNDOFFS: [f64; 2] = [$leaf, $activation];

                fn run<B: harness::Run>($lab: &mut harness::Lab<B>) {
                    let output = $body;
                    $lab.output("output", output);
                }
            }

            #[test]
            fn fp32_is_burns_own() {
                cases::assert_fp32_is_burns_own::<Case>();
            }

            #[test]
            fn f16_is_close() {
                cases::assert_half_is_close::<Case>(burn_amp::Precision::F16);
            }

            #[test]
            fn bf16_is_close() {
                cases::assert_half_is_close::<Case>(burn_amp::Precision::Bf16);
            }
        })*

        /// The names of the cases above.
        pub const NAMES: &[&str] = &[$($(#[$attribute])* stringify!($name)),*];
    };
}

/// The input of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feed {
    /// The FP32 leaf itself, as the first layer of a model gets it.
    Leaf,
    /// The leaf after a linear layer with the identity for a weight: half under AMP, as inside of a
    /// model, and with exactly the leaf's values.
    Activation,
}

pub const FEEDS: [Feed; 2] = [Feed::Leaf, Feed::Activation];

/// An output, a buffer or a gradient.
pub struct Seen {
    pub name: String,
    /// None for an absent gradient.
    pub values: Option<Vec<f32>>,
    pub is_gradient: bool,
    /// Zero except for rounding.
    pub cancels: bool,
    /// Added up in another order each time, also by plain Burn.
    pub unordered: bool,
}

/// The results of a case on plain Burn and under AMP, in one way to run it.
pub struct Comparison {
    pub what: String,
    pub burn: Arc<[Seen]>,
    pub amp: Vec<Seen>,
    pub trains: bool,
    /// In roundoffs.
    pub tolerance: f64,
}

impl Comparison {
    /// The values to compare: name, AMP's values and plain Burn's.
    fn pairs(&self) -> impl Iterator<Item = (String, &Seen, &[f32], &[f32])> {
        let outline = |all: &[Seen]| -> Vec<(String, Option<usize>)> {
            let length = |seen: &Seen| seen.values.as_ref().map(Vec::len);
            all.iter().map(|s| (s.name.clone(), length(s))).collect()
        };
        assert_eq!(outline(&self.amp), outline(&self.burn), "{}", self.what);
        let names: BTreeSet<&str> = self.burn.iter().map(|seen| seen.name.as_str()).collect();
        assert_eq!(
            names.len(),
            self.burn.len(),
            "names are not unique: {names:?}"
        );
        assert_eq!(self.largest_gradient() > 0.0, self.trains, "gradients");
        self.amp.iter().zip(&*self.burn).filter_map(|(amp, burn)| {
            let what = format!("{}, {}", self.what, burn.name);
            Some((what, burn, amp.values.as_deref()?, burn.values.as_deref()?))
        })
    }

    fn largest_gradient(&self) -> f32 {
        let gradients = self.burn.iter().filter(|seen| seen.is_gradient);
        largest(
            gradients
                .filter_map(|seen| seen.values.as_deref())
                .flatten(),
        )
    }
}

fn largest<'a>(values: impl IntoIterator<Item = &'a f32>) -> f32 {
    values.into_iter().fold(0.0, |max, v| v.abs().max(max))
}

/// Roundings of FP32 between two sums of the same few terms.
const IN_ANY_ORDER: f64 = 4.0;

pub fn assert_fp32_is_burns_own<C: Case>() {
    for comparison in comparisons::<C>(Precision::F32) {
        for (what, seen, amp, burn) in comparison.pairs() {
            assert!(
                burn.iter().all(|v| v.is_finite()),
                "{what}: plain Burn gives {burn:?}"
            );
            if seen.unordered {
                assert_close(&what, Precision::F32, amp, burn, IN_ANY_ORDER);
                continue;
            }
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(amp) == bits(burn), "{what}: {amp:?} is not {burn:?}");
        }
    }
}

pub fn assert_half_is_close<C: Case>(precision: Precision) {
    for comparison in comparisons::<C>(precision) {
        let tolerance = comparison.tolerance;
        for (what, seen, amp, burn) in comparison.pairs() {
            if seen.cancels {
                assert!(
                    amp.iter().all(|v| v.is_finite()),
                    "{what} in {precision}: not finite: {amp:?}"
                );
                let noise = f64::from(largest(amp) / comparison.largest_gradient());
                let most = tolerance * roundoff(precision);
                assert!(
                    noise <= most,
                    "{what} in {precision}: {noise:.2e} above {most:.2e}"
                );
            } else if seen.unordered && tolerance == 0.0 {
                assert_close(&what, Precision::F32, amp, burn, IN_ANY_ORDER);
            } else {
                assert_close(&what, precision, amp, burn, tolerance);
            }
        }
    }
}
