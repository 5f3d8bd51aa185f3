//! A product with zeros and ones.

use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::tensor::{BoolTensor, IntTensor};
use burn_backend::{BoolDType, DTypeUsage};

use super::cast::operand_grad;
use super::tape::{TapeTensor, record_with};
use super::*;
use crate::call::{from_int, into_bytes, is_zero, mask_fill};
use crate::device::is_fused;

/// A product with zeros and ones, and its dtype.
#[derive(Debug, Clone)]
struct Dropout<B: Backend> {
    noise: Noise<B>,
    dtype: DType,
}

/// The zeros and ones of a dropout.
#[derive(Debug, Clone)]
enum Noise<B: Backend> {
    Bytes(IntTensor<B>),
    /// True where the noise is zero: without casts of bytes. The backward pass has zeros where a product could
    /// give NaN.
    Mask(BoolTensor<B>),
}

impl<B: Backend> Noise<B> {
    fn times(self, tensor: AmpTensor<B>) -> AmpTensor<B> {
        match self {
            Self::Bytes(bytes) => {
                let noise = from_int(bytes, tensor.dtype());
                mul(tensor, noise)
            }
            Self::Mask(mask) => mask_fill(tensor, mask, 0.into()),
        }
    }
}

/// Records a product with zeros and ones of the same shape, if the device has bytes.
pub(in crate::autodiff) fn record_dropout<B: Backend, C: CheckpointStrategy>(
    tensor: &TapeTensor<B>,
    noise: &TapeTensor<B>,
) -> Option<TapeTensor<B>> {
    let device = tensor.primitive.device();
    let bytes = B::dtype_usage(&device, DType::U8);
    let has_bytes = bytes.is_superset(DTypeUsage::Storage | DTypeUsage::Arithmetic);
    if !has_bytes || tensor.shape() != noise.shape() || !tensor.is_tracked() {
        return None;
    }
    let noise = noise.primitive.clone();
    // The product comes first: fusion joins the comparison to it, and not to the noise.
    let (noise, out) = if is_fused::<B>(&device) {
        let out = mul(tensor.primitive.clone(), noise.clone());
        (Noise::Mask(is_zero(noise, BoolDType::U8)), out)
    } else {
        let bytes = Noise::Bytes(into_bytes(noise.clone()));
        (bytes, mul(tensor.primitive.clone(), noise))
    };
    let dtype = out.dtype();
    let step = Dropout { noise, dtype };
    let keep = |_: &_, [operand]: Operands<B, 1>, _| (operand.dtype(), out);
    Some(record_with::<B, C, _, 1>(step, [tensor.clone()], keep))
}

impl<B: Backend> Step<B, 1> for Dropout<B> {
    /// The dtype of the operand.
    type Kept = DType;

    const CHECKPOINT: Checkpoint = Checkpoint::Kept;

    fn forward(&self, [tensor]: Operands<B, 1>) -> AmpTensor<B> {
        cast(self.noise.clone().times(tensor), self.dtype)
    }

    fn keep(&self, [tensor]: Operands<B, 1>, _: [bool; 1]) -> (Self::Kept, AmpTensor<B>) {
        (tensor.dtype(), self.forward([tensor]))
    }

    fn backward(self, ops: Ops<Self::Kept, 1>, grads: &mut Gradients) {
        unary::<Amp<B>, _>(ops.parents, ops.node, grads, |grad| {
            operand_grad(grad, ops.state, |grad| self.noise.times(grad))
        });
    }
}
