//! LibTorch's own kernels. `None` where `B` does not compute on LibTorch's tensors.

use std::any::{Any, TypeId};

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_tch::{TchElement, TchTensor};
use tch::Tensor;

use crate::policy::is_half;

/// The view by LibTorch's own `permute`, counted as one of `tensor`.
pub(super) fn permuted<B: Backend>(
    tensor: &FloatTensor<B>,
    axes: &[usize],
) -> Option<FloatTensor<B>> {
    let of = inner(tensor)?;
    let axes: Vec<_> = axes.iter().map(|&axis| axis as i64).collect();
    outer(TchTensor {
        tensor: of.tensor.permute(axes),
        storage: of.storage.clone(),
    })
}

/// A half matrix through a linear layer with a bias, by `at::addmm`. LibTorch adds the bias before it
/// rounds; Burn's own way rounds the product, and then its sum with the bias.
///
/// Until: `burn-tch` has a `linear` of its own. 0.22.1 has none.
pub(crate) fn linear<B: Backend>(
    x: &FloatTensor<B>,
    weight: &FloatTensor<B>,
    bias: &FloatTensor<B>,
) -> Option<FloatTensor<B>> {
    let [x, weight, bias] = [inner(x)?, inner(weight)?, inner(bias)?];
    let kinds = [x, weight, bias].map(|tensor| tensor.tensor.kind());
    if x.rank() != 2 || !is_half(x.dtype()) || kinds != [kinds[0]; 3] {
        return None;
    }
    let out = bias.tensor.addmm(&x.tensor, &weight.tensor);
    outer(TchTensor::new(out))
}

/// The gradient of a ReLU from its result, by `at::threshold_backward`, if both have one dtype. Burn's own way
/// compares and calls `masked_fill`, which LibTorch runs value by value on a CPU.
///
/// Until: `burn-tch` has a `relu_backward` of its own. 0.22.1 has none.
pub(crate) fn relu_backward<B: Backend>(
    output: &FloatTensor<B>,
    grad: &FloatTensor<B>,
) -> Option<FloatTensor<B>> {
    let (output, grad) = (inner(output)?, inner(grad)?);
    if output.tensor.kind() != grad.tensor.kind() {
        return None;
    }
    let grad = output.tensor.threshold_backward(&grad.tensor, 0);
    outer(TchTensor::new(grad))
}

/// Zeros and ones as bytes. Burn's own way is by 64-bit integers, and LibTorch converts bf16 and FP32 to `i8` in
/// vectors, but to `u8` value by value.
///
/// Until: `float_into_int` of `burn-tch` heeds its dtype. 0.22.1 does not.
pub(crate) fn into_bytes<B: Backend>(tensor: &FloatTensor<B>) -> Option<IntTensor<B>> {
    let bytes = inner(tensor)?.tensor.to_kind(<i8 as TchElement>::kind());
    outer(TchTensor::new(bytes))
}

/// The gradient of a softmax from its probabilities, both in FP32 and where `B` [`has_kernels`], by
/// `at::_softmax_backward_data`. With q the probabilities divided by their sum, since rounded ones do not sum to 1, the
/// gradient is q (g - sum(q g)). A row of zeros, of which a masked softmax has some, gives zeros.
///
/// Until: Burn has a `softmax_backward` that `burn-tch` implements. 0.23 has none.
pub(crate) fn softmax_backward<B: Backend>(
    probabilities: FloatTensor<B>,
    grad: FloatTensor<B>,
    dim: usize,
) -> FloatTensor<B> {
    const KNOWN: &str = "a tensor of burn-tch's";
    let [p, grad]: [TchTensor; 2] = [probabilities, grad].map(|t| outer(t).expect(KNOWN));
    let (dim, kind) = (dim as i64, p.tensor.kind());
    let sum = p.tensor.sum_dim_intlist(dim, true, kind).clamp_min(0.5);
    let q = p.unary_ops(|mut p| p.divide_(&sum), |p| p.divide(&sum));
    // The kernel reads and writes both as contiguous.
    let q = q.tensor.contiguous();
    let kernel = |grad: &Tensor| Tensor::internal_softmax_backward_data(grad, &q, dim, kind);
    let in_place = |grad: Tensor| match grad.is_contiguous() {
        true => Tensor::internal_softmax_backward_data_out(&grad, &grad, &q, dim, kind),
        false => kernel(&grad),
    };
    outer(grad.unary_ops(in_place, kernel)).expect(KNOWN)
}

/// Whether the tensors of `B` are those of this `burn-tch`.
///
/// Until: [`softmax_backward`] ends.
pub(crate) fn has_kernels<B: Backend>() -> bool {
    TypeId::of::<FloatTensor<B>>() == TypeId::of::<TchTensor>()
}

/// LibTorch's tensor, if `tensor` is one.
fn inner<T: Any>(tensor: &T) -> Option<&TchTensor> {
    (tensor as &dyn Any).downcast_ref()
}

/// The same tensor in the type that it has.
fn outer<T: Any, U: Any>(tensor: T) -> Option<U> {
    let mut tensor = Some(tensor);
    (&mut tensor as &mut dyn Any)
        .downcast_mut::<Option<U>>()?
        .take()
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::ops::{FloatTensorOps, IntTensorOps};
    use burn_backend::{Backend, DType, FloatDType, TensorData, TensorMetadata};
    use burn_tch::LibTorch;

    use super::*;

    /// Values enough for LibTorch's vectorized loop, and a rest.
    const TIMES: usize = 19;

    fn tensor<B: Backend>(values: [f32; 4], dtype: FloatDType) -> B::FloatTensorPrimitive {
        let data = TensorData::new(values.repeat(TIMES), [TIMES, 4]);
        B::float_cast(B::float_from_data(data, &Default::default()), dtype)
    }

    #[test]
    fn nothing_passes_where_the_result_is_zero() {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let output = tensor::<LibTorch>([0.0, 0.0, 2.0, 3.0], dtype);
            let grad = tensor::<LibTorch>([f32::INFINITY, f32::NAN, -1.0, f32::INFINITY], dtype);
            let passed = relu_backward::<LibTorch>(&output, &grad).unwrap();
            let swapped = |x| LibTorch::<f32>::float_swap_dims(x, 0, 1);
            let again = relu_backward::<LibTorch>(&swapped(output), &swapped(grad)).unwrap();
            for grad in [passed, swapped(again)] {
                assert_eq!(grad.dtype(), DType::from(dtype));
                let data = LibTorch::<f32>::float_into_data(grad);
                let data = burn_backend::read_sync(data).unwrap();
                let values: Vec<_> = data.iter::<f32>().collect();
                assert_eq!(values, [0.0, 0.0, -1.0, f32::INFINITY].repeat(TIMES));
            }
        }
    }

    /// The product is no half number, and its sum with the bias is one.
    #[test]
    fn a_linear_layer_is_rounded_once() {
        for (dtype, [product, bias, sum]) in [
            (FloatDType::BF16, [257.0, 1.0, 258.0]),
            (FloatDType::F16, [2049.0, 1.0, 2050.0]),
        ] {
            let values = |values: Vec<f32>, shape: Vec<usize>| {
                let data = TensorData::new(values, shape);
                let tensor = LibTorch::<f32>::float_from_data(data, &Default::default());
                LibTorch::<f32>::float_cast(tensor, dtype)
            };
            // 257 = 256 + 1, and 2,049 = 2,048 + 1.
            let x = values([product - 1.0, 1.0].repeat(TIMES), vec![TIMES, 2]);
            let weight = values(vec![1.0; 6], vec![2, 3]);
            let bias = values(vec![bias; 3], vec![3]);
            let out = linear::<LibTorch>(&x, &weight, &bias).unwrap();
            let data = burn_backend::read_sync(LibTorch::<f32>::float_into_data(out)).unwrap();
            assert_eq!(data.iter::<f32>().collect::<Vec<_>>(), [sum; 3 * TIMES]);
        }
        let wide = || tensor::<LibTorch>([1.0; 4], FloatDType::F32);
        assert!(linear::<LibTorch>(&wide(), &wide(), &wide()).is_none());
    }

    /// A row whose rounded probabilities sum to more than 1, a row of zeros, and views.
    #[test]
    fn the_gradient_of_a_softmax_is_that_of_probabilities_that_sum_to_1() {
        let values = |rows: [[f32; 3]; 2]| {
            let data = TensorData::from(rows);
            LibTorch::<f32>::float_from_data(data, &Default::default())
        };
        let p = values([[0.5, 0.25, 0.375], [0.0; 3]]);
        let grad = values([[1.0, -2.0, 3.0], [5.0; 3]]);
        let q = [0.5f32, 0.25, 0.375].map(|p| p / 1.125);
        let mean: f32 = q.iter().zip([1.0, -2.0, 3.0]).map(|(q, g)| q * g).sum();
        let row = [0, 1, 2].map(|i| q[i] * ([1.0, -2.0, 3.0][i] - mean));
        let swapped = |x| LibTorch::<f32>::float_swap_dims(x, 0, 1);
        let read = |x| burn_backend::read_sync(LibTorch::<f32>::float_into_data(x)).unwrap();
        let is_close = |x| {
            let found = read(x).to_vec::<f32>().unwrap();
            let expected = [row, [0.0; 3]].concat();
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 4.0 * f32::EPSILON;
            assert!(
                found.iter().zip(&expected).all(near),
                "{found:?}, {expected:?}"
            );
        };
        // Both are held: neither may change.
        let shared = softmax_backward::<LibTorch>(p.clone(), grad.clone(), 1);
        is_close(shared);
        assert_eq!(
            read(p.clone()),
            TensorData::from([[0.5, 0.25, 0.375], [0.0f32; 3]])
        );
        assert_eq!(
            read(grad.clone()),
            TensorData::from([[1.0, -2.0, 3.0], [5.0f32; 3]])
        );
        let views = [swapped(p.clone()), swapped(grad.clone())];
        let [p_view, grad_view] = views;
        is_close(swapped(softmax_backward::<LibTorch>(p_view, grad_view, 0)));
        // Nothing else holds them: their memory is the result's.
        let own = |x| LibTorch::<f32>::float_mul_scalar(x, 1.0.into());
        is_close(softmax_backward::<LibTorch>(own(p), own(grad), 1));
        assert!(has_kernels::<LibTorch>() && !has_kernels::<Flex>());
    }

    #[test]
    fn zeros_and_ones_are_bytes_and_come_back() {
        for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F32] {
            let noise = tensor::<LibTorch>([0.0, 1.0, 1.0, 0.0], dtype);
            let bytes = into_bytes::<LibTorch>(&noise).unwrap();
            assert_eq!(bytes.dtype(), DType::I8);
            let floats = LibTorch::<f32>::int_into_float(bytes, dtype);
            let data = burn_backend::read_sync(LibTorch::<f32>::float_into_data(floats)).unwrap();
            let values: Vec<_> = data.iter::<f32>().collect();
            assert_eq!(values, [0.0, 1.0, 1.0, 0.0].repeat(TIMES));
        }
    }

    #[test]
    fn other_backends_and_mixed_dtypes_keep_burns_own() {
        let [a, b] =
            [FloatDType::F16, FloatDType::F32].map(|dtype| tensor::<LibTorch>([1.0; 4], dtype));
        assert!(relu_backward::<LibTorch>(&a, &b).is_none());
        let a = tensor::<Flex>([1.0; 4], FloatDType::F16);
        assert!(relu_backward::<Flex>(&a, &a).is_none());
        assert!(into_bytes::<Flex>(&a).is_none());
    }
}
