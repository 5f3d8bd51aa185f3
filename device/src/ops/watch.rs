//! Whether an operation turns finite operands into a non-finite result. Reads every tensor back.

use burn_amp_core::policy::{Class, Op, short};
use burn_amp_core::{Anomaly, AnomalyPass};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorMetadata, try_read_sync};

use crate::AmpTensor;
use crate::device::{Anomalies, DeviceState};

/// An operation under anomaly detection.
pub(super) struct Watch {
    op: &'static str,
    pass: AnomalyPass,
    /// The largest magnitude among the operands and the scalars.
    largest: f32,
    found: &'static Anomalies,
}

impl Watch {
    /// Begins an operation. `None` if its result does not matter: the operation only moves values, an operand
    /// is not finite, or the pass already has an anomaly.
    #[cold]
    pub(super) fn begin<B: Backend>(
        op: &Op,
        tensors: &[&AmpTensor<B>],
        scalars: &[f64],
        state: &'static DeviceState,
        is_gradient: bool,
    ) -> Option<Self> {
        let pass = if is_gradient || op.name.ends_with("_backward") {
            AnomalyPass::Backward
        } else {
            AnomalyPass::Forward
        };
        let found = state.anomalies();
        if !found.is_first(pass) || op.class() == Class::Move {
            return None;
        }
        let mut largest = 0f32;
        for tensor in tensors {
            largest = largest.max(magnitude::<B>(tensor.primitive.clone())?);
        }
        for scalar in scalars {
            largest = largest.max(scalar.abs() as f32);
        }
        // An infinite scalar is the user's own.
        let all_finite = scalars.iter().all(|scalar| scalar.is_finite());
        all_finite.then_some(Self {
            op: op.name,
            pass,
            largest,
            found,
        })
    }

    #[cold]
    pub(super) fn result<B: Backend>(&self, tensor: &FloatTensor<B>) {
        if self.found.is_first(self.pass) && magnitude::<B>(tensor.clone()).is_none() {
            self.found.add(Anomaly {
                op: short(self.op).into(),
                pass: self.pass,
                dtype: format!("{:?}", tensor.dtype()),
                shape: tensor.shape().to_vec(),
                largest_operand: self.largest,
                step: None,
                parameter: None,
                leaf: None,
            });
        }
    }
}

/// The largest magnitude, if all values are finite.
fn magnitude<B: Backend>(tensor: FloatTensor<B>) -> Option<f32> {
    let wide = match tensor.dtype() {
        DType::F16 | DType::BF16 => B::float_cast(tensor, FloatDType::F32),
        _ => tensor,
    };
    let read = |tensor| try_read_sync(B::float_into_data(tensor))?.ok();
    // A finite sum proves that all values are finite. A non-finite sum may also come from large values.
    let sum = read(B::float_sum(wide.clone()))?;
    if !sum.iter::<f32>().all(f32::is_finite) {
        let values = read(wide.clone())?;
        if !values.iter::<f32>().all(f32::is_finite) {
            return None;
        }
    }
    if wide.shape().num_elements() == 0 {
        return Some(0.0);
    }
    read(B::float_max_abs(wide))?.iter::<f32>().next()
}
