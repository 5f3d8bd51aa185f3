//! The scaler's methods that take a module. Most form the explicit protocol of PyTorch's `GradScaler`:
//! scale, unscale, step, update.

use burn_amp_core::{PendingStepRecord, Watched};
use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{DType, FloatDType, Tensor, TensorPrimitive};
use burn_optim::{GradientsParams, LearningRate, Optimizer};

use super::gradients::{self, Found};
use crate::autodiff::generic::{is_amp, set_scaled};
use crate::autodiff::replicas::{Replicas, agreed};
use crate::autodiff::scaled_loss;
use crate::device::DeviceContext;
use crate::diagnostics::anomaly;
use crate::policy::Mode;
use crate::precision::in_step;
use crate::scaler::{self, ScaledLoss};
use crate::{AmpError, GradScaler, LastStep, Precision, Transition, full_precision};

impl GradScaler {
    /// Scales a loss of any shape. Call `backward()` on the result, once per micro-batch. The
    /// result keeps the shape, device and dtype of the loss; on a plain `Autodiff`, a half-precision loss
    /// becomes FP32.
    ///
    /// On an `AmpAutodiff` the values of the loss do not change; the loss carries this scaler and its
    /// scale. `backward()` on this loss, or on a loss computed from it, applies the scale on any thread
    /// if f16 is involved, and leaves the rest to the protocol. Dropping a scaled loss does not affect
    /// other backward passes. The backward pass of a loss in f16, which ends at 65504, applies a scale of at most 32768.
    ///
    /// Then call [`step`](GradScaler::step), and not the optimizer itself: only
    /// [`step`](GradScaler::step) checks the gradients, and on a plain `Autodiff` they still carry
    /// the scale. The log warns once 1,000 losses were scaled without an
    /// [`update`](GradScaler::update). Where nothing is scaled (bf16, FP32 or a disabled scaler),
    /// the whole protocol does nothing and every step is taken, unless
    /// [`AmpConfig::with_finite_check`](crate::AmpConfig::with_finite_check) is on. The counterpart of PyTorch's
    /// `GradScaler.scale`.
    ///
    /// # Panics
    ///
    /// - On an `AmpAutodiff` with a checkpointing strategy that is not one of Burn's.
    /// - With every 1,000th loss of one step, where [`unscale`](GradScaler::unscale) panics.
    pub fn scale<B: AutodiffBackend, const D: usize>(&self, loss: Tensor<B, D>) -> Tensor<B, D> {
        let device = loss.device();
        if self.is_of_loop::<B>(&device) {
            return loss;
        }
        // One scale for the whole accumulation window, even if the scale is set within it.
        let (_, scale) = self.shared.count_loss();
        if self.shared.has_many_losses() {
            self.read_losses();
        }
        if is_amp::<B>() {
            let scaler = self.clone();
            let mut loss = loss.into_primitive().tensor();
            set_scaled::<B>(&mut loss, ScaledLoss { scaler, scale })
                .expect("an AmpAutodiff with one of Burn's checkpointing strategies");
            return Tensor::from_primitive(TensorPrimitive::Float(loss));
        }
        if !self.state().is_enabled() {
            return loss;
        }
        let value = loss.clone().inner().into_primitive().tensor();
        scaled_loss::add_loss::<B::InnerBackend>(self, &device, value, true);
        match loss.dtype() {
            DType::F16 | DType::BF16 => loss.cast(FloatDType::F32) * scale,
            _ => loss * scale,
        }
    }

    /// Runs the backward pass of a loss for a model's parameters:
    /// `GradientsParams::from_grads(scaler.scale(loss).backward(), model)`.
    ///
    /// If a scaled loss is not finite, the gradient with the fewest elements becomes NaN, even if all
    /// gradients are finite. So a receiver of the gradients detects the non-finite loss.
    ///
    /// ## Several peers
    ///
    /// Peers that reduce their gradients step or skip together on an `AmpAutodiff`. Each peer has
    /// its own thread, model and scaler:
    ///
    #[cfg_attr(not(doctest), doc = include_str!("peers.md"))]
    ///
    /// No peer is left waiting: an overflow still yields gradients, whereas a `loss.backward()`
    /// without a scaler yields none. A value that is not finite on one peer is not finite on any
    /// peer after the reduction, and [`step`](GradScaler::step) checks the reduced values.
    /// Therefore:
    ///
    /// - all peers must have the same precision and finite check;
    /// - [`unscale`](GradScaler::unscale), for example to clip, comes after the reduction: the step
    ///   uses its check;
    /// - `scale(loss).backward()` does not get the model, so it cannot report a non-finite loss to the
    ///   other peers.
    ///
    /// After a non-finite loss, its peer keeps the scale and the other peers back off. Different scales
    /// do no harm: on an `AmpAutodiff` the gradients are returned without the scale. On a plain
    /// `Autodiff` each peer's gradients carry its own scale and cannot be reduced like this.
    ///
    /// # Panics
    ///
    /// Where `loss.backward()` panics.
    pub fn backward<B: AutodiffBackend, M: AutodiffModule<B>, const D: usize>(
        &self,
        loss: Tensor<B, D>,
        model: &M,
    ) -> GradientsParams {
        let value = loss.clone().inner();
        let grads = GradientsParams::from_grads(self.scale(loss).backward(), model);
        if self.shared.pending().losses.checks.is_empty() {
            return grads;
        }
        // On the device: 1, or NaN for a non-finite loss. A large loss is finite in FP32.
        let factor = full_precision(|| (value * 0.0).sum() + 1.0);
        gradients::smallest_times::<B, M>(model, grads, factor)
    }

    /// Unscales the gradients, to inspect or clip them before [`step`](GradScaler::step). Without
    /// this call, [`step`](GradScaler::step) unscales them. As in PyTorch, call it only once all
    /// micro-batches are accumulated: on a plain `Autodiff` a gradient that is added afterwards still carries
    /// the scale. Gradients are divided in FP32 or wider,
    /// and each keeps its shape, dtype and device. Costs the step's one read-back, plus a second
    /// one after an overflow. The counterpart of PyTorch's `GradScaler.unscale_`.
    ///
    /// What [`step`](GradScaler::step) is given has to be what was unscaled, or its sum with the gradients of later
    /// backward passes: gradients of an earlier pass that are added afterwards are not checked.
    ///
    /// In the `TrainStep` of a `Learner` with `.to_fp16()` or `.with_amp(..)`, and one of Burn's strategies, this does nothing: the
    /// loop's scaler has unscaled and checked the gradients.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyUnscaled`] when `unscale` or `step` was already called for these
    ///   parameters since the last update, in every precision.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`AmpError::HalfParameter`] when a gradient on a plain `Autodiff` is in f16.
    ///
    /// After an error the gradients and the scaler are unchanged.
    ///
    /// # Panics
    ///
    /// When the check cannot be read back synchronously, as on WebAssembly.
    pub fn unscale<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
    ) -> Result<(), AmpError> {
        let found = gradients::found::<B, M>(model, grads);
        if self.is_of_loop::<B>(&found.device) {
            return Ok(());
        }
        let given = grads.len();
        self.shared
            .pending()
            .check_unscale(given, &found.parameters)?;
        self.check_dtypes::<B>("unscale", &found)?;
        self.unscale_found::<B, M>(model, grads, &found);
        self.shared.pending().unscale(&found.parameters);
        Ok(())
    }

    /// Whether a training loop scales the losses here and checks their gradients, as in the `TrainStep` of a `Learner`: with
    /// this scaler, or in the place of the device's.
    fn is_of_loop<B: AutodiffBackend>(&self, device: &B::Device) -> bool {
        let is_this = |other: Self| other.shared.is(&self.shared);
        let of_loop = scaler::of_loop().filter(|_| is_amp::<B>());
        of_loop.is_some_and(|of_loop| is_this(of_loop) || is_this(Self::of::<B>(device)))
    }

    /// Checks that no gradient in f16 carries the scale. PyTorch raises "Attempting to unscale FP16
    /// gradients".
    fn check_dtypes<B: AutodiffBackend>(
        &self,
        call: &'static str,
        found: &Found<B>,
    ) -> Result<(), AmpError> {
        let carries_scale = !is_amp::<B>() && self.state().is_enabled();
        match &found.f16 {
            Some(parameter) if carries_scale => Err(AmpError::HalfParameter {
                call,
                parameter: parameter.clone(),
                precision: Precision::F16,
            }),
            _ => Ok(()),
        }
    }

    /// Unscales the gradients and checks them. Those that were already unscaled keep their values; they are
    /// checked again if a loss was scaled since.
    fn unscale_found<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: &mut GradientsParams,
        found: &Found<B>,
    ) {
        let (to_check, replicas) = {
            let pending = self.shared.pending();
            let replicas = pending.losses.replicas.clone();
            (pending.to_check(&found.parameters), replicas)
        };
        let Some(to_check) = to_check else {
            return;
        };
        let (scale, scaled) = (to_check.scale, to_check.parameters());
        let factor = (!is_amp::<B>()).then(|| 1.0 / f64::from(scale));
        let mut check = scaled_loss::take_check::<B::InnerBackend>(self, &found.device);
        gradients::unscale(&to_check.left, grads, factor, &mut check);
        gradients::unscale(&to_check.again, grads, None, &mut check);
        let finite = check.read();
        // Also read the checks of losses on other backends.
        self.read_losses();
        let outcome = self.shared.pending().found(&scaled, &finite);
        let replicas = replicas.and_then(|replicas| replicas.downcast::<Replicas>().ok());
        let replicas = replicas.as_deref();
        let factor = Some(to_check.scale);
        let outcome = agreed::<B::InnerBackend>(
            replicas,
            &found.device,
            factor,
            outcome,
            &mut Watched::default(),
        );

        // Visit the module without holding the lock: the module's code may call this scaler.
        let is_watched = !self.shared.pending().watched.anomalies.is_empty();
        let nodes = is_watched.then(|| gradients::nodes::<B, M>(model));
        let nodes = nodes.unwrap_or_default();
        let mut pending = self.shared.pending();
        let anomalies = &mut pending.watched.anomalies;
        anomalies.iter_mut().for_each(|a| a.place(&nodes));
        pending.set_unscaled(&scaled, &finite, outcome);
    }

    /// Runs the optimizer step at learning rate `lr`, in FP32, if the losses and this model's
    /// gradients are finite. Otherwise the parameters and the optimizer stay unchanged; running statistics
    /// (batch norm) change in the forward pass, as in PyTorch. Returns the model,
    /// and whether the step was taken. The counterpart of PyTorch's `GradScaler.step`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyStepped`] when `step` was already called for these parameters since the
    ///   last update.
    /// - [`AmpError::ForeignGradients`] when gradients are not this model's, or there are none.
    /// - [`AmpError::HalfParameter`] when a gradient on a plain `Autodiff` is in f16.
    ///
    /// After an error the model is returned unchanged. The optimizer and the scaler are unchanged; the
    /// gradients are lost.
    ///
    /// # Panics
    ///
    /// Where the optimizer's step panics, or [`unscale`](GradScaler::unscale), if not called
    /// before.
    pub fn step<B, M, O>(
        &self,
        optimizer: &mut O,
        lr: LearningRate,
        model: M,
        mut grads: GradientsParams,
    ) -> (M, Result<bool, AmpError>)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let found = gradients::found::<B, M>(&model, &grads);
        let given = grads.len();
        let refused = self.shared.pending().check_step(given, &found.parameters);
        if let Err(error) = refused.and_then(|_| self.check_dtypes::<B>("step", &found)) {
            return (model, Err(error));
        }
        self.unscale_found::<B, M>(&model, &mut grads, &found);
        let taken = self.shared.pending().step(&found.parameters);
        if !taken {
            return (model, Ok(false));
        }
        // Gradients from a record are no longer marked as gradients: an optimizer that multiplies
        // matrices would do so in half precision.
        let model = in_step(|| optimizer.step(lr, model, grads));
        (model, Ok(true))
    }

    /// Ends the step. The scale grows, stays or backs off according to all steps since the last
    /// update. The next loss may then be scaled. The counterpart of PyTorch's `GradScaler.update`.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingStepped`] when there was no [`step`](GradScaler::step) since the last
    /// update.
    pub fn update(&self) -> Result<Transition, AmpError> {
        self.shared.update()
    }

    /// The last step, with its parameters named after the trained module; `None` before the first step.
    /// Call `explain` before the module takes its next step. It is for training loops on `AmpAutodiff`
    /// that call `backward()` themselves. The explicit protocol, a trainer and a `Learner`'s
    /// [`AmpTraining`](crate::AmpTraining) already name the parameters.
    ///
    /// ```
    /// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
    /// # use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};
    /// # type B = AmpAutodiff<Flex>;
    /// # let device = Default::default();
    /// # let scaler = GradScaler::new(LossScaleConfig::default())?;
    /// # let model = LinearConfig::new(4, 2).init::<B>(&device);
    /// # let input = Tensor::<B, 2>::ones([8, 4], &device) * 1e30;
    /// # let grads = with_precision(Precision::F16, || scaler.scope(|| {
    /// let grads = model.forward(input).mean().backward();
    /// # grads }));
    /// # assert!(model.weight.grad(&grads).is_none());
    /// if let Some(step) = scaler.explain(&model).filter(|step| !step.stepped()) {
    ///     println!("not finite: {}", step.parameters.join(", "));
    ///     # assert!(step.parameters.contains(&"weight".to_string()));
    /// }
    /// # Ok::<(), burn_amp::AmpError>(())
    /// ```
    pub fn explain<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> Option<LastStep> {
        self.shared.explained(&gradients::nodes::<B, M>(module))
    }

    /// Reads back the checks of the losses, and frees them.
    fn read_losses(&self) {
        let losses = std::mem::take(&mut self.shared.pending().losses.checks);
        let finite: Vec<_> = losses.into_iter().map(|check| check.read()).collect();
        let are_finite = !finite.contains(&false);
        self.shared.pending().set_losses(are_finite);
    }

    /// The part of a pending step that a record must keep.
    pub(crate) fn pending_record(&self) -> PendingStepRecord {
        self.read_losses();
        self.shared.pending().record()
    }

    /// Discards the step under way: all losses since the last update, also those of earlier micro-batches, whose
    /// gradients the loop then drops, too. For a loop that leaves out a batch after its backward pass: otherwise
    /// the loss belongs to the next step, which is skipped if the loss is not finite. Call it after `backward()`,
    /// and not between [`step`](GradScaler::step) and [`update`](GradScaler::update). The scale and the counts
    /// stay. PyTorch checks no losses, and needs no such call.
    pub fn discard_step(&self) {
        anomaly::take();
        *self.shared.pending() = Default::default();
    }

    /// Continues a step that was pending when it was recorded.
    pub(crate) fn resume<B: AutodiffBackend>(&self, record: PendingStepRecord) {
        let carried = !is_amp::<B>();
        let mut pending = self.shared.pending();
        pending.resume(record, &self.state(), carried);
    }

    /// The factor on the gradients of the pending step: 1 on an `AmpAutodiff`, which returns gradients
    /// without the scale.
    pub(crate) fn carried_scale<B: AutodiffBackend>(&self) -> f32 {
        let scale = self.shared.pending().scale_given();
        scale.filter(|_| !is_amp::<B>()).unwrap_or(1.0)
    }

    /// The factor on the next loss on this device: that of the step under way, if there is one. 1 where
    /// nothing is scaled.
    pub(crate) fn scale_at<B: AutodiffBackend>(&self, at: &B::Device) -> f32 {
        let (given, scaler) = (self.shared.pending().scale_given(), self.state());
        let is_f16 = || DeviceContext::of::<B>(at).mode == Mode::On(DType::F16);
        if scaler.is_enabled() && (!is_amp::<B>() || is_f16()) {
            given.unwrap_or(scaler.scale())
        } else {
            1.0
        }
    }
}
