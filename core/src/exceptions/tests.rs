use super::*;
use crate::dtype::tests::DType::{BF16, F16};
use crate::policy::{Class, Convolution, Role};
use crate::verified::tests::WRONG;

pub(super) fn tried(name: &str) -> TriedOp {
    TriedOp::named(name).unwrap()
}

/// Adds calls that overflowed. Returns whether they are new.
pub(super) fn add(exceptions: &Exceptions, op: &str, length: usize, pass: &str) -> bool {
    let news = exceptions.add_overflowed(op, length, pass);
    let is_new = news.is_some();
    exceptions.publish(news);
    is_new
}

pub(super) fn texts(exceptions: &Exceptions) -> Vec<String> {
    let text = |e: Exception| {
        let half = e.half.map_or("any half".into(), |half| half.to_string());
        format!("{e}, {half}: {}, {:?}", e.precision, e.reason)
    };
    exceptions.list().into_iter().map(text).collect()
}

/// An exception of each reason, and an operation in which the device follows the table.
pub(super) fn some() -> Exceptions {
    let exceptions = Exceptions::default();
    let operations = OpPrecisions::default();
    let operations = operations
        .with("0.21", "softmax", OpPrecision::Half)
        .unwrap();
    let operations = operations.with("0.21", "conv2d", OpPrecision::F32).unwrap();
    assert_eq!(exceptions.configure(&operations).len(), 2);
    let grouped = tried("conv2d").of_kind(Kind::Grouped);
    assert_eq!(exceptions.tried(grouped, F16, || false), Some(false));
    assert_eq!(
        exceptions.tried(tried("float_sqrt"), BF16, || true),
        Some(true)
    );
    assert_eq!(exceptions.tried(tried("linear"), BF16, || true), Some(true));
    exceptions
}

pub(super) const SOME: [&str; 4] = [
    "conv2d, any half: f32, Configured",
    "conv2d in groups, f16: f32, Tried",
    "softmax, any half: half, Configured",
    "sqrt, bf16: half, Tried",
];

#[test]
fn one_look_up_has_all_that_is_known_of_an_operation() {
    let exceptions = some();
    assert_eq!(texts(&exceptions), SOME);
    let conv = exceptions.of(&Op::named("conv2d"), || 9);
    assert_eq!(conv.configured(), Some(OpPrecision::F32));
    for calls in Kind::ALL {
        let found = (calls == Kind::Grouped).then_some(false);
        assert_eq!(conv.is_exact(calls, F16), found);
        assert_eq!(conv.is_exact(calls, BF16), None);
        assert_eq!(conv.without_trials().is_exact(calls, F16), None);
    }
    assert_eq!(conv.without_trials().configured(), Some(OpPrecision::F32));
    let softmax = exceptions.of(&Op::named("softmax"), || 9);
    assert_eq!(softmax.configured(), Some(OpPrecision::Half));
    let own = Op::custom("conv2d", Class::Fp32, Role::Forward);
    assert_eq!(exceptions.of(&own, || 9), Known::default());
}

#[test]
fn an_answer_stays_and_a_configuration_is_replaced() {
    let exceptions = some();
    let linear = tried("linear");
    assert_eq!(exceptions.tried(linear, BF16, || false), Some(true));
    assert_eq!(exceptions.configure(&OpPrecisions::default()), []);
    assert_eq!(texts(&exceptions), [SOME[1], SOME[3]]);
    let names = |precision| exceptions.in_force(precision).len();
    assert_eq!(
        [Precision::F32, Precision::F16, Precision::Bf16].map(names),
        [0, 1, 1]
    );
}

#[test]
fn what_is_frozen_tries_nothing_and_what_is_cleared_is_tried_again() {
    let exceptions = some();
    exceptions.freeze(true);
    let matmul = tried("float_matmul");
    assert_eq!(exceptions.tried(matmul, F16, || panic!("frozen")), None);
    assert!(exceptions.is_frozen());
    exceptions.freeze(false);
    assert_eq!(exceptions.tried(matmul, F16, || false), Some(false));
    exceptions.clear();
    assert_eq!(texts(&exceptions), [SOME[0], SOME[2]]);
    assert_eq!(exceptions.tried(matmul, F16, || true), Some(true));
}

#[test]
fn calls_that_overflow_are_told_apart_by_a_length_and_the_second_stands_for_all() {
    let exceptions = some();
    let matmul = Op::named("float_matmul");
    let overflowed =
        |exceptions: &Exceptions, length| exceptions.of(&matmul, || length).overflowed();
    assert!(add(&exceptions, "float_matmul", 64, "forward"));
    assert!(!add(&exceptions, "float_matmul", 64, "forward"));
    let found = [64, 65].map(|length| overflowed(&exceptions, length));
    assert_eq!(found, [true, false]);
    assert!(texts(&exceptions).contains(&"matmul over 64, f16: f32, Overflowed".into()));
    assert!(add(&exceptions, "float_matmul", 65, "backward"));
    assert!(!add(&exceptions, "float_matmul", 66, "forward"));
    assert!(
        overflowed(&exceptions, 7)
            && texts(&exceptions).contains(&"matmul, f16: f32, Overflowed".into())
    );
    assert!(exceptions.of(&matmul, || 7).without_trials().overflowed());
    // What moves data, what is of the backward pass, and what is no row cannot be changed.
    for op in ["float_reshape", "relu_backward", "own"] {
        assert!(!add(&exceptions, op, 1, "forward"), "{op}");
    }
    assert_eq!(
        exceptions.in_force(Precision::Bf16).len(),
        exceptions.in_force(Precision::F16).len() - 1
    );

    exceptions.publish([exceptions.withdraw("float_matmul", 9)]);
    assert!(!overflowed(&exceptions, 64));
    assert_eq!(texts(&exceptions), SOME);
    add(&exceptions, "float_matmul", 64, "forward");
    exceptions.publish([exceptions.withdraw("float_matmul", 65)]);
    assert!(overflowed(&exceptions, 64));
    exceptions.clear();
    assert!(!overflowed(&exceptions, 64));
    exceptions.freeze(true);
    assert!(!add(&exceptions, "float_matmul", 64, "forward"));
}

/// Calls of many shapes, as a program has with sequences of many lengths.
#[test]
fn convolutions_are_told_apart_by_their_options() {
    let exceptions = Exceptions::default();
    let shapes: [&[usize]; 2] = [&[1, 8, 9, 9], &[8, 8, 3, 3]];
    for dilation in [12, 1, 6] {
        let options = Convolution::of([1; 2], [dilation; 2], [dilation; 2], 1);
        let mut conv = Op::named("conv2d");
        conv.convolution = Some(options);
        let begun = exceptions.verified(&conv, F16, &shapes, true).begun;
        exceptions.end_verifications([(begun.unwrap(), WRONG)]);
    }
    let of = "conv2d of [1, 8, 9, 9] and [8, 8, 3, 3]";
    let text = |options: &str| format!("{of}{options}, f16: f32, Verified");
    assert_eq!(
        texts(&exceptions),
        [
            text(", padding [1, 1]"),
            text(", padding [6, 6], dilation [6, 6]"),
            text(", padding [12, 12], dilation [12, 12]")
        ]
    );
}

#[test]
fn of_many_threads_the_first_answer_is_that_of_all() {
    let exceptions = Exceptions::default();
    let trials = AtomicUsize::new(0);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let ask = |i: usize| {
            let (exceptions, trials) = (&exceptions, &trials);
            scope.spawn(move || {
                exceptions.tried(tried("linear"), F16, || {
                    trials.fetch_add(1, Ordering::Relaxed);
                    i.is_multiple_of(2)
                })
            })
        };
        let threads: Vec<_> = (0..8).map(ask).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let known = exceptions
        .of(&Op::named("linear"), || 9)
        .is_exact(Kind::Usual, F16);
    assert!(known.is_some());
    assert!(answers.iter().all(|answer| *answer == known), "{answers:?}");
}

#[test]
fn a_report_names_the_first_operations_and_the_field_with_all() {
    let lines =
        |exceptions: &Exceptions, half: Precision| report_lines(half, &exceptions.in_force(half));
    assert_eq!(lines(&Exceptions::default(), Precision::F16), "");
    assert_eq!(
        lines(&some(), Precision::F16),
        "operations  conv2d in f32, softmax in half: changed by AmpConfig::with_op\n\
         FP32 here   conv2d in groups: computed in FP32, then rounded to f16\n"
    );
    let overflowed = Exceptions::default();
    add(&overflowed, "float_matmul", 64, "forward");
    assert_eq!(
        lines(&overflowed, Precision::F16),
        "overflowed  matmul over 64: in FP32 now: no loss scale mends it\n"
    );
    assert_eq!(
        lines(&some(), Precision::Bf16),
        "operations  conv2d in f32, softmax in half: changed by AmpConfig::with_op\n\
         half here   sqrt: as exact in bf16 as in FP32, so without casts\n"
    );
    let many = Exceptions::default();
    let all = TriedOp::all().filter(|op| !Op::named(op.name()).is_widened());
    all.take(8).for_each(|op| {
        many.tried(op, F16, || false);
    });
    let many = lines(&many, Precision::F16);
    assert!(many.contains(" and 3 more (see `exceptions`): "), "{many}");
}
