//! Operations along dimensions: sums and products, selections, and moves of data.

use burn::backend::Flex;
use burn::tensor::module::linear;
use burn::tensor::ops::PadMode;
use burn::tensor::{DType, IndexingUpdateOp as Update, Tensor, linalg, s, signal};
use burn_amp::{Amp, with_precision};

use crate::common::{FUSED, ON_LIBTORCH, halves};
use crate::harness::{
    Case, Inference, Rng, activation, cases, check, fp32, full, half, half_of, rounded, tensor,
    values, x,
};

pub fn cases() -> Vec<Case> {
    [
        reductions(),
        selections(),
        moves(),
        assignments(),
        composed(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[rustfmt::skip]
fn reductions() -> Vec<Case> {
    cases! {
        "float_sum", x(&[4, 33]), full(1.0).whole() => |a| a.t::<2>(0).sum();
        "float_sum:beyond half", x(&[4, 33]).within(4e3, 6e4), full(1.0) => |a| a.t::<2>(0).sum();
        "float_sum_dim", x(&[4, 33]), full(1.0).whole() => |a| a.t::<2>(0).sum_dim(1);
        "float_mean", x(&[4, 33]), full(1.0).whole() => |a| a.t::<2>(0).mean();
        "float_mean:beyond half", x(&[4, 33]).within(4e3, 6e4), full(1.0) => |a| a.t::<2>(0).mean();
        "float_mean_dim", x(&[4, 33]), full(1.0).whole() => |a| a.t::<2>(0).mean_dim(1);
        // Positive: Burn's own product is the exponential of a sum of logarithms.
        "float_prod", x(&[2, 6]).within(0.5, 3.0), full(1.0) => |a| a.t::<2>(0).prod();
        "float_prod_dim", x(&[2, 6]).within(0.5, 3.0), full(1.0) => |a| a.t::<2>(0).prod_dim(1);
        "float_prod_dim:beyond half", x(&[2, 3]).within(40.0, 99.0), full(1.0) => |a| a.t::<2>(0).prod_dim(1);
        "float_cumsum", x(&[3, 9]), full(1.0).whole() => |a| a.t::<2>(0).cumsum(1);
        "float_cumprod", x(&[3, 6]).within(0.5, 3.0), full(1.0).whole() => |a| a.t::<2>(0).cumprod(1);
        "float_cumprod:beyond half", x(&[2, 3]).within(40.0, 99.0), full(1.0) => |a| a.t::<2>(0).cumprod(1);
        "float_cumprod:negative", x(&[3, 6]).within(-3.0, -0.5), full(1.0).whole() => |a| a.t::<2>(0).cumprod(1);
        "float_any", x(&[2, 3]), half(1.0, 1.0) => |a| a.t::<2>(0).mask_fill(a.t::<2>(0).any().reshape([1, 1]).expand([2, 3]), 2.0) + a.t::<2>(0);
        "float_any_dim", x(&[2, 3]), half(0.0, 1.0) => |a| a.t::<2>(0).mask_fill(a.t::<2>(0).any_dim(1).expand([2, 3]), 0.0) + a.t::<2>(0);
        "float_all", x(&[2, 3]), half(1.0, 1.0) => |a| a.t::<2>(0).mask_fill(a.t::<2>(0).all().reshape([1, 1]).expand([2, 3]), 2.0) + a.t::<2>(0);
        "float_all_dim", x(&[2, 3]), half(0.0, 1.0) => |a| a.t::<2>(0).mask_fill(a.t::<2>(0).all_dim(1).expand([2, 3]), 0.0) + a.t::<2>(0);
        "float_cross", x(&[4, 3]).x(&[4, 3]), full(1.0).whole() => |a| a.t::<2>(0).cross(a.t::<2>(1), 1);
        "float_cross:beyond half", x(&[4, 3]).within(250.0, 300.0).x(&[4, 3]).within(-300.0, 300.0), full(1.0).whole() => |a| a.t::<2>(0).cross(a.t::<2>(1), 1);
    }
}

#[rustfmt::skip]
fn selections() -> Vec<Case> {
    cases! {
        "float_max", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).max();
        "float_max_dim", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).max_dim(1);
        "float_max_dim_with_indices", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).max_dim_with_indices(1).0;
        "float_min", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).min();
        "float_min_dim", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).min_dim(0);
        "float_min_dim_with_indices", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).min_dim_with_indices(0).0;
        "float_max_abs", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).max_abs();
        "float_max_abs_dim", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).max_abs_dim(1);
        "float_cummax", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).cummax(1);
        "float_cummin", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).cummin(1);
        "float_sort", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).sort(1);
        "float_sort:descending", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).sort_descending(0);
        "float_sort_with_indices", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).sort_with_indices(1).0;
        "float_argsort", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).gather(1, a.t::<2>(0).argsort(1));
        "float_argmax", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).gather(1, a.t::<2>(0).argmax(1));
        "float_argmin", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).gather(1, a.t::<2>(0).argmin(1));
        ":topk_with_indices", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).topk_with_indices(3, 1).0;
        ":median", x(&[3, 7]), half(0.0, 1.0) => |a| a.t::<2>(0).median(1);
        ":max_dims", x(&[2, 3, 4]), half(0.0, 1.0) => |a| a.t::<3>(0).max_dims(&[0, 2]);
    }
}

#[rustfmt::skip]
fn moves() -> Vec<Case> {
    cases! {
        "float_reshape", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).reshape([3, 8]);
        "float_transpose", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).transpose();
        "float_swap_dims", x(&[2, 3, 4]), half(0.0, 1.0) => |a| a.t::<3>(0).swap_dims(0, 2);
        "float_permute", x(&[2, 3, 4]), half(0.0, 1.0) => |a| a.t::<3>(0).permute([2, 0, 1]);
        "float_flip", x(&[2, 3, 4]), half(0.0, 1.0) => |a| a.t::<3>(0).flip([0, 2]);
        "float_slice", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).slice(s![1..3, ..]);
        "float_slice:steps", x(&[4, 9]), half(0.0, 1.0) => |a| a.t::<2>(0).slice(s![.., ..;2]);
        "float_slice:backwards", x(&[4, 9]), half(0.0, 1.0) => |a| a.t::<2>(0).slice(s![.., ..;-3]);
        "float_expand", x(&[1, 5]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).expand([7, 5]);
        "float_repeat_dim", x(&[2, 5]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).repeat_dim(1, 3);
        "float_unfold", x(&[2, 9]), half(0.0, 2.0).whole() => |a| a.t::<2>(0).unfold::<3, _>(1, 3, 2);
        "float_select", x(&[4, 3]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).select(0, a.int(&[3, 0, 0, 2, 0], [5]));
        "float_gather", x(&[4, 3]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).gather(1, a.int(&[0, 0, 2, 1, 1, 1, 2, 0], [4, 2]));
        "float_gather_nd", x(&[4, 3]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).gather_nd::<2, 1>(a.int(&[0, 2, 3, 1, 0, 2], [3, 2]));
        "float_gather_nd:rows", x(&[4, 3]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).gather_nd::<2, 2>(a.int(&[3, 0, 3], [3, 1]));
        "float_cat", x(&[2, 3]).x(&[4, 3]), half(0.0, 1.0) => |a| Tensor::cat(vec![a.t::<2>(0), a.t(1)], 0);
        "float_cat:fp32", x(&[2, 3]).w(&[4, 3]), full(1.0) => |a| Tensor::cat(vec![a.t::<2>(0), a.t(1)], 0);
        "float_cat:stack", x(&[2, 3]).x(&[2, 3]), half(0.0, 1.0) => |a| Tensor::stack::<3>(vec![a.t::<2>(0), a.t(1)], 1);
        "float_to_device", x(&[5]), half(0.0, 1.0) => |a| a.x().to_device(&a.x().device());
        "float_detach", x(&[5]), half(1.0, 1.0) => |a| a.x() * a.x().detach();
        "float_cast", x(&[5]).needs(DType::F64), full(1.0) => |a| a.x().cast(DType::F64).exp().cast(DType::F32);
        ":narrow", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).narrow(1, 2, 3);
        ":chunk", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).chunk(3, 1).remove(1);
        ":split", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).split(4, 1).remove(0);
        ":iter_dim", x(&[4, 6]), half(2.0, 2.0).whole() => |a| a.t::<2>(0).iter_dim(0).reduce(|x, y| x + y).unwrap();
        ":roll", x(&[4, 6]), half(0.0, 1.0) => |a| a.t::<2>(0).roll(&[1, 2], &[0, 1]);
        ":take", x(&[4, 3]), half(0.0, 1.0).whole() => |a| a.t::<2>(0).take::<2, 3>(0, a.int(&[0, 1, 1, 3], [2, 2]));
        ":movedim", x(&[2, 3, 4]), half(0.0, 1.0) => |a| a.t::<3>(0).movedim(0, 2);
        ":tril", x(&[4, 4]), half(0.0, 1.0) => |a| a.t::<2>(0).tril(0);
        ":triu", x(&[4, 4]), half(0.0, 1.0) => |a| a.t::<2>(0).triu(1);
        ":diag", x(&[4, 4]), half(0.0, 1.0) => |a| linalg::diag::<_, 2, 1, _>(a.t(0));
        ":pad, reflected", x(&[1, 1, 4, 5]).only_fp32(), half(0.0, 2.0).whole() => |a| a.t::<4>(0).pad((1, 2, 1, 1), PadMode::Reflect).cast(a.t::<4>(0).dtype());
        ":pad, constant", x(&[1, 1, 4, 5]).only_fp32(), half(0.0, 1.0) => |a| a.t::<4>(0).pad((1, 2, 1, 1), PadMode::Constant(1.5)).cast(a.t::<4>(0).dtype());
        ":pad, edge", x(&[1, 1, 4, 5]).only_fp32(), half(0.0, 2.0).whole() => |a| a.t::<4>(0).pad((1, 2, 1, 1), PadMode::Edge).cast(a.t::<4>(0).dtype());
    }
}

#[rustfmt::skip]
fn assignments() -> Vec<Case> {
    cases! {
        "float_slice_assign", x(&[4, 5]).x(&[2, 5]), half(0.0, 1.0) => |a| a.t::<2>(0).slice_assign(s![1..3, ..], a.t(1));
        "float_slice_assign:fp32", x(&[4, 5]).w(&[2, 5]), full(1.0) => |a| a.t::<2>(0).slice_assign(s![1..3, ..], a.t(1));
        "float_slice_assign:fill", x(&[4, 5]), half(0.0, 1.0) => |a| a.t::<2>(0).slice_fill(s![1..3, ..], 0.5);
        "float_select_add", x(&[4, 3]).x(&[5, 3]), full(1.0).whole() => |a| a.t::<2>(0).select_assign(0, a.int(&[3, 0, 0, 2, 0], [5]), a.t(1), Update::Add);
        "float_scatter_add", x(&[4, 3]).x(&[4, 2]), full(1.0).whole() => |a| a.t::<2>(0).scatter(1, a.int(&[0, 0, 2, 1, 1, 1, 2, 0], [4, 2]), a.t(1), Update::Add);
        "float_scatter_nd:assign", x(&[4, 3]).x(&[3]), half(0.0, 1.0) => |a| a.t::<2>(0).scatter_nd(a.int(&[0, 2, 3, 1, 0, 1], [3, 2]), a.t::<1>(1), Update::Assign);
        "float_scatter_nd:add", x(&[4, 3]).x(&[3]), full(1.0).whole() => |a| a.t::<2>(0).scatter_nd(a.int(&[0, 2, 3, 1, 0, 2], [3, 2]), a.t::<1>(1), Update::Add);
        "float_scatter_nd:mul", x(&[4, 3]).x(&[3]).not_on(ON_LIBTORCH), full(1.0).whole() => |a| a.t::<2>(0).scatter_nd(a.int(&[0, 2, 3, 1, 0, 1], [3, 2]), a.t::<1>(1), Update::Mul);
        "float_scatter_nd:max", x(&[4, 3]).x(&[3]).not_on(ON_LIBTORCH), half(0.0, 1.0) => |a| a.t::<2>(0).scatter_nd(a.int(&[0, 2, 3, 1, 0, 1], [3, 2]), a.t::<1>(1), Update::Max);
        "float_scatter_nd:min", x(&[4, 3]).x(&[3]).not_on(ON_LIBTORCH), half(0.0, 1.0) => |a| a.t::<2>(0).scatter_nd(a.int(&[0, 2, 3, 1, 0, 1], [3, 2]), a.t::<1>(1), Update::Min);
    }
}

/// Operations that Burn composes, without rows of their own.
#[rustfmt::skip]
fn composed() -> Vec<Case> {
    cases! {
        ":var", x(&[3, 9]), full(2.0).whole() => |a| a.t::<2>(0).var(1);
        ":var, beyond half", x(&[3, 9]).within(-600.0, 600.0), full(2.0).whole() => |a| a.t::<2>(0).var_bias(1);
        ":cov", x(&[3, 9]), half(2.0, 4.0).whole() => |a| a.t::<2>(0).cov(1, 1);
        ":divided by a row", x(&[9, 4]).x(&[1, 4]).given(&[300.0, 45.0, 0.02, -1e4]), half(1.0, 1.0).whole() => |a| a.t::<2>(0) / a.t(1);
        ":divided by an FP32 row", x(&[9, 4]).x(&[1, 4]).given(&[300.0, 2e-4, 45.0, -1e4]).fp32(), full(1.0).whole() => |a| a.t::<2>(0) / a.t(1);
        ":mean_dims", x(&[3, 4, 5]), full(1.0).whole() => |a| a.t::<3>(0).mean_dims(&[0, 2]);
        ":sum_dims", x(&[3, 4, 5]), full(1.0).whole() => |a| a.t::<3>(0).sum_dims(&[0, 2]);
        ":prod_dims", x(&[3, 2, 3]).within(0.5, 3.0), full(1.0) => |a| a.t::<3>(0).prod_dims(&[0, 2]);
        ":l1 norm", x(&[3, 9]), full(1.0).whole() => |a| linalg::l1_norm(a.t::<2>(0), 1);
        ":l2 norm", x(&[3, 9]).within(-600.0, 600.0), full(1.0).whole() => |a| linalg::l2_norm(a.t::<2>(0), 1);
        ":l3 norm", x(&[3, 9]).within(-90.0, 90.0).not_on(FUSED), full(1.0).whole() => |a| linalg::lp_norm(a.t::<2>(0), 3.0, 1);
        ":normalized", x(&[3, 9]).within(-600.0, 600.0), full(2.0).whole() => |a| linalg::vector_normalize(a.t::<2>(0), 2.0, 1, 1e-8);
        ":cosine similarity", x(&[3, 9]).within(-600.0, 600.0).x(&[3, 9]), full(3.0).rounded(1.0).whole() => |a| linalg::cosine_similarity(a.t::<2>(0), a.t(1), 1, None);
        ":outer", x(&[3]).x(&[4]), half(1.0, 2.0).whole() => |a| linalg::outer::<_, 1, 2, _>(a.t(0), a.t(1));
        ":trace", x(&[4, 4]), full(1.0).whole() => |a| linalg::trace::<_, 2, 1>(a.t(0));
    }
}

#[test]
fn sums_and_products() {
    check(&reductions());
}

#[test]
fn selected_values() {
    check(&selections());
}

#[test]
fn moved_data() {
    check(&moves());
}

#[test]
fn assigned_values() {
    check(&assignments());
}

#[test]
fn composed_operations() {
    check(&composed());
}

/// Operations without a backward pass in Burn's autodiff.
#[test]
fn operations_of_inference_alone() {
    for precision in halves() {
        let values_of = rounded(&Rng(1).values(16, -2.0, 2.0), half_of(precision));
        let exact = tensor::<Flex, 2>(&values_of, [2, 8], DType::F64);
        with_precision(precision, || {
            let x = activation(fp32::<Inference, 2>(&values_of, [2, 8]));
            let top = x.clone().topk(3, 1);
            assert_eq!(top.dtype(), half_of(precision));
            assert_eq!(values(top), values(exact.clone().topk(3, 1)));

            let (re, im) = signal::rfft(x, 1, None);
            assert_eq!([re.dtype(), im.dtype()], [DType::F32; 2]);
            let back = signal::irfft(re.clone(), im.clone(), 1, None);
            let (exact_re, exact_im) = signal::rfft(exact.clone().cast(DType::F32), 1, None);
            for (actual, expected) in [
                (re, exact_re),
                (im, exact_im),
                (back, exact.cast(DType::F32)),
            ] {
                for (actual, expected) in values(actual).into_iter().zip(values(expected)) {
                    assert!(
                        (actual - expected).abs() <= 1e-5,
                        "{actual}, not {expected}"
                    );
                }
            }
        });
    }
}

#[test]
fn a_linear_layer_without_features_is_zero() {
    let device = Default::default();
    for precision in halves() {
        with_precision(precision, || {
            let x = Tensor::<Amp<Flex>, 3>::zeros([2, 3, 0], &device);
            let out = linear(x, Tensor::zeros([0, 4], &device), None);
            assert_eq!(out.dims(), [2, 3, 4]);
            assert_eq!(values(out), [0.0; 24]);
        });
    }
}
