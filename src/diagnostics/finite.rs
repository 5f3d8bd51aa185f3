//! Checks whether tensors are finite: any number of tensors, with one read-back if all are.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorMetadata, get_device_settings};

use crate::device::DeviceState;
use crate::tensor::at_least_f32;

/// Tests tensors for non-finite values, all tensors together.
pub(crate) struct FiniteCheck<B: Backend> {
    device: B::Device,
    /// The sum of each tensor's non-finite values, FP32 and `[1]`. Zero if there are none.
    rests: Vec<FloatTensor<B>>,
}

impl<B: Backend> FiniteCheck<B> {
    pub(crate) fn new(device: B::Device) -> Self {
        Self {
            device,
            rests: Vec::new(),
        }
    }

    /// Sums the non-finite values of a tensor, without reading anything back. With fusion the check
    /// is part of the kernel that made the tensor, plus a sum.
    ///
    /// A value is finite if its magnitude is at most the dtype's largest. NaN never is, and
    /// non-finite values never sum to zero. Compilers that assume finite values fold `x - x == 0`,
    /// and a maximum depends on the backend's order of NaN. Each backend must be tested for this.
    pub(crate) fn add(&mut self, tensor: FloatTensor<B>) {
        let bool_dtype = get_device_settings::<B>(&B::float_device(&tensor)).bool_dtype;
        let tensor = at_least_f32::<B>(tensor);
        let largest = match tensor.dtype() {
            DType::F64 => f64::MAX,
            _ => f64::from(f32::MAX),
        };
        let size = B::float_abs(tensor.clone());
        let finite = B::float_lower_equal_elem(size, largest.into(), bool_dtype);
        let rest = B::float_sum(B::float_mask_fill(tensor, finite, 0.into()));
        let rest = match rest.dtype() {
            DType::F32 => rest,
            _ => B::float_cast(rest, FloatDType::F32),
        };
        let rest = B::float_reshape(rest, Shape::new([1]));
        self.rests.push(B::float_to_device(rest, &self.device));
    }

    /// For each added tensor, whether all its values are finite. If all tensors are finite, one
    /// number is read back. Otherwise a second read-back tells which are not.
    pub(crate) fn read(self) -> Vec<bool> {
        let count = self.rests.len();
        let Some(all) = self.rests.iter().cloned().reduce(B::float_add) else {
            return Vec::new();
        };
        match self.zeros(all)[..] {
            // A single tensor needs no second read-back.
            [finite] if finite || count == 1 => vec![finite; count],
            _ => self.zeros(B::float_cat(self.rests.clone(), 0)),
        }
    }

    /// Which values are zero.
    fn zeros(&self, rests: FloatTensor<B>) -> Vec<bool> {
        DeviceState::of::<B>(&self.device).statistics().read_back();
        let data = burn_backend::read_sync(B::float_into_data(rests))
            .expect("reading the finite check of the gradients back from the device");
        data.iter::<f32>().map(|rest| rest == 0.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn_backend::TensorData;
    use burn_backend::ops::FloatTensorOps;

    use super::*;

    /// Checks tensors with these values, each in a dtype.
    fn finite(tensors: &[(&[f64], DType)]) -> Vec<bool> {
        let device = Default::default();
        let mut check = FiniteCheck::<Flex>::new(device);
        for (values, dtype) in tensors {
            let data = TensorData::new(values.to_vec(), [values.len()]);
            check.add(Flex::float_from_data(data.convert_dtype(*dtype), &device));
        }
        check.read()
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
