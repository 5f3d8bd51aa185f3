//! Operations that Burn 0.23 added, or with a signature of Burn 0.23 only: one line each.

use burn_backend::ops::AttentionModuleOptions;

/// Operations of `BoolTensorOps`.
macro_rules! bool_operations {
    ($list:ident) => {
        $list! {
            fn bool_scatter(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>, update: burn_std::IndexingUpdateOp) -> BoolTensor<Self>;
            fn bool_scatter_nd(data: BoolTensor<Self>, indices: IntTensor<Self>, values: BoolTensor<Self>, reduction: burn_std::IndexingUpdateOp) -> BoolTensor<Self>;
            fn bool_gather_nd(data: BoolTensor<Self>, indices: IntTensor<Self>) -> BoolTensor<Self>;
            fn bool_select_assign(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>, update: burn_std::IndexingUpdateOp) -> BoolTensor<Self>;
        }
    };
}

/// Operations of `FloatTensorOps`.
macro_rules! float_operations {
    ($list:ident) => {
        $list! {
            float_fmod([lhs], [rhs]) -> FloatTensor;
            float_fmod_scalar([lhs], {rhs}) -> FloatTensor;
        }
    };
}

/// Operations of `ModuleOps`.
macro_rules! module_operations {
    ($list:ident) => {
        $list! {
            avg_pool1d([x], kernel_size: usize, stride: usize, padding: usize, dilation: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool2d([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool3d([x], kernel_size: [usize; 3], stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            max_pool3d([x], kernel_size: [usize; 3], stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], ceil_mode: bool) -> FloatTensor;
            max_pool3d_with_indices([x], kernel_size: [usize; 3], stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], ceil_mode: bool, indices_dtype: IntDType) -> MaxPool3dWithIndices;
            avg_pool1d_backward([x], [grad], kernel_size: usize, stride: usize, padding: usize, dilation: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool2d_backward([x], [grad], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool3d_backward([x], [grad], kernel_size: [usize; 3], stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            max_pool3d_with_indices_backward([x], kernel_size: [usize; 3], stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], ceil_mode: bool, [output_grad], indices: IntTensor<Self>) -> MaxPool3dBackward;
        }
    };
}

pub(super) use {bool_operations, float_operations, module_operations};

/// How many keys after its own position a query sees.
pub(super) fn causal_offset(options: &AttentionModuleOptions, queries: usize, keys: usize) -> i64 {
    options.causal_alignment.offset(queries, keys)
}
