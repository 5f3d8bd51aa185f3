//! Whether tensors are finite: any number of them, in one read-back.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, Shape, TensorMetadata, get_device_settings};

use crate::tensor::at_least_f32;
use crate::traffic::Traffic;

/// Tests tensors for values that are not finite, all of them in one read-back.
pub(crate) struct FiniteCheck<B: Backend> {
    device: B::Device,
    counts: Vec<IntTensor<B>>,
    elements: Vec<i64>,
}

impl<B: Backend> FiniteCheck<B> {
    pub(crate) fn new(device: B::Device) -> Self {
        Self {
            device,
            counts: Vec::new(),
            elements: Vec::new(),
        }
    }

    /// How many tensors were added.
    #[cfg(feature = "train")]
    pub(crate) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Counts the finite values of a tensor, without reading anything back.
    ///
    /// A value counts if it compares as at most the dtype's largest, which NaN never does, and an
    /// integer sum cannot lose one. `x - x == 0` is what compilers fold that assume finite values,
    /// and a maximum depends on the backend's order of NaN; this each backend has to be tested for.
    pub(crate) fn add(&mut self, tensor: FloatTensor<B>) {
        let settings = get_device_settings::<B>(&B::float_device(&tensor));
        let tensor = at_least_f32::<B>(tensor);
        let largest = match tensor.dtype() {
            DType::F64 => f64::MAX,
            _ => f64::from(f32::MAX),
        };
        self.elements.push(tensor.shape().num_elements() as i64);
        let finite =
            B::float_lower_equal_elem(B::float_abs(tensor), largest.into(), settings.bool_dtype);
        let count = B::int_sum(B::bool_into_int(finite, settings.int_dtype));
        let count = B::int_reshape(count, Shape::new([1]));
        self.counts.push(B::int_to_device(count, &self.device));
    }

    /// For each tensor that was added, whether all its values are finite.
    pub(crate) fn read(self) -> Vec<bool> {
        if self.counts.is_empty() {
            return Vec::new();
        }
        Traffic::of::<B>(&self.device).read_back();
        let counts = B::int_cat(self.counts, 0);
        let data = burn_backend::read_sync(B::int_into_data(counts))
            .expect("reading the finite check of the gradients back from the device");
        data.iter::<i64>()
            .zip(self.elements)
            .map(|(finite, elements)| finite == elements)
            .collect()
    }
}
