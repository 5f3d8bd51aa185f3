//! Checks whether tensors are finite: any number of tensors, with one read-back if all are.

use std::marker::PhantomData;

use burn_backend::ops::TransactionPrimitive;
use burn_backend::tensor::FloatTensor;
use burn_backend::{
    Backend, DType, ExecutionError, FloatDType, Shape, TensorData, TensorMetadata,
    get_device_settings,
};

use crate::device::{self, DeviceState};
use crate::precision::in_kernel;
use crate::tensor::{Below, Side, at_least_f32, wide};

/// Tests tensors for non-finite values, all tensors together.
pub(crate) struct FiniteCheck<B: Backend, S = Below> {
    device: B::Device,
    /// Whether the backend joins additions into few kernels. A concatenation there is a kernel for each
    /// part.
    is_fused: bool,
    tensors: Vec<FloatTensor<B>>,
    side: PhantomData<S>,
}

impl<B: Backend, S: Side<B>> FiniteCheck<B, S> {
    pub(crate) fn new(device: B::Device) -> Self {
        Self {
            is_fused: device::is_fused::<B>(&device),
            device,
            tensors: Vec::new(),
            side: PhantomData,
        }
    }

    /// Adds a tensor. Reads nothing back.
    pub(crate) fn add(&mut self, tensor: FloatTensor<B>) {
        self.tensors.push(tensor);
    }

    /// For each added tensor, whether all its values are finite.
    ///
    /// A sum that contains an infinity or NaN is never finite, so a finite sum is proof. Any other sum
    /// may also come from large finite values: a second read-back then checks the values themselves.
    /// This must be tested on each backend.
    pub(crate) fn read(self) -> Vec<bool> {
        in_kernel(|| self.finite())
    }

    fn finite(mut self) -> Vec<bool> {
        if self.tensors.is_empty() {
            return Vec::new();
        }
        if self.is_fused && self.all_finite() {
            return vec![true; self.tensors.len()];
        }
        self.tensors = self.tensors.into_iter().map(at_least_f32::<B, S>).collect();
        let sums: Vec<_> = self.tensors.iter().map(|t| self.sum(t.clone())).collect();
        let mut finite: Vec<_> = self.values(&sums).map(f32::is_finite).collect();
        let suspects: Vec<_> = (0..finite.len()).filter(|i| !finite[*i]).collect();
        if !suspects.is_empty() {
            let rest = |i: &usize| self.sum(non_finite::<B>(self.tensors[*i].clone()));
            let rests: Vec<_> = suspects.iter().map(rest).collect();
            for (i, rest) in suspects.into_iter().zip(self.values(&rests)) {
                finite[i] = rest == 0.0;
            }
        }
        finite
    }

    /// Whether all values of all tensors are finite. Tensors of one shape are added up, in one kernel
    /// with the casts before, and then the rows of their sum. One read-back returns all results. The result
    /// is also false if a sum overflows although all values are finite: the caller then checks each tensor.
    fn all_finite(&self) -> bool {
        let mut groups: Vec<(_, Vec<FloatTensor<B>>)> = Vec::new();
        for tensor in &self.tensors {
            let tensor = tensor.clone();
            let kind = (
                tensor.shape(),
                wide(tensor.dtype()),
                B::float_device(&tensor),
            );
            match groups.iter_mut().find(|(of, _)| *of == kind) {
                Some((_, group)) => group.push(tensor),
                None => groups.push((kind, vec![tensor])),
            }
        }
        let sums = groups.into_iter().map(|((shape, _, device), group)| {
            let (elements, rows) = (shape.num_elements(), shape.first().copied().unwrap_or(1));
            let is_read = elements <= READ;
            let sum = match <[_; 1]>::try_from(group) {
                // Half values need no cast to be read.
                Ok([one]) if is_read => one,
                Ok([one]) => at_least_f32::<B, S>(one),
                Err(group) => {
                    let group = group.into_iter().map(at_least_f32::<B, S>);
                    group.reduce(B::float_add).expect("several tensors")
                }
            };
            let sum = if is_read {
                sum
            } else if rows <= ROWS && elements / rows <= READ {
                // Fusion joins the casts with a sum only if an operation follows the sum.
                B::float_mul_scalar(B::float_sum_dim(sum, 0), 1.into())
            } else {
                B::float_sum(sum)
            };
            if device == self.device {
                sum
            } else {
                B::float_to_device(sum, &self.device)
            }
        });
        let sums = TransactionPrimitive::new(sums.collect(), vec![], vec![], vec![]);
        let data = self.read_back(B::tr_execute(sums));
        let mut values = data.read_floats.iter().flat_map(TensorData::iter::<f64>);
        values.all(f64::is_finite)
    }

    fn sum(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        let sum = B::float_sum(tensor);
        let sum = match sum.dtype() {
            DType::F32 => sum,
            _ => B::float_cast(sum, FloatDType::F32),
        };
        let sum = B::float_reshape(sum, Shape::new([1]));
        B::float_to_device(sum, &self.device)
    }

    /// The values of tensors `[1]`, with one read-back.
    fn values(&self, tensors: &[FloatTensor<B>]) -> impl Iterator<Item = f32> + use<B, S> {
        let all = match tensors {
            [one] => one.clone(),
            _ => B::float_cat(tensors.to_vec(), 0),
        };
        let data = self.read_back(B::float_into_data(all));
        data.into_vec::<f32>().expect("sums in FP32").into_iter()
    }

    fn read_back<T>(&self, data: impl Future<Output = Result<T, ExecutionError>>) -> T {
        DeviceState::of::<B>(&self.device).statistics().read_back();
        burn_backend::read_sync(data)
            .expect("reading the finite check of the gradients back from the device")
    }
}

/// The most numbers that are read back for a shape.
const READ: usize = 8192;

/// The most rows that are added up by columns: one thread of a device adds a column.
const ROWS: usize = 512;

/// A tensor's values that are not finite; zeros in the place of the others.
///
/// A value is finite if its magnitude is at most the dtype's largest. NaN never is, and non-finite
/// values never sum to zero. Compilers that assume finite values fold `x - x == 0`, and a maximum
/// depends on the backend's order of NaN.
fn non_finite<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let bool_dtype = get_device_settings::<B>(&B::float_device(&tensor)).bool_dtype;
    let largest = match tensor.dtype() {
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let size = B::float_abs(tensor.clone());
    let finite = B::float_lower_equal_elem(size, largest.into(), bool_dtype);
    B::float_mask_fill(tensor, finite, 0.into())
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;

    use super::*;

    /// Checks tensors with these values, each in a dtype, as on a backend with fusion and on one
    /// without.
    fn finite(tensors: &[(&[f64], DType)]) -> Vec<bool> {
        let device = Default::default();
        let [fused, not_fused] = [true, false].map(|is_fused| {
            let mut check = FiniteCheck::<Flex>::new(device);
            check.is_fused = is_fused;
            for (values, dtype) in tensors {
                let data = TensorData::new(values.to_vec(), [values.len()]);
                check.add(Flex::float_from_data(data.convert_dtype(*dtype), &device));
            }
            check.read()
        });
        assert_eq!(fused, not_fused);
        fused
    }

    #[test]
    fn finite_sums_whose_sum_overflows_are_finite() {
        let most: &[f64] = &[f32::MAX.into()];
        assert_eq!(finite(&[(most, DType::F32); 3]), [true; 3]);
    }

    #[test]
    fn every_finite_value_is() {
        let tiny = f64::from(f32::from_bits(1));
        let values = [0.0, -0.0, tiny, -tiny, f32::MAX.into(), f32::MIN.into()];
        let wide = [f64::MAX, f64::MIN, f64::from_bits(1)];
        let half = [65504.0, -65504.0, 2f64.powi(-24)];
        let tensors: [(&[f64], DType); 4] = [
            (&values, DType::F32),
            (&wide, DType::F64),
            (&half, DType::F16),
            (&values, DType::BF16),
        ];
        // The largest f32 is above the largest bf16.
        assert_eq!(finite(&tensors), [true, true, true, false]);
        assert_eq!(finite(&tensors[..3]), [true; 3]);
        assert_eq!(finite(&[]), [false; 0]);
    }

    #[test]
    fn one_value_that_is_not_is_found_wherever_it_is() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for at in 0..5 {
                    let mut values = [1.0, -2.0, 0.0, 3.0, 4.0];
                    values[at] = bad;
                    let found = finite(&[(&[1.0], dtype), (&values, dtype), (&[0.0], dtype)]);
                    assert_eq!(found, [true, false, true], "{bad} at {at} in {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn one_value_of_a_large_tensor_is_found() {
        let device = Default::default();
        // Read back whole, after a sum of its rows, and as one sum.
        for shape in [[64, 128], [64, 256], [600, 128], [2, 10_000]] {
            for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
                let mut check = FiniteCheck::<Flex>::new(device);
                check.is_fused = true;
                for value in [1.0, bad, 1.0] {
                    let mut values = vec![1.0; shape[0] * shape[1]];
                    *values.last_mut().unwrap() = value;
                    let data = TensorData::new(values, shape).convert_dtype(DType::F32);
                    check.add(Flex::float_from_data(data, &device));
                }
                let expected = [true, bad.is_finite(), true];
                assert_eq!(check.read(), expected, "{bad} in {shape:?}");
            }
        }
    }

    #[test]
    fn values_that_are_not_do_not_cancel() {
        let (up, down): (&[f64], &[f64]) = (&[f64::INFINITY], &[f64::NEG_INFINITY]);
        let both = [f64::INFINITY, f64::NEG_INFINITY];
        let dtype = DType::F32;
        assert_eq!(finite(&[(&both, dtype)]), [false]);
        assert_eq!(
            finite(&[(up, dtype), (&[1.0], DType::F64), (down, dtype)]),
            [false, true, false]
        );
    }
}
