//! Whether all values of tensors are finite.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::Error;

/// Tests tensors for non-finite values, all tensors together.
#[derive(Default)]
pub(crate) struct FiniteCheck {
    checked: Vec<Checked>,
}

struct Checked {
    /// The sum of the tensor's values, in FP32.
    sum: Tensor<1>,
    /// Returns the sum of the tensor's non-finite values, in FP32. Zero if there are none.
    rest: Box<dyn FnOnce() -> Tensor<1> + Send>,
}

impl FiniteCheck {
    /// Adds a tensor, FP32 or wider, at the cost of its sum. Reads nothing back.
    pub fn add<const D: usize>(&mut self, tensor: Tensor<D>) {
        let device = self.device().unwrap_or_else(|| tensor.device());
        self.checked.push(Checked {
            sum: sum(tensor.clone(), &device),
            rest: Box::new(move || sum(non_finite(tensor), &device)),
        });
    }

    /// The device of the first tensor.
    pub fn device(&self) -> Option<Device> {
        self.checked.first().map(|first| first.sum.device())
    }

    /// For each added tensor, whether all its values are finite. One number is read back: the sum of all
    /// values. A finite sum proves that all values are finite, because an infinity or NaN makes every sum
    /// non-finite. A non-finite sum may also come from large finite values; a second read-back then decides
    /// by the values themselves.
    pub fn read(self) -> Result<Vec<bool>, Error> {
        let sums = self.checked.iter().map(|checked| checked.sum.clone());
        let Some(total) = sums.reduce(|a, b| a + b) else {
            return Ok(Vec::new());
        };
        if values(total)?.iter().all(|sum| sum.is_finite()) {
            return Ok(vec![true; self.checked.len()]);
        }
        let rests = self.checked.into_iter().map(|checked| (checked.rest)());
        let rests = values(Tensor::cat(rests.collect(), 0))?;
        Ok(rests.into_iter().map(|rest| rest == 0.0).collect())
    }
}

fn sum<const D: usize>(tensor: Tensor<D>, device: &Device) -> Tensor<1> {
    let sum = tensor.sum();
    let sum = match sum.dtype() {
        DType::F32 => sum,
        _ => sum.cast(FloatDType::F32),
    };
    sum.to_device(device)
}

/// A tensor's values that are not finite, with zeros in place of the finite values.
///
/// A value is finite if its magnitude is at most the dtype's largest. NaN fails this comparison, and
/// non-finite values never sum to zero. Compilers that assume finite values fold `x - x == 0`.
fn non_finite<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let largest = match tensor.dtype() {
        DType::F64 => f64::MAX,
        _ => f64::from(f32::MAX),
    };
    let finite = tensor.clone().abs().lower_equal_elem(largest);
    tensor.mask_fill(finite, 0.0)
}

fn values(tensor: Tensor<1>) -> Result<Vec<f32>, Error> {
    let data = tensor.try_into_data().map_err(Error::Read)?;
    Ok(data.iter::<f32>().collect())
}
