//! How PyTorch's autocast treats the counterpart of each operation on CUDA. PyTorch's version stands in
//! `src/guide/ops.md` as well.

use std::fmt;

use burn_amp_core::policy::{forward_of, short};

/// How autocast treats an operation's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Autocast {
    LowerPrecision,
    Float32,
    Widest,
    /// In none of the lists.
    AsGiven,
}

impl fmt::Display for Autocast {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::LowerPrecision => "lower precision",
            Self::Float32 => "float32",
            Self::Widest => "widest",
            Self::AsGiven => "as given",
        })
    }
}

/// This file, from the root of the repository.
pub const FILE: &str = "xtask/src/docs/pytorch.rs";

/// By `aten/src/ATen/autocast_mode.h` of PyTorch 2.15, without its internal operations. `upsample_*`
/// are all of that beginning; `softmin` is only in the documentation's list, because it is composed of
/// softmax.
const LISTS: [(Autocast, &str); 3] = [
    (
        Autocast::LowerPrecision,
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu \
         addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm \
         chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell \
         scaled_dot_product_attention",
    ),
    (
        Autocast::Float32,
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow \
         softplus layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity \
         poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss \
         smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss \
         soft_margin_loss triplet_margin_loss multi_margin_loss \
         binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_* \
         prod softmax softmin log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm \
         sum norm",
    ),
    (
        Autocast::Widest,
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot \
         scatter_add",
    ),
];

/// Operations that have Burn's name in PyTorch, without its `float_`.
const SAME_NAME: &str = "
    matmul linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu
    exp sinh cosh tan log log1p acos acosh asin asinh atanh atan atan2 erf sin cos tanh sqrt abs
    sign neg round floor ceil trunc sum mean cumsum prod cumprod cummin cummax any all remainder
    cross add sub mul div cat clamp max min argmax argmin topk sort argsort
    relu leaky_relu gelu sigmoid log_sigmoid softmax log_softmax softmin layer_norm
    ctc_loss embedding avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d max_pool1d
    max_pool2d scatter_add gather slice expand permute flip reshape unfold detach device
    zeros ones full empty dequantize";

/// Operations that have another name in PyTorch, with that name.
const OTHER_NAME: &str = "
    attention=scaled_dot_product_attention hard_sigmoid=hardsigmoid float_recip=reciprocal
    float_powf=pow float_powf_scalar=pow float_powf_scalar_impl=pow float_powi=pow
    float_powi_scalar=pow float_powi_scalar_impl=pow float_add_scalar=add float_sub_scalar=sub
    float_mul_scalar=mul float_div_scalar=div float_remainder_scalar=remainder
    float_clamp_min=clamp float_clamp_max=clamp float_equal=eq float_equal_elem=eq
    float_not_equal=ne float_not_equal_elem=ne float_greater=gt float_greater_elem=gt
    float_greater_equal=ge float_greater_equal_elem=ge float_lower=lt float_lower_elem=lt
    float_lower_equal=le float_lower_equal_elem=le float_is_nan=isnan float_is_inf=isinf
    float_sum_dim=sum float_mean_dim=mean float_prod_dim=prod float_any_dim=any float_all_dim=all
    float_max_dim=max float_max_dim_with_indices=max float_min_dim=min
    float_min_dim_with_indices=min float_argtopk=topk float_sort_with_indices=sort
    max_pool1d_with_indices=max_pool1d max_pool2d_with_indices=max_pool2d interpolate=upsample_*
    float_grid_sample_2d=grid_sampler unfold4d=im2col rfft=fft_rfft irfft=fft_irfft
    float_mask_where=where float_mask_fill=masked_fill float_gather_nd=index
    float_select_add=index_add float_scatter_nd=index_put float_select=index_select
    float_slice_assign=slice_scatter float_repeat_dim=repeat float_transpose=transpose
    float_swap_dims=transpose quantize=quantize_per_tensor
    quantize_dynamic=quantize_per_tensor_dynamic float_cast=to float_into_int=to int_into_float=to
    bool_into_float=to float_to_device=to float_from_data=tensor float_into_data=numpy
    float_random=rand float_is_require_grad=requires_grad float_set_require_grad=requires_grad_";

/// Operations that PyTorch lacks, at least as operations of their own.
const NONE: &str = "deform_conv2d q_matmul float_max_abs float_max_abs_dim tr_execute";

/// PyTorch's operation of the same meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counterpart {
    pub name: &'static str,
    pub autocast: Autocast,
}

/// The counterpart of one of Burn's operations, if PyTorch has it; the outer `None` if the tables above
/// lack the operation. A backward function has the counterpart of its forward operation, because
/// PyTorch's backward pass runs in the dtypes of the forward pass.
pub fn counterpart(op: &str) -> Option<Option<Counterpart>> {
    let op = forward_of(op).unwrap_or(op);
    if words(NONE).any(|none| none == op) {
        return Some(None);
    }
    let plain = short(op);
    let mut others = other_names();
    let name = match others.find(|(known, _)| *known == op) {
        Some((_, name)) => name,
        None => words(SAME_NAME).find(|name| *name == plain)?,
    };
    let autocast = autocast(name);
    Some(Some(Counterpart { name, autocast }))
}

/// The operations in PyTorch's lists that are the counterpart of none of `ops`.
pub fn without_counterpart(ops: &[&str]) -> [(Autocast, Vec<&'static str>); 3] {
    let known: Vec<_> = ops.iter().filter_map(|op| counterpart(op)?).collect();
    LISTS.map(|(autocast, list)| {
        let unknown = words(list).filter(|name| known.iter().all(|known| known.name != *name));
        (autocast, unknown.collect())
    })
}

fn autocast(name: &str) -> Autocast {
    LISTS
        .iter()
        .find(|(_, list)| words(list).any(|listed| listed == name))
        .map_or(Autocast::AsGiven, |(autocast, _)| *autocast)
}

fn other_names() -> impl Iterator<Item = (&'static str, &'static str)> {
    words(OTHER_NAME).filter_map(|pair| pair.split_once('='))
}

fn words(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.split_whitespace()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_amp::policy;

    #[test]
    fn an_operation_has_the_treatment_of_its_counterpart() {
        for (op, name, treatment) in [
            ("softmax", "softmax", Autocast::Float32),
            ("conv2d_bias_backward", "conv2d", Autocast::LowerPrecision),
            ("float_scatter_nd", "index_put", Autocast::Widest),
            ("float_mean_dim", "mean", Autocast::AsGiven),
            ("interpolate_backward", "upsample_*", Autocast::Float32),
        ] {
            let counterpart = counterpart(op).unwrap().unwrap();
            assert_eq!((counterpart.name, counterpart.autocast), (name, treatment));
        }
        assert_eq!(counterpart("q_matmul"), Some(None));
        assert_eq!(counterpart("float_swish"), None);
    }

    #[test]
    fn every_row_is_known_and_everything_known_is_a_row_once() {
        let rows: Vec<_> = policy::rows()
            .map(|row| forward_of(row.op).unwrap_or(row.op))
            .collect();
        for op in &rows {
            assert!(counterpart(op).is_some(), "{op}");
        }
        let same = words(SAME_NAME).map(|name| {
            let row = rows.iter().find(|op| **op == name);
            row.map_or_else(|| format!("float_{name}"), |op| op.to_string())
        });
        let other = other_names().map(|(op, _)| op);
        let others = other.chain(words(NONE)).map(String::from);
        let known: Vec<_> = same.chain(others).collect();
        for (i, op) in known.iter().enumerate() {
            assert!(rows.contains(&op.as_str()), "{op} is no row");
            assert!(!known[i + 1..].contains(op), "{op} is there twice");
        }
    }
}
