//! An optimizer that takes a batch whole or not at all.

use std::sync::Arc;

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};

use super::outcomes::Outcomes;
use crate::scaler::Listener;
use crate::{GradScaler, LastStep};

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
    /// A step of the explicit protocol is over before it is told of: it knows of the whole window.
    fn pass(&self, step: &LastStep) {
        self.0.hear(step);
    }

    fn forget(&self) {
        self.0.forget();
    }

    fn makes_batches(&self) -> bool {
        true
    }
}

/// A clone hears of passes by itself.
impl<O: Clone> Clone for AmpOptimizer<O> {
    fn clone(&self) -> Self {
        let passes = Passes(self.passes.0.copied());
        Self::following(self.inner.clone(), self.scalers.clone(), passes)
    }
}

impl<O> AmpOptimizer<O> {
    /// An optimizer around `inner` that follows these scalers: of every device that a batch is
    /// spread over.
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

    /// Whether the batch is whole; if not, what was wrong is said in the module's words.
    fn is_whole<B: AutodiffBackend, M: AutodiffModule<B>>(&self, module: &M) -> bool {
        let is_replica = self.scalers.iter().any(GradScaler::is_replica);
        let whole = !self.passes.0.take(is_replica).skipped;
        self.scalers.iter().for_each(|scaler| scaler.batch(whole));
        if !whole {
            let steps = self
                .scalers
                .iter()
                .filter_map(|scaler| scaler.explain(module));
            let named: Vec<_> = steps.flat_map(|step| step.parameters).collect();
            log::debug!(
                "burn-amp: a part of the batch overflowed; the whole batch is skipped{}{}",
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
