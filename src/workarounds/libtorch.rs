//! What LibTorch has and `burn-tch` does not use, or uses wrongly.

#[cfg(feature = "tch")]
use std::any::Any;
use std::any::type_name;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Shape, TensorMetadata};
#[cfg(feature = "tch")]
use burn_tch::TchTensor;

/// Whether `B` computes on LibTorch's tensors. `burn-tch` is a dependency only with the feature `tch`.
fn computes<B: Backend>() -> bool {
    type_name::<FloatTensor<B>>() == "burn_tch::tensor::TchTensor"
}

/// A view with its dimensions in another order, by `permute`. `reorder` gets 0, 1, 2 ..
///
/// `burn-tch` 0.21 counts the result of `swap_dims` and `permute` as the only tensor in its memory (burn#5375). The
/// next operation may then write into this memory, and change a tensor that the tape keeps. Windows are counted
/// correctly, and a window of a whole dimension moves this dimension to the end.
///
/// Until: Burn 0.22.
pub(crate) fn permuted<B: Backend>(
    tensor: FloatTensor<B>,
    reorder: impl FnOnce(&mut [usize]),
    permute: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if !computes::<B>() {
        return permute(tensor);
    }
    let mut axes: Vec<_> = (0..tensor.rank()).collect();
    reorder(&mut axes);
    let shape = tensor.shape();
    let windows = axes.iter().fold(tensor, |tensor, &axis| {
        B::float_unfold(tensor, axis, shape[axis], 1)
    });
    let permuted: Vec<_> = axes.iter().map(|&axis| shape[axis]).collect();
    B::float_reshape(windows, Shape::from(permuted))
}

/// The gradient of a ReLU from its result, by `at::threshold_backward`, if `B` computes on LibTorch's
/// tensors and both have one dtype. Burn's own way compares and calls `masked_fill`, which LibTorch runs value
/// by value on a CPU.
///
/// Until: `burn-tch` has a `relu_backward` of its own. 0.22.1 has none.
#[cfg(feature = "tch")]
pub(crate) fn relu_backward<B: Backend>(
    output: &FloatTensor<B>,
    grad: &FloatTensor<B>,
) -> Option<FloatTensor<B>> {
    let output = (output as &dyn Any).downcast_ref::<TchTensor>()?;
    let grad = (grad as &dyn Any).downcast_ref::<TchTensor>()?;
    if output.tensor.kind() != grad.tensor.kind() {
        return None;
    }
    let mut result = Some(TchTensor::new(
        output.tensor.threshold_backward(&grad.tensor, 0),
    ));
    (&mut result as &mut dyn Any)
        .downcast_mut::<Option<FloatTensor<B>>>()?
        .take()
}

#[cfg(all(test, feature = "tch"))]
mod tests {
    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
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

    #[test]
    fn a_permuted_view_is_counted() {
        assert!(computes::<LibTorch>() && !computes::<Flex>());
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        for (shape, axes) in [
            (vec![2, 3, 4], vec![1, 0, 2]),
            (vec![2, 3, 4], vec![2, 0, 1]),
            (vec![1, 4, 6], vec![0, 1, 2]),
            (vec![4, 6], vec![1, 0]),
            (vec![24], vec![0]),
        ] {
            let data = TensorData::new(values.clone(), shape);
            let tensor = LibTorch::<f32>::float_from_data(data, &Default::default());
            let read = |x| burn_backend::read_sync(LibTorch::<f32>::float_into_data(x)).unwrap();
            let expected = read(LibTorch::<f32>::float_permute(tensor.clone(), &axes));
            let reorder = |order: &mut [usize]| order.copy_from_slice(&axes);
            let view = permuted::<LibTorch>(tensor.clone(), reorder, |_| unreachable!());
            assert!(!view.can_mut());
            let scaled = LibTorch::<f32>::float_mul_scalar(view.clone(), 2.0.into());
            drop(scaled);
            assert_eq!(read(view), expected);
            assert_eq!(read(tensor).to_vec::<f32>().unwrap(), values);
        }
        let empty =
            LibTorch::<f32>::float_zeros([0, 3].into(), &Default::default(), FloatDType::F32);
        let swapped = permuted::<LibTorch>(empty, |axes| axes.swap(0, 1), |_| unreachable!());
        assert_eq!(swapped.shape(), [3, 0].into());
    }

    #[test]
    fn other_backends_and_mixed_dtypes_keep_burns_own() {
        let [a, b] =
            [FloatDType::F16, FloatDType::F32].map(|dtype| tensor::<LibTorch>([1.0; 4], dtype));
        assert!(relu_backward::<LibTorch>(&a, &b).is_none());
        let a = tensor::<Flex>([1.0; 4], FloatDType::F16);
        assert!(relu_backward::<Flex>(&a, &a).is_none());
    }
}
