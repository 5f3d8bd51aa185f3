//! The policy table of what Burn 0.22 adds, by the same reasons as [`TABLE`](super::TABLE).

use super::Class::{Fp32, Fp32Inside, Keep, Move, Promote};
use super::Rows;
use super::table::{UNHELD, rows};

/// Every operation of Burn 0.22 that takes or returns a float tensor and is not in
/// [`TABLE`](super::TABLE).
#[rustfmt::skip]
pub const TABLE_0_22: &[Rows] = &[
    rows(Fp32, "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16", &[
        "float_sum_dims",
    ]),
    rows(Fp32, "a square overflows f16 at 256", &[
        "float_hypot",
    ]),
    rows(Fp32Inside, "sums and squares inside, a result bounded by its input; the statistics stay FP32", &[
        "batch_norm_train",
    ]),
    rows(Fp32Inside, "sums inside for the gradients of scale and shift, which stay FP32", &[
        "batch_norm_train_backward",
    ]),
    rows(Fp32Inside, "the statistics are FP32, and an epsilon of 1e-5 is below the normal values of f16", &[
        "batch_norm",
    ]),
    rows(Fp32Inside, "sums and squares inside, a result bounded by its input", &[
        "adaptive_avg_pool3d",
    ]),
    rows(Fp32Inside, "the gradient is summed inside", &[
        "adaptive_avg_pool3d_backward",
    ]),
    rows(Fp32Inside, "sums every window that holds a value", &[
        "fold4d",
    ]),
    rows(Promote, "operands of one dtype, the widest of them", &[
        "float_scatter", "float_select_assign",
    ]).otherwise(Fp32, "where it accumulates"),
    rows(Keep, "selects values, makes none", &[
        "float_topk_with_indices",
    ]),
    rows(Move, "moves data", &[
        "float_mask_select",
    ]),
    rows(Move, "moves data; but a constant of -1e9 overflows f16", &[
        "float_pad",
    ]).otherwise(Fp32, UNHELD),
];
