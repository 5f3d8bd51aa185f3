//! An optimizer that takes a batch whole or not at all.

use std::sync::Arc;

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};

use super::outcomes::Outcomes;
use crate::scaler::Listener;
use crate::{GradScaler, LastStep, Transition};

/// An optimizer for gradients that come from several backward passes: of several devices, or of
/// several micro-batches. If one of them overflowed, nothing is applied.
///
/// A pass that overflows gives no gradients, and Burn adds up what there is: with
/// `ExecutionStrategy::MultiDevice` (`OptimMainDevice` and `OptimSharded`) or `grads_accumulation`
/// the rest would be applied as if it were the whole batch. Around any optimizer, this one skips
/// such a batch, and neither parameters nor the optimizer's state change. Its record is that of the
/// optimizer inside.
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
/// A [`Learner`](burn_train::Learner) calls it when every pass of a batch is done. What an
/// accumulation leaves over at the end of an epoch, Burn drops; an overflow in it skips the batch
/// that follows.
#[derive(Debug, Clone)]
pub struct AmpOptimizer<O> {
    inner: O,
    scalers: Vec<GradScaler>,
    passes: Arc<Passes>,
}

/// The passes since the last batch.
#[derive(Debug, Default)]
struct Passes(Outcomes);

impl Listener for Passes {
    fn step(&self, step: &LastStep, transition: Transition) {
        self.0.step(step, transition);
    }

    fn makes_batches(&self) -> bool {
        true
    }
}

impl<O> AmpOptimizer<O> {
    /// An optimizer that follows these scalers: of every device that a batch is spread over.
    pub fn new(inner: O, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        let scalers: Vec<_> = scalers.into_iter().collect();
        let passes = Arc::default();
        scalers.iter().for_each(|scaler| scaler.listen(&passes));
        Self {
            inner,
            scalers,
            passes,
        }
    }

    /// Whether the batch is whole.
    fn is_whole(&self) -> bool {
        let is_replica = self.scalers.iter().any(GradScaler::is_replica);
        let whole = !self.passes.0.take(is_replica).skipped;
        self.scalers.iter().for_each(|scaler| scaler.batch(whole));
        if !whole {
            log::debug!("burn-amp: a part of the batch overflowed; the whole batch is skipped");
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
        match self.is_whole() {
            true => self.inner.step(lr, module, grads),
            false => module,
        }
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        match self.is_whole() {
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
