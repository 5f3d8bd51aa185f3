//! A learning rate scheduler that waits for the steps that are taken.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn_backend::Backend;
use burn_core::record::{PrecisionSettings, Record};
use burn_optim::LearningRate;
use burn_optim::lr_scheduler::LrScheduler;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::outcomes::{Heard, Outcomes};
use crate::scaler::Listener;
use crate::{GradScaler, LossScaler};

/// A learning rate scheduler that does not advance over skipped steps, around any other one.
///
/// The learning rates of the steps that are taken are those of a training without skipped steps.
/// That holds however a `Learner` calls it: before each backward pass, also under gradient
/// accumulation, or after those of several devices. With an [`AmpOptimizer`](crate::AmpOptimizer)
/// on the same scalers, what counts is whether a batch was taken; without it, a batch of which a
/// part was applied counts as taken.
///
/// Its record holds the scheduler's and the scalers' state, so Burn's own checkpoints save and
/// restore them, where loss scaling is configured as it was. A checkpoint of the scheduler alone,
/// from before there was AMP, is read as well, in JSON and in message pack, if the scheduler's own
/// record is a number, a map or nothing, as those of Burn's schedulers: the scalers then keep the
/// state they have, and the log says so.
///
/// A loop of one's own asks for the learning rate before the backward pass.
///
/// ```
/// use burn::{backend::Flex, lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig};
/// use burn_amp::{AmpAutodiff, AmpLrScheduler, GradScaler};
///
/// let scaler = GradScaler::of::<AmpAutodiff<Flex>>(&Default::default());
/// let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 1000).init()?;
/// let scheduler = AmpLrScheduler::new(cosine, [scaler]);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug)]
pub struct AmpLrScheduler<S> {
    /// As of the steps that are known to be taken.
    settled: S,
    /// As of the last step, of which that may not be known yet.
    current: S,
    scalers: Vec<GradScaler>,
    outcomes: Arc<Outcomes>,
}

/// What became of the last learning rate.
#[derive(Clone, Copy)]
enum Fate {
    Taken,
    Skipped,
    /// Its batch is not complete.
    Open,
}

/// A clone hears of steps by itself.
impl<S: Clone> Clone for AmpLrScheduler<S> {
    fn clone(&self) -> Self {
        let outcomes = Arc::new(self.outcomes.copied());
        let scalers = self.scalers.clone();
        scalers.iter().for_each(|scaler| scaler.listen(&outcomes));
        Self {
            settled: self.settled.clone(),
            current: self.current.clone(),
            scalers,
            outcomes,
        }
    }
}

impl<S: Clone> AmpLrScheduler<S> {
    /// A scheduler that gives the learning rates of `scheduler`, and follows these scalers: of the
    /// devices of the training.
    pub fn new(scheduler: S, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        let scalers: Vec<_> = scalers.into_iter().collect();
        let outcomes = Arc::<Outcomes>::default();
        scalers.iter().for_each(|scaler| scaler.listen(&outcomes));
        Self {
            settled: scheduler.clone(),
            current: scheduler,
            scalers,
            outcomes,
        }
    }

    fn fate(&self, heard: &Heard) -> Fate {
        match heard.batch {
            Some(true) => Fate::Taken,
            Some(false) => Fate::Skipped,
            None if self.has_batches() => Fate::Open,
            // A replica is asked for as many learning rates as there are replicas before its pass.
            None if heard.is_nothing() && self.is_replica() => Fate::Open,
            // Nothing heard is a step that nothing was scaled for, as in bf16 and FP32.
            None if heard.taken || !heard.skipped => Fate::Taken,
            // The devices of a batch are done before its learning rate is asked for: what was
            // skipped is the batch that comes, and the one before was dealt with.
            None if heard.elsewhere => Fate::Taken,
            None => Fate::Skipped,
        }
    }

    fn has_batches(&self) -> bool {
        self.scalers.iter().any(GradScaler::has_batches)
    }

    fn is_replica(&self) -> bool {
        self.scalers.iter().any(GradScaler::is_replica)
    }

    /// The scheduler inside, as of the steps that were taken.
    fn inner(&self) -> &S {
        match self.fate(&self.outcomes.look(self.is_replica())) {
            Fate::Taken | Fate::Open => &self.current,
            Fate::Skipped => &self.settled,
        }
    }
}

impl<S: LrScheduler> LrScheduler for AmpLrScheduler<S> {
    type Record<B: Backend> = AmpLrSchedulerRecord<S::Record<B>>;

    fn step(&mut self) -> LearningRate {
        let heard = self.outcomes.take(self.is_replica());
        match self.fate(&heard) {
            Fate::Taken => self.settled = self.current.clone(),
            Fate::Skipped => self.current = self.settled.clone(),
            Fate::Open => {}
        }
        let lr = self.current.step();
        // The batch of this learning rate is skipped already.
        if !self.has_batches() && heard.elsewhere && heard.skipped && !heard.taken {
            self.current = self.settled.clone();
        }
        lr
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        AmpLrSchedulerRecord {
            loss_scalers: Some(self.scalers.iter().map(GradScaler::state).collect()),
            scheduler: self.inner().to_record::<B>(),
        }
    }

    /// Also puts the scalers in the state that they had.
    fn load_record<B: Backend>(self, record: Self::Record<B>) -> Self {
        let states = record.loss_scalers.unwrap_or_default();
        if states.is_empty() && !self.scalers.is_empty() {
            log::info!(
                "burn-amp: the checkpoint has no loss scale, as one written without AMP: the loss \
                 scale is {}",
                self.scalers[0].loss_scale()
            );
        }
        if !states.is_empty() && states.len() != self.scalers.len() {
            log::info!(
                "burn-amp: the checkpoint has {} loss scale(s), and the training has {} device(s): \
                 they are dealt out in turn",
                states.len(),
                self.scalers.len()
            );
        }
        for (scaler, state) in self.scalers.iter().zip(states.iter().cycle()) {
            if *state.config() == scaler.config() {
                scaler.load_state(*state);
            } else {
                log::warn!(
                    "burn-amp: the checkpoint was written with loss scaling {:?}, and {:?} is \
                     configured: the configuration holds, and the loss scale starts at {}",
                    state.config(),
                    scaler.config(),
                    scaler.loss_scale()
                );
            }
        }
        Listener::forget(&*self.outcomes);
        let scheduler = self.current.load_record::<B>(record.scheduler);
        Self {
            settled: scheduler.clone(),
            current: scheduler,
            ..self
        }
    }
}

/// The state of an [`AmpLrScheduler`]: `R`, of the scheduler inside, and that of the loss scalers.
#[derive(Debug, Clone)]
pub struct AmpLrSchedulerRecord<R> {
    /// Absent in a record that was written without AMP.
    loss_scalers: Option<Vec<LossScaler>>,
    scheduler: R,
}

impl<B: Backend, R: Record<B>> Record<B> for AmpLrSchedulerRecord<R> {
    type Item<S: PrecisionSettings> = AmpLrSchedulerItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        AmpLrSchedulerItem {
            loss_scalers: self.loss_scalers,
            scheduler: self.scheduler.into_item(),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            loss_scalers: item.loss_scalers,
            scheduler: R::from_item(item.scheduler, device),
        }
    }
}

/// What an [`AmpLrSchedulerRecord`] is written as; `I` is that of the scheduler inside.
#[derive(Debug, Clone, Serialize)]
pub struct AmpLrSchedulerItem<I> {
    loss_scalers: Option<Vec<LossScaler>>,
    scheduler: I,
}

const FIELDS: &[&str] = &["loss_scalers", "scheduler"];

/// Reads its own fields, or else what the scheduler inside has written by itself. A format that
/// does not describe itself (bincode) has to hold the former.
impl<'de, I: Deserialize<'de>> Deserialize<'de> for AmpLrSchedulerItem<I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let either = Either(PhantomData);
        match deserializer.is_human_readable() {
            true => deserializer.deserialize_any(either),
            false => deserializer.deserialize_struct("AmpLrScheduler", FIELDS, either),
        }
    }
}

struct Either<I>(PhantomData<I>);

impl<I> AmpLrSchedulerItem<I> {
    fn plain(scheduler: I) -> Self {
        Self {
            loss_scalers: None,
            scheduler,
        }
    }
}

macro_rules! plain {
    ($($visit:ident($ty:ty)),*) => {$(
        fn $visit<E: serde::de::Error>(self, value: $ty) -> Result<Self::Value, E> {
            I::deserialize(value.into_deserializer()).map(AmpLrSchedulerItem::plain)
        }
    )*};
}

impl<'de, I: Deserialize<'de>> Visitor<'de> for Either<I> {
    type Value = AmpLrSchedulerItem<I>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the state of a learning rate scheduler, with or without loss scalers")
    }

    plain! { visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f32(f32), visit_f64(f64), visit_str(&str) }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        I::deserialize(().into_deserializer()).map(AmpLrSchedulerItem::plain)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        use serde::de::Error;
        let missing = |i| A::Error::invalid_length(i, &"loss scalers and a scheduler");
        Ok(AmpLrSchedulerItem {
            loss_scalers: seq.next_element()?.ok_or_else(|| missing(0))?,
            scheduler: seq.next_element()?.ok_or_else(|| missing(1))?,
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        use serde::de::Error;
        let first: Option<String> = map.next_key()?;
        if first.as_deref() != Some(FIELDS[0]) {
            let rest = Rest { first, map };
            return I::deserialize(MapAccessDeserializer::new(rest)).map(AmpLrSchedulerItem::plain);
        }
        let loss_scalers = map.next_value()?;
        match map.next_key::<String>()?.as_deref() {
            Some("scheduler") => Ok(AmpLrSchedulerItem {
                loss_scalers,
                scheduler: map.next_value()?,
            }),
            _ => Err(A::Error::missing_field("scheduler")),
        }
    }
}

/// A map of which the first key was read.
struct Rest<A> {
    first: Option<String>,
    map: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Rest<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        match self.first.take() {
            Some(key) => seed.deserialize(key.into_deserializer()).map(Some),
            None => self.map.next_key_seed(seed),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}
