//! Operations that every version of Burn has with the same signature, and that need only their
//! policy row: one line each, for all packages.
//!
//! Each package passes a list to its own macro, inside the `impl` of a trait of its Burn, where type names
//! are resolved. Operations that differ between versions of Burn are in the packages themselves. `[x]` is a
//! float tensor, `[?x]` an optional one, `{x}` a scalar.

/// Operations of `IntTensorOps`.
#[doc(hidden)]
#[macro_export]
macro_rules! int_operations {
    ($list:ident) => {
        $list! {
            fn int_reshape(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self>;
            fn int_slice(tensor: IntTensor<Self>, slices: &[Slice]) -> IntTensor<Self>;
            fn int_slice_assign(tensor: IntTensor<Self>, slices: &[Slice], value: IntTensor<Self>) -> IntTensor<Self>;
            fn int_mask_where(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self>;
            fn int_mask_fill(tensor: IntTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> IntTensor<Self>;
            fn int_gather(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self>;
            fn int_scatter_nd(data: IntTensor<Self>, indices: IntTensor<Self>, values: IntTensor<Self>, reduction: IndexingUpdateOp) -> IntTensor<Self>;
            fn int_gather_nd(data: IntTensor<Self>, indices: IntTensor<Self>) -> IntTensor<Self>;
            fn int_select(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>) -> IntTensor<Self>;
            fn int_repeat_dim(tensor: IntTensor<Self>, dim: usize, times: usize) -> IntTensor<Self>;
            fn int_cat(tensors: Vec<IntTensor<Self>>, dim: usize) -> IntTensor<Self>;
            fn int_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_not_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_not_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_greater(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_greater_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_greater_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_greater_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_lower(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_lower_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_lower_equal(lhs: IntTensor<Self>, rhs: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_lower_equal_elem(lhs: IntTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_add(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_add_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_powi(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_powi_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_powi_scalar_impl(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_clamp_min(tensor: IntTensor<Self>, min: Scalar) -> IntTensor<Self>;
            fn int_clamp_max(tensor: IntTensor<Self>, max: Scalar) -> IntTensor<Self>;
            fn int_clamp(tensor: IntTensor<Self>, min: Scalar, max: Scalar) -> IntTensor<Self>;
            fn int_sub(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_sub_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_mul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_mul_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_div(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_div_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_remainder(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_remainder_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_matmul(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn int_neg(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_sum(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_sum_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_prod(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_prod_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_mean(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_mean_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_cumsum(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_cumprod(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_cummin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_cummax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_argmax(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_argtopk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self>;
            fn int_topk(tensor: IntTensor<Self>, dim: usize, k: usize) -> IntTensor<Self>;
            fn int_argmin(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_max(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_max_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_max_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>);
            fn int_max_abs(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_max_abs_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_min(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_min_dim(tensor: IntTensor<Self>, dim: usize) -> IntTensor<Self>;
            fn int_min_dim_with_indices(tensor: IntTensor<Self>, dim: usize) -> (IntTensor<Self>, IntTensor<Self>);
            fn int_abs(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_transpose(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_swap_dims(tensor: IntTensor<Self>, dim1: usize, dim2: usize) -> IntTensor<Self>;
            fn int_permute(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self>;
            fn int_flip(tensor: IntTensor<Self>, axes: &[usize]) -> IntTensor<Self>;
            fn int_any(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_any_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_all(tensor: IntTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_all_dim(tensor: IntTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn int_sign(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn int_expand(tensor: IntTensor<Self>, shape: Shape) -> IntTensor<Self>;
            fn int_sort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self>;
            fn int_sort_with_indices(tensor: IntTensor<Self>, dim: usize, descending: bool) -> (IntTensor<Self>, IntTensor<Self>);
            fn int_argsort(tensor: IntTensor<Self>, dim: usize, descending: bool) -> IntTensor<Self>;
            fn bitwise_and(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_and_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn bitwise_or(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_or_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn bitwise_xor(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_xor_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn bitwise_not(tensor: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_left_shift(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_left_shift_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn bitwise_right_shift(lhs: IntTensor<Self>, rhs: IntTensor<Self>) -> IntTensor<Self>;
            fn bitwise_right_shift_scalar(lhs: IntTensor<Self>, rhs: Scalar) -> IntTensor<Self>;
            fn int_cast(tensor: IntTensor<Self>, dtype: IntDType) -> IntTensor<Self>;
            fn int_unfold(tensor: IntTensor<Self>, dim: usize, size: usize, step: usize) -> IntTensor<Self>;
        }
    };
}

/// Operations of `BoolTensorOps`.
#[doc(hidden)]
#[macro_export]
macro_rules! bool_operations {
    ($list:ident) => {
        $list! {
            fn bool_into_int(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self>;
            fn bool_reshape(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self>;
            fn bool_slice(tensor: BoolTensor<Self>, slices: &[Slice]) -> BoolTensor<Self>;
            fn bool_slice_assign(tensor: BoolTensor<Self>, slices: &[Slice], value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_mask_where(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_mask_fill(tensor: BoolTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> BoolTensor<Self>;
            fn bool_gather(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>) -> BoolTensor<Self>;
            fn bool_select(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>) -> BoolTensor<Self>;
            fn bool_repeat_dim(tensor: BoolTensor<Self>, dim: usize, times: usize) -> BoolTensor<Self>;
            fn bool_cat(tensors: Vec<BoolTensor<Self>>, dim: usize) -> BoolTensor<Self>;
            fn bool_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_not_equal(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self>;
            fn bool_not_equal_elem(lhs: BoolTensor<Self>, rhs: Scalar) -> BoolTensor<Self>;
            fn bool_not(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_and(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_or(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_xor(lhs: BoolTensor<Self>, rhs: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_transpose(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_swap_dims(tensor: BoolTensor<Self>, dim1: usize, dim2: usize) -> BoolTensor<Self>;
            fn bool_permute(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self>;
            fn bool_flip(tensor: BoolTensor<Self>, axes: &[usize]) -> BoolTensor<Self>;
            fn bool_any(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_any_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self>;
            fn bool_all(tensor: BoolTensor<Self>) -> BoolTensor<Self>;
            fn bool_all_dim(tensor: BoolTensor<Self>, dim: usize) -> BoolTensor<Self>;
            fn bool_expand(tensor: BoolTensor<Self>, shape: Shape) -> BoolTensor<Self>;
            fn bool_unfold(tensor: BoolTensor<Self>, dim: usize, size: usize, step: usize) -> BoolTensor<Self>;
        }
    };
}

/// Operations of `QTensorOps` with a quantized result.
#[doc(hidden)]
#[macro_export]
macro_rules! quantized_operations {
    ($list:ident) => {
        $list! {
            fn q_reshape(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
            fn q_expand(tensor: QuantizedTensor<Self>, shape: Shape) -> QuantizedTensor<Self>;
            fn q_transpose(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
            fn q_swap_dims(tensor: QuantizedTensor<Self>, dim1: usize, dim2: usize) -> QuantizedTensor<Self>;
            fn q_permute(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
            fn q_flip(tensor: QuantizedTensor<Self>, axes: &[usize]) -> QuantizedTensor<Self>;
            fn q_select(tensor: QuantizedTensor<Self>, dim: usize, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
            fn q_slice(tensor: QuantizedTensor<Self>, slices: &[Slice]) -> QuantizedTensor<Self>;
            fn q_gather(dim: usize, tensor: QuantizedTensor<Self>, indices: IntTensor<Self>) -> QuantizedTensor<Self>;
            fn q_repeat_dim(tensor: QuantizedTensor<Self>, dim: usize, times: usize) -> QuantizedTensor<Self>;
            fn q_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
            fn q_cat(tensors: Vec<QuantizedTensor<Self>>, dim: usize) -> QuantizedTensor<Self>;
            fn q_argmax(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
            fn q_argtopk(tensor: QuantizedTensor<Self>, dim: usize, k: usize, out_dtype: IntDType) -> IntTensor<Self>;
            fn q_topk(tensor: QuantizedTensor<Self>, dim: usize, k: usize) -> QuantizedTensor<Self>;
            fn q_argmin(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> IntTensor<Self>;
            fn q_max(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
            fn q_max_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
            fn q_max_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
            fn q_min(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
            fn q_min_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
            fn q_min_dim_with_indices(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
            fn q_max_abs(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self>;
            fn q_max_abs_dim(tensor: QuantizedTensor<Self>, dim: usize) -> QuantizedTensor<Self>;
            fn q_any(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn q_any_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn q_all(tensor: QuantizedTensor<Self>, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn q_all_dim(tensor: QuantizedTensor<Self>, dim: usize, out_dtype: BoolDType) -> BoolTensor<Self>;
            fn q_sort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool) -> QuantizedTensor<Self>;
            fn q_sort_with_indices(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> (QuantizedTensor<Self>, IntTensor<Self>);
            fn q_argsort(tensor: QuantizedTensor<Self>, dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor<Self>;
        }
    };
}

/// Operations of `QTensorOps` with a result that is quantized or float.
#[doc(hidden)]
#[macro_export]
macro_rules! dequantizing_operations {
    ($list:ident) => {
        $list! {
            fn q_add(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
            fn q_add_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
            fn q_clamp_min(tensor: QuantizedTensor<Self>, min: Scalar);
            fn q_clamp_max(tensor: QuantizedTensor<Self>, max: Scalar);
            fn q_clamp(tensor: QuantizedTensor<Self>, min: Scalar, max: Scalar);
            fn q_sub(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
            fn q_sub_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
            fn q_mul(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
            fn q_mul_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
            fn q_div(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
            fn q_div_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
            fn q_powf(lhs: QuantizedTensor<Self>, rhs: QuantizedTensor<Self>);
            fn q_powi(lhs: QuantizedTensor<Self>, rhs: IntTensor<Self>);
            fn q_powi_scalar(lhs: QuantizedTensor<Self>, rhs: Scalar);
            fn q_powf_scalar(tensor: QuantizedTensor<Self>, value: Scalar);
            fn q_sum_dim(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_prod_dim(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_mean_dim(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_cumsum(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_cumprod(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_cummin(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_cummax(tensor: QuantizedTensor<Self>, dim: usize);
            fn q_neg(tensor: QuantizedTensor<Self>);
            fn q_recip(tensor: QuantizedTensor<Self>);
            fn q_sum(tensor: QuantizedTensor<Self>);
            fn q_prod(tensor: QuantizedTensor<Self>);
            fn q_mean(tensor: QuantizedTensor<Self>);
            fn q_exp(tensor: QuantizedTensor<Self>);
            fn q_log(tensor: QuantizedTensor<Self>);
            fn q_log1p(tensor: QuantizedTensor<Self>);
            fn q_sqrt(tensor: QuantizedTensor<Self>);
            fn q_cos(tensor: QuantizedTensor<Self>);
            fn q_sin(tensor: QuantizedTensor<Self>);
            fn q_tan(tensor: QuantizedTensor<Self>);
            fn q_cosh(tensor: QuantizedTensor<Self>);
            fn q_sinh(tensor: QuantizedTensor<Self>);
            fn q_tanh(tensor: QuantizedTensor<Self>);
            fn q_erf(tensor: QuantizedTensor<Self>);
        }
    };
}

/// Operations of `FloatTensorOps` that follow their row.
#[doc(hidden)]
#[macro_export]
macro_rules! float_operations {
    ($list:ident) => {
        $list! {
            float_cross([lhs], [rhs], dim: usize) -> FloatTensor;
            float_unfold([tensor], dim: usize, size: usize, step: usize) -> FloatTensor;
            float_remainder([lhs], [rhs]) -> FloatTensor;
            float_atan2([lhs], [rhs]) -> FloatTensor;
            float_powf([lhs], [rhs]) -> FloatTensor;
            float_powi([lhs], rhs: IntTensor<Self>) -> FloatTensor;
            float_powi_scalar_impl([lhs], rhs: Scalar) -> FloatTensor;
            float_powf_scalar_impl([tensor], value: Scalar) -> FloatTensor;
            float_recip([tensor]) -> FloatTensor;
            float_exp([tensor]) -> FloatTensor;
            float_log([tensor]) -> FloatTensor;
            float_log1p([tensor]) -> FloatTensor;
            float_sqrt([tensor]) -> FloatTensor;
            float_abs([tensor]) -> FloatTensor;
            float_sign([tensor]) -> FloatTensor;
            float_cos([tensor]) -> FloatTensor;
            float_sin([tensor]) -> FloatTensor;
            float_tan([tensor]) -> FloatTensor;
            float_cosh([tensor]) -> FloatTensor;
            float_sinh([tensor]) -> FloatTensor;
            float_acos([tensor]) -> FloatTensor;
            float_acosh([tensor]) -> FloatTensor;
            float_asin([tensor]) -> FloatTensor;
            float_asinh([tensor]) -> FloatTensor;
            float_atan([tensor]) -> FloatTensor;
            float_atanh([tensor]) -> FloatTensor;
            float_erf([tensor]) -> FloatTensor;
            float_round([tensor]) -> FloatTensor;
            float_floor([tensor]) -> FloatTensor;
            float_ceil([tensor]) -> FloatTensor;
            float_trunc([tensor]) -> FloatTensor;
            float_prod([tensor]) -> FloatTensor;
            float_prod_dim([tensor], dim: usize) -> FloatTensor;
            float_cumsum([tensor], dim: usize) -> FloatTensor;
            float_cumprod([tensor], dim: usize) -> FloatTensor;
            float_cummin([tensor], dim: usize) -> FloatTensor;
            float_cummax([tensor], dim: usize) -> FloatTensor;
            float_max([tensor]) -> FloatTensor;
            float_max_dim([tensor], dim: usize) -> FloatTensor;
            float_max_abs([tensor]) -> FloatTensor;
            float_max_abs_dim([tensor], dim: usize) -> FloatTensor;
            float_min([tensor]) -> FloatTensor;
            float_min_dim([tensor], dim: usize) -> FloatTensor;
            float_topk([tensor], dim: usize, k: usize) -> FloatTensor;
            float_sort([tensor], dim: usize, descending: bool) -> FloatTensor;
            float_remainder_scalar([lhs], {rhs}) -> FloatTensor;
            float_equal_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
            float_not_equal_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
            float_greater_equal_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
            float_lower_equal_elem([lhs], {rhs}, out_dtype: BoolDType) -> BoolTensor;
            float_equal([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_not_equal([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_greater([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_greater_equal([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_lower([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_lower_equal([lhs], [rhs], out_dtype: BoolDType) -> BoolTensor;
            float_any([tensor], out_dtype: BoolDType) -> BoolTensor;
            float_any_dim([tensor], dim: usize, out_dtype: BoolDType) -> BoolTensor;
            float_all([tensor], out_dtype: BoolDType) -> BoolTensor;
            float_all_dim([tensor], dim: usize, out_dtype: BoolDType) -> BoolTensor;
            float_is_nan([tensor], out_dtype: BoolDType) -> BoolTensor;
            float_is_inf([tensor], out_dtype: BoolDType) -> BoolTensor;
            float_into_int([tensor], out_dtype: IntDType) -> IntTensor;
            float_argmax([tensor], dim: usize, out_dtype: IntDType) -> IntTensor;
            float_argmin([tensor], dim: usize, out_dtype: IntDType) -> IntTensor;
            float_argtopk([tensor], dim: usize, k: usize, out_dtype: IntDType) -> IntTensor;
            float_argsort([tensor], dim: usize, descending: bool, out_dtype: IntDType) -> IntTensor;
            float_max_dim_with_indices([tensor], dim: usize, indices_dtype: IntDType) -> WithIndices;
            float_min_dim_with_indices([tensor], dim: usize, indices_dtype: IntDType) -> WithIndices;
            float_sort_with_indices([tensor], dim: usize, descending: bool, indices_dtype: IntDType) -> WithIndices;
            float_grid_sample_2d([tensor], [grid], options: GridSampleOptions) -> FloatTensor;
        }
    };
}

/// Operations of `FloatTensorOps` that bring values to another place.
#[doc(hidden)]
#[macro_export]
macro_rules! moving_operations {
    ($list:ident) => {
        $list! {
            float_repeat_dim([tensor], dim: usize, times: usize);
            float_expand([tensor], shape: Shape);
            float_select([tensor], dim: usize, indices: IntTensor<Self>);
            float_gather_nd([data], indices: IntTensor<Self>);
            float_gather(dim: usize, [tensor], indices: IntTensor<Self>);
        }
    };
}

/// Operations of `ModuleOps` that follow their row.
#[doc(hidden)]
#[macro_export]
macro_rules! module_operations {
    ($list:ident) => {
        $list! {
            conv1d_x_backward([x], [weight], [output_grad], options: ConvOptions<1>) -> FloatTensor, of convolution(weight, options);
            conv1d_weight_backward([x], [weight], [output_grad], options: ConvOptions<1>) -> FloatTensor, of convolution(weight, options);
            conv2d_x_backward([x], [weight], [output_grad], options: ConvOptions<2>) -> FloatTensor, of convolution(weight, options);
            conv2d_weight_backward([x], [weight], [output_grad], options: ConvOptions<2>) -> FloatTensor, of convolution(weight, options);
            conv3d_x_backward([x], [weight], [output_grad], options: ConvOptions<3>) -> FloatTensor, of convolution(weight, options);
            conv3d_weight_backward([x], [weight], [output_grad], options: ConvOptions<3>) -> FloatTensor, of convolution(weight, options);
            conv_transpose1d_x_backward([weight], [output_grad], options: ConvTransposeOptions<1>) -> FloatTensor, of convolution(weight, options);
            conv_transpose1d_weight_backward([x], [weight], [output_grad], options: ConvTransposeOptions<1>) -> FloatTensor, of convolution(weight, options);
            conv_transpose2d_x_backward([weight], [output_grad], options: ConvTransposeOptions<2>) -> FloatTensor, of convolution(weight, options);
            conv_transpose2d_weight_backward([x], [weight], [output_grad], options: ConvTransposeOptions<2>) -> FloatTensor, of convolution(weight, options);
            conv_transpose3d_x_backward([weight], [output_grad], options: ConvTransposeOptions<3>) -> FloatTensor, of convolution(weight, options);
            conv_transpose3d_weight_backward([x], [weight], [output_grad], options: ConvTransposeOptions<3>) -> FloatTensor, of convolution(weight, options);
            embedding([weights], indices: IntTensor<Self>) -> FloatTensor;
            embedding_backward([weights], [output_grad], indices: IntTensor<Self>) -> FloatTensor;
            unfold4d([x], kernel_size: [usize; 2], options: UnfoldOptions) -> FloatTensor;
            interpolate([x], output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor;
            adaptive_avg_pool1d([x], output_size: usize) -> FloatTensor;
            adaptive_avg_pool2d([x], output_size: [usize; 2]) -> FloatTensor;
            max_pool1d([x], kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> FloatTensor;
            max_pool2d([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> FloatTensor;
            ctc_loss([log_probs], targets: IntTensor<Self>, input_lengths: IntTensor<Self>, target_lengths: IntTensor<Self>, blank: usize) -> FloatTensor;
            deform_conv2d([x], [offset], [weight], [?mask], [?bias], options: DeformConvOptions<2>) -> FloatTensor;
            interpolate_backward([x], [grad], output_size: [usize; 2], options: InterpolateOptions) -> FloatTensor;
            adaptive_avg_pool1d_backward([x], [grad]) -> FloatTensor;
            adaptive_avg_pool2d_backward([x], [grad]) -> FloatTensor;
            max_pool1d_with_indices_backward([x], kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool, [output_grad], indices: IntTensor<Self>) -> MaxPool1dBackward;
            max_pool2d_with_indices_backward([x], kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, [output_grad], indices: IntTensor<Self>) -> MaxPool2dBackward;
            ctc_loss_backward([log_probs], targets: IntTensor<Self>, input_lengths: IntTensor<Self>, target_lengths: IntTensor<Self>, [grad_loss], blank: usize) -> FloatTensor;
        }
    };
}

/// Operations of `ActivationOps` that follow their row.
#[doc(hidden)]
#[macro_export]
macro_rules! activation_operations {
    ($list:ident) => {
        $list! {
            prelu([tensor], [alpha]) -> FloatTensor;
            gelu([tensor]) -> FloatTensor;
            log_sigmoid([tensor]) -> FloatTensor;
            leaky_relu([tensor], {negative_slope}) -> FloatTensor;
            hard_sigmoid([tensor], {alpha}, {beta}) -> FloatTensor;
            gelu_backward([x], [grad]) -> FloatTensor;
            sigmoid_backward([output], [grad]) -> FloatTensor;
            log_sigmoid_backward([x], [grad]) -> FloatTensor;
        }
    };
}

/// The functions of `BackendIr`, where a handle is the tensor itself. The text is the likely fix of a wrong
/// handle. `$float` is applied to each float tensor that a client names.
#[doc(hidden)]
#[macro_export]
macro_rules! ir_handles {
    ($fix:literal, $float:expr) => {
        $crate::ir_handles! { $fix
            Float("float"): float_tensor, float_tensor_handle, FloatTensor, $float;
            Int("int"): int_tensor, int_tensor_handle, IntTensor, ::core::convert::identity;
            Bool("bool"): bool_tensor, bool_tensor_handle, BoolTensor, ::core::convert::identity;
            Quantized("quantized"): quantized_tensor, quantized_tensor_handle, QuantizedTensor, ::core::convert::identity;
        }
    };
    ($fix:literal $($kind:ident($name:literal): $tensor:ident, $handle:ident, $of:ident, $given:expr;)*) => {
        type Handle = HandleKind<Self>;

        $(
            fn $tensor(handle: TensorHandle<Self::Handle>) -> $of<Self> {
                match handle.handle {
                    HandleKind::$kind(tensor) => ($given)(tensor),
                    other => panic!(
                        "an operation on {} tensors was given the handle of a {} tensor. {}",
                        $name,
                        other.name(),
                        $fix
                    ),
                }
            }

            fn $handle(tensor: $of<Self>) -> Self::Handle {
                HandleKind::$kind(tensor)
            }
        )*
    };
}

/// A result of the backend's operation, with its float tensors wrapped.
#[doc(hidden)]
#[macro_export]
macro_rules! wrapped {
    (FloatTensor, ($($wrap:tt)+), $out:expr) => { $($wrap)+($out) };
    (BoolTensor, $wrap:tt, $out:expr) => { $out };
    (IntTensor, $wrap:tt, $out:expr) => { $out };
    (QuantizedTensor, $wrap:tt, $out:expr) => { $out };
    (WithIndices, ($($wrap:tt)+), $out:expr) => {{
        let (values, indices) = $out;
        ($($wrap)+(values), indices)
    }};
    (Spectrum, ($($wrap:tt)+), $out:expr) => {{
        let (re, im) = $out;
        ($($wrap)+(re), $($wrap)+(im))
    }};
    (MaxPool1dWithIndices, ($($wrap:tt)+), $out:expr) => {{
        let pooled = $out;
        MaxPool1dWithIndices::new($($wrap)+(pooled.output), pooled.indices)
    }};
    (MaxPool2dWithIndices, ($($wrap:tt)+), $out:expr) => {{
        let pooled = $out;
        MaxPool2dWithIndices::new($($wrap)+(pooled.output), pooled.indices)
    }};
    (MaxPool3dWithIndices, ($($wrap:tt)+), $out:expr) => {{
        let pooled = $out;
        MaxPool3dWithIndices::new($($wrap)+(pooled.output), pooled.indices)
    }};
    (MaxPool1dBackward, ($($wrap:tt)+), $out:expr) => {
        MaxPool1dBackward::new($($wrap)+($out.x_grad))
    };
    (MaxPool2dBackward, ($($wrap:tt)+), $out:expr) => {
        MaxPool2dBackward::new($($wrap)+($out.x_grad))
    };
    (MaxPool3dBackward, ($($wrap:tt)+), $out:expr) => {
        MaxPool3dBackward::new($($wrap)+($out.x_grad))
    };
    (DeformConv2dBackward, ($($wrap:tt)+), $out:expr) => {{
        let grads = $out;
        DeformConv2dBackward::new(
            $($wrap)+(grads.x_grad),
            $($wrap)+(grads.offset_grad),
            $($wrap)+(grads.weight_grad),
            grads.mask_grad.map(|grad| $($wrap)+(grad)),
            grads.bias_grad.map(|grad| $($wrap)+(grad)),
        )
    }};
}
