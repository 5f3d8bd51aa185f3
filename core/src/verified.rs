//! The contractions of a device that were compared with a reference at the shapes that a program uses.
//!
//! A device chooses its kernels by shape. Calls are alike if their operation, half dtype and options are, and the sizes of
//! their operands: exactly where a parameter decides, else up to the next power of two and with the same powers of two as
//! divisors, as CubeCL tells sizes apart when it tunes.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::policy::trials::Kind;
use crate::policy::{Convolution, Half, Op};
use crate::reference::Verdict;

/// Calls that are alike.
type Key = u64;

/// A comparison of a call that has begun.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    key: Key,
    /// Whether the call is wrong in half, and computes in FP32.
    in_fp32: bool,
}

/// The calls that are alike, by the first of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Calls {
    /// The place of the operation in the table.
    pub place: usize,
    pub kind: Kind,
    pub half: Half,
    /// The shapes of the float operands.
    pub shapes: Vec<Vec<usize>>,
    pub convolution: Option<Convolution>,
}

/// What is known of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Not compared yet, or no operands so far told anything.
    Open,
    /// The device is right.
    Right,
    /// The device is wrong in half. Whether it is right in FP32.
    Wrong(Option<bool>),
}

#[derive(Debug)]
struct Entry {
    calls: Calls,
    state: State,
    /// The calls since the table was made that found it in this state.
    uses: u32,
    /// Whether a comparison of such a call has begun.
    is_begun: bool,
}

/// So many calls that are not alike are compared, and kept in a file.
pub(crate) const MOST: usize = 4096;

/// The calls of a device.
#[derive(Debug, Default)]
pub(crate) struct Verified(Mutex<HashMap<Key, Entry>>);

/// What was known of calls before a file was read.
#[derive(Debug)]
pub(crate) struct Before(Key, Option<Entry>);

/// What a call is told.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verification {
    /// Whether the device is wrong in half.
    pub is_wrong: bool,
    /// The comparison of this call, if it is to be compared.
    pub begun: Option<Begun>,
}

impl Verified {
    fn entries(&self) -> MutexGuard<'_, HashMap<Key, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of a call, and whether it is to be compared, if a comparison `may_begin`: the first, second, fourth, ..
    /// of those that are not known.
    pub(crate) fn ask(
        &self,
        op: &Op,
        half: Half,
        shapes: &[&[usize]],
        may_begin: bool,
    ) -> Verification {
        let Some(place) = op.place.map(usize::from) else {
            return Verification::default();
        };
        let key = key(op.name, half, op.convolution, shapes);
        let mut entries = self.entries();
        if entries.len() >= MOST && !entries.contains_key(&key) {
            return Verification::default();
        }
        let entry = entries.entry(key).or_insert_with(|| Entry {
            calls: Calls {
                place,
                kind: op.kind(),
                half,
                shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
                convolution: op.convolution,
            },
            state: State::Open,
            uses: 0,
            is_begun: false,
        });
        let is_known = !matches!(entry.state, State::Open | State::Wrong(None));
        let begins = may_begin && !is_known && !entry.is_begun && {
            entry.uses += 1;
            entry.uses.is_power_of_two()
        };
        entry.is_begun |= begins;
        let is_wrong = matches!(entry.state, State::Wrong(_));
        Verification {
            is_wrong,
            begun: begins.then_some(Begun {
                key,
                in_fp32: is_wrong,
            }),
        }
    }

    /// Ends a comparison. Returns the calls and what is known of them now, if that is news. Without a verdict, the next
    /// such call begins another comparison.
    pub(crate) fn end(&self, begun: Begun, verdict: Option<Verdict>) -> Option<(Calls, State)> {
        let mut entries = self.entries();
        let entry = entries.get_mut(&begun.key)?;
        // It may have ended already, or be another one than the call knew.
        let is_in_fp32 = matches!(entry.state, State::Wrong(_));
        if !std::mem::take(&mut entry.is_begun) || is_in_fp32 != begun.in_fp32 {
            return None;
        }
        let Some(verdict) = verdict else {
            entry.uses = 0;
            return None;
        };
        let state = match (entry.state, verdict) {
            (State::Open, Verdict::Right) => State::Right,
            (State::Open, Verdict::Wrong { .. }) => State::Wrong(None),
            (State::Wrong(None), Verdict::Right) => State::Wrong(Some(true)),
            (State::Wrong(None), Verdict::Wrong { .. }) => State::Wrong(Some(false)),
            _ => return None,
        };
        (entry.state, entry.uses) = (state, 0);
        Some((entry.calls.clone(), state))
    }

    /// Adds what a file knows, unless the calls are known. Returns what [`restore`](Self::restore) takes.
    pub(crate) fn add(&self, op: &Op, calls: Calls, state: State) -> Option<Before> {
        let shapes: Vec<&[usize]> = calls.shapes.iter().map(Vec::as_slice).collect();
        let key = key(op.name, calls.half, calls.convolution, &shapes);
        let mut entries = self.entries();
        let before = entries.get(&key);
        if before.is_some_and(|entry| entry.state != State::Open) {
            return None;
        }
        let entry = Entry {
            calls,
            state,
            uses: 0,
            is_begun: before.is_some_and(|entry| entry.is_begun),
        };
        Some(Before(key, entries.insert(key, entry)))
    }

    /// Takes back what was added.
    pub(crate) fn restore(&self, added: Vec<Before>) {
        let mut entries = self.entries();
        for Before(key, before) in added {
            match before {
                Some(entry) => entries.insert(key, entry),
                None => entries.remove(&key),
            };
        }
    }

    /// All calls so far, in the order of the table and of their shapes.
    pub(crate) fn all(&self) -> Vec<(Calls, State)> {
        let entries = self.entries();
        let mut all: Vec<_> = entries
            .values()
            .map(|entry| (entry.calls.clone(), entry.state))
            .collect();
        all.sort_by(|(one, _), (other, _)| {
            let by = |calls: &Calls| (calls.place, calls.half);
            by(one)
                .cmp(&by(other))
                .then_with(|| one.shapes.cmp(&other.shapes))
                .then_with(|| one.convolution.cmp(&other.convolution))
        });
        all
    }

    pub(crate) fn clear(&self) {
        self.entries().clear();
    }
}

fn key(op: &str, half: Half, convolution: Option<Convolution>, shapes: &[&[usize]]) -> Key {
    let mut hasher = DefaultHasher::new();
    (op, half, convolution).hash(&mut hasher);
    for (operand, shape) in shapes.iter().enumerate() {
        let last = shape.len().saturating_sub(1);
        // A weight's sizes are those of a parameter, and so are the channels of what it meets.
        let is_weight = match op {
            "float_matmul" | "linear_weight_backward" => false,
            _ if op.starts_with("conv_transpose") && op.ends_with("_x_backward") => operand == 0,
            "linear_x_backward" => operand == 0,
            _ => operand == 1,
        };
        let channels = match op {
            "float_matmul" => None,
            _ if op.starts_with("conv") => Some(1),
            _ => Some(last),
        };
        for (axis, size) in shape.iter().enumerate() {
            match is_weight || channels == Some(axis) {
                true => (0, *size as u32).hash(&mut hasher),
                false => {
                    // A file may name any size.
                    let up_to = size.checked_next_power_of_two();
                    (size.trailing_zeros().min(6) + 1, up_to).hash(&mut hasher)
                }
            }
        }
    }
    hasher.finish()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const MATMUL: Op = Op::named("float_matmul");
    pub(crate) const WRONG: Option<Verdict> = Some(Verdict::Wrong {
        found: 1.0,
        right: 2.0,
    });

    fn begins(of: &Verified, shapes: &[&[usize]]) -> Option<Begun> {
        of.ask(&MATMUL, 0, shapes, true).begun
    }

    #[test]
    fn a_size_of_a_file_may_be_any_number() {
        assert!(begins(&Verified::default(), &[&[usize::MAX, 4], &[4, 2]]).is_some());
    }

    #[test]
    fn a_call_is_compared_until_it_tells_something() {
        let verified = Verified::default();
        let shapes: &[&[usize]] = &[&[8, 4], &[4, 2]];
        // No second comparison begins before the first has ended.
        let key = begins(&verified, shapes).unwrap();
        assert_eq!(begins(&verified, shapes), None);
        // The 1st, 2nd, 4th and 8th call that tells nothing.
        assert_eq!(verified.end(key, Some(Verdict::Silent)), None);
        let compared = (2..=8).filter(|_| {
            let begun = begins(&verified, shapes);
            begun.is_some_and(|key| verified.end(key, Some(Verdict::Silent)).is_none())
        });
        assert_eq!(compared.collect::<Vec<_>>(), [2, 4, 8]);
        // One that there was no room for is compared at the next call.
        let begun = (9..=16).find_map(|_| begins(&verified, shapes)).unwrap();
        assert_eq!(verified.end(begun, None), None);
        let key = begins(&verified, shapes).unwrap();
        let (calls, state) = verified.end(key, Some(Verdict::Right)).unwrap();
        assert_eq!(
            (calls.shapes, state),
            (vec![vec![8, 4], vec![4, 2]], State::Right)
        );
        assert_eq!(
            verified.ask(&MATMUL, 0, shapes, true),
            Verification::default()
        );
        // The other half dtype is another matter.
        assert!(verified.ask(&MATMUL, 1, shapes, true).begun.is_some());
    }

    #[test]
    fn a_wrong_call_is_compared_once_more_in_fp32() {
        for (verdict, in_fp32) in [(Some(Verdict::Right), true), (WRONG, false)] {
            let verified = Verified::default();
            let shapes: &[&[usize]] = &[&[8, 4], &[4, 2]];
            let key = begins(&verified, shapes).unwrap();
            assert_eq!(verified.end(key, WRONG).unwrap().1, State::Wrong(None));
            let asked = verified.ask(&MATMUL, 0, shapes, true);
            assert!(asked.is_wrong);
            // A comparison of a call in half says nothing of FP32.
            assert_eq!(verified.end(key, WRONG), None);
            let begun = (0..4).find_map(|_| begins(&verified, shapes));
            let begun = begun.or(asked.begun).unwrap();
            let state = State::Wrong(Some(in_fp32));
            assert_eq!(verified.end(begun, verdict).unwrap().1, state);
            let asked = verified.ask(&MATMUL, 0, shapes, true);
            assert_eq!((asked.is_wrong, asked.begun), (true, None));
        }
    }

    #[test]
    fn calls_are_alike_whose_sizes_kernels_do_not_tell_apart() {
        let of = |op: &str, shapes: &[&[usize]]| key(op, 0, None, shapes);
        let product =
            |rows, inner, columns| of("float_matmul", &[&[rows, inner], &[inner, columns]]);
        assert_eq!(product(33, 64, 80), product(63, 64, 112));
        assert_ne!(product(33, 64, 80), product(34, 64, 80));
        assert_ne!(product(33, 64, 80), product(65, 64, 80));
        assert_ne!(product(128, 64, 80), product(33, 64, 96));
        // Of a weight and its channels each size counts, of a batch and of a picture only its class.
        let conv =
            |batch, channels| of("conv2d", &[&[batch, channels, 9, 9], &[16, channels, 3, 3]]);
        assert_eq!(conv(5, 80), conv(7, 80));
        assert_ne!(conv(5, 80), conv(5, 112));
        let linear = |rows, features| of("linear", &[&[rows, features], &[features, 10]]);
        assert_eq!(linear(5, 24), linear(7, 24));
        assert_ne!(linear(5, 24), linear(5, 40));
        let options = |stride| Convolution::of([stride; 2], [0_usize; 2], [1; 2], 1);
        let strided = |stride| key("conv2d", 0, Some(options(stride)), &[&[1, 8, 9, 9]]);
        assert_ne!(strided(1), strided(2));
    }
}
