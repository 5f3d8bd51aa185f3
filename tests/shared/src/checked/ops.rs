//! The operations, one per line: each is checked, then passed to the backend. Methods that Burn
//! composes of others are passed on whole, so that each is counted under the name that burn-amp calls.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use burn_backend::backend::{Backend, ExecutionError};
use burn_backend::ops::{
    ActivationOps, AttentionModuleOptions, BoolTensorOps, ConvOptions, ConvTransposeOptions,
    DeformConv2dBackward, DeformConvOptions, FloatTensorOps, GridSampleOptions, IntTensorOps,
    InterpolateOptions, MaxPool1dBackward, MaxPool1dWithIndices, MaxPool2dBackward,
    MaxPool2dWithIndices, ModuleOps, QTensorOps, TransactionOps, UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantizationParametersPrimitive};
use burn_backend::tensor::{
    BoolTensor, Device, FloatTensor, IndexingUpdateOp, IntTensor, QuantizedTensor,
};
use burn_backend::{
    BoolDType, DType, Distribution, FloatDType, IntDType, Scalar, Shape, Slice, TensorData,
    TensorMetadata, TensorPrimitive,
};

use super::call::{Call, Operand, StepOutcome};
use super::{Checked, CheckedDevice};

macro_rules! checked {
    ($(fn $op:ident($($a:ident: $ty:ty),* $(,)?) -> $out:ty;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        fn $op($($a: $ty),*) -> $out {
            let mut call = Call::new(stringify!($op));
            $(Operand::<B>::seen(&$a, &mut call);)*
            call.check();
            $(let $a = Operand::<B>::lower($a);)*
            let lower = call.run::<B, _>(|| B::$op($($a),*));
            StepOutcome::raised(lower, &mut call)
        }
    )*};
    ($(fn $op:ident($($a:ident: $ty:ty),* $(,)?);)*) => {
        checked! { $(fn $op($($a: $ty),*) -> TensorPrimitive<Self>;)* }
    };
}

/// Operations as the core lists them.
macro_rules! listed {
    ($($op:ident($(
        $([$t:ident])? $([?$o:ident])? $({$s:ident})? $($a:ident: $ty:ty)?
    ),+) -> $out:ident $(, of convolution($($of:ident),+))?;)*) => {
        checked! {$(
            fn $op($(
                $($t: FloatTensor<Self>)? $($o: Option<FloatTensor<Self>>)? $($s: Scalar)? $($a: $ty)?
            ),+) -> $out<Self>;
        )*}
    };
    ($($op:ident($($([$t:ident])? $($a:ident: $ty:ty)?),+);)*) => {
        checked! {$(fn $op($($($t: FloatTensor<Self>)? $($a: $ty)?),+) -> FloatTensor<Self>;)*}
    };
}

/// Values and their indices.
type WithIndices<B> = (FloatTensor<B>, IntTensor<B>);

/// Burn's CPU backends have one random stream for the process: tests in other threads must not draw from this one.
fn drawn<B: Backend, T>(
    device: &CheckedDevice,
    dtype: DType,
    draw: impl FnOnce(&B::Device) -> T,
) -> T {
    static STREAM: Mutex<()> = Mutex::new(());
    let _stream = STREAM.lock().unwrap_or_else(PoisonError::into_inner);
    let lower = B::Device::default();
    B::seed(&lower, device.next_seed(dtype));
    draw(&lower)
}

impl<B: Backend> FloatTensorOps<Self> for Checked<B> {
    fn float_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let mut call = Call::new("float_random");
        Operand::<B>::seen(&device, &mut call);
        // Burn's backends draw zero or one before they convert.
        let stream = match distribution {
            Distribution::Bernoulli(_) => FloatDType::F32,
            _ => dtype,
        };
        let drawn = drawn::<B, _>(device, stream.into(), |device| {
            B::float_random(shape, distribution, device, dtype)
        });
        StepOutcome::raised(drawn, &mut call)
    }

    async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
        let mut call = Call::new("float_into_data");
        Operand::<B>::seen(&tensor, &mut call);
        call.check();
        tensor.device.count_read(|reads| reads.float += 1);
        if tensor.device.is_unreadable() {
            return Err(ExecutionError::WithContext {
                reason: "the device cannot be read".into(),
            });
        }
        B::float_into_data(tensor.inner).await
    }

    fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
        tensor.device
    }

    fn float_to_device(tensor: FloatTensor<Self>, device: &Device<Self>) -> FloatTensor<Self> {
        if tensor.device == *device {
            return tensor;
        }
        let mut call = Call::new("float_to_device");
        Operand::<B>::seen(&device, &mut call);
        StepOutcome::raised(tensor.inner, &mut call)
    }

    fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn float_cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        if tensor.dtype() == dtype.into() {
            return tensor;
        }
        let mut call = Call::new("float_cast");
        Operand::<B>::seen(&tensor, &mut call);
        call.check();
        let (from, shape) = (tensor.dtype(), tensor.shape());
        tensor
            .device
            .count_cast(tensor.id, shape, from, dtype.into());
        let cast = call.run::<B, _>(|| B::float_cast(tensor.inner, dtype));
        StepOutcome::raised(cast, &mut call)
    }

    burn_amp_core::float_operations! { listed }

    burn_amp_core::moving_operations! { listed }

    checked! {
        fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self>;
        fn float_zeros(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_ones(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_empty(shape: Shape, device: &Device<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn float_add(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_add_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self>;
        fn float_clamp_min(tensor: FloatTensor<Self>, min: Scalar) -> FloatTensor<Self>;
        fn float_clamp_max(tensor: FloatTensor<Self>, max: Scalar) -> FloatTensor<Self>;
        fn float_clamp(tensor: FloatTensor<Self>, min: Scalar, max: Scalar) -> FloatTensor<Self>;
        fn float_sub(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_sub_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self>;
        fn float_mul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_mul_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self>;
        fn float_div(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_div_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self>;
        fn float_matmul(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_neg(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_transpose(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_swap_dims(tensor: FloatTensor<Self>, dim1: usize, dim2: usize) -> FloatTensor<Self>;
        fn float_permute(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self>;
        fn float_flip(tensor: FloatTensor<Self>, axes: &[usize]) -> FloatTensor<Self>;
        fn float_reshape(tensor: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self>;
        fn float_scatter_add(dim: usize, tensor: FloatTensor<Self>, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_scatter_nd(data: FloatTensor<Self>, indices: IntTensor<Self>, values: FloatTensor<Self>, reduction: IndexingUpdateOp) -> FloatTensor<Self>;
        fn float_select_add(tensor: FloatTensor<Self>, dim: usize, indices: IntTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_slice(tensor: FloatTensor<Self>, slices: &[Slice]) -> FloatTensor<Self>;
        fn float_slice_assign(tensor: FloatTensor<Self>, slices: &[Slice], value: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_mask_where(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_mask_fill(tensor: FloatTensor<Self>, mask: BoolTensor<Self>, value: Scalar) -> FloatTensor<Self>;
        fn float_greater_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn float_lower_elem(lhs: FloatTensor<Self>, rhs: Scalar, out_dtype: BoolDType) -> BoolTensor<Self>;
        fn float_sum(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_sum_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn float_mean(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_mean_dim(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn float_powi_scalar(lhs: FloatTensor<Self>, rhs: Scalar) -> FloatTensor<Self>;
        fn float_powf_scalar(tensor: FloatTensor<Self>, value: Scalar) -> FloatTensor<Self>;
        fn float_tanh(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn float_cat(tensors: Vec<FloatTensor<Self>>, dim: usize) -> FloatTensor<Self>;
    }
}

impl<B: Backend> IntTensorOps<Self> for Checked<B> {
    fn int_random(
        shape: Shape,
        distribution: Distribution,
        device: &Device<Self>,
        dtype: IntDType,
    ) -> IntTensor<Self> {
        let mut call = Call::new("int_random");
        Operand::<B>::seen(&device, &mut call);
        let drawn = drawn::<B, _>(device, dtype.into(), |device| {
            B::int_random(shape, distribution, device, dtype)
        });
        StepOutcome::raised(drawn, &mut call)
    }

    async fn int_into_data(tensor: IntTensor<Self>) -> Result<TensorData, ExecutionError> {
        tensor.device.count_read(|reads| reads.int += 1);
        B::int_into_data(tensor.inner).await
    }

    fn int_device(tensor: &IntTensor<Self>) -> Device<Self> {
        tensor.device
    }

    fn int_to_device(tensor: IntTensor<Self>, device: &Device<Self>) -> IntTensor<Self> {
        IntTensor::<Self>::new(tensor.inner, *device)
    }

    burn_amp_core::int_operations! { checked }

    checked! {
        fn int_empty(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_from_data(data: TensorData, device: &Device<Self>) -> IntTensor<Self>;
        fn int_into_float(tensor: IntTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self>;
        fn int_scatter_add(dim: usize, tensor: IntTensor<Self>, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self>;
        fn int_select_add(tensor: IntTensor<Self>, dim: usize, indices: IntTensor<Self>, value: IntTensor<Self>) -> IntTensor<Self>;
        fn int_zeros(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_ones(shape: Shape, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_full(shape: Shape, fill_value: Scalar, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange_step(range: Range<i64>, step: usize, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
        fn int_arange(range: Range<i64>, device: &Device<Self>, dtype: IntDType) -> IntTensor<Self>;
    }
}

impl<B: Backend> BoolTensorOps<Self> for Checked<B> {
    async fn bool_into_data(tensor: BoolTensor<Self>) -> Result<TensorData, ExecutionError> {
        tensor.device.count_read(|reads| reads.bool += 1);
        B::bool_into_data(tensor.inner).await
    }

    fn bool_device(tensor: &BoolTensor<Self>) -> Device<Self> {
        tensor.device
    }

    fn bool_to_device(tensor: BoolTensor<Self>, device: &Device<Self>) -> BoolTensor<Self> {
        BoolTensor::<Self>::new(tensor.inner, *device)
    }

    async fn bool_argwhere(tensor: BoolTensor<Self>, out_dtype: IntDType) -> IntTensor<Self> {
        tensor.device.count_read(|reads| reads.bool += 1);
        IntTensor::<Self>::new(
            B::bool_argwhere(tensor.inner, out_dtype).await,
            tensor.device,
        )
    }

    burn_amp_core::bool_operations! { checked }

    checked! {
        fn bool_empty(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_zeros(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_ones(shape: Shape, device: &Device<Self>, dtype: BoolDType) -> BoolTensor<Self>;
        fn bool_from_data(data: TensorData, device: &Device<Self>) -> BoolTensor<Self>;
        fn bool_into_float(tensor: BoolTensor<Self>, out_dtype: FloatDType) -> FloatTensor<Self>;
        fn bool_scatter_or(dim: usize, tensor: BoolTensor<Self>, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
        fn bool_select_or(tensor: BoolTensor<Self>, dim: usize, indices: IntTensor<Self>, value: BoolTensor<Self>) -> BoolTensor<Self>;
    }
}

impl<B: Backend> ModuleOps<Self> for Checked<B> {
    fn has_ctc_loss_backward() -> bool {
        B::has_ctc_loss_backward()
    }

    burn_amp_core::module_operations! { listed }

    checked! {
        fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self>;
        fn linear_x_backward(weight: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn linear_weight_backward(x: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn linear_bias_backward(output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv1d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<1>) -> FloatTensor<Self>;
        fn conv1d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv2d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<2>) -> FloatTensor<Self>;
        fn conv2d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn deform_conv2d_backward(x: FloatTensor<Self>, offset: FloatTensor<Self>, weight: FloatTensor<Self>, mask: Option<FloatTensor<Self>>, bias: Option<FloatTensor<Self>>, output_grad: FloatTensor<Self>, options: DeformConvOptions<2>) -> DeformConv2dBackward<Self>;
        fn conv3d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvOptions<3>) -> FloatTensor<Self>;
        fn conv3d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv_transpose1d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<1>) -> FloatTensor<Self>;
        fn conv_transpose1d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv_transpose2d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<2>) -> FloatTensor<Self>;
        fn conv_transpose2d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn conv_transpose3d(x: FloatTensor<Self>, weight: FloatTensor<Self>, bias: Option<FloatTensor<Self>>, options: ConvTransposeOptions<3>) -> FloatTensor<Self>;
        fn conv_transpose3d_bias_backward(x: FloatTensor<Self>, bias: FloatTensor<Self>, output_grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn avg_pool1d(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn avg_pool1d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn avg_pool2d(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn avg_pool2d_backward(x: FloatTensor<Self>, grad: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> FloatTensor<Self>;
        fn max_pool1d_with_indices(x: FloatTensor<Self>, kernel_size: usize, stride: usize, padding: usize, dilation: usize, ceil_mode: bool) -> MaxPool1dWithIndices<Self>;
        fn max_pool2d_with_indices(x: FloatTensor<Self>, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> MaxPool2dWithIndices<Self>;
        fn attention(query: FloatTensor<Self>, key: FloatTensor<Self>, value: FloatTensor<Self>, mask: Option<BoolTensor<Self>>, attn_bias: Option<FloatTensor<Self>>, options: AttentionModuleOptions) -> FloatTensor<Self>;
        fn layer_norm(tensor: FloatTensor<Self>, gamma: FloatTensor<Self>, beta: Option<FloatTensor<Self>>, epsilon: f64) -> FloatTensor<Self>;
        fn rfft(signal: FloatTensor<Self>, dim: usize, n: Option<usize>) -> (FloatTensor<Self>, FloatTensor<Self>);
        fn irfft(spectrum_re: FloatTensor<Self>, spectrum_im: FloatTensor<Self>, dim: usize, n: Option<usize>) -> FloatTensor<Self>;
    }
}

impl<B: Backend> ActivationOps<Self> for Checked<B> {
    burn_amp_core::activation_operations! { listed }

    checked! {
        fn relu(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn relu_backward(output: FloatTensor<Self>, grad: FloatTensor<Self>) -> FloatTensor<Self>;
        fn sigmoid(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
        fn softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn log_softmax(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
        fn softmin(tensor: FloatTensor<Self>, dim: usize) -> FloatTensor<Self>;
    }
}

impl<B: Backend> QTensorOps<Self> for Checked<B> {
    fn q_device(tensor: &QuantizedTensor<Self>) -> Device<Self> {
        tensor.device
    }

    fn q_to_device(tensor: QuantizedTensor<Self>, device: &Device<Self>) -> QuantizedTensor<Self> {
        QuantizedTensor::<Self>::new(tensor.inner, *device)
    }

    async fn q_into_data(tensor: QuantizedTensor<Self>) -> Result<TensorData, ExecutionError> {
        tensor.device.count_read(|reads| reads.float += 1);
        B::q_into_data(tensor.inner).await
    }

    burn_amp_core::dequantizing_operations! { checked }

    burn_amp_core::quantized_operations! { checked }

    checked! {
        fn q_from_data(data: TensorData, device: &Device<Self>) -> QuantizedTensor<Self>;
        fn quantize(tensor: FloatTensor<Self>, scheme: &QuantScheme, qparams: QuantizationParametersPrimitive<Self>) -> QuantizedTensor<Self>;
        fn quantize_dynamic(tensor: FloatTensor<Self>, scheme: &QuantScheme) -> QuantizedTensor<Self>;
        fn dequantize(tensor: QuantizedTensor<Self>, dtype: FloatDType) -> FloatTensor<Self>;
        fn q_matmul(lhs: TensorPrimitive<Self>, rhs: TensorPrimitive<Self>) -> TensorPrimitive<Self>;
    }
}

/// Burn's default reads each tensor by itself, so each read is counted.
impl<B: Backend> TransactionOps<Self> for Checked<B> {}
