//! An optimizer that applies a whole batch or nothing.

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};

use super::outcomes::Outcomes;
use crate::GradScaler;
use crate::autodiff::reuse;

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
/// Several steps without a backward pass between them, such as one for each part of the model at its own learning
/// rate, belong to one batch.
///
/// A [`Learner`](burn_train::Learner) calls the optimizer when every pass of a batch is done. Burn
/// drops an incomplete accumulation at the end of an epoch. An overflow in the dropped part skips the
/// next batch.
///
/// While it lives, its scalers count as followed by an optimizer that reports whole batches. Drop it before
/// another optimizer trains with the same scalers: otherwise an
/// [`AmpLrScheduler`](crate::AmpLrScheduler) advances over that optimizer's skipped steps.
///
/// A clone observes passes on its own.
#[derive(Debug, Clone)]
pub struct AmpOptimizer<O> {
    inner: O,
    /// The outcomes of the passes since the last batch.
    outcomes: Outcomes,
    /// The backward passes of this thread before the last batch, if that was skipped.
    skipped_after: Option<u64>,
}

impl<O> AmpOptimizer<O> {
    /// Wraps `inner` and follows these scalers: those of every device that shares a batch.
    pub fn new(inner: O, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        let makes_batches = true;
        let outcomes = Outcomes::of(scalers, makes_batches);
        Self {
            inner,
            outcomes,
            skipped_after: None,
        }
    }

    /// Whether the batch is whole. If not, logs the parameters with non-finite gradients.
    fn is_whole<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) -> bool {
        let passes = reuse::passes_here();
        let seen = self.outcomes.take();
        // Without a pass in between, another part of the same batch, at its own learning rate. A pass of
        // another device is another thread's, and one of this thread may belong to another scaler.
        let is_part = self.skipped_after == Some(passes) && !seen.begun;
        let whole = !is_part && !seen.skipped;
        self.skipped_after = (!whole).then_some(passes);
        let scalers = self.outcomes.scalers();
        scalers.iter().for_each(|scaler| scaler.batch(whole));
        if !whole {
            let steps = scalers.iter().filter_map(|s| s.explain(module));
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
        if self.is_whole(&module) {
            self.inner.step(lr, module, grads)
        } else {
            module
        }
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        if self.is_whole(&module) {
            self.inner.step_multi(lr, module, grads)
        } else {
            module
        }
    }

    fn to_record(&self) -> Self::Record {
        self.inner.to_record()
    }

    /// Also forgets the passes of the batch that has begun: they are not part of the record.
    fn load_record(self, record: Self::Record) -> Self {
        self.outcomes.forget();
        Self {
            inner: self.inner.load_record(record),
            skipped_after: None,
            ..self
        }
    }
}
