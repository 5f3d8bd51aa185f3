//! The loss scale in checkpoints.

use std::fmt;
use std::marker::PhantomData;

use burn_amp_core::{ask_for_exceptions, files_of_exceptions};
use burn_backend::Backend;
use burn_core::record::{PrecisionSettings, Record};
use burn_optim::LearningRate;
use burn_optim::lr_scheduler::LrScheduler;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{
    DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Serialize};

use crate::{GradScaler, LossScaler};

impl GradScaler {
    /// A learning-rate schedule with this scaler in its record, so that Burn's checkpoints save and restore
    /// the loss scale. The learning rates are those of `schedule`. For several devices, add the other scalers
    /// with [`and`](LrSchedulerWithScaler::and).
    ///
    /// The scaler is restored only if loss scaling is configured as before; otherwise the configuration
    /// applies, and the log has a warning. A checkpoint written without AMP, which holds only the record of
    /// `schedule`, also loads from JSON and MessagePack, if that record is a number, a map or nothing, as with
    /// Burn's schedules. The scaler then keeps its state, and the log has a message.
    ///
    /// ```
    /// use burn::{backend::Flex, lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig};
    /// use burn_amp::{AmpAutodiff, GradScaler};
    ///
    /// let scaler = GradScaler::of::<AmpAutodiff<Flex>>(&Default::default());
    /// let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 1000).init()?;
    /// let schedule = scaler.checkpoint_with(cosine);
    /// # Ok::<(), String>(())
    /// ```
    pub fn checkpoint_with<S: LrScheduler>(&self, schedule: S) -> LrSchedulerWithScaler<S> {
        LrSchedulerWithScaler {
            schedule,
            scalers: vec![self.clone()],
        }
    }
}

/// A learning-rate scheduler whose record also holds the state of loss scalers: see
/// [`GradScaler::checkpoint_with`].
#[derive(Debug, Clone)]
pub struct LrSchedulerWithScaler<S> {
    schedule: S,
    scalers: Vec<GradScaler>,
}

impl<S> LrSchedulerWithScaler<S> {
    /// Adds the scaler of another device that trains, always in the same order.
    pub fn and(mut self, scaler: GradScaler) -> Self {
        self.scalers.push(scaler);
        self
    }
}

impl<S: LrScheduler> LrScheduler for LrSchedulerWithScaler<S> {
    type Record<B: Backend> = LrSchedulerWithScalerRecord<S::Record<B>>;

    fn step(&mut self) -> LearningRate {
        self.schedule.step()
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        let states = self.scalers.iter().map(GradScaler::state);
        LrSchedulerWithScalerRecord {
            loss_scalers: Some(states.collect()),
            exceptions: files_of_exceptions(),
            scheduler: self.schedule.to_record::<B>(),
        }
    }

    /// Also restores the state of the scalers.
    fn load_record<B: Backend>(self, record: Self::Record<B>) -> Self {
        ask_for_exceptions(&record.exceptions);
        let states = record.loss_scalers.unwrap_or_default();
        match (states.len(), self.scalers.len()) {
            (0, _) => log::info!(
                "burn-amp: the checkpoint has no loss scale, for example because it was written \
                 without AMP: the loss scale is {}",
                self.scalers[0].loss_scale()
            ),
            (saved, devices) if saved != devices => log::info!(
                "burn-amp: the checkpoint has {saved} loss scale(s), but the training has \
                 {devices} device(s): the devices take them in turn"
            ),
            _ => {}
        }
        for (scaler, state) in self.scalers.iter().zip(states.iter().cycle()) {
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
        Self {
            schedule: self.schedule.load_record::<B>(record.scheduler),
            ..self
        }
    }
}

/// The state of an [`LrSchedulerWithScaler`]: the inner scheduler's record `R`, and the loss scalers.
#[derive(Debug, Clone, Serialize)]
pub struct LrSchedulerWithScalerRecord<R> {
    /// `None` in a record that was written without AMP.
    loss_scalers: Option<Vec<LossScaler>>,
    /// The files of the exceptions of the devices.
    exceptions: Vec<String>,
    scheduler: R,
}

/// The serialized form of an [`LrSchedulerWithScalerRecord`]; `I` is that of the inner scheduler.
pub type LrSchedulerWithScalerItem<I> = LrSchedulerWithScalerRecord<I>;

impl<B: Backend, R: Record<B>> Record<B> for LrSchedulerWithScalerRecord<R> {
    type Item<S: PrecisionSettings> = LrSchedulerWithScalerItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        LrSchedulerWithScalerRecord {
            loss_scalers: self.loss_scalers,
            exceptions: self.exceptions,
            scheduler: self.scheduler.into_item(),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            loss_scalers: item.loss_scalers,
            exceptions: item.exceptions,
            scheduler: R::from_item(item.scheduler, device),
        }
    }
}

/// Reads the item's own fields, or else the record of only the inner scheduler. A format that is not
/// self-describing (bincode) must hold the item's own fields.
impl<'de, I: Deserialize<'de>> Deserialize<'de> for LrSchedulerWithScalerItem<I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let either = Either(PhantomData);
        if deserializer.is_human_readable() {
            deserializer.deserialize_any(either)
        } else {
            deserializer.deserialize_struct("LrSchedulerWithScaler", FIELDS, either)
        }
    }
}

const FIELDS: &[&str] = &["loss_scalers", "exceptions", "scheduler"];

/// Reads the item's own fields.
#[derive(Deserialize)]
#[serde(
    remote = "LrSchedulerWithScalerRecord",
    expecting = "loss scalers and a scheduler"
)]
struct Own<I> {
    loss_scalers: Option<Vec<LossScaler>>,
    #[serde(default)]
    exceptions: Vec<String>,
    scheduler: I,
}

struct Either<I>(PhantomData<I>);

/// Reads the record of only the inner scheduler.
fn plain<'de, I: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<LrSchedulerWithScalerItem<I>, D::Error> {
    Ok(LrSchedulerWithScalerItem {
        loss_scalers: None,
        exceptions: Vec::new(),
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
    type Value = LrSchedulerWithScalerItem<I>;

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
