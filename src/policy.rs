//! The op policy: which precision each operation runs in, as one table and one pure function.
//! Knows dtypes, but no tensor, no device and no backend.
//!
//! To change an operation's precision, change its line in [`TABLE`]. What is FP32 and what is half
//! goes by the lists of PyTorch's autocast for CUDA (`aten/src/ATen/autocast_mode.h`); the guide's
//! [reference](crate::guide::ops) shows both side by side.
//!
//! # What was decided by measurement
//!
//! Bytes kept for the backward pass, as a share of what Burn keeps in FP32, by
//! `cargo xtask bench memory`:
//!
//! - **Small operands beside a half tensor**, as the statistics of a composed norm, promote it to
//!   FP32, for rounding their result would cost a network its accuracy. What is kept for the
//!   backward pass is half all the same: such a result is marked as FP32 that half holds as well,
//!   arithmetic keeps half copies of it, and the next activation or contraction brings it back to
//!   half. A CNN with batch norm keeps 0.40 instead of 0.91. An operand is small when autodiff
//!   tracks it, as a statistic or a parameter, and the other has 16 times its elements. Any other
//!   that was never half, as an additive mask, makes the result FP32 for good, and so does a
//!   product of two large ones, which may be of any size.
//! - **Constants** in FP32, of zeros, ones or another value that both half dtypes hold, follow a
//!   half tensor instead of promoting it. An LSTM keeps 0.52 instead of 0.70: without it, the first
//!   state makes every later one FP32.
//! - **Softmax, layer norm, dropout and relu** are recorded with backward formulas of their own:
//!   one tensor is kept instead of three, in half where the operand was half, the noise of a
//!   dropout as booleans, and of a relu its result, which the next layer keeps anyway. A
//!   transformer keeps 0.36 instead of 0.68, an MLP 0.20 instead of 0.45.
//! - FP32 that was never half keeps FP32 copies: an operation that the policy does not demote has
//!   the gradient that it has in Burn, to FP32's own rounding.

use burn_backend::DType;
use serde::Serialize;

/// How an operation treats the F32, F16 and BF16 operands it is given.
///
/// Operations with an F64 operand are left alone, but for bringing mixed operands to F64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Class {
    /// Operands are cast to the compute dtype, the result is in it: the work AMP is for.
    Half,
    /// Operands are cast to FP32, the result is FP32: its range or its sums leave half precision.
    Full,
    /// Computed in FP32, the result back in the operand's dtype: sensitive inside, bounded by its
    /// input. Backward functions give the widest of their operands' dtypes.
    Wide,
    /// Operands of different dtypes are brought to the widest of them, where FP32 constants follow
    /// a half tensor.
    Widest,
    /// Computed in the dtype it is given.
    Keep,
    /// As `Keep`, but FP32 that half holds as well, as the result of a composed norm, is brought to
    /// half: what the next layer would do with it.
    Activation,
    /// Moves or makes data and computes nothing.
    Move,
}

/// One line of the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The method of Burn's backend traits.
    pub op: &'static str,
    /// How it treats its operands.
    pub class: Class,
    /// Why.
    pub why: &'static str,
}

const fn row(class: Class, op: &'static str, why: &'static str) -> Row {
    Row { op, class, why }
}

use Class::{Activation, Full, Half, Keep, Move, Wide, Widest};

/// Every operation that takes or gives a float tensor. Integer, boolean and quantized operations
/// are the backend's own.
#[rustfmt::skip]
pub const TABLE: &[Row] = &[
    row(Half, "float_matmul", "a contraction: the work that half precision is for, accumulated in FP32 by the kernel"),
    row(Half, "linear", "a contraction: the work that half precision is for, accumulated in FP32 by the kernel"),
    row(Half, "linear_x_backward", "a contraction: the work that half precision is for, accumulated in FP32 by the kernel"),
    row(Half, "linear_weight_backward", "a contraction: the work that half precision is for, accumulated in FP32 by the kernel"),
    row(Half, "conv1d", "a contraction, see float_matmul"),
    row(Half, "conv1d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv1d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "conv2d", "a contraction, see float_matmul"),
    row(Half, "conv2d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv2d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "conv3d", "a contraction, see float_matmul"),
    row(Half, "conv3d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv3d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose1d", "a contraction, see float_matmul"),
    row(Half, "conv_transpose1d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose1d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose2d", "a contraction, see float_matmul"),
    row(Half, "conv_transpose2d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose2d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose3d", "a contraction, see float_matmul"),
    row(Half, "conv_transpose3d_x_backward", "a contraction, see float_matmul"),
    row(Half, "conv_transpose3d_weight_backward", "a contraction, see float_matmul"),
    row(Half, "attention", "two contractions; the softmax between them runs in FP32"),
    row(Half, "prelu", "follows the layers around it although its slope is an FP32 parameter"),
    row(Full, "float_exp", "its range leaves half: exp(12) is beyond 65504"),
    row(Full, "float_sinh", "its range leaves half: exp(12) is beyond 65504"),
    row(Full, "float_cosh", "its range leaves half: exp(12) is beyond 65504"),
    row(Full, "float_tan", "its range leaves half: exp(12) is beyond 65504"),
    row(Full, "float_log", "its result near its pole or branch is lost in half"),
    row(Full, "float_log1p", "its result near its pole or branch is lost in half"),
    row(Full, "float_recip", "its result near its pole or branch is lost in half"),
    row(Full, "float_acos", "its result near its pole or branch is lost in half"),
    row(Full, "float_acosh", "its result near its pole or branch is lost in half"),
    row(Full, "float_asin", "its result near its pole or branch is lost in half"),
    row(Full, "float_asinh", "its result near its pole or branch is lost in half"),
    row(Full, "float_atanh", "its result near its pole or branch is lost in half"),
    row(Full, "float_erf", "its result near its pole or branch is lost in half"),
    row(Full, "log_sigmoid", "its result near its pole or branch is lost in half"),
    row(Full, "float_powf", "a square overflows f16 at 256"),
    row(Full, "float_powi", "a square overflows f16 at 256"),
    row(Full, "float_powi_scalar", "a square overflows f16 at 256; a square keeps its operand in half where half holds it"),
    row(Full, "float_powi_scalar_impl", "a square overflows f16 at 256"),
    row(Full, "float_powf_scalar", "a square overflows f16 at 256"),
    row(Full, "float_powf_scalar_impl", "a square overflows f16 at 256"),
    row(Full, "float_sum", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_sum_dim", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_mean", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_mean_dim", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_cumsum", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_select_add", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "float_scatter_add", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "embedding_backward", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "linear_bias_backward", "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16"),
    row(Full, "conv1d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "conv2d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "conv3d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "conv_transpose1d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "conv_transpose2d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "conv_transpose3d_bias_backward", "a sum of unknown length, see float_sum"),
    row(Full, "float_any", "counts elements: half stops counting at 2,048"),
    row(Full, "float_any_dim", "counts elements: half stops counting at 2,048"),
    row(Full, "float_all", "counts elements: half stops counting at 2,048"),
    row(Full, "float_all_dim", "counts elements: half stops counting at 2,048"),
    row(Full, "float_prod", "a product of unknown length"),
    row(Full, "float_prod_dim", "a product of unknown length"),
    row(Full, "float_cumprod", "a product of unknown length"),
    row(Full, "softmax", "exponentials and their sum; half probabilities are kept for half scores"),
    row(Full, "log_softmax", "exponentials and their sum; half probabilities are kept for half scores"),
    row(Full, "softmin", "exponentials and their sum"),
    row(Full, "ctc_loss", "exponentials and their sum"),
    row(Full, "ctc_loss_backward", "exponentials and their sum"),
    row(Full, "rfft", "sums of unknown length"),
    row(Full, "irfft", "sums of unknown length"),
    row(Full, "float_remainder", "the gradient of the divisor is the floor of a quotient, which in half rounds across integers"),
    row(Full, "float_cross", "differences of products cancel"),
    row(Full, "quantize", "its scales and rounding are calibrated in FP32"),
    row(Full, "quantize_dynamic", "its scales and rounding are calibrated in FP32"),
    row(Full, "q_matmul", "its scales and rounding are calibrated in FP32"),
    row(Wide, "layer_norm", "sums and squares inside, a result bounded by its input; one tensor is kept, in half for a half operand"),
    row(Wide, "avg_pool1d", "sums and squares inside, a result bounded by its input"),
    row(Wide, "avg_pool2d", "sums and squares inside, a result bounded by its input"),
    row(Wide, "adaptive_avg_pool1d", "sums and squares inside, a result bounded by its input"),
    row(Wide, "adaptive_avg_pool2d", "sums and squares inside, a result bounded by its input"),
    row(Wide, "avg_pool1d_backward", "the gradient is summed inside"),
    row(Wide, "avg_pool2d_backward", "the gradient is summed inside"),
    row(Wide, "adaptive_avg_pool1d_backward", "the gradient is summed inside"),
    row(Wide, "adaptive_avg_pool2d_backward", "the gradient is summed inside"),
    row(Wide, "interpolate_backward", "the gradient is summed inside"),
    row(Wide, "interpolate", "coordinates need more bits than values: bf16 counts pixels in steps of 8 from 1,024 on"),
    row(Wide, "float_grid_sample_2d", "coordinates need more bits than values: bf16 counts pixels in steps of 8 from 1,024 on"),
    row(Wide, "deform_conv2d", "coordinates need more bits than values: bf16 counts pixels in steps of 8 from 1,024 on"),
    row(Wide, "deform_conv2d_backward", "coordinates need more bits than values: bf16 counts pixels in steps of 8 from 1,024 on"),
    row(Wide, "gelu_backward", "cubes, or subtracts from one, inside: NaN at 45 and zeros near one in half"),
    row(Wide, "sigmoid_backward", "cubes, or subtracts from one, inside: NaN at 45 and zeros near one in half"),
    row(Wide, "log_sigmoid_backward", "cubes, or subtracts from one, inside: NaN at 45 and zeros near one in half"),
    row(Wide, "float_unfold", "moves data, but autodiff sums the gradient of every window a value is in; without autodiff it is Move"),
    row(Wide, "unfold4d", "as float_unfold"),
    row(Wide, "float_sqrt", "halves the exponent: the result fits wherever the operand does"),
    row(Wide, "float_remainder_scalar", "by the floor of a quotient, which overflows f16; FP32 out when the scalar does not fit the half dtype"),
    row(Widest, "float_add", "operands of one dtype, the widest of them"),
    row(Widest, "float_sub", "operands of one dtype, the widest of them"),
    row(Widest, "float_mul", "operands of one dtype, the widest of them; keeps what half holds in half, and the noise of a dropout as booleans"),
    row(Widest, "float_div", "operands of one dtype, the widest of them; keeps what half holds in half"),
    row(Widest, "float_atan2", "operands of one dtype, the widest of them"),
    row(Widest, "float_equal", "operands of one dtype, the widest of them"),
    row(Widest, "float_not_equal", "operands of one dtype, the widest of them"),
    row(Widest, "float_greater", "operands of one dtype, the widest of them"),
    row(Widest, "float_greater_equal", "operands of one dtype, the widest of them"),
    row(Widest, "float_lower", "operands of one dtype, the widest of them"),
    row(Widest, "float_lower_equal", "operands of one dtype, the widest of them"),
    row(Widest, "float_cat", "operands of one dtype, the widest of them"),
    row(Widest, "float_mask_where", "operands of one dtype, the widest of them"),
    row(Widest, "float_slice_assign", "operands of one dtype, the widest of them"),
    row(Widest, "float_scatter_nd", "as float_slice_assign when it overwrites; in FP32 when it accumulates"),
    row(Widest, "relu_backward", "passes the gradient through where a mask says so"),
    row(Widest, "max_pool1d_with_indices_backward", "passes the gradient through where a mask says so"),
    row(Widest, "max_pool2d_with_indices_backward", "passes the gradient through where a mask says so"),
    row(Activation, "relu", "bounded by its input, rounded once; keeps its result, not its operand"),
    row(Activation, "leaky_relu", "bounded by its input, rounded once"),
    row(Activation, "gelu", "bounded by its input, rounded once"),
    row(Activation, "sigmoid", "bounded by its input, rounded once"),
    row(Activation, "hard_sigmoid", "bounded by its input, rounded once"),
    row(Activation, "float_tanh", "bounded by its input, rounded once"),
    row(Keep, "float_sin", "bounded by its input, rounded once"),
    row(Keep, "float_cos", "bounded by its input, rounded once"),
    row(Keep, "float_atan", "bounded by its input, rounded once"),
    row(Keep, "float_abs", "bounded by its input, rounded once"),
    row(Keep, "float_sign", "bounded by its input, rounded once"),
    row(Keep, "float_neg", "bounded by its input, rounded once"),
    row(Keep, "float_round", "bounded by its input, rounded once"),
    row(Keep, "float_floor", "bounded by its input, rounded once"),
    row(Keep, "float_ceil", "bounded by its input, rounded once"),
    row(Keep, "float_trunc", "bounded by its input, rounded once"),
    row(Keep, "float_add_scalar", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_sub_scalar", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_mul_scalar", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_div_scalar", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_clamp", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_clamp_min", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_clamp_max", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_mask_fill", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_equal_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_not_equal_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_greater_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_greater_equal_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_lower_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_lower_equal_elem", "in FP32 when the scalar does not fit the half dtype: -1e9 overflows f16, an epsilon of 1e-8 vanishes"),
    row(Keep, "float_max", "selects values, makes none"),
    row(Keep, "float_max_dim", "selects values, makes none"),
    row(Keep, "float_max_dim_with_indices", "selects values, makes none"),
    row(Keep, "float_min", "selects values, makes none"),
    row(Keep, "float_min_dim", "selects values, makes none"),
    row(Keep, "float_min_dim_with_indices", "selects values, makes none"),
    row(Keep, "float_max_abs", "selects values, makes none"),
    row(Keep, "float_max_abs_dim", "selects values, makes none"),
    row(Keep, "float_cummin", "selects values, makes none"),
    row(Keep, "float_cummax", "selects values, makes none"),
    row(Keep, "float_argmax", "selects values, makes none"),
    row(Keep, "float_argmin", "selects values, makes none"),
    row(Keep, "float_argtopk", "selects values, makes none"),
    row(Keep, "float_topk", "selects values, makes none"),
    row(Keep, "float_sort", "selects values, makes none"),
    row(Keep, "float_sort_with_indices", "selects values, makes none"),
    row(Keep, "float_argsort", "selects values, makes none"),
    row(Activation, "max_pool1d", "selects values, makes none"),
    row(Activation, "max_pool1d_with_indices", "selects values, makes none"),
    row(Activation, "max_pool2d", "selects values, makes none"),
    row(Activation, "max_pool2d_with_indices", "selects values, makes none"),
    row(Keep, "float_is_nan", "selects values, makes none"),
    row(Keep, "float_is_inf", "selects values, makes none"),
    row(Keep, "float_into_int", "selects values, makes none"),
    row(Move, "float_to_device", "moves data"),
    row(Move, "float_repeat_dim", "moves data"),
    row(Move, "float_transpose", "moves data"),
    row(Move, "float_swap_dims", "moves data"),
    row(Move, "float_permute", "moves data"),
    row(Move, "float_flip", "moves data"),
    row(Move, "float_reshape", "moves data"),
    row(Move, "float_gather", "moves data"),
    row(Move, "float_gather_nd", "moves data"),
    row(Move, "float_select", "moves data"),
    row(Move, "float_slice", "moves data"),
    row(Move, "float_expand", "moves data"),
    row(Move, "embedding", "moves data"),
    row(Move, "float_detach", "moves data"),
    row(Move, "float_set_require_grad", "moves data"),
    row(Move, "float_is_require_grad", "moves data"),
    row(Move, "float_device", "moves data"),
    row(Move, "float_from_data", "makes data in the dtype it is asked for"),
    row(Move, "float_zeros", "makes data in the dtype it is asked for; as FP32 it follows half tensors"),
    row(Move, "float_ones", "makes data in the dtype it is asked for; as FP32 it follows half tensors"),
    row(Move, "float_full", "makes data in the dtype it is asked for; as FP32 that both halves hold it follows half tensors"),
    row(Move, "float_empty", "makes data in the dtype it is asked for; as FP32 it follows half tensors"),
    row(Move, "int_into_float", "makes data in the dtype it is asked for"),
    row(Move, "bool_into_float", "makes data in the dtype it is asked for; as FP32 it follows half tensors"),
    row(Move, "dequantize", "makes data in the dtype it is asked for"),
    row(Move, "float_random", "drawn in FP32 and then cast: a half uniform on [0, 1) can be 1, and a seed gives FP32's numbers"),
    row(Move, "float_into_data", "data that leaves is FP32 where the policy had demoted it"),
    row(Move, "tr_execute", "data that leaves is FP32 where the policy had demoted it"),
    row(Move, "float_cast", "what the user says"),
];

/// The class of an operation. Evaluated at compile time by the forwarding code, where an operation
/// without a row does not compile.
///
/// # Panics
///
/// When `op` has no row.
pub const fn class(op: &str) -> Class {
    let mut i = 0;
    while i < TABLE.len() {
        if same(TABLE[i].op, op) {
            return TABLE[i].class;
        }
        i += 1;
    }
    panic!("this operation has no row in the policy table")
}

pub(crate) const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

/// What a device can do in one half dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HalfSupport {
    /// Nothing that AMP could use.
    None,
    /// Storage and accelerated contractions, no arithmetic.
    Contractions,
    /// Storage and arithmetic.
    Arithmetic,
}

/// What a device can do in the two half dtypes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Support {
    /// In F16.
    pub f16: HalfSupport,
    /// In BF16.
    pub bf16: HalfSupport,
}

impl Support {
    /// In `dtype`; every dtype that is not a half has arithmetic.
    pub fn of(self, dtype: DType) -> HalfSupport {
        match dtype {
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
            _ => HalfSupport::Arithmetic,
        }
    }
}

/// How the policy is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Not at all.
    Off,
    /// FP32 operands of `Half` operations are demoted to this dtype.
    On(DType),
    /// FP32 is never demoted: a `Half` operation is half only if an operand already is. Holds below
    /// autodiff, for the upper layer has decided, in the backward pass and for gradients.
    Follow,
}

/// The float dtypes among an operation's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operands {
    first: DType,
    seen: u8,
    constants: u8,
    widened: bool,
}

const F64: u8 = 1 << 4;
const F32: u8 = 1 << 3;
const FLEX32: u8 = 1 << 2;
const F16: u8 = 1 << 1;
const BF16: u8 = 1;
const HALVES: u8 = F16 | BF16;

impl Operands {
    /// One operand; the first is the one whose dtype `Wide` restores.
    pub fn one(dtype: DType) -> Self {
        Self {
            first: dtype,
            seen: bit(dtype),
            constants: 0,
            widened: false,
        }
    }

    /// As [`one`](Operands::one) for FP32 that half holds as well.
    pub fn widened() -> Self {
        Self {
            widened: true,
            ..Self::one(DType::F32)
        }
    }

    /// As [`one`](Operands::one) for a constant that half holds as well.
    pub fn constant(dtype: DType) -> Self {
        Self {
            first: dtype,
            seen: 0,
            constants: bit(dtype),
            widened: false,
        }
    }

    /// One more operand, a constant that half holds as well.
    pub fn and_constant(self, dtype: DType) -> Self {
        Self {
            constants: self.constants | bit(dtype),
            ..self
        }
    }

    /// The operands where constants count as any other.
    fn whole(self) -> Self {
        Self {
            seen: self.seen | self.constants,
            constants: 0,
            ..self
        }
    }

    /// The half dtype that constants follow.
    fn followed(self) -> Option<DType> {
        match self.constants {
            0 => None,
            _ if self.seen & !HALVES != 0 => None,
            _ => self.half(),
        }
    }

    /// One more operand.
    pub fn and(self, dtype: DType) -> Self {
        Self {
            seen: self.seen | bit(dtype),
            ..self
        }
    }

    /// Whether any is F16 or BF16.
    pub fn any_half(self) -> bool {
        (self.seen | self.constants) & HALVES != 0
    }

    fn mixed(self) -> bool {
        !self.seen.is_power_of_two()
    }

    /// The one half dtype among them, none when there is none or both.
    fn half(self) -> Option<DType> {
        match self.seen & HALVES {
            F16 => Some(DType::F16),
            BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// The widest: F64, F32, Flex32, a half. F16 and BF16 together are F32, which holds both.
    pub fn widest(self) -> DType {
        match self.seen | self.constants {
            seen if seen & F64 != 0 => DType::F64,
            seen if seen & F32 != 0 => DType::F32,
            seen if seen & FLEX32 != 0 => DType::Flex32,
            _ => self.whole().half().unwrap_or(DType::F32),
        }
    }
}

fn bit(dtype: DType) -> u8 {
    match dtype {
        DType::F64 => F64,
        DType::Flex32 => FLEX32,
        DType::F16 => F16,
        DType::BF16 => BF16,
        _ => F32,
    }
}

/// What to do with an operation's operands and result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Plan {
    /// Cast every operand to this dtype, or leave them all.
    pub operands: Option<DType>,
    /// Cast the result to this dtype, or leave it.
    pub result: Option<DType>,
}

impl Plan {
    fn cast(dtype: DType) -> Self {
        Self {
            operands: Some(dtype),
            result: None,
        }
    }

    fn cast_if(condition: bool, dtype: DType) -> Self {
        if condition {
            Self::cast(dtype)
        } else {
            Self::default()
        }
    }
}

/// Decides an operation. `support` is only asked where a half dtype is involved.
pub fn plan(class: Class, operands: Operands, mode: Mode, support: impl Fn() -> Support) -> Plan {
    if mode == Mode::Off {
        return Plan::default();
    }
    let computes_in = |dtype| support().of(dtype) == HalfSupport::Arithmetic;
    if let (Mode::On(_), Class::Widest, Some(half)) = (mode, class, operands.followed()) {
        return Plan::cast(match computes_in(half) {
            true => half,
            false => DType::F32,
        });
    }
    let operands = operands.whole();
    if operands.seen & (F64 | FLEX32) != 0 {
        return Plan::cast_if(operands.mixed(), operands.widest());
    }
    match class {
        Class::Half => {
            let half = match mode {
                Mode::On(dtype) => Some(dtype),
                _ => operands.half(),
            };
            match half {
                None => Plan::cast_if(operands.any_half(), DType::F32),
                Some(dtype) => Plan {
                    operands: Some(dtype),
                    result: (!computes_in(dtype)).then_some(DType::F32),
                },
            }
        }
        Class::Full => Plan::cast_if(operands.any_half(), DType::F32),
        Class::Wide => Plan {
            operands: operands.any_half().then_some(DType::F32),
            result: (operands.first != DType::F32 && computes_in(operands.first))
                .then_some(operands.first),
        },
        Class::Activation if operands.widened => match mode {
            Mode::On(dtype) => Plan::cast_if(computes_in(dtype), dtype),
            _ => Plan::default(),
        },
        Class::Widest | Class::Keep | Class::Activation => {
            let widest = operands.widest();
            match operands.half() == Some(widest) && !computes_in(widest) {
                true => Plan::cast(DType::F32),
                false => Plan::cast_if(operands.mixed(), widest),
            }
        }
        Class::Move => Plan::cast_if(operands.mixed(), operands.widest()),
    }
}

/// Whether `dtype` holds `scalar` as well as it holds its other values: neither overflowing nor
/// among its subnormals, where precision is lost. Zero, infinities and NaN are held.
///
/// Bounds of F16: 6.1e-5 to 65504; of BF16: 1.2e-38 to 3.39e38.
pub fn holds(dtype: DType, scalar: f64) -> bool {
    if scalar == 0.0 || !scalar.is_finite() {
        return true;
    }
    match dtype {
        DType::F16 | DType::BF16 => {
            let info = dtype.finfo().expect("a float dtype");
            (info.min_positive..=info.max).contains(&scalar.abs())
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Arithmetic,
    };
    const CONTRACTIONS: Support = Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Contractions,
    };
    const NEVER: Plan = Plan {
        operands: None,
        result: None,
    };

    fn of(dtypes: &[DType]) -> Operands {
        dtypes[1..]
            .iter()
            .fold(Operands::one(dtypes[0]), |all, dtype| all.and(*dtype))
    }

    fn on(class: Class, dtypes: &[DType]) -> Plan {
        plan(class, of(dtypes), Mode::On(DType::F16), || ALL)
    }

    fn follow(class: Class, dtypes: &[DType]) -> Plan {
        plan(class, of(dtypes), Mode::Follow, || ALL)
    }

    #[test]
    fn every_operation_has_one_row_and_a_reason() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(class(row.op), row.class, "{} has two classes", row.op);
            assert!(
                TABLE[..i].iter().all(|other| other.op != row.op),
                "{} has two rows",
                row.op
            );
            assert!(!row.why.is_empty());
        }
    }

    #[test]
    fn off_does_nothing() {
        for class in [Half, Full, Wide, Widest, Keep, Activation, Move] {
            let operands = of(&[DType::F32, DType::F16]);
            assert_eq!(plan(class, operands, Mode::Off, || ALL), NEVER);
        }
    }

    #[test]
    fn half_demotes_every_operand() {
        for dtypes in [
            &[DType::F32, DType::F32][..],
            &[DType::F32, DType::F16],
            &[DType::BF16, DType::F32],
            &[DType::F16, DType::F16],
        ] {
            assert_eq!(on(Half, dtypes), Plan::cast(DType::F16));
        }
    }

    #[test]
    fn half_follows_its_operands_below_autodiff() {
        assert_eq!(follow(Half, &[DType::F32, DType::F32]), NEVER);
        for half in [DType::F16, DType::BF16] {
            assert_eq!(follow(Half, &[DType::F32, half]), Plan::cast(half));
            assert_eq!(follow(Half, &[half, half]), Plan::cast(half));
        }
        assert_eq!(
            follow(Half, &[DType::F16, DType::BF16]),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn half_without_arithmetic_gives_fp32_and_nothing_else_is_half() {
        let bf16 = |class, dtypes: &[DType]| {
            plan(class, of(dtypes), Mode::On(DType::BF16), || CONTRACTIONS)
        };
        let contraction = Plan {
            operands: Some(DType::BF16),
            result: Some(DType::F32),
        };
        assert_eq!(bf16(Half, &[DType::F32, DType::F32]), contraction);
        assert_eq!(
            plan(Half, of(&[DType::BF16]), Mode::Follow, || CONTRACTIONS),
            contraction
        );
        for class in [Full, Wide, Widest, Keep, Activation] {
            assert_eq!(bf16(class, &[DType::BF16]), Plan::cast(DType::F32));
        }
        assert_eq!(bf16(Move, &[DType::BF16]), NEVER);
    }

    #[test]
    fn full_promotes_and_stays_wide() {
        assert_eq!(on(Full, &[DType::F32, DType::F32]), NEVER);
        assert_eq!(on(Full, &[DType::F16]), Plan::cast(DType::F32));
        assert_eq!(
            follow(Full, &[DType::F32, DType::BF16]),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn wide_gives_back_the_first_operands_dtype() {
        assert_eq!(on(Wide, &[DType::F32, DType::F32]), NEVER);
        assert_eq!(
            on(Wide, &[DType::BF16, DType::F32]),
            Plan {
                operands: Some(DType::F32),
                result: Some(DType::BF16)
            }
        );
        assert_eq!(on(Wide, &[DType::F32, DType::F16]), Plan::cast(DType::F32));
    }

    #[test]
    fn widest_brings_mixed_operands_together() {
        assert_eq!(on(Widest, &[DType::F16, DType::F16]), NEVER);
        assert_eq!(
            on(Widest, &[DType::F16, DType::F32]),
            Plan::cast(DType::F32)
        );
        assert_eq!(
            on(Widest, &[DType::F16, DType::BF16]),
            Plan::cast(DType::F32)
        );
        assert_eq!(on(Keep, &[DType::F16]), NEVER);
        assert_eq!(on(Move, &[DType::F16]), NEVER);
    }

    #[test]
    fn an_activation_brings_what_half_holds_to_half() {
        let widened = |mode| plan(Activation, Operands::widened(), mode, || ALL);
        assert_eq!(widened(Mode::On(DType::BF16)), Plan::cast(DType::BF16));
        assert_eq!(widened(Mode::Follow), NEVER);
        assert_eq!(on(Activation, &[DType::F32]), NEVER);
        assert_eq!(on(Activation, &[DType::F16]), NEVER);
        let (operands, mode) = (Operands::widened(), Mode::On(DType::BF16));
        assert_eq!(plan(Activation, operands, mode, || CONTRACTIONS), NEVER);
        assert_eq!(plan(Keep, operands, mode, || ALL), NEVER);
    }

    #[test]
    fn constants_follow_a_half_tensor_and_nothing_else() {
        let on = |operands| plan(Widest, operands, Mode::On(DType::F16), || ALL);
        let half = Operands::one(DType::F16).and_constant(DType::F32);
        assert_eq!(on(half), Plan::cast(DType::F16));
        assert_eq!(
            on(Operands::constant(DType::F32).and(DType::F16)),
            Plan::cast(DType::F16)
        );
        assert_eq!(on(half.and(DType::F32)), Plan::cast(DType::F32));
        assert_eq!(on(half.and(DType::BF16)), Plan::cast(DType::F32));
        assert_eq!(
            on(Operands::one(DType::F32).and_constant(DType::F32)),
            NEVER
        );
        assert_eq!(on(Operands::constant(DType::F32)), NEVER);
        assert_eq!(
            plan(Widest, half, Mode::Follow, || ALL),
            Plan::cast(DType::F32)
        );
        let bf16 = Operands::one(DType::BF16).and_constant(DType::F32);
        assert_eq!(
            plan(Widest, bf16, Mode::On(DType::BF16), || CONTRACTIONS),
            Plan::cast(DType::F32)
        );
    }

    #[test]
    fn f64_is_left_alone_but_for_mixed_operands() {
        for class in [Half, Full, Wide, Widest, Keep, Activation, Move] {
            assert_eq!(on(class, &[DType::F64, DType::F64]), NEVER);
            assert_eq!(on(class, &[DType::F16, DType::F64]), Plan::cast(DType::F64));
            assert_eq!(on(class, &[DType::Flex32]), NEVER);
        }
    }

    #[test]
    fn scalars_beyond_the_half_range_are_not_held() {
        for scalar in [0.0, -0.0, 1.0, -65504.0, 6.2e-5, f64::INFINITY, f64::NAN] {
            assert!(holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
        }
        for scalar in [-1e9, 65520.0, 1e-5, 1e-8] {
            assert!(!holds(DType::F16, scalar), "{scalar}");
            assert!(holds(DType::BF16, scalar), "{scalar}");
            assert!(holds(DType::F32, scalar), "{scalar}");
        }
        for scalar in [f32::MIN as f64, 1e-40, 1e300] {
            assert!(!holds(DType::BF16, scalar), "{scalar}");
        }
    }
}
