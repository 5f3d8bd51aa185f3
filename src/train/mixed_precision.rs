//! The pieces of mixed precision without a loop.

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{FloatDType, Tensor};
use burn_optim::{GradientsParams, LearningRate, Optimizer};

use super::ConvertFloat;
use crate::{
    AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, Transition, with_precision,
};

/// Mixed precision for a training framework of your own: a precision and a scaler, with what a loop
/// does with them. The shape of Lightning Fabric's precision plugin.
///
/// The precision holds where this type is asked to do something, whatever the device is configured
/// to; on a backend that is not an [`AmpAutodiff`](crate::AmpAutodiff) the model computes as ever,
/// and only the loss is scaled.
#[derive(Debug, Clone)]
pub struct MixedPrecision {
    precision: Precision,
    scaler: GradScaler,
}

impl MixedPrecision {
    /// From a precision string, as `"16-mixed"` or `"bf16"`, and a scaler. Without one, f16 and
    /// `auto` get a dynamic one of their own. No device is asked whether it can do the precision.
    ///
    /// # Errors
    ///
    /// - [`AmpError::UnknownPrecision`] when the string is no precision.
    /// - [`AmpError::LossScaleWithoutF16`] when a scaler is given with bf16 or FP32.
    pub fn new(precision: &str, scaler: Option<GradScaler>) -> Result<Self, AmpError> {
        Self::of(precision.parse()?, scaler)
    }

    /// As [`new`](MixedPrecision::new), from a [`Precision`].
    ///
    /// # Errors
    ///
    /// [`AmpError::LossScaleWithoutF16`] when a scaler is given with bf16 or FP32.
    pub fn of(precision: Precision, scaler: Option<GradScaler>) -> Result<Self, AmpError> {
        let may_scale = precision.scales_loss() || precision == Precision::Auto;
        let scaler = match (may_scale, scaler) {
            (true, scaler) => scaler.unwrap_or_default(),
            (false, Some(scaler)) if scaler.state().is_enabled() => {
                return Err(AmpError::LossScaleWithoutF16 { precision });
            }
            (false, _) => GradScaler::new(LossScaleConfig::Disabled)?,
        };
        Ok(Self { precision, scaler })
    }

    /// The precision as it was given, which may be [`Auto`](Precision::Auto).
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The scaler; disabled in bf16 and FP32.
    pub fn scaler(&self) -> &GradScaler {
        &self.scaler
    }

    /// An input as the model gets it: its float tensors in FP32, F64 too, which the policy takes
    /// from there.
    pub fn convert_input<T: ConvertFloat>(&self, input: T) -> T {
        input.convert_float(FloatDType::F32)
    }

    /// An output as the loop gets it: its float tensors in FP32, F64 too.
    pub fn convert_output<T: ConvertFloat>(&self, output: T) -> T {
        output.convert_float(FloatDType::F32)
    }

    /// Runs `f`, a forward pass and the loss, in the precision.
    ///
    /// # Panics
    ///
    /// As [`with_precision`], on a device that cannot do the precision.
    pub fn forward_context<T>(&self, f: impl FnOnce() -> T) -> T {
        with_precision(self.precision, f)
    }

    /// The backward pass of a loss that is scaled here, for a model's parameters, see
    /// [`GradScaler::backward`].
    ///
    /// # Panics
    ///
    /// Where [`GradScaler::backward`] does.
    pub fn backward<B: AutodiffBackend, M: AutodiffModule<B>, const D: usize>(
        &self,
        loss: Tensor<B, D>,
        model: &M,
    ) -> GradientsParams {
        self.forward_context(|| self.scaler.backward(loss, model))
    }

    /// The gradients without the scale, to look at or to clip, see [`GradScaler::unscale`].
    ///
    /// # Errors
    ///
    /// Those of [`GradScaler::unscale`], which also says when it panics.
    pub fn unscale<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<GradientsParams, AmpError> {
        self.forward_context(|| self.scaler.unscale::<B, M>(model, grads))
    }

    /// The optimizer's step, or the model as it was, and the scale for the next one. Says whether
    /// the step was taken. See [`GradScaler::step`] and [`GradScaler::update`].
    ///
    /// # Errors
    ///
    /// Those of [`GradScaler::step`], which also says when it panics.
    pub fn optimizer_step<B, M, O>(
        &self,
        optimizer: &mut O,
        lr: LearningRate,
        model: M,
        grads: GradientsParams,
    ) -> Result<(M, bool), AmpError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let (model, stepped, _) = self.step_and_update(optimizer, lr, model, grads)?;
        Ok((model, stepped))
    }

    pub(super) fn step_and_update<B, M, O>(
        &self,
        optimizer: &mut O,
        lr: LearningRate,
        model: M,
        grads: GradientsParams,
    ) -> Result<(M, bool, Transition), AmpError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        self.forward_context(|| {
            let (model, stepped) = self.scaler.step(optimizer, lr, model, grads)?;
            Ok((model, stepped, self.scaler.update()?))
        })
    }

    /// The scaler's state, to be saved.
    pub fn state(&self) -> LossScaler {
        self.scaler.state()
    }

    /// Goes on from a state that was saved, its settings included. A state of bf16 or FP32, where
    /// nothing is scaled, is none for f16, nor the other way round: the scaler then stays fresh,
    /// and the log says so.
    pub fn load_state(&self, state: LossScaler) {
        if state.is_enabled() == self.scaler.state().is_enabled() {
            self.scaler.load_state(state);
        } else {
            log::warn!(
                "burn-amp: the loss scaler that was saved is {}, and {} needs one that is not: it starts anew",
                if state.is_enabled() {
                    "enabled"
                } else {
                    "disabled"
                },
                self.precision
            );
            self.scaler.reset();
        }
    }
}
