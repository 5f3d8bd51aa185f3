//! The loss scale in checkpoints.

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::module::ParamGroup;
use burn_amp_core::LossScaler;
use serde_json::Value;

use crate::GradScaler;

impl GradScaler {
    /// A learning-rate schedule with this scaler in its record, so that Burn's checkpoints save and restore
    /// the loss scale. The learning rates are those of `schedule`. Use the scaler of the device that computes
    /// in f16: the scaler of a plain Burn device has no loss scale. For several scalers, call this method on
    /// each in turn, always in the same order.
    ///
    /// The scaler is restored only if loss scaling is configured as before; otherwise the configuration
    /// applies, and the log has a warning. A checkpoint without a loss scale loads as well: the scaler then
    /// keeps its state, and the log has a message.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// # use burn_amp_device::{burn, Precision, flex};
    /// use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    /// use burn_amp_device::GradScaler;
    ///
    /// # let device = flex(Precision::F16)?.autodiff();
    /// let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 1000).init().unwrap();
    /// let schedule = GradScaler::of(&device).checkpoint_with(cosine);
    /// # assert!(!schedule.to_record().is_empty());
    /// # }
    /// # Ok::<(), burn_amp_device::Error>(())
    /// ```
    pub fn checkpoint_with(&self, schedule: impl Into<ModuleLrScheduler>) -> ModuleLrScheduler {
        // A group without parameters: no parameter uses its learning rate.
        let nobody = ParamGroup::from_ids(Vec::new());
        schedule.into().with_group(nobody, Saved(self.clone()))
    }
}

/// A learning-rate scheduler whose record is the state of a scaler.
#[derive(Clone)]
struct Saved(GradScaler);

impl LrScheduler for Saved {
    fn step(&mut self) -> f64 {
        0.0
    }

    fn to_record(&self) -> LrSchedulerRecord {
        let (state, mut record) = (self.0.state(), LrSchedulerRecord::new());
        // In bf16 and FP32 there is nothing to save.
        if state.is_enabled() {
            each_number(&mut json(&state), SCALER, &mut |key, number| {
                let saved = std::mem::take(&mut record);
                record = match number.as_u64() {
                    Some(count) => saved.with_scalar(key, count),
                    None => saved.with_scalar(key, number.as_f64()?),
                };
                Some(())
            });
        }
        record
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        let (state, scaler) = (self.0.state(), &self.0);
        if !state.is_enabled() {
            if !record.is_empty() {
                log::info!(
                    "burn-amp: the loss scale in the checkpoint is not used: the scaler is disabled, \
                     as in bf16 and FP32"
                );
            }
            return;
        }
        let (configured, scale) = (state.config(), state.scale());
        match restored(&state, &record) {
            None if record.is_empty() => log::info!(
                "burn-amp: the checkpoint has no loss scale, for example because it was written \
                 without AMP: the loss scale is {scale}"
            ),
            None => log::warn!(
                "burn-amp: the checkpoint was written with another kind of loss scaling than \
                 {configured:?}: the configuration applies, and the loss scale is {scale}"
            ),
            Some(Ok(saved)) if saved.config() == configured => scaler.load_state(saved),
            Some(Ok(saved)) => log::warn!(
                "burn-amp: the checkpoint was written with loss scaling {:?}, but {configured:?} is \
                 configured: the configuration applies, and the loss scale is {scale}",
                saved.config()
            ),
            Some(Err(error)) => log::warn!(
                "burn-amp: the loss scale in the checkpoint is damaged ({error}): the loss scale is \
                 {scale}"
            ),
        }
    }
}

/// The key of the state in a record.
const SCALER: &str = "loss_scaler";

fn json(state: &LossScaler) -> Value {
    serde_json::to_value(state).expect("the state of a scaler is numbers and names")
}

/// The state in a record, which only has numbers. `None` if it does not have the form of `like`.
fn restored(
    like: &LossScaler,
    record: &LrSchedulerRecord,
) -> Option<Result<LossScaler, serde_json::Error>> {
    let mut state = json(like);
    each_number(&mut state, SCALER, &mut |key, number| {
        let count = record.scalar::<u64>(key).map(Value::from);
        *number = count.or_else(|| record.scalar::<f64>(key).map(Value::from))?;
        Some(())
    })?;
    Some(serde_json::from_value(state))
}

/// Visits the numbers of a state, each with its path. Returns `None` as soon as one visit returns `None`.
fn each_number(
    value: &mut Value,
    path: &str,
    visit: &mut impl FnMut(&str, &mut Value) -> Option<()>,
) -> Option<()> {
    match value {
        Value::Number(_) => visit(path, value),
        Value::Object(fields) => fields
            .iter_mut()
            .try_for_each(|(name, field)| each_number(field, &format!("{path}.{name}"), visit)),
        _ => Some(()),
    }
}

#[cfg(test)]
mod tests {
    use burn_amp_core::{DynamicLossScale, LossScaleConfig};

    use super::*;

    fn scaler(config: impl Into<LossScaleConfig>) -> GradScaler {
        GradScaler::new(config.into()).unwrap()
    }

    #[test]
    fn every_number_of_a_state_comes_back_exactly() {
        // Numbers that FP32 does not hold exactly, and a count beyond it.
        let dynamic = DynamicLossScale::new()
            .with_init_scale(0.1)
            .with_min_scale(0.01);
        let saved = scaler(dynamic.with_growth_interval(16_777_217));
        let record = Saved(saved.clone()).to_record();
        let read = restored(&saved.state(), &record).unwrap().unwrap();
        assert_eq!(read, saved.state());
        assert!(restored(&scaler(LossScaleConfig::Fixed(2.0)).state(), &record).is_none());
    }

    #[test]
    fn a_damaged_state_and_a_disabled_scaler_change_nothing() {
        let saved = scaler(DynamicLossScale::new().with_init_scale(8.0));
        let damaged = Saved(saved.clone())
            .to_record()
            .with_scalar("loss_scaler.scale", 0.0);
        assert!(restored(&saved.state(), &damaged).unwrap().is_err());
        Saved(saved.clone()).load_record(damaged.clone());
        assert_eq!(saved.loss_scale(), 8.0);

        let disabled = scaler(LossScaleConfig::Disabled);
        assert!(Saved(disabled.clone()).to_record().is_empty());
        Saved(disabled.clone()).load_record(damaged);
        assert!(!disabled.state().is_enabled());
    }
}
