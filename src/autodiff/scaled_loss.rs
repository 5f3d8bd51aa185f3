//! State that a backward pass leaves for a step of the explicit protocol.

use std::any::Any;
use std::sync::Arc;

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::replicas::{Replicas, agreed};
use crate::diagnostics::{FiniteCheck, anomaly};
use crate::scaler::LossCheck;
use crate::{GradScaler, StepOutcome};

/// Adds the value of a loss, `scaled` or only to be checked. A later check finds out whether the value is finite.
pub(crate) fn add_loss<I: Backend>(
    scaler: &GradScaler,
    device: &I::Device,
    value: FloatTensor<I>,
    scaled: bool,
) {
    let mut check = take_check::<I>(scaler, device);
    check.add(value);
    let mut pending = scaler.shared.pending();
    if scaled {
        pending.set_scaled();
    } else {
        pending.set_checked();
    }
    pending.losses.checks.push(Box::new(check));
}

/// Takes the check that was begun on a backend, or creates one.
pub(crate) fn take_check<I: Backend>(scaler: &GradScaler, device: &I::Device) -> FiniteCheck<I> {
    let begun = {
        let mut pending = scaler.shared.pending();
        let checks = &mut pending.losses.checks;
        let is_on_backend = |check: &dyn Any| check.is::<FiniteCheck<I>>();
        let begun = checks.iter().position(|check| is_on_backend(&**check));
        begun.map(|i| checks.swap_remove(i) as Box<dyn Any>)
    };
    begun
        .and_then(|begun| begun.downcast().ok())
        .map_or_else(|| FiniteCheck::new(device.clone()), |begun| *begun)
}

impl<I: Backend> LossCheck for FiniteCheck<I> {
    fn read(self: Box<Self>) -> bool {
        !FiniteCheck::read(*self).contains(&false)
    }
}

/// Ends the pass of a loss whose gradients may have been reduced across replicas. The replicas wait
/// for each other here and decide on the step together.
pub(super) fn end_pass<B: Backend>(
    scaler: &GradScaler,
    replicas: Option<Arc<Replicas>>,
    device: &B::Device,
    factor: f32,
) {
    let mut found = anomaly::take();
    let outcome = StepOutcome::Finite;
    agreed::<B>(
        replicas.as_deref(),
        device,
        Some(factor),
        outcome,
        &mut found,
    );
    let mut pending = scaler.shared.pending();
    if let Some(replicas) = replicas {
        pending.losses.replicas = Some(replicas);
    }
    pending.watched.extend(found);
}
