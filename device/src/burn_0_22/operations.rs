//! Operations with a signature of Burn 0.22 only: one line each.

use burn_backend::ops::AttentionModuleOptions;

/// Operations of `BoolTensorOps`.
macro_rules! bool_operations {
    ($list:ident) => {
        $list! {
            fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
        }
    };
}

/// Operations of `ModuleOps`.
macro_rules! module_operations {
    ($list:ident) => {
        $list! {
            avg_pool1d([x], kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool2d([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool1d_backward([x], [grad], kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
            avg_pool2d_backward([x], [grad], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor;
        }
    };
}

pub(super) use {bool_operations, module_operations};

/// How many keys after its own position a query sees: the last key is aligned with the last query.
pub(super) fn causal_offset(_: &AttentionModuleOptions, queries: usize, keys: usize) -> i64 {
    keys as i64 - queries as i64
}
