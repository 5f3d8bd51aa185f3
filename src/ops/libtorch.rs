//! What LibTorch has and `burn-tch` 0.21 does not use.

use std::any::Any;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_tch::TchTensor;

/// The gradient of a ReLU from its result, by `at::threshold_backward`, if `B` computes on LibTorch's
/// tensors and both have one dtype. Burn's own way compares and calls `masked_fill`, which LibTorch runs value
/// by value on a CPU.
pub(super) fn relu_backward<B: Backend>(
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

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_backend::{Backend, DType, FloatDType, TensorData, TensorMetadata};
    use burn_tch::LibTorch;

    use super::relu_backward;

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
    fn other_backends_and_mixed_dtypes_keep_burns_own() {
        let [a, b] =
            [FloatDType::F16, FloatDType::F32].map(|dtype| tensor::<LibTorch>([1.0; 4], dtype));
        assert!(relu_backward::<LibTorch>(&a, &b).is_none());
        let a = tensor::<Flex>([1.0; 4], FloatDType::F16);
        assert!(relu_backward::<Flex>(&a, &a).is_none());
    }
}
