//! An optimizer that applies a whole batch or nothing.

use std::sync::Arc;

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};

use super::outcomes::Outcomes;
use crate::scaler::Listener;
use crate::{GradScaler, LastStep};

/// Wraps any optimizer for gradients from several backward passes, on several devices or over
/// several micro-batches. If one pass overflowed, nothing is applied.
///
/// A pass that overflows gives no gradients, and Burn sums the gradients that remain. With
/// `ExecutionStrategy::MultiDevice` (`OptimMainDevice` and `OptimSharded`) or `grads_accumulation`,
/// Burn would apply that sum as if it were the whole batch. This optimizer skips such a batch:
/// neither parameters nor optimizer state change. Its record is that of the inner optimizer.
///
/// ```
/// use burn::{backend::Flex, nn::Linear, optim::AdamConfig};
/// use burn_amp::{AmpAutodiff, AmpOptimizer, GradScaler};
///
/// type B = AmpAutodiff<Flex>;
/// let devices = [Default::default()];
/// let scalers = devices.iter().map(GradScaler::of::<B>);
/// let optimizer = AmpOptimizer::new(AdamConfig::new().init::<B, Linear<B>>(), scalers);
/// ```
///
/// A [`Learner`](burn_train::Learner) calls it when every pass of a batch is done. Burn drops an
/// incomplete accumulation at the end of an epoch. An overflow in the dropped part skips the next
/// batch.
#[derive(Debug)]
pub struct AmpOptimizer<O> {
    inner: O,
    scalers: Vec<GradScaler>,
    passes: Arc<Passes>,
}

/// The passes since the last batch.
#[derive(Debug, Default)]
struct Passes(Outcomes);

impl Listener for Passes {
    /// Not called for steps of the explicit protocol, which already cover a whole window.
    fn pass(&self, step: &LastStep) {
        self.0.see(step);
    }

    fn forget(&self) {
        self.0.forget();
    }

    fn makes_batches(&self) -> bool {
        true
    }
}

/// A clone observes passes on its own.
impl<O: Clone> Clone for AmpOptimizer<O> {
    fn clone(&self) -> Self {
        let passes = Passes(self.passes.0.copied());
        Self::following(self.inner.clone(), self.scalers.clone(), passes)
    }
}

impl<O> AmpOptimizer<O> {
    /// Wraps `inner` and follows these scalers: those of every device that shares a batch.
    pub fn new(inner: O, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        Self::following(inner, scalers.into_iter().collect(), Passes::default())
    }

    fn following(inner: O, scalers: Vec<GradScaler>, passes: Passes) -> Self {
        let passes = Arc::new(passes);
        scalers.iter().for_each(|scaler| scaler.listen(&passes));
        Self {
            inner,
            scalers,
            passes,
        }
    }

    /// Whether the batch is whole. If not, logs the parameters with non-finite gradients.
    fn is_whole<B: AutodiffBackend, M: AutodiffModule<B>>(&self, module: &M) -> bool {
        let is_replica = self.scalers.iter().any(GradScaler::is_replica);
        let whole = !self.passes.0.take(is_replica).skipped;
        self.scalers.iter().for_each(|scaler| scaler.batch(whole));
        if !whole {
            let steps = self.scalers.iter().filter_map(|s| s.explain(module));
            let named: Vec<_> = steps.flat_map(|step| step.parameters).collect();
            log::debug!(
                "burn-amp: part of the batch overflowed; the whole batch is skipped{}{}",
                if named.is_empty() { "" } else { ": " },
                named.join(", ")
            );
        }
        whole
    }
}

impl<O, M, B> Optimizer<M, B> for AmpOptimizer<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        match self.is_whole(&module) {
            true => self.inner.step(lr, module, grads),
            false => module,
        }
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        match self.is_whole(&module) {
            true => self.inner.step_multi(lr, module, grads),
            false => module,
        }
    }

    fn to_record(&self) -> Self::Record {
        self.inner.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self {
            inner: self.inner.load_record(record),
            ..self
        }
    }
}
