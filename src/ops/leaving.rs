//! Data that leaves the backend.

use burn_backend::{Backend, DType, TensorData, TensorMetadata};

use crate::AmpTensor;
use crate::device::DeviceState;
use crate::policy::is_half;
use crate::precision::half_wanted;
use crate::tensor::{Side, TensorFlags};

/// What a tensor's data has to be looked at for.
pub(super) struct Leaving<B: Backend> {
    demoted: bool,
    /// The device of a loss whose step nothing checks.
    unchecked_loss: Option<B::Device>,
}

impl<B: Backend> Leaving<B> {
    pub(super) fn of<S: Side<B>>(tensor: &AmpTensor<B, S>) -> Self {
        Self {
            demoted: tensor.is_demoted(),
            unchecked_loss: is_unchecked_loss(tensor).then(|| tensor.device()),
        }
    }

    /// The data as the user reads it: FP32 if the policy had made the tensor half.
    pub(super) fn read(self, data: TensorData) -> TensorData {
        let data = if self.demoted && is_half(data.dtype) {
            data.convert_dtype(DType::F32)
        } else {
            data
        };
        if let Some(device) = self.unchecked_loss
            && let Some(loss) = data.iter::<f64>().find(|value| !value.is_finite())
        {
            DeviceState::of::<B>(&device).report_lost::<B>(&device, loss);
        }
        data
    }
}

/// Whether a tensor is a loss that was not computed in f16: one number, with a gradient.
fn is_unchecked_loss<B: Backend, S: Side<B>>(tensor: &AmpTensor<B, S>) -> bool {
    half_wanted()
        && tensor.shape().num_elements() == 1
        && !tensor.flags().contains(TensorFlags::FROM_F16)
        && S::is_tracked(&tensor.primitive)
}
