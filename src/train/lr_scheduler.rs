//! A learning-rate scheduler that advances only with steps that are taken.

use std::fmt;
use std::marker::PhantomData;

use burn_backend::Backend;
use burn_core::record::{PrecisionSettings, Record};
use burn_optim::LearningRate;
use burn_optim::lr_scheduler::LrScheduler;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Serialize};

use super::outcomes::{Outcomes, Steps};
use crate::autodiff::replicas;
use crate::{GradScaler, LossScaler};

/// Wraps any learning-rate scheduler so that it does not advance over skipped steps.
///
/// The steps taken get the same learning rates as in a training run without skipped steps. This holds however
/// a `Learner` calls the scheduler: before each backward pass, also with gradient accumulation, or after the
/// passes of several devices. As in plain Burn 0.21, a `Learner` with gradient accumulation requests a
/// learning rate for each micro-batch, so count micro-batches, not steps. If the accumulation does not divide
/// an epoch's batches, Burn drops the rest, and a skip of the next step takes back the learning rates of that
/// rest, too. With an [`AmpOptimizer`](crate::AmpOptimizer) on the same scalers, the scheduler follows whole
/// batches. Without one, a partly applied batch counts as taken. A step of the explicit protocol covers its
/// whole window, and belongs to the last learning rate: request the learning rate before
/// [`GradScaler::update`]. Give each optimizer a scaler of its own: of two optimizers on one scaler, a step
/// that only one takes counts as skipped for the schedules of both.
///
/// The record holds the scheduler's and the scalers' state, so Burn's checkpoints save and restore
/// both. The scalers are restored only if loss scaling is configured as before. A checkpoint written
/// without AMP, which holds only the inner scheduler, also loads from JSON and MessagePack, if that
/// scheduler's own record is a number, a map or nothing, as with Burn's schedulers. The scalers then
/// keep their state, and the log has a line about it.
///
/// A custom training loop requests the learning rate before the backward pass, or, on several
/// devices, after the passes of all: then passes come before the first learning rate. A program that requests the
/// learning rate after the backward pass of one device is one step ahead for good if its very first batch is skipped.
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
///
/// A clone observes steps on its own.
#[derive(Debug, Clone)]
pub struct AmpLrScheduler<S> {
    /// The scheduler after the steps that were surely taken.
    settled: S,
    /// The scheduler after the last step, whose outcome may still be open.
    current: S,
    outcomes: Outcomes,
    /// Whether each learning rate is requested after its passes, as by Burn on several devices.
    /// Burn on one device and custom loops request it before. The first request decides: Burn gives
    /// the scheduler no other sign.
    after_passes: Option<bool>,
}

impl<S: Clone> AmpLrScheduler<S> {
    /// Wraps `scheduler` and follows these scalers: those of the training devices.
    pub fn new(scheduler: S, scalers: impl IntoIterator<Item = GradScaler>) -> Self {
        let makes_batches = false;
        Self {
            settled: scheduler.clone(),
            current: scheduler,
            outcomes: Outcomes::of(scalers, makes_batches),
            after_passes: None,
        }
    }

    /// Whether the step of the last learning rate was taken. `None` while it is not complete.
    fn last_taken(&self, seen: &Steps) -> Option<bool> {
        if seen.batch.is_some() || self.outcomes.has_batches() {
            return seen.batch;
        }
        // Before its pass, a replica requests one learning rate for each replica.
        if !seen.has_passes() && replicas::here().is_some() {
            return None;
        }
        // If no step was seen, the step scaled nothing, as in bf16 and FP32. If learning rates come
        // after the passes, the step seen is that of the next learning rate, and the previous step
        // was handled before.
        Some(seen.taken || !seen.skipped || self.after_passes == Some(true))
    }
}

impl<S: LrScheduler> LrScheduler for AmpLrScheduler<S> {
    type Record<B: Backend> = AmpLrSchedulerRecord<S::Record<B>>;

    fn step(&mut self) -> LearningRate {
        let seen = self.outcomes.take();
        let several = self.outcomes.scalers().len() > 1;
        let after_passes = *self
            .after_passes
            .get_or_insert(several && seen.has_passes());
        match self.last_taken(&seen) {
            Some(true) => self.settled = self.current.clone(),
            Some(false) => self.current = self.settled.clone(),
            None => {}
        }
        let lr = self.current.step();
        // The batch of this learning rate was already skipped.
        if after_passes && seen.skipped && !seen.taken && !self.outcomes.has_batches() {
            self.current = self.settled.clone();
        }
        lr
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        // Take the outcomes from a clone, because the next step still needs them.
        let scheduler = match self.last_taken(&self.outcomes.clone().take()) {
            Some(false) => &self.settled,
            Some(true) | None => &self.current,
        };
        let states = self.outcomes.scalers().iter().map(GradScaler::state);
        AmpLrSchedulerRecord {
            loss_scalers: Some(states.collect()),
            scheduler: scheduler.to_record::<B>(),
        }
    }

    /// Also restores the state of the scalers.
    fn load_record<B: Backend>(self, record: Self::Record<B>) -> Self {
        let states = record.loss_scalers.unwrap_or_default();
        let scalers = self.outcomes.scalers();
        match (states.len(), scalers.len()) {
            (0, 1..) => log::info!(
                "burn-amp: the checkpoint has no loss scale, for example because it was written \
                 without AMP: the loss scale is {}",
                scalers[0].loss_scale()
            ),
            (saved, devices) if saved != devices => log::info!(
                "burn-amp: the checkpoint has {saved} loss scale(s), but the training has \
                 {devices} device(s): the devices take them in turn"
            ),
            _ => {}
        }
        for (scaler, state) in scalers.iter().zip(states.iter().cycle()) {
            let (saved, configured) = (*state.config(), scaler.config());
            if saved == configured {
                scaler.load_state(*state);
            } else {
                log::warn!(
                    "burn-amp: the checkpoint was written with loss scaling {saved:?}, but \
                     {configured:?} is configured: the configuration applies, and the loss scale \
                     starts at {}",
                    scaler.loss_scale()
                );
            }
        }
        Self::new(
            self.current.load_record::<B>(record.scheduler),
            scalers.to_vec(),
        )
    }
}

/// The state of an [`AmpLrScheduler`]: the inner scheduler's record `R`, and the loss scalers.
#[derive(Debug, Clone, Serialize)]
pub struct AmpLrSchedulerRecord<R> {
    /// `None` in a record that was written without AMP.
    loss_scalers: Option<Vec<LossScaler>>,
    scheduler: R,
}

/// The serialized form of an [`AmpLrSchedulerRecord`]; `I` is that of the inner scheduler.
pub type AmpLrSchedulerItem<I> = AmpLrSchedulerRecord<I>;

impl<B: Backend, R: Record<B>> Record<B> for AmpLrSchedulerRecord<R> {
    type Item<S: PrecisionSettings> = AmpLrSchedulerItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        AmpLrSchedulerRecord {
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

/// Reads the item's own fields, or else the record of only the inner scheduler. A format that is not
/// self-describing (bincode) must hold the item's own fields.
impl<'de, I: Deserialize<'de>> Deserialize<'de> for AmpLrSchedulerItem<I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let either = Either(PhantomData);
        if deserializer.is_human_readable() {
            deserializer.deserialize_any(either)
        } else {
            deserializer.deserialize_struct("AmpLrScheduler", FIELDS, either)
        }
    }
}

const FIELDS: &[&str] = &["loss_scalers", "scheduler"];

/// Reads the item's own fields.
#[derive(Deserialize)]
#[serde(
    remote = "AmpLrSchedulerRecord",
    expecting = "loss scalers and a scheduler"
)]
struct Own<I> {
    loss_scalers: Option<Vec<LossScaler>>,
    scheduler: I,
}

struct Either<I>(PhantomData<I>);

/// Reads the record of only the inner scheduler.
fn plain<'de, I: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<AmpLrSchedulerItem<I>, D::Error> {
    Ok(AmpLrSchedulerItem {
        loss_scalers: None,
        scheduler: I::deserialize(deserializer)?,
    })
}

macro_rules! plain {
    ($($visit:ident($ty:ty)),*) => {$(
        fn $visit<E: Error>(self, value: $ty) -> Result<Self::Value, E> {
            plain(value.into_deserializer())
        }
    )*};
}

impl<'de, I: Deserialize<'de>> Visitor<'de> for Either<I> {
    type Value = AmpLrSchedulerItem<I>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the state of a learning rate scheduler, with or without loss scalers")
    }

    plain! { visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f32(f32), visit_f64(f64), visit_str(&str) }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        plain(().into_deserializer())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        Own::deserialize(SeqAccessDeserializer::new(seq))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let first: Option<String> = map.next_key()?;
        let is_own = first.as_deref() == Some(FIELDS[0]);
        let all = MapAccessDeserializer::new(Rest { first, map });
        if is_own {
            Own::deserialize(all)
        } else {
            plain(all)
        }
    }
}

/// A map whose first key was already read.
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
