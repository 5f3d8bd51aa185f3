//! The explicit protocol: scale, unscale, step, update, as PyTorch's `GradScaler` has it.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_core::module::{AutodiffModule, ParamId};
use burn_core::record::{PrecisionSettings, Record};
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_optim::{GradientsParams, LearningRate, Optimizer};
use serde::{Deserialize, Serialize};

use super::handle::NonFinite;
use super::{GradScaler, LossScaler, Outcome, Transition};
use crate::autodiff::replicas::{Replicas, Vote, agreed};
use crate::finite::FiniteCheck;
use crate::policy::Mode;
use crate::train::{explain, gradients};
use crate::{AmpError, Anomaly, anomaly, device, full_precision};

/// What the protocol remembers from one `update` to the next.
#[derive(Default)]
pub(super) struct Window {
    /// Losses given to `scale`, of however many micro-batches.
    losses_given: u32,
    /// What those were scaled by that were to be scaled: where the step is then taken, its
    /// gradients are checked.
    scale: Option<f32>,
    /// The finite check of these losses, of the backend they were on, until it is read.
    losses: Option<Box<dyn Any + Send>>,
    /// Whether one of the losses was not finite, as far as that was read.
    non_finite_loss: bool,
    /// The parameters whose gradients are unscaled.
    unscaled: HashMap<ParamId, Unscaled>,
    /// Whether a gradient was not finite, here or on a replica.
    overflow: bool,
    /// Their paths, with whether those here are finite.
    gradients: Vec<(String, bool)>,
    /// What was found on the way to them.
    anomalies: Vec<Anomaly>,
    /// Steps taken or skipped.
    steps: u32,
    /// Those that gradients were reduced with, and decide together.
    replicas: Option<Arc<Replicas>>,
}

struct Unscaled {
    finite: bool,
    stepped: bool,
}

/// The part of a [`Window`] that outlives its process: the losses given, and what is known of them.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Begun {
    losses_given: u32,
    scale: Option<f32>,
    non_finite_loss: bool,
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("losses_given", &self.losses_given)
            .field("scale", &self.scale)
            .field("unscaled", &self.unscaled.len())
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl GradScaler {
    /// The loss to call `backward()` on, once for each micro-batch: times the scale, in its shape,
    /// which may be any, on its device, and in its dtype, or in FP32 where it is half.
    ///
    /// On an `AmpAutodiff` the loss comes back as it is: its `backward()`, the next one on this
    /// thread that no other scaled loss waits for, scales it by this scaler if there is f16 in it,
    /// and leaves the rest to the protocol. Where nothing is to be scaled (bf16 or FP32, or a
    /// disabled scaler) this, like the whole protocol, does nothing and every step is taken. The
    /// counterpart of PyTorch's `GradScaler.scale`.
    pub fn scale<B: AutodiffBackend, const D: usize>(&self, loss: Tensor<B, D>) -> Tensor<B, D> {
        let device = loss.device();
        self.shared().window.losses_given += 1;
        if is_amp::<B>(&device) {
            self.waits_for_backward();
            return loss;
        }
        if !self.state().is_enabled() {
            return loss;
        }
        let value = loss.clone().inner().into_primitive().tensor();
        let scale = self.scales::<B::InnerBackend>(&device, value);
        match loss.dtype() {
            DType::F16 | DType::BF16 => loss.cast(FloatDType::F32) * scale,
            _ => loss * scale,
        }
    }

    /// What a loss that is now to be scaled is scaled by; whether it is finite is found out later.
    /// One scale for the whole window, also if another is set in the middle of it.
    pub(crate) fn scales<I: Backend>(&self, device: &I::Device, loss: FloatTensor<I>) -> f32 {
        let (scale, losses) = {
            let shared = &mut *self.shared();
            let scale = *shared.window.scale.get_or_insert(shared.scaler.scale());
            (scale, shared.window.losses.take())
        };
        let mut losses = check_of::<I>(losses, device);
        losses.add(loss);
        self.shared().window.losses = Some(Box::new(losses));
        scale
    }

    /// The pass of a loss whose gradients may have been reduced with those of replicas. They wait
    /// for each other here, and decide together on the step.
    pub(crate) fn gathers(&self, replicas: Option<Arc<Replicas>>, scale: f32) {
        if let Some(replicas) = &replicas {
            replicas.agree(Vote::scaled(Some(scale)));
        }
        let window = &mut self.shared().window;
        window.replicas = replicas.or(window.replicas.take());
        window.anomalies.extend(anomaly::take());
    }

    /// The backward pass of a loss, for a model's parameters:
    /// `GradientsParams::from_grads(scaler.scale(loss).backward(), model)`.
    ///
    /// Where the loss is scaled and is not finite, the gradient with the fewest elements is NaN,
    /// also if the gradients are finite by themselves: so they tell it to whom they are given.
    ///
    /// ## Several peers
    ///
    /// Peers that reduce their gradients, a thread, a model and a scaler each, step or skip
    /// together on an `AmpAutodiff`:
    ///
    /// ```no_run
    /// # use burn::{backend::Flex, module::AutodiffModule, optim::Optimizer, tensor::Tensor};
    /// # use burn_amp::{Amp, AmpAutodiff, AmpError, GradScaler};
    /// # use burn_collective::{PeerId, ReduceOperation};
    /// # type B = Flex;
    /// # fn step<M: AutodiffModule<AmpAutodiff<B>>>(
    /// #     (peer, scaler, lr): (PeerId, GradScaler, f64),
    /// #     mut optimizer: impl Optimizer<M, AmpAutodiff<B>>,
    /// #     model: M,
    /// #     loss: Tensor<AmpAutodiff<B>, 1>,
    /// # ) -> Result<(M, bool), AmpError> {
    /// let grads = scaler.backward(loss, &model);
    /// let grads = grads.all_reduce::<Amp<B>>(peer, ReduceOperation::Mean).unwrap();
    /// let (model, stepped) = scaler.step(&mut optimizer, lr, model, grads)?;
    /// scaler.update()?;
    /// # Ok((model, stepped))
    /// # }
    /// ```
    ///
    /// No peer is left waiting: the gradients of an overflow are there, whereas a `loss.backward()`
    /// without a scaler leaves none. And what is not finite on one peer is not finite on any after
    /// the reduction, which is what [`step`](GradScaler::step) checks. So
    ///
    /// - all peers have the same precision: where nothing is scaled, nothing is checked;
    /// - [`unscale`](GradScaler::unscale), as for clipping, comes after the reduction: its check
    ///   is the step's;
    /// - `scale(loss).backward()`, which does not know the model, does not tell the other peers of
    ///   a loss that is not finite.
    ///
    /// Such a loss keeps its peer's scale, and the others back off. That the scales then differ
    /// does no harm: on an `AmpAutodiff` gradients come without the scale. On a plain `Autodiff`
    /// they carry each its peer's, and cannot be reduced like this.
    ///
    /// # Panics
    ///
    /// As `loss.backward()`.
    pub fn backward<B: AutodiffBackend, M: AutodiffModule<B>, const D: usize>(
        &self,
        loss: Tensor<B, D>,
        model: &M,
    ) -> GradientsParams {
        struct Done<'a>(&'a GradScaler);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.waits_no_longer();
            }
        }
        let _done = Done(self);
        let value = loss.clone().inner();
        let grads = GradientsParams::from_grads(self.scale(loss).backward(), model);
        if self.shared().window.losses.is_none() {
            return grads;
        }
        // On the device, 1 or, for a loss that is not finite, NaN. A large one is finite in FP32.
        let factor = full_precision(|| (value * 0.0).sum() + 1.0);
        gradients::smallest_times::<B, M>(model, grads, factor)
    }

    /// The gradients without the scale, to look at or to clip before [`step`](GradScaler::step);
    /// [`step`](GradScaler::step) does it where it was not done. They are divided in FP32 or wider,
    /// and each keeps its shape, dtype and device. Costs the one read-back of the step, and after
    /// an overflow a second one. The counterpart of PyTorch's `GradScaler.unscale_`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyUnscaled`] when it was called for these parameters since the last
    ///   update.
    /// - [`AmpError::ForeignGradients`] when gradients are not of this model, or there are none.
    ///
    /// The gradients are then gone, and the scaler is as it was.
    ///
    /// # Panics
    ///
    /// When the check cannot be read back synchronously, as on WebAssembly.
    pub fn unscale<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: GradientsParams,
    ) -> Result<GradientsParams, AmpError> {
        let found = self.checked::<B, M>("unscale", model, &grads)?;
        if let Some(parameter) = self.first(&found, |_| true) {
            return Err(AmpError::AlreadyUnscaled { parameter });
        }
        Ok(self.unscaled::<B, M>(model, grads, &found))
    }

    /// The gradients without the scale, those included that were unscaled before.
    fn unscaled<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        model: &M,
        grads: GradientsParams,
        found: &gradients::Found<B>,
    ) -> GradientsParams {
        let (scale, losses, scaled, replicas) = {
            let window = &mut self.shared().window;
            let Some(scale) = window.scale else {
                return grads;
            };
            let scaled: Vec<_> = found
                .parameters
                .iter()
                .filter(|(id, _)| !window.unscaled.contains_key(id))
                .collect();
            if scaled.is_empty() {
                return grads;
            }
            let replicas = window.replicas.clone();
            (scale, window.losses.take(), scaled, replicas)
        };
        let factor = match is_amp::<B>(&found.device) {
            true => None,
            false => Some(1.0 / f64::from(scale)),
        };
        let mut check = check_of::<B::InnerBackend>(losses, &found.device);
        let losses = check.len();
        let ids: HashSet<_> = scaled.iter().map(|(id, _)| *id).collect();
        let is_scaled = |id| ids.contains(&id);
        let grads = gradients::unscaled::<B, M>(model, grads, is_scaled, factor, &mut check);
        let finite = check.read();
        let (losses, gradients) = finite.split_at(losses);
        let all = |finite: &[bool]| finite.iter().all(|finite| *finite);
        let vote = Vote {
            scale: Some(scale),
            loss_is_finite: all(losses),
            gradients_are_finite: all(gradients),
        };
        let agreed = agreed(replicas.as_deref(), vote);

        let window = &mut self.shared().window;
        if !window.anomalies.is_empty() {
            let nodes = explain::nodes::<B, M>(model);
            window.anomalies.iter_mut().for_each(|a| a.place(&nodes));
        }
        window.non_finite_loss |= !agreed.loss_is_finite;
        window.overflow |= !agreed.gradients_are_finite;
        // Elsewhere, if not here.
        let elsewhere = vote.gradients_are_finite && !agreed.gradients_are_finite;
        for ((id, path), finite) in scaled.into_iter().zip(gradients) {
            window.gradients.push((path.clone(), *finite));
            let (finite, stepped) = (*finite && !elsewhere, false);
            window.unscaled.insert(*id, Unscaled { finite, stepped });
        }
        grads
    }

    /// The optimizer's step at the learning rate `lr`, in FP32, if the losses and this model's
    /// gradients are finite; else the model comes back as it was, and the optimizer is untouched.
    /// Says whether the step was taken. The counterpart of PyTorch's `GradScaler.step`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::NothingScaled`] when no loss was scaled since the last update.
    /// - [`AmpError::AlreadyStepped`] when it was called for these parameters since the last
    ///   update.
    /// - [`AmpError::ForeignGradients`] when gradients are not of this model, or there are none.
    ///
    /// Model and gradients are then gone; the optimizer and the scaler are as they were.
    ///
    /// # Panics
    ///
    /// As the optimizer's step, and as [`unscale`](GradScaler::unscale) where that was not done.
    pub fn step<B, M, O>(
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
        let found = self.checked::<B, M>("step", &model, &grads)?;
        if let Some(parameter) = self.first(&found, |unscaled| unscaled.stepped) {
            return Err(AmpError::AlreadyStepped { parameter });
        }
        let grads = self.unscaled::<B, M>(&model, grads, &found);
        let finite = {
            let window = &mut self.shared().window;
            window.steps += 1;
            let mut finite = !window.non_finite_loss;
            for (id, _) in &found.parameters {
                if let Some(unscaled) = window.unscaled.get_mut(id) {
                    unscaled.stepped = true;
                    finite &= unscaled.finite;
                }
            }
            finite
        };
        match finite {
            // Gradients from a record no longer say that they are gradients: an optimizer that
            // multiplies matrices would do so in half.
            true => Ok((full_precision(|| optimizer.step(lr, model, grads)), true)),
            false => Ok((model, false)),
        }
    }

    /// Ends the step: the scale grows, stays or backs off by what all of the steps since the last
    /// update found, and the next loss may be scaled. The counterpart of PyTorch's
    /// `GradScaler.update`.
    ///
    /// # Errors
    ///
    /// [`AmpError::NothingStepped`] when there was no [`step`](GradScaler::step) since the last
    /// update.
    pub fn update(&self) -> Result<Transition, AmpError> {
        let window = {
            let mut shared = self.shared();
            if shared.window.steps == 0 {
                return Err(AmpError::NothingStepped);
            }
            std::mem::take(&mut shared.window)
        };
        self.waits_no_longer();
        // Nothing was checked where nothing was scaled.
        if window.unscaled.is_empty() {
            return Ok(Transition::Kept);
        }
        let outcome = Outcome::of(!window.non_finite_loss, !window.overflow);
        let overflowed = window.gradients.iter().filter(|(_, finite)| !finite);
        let found = NonFinite {
            gradients: overflowed.count(),
            parameters: window.gradients,
            anomalies: window.anomalies,
            ..NonFinite::default()
        };
        Ok(self.record(outcome, found))
    }

    /// The model's parameters that have a gradient, if all gradients are theirs.
    fn checked<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        call: &'static str,
        model: &M,
        grads: &GradientsParams,
    ) -> Result<gradients::Found<B>, AmpError> {
        if self.shared().window.losses_given == 0 {
            return Err(AmpError::NothingScaled { call });
        }
        let found = gradients::found::<B, M>(model, grads);
        if found.parameters.is_empty() || found.parameters.len() < grads.len() {
            return Err(AmpError::ForeignGradients {
                call,
                given: grads.len(),
                of_model: found.parameters.len(),
            });
        }
        Ok(found)
    }

    /// The path of the first parameter that is unscaled already, and of which `is` holds.
    fn first<B: AutodiffBackend>(
        &self,
        found: &gradients::Found<B>,
        is: impl Fn(&Unscaled) -> bool,
    ) -> Option<String> {
        let window = &self.shared().window;
        let mut parameters = found.parameters.iter();
        let first = parameters.find(|(id, _)| window.unscaled.get(id).is_some_and(&is));
        first.map(|(_, path)| path.clone())
    }

    /// What a record has to keep of a step that has begun.
    pub(crate) fn begun<B: AutodiffBackend>(&self) -> Begun {
        let losses = self.shared().window.losses.take();
        let known = match losses.map(|losses| losses.downcast::<FiniteCheck<B::InnerBackend>>()) {
            Some(Ok(losses)) => losses.read(),
            _ => Vec::new(),
        };
        let window = &mut self.shared().window;
        window.non_finite_loss |= known.iter().any(|finite| !finite);
        Begun {
            losses_given: window.losses_given,
            scale: window.scale,
            non_finite_loss: window.non_finite_loss,
        }
    }

    /// Goes on with a step that had begun when it was recorded; by default with none.
    pub(crate) fn resume(&self, begun: Begun) {
        self.waits_no_longer();
        self.shared().window = Window {
            losses_given: begun.losses_given,
            scale: begun.scale,
            non_finite_loss: begun.non_finite_loss,
            ..Window::default()
        };
    }

    /// What a loss on that backend is multiplied with here and now: 1 where nothing is to be
    /// scaled.
    pub(crate) fn scale_at<B: AutodiffBackend>(&self, at: &B::Device) -> f32 {
        let scaler = self.state();
        match applies::<B>(&scaler, at) {
            true => scaler.scale(),
            false => 1.0,
        }
    }
}

/// A check that has begun on a backend, or a new one.
fn check_of<I: Backend>(begun: Option<Box<dyn Any + Send>>, device: &I::Device) -> FiniteCheck<I> {
    begun
        .and_then(|begun| begun.downcast::<FiniteCheck<I>>().ok())
        .map(|begun| *begun)
        .unwrap_or_else(|| FiniteCheck::new(device.clone()))
}

/// Whether this scaler scales on that backend.
fn applies<B: AutodiffBackend>(scaler: &LossScaler, at: &B::Device) -> bool {
    scaler.is_enabled() && (!is_amp::<B>(at) || is_f16::<B>(at))
}

/// Whether f16 is in force on an `AmpAutodiff`.
fn is_f16<B: AutodiffBackend>(at: &B::Device) -> bool {
    device::mode::<B>(at) == Mode::On(DType::F16)
}

/// Whether a backend is an `AmpAutodiff`, which scales by itself.
pub(crate) fn is_amp<B: AutodiffBackend>(at: &B::Device) -> bool {
    B::name(at).starts_with("amp<")
}

impl<B: Backend> Record<B> for LossScaler {
    type Item<S: PrecisionSettings> = Self;

    fn into_item<S: PrecisionSettings>(self) -> Self {
        self
    }

    fn from_item<S: PrecisionSettings>(item: Self, _device: &B::Device) -> Self {
        item
    }
}
