//! The casts of a decision.

use super::*;
use crate::dtype::tests::DType;
use crate::policy::Op;
use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};
use DType::{BF16, F16, F32, F64};

#[test]
fn a_bound_that_half_does_not_hold_exactly_is_fp32() {
    let by_policy = |flags| [with(F16, TensorFlags::DEMOTED | flags)];
    let decided = |name, operands: &[_], scalar: f64, here| {
        let decision = decide(&Op::named(name), operands, &[scalar], &here);
        (
            decision.operands,
            decision.flags.contains(TensorFlags::FITS_F16),
        )
    };
    let none = TensorFlags::empty();
    for name in ["float_clamp_min", "float_greater_elem"] {
        for here in [ON, BELOW] {
            let of = |operands: &[_], scalar| decided(name, operands, scalar, here);
            assert_eq!(of(&by_policy(none), 0.999), (Some(F32), false), "{name}");
            assert_eq!(of(&by_policy(none), 1e-6), (Some(F32), false));
            for held in [0.5, -1.0, 2048.0, f64::INFINITY] {
                assert_eq!(of(&by_policy(none), held), (None, true), "{name} {held}");
            }
            assert_eq!(of(&plain(&[F16]), 0.999).0, None);
            // A comparison finds what was filled with a rounded scalar.
            let filled = of(&by_policy(TensorFlags::FILLED), 0.999).0;
            assert_eq!(filled, (name == "float_clamp_min").then_some(F32));
            let filled = of(&by_policy(TensorFlags::FILLED), -12_345.0).0;
            assert_eq!(filled, None);
            assert_eq!(of(&plain(&[F32]), 0.999).0, None);
        }
    }
    // What half rounds is equal to what half rounded.
    assert_eq!(
        decided("float_equal_elem", &by_policy(none), 0.999, ON).0,
        None
    );
}

#[test]
fn off_does_nothing_but_to_undo_what_the_policy_did() {
    for class in CLASSES {
        // The user's own half stays; the policy's returns to FP32, unless the operation only moves data.
        assert_eq!(casts(class, &[F16, F16], OFF), NONE);
        assert_eq!(casts(class, &[F32, F16], OFF), (Some(F32), None));
        let demoted = [with(F16, TensorFlags::DEMOTED)];
        let expected = (class != Move).then_some(F32);
        assert_eq!(of(class, &demoted, OFF).operands, expected, "{class:?}");
        let wide = [demoted[0], with(F64, TensorFlags::empty())];
        assert_eq!(of(class, &wide, OFF).operands, Some(F64));
        // On a device that is no longer in half, all tensors return to the user's dtype.
        for (declared, dtype) in [(F32, F16), (BF16, F32), (F32, F32)] {
            let here = Here {
                declared: Some(declared),
                ..OFF
            };
            let expected = (dtype != declared).then_some(declared);
            assert_eq!(casts(class, &[dtype], here), (expected, None));
        }
    }
}

#[test]
fn lower_precision_demotes_every_operand() {
    for dtypes in [&[F32, F32][..], &[F32, F16], &[BF16, F32], &[F16, F16]] {
        assert_eq!(casts(LowerPrecision, dtypes, ON), (Some(F16), None));
    }
}

#[test]
fn lower_precision_follows_its_operands_below_autodiff() {
    assert_eq!(casts(LowerPrecision, &[F32, F32], BELOW), NONE);
    for half in [F16, BF16] {
        let to_half = (Some(half), None);
        assert_eq!(casts(LowerPrecision, &[F32, half], BELOW), to_half);
        assert_eq!(casts(LowerPrecision, &[half, half], BELOW), to_half);
    }
    let both = casts(LowerPrecision, &[F16, BF16], BELOW);
    assert_eq!(both, (Some(F32), None));
}

#[test]
fn a_gradient_is_never_demoted() {
    let gradient = with(F32, TensorFlags::GRADIENT);
    let decision = of(LowerPrecision, &[gradient, plain(&[F32])[0]], ON);
    assert_eq!((decision.operands, decision.result), NONE);
    assert!(decision.flags.contains(TensorFlags::GRADIENT));
}

#[test]
fn a_device_that_only_contracts_in_half_does_nothing_else_in_half() {
    let contraction = (Some(BF16), Some(F32));
    for dtypes in [&[F32, F32][..], &[BF16, F32]] {
        assert_eq!(casts(LowerPrecision, dtypes, CONTRACTS), contraction);
    }
    let below = Here {
        mode: Mode::KeepDtypes,
        ..CONTRACTS
    };
    assert_eq!(casts(LowerPrecision, &[BF16], below), contraction);
    assert!(of(LowerPrecision, &plain(&[F32]), CONTRACTS).only_contracts);
    assert!(!of(LowerPrecision, &plain(&[F32]), ON).only_contracts);
    let kernel = Here {
        is_kernel: true,
        ..CONTRACTS
    };
    for class in [Fp32, Fp32Inside, Promote, PromoteSum, Keep, Activation] {
        assert_eq!(casts(class, &[BF16], kernel), (Some(F32), None));
    }
    assert_eq!(casts(Move, &[BF16], CONTRACTS), NONE);
    // PReLU is not a contraction, whatever its class.
    let prelu = named("prelu", &plain(&[F32, F32]), CONTRACTS);
    assert_eq!((prelu.operands, prelu.only_contracts), (None, false));
    assert_eq!(named("prelu", &plain(&[F32, F32]), ON).operands, Some(F16));
}

#[test]
fn fp32_promotes_and_stays_wide() {
    assert_eq!(casts(Fp32, &[F32, F32], ON), NONE);
    assert_eq!(casts(Fp32, &[F16], ON), (Some(F32), None));
    assert_eq!(casts(Fp32, &[F32, BF16], BELOW), (Some(F32), None));
}

#[test]
fn fp32_inside_gives_back_the_first_operands_dtype() {
    let kernel = Here {
        is_kernel: true,
        ..ON
    };
    let on = |dtypes: &[DType]| casts(Fp32Inside, dtypes, kernel);
    assert_eq!(on(&[F32, F32]), NONE);
    assert_eq!(on(&[BF16, F32]), (Some(F32), Some(BF16)));
    assert_eq!(on(&[F32, F16]), (Some(F32), None));
    // Above autodiff the tape keeps half: the layer below widens the operation.
    assert_eq!(casts(Fp32Inside, &[F16], ON), NONE);
    // An operation that autodiff composes from other steps is widened above autodiff.
    let unfold = named("float_unfold", &plain(&[F16]), ON);
    assert_eq!((unfold.operands, unfold.result), (Some(F32), Some(F16)));
    // Without autodiff, no gradient is summed.
    let unfold = named("float_unfold", &plain(&[F16]), kernel);
    assert_eq!((unfold.operands, unfold.result), NONE);
}

#[test]
fn a_backward_function_gives_back_the_widest_dtype() {
    let op = Op::custom("", Fp32Inside, Role::Backward);
    let on = |dtypes: &[DType]| {
        let decision = decide(&op, &plain(dtypes), &[], &BELOW);
        (decision.operands, decision.result)
    };
    assert_eq!(on(&[F16, F32]), (Some(F32), None));
    assert_eq!(on(&[F16, F16]), (Some(F32), Some(F16)));
    assert_eq!(on(&[F16, BF16]), (Some(F32), None));
}

#[test]
fn the_gradient_of_a_parameter_has_the_dtype_that_the_user_knows() {
    let here = Here {
        declared: Some(F32),
        ..BELOW
    };
    let backward = |name, here| named(name, &plain(&[F16, F16]), here).result;
    assert_eq!(backward("linear_weight_backward", here), Some(F32));
    assert_eq!(backward("linear_weight_backward", BELOW), None);
    assert_eq!(backward("linear_x_backward", here), None);
}

#[test]
fn promotion_brings_mixed_operands_together() {
    assert_eq!(casts(Promote, &[F16, F16], ON), NONE);
    assert_eq!(casts(Promote, &[F16, F32], ON), (Some(F32), None));
    assert_eq!(casts(Promote, &[F16, BF16], ON), (Some(F32), None));
    assert_eq!(casts(Keep, &[F16], ON), NONE);
    assert_eq!(casts(Move, &[F16], ON), NONE);
}

#[test]
fn an_activation_brings_what_fits_to_half() {
    let fits = [with(F32, TensorFlags::FITS_BF16)];
    let bf16 = Here {
        mode: Mode::On(BF16),
        ..ON
    };
    assert_eq!(of(Activation, &fits, bf16).operands, Some(BF16));
    assert_eq!(of(Activation, &fits, ON).operands, None);
    assert_eq!(of(Activation, &fits, BELOW).operands, None);
    assert_eq!(of(Activation, &fits, CONTRACTS).operands, None);
    assert_eq!(of(Keep, &fits, bf16).operands, None);
    assert_eq!(casts(Activation, &[F32], ON), NONE);
    assert_eq!(casts(Activation, &[F16], ON), NONE);
}

#[test]
fn constants_follow_a_half_tensor_and_nothing_else() {
    let constant = with(F32, TensorFlags::CONSTANT);
    let and = |dtypes: &[DType]| [vec![constant], plain(dtypes)].concat();
    let on = |operands: &[_]| of(Promote, operands, ON).operands;
    assert_eq!(on(&and(&[F16])), Some(F16));
    assert_eq!(on(&[plain(&[F16])[0], constant]), Some(F16));
    assert_eq!(on(&and(&[F16, F32])), Some(F32));
    assert_eq!(on(&and(&[F16, BF16])), Some(F32));
    assert_eq!(on(&and(&[F32])), None);
    assert_eq!(on(&[constant]), None);
    // 10 / 1e-4 is beyond f16.
    for operands in [and(&[F16]), vec![plain(&[F16])[0], constant]] {
        assert_eq!(named("float_mul", &operands, ON).operands, Some(F16));
        assert_eq!(named("float_div", &operands, ON).operands, Some(F32));
    }
    // 0.1 to the 8th is below f16.
    let ones = with(F32, TensorFlags::CONSTANT | TensorFlags::ONES);
    for operands in [[ones, plain(&[F16])[0]], [plain(&[F16])[0], ones]] {
        assert_eq!(named("float_mul", &operands, ON).operands, Some(F32));
        assert_eq!(named("float_cat", &operands, ON).operands, Some(F16));
    }
    for moves in ["float_expand", "float_reshape"] {
        let flags = named(moves, &[ones], ON).flags;
        assert!(flags.contains(TensorFlags::ONES), "{moves}");
    }
    // The next row may be computed from the first. Where autodiff runs elsewhere, this may be the gradient of a slice.
    let zeros = with(F32, TensorFlags::CONSTANT | TensorFlags::STATE);
    let of_two = |tracked| Here {
        sizes: [(16, tracked), (1, tracked)],
        ..ON
    };
    for (first, here, expected) in [
        (zeros, of_two(Some(false)), F32),
        (zeros, of_two(None), F16),
        (constant, of_two(Some(false)), F16),
        // Padding.
        (zeros, ON, F16),
    ] {
        let operands = [first, plain(&[F16])[0]];
        assert_eq!(
            named("float_slice_assign", &operands, here).operands,
            Some(expected)
        );
        assert_eq!(named("float_cat", &operands, here).operands, Some(F16));
    }
    assert_eq!(of(Promote, &and(&[F16]), BELOW).operands, Some(F32));
    assert_eq!(of(Promote, &and(&[BF16]), CONTRACTS).operands, Some(F32));
    // An accumulator that starts from zeros would stop at 2,048.
    assert_eq!(of(PromoteSum, &and(&[F16]), ON).operands, Some(F32));
    assert_eq!(of(PromoteSum, &plain(&[F16, F16]), ON).operands, None);
}

#[test]
fn f64_is_left_alone_but_for_mixed_operands() {
    for class in CLASSES {
        let kernel = Here {
            is_kernel: true,
            ..ON
        };
        assert_eq!(casts(class, &[F64, F64], kernel), NONE);
        assert_eq!(casts(class, &[F16, F64], kernel), (Some(F64), None));
        assert_eq!(casts(class, &[DType::Flex32], kernel), NONE);
    }
}

#[test]
fn a_device_that_is_not_exact_computes_in_fp32_and_gives_half() {
    let inexact = Here {
        is_kernel: true,
        exact: Some(false),
        ..ON
    };
    let conv = |here| named("conv2d", &plain(&[F32, F32]), here);
    let decision = conv(inexact);
    assert_eq!(decision.rounded, Some(F16));
    assert_eq!((decision.operands, decision.result), (Some(F32), Some(F16)));
    assert!(decision.flags.contains(TensorFlags::FROM_F16));
    for exact in [Some(true), None] {
        let decision = conv(Here { exact, ..inexact });
        assert_eq!((decision.rounded, decision.operands), (None, Some(F16)));
    }
    // Above autodiff the operands are cast to half, so that the tape keeps half.
    let above = conv(Here {
        is_kernel: false,
        ..inexact
    });
    assert_eq!((above.rounded, above.operands), (None, Some(F16)));
}

#[test]
fn a_device_that_is_exact_needs_no_casts_where_the_class_widens() {
    let gelu_backward = |exact, dtypes: &[DType]| {
        let here = Here { exact, ..BELOW };
        let decision = named("gelu_backward", &plain(dtypes), here);
        (decision.operands, decision.result)
    };
    let widened = (Some(F32), Some(F16));
    assert_eq!(gelu_backward(Some(true), &[F16, F16]), NONE);
    assert_eq!(gelu_backward(Some(false), &[F16, F16]), widened);
    assert_eq!(gelu_backward(None, &[F16, F16]), widened);
    // Half and FP32 operands have no common half dtype to compute in.
    assert_eq!(gelu_backward(Some(true), &[F16, F32]), (Some(F32), None));
}

#[test]
fn a_scalar_that_half_does_not_hold_takes_the_operation_to_fp32() {
    let add = |operand, scalar: f64, here| {
        decide(&Op::named("float_add_scalar"), &[operand], &[scalar], &here)
    };
    let f16 = plain(&[F16])[0];
    assert_eq!(add(f16, 1.0, ON).operands, None);
    assert_eq!(add(f16, 1e-8, ON).operands, Some(F32));
    assert_eq!(add(plain(&[BF16])[0], 1e-8, ON).operands, None);
    assert_eq!(add(f16, 1e-8, OFF).operands, None);
    // A result with a scalar beyond f16 no longer fits in f16.
    let fits = add(with(F32, TensorFlags::FITS), -1e9, ON).flags & TensorFlags::FITS;
    assert_eq!(fits, TensorFlags::FITS_BF16);
    // With a smaller scalar too, a large value may leave the range of f16.
    let fits = |name, scalar| {
        let operands = [with(F32, TensorFlags::FITS)];
        decide(&Op::named(name), &operands, &[scalar], &ON).flags & TensorFlags::FITS
    };
    for (name, stays, leaves) in [
        ("float_mul_scalar", -2.0, 4096.0),
        ("float_div_scalar", 4096.0, -0.25),
    ] {
        assert!(fits(name, stays).contains(TensorFlags::FITS_F16), "{name}");
        assert_eq!(fits(name, leaves), TensorFlags::FITS_BF16, "{name}");
    }
    // A constant that is padded with a scalar that does not follow half is no constant.
    let padded = |scalar| {
        let operands = [with(F32, TensorFlags::CONSTANT)];
        let flags = decide(&Op::named("float_pad"), &operands, &[scalar], &ON).flags;
        flags.contains(TensorFlags::CONSTANT)
    };
    assert!(padded(0.0) && padded(0.5) && padded(f64::NEG_INFINITY));
    assert!(!padded(2.0) && !padded(40_000.0) && !padded(-1e9) && !padded(1e-8));
    // bf16 rounds these to 1 and to 0.0699.
    assert!(!padded(0.999) && !padded(0.07));
    // A step of a backward formula still returns the gradient's dtype.
    let gradient = add(with(F16, TensorFlags::BACKWARD), 1e-8, BELOW);
    assert_eq!((gradient.operands, gradient.result), (Some(F32), Some(F16)));
    let below = named("float_pad", &[f16], BELOW);
    assert_eq!((below.operands, below.result), NONE);
    let pad = decide(&Op::named("float_pad"), &[f16], &[-1e9], &BELOW);
    assert_eq!(pad.operands, Some(F32));
}

/// In f16 and bf16, a decay of 0.9 would be off by 2.7e-4 and 1.7e-3, in each step of a loop.
#[test]
fn a_factor_that_half_rounds_is_multiplied_with_in_fp32() {
    let decided = |name, operand, scalar: f64, here| {
        let decision = decide(&Op::named(name), &[operand], &[scalar], &here);
        // The half values are widened, and not computed again.
        assert_eq!(decision.rounded, decision.result, "{name}");
        (decision.operands, decision.result)
    };
    let by_policy = with(F16, TensorFlags::DEMOTED);
    let kernel = Here {
        is_kernel: true,
        ..ON
    };
    let inside = (Some(F32), Some(F16));
    for name in ["float_mul_scalar", "float_div_scalar", "leaky_relu"] {
        for here in [kernel, BELOW] {
            let of = |operand, scalar| decided(name, operand, scalar, here);
            for operand in [by_policy, plain(&[F16])[0]] {
                assert_eq!(of(operand, 0.9), inside, "{name}");
                for held in [0.5, -1.0, 2048.0, f64::INFINITY] {
                    assert_eq!(of(operand, held), NONE, "{name} {held}");
                }
            }
            assert_eq!(of(plain(&[F32])[0], 0.9), NONE);
            // Of 257, f16 has all bits.
            assert_eq!(of(by_policy, 257.0), NONE);
            let bf16 = with(BF16, TensorFlags::DEMOTED);
            assert_eq!(of(bf16, 257.0), (Some(F32), Some(BF16)));
            // A backend whose kernels do not round the scalar.
            for (exact, expected) in [(true, NONE), (false, inside)] {
                let here = Here {
                    exact: Some(exact),
                    ..here
                };
                assert_eq!(decided(name, by_policy, 0.9, here), expected);
                assert_eq!(decided(name, by_policy, 0.5, here), NONE);
            }
        }
        // The layer below autodiff widens it. A region in FP32 leaves the user's own half as it is.
        assert_eq!(decided(name, by_policy, 0.9, ON), NONE);
        let off = Here {
            mode: Mode::Off,
            ..kernel
        };
        assert_eq!(decided(name, plain(&[F16])[0], 0.9, off), NONE);
    }
    // An FP32 operand of an activation that half computes.
    let fits = with(F32, TensorFlags::FITS);
    assert_eq!(decided("leaky_relu", fits, 0.01, kernel), inside);
    // A comparison finds the scalar, what is filled is rounded once, and the error of a term is small beside the sum's.
    for name in ["float_equal_elem", "float_mask_fill", "float_add_scalar"] {
        assert_eq!(decided(name, by_policy, 0.9, kernel), NONE, "{name}");
    }
    // The facts are those with a factor that half holds.
    for flags in [
        TensorFlags::WEIGHT,
        TensorFlags::DEMOTED | TensorFlags::FILLED,
    ] {
        let of = |scalar| {
            let operand = [with(F16, flags | TensorFlags::FROM_F16)];
            decide(&Op::named("float_mul_scalar"), &operand, &[scalar], &kernel).flags
        };
        assert!(of(0.9).contains(flags));
        assert_eq!(of(0.9), of(0.5));
    }
}

/// An activation would compute in the half dtype in force, whatever its operand's dtype.
#[test]
fn a_scalar_has_to_be_held_by_the_dtype_that_an_operation_computes_in() {
    let fits = [with(F32, TensorFlags::FITS)];
    let leaky = |slope: f64| decide(&Op::named("leaky_relu"), &fits, &[slope], &ON).operands;
    assert_eq!(leaky(0.01), Some(F16));
    assert_eq!(leaky(1e-8), None);
}

#[test]
fn an_operation_accumulates_where_its_caller_says_so() {
    let scatter = Op::named("float_scatter_nd");
    let f16 = plain(&[F16, F16]);
    let of = |op| decide(&op, &f16, &[], &ON).operands;
    assert_eq!(of(scatter), None);
    assert_eq!(of(scatter.that_accumulates()), Some(F32));
}

#[test]
fn a_step_on_a_half_gradient_gives_half() {
    let gradient = |dtype| with(dtype, TensorFlags::BACKWARD);
    for class in CLASSES {
        let of = |operands: &[_], here| of(class, operands, here).result;
        let expected = match class {
            Move | LowerPrecision => None,
            _ => Some(F16),
        };
        assert_eq!(of(&[gradient(F16)], BELOW), expected, "{class:?}");
        let wide = [gradient(F16), plain(&[F32])[0]];
        assert_eq!(of(&wide, BELOW), expected, "{class:?}");
        assert_eq!(of(&[gradient(F32), gradient(F16)], BELOW), None);
        let contracts = Here {
            mode: Mode::KeepDtypes,
            is_kernel: true,
            ..CONTRACTS
        };
        let expected = (class == LowerPrecision).then_some(F32);
        assert_eq!(of(&[gradient(BF16)], contracts), expected, "{class:?}");
    }
    // The FP32 values are kept for a formula that sums them up.
    assert!(of(Fp32Inside, &[gradient(F16)], BELOW).keeps_wide);
    assert!(!of(Fp32, &[gradient(F16)], BELOW).keeps_wide);
    // Backward functions return the dtype that they compute in.
    let sum = named("linear_bias_backward", &[gradient(F16)], BELOW);
    assert_eq!((sum.operands, sum.result), (Some(F32), None));
}

#[test]
fn the_policy_records_its_own_rows_above_autodiff_where_it_is_on() {
    let recorded = |name, dtypes: &[DType], here| named(name, &plain(dtypes), here).records_in;
    assert_eq!(recorded("relu", &[F32], ON), Some(F16));
    assert_eq!(recorded("float_exp", &[F32], ON), None);
    assert_eq!(recorded("relu", &[F64], ON), None);
    assert_eq!(recorded("relu", &[F32], BELOW), None);
    assert_eq!(recorded("relu", &[F32], OFF), None);
    assert!(of(Keep, &plain(&[F32]), ON).keeps_dtypes);
    assert!(!of(Keep, &plain(&[F32]), OFF).keeps_dtypes);
    assert!(!of(Keep, &plain(&[F32]), BELOW).keeps_dtypes);
}

/// A site whose configuration gives the operation this precision.
fn with_op(changed: OpPrecision, here: Here) -> Here {
    Here {
        changed: Some(changed),
        ..here
    }
}

#[test]
fn a_change_to_fp32_makes_every_class_fp32_and_records_nothing() {
    for class in CLASSES {
        let fp32 = |dtypes: &[DType], here| casts(class, dtypes, with_op(OpPrecision::F32, here));
        let kernel = Here {
            is_kernel: true,
            ..ON
        };
        for here in [ON, kernel] {
            assert_eq!(fp32(&[F16, F32], here), (Some(F32), None), "{class:?}");
            assert_eq!(fp32(&[F16], here), (Some(F32), None), "{class:?}");
            assert_eq!(fp32(&[F32], here), NONE, "{class:?}");
            assert_eq!(fp32(&[F64], here), NONE, "{class:?}");
        }
    }
    let fp32 = with_op(OpPrecision::F32, ON);
    for name in ["relu", "layer_norm", "float_mul", "linear", "attention"] {
        let decision = named(name, &plain(&[F16]), fp32);
        assert_eq!(decision.records_in, None, "{name}");
        assert!(!decision.flags.intersects(TensorFlags::FITS), "{name}");
    }
    // An FP32 operation does not depend on whether the device is exact.
    let inexact = Here {
        is_kernel: true,
        exact: Some(false),
        ..fp32
    };
    let conv = named("conv2d", &plain(&[F16, F32]), inexact);
    assert_eq!(
        (conv.rounded, conv.operands, conv.result),
        (None, Some(F32), None)
    );
}

#[test]
fn a_change_to_half_rounds_once_where_the_table_has_fp32() {
    let half = with_op(OpPrecision::Half, ON);
    let of = |name, dtype, here| {
        let decision = named(name, &plain(&[dtype]), here);
        (decision.rounded, decision.operands, decision.result)
    };
    for name in ["softmax", "float_exp", "float_sum", "float_sqrt"] {
        for dtype in [F16, F32] {
            // Above autodiff the tape keeps half, and the layer below widens the operation.
            assert_eq!(
                of(name, dtype, half),
                (None, Some(F16), Some(F16)),
                "{name}"
            );
            let kernel = |exact| Here {
                is_kernel: true,
                exact,
                ..half
            };
            let widened = (Some(F16), Some(F32), Some(F16));
            for exact in [None, Some(false)] {
                assert_eq!(of(name, dtype, kernel(exact)), widened, "{name}");
            }
            if name == "float_sqrt" {
                let exact = of(name, dtype, kernel(Some(true)));
                assert_eq!(exact, (None, Some(F16), Some(F16)));
            }
        }
        assert_eq!(of(name, F64, half), (None, None, None), "{name}");
    }
    // Autodiff composes these operations from steps, which would run in half.
    for composed in ["layer_norm", "float_powi_scalar", "float_powf_scalar"] {
        let widened = (Some(F16), Some(F32), Some(F16));
        assert_eq!(of(composed, F16, half), widened, "{composed}");
    }
    let recorded = |name| named(name, &plain(&[F32]), half).records_in;
    assert_eq!(recorded("softmax"), Some(F16));
    let flags = named("float_exp", &plain(&[F32]), half).flags;
    assert!(flags.contains(TensorFlags::FROM_F16 | TensorFlags::DEMOTED));
}

#[test]
fn a_change_to_half_casts_an_activation_and_leaves_two_fp32_tensors_of_arithmetic() {
    let half = with_op(OpPrecision::Half, ON);
    let of = |name, dtypes: &[DType]| {
        let decision = named(name, &plain(dtypes), half);
        (decision.operands, decision.result)
    };
    for name in ["relu", "gelu", "max_pool2d"] {
        assert_eq!(of(name, &[F32]), (Some(F16), None), "{name}");
    }
    for name in ["float_add", "float_mul", "float_cat"] {
        assert_eq!(of(name, &[F16, F32]), (Some(F16), None), "{name}");
        assert_eq!(of(name, &[F32, F32]), NONE, "{name}");
        assert_eq!(of(name, &[BF16, F32]), (Some(F32), None), "{name}");
    }
}

#[test]
fn what_goes_before_a_change() {
    let half = |here| with_op(OpPrecision::Half, here);
    let fp32 = |here| with_op(OpPrecision::F32, here);
    let exp = |here| casts(Fp32, &[F32], here);
    // A change to half does not apply with FP32 in force, in the backward pass, without half arithmetic,
    // or to a gradient.
    for here in [OFF, BELOW, CONTRACTS] {
        assert_eq!(exp(half(here)), NONE);
    }
    assert_eq!(
        casts(LowerPrecision, &[F16], fp32(BELOW)),
        (Some(F16), None)
    );
    let gradient = [with(F32, TensorFlags::GRADIENT)];
    assert_eq!(of(Fp32, &gradient, half(ON)).operands, None);
    // A scalar that half does not hold.
    let leaky = |slope: f64| {
        let op = Op::named("leaky_relu");
        decide(&op, &plain(&[F32]), &[slope], &half(ON)).operands
    };
    assert_eq!((leaky(0.01), leaky(1e-8)), (Some(F16), None));
}

#[test]
fn a_product_that_sums_nothing_follows_the_product_of_elements() {
    let outer = Here { inner: 1, ..ON };
    for name in ["float_matmul"] {
        for (operands, here, computed) in [
            (plain(&[F32, F32]), outer, None),
            (plain(&[F32, F32]), ON, Some(F16)),
            // What is half was rounded before.
            (
                [with(F16, TensorFlags::DEMOTED), plain(&[F32])[0]].into(),
                outer,
                Some(F16),
            ),
            (
                plain(&[F32, F32]),
                Here {
                    inner: 1,
                    ..CONTRACTS
                },
                None,
            ),
        ] {
            let decision = named(name, &operands, here);
            assert_eq!(decision.operands, computed, "{name}: {operands:?}");
            assert_eq!(decision.result, None, "{name}: {operands:?}");
        }
    }
}

#[test]
fn a_contraction_of_data_stays_fp32() {
    let here = Here {
        data_in_half: false,
        ..ON
    };
    let learned = with(F32, TensorFlags::LEARNED);
    let data = with(F32, TensorFlags::empty());
    for row in crate::policy::rows("0.23").filter(|row| row.class == Class::LowerPrecision) {
        let is_backward = row.op.ends_with("_backward");
        for (operands, half) in [
            ([data, data], is_backward),
            ([learned, data], true),
            ([data, learned], true),
            ([with(F16, TensorFlags::empty()), data], true),
        ] {
            let decision = named(row.op, &operands, here);
            let computed = half.then_some(F16);
            assert_eq!(decision.operands, computed, "{}: {operands:?}", row.op);
            assert_eq!(decision.is_of_data, !half, "{}", row.op);
        }
        let in_half = named(row.op, &[data, data], ON);
        assert_eq!((in_half.operands, in_half.is_of_data), (Some(F16), false));
        let changed = Here {
            changed: Some(OpPrecision::F32),
            ..here
        };
        assert!(!named(row.op, &[data, data], changed).is_of_data);
    }
    // What is computed from something learned is learned, whatever computes it.
    for row in crate::policy::rows("0.23") {
        let flags = named(row.op, &[data, learned], here).flags;
        assert!(flags.contains(TensorFlags::LEARNED), "{}", row.op);
        let flags = named(row.op, &[data, data], here).flags;
        assert!(!flags.contains(TensorFlags::LEARNED), "{}", row.op);
    }
}
