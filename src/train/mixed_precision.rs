//! The pieces of mixed precision without a loop.

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{FloatDType, Tensor};
use burn_optim::{GradientsParams, LearningRate, Optimizer};

use super::ConvertFloat;
use crate::{AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, with_precision};

/// Mixed precision for your own training framework: a precision, a scaler, and the operations a
/// loop needs. Shaped like Lightning Fabric's precision plugin.
///
/// The precision applies inside the methods of this type, whatever the device's configuration. On a
/// backend that is not an [`AmpAutodiff`](crate::AmpAutodiff), the model computes as usual, and
/// only the loss is scaled.
#[derive(Debug, Clone)]
pub struct MixedPrecision {
    precision: Precision,
    scaler: GradScaler,
}

/// Runs `f` in a precision. `Auto` leaves the precision in force as it is: a region in it would set
/// aside the user's `AmpConfig`.
pub(super) fn in_precision<T>(precision: Precision, f: impl FnOnce() -> T) -> T {
    match precision {
        Precision::Auto => f(),
        precision => with_precision(precision, f),
    }
}

/// Whether a loss is scaled in a precision, as far as it is known before the device is.
pub(super) fn may_scale(precision: Precision) -> bool {
    precision.scales_loss() || precision == Precision::Auto
}

impl MixedPrecision {
    /// Combines a precision and a scaler. `"16-mixed".parse()?` parses a precision. Without a scaler,
    /// f16 and `Auto` get a new dynamic scaler. Does not check whether a device supports the precision.
    ///
    /// # Errors
    ///
    /// [`AmpError::LossScaleWithoutF16`] when a scaler is given with bf16 or FP32.
    pub fn new(precision: Precision, scaler: Option<GradScaler>) -> Result<Self, AmpError> {
        let scaler = match (may_scale(precision), scaler) {
            (true, scaler) => scaler.unwrap_or_default(),
            (false, Some(scaler)) if scaler.state().is_enabled() => {
                return Err(AmpError::LossScaleWithoutF16 { precision });
            }
            (false, _) => GradScaler::new(LossScaleConfig::Disabled)?,
        };
        Ok(Self { precision, scaler })
    }

    /// The given precision, possibly [`Auto`](Precision::Auto).
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The scaler; disabled in bf16 and FP32.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// Casts a model input's float tensors to FP32, even from F64. The policy casts further from
    /// FP32.
    pub fn convert_input<T: ConvertFloat>(&self, input: T) -> T {
        input.convert_float(FloatDType::F32)
    }

    /// Casts a model output's float tensors to FP32, even from F64.
    pub fn convert_output<T: ConvertFloat>(&self, output: T) -> T {
        output.convert_float(FloatDType::F32)
    }

    /// Runs `f`, the forward pass and the loss, in this precision. `Auto` leaves the precision in force as
    /// it is: that of the device's [`AmpConfig`](crate::AmpConfig), or what the hardware does best.
    ///
    /// # Panics
    ///
    /// Where [`with_precision`] panics, on a device that does not support the precision.
    pub fn forward_context<T>(&self, f: impl FnOnce() -> T) -> T {
        in_precision(self.precision, f)
    }

    /// Scales a loss and runs its backward pass for a model's parameters; see
    /// [`GradScaler::backward`].
    ///
    /// # Panics
    ///
    /// Where [`GradScaler::backward`] panics.
    pub fn backward<B: AutodiffBackend, M: AutodiffModule<B>, const D: usize>(
        &self,
        loss: Tensor<B, D>,
        model: &M,
    ) -> GradientsParams {
        self.forward_context(|| self.scaler.backward(loss, model))
    }

    /// Unscales the gradients, to inspect or clip them; see [`GradScaler::unscale`].
    ///
    /// # Errors
    ///
    /// Those of [`GradScaler::unscale`], which also documents its panics.
    pub fn unscale<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), AmpError> {
        self.forward_context(|| self.scaler.unscale::<B, M>(model, grads))
    }

    /// Takes or skips the optimizer step, then updates the scale. Returns the model, unchanged if
    /// skipped or after an error, and whether the step was taken. See [`GradScaler::step`] and
    /// [`GradScaler::update`].
    ///
    /// # Errors
    ///
    /// Those of [`GradScaler::step`], which also documents its panics.
    pub fn optimizer_step<B, M, O>(
        &self,
        optimizer: &mut O,
        lr: LearningRate,
        model: M,
        grads: GradientsParams,
    ) -> (M, Result<bool, AmpError>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        self.forward_context(|| {
            let (model, stepped) = self.scaler.step(optimizer, lr, model, grads);
            let updated = stepped.and_then(|stepped| self.scaler.update().map(|_| stepped));
            (model, updated)
        })
    }

    /// The scaler's state, to save.
    pub fn state(&self) -> LossScaler {
        self.scaler.state()
    }

    /// Continues from a saved state, including its settings. A state saved in bf16 or FP32, where
    /// nothing is scaled, does not fit f16, and a state saved in f16 does not fit bf16 or FP32. The
    /// scaler then starts over, and the log has a line about it.
    pub fn load_state(&self, state: LossScaler) {
        self.scaler.shared.resume_state(state);
    }
}
