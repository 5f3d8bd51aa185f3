//! What a decision knows about values.

use super::*;
use crate::dtype::tests::DType;
use crate::policy::{Function, Functions, Op};
use Class::{LowerPrecision, Move};
use DType::{BF16, F16, F32};

#[test]
fn a_mask_of_a_rounded_scalar_is_marked_until_it_is_computed_with() {
    let half = [with(F16, TensorFlags::DEMOTED)];
    let filled = |name, operands: &[_], scalars: &[f64]| {
        let decision = decide(&Op::named(name), operands, scalars, &ON);
        decision.flags.contains(TensorFlags::FILLED)
    };
    for fills in ["float_mask_fill", "float_pad"] {
        assert!(filled(fills, &half, &[-10_001.0]), "{fills}");
        assert!(!filled(fills, &half, &[-10_000.0]), "{fills}");
        // In FP32, and so not rounded.
        assert!(!filled(fills, &half, &[-1e9]), "{fills}");
    }
    assert!(!filled("float_mul_scalar", &half, &[-10_001.0]));
    let masked = [with(F16, TensorFlags::DEMOTED | TensorFlags::FILLED)];
    assert!(filled("float_reshape", &masked, &[]) && filled("float_mul_scalar", &masked, &[1.0]));
    assert!(!filled("float_exp", &masked, &[]));
}

/// A sigmoid of FP32 that fits is FP32, and as a factor half.
#[test]
fn a_gate_in_fp32_follows_a_half_factor() {
    const GATE: TensorFlags = TensorFlags::GATE;
    let fitting = |flags| with(F32, TensorFlags::FITS | flags);
    let out = |name, operand, scalars: &[f64]| {
        let decision = decide(&Op::named(name), &[operand], scalars, &ON);
        (decision.operands, decision.flags.contains(GATE))
    };
    assert_eq!(
        out("sigmoid", fitting(TensorFlags::empty()), &[]),
        (None, true)
    );
    for other in [plain(&[F16])[0], plain(&[F32])[0]] {
        assert_eq!(out("sigmoid", other, &[]), (None, false), "{other:?}");
    }
    for name in ["float_neg", "float_slice"] {
        assert_eq!(out(name, fitting(GATE), &[]), (None, true), "{name}");
        assert_eq!(
            out(name, fitting(TensorFlags::empty()), &[]),
            (None, false),
            "{name}"
        );
    }
    assert!(out("float_add_scalar", fitting(GATE), &[1.0]).1);
    for (name, scalars) in [("float_mul_scalar", [2.0]), ("float_add_scalar", [1e9])] {
        assert!(
            !out(name, with(F32, TensorFlags::FITS_F16 | GATE), &scalars).1,
            "{name}"
        );
    }
    // What half rounded, or holds of a weight, is not the sigmoid's.
    let of = TensorFlags::FILLED | TensorFlags::WEIGHT;
    let flags = named("sigmoid", &[with(F16, of)], ON).flags;
    assert_eq!(flags & (of | TensorFlags::DEMOTED), TensorFlags::DEMOTED);
    let (gate, half) = (fitting(GATE), with(F16, TensorFlags::DEMOTED));
    let constant = with(F32, TensorFlags::CONSTANT);
    let cast = |name, operands: &[_], here| named(name, operands, here).operands;
    for operands in [[gate, half], [half, gate]] {
        assert_eq!(cast("float_mul", &operands, ON), Some(F16), "{operands:?}");
    }
    // What fits stays so, but f16 would lose a small one.
    let fits = fitting(TensorFlags::empty());
    let product = named("float_mul", &[gate, fits], ON).flags & TensorFlags::FITS;
    assert_eq!(product, TensorFlags::FITS_BF16);
    assert_eq!(cast("float_mul", &[gate, half], BELOW), Some(F32));
    // What f16 does not hold, and what may be small.
    let beyond = with(F32, TensorFlags::FITS_BF16 | GATE);
    for operands in [[beyond, half], [beyond, constant]] {
        assert_ne!(cast("float_mul", &operands, ON), Some(F16), "{operands:?}");
    }
    for others in [gate, plain(&[F32])[0]] {
        assert_eq!(cast("float_mul", &[gate, others], ON), None, "{others:?}");
    }
    // The product of two may be too small for f16.
    let of_two = named("float_mul", &[gate, gate], ON).flags & (GATE | TensorFlags::FITS);
    assert_eq!(of_two, GATE | TensorFlags::FITS_BF16);
    // The difference of two, and the sum with a half tensor, are FP32.
    assert_eq!(cast("float_sub", &[gate, gate], ON), None);
    assert_eq!(cast("float_add", &[gate, half], ON), Some(F32));
    assert_eq!(cast("float_div", &[half, gate], ON), Some(F32));
    // Only a factor follows.
    for name in ["float_cat", "float_mask_where", "float_greater"] {
        assert_eq!(cast(name, &[gate, half], ON), Some(F32), "{name}");
        assert_eq!(cast(name, &[gate, constant], ON), None, "{name}");
    }
}

#[test]
fn a_state_is_what_zeros_become_by_factors_and_sums() {
    let half = with(F16, TensorFlags::DEMOTED);
    let zeros = with(F32, TensorFlags::CONSTANT | TensorFlags::STATE);
    let state = with(F32, TensorFlags::STATE);
    let plain = with(F32, TensorFlags::empty());
    let of = |name, operands: &[_], scalars: &[f64]| {
        let out = decide(&Op::named(name), operands, scalars, &ON);
        assert_ne!(out.operands, Some(F16), "{name}");
        out.flags.contains(TensorFlags::STATE)
    };
    for factor in [half, with(F32, TensorFlags::FITS | TensorFlags::GATE)] {
        assert!(of("float_mul", &[factor, zeros], &[]) && of("float_mul", &[state, factor], &[]));
    }
    // Of FP32 alone, no state begins.
    for mask in [TensorFlags::BINARY, TensorFlags::CONSTANT] {
        let mask = with(F32, mask);
        assert!(!of("float_mul", &[mask, zeros], &[]) && of("float_mul", &[state, mask], &[]));
    }
    for sum in ["float_add", "float_sub"] {
        for other in [half, zeros, state] {
            assert!(of(sum, &[state, other], &[]) && of(sum, &[other, state], &[]));
        }
        // Zeros that are added to begin no state, and FP32 may be beyond f16.
        for others in [
            [zeros, half],
            [state, plain],
            [state, with(F32, TensorFlags::FITS)],
        ] {
            assert!(!of(sum, &others, &[]), "{others:?}");
        }
    }
    for (name, scalars) in [
        ("float_neg", &[][..]),
        ("float_reshape", &[]),
        ("float_clamp", &[-2.0, 2.0]),
        ("float_mul_scalar", &[2.0]),
        ("float_div_scalar", &[2.0]),
        ("float_mask_fill", &[0.0]),
    ] {
        assert!(of(name, &[state], scalars), "{name}");
    }
    for (name, scalars) in [
        ("float_mul_scalar", 4.0),
        ("float_div_scalar", 0.25),
        ("float_mask_fill", -1e9),
        ("float_add_scalar", 1.0),
    ] {
        assert!(!of(name, &[state], &[scalars]), "{name}");
    }
    assert!(of("float_slice_assign", &[zeros, state], &[]));
    for other in [plain, state] {
        assert!(!of("float_mul", &[state, other], &[]) && !of("float_div", &[state, other], &[]));
    }
    let masked = [state, half];
    assert!(of("float_mask_where", &masked, &[]));
    // Where half is in force, a bounded function of it is half.
    assert_eq!(named("float_tanh", &[state], ON).operands, Some(F16));
    assert_eq!(named("float_tanh", &[state], BELOW).operands, None);
    assert_eq!(named("relu", &[state], ON).operands, None);
}

#[test]
fn what_is_computed_in_half_from_half_is_recognized() {
    let half = with(F16, TensorFlags::DEMOTED);
    let is_in_half = |name, operand, scalars: &[f64], here| {
        decide(&Op::named(name), &[operand], scalars, &here).is_in_half
    };
    for (name, scalars) in [
        ("float_add_scalar", &[1.0][..]),
        ("sigmoid", &[]),
        ("float_reshape", &[]),
    ] {
        assert!(is_in_half(name, half, scalars, ON), "{name}");
        // FP32, the user's own half, a gradient, and a layer that has been decided for.
        let gradient = with(F16, TensorFlags::DEMOTED | TensorFlags::GRADIENT);
        for other in [plain(&[F32])[0], plain(&[F16])[0], gradient] {
            assert!(!is_in_half(name, other, scalars, ON), "{name}");
        }
        for here in [BELOW, OFF] {
            assert!(!is_in_half(name, half, scalars, here), "{name}");
        }
    }
    // In FP32, because of the scalar or of the row.
    assert!(!is_in_half("float_add_scalar", half, &[1e-8], ON));
    assert!(!is_in_half("float_exp", half, &[], ON));
}

#[test]
fn a_sum_of_many_half_gradients_goes_on_in_fp32() {
    let gradient = |terms| Operand {
        terms,
        ..with(BF16, TensorFlags::BACKWARD)
    };
    let sum = |a, b| named("float_add", &[gradient(a), gradient(b)], BELOW);
    for (a, b) in [(1, 1), (15, 1), (8, 8)] {
        let sum = sum(a, b);
        assert_eq!((sum.operands, sum.result), (None, Some(BF16)));
        assert_eq!(sum.terms, a + b);
    }
    for (a, b) in [(16, 1), (9, 8), (16, 16)] {
        let sum = sum(a, b);
        assert_eq!((sum.operands, sum.result), (Some(F32), None));
        assert_eq!(sum.terms, 1);
    }
    // A view of a sum, and a multiple of it, have its terms.
    for same in ["float_reshape", "float_swap_dims", "float_mul_scalar"] {
        let same = named(same, &[gradient(16)], BELOW);
        assert_eq!((same.operands, same.terms), (None, 16));
    }
}

#[test]
fn where_autodiff_runs_elsewhere_any_sum_may_be_of_gradients() {
    let untold = Here {
        sizes: [(1, None); 2],
        ..ON
    };
    let half = |flags, terms| Operand {
        terms,
        ..with(BF16, flags)
    };
    let sum = |flags, a, b, here| named("float_add", &[half(flags, a), half(flags, b)], here);
    let demoted = TensorFlags::DEMOTED;
    let few = sum(demoted, 15, 1, untold);
    assert_eq!((few.operands, few.terms), (None, 16));
    let many = sum(demoted, 16, 1, untold);
    assert_eq!((many.operands, many.result), (Some(F32), None));
    assert_eq!(many.terms, 1);
    // A half tensor of the user's own, and a tensor on this tape.
    for (flags, here) in [(TensorFlags::empty(), untold), (demoted, ON)] {
        assert_eq!(sum(flags, 16, 1, here).operands, None);
    }
    // A multiple of a sum has the terms of the sum.
    for multiple in ["float_mul_scalar", "float_div_scalar"] {
        let multiple = named(multiple, &[half(demoted, 16)], untold);
        assert_eq!((multiple.operands, multiple.terms), (None, 16));
    }
    // And so does a view of it.
    for view in ["float_swap_dims", "float_reshape", "float_slice"] {
        let view = named(view, &[half(demoted, 16)], untold);
        assert_eq!((view.operands, view.terms), (None, 16));
    }
    // Another operation restarts the count.
    let negative = named("float_neg", &[half(demoted, 16)], untold);
    assert_eq!(negative.terms, 1);
    let product = named("float_mul", &[half(demoted, 16), half(demoted, 16)], untold);
    assert_eq!((product.operands, product.terms), (None, 1));
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

/// Each of the values may take the range of f16.
#[test]
fn a_sum_of_many_that_fit_in_f16_does_not_fit() {
    const FITS: TensorFlags = TensorFlags::FITS;
    let sized = |sizes: [usize; 2]| Here {
        sizes: sizes.map(|size| (size, None)),
        ..ON
    };
    let alike = sized([64, 64]);
    let fitting = |terms| Operand {
        terms,
        ..with(F32, FITS)
    };
    let made = |name, operands: &[_], scalars: &[f64], here: &Here| {
        let made = decide(&Op::named(name), operands, scalars, here);
        (made.flags & FITS, made.terms)
    };
    let half = with(F16, TensorFlags::DEMOTED);
    for name in ["float_add", "float_sub"] {
        let sum = |a, b, here: &Here| made(name, &[fitting(a), fitting(b)], &[], here);
        assert_eq!(sum(1, 1, &alike), (FITS, 2), "{name}");
        assert_eq!(sum(2, 2, &alike), (FITS, 4), "{name}");
        // bf16 has the range of FP32.
        let many = (TensorFlags::FITS_BF16, 1);
        assert_eq!(sum(3, 2, &alike), many, "{name}");
        assert_eq!(sum(255, 255, &alike), many, "{name}");
        // The mean or the shift of a norm.
        for here in [sized([64, 4]), sized([4, 64])] {
            assert_eq!(sum(2, 1, &here), (FITS, 2), "{name}");
            assert_eq!(sum(4, 1, &here), (FITS, 4), "{name}");
        }
        let with_half = made(name, &[fitting(4), half], &[], &alike);
        assert_eq!(with_half.0 & TensorFlags::FITS_F16, TensorFlags::empty());
    }
    // A sum of half tensors that goes on in FP32.
    let sums = [16, 1].map(|terms| Operand { terms, ..half });
    let sum = named("float_add", &sums, alike);
    assert_eq!(sum.operands, Some(F32));
    assert!(!sum.flags.contains(TensorFlags::FITS_F16));
    let scaled = |terms, factor| made("float_mul_scalar", &[fitting(terms)], &[factor], &alike);
    assert_eq!(scaled(2, 2.0), (FITS, 4));
    assert_eq!(scaled(2, 0.5), (FITS, 2));
    assert_eq!(scaled(3, -1.5), (TensorFlags::FITS_BF16, 1));
    // The same values; a ReLU makes them half.
    let same = ["float_neg", "float_reshape", "float_mean"].map(|name| (name, 3));
    for (name, terms) in same.into_iter().chain([("relu", 1)]) {
        let made = made(name, &[fitting(3)], &[], &alike);
        assert_eq!(made, (FITS, terms), "{name}");
    }
    let beside = Here {
        sizes: [(64, Some(true)), (4, Some(true))],
        ..ON
    };
    let statistic = with(F32, TensorFlags::LEARNED);
    for (name, terms) in [("float_div", 1), ("float_mul", 4)] {
        let made = made(name, &[fitting(4), statistic], &[], &beside);
        assert_eq!(made, (FITS, terms), "{name}");
    }
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
fn a_pool_reads_probabilities_in_fp32_and_activations_in_half() {
    let half = with(F16, TensorFlags::DEMOTED);
    for (function, operands) in [(Function::Sigmoid, Some(F32)), (Function::Tanh, None)] {
        let pool = Op::named("max_pool2d");
        let decision = decide(&pool, &[half], &[], &ON);
        let reading = decision.reading(&pool, F16, Functions([function].iter()), true);
        assert_eq!(reading.operands, operands, "{function:?}");
    }
}
