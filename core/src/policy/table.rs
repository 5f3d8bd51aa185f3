//! The policy table: operations grouped by class and by the reason for the class.

use super::Case::{
    Accumulates, InexactScalar, OneTerm, OnlyContracts, RoundedScalar, UnheldScalar,
    WithoutAutodiff,
};
use super::Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};
use super::Effect::{
    Adds, Assigns, Divides, Fills, FindsLargest, IsSigmoid, Multiplies, MultipliesMatrices,
    Negates, Pools, Ranks, Reads, Reduces, Reshapes, Roots, Saturates, Scales, Shifts, Transposes,
};
use super::Role::{Backward, Composed, Forward, ParameterGradient};
use super::trials::TriedOp;
use super::{Case, Class, Effect, Fits, Op, Role};

/// An operation in its group.
#[derive(Clone, Copy)]
struct Entry {
    op: Op,
    /// The class, if it is not the group's.
    class: Option<Class>,
}

const fn entry(name: &'static str, role: Role) -> Entry {
    let op = Op {
        tried: TriedOp::named(name),
        ..Op::custom(name, Move, role)
    };
    Entry { op, class: None }
}

const fn op(name: &'static str) -> Entry {
    entry(name, Forward)
}

const fn composed(name: &'static str) -> Entry {
    entry(name, Composed)
}

const fn backward(name: &'static str) -> Entry {
    entry(name, Backward)
}

const fn parameter_gradient(name: &'static str) -> Entry {
    entry(name, ParameterGradient)
}

/// An operation on a scalar.
const fn with_scalar(name: &'static str) -> Entry {
    op(name).otherwise(&[(Fp32, UnheldScalar)])
}

/// An operation that multiplies by a scalar, or divides by it.
const fn by_scalar(name: &'static str) -> Entry {
    op(name).otherwise(&[(Fp32, UnheldScalar), (Fp32Inside, RoundedScalar)])
}

/// An operation that compares with a scalar.
const fn with_bound(name: &'static str) -> Entry {
    op(name).otherwise(&[(Fp32, InexactScalar)])
}

impl Entry {
    const fn of_class(mut self, class: Class) -> Self {
        self.class = Some(class);
        self
    }

    /// An operation that a later version of Burn added.
    const fn since(mut self, burn: &'static str) -> Self {
        self.op.since = burn;
        self
    }

    const fn otherwise(mut self, cases: &'static [(Class, Case)]) -> Self {
        self.op.otherwise = cases;
        self
    }

    const fn recorded(mut self, form: &'static str) -> Self {
        self.op.recorded = Some(form);
        self
    }

    const fn that(mut self, effect: Effect) -> Self {
        self.op.effect = effect;
        self
    }

    const fn fits(mut self, fits: Fits) -> Self {
        self.op.fits = Some(fits);
        self
    }

    const fn roundings(mut self, roundings: u8) -> Self {
        self.op.roundings = roundings;
        self
    }

    const fn fixed(mut self) -> Self {
        self.op.is_fixed = true;
        self
    }
}

/// A group of the table.
const fn rows<const N: usize>(class: Class, why: &'static str, entries: [Entry; N]) -> [Op; N] {
    let mut ops = [Op::custom("", class, Forward); N];
    let mut i = 0;
    while i < N {
        let own = entries[i].class;
        ops[i] = entries[i].op;
        ops[i].class = if let Some(own) = own { own } else { class };
        ops[i].why = why;
        i += 1;
    }
    ops
}

/// The operations in the table's order, each with its place.
pub(crate) const OPS: &[Op] = &{
    const OPERATIONS: usize = {
        let (mut i, mut operations) = (0, 0);
        while i < TABLE.len() {
            operations += TABLE[i].len();
            i += 1;
        }
        operations
    };
    let mut ops = [Op::custom("", Move, Forward); OPERATIONS];
    let (mut i, mut place) = (0, 0);
    while i < TABLE.len() {
        let mut j = 0;
        while j < TABLE[i].len() {
            ops[place] = TABLE[i][j];
            ops[place].place = Some(place as u16);
            j += 1;
            place += 1;
        }
        i += 1;
    }
    ops
};

const EXPANDS: &str = "expands its gradient, where autodiff multiplies ones";
const POWERS: &str = "of at least 2, keeps its operand in half where half holds it";
const SUMS_AT_ONCE: &str =
    "sums the gradient of a broadcast operand over neighbouring dimensions at once";

/// Every operation of Burn that takes or returns a float tensor, from Burn 0.21 on. Operations on
/// only integer, boolean or quantized tensors have no row: they go to the backend unchanged.
#[rustfmt::skip]
pub(super) const TABLE: &[&[Op]] = &[
    &rows(LowerPrecision, "a contraction: the work that half precision is for, where the kernel accumulates in FP32", [
        op("float_matmul").that(MultipliesMatrices).otherwise(&[(Promote, OneTerm)]), op("conv1d"), op("conv2d"), op("conv3d"),
        op("conv_transpose1d"), op("conv_transpose2d"), op("conv_transpose3d"),
        op("linear").recorded("with fusion, its backward pass takes its steps in the order that joins them"),
        backward("linear_x_backward"), backward("conv1d_x_backward"), backward("conv2d_x_backward"),
        backward("conv3d_x_backward"), backward("conv_transpose1d_x_backward"),
        backward("conv_transpose2d_x_backward"), backward("conv_transpose3d_x_backward"),
        parameter_gradient("linear_weight_backward"), parameter_gradient("conv1d_weight_backward"),
        parameter_gradient("conv2d_weight_backward"), parameter_gradient("conv3d_weight_backward"),
        parameter_gradient("conv_transpose1d_weight_backward"),
        parameter_gradient("conv_transpose2d_weight_backward"),
        parameter_gradient("conv_transpose3d_weight_backward"),
    ]),
    &rows(LowerPrecision, "two contractions; the softmax between them runs in FP32", [
        op("attention").recorded("its softmax keeps half probabilities of half scores"),
        op("attention_with_logsumexp").since("0.23"),
    ]),
    &rows(LowerPrecision, "five contractions; in one kernel, or in FP32: Burn's own steps sum in half", [
        backward("attention_backward").since("0.23"),
    ]),
    &rows(LowerPrecision, "follows the layers around it although its slope is an FP32 parameter", [
        op("prelu").otherwise(&[(Fp32, OnlyContracts)]),
    ]),
    &rows(Fp32, "its range leaves half: exp(12) is beyond 65504", [
        op("float_exp"), op("float_sinh"), op("float_cosh"), op("float_tan"),
    ]),
    &rows(Fp32, "its result near its pole or branch is lost in half", [
        op("float_log"), op("float_log1p"), op("float_recip"),
        op("float_acos"), op("float_acosh"), op("float_asin"), op("float_asinh"), op("float_atanh"),
        op("float_erf"), op("log_sigmoid"),
    ]),
    &rows(Fp32, "a square overflows f16 at 256", [
        composed("float_powf"), composed("float_powi"), composed("float_powi_scalar_impl"),
        composed("float_powf_scalar_impl"), op("float_hypot").since("0.22"),
        composed("float_powi_scalar").recorded(POWERS), composed("float_powf_scalar").recorded(POWERS),
    ]),
    &rows(Fp32, "a sum of unknown length: 4,096 ones make 2,048 in f16, 256 in bf16", [
        op("float_sum").that(Reduces).recorded(EXPANDS), op("float_sum_dim").that(Reduces).recorded(EXPANDS),
        op("float_mean").that(Reduces).recorded(EXPANDS).fits(Fits::Mean),
        op("float_mean_dim").that(Reduces).recorded(EXPANDS).fits(Fits::Mean), op("float_cumsum"),
        op("float_select_add"), op("float_scatter_add"), op("embedding_backward"), op("rfft"), op("irfft"),
        op("float_sum_dims").that(Reduces).since("0.22"), parameter_gradient("linear_bias_backward"),
        parameter_gradient("conv1d_bias_backward"), parameter_gradient("conv2d_bias_backward"),
        parameter_gradient("conv3d_bias_backward"), parameter_gradient("conv_transpose1d_bias_backward"),
        parameter_gradient("conv_transpose2d_bias_backward"),
        parameter_gradient("conv_transpose3d_bias_backward"),
    ]),
    &rows(Fp32, "counts elements: half stops counting at 2,048", [
        op("float_any"), op("float_any_dim"), op("float_all"), op("float_all_dim"),
    ]),
    &rows(Fp32, "a product of unknown length", [
        op("float_prod").that(Reduces), op("float_prod_dim").that(Reduces), op("float_cumprod"),
    ]),
    &rows(Fp32, "exponentials and their sum", [
        op("softmax").recorded("keeps half probabilities of half scores"),
        op("log_softmax").recorded("keeps half probabilities of half scores, but over a few classes its result"),
        op("softmin").recorded("the softmax of the negative"), op("ctc_loss"), backward("ctc_loss_backward"),
    ]),
    &rows(Fp32, "the gradient of the divisor is the floor of a quotient, which in half rounds across integers", [
        op("float_remainder"),
    ]),
    &rows(Fp32, "the gradient of the divisor is a quotient without its fraction, which in half rounds across integers", [
        op("float_fmod").since("0.23"),
    ]),
    &rows(Fp32, "differences of products cancel", [op("float_cross")]),
    &rows(Fp32, "its scales and rounding are calibrated in FP32", [
        op("quantize").fixed(), op("quantize_dynamic").fixed(), op("q_matmul").fixed(),
    ]),
    &rows(Fp32Inside, "sums and squares inside, a result bounded by its input", [
        composed("layer_norm").recorded("keeps one tensor, in half for a half operand"), op("avg_pool1d"),
        op("avg_pool2d"), op("adaptive_avg_pool1d"), op("adaptive_avg_pool2d"),
        op("adaptive_avg_pool3d").since("0.22"), op("avg_pool3d").since("0.23"),
    ]),
    &rows(Fp32Inside, "sums and squares inside, a result bounded by its input; the statistics stay FP32", [
        op("batch_norm_train").since("0.22"),
    ]),
    &rows(Fp32Inside, "sums inside for the gradients of scale and shift, which stay FP32", [
        backward("batch_norm_train_backward").since("0.22"),
    ]),
    &rows(Fp32Inside, "the statistics are FP32, and an epsilon of 1e-5 is below the normal values of f16", [
        op("batch_norm").since("0.22"),
    ]),
    &rows(Fp32Inside, "the gradient is summed inside", [
        backward("avg_pool1d_backward"), backward("avg_pool2d_backward"),
        backward("adaptive_avg_pool1d_backward"), backward("adaptive_avg_pool2d_backward"),
        backward("interpolate_backward"), backward("max_pool1d_with_indices_backward"),
        backward("max_pool2d_with_indices_backward"), backward("adaptive_avg_pool3d_backward").since("0.22"),
        backward("avg_pool3d_backward").since("0.23"),
        backward("max_pool3d_with_indices_backward").since("0.23"),
    ]),
    &rows(Fp32Inside, "sums every window that holds a value", [op("fold4d").since("0.22")]),
    &rows(Fp32Inside, "coordinates need more bits than values: bf16 counts pixels in steps of 8 from 1,024 on", [
        op("interpolate"), op("deform_conv2d"), composed("float_grid_sample_2d"),
        backward("deform_conv2d_backward"),
    ]),
    &rows(Fp32Inside, "cubes, or subtracts from one, inside: NaN at 45 and zeros near one in half", [
        backward("gelu_backward"), backward("log_sigmoid_backward"),
        // A backend without a kernel for this operation composes y (1 - y) g, which rounds three times. In bf16
        // the two extra roundings hardly show: an LSTM's gradients differ from FP32 by 0.818 % instead of 0.815 %
        // (`xtask/pytorch/sigmoid_backward.py`), and its step has two thirds of the casts.
        backward("sigmoid_backward").roundings(3),
    ]),
    &rows(Fp32Inside, "moves data, but autodiff sums the gradient of every window that holds a value", [
        composed("float_unfold").fits(Fits::WithOperands).otherwise(&[(Move, WithoutAutodiff)]),
        composed("unfold4d").fits(Fits::WithOperands).otherwise(&[(Move, WithoutAutodiff)]),
    ]),
    &rows(Fp32Inside, "halves the exponent: the result fits wherever the operand does", [op("float_sqrt").that(Roots)]),
    &rows(Fp32Inside, "by the floor of a quotient, which overflows f16", [with_scalar("float_remainder_scalar").that(Reads)]),
    &rows(Fp32Inside, "by a quotient without its fraction, which overflows f16", [
        with_scalar("float_fmod_scalar").that(Reads).since("0.23"),
    ]),
    &rows(Promote, "operands of one dtype, the widest of them", [
        op("float_add").that(Adds).of_class(PromoteSum).recorded(SUMS_AT_ONCE),
        op("float_sub").of_class(PromoteSum).recorded(SUMS_AT_ONCE),
        op("float_mul").that(Multiplies).recorded("keeps what half holds in half, and the noise of a dropout as bytes").fits(Fits::Product),
        op("float_div").recorded("keeps what half holds in half").fits(Fits::Quotient), op("float_atan2"),
        op("float_equal").that(Ranks), op("float_not_equal").that(Ranks), op("float_greater").that(Ranks), op("float_greater_equal").that(Ranks),
        op("float_lower").that(Ranks), op("float_lower_equal").that(Ranks), op("float_cat"), op("float_mask_where"),
        op("float_slice_assign").that(Assigns), op("float_scatter_nd").that(Assigns).otherwise(&[(Fp32, Accumulates)]),
        op("float_scatter").that(Assigns).since("0.22").otherwise(&[(Fp32, Accumulates)]),
        op("float_select_assign").that(Assigns).since("0.22").otherwise(&[(Fp32, Accumulates)]),
    ]),
    &rows(Promote, "passes the gradient through where a mask says so", [backward("relu_backward")]),
    &rows(Keep, "bounded by its input, rounded once", [
        op("relu").of_class(Activation).recorded("keeps the result instead of the operand"),
        op("float_tanh").that(Saturates).of_class(Activation).recorded("of a half operand, keeps the result instead of the operand"), op("gelu").of_class(Activation),
        by_scalar("leaky_relu").of_class(Activation), with_scalar("hard_sigmoid").of_class(Activation),
        op("float_sin"), op("float_cos"), op("float_atan"), op("float_abs"), op("float_sign").that(Reads),
        op("float_neg").that(Negates), op("float_round").that(Reads), op("float_floor").that(Reads), op("float_ceil").that(Reads),
        op("float_trunc").that(Reads),
    ]),
    &rows(Keep, "rounded once; near 1, the difference of two needs FP32's digits, and so an FP32 operand", [
        op("sigmoid").that(IsSigmoid).recorded("of a half operand, keeps the result instead of the operand; of FP32 that fits, the operand in half"),
    ]),
    &rows(Keep, "rounded at most once; but a scalar of -1e9 overflows f16, and an epsilon of 1e-8 vanishes", [
        with_scalar("float_add_scalar").that(Shifts), with_scalar("float_sub_scalar").that(Shifts),
        by_scalar("float_mul_scalar").that(Scales), by_scalar("float_div_scalar").that(Divides),
        with_scalar("float_mask_fill").that(Fills), with_scalar("float_equal_elem").that(Reads),
        with_scalar("float_not_equal_elem").that(Reads),
    ]),
    &rows(Keep, "selects values, makes none; but half rounds a bound or a threshold: 1 - 1e-6 becomes 1", [
        with_bound("float_clamp"), with_bound("float_clamp_min"),
        with_bound("float_clamp_max"), with_bound("float_greater_elem").that(Reads),
        with_bound("float_greater_equal_elem").that(Reads), with_bound("float_lower_elem").that(Reads),
        with_bound("float_lower_equal_elem").that(Reads),
    ]),
    &rows(Keep, "selects values, makes none", [
        op("float_max").that(Reduces), op("float_max_dim").that(FindsLargest), op("float_max_dim_with_indices").that(Ranks),
        op("float_min").that(Reduces), op("float_min_dim").that(Reduces), op("float_min_dim_with_indices").that(Ranks),
        op("float_max_abs").that(Reduces), op("float_max_abs_dim").that(Reduces), op("float_cummin"),
        op("float_cummax"), op("float_argmax").that(Ranks), op("float_argmin").that(Ranks), op("float_argtopk").that(Ranks), op("float_topk").that(Ranks),
        op("float_sort").that(Ranks), op("float_sort_with_indices").that(Ranks), op("float_argsort").that(Ranks), op("float_is_nan"),
        op("float_is_inf"), op("float_into_int").that(Reads), op("float_topk_with_indices").that(Ranks).since("0.22"),
        op("max_pool1d").that(Pools), op("max_pool1d_with_indices").that(Pools), op("max_pool2d").that(Pools), op("max_pool2d_with_indices").that(Pools),
        op("max_pool3d").that(Pools).since("0.23"), op("max_pool3d_with_indices").that(Pools).since("0.23"),
    ]),
    &rows(Move, "moves data", [
        op("float_to_device"), op("float_repeat_dim"), op("float_transpose").that(Transposes),
        op("float_swap_dims").that(Transposes), op("float_permute").that(Transposes), op("float_flip"),
        op("float_reshape").that(Reshapes), op("float_gather"), op("float_gather_nd"), op("float_select"),
        op("float_slice"), op("float_expand"), op("embedding"), op("float_detach"),
        op("float_set_require_grad"), op("float_is_require_grad"), op("float_device"),
        op("float_mask_select").since("0.22"),
    ]),
    &rows(Move, "moves data; but a constant of -1e9 overflows f16", [with_scalar("float_pad").that(Fills).since("0.22")]),
    &rows(Move, "makes data in the dtype asked for", [
        op("float_from_data"), op("int_into_float"), op("dequantize"),
    ]),
    &rows(Move, "makes data in the dtype asked for; an FP32 constant follows half tensors", [
        op("float_empty"), op("bool_into_float"),
    ]),
    &rows(Move, "makes data in the dtype asked for; FP32 zeros or ones follow half tensors, but not in a product, nor zeros of a table whose rows are written: a product, a state or a table of unknown length may begin with them", [
        op("float_zeros"), op("float_ones"),
    ]),
    &rows(Move, "makes data in the dtype asked for; an FP32 constant from -1 to 1 that both halves hold exactly, or an infinite one, follows half tensors; zeros, infinities and ones as those of `float_zeros` and `float_ones`; FP32 if the half dtype asked for does not hold the value", [
        op("float_full"),
    ]),
    &rows(Move, "drawn in FP32 and then cast: a seed gives FP32's numbers, and a uniform number stays below its upper bound where half has one; zeros and ones are drawn as asked", [
        op("float_random"),
    ]),
    &rows(Move, "data that leaves is FP32 where the policy made the tensor half", [
        op("float_into_data"), op("tr_execute"),
    ]),
    &rows(Move, "the user names the dtype", [op("float_cast")]),
];
