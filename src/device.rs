//! What a device can do, what it is configured to, and which mode an operation on it runs in.

use std::any::{TypeId, type_name};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use burn_backend::{Backend, DType, DTypeUsage, DTypeUsageSet, DeviceId, DeviceOps};
use serde::{Deserialize, Serialize};

use crate::policy::{HalfSupport, Mode, Support};
use crate::precision::{region, want_half};
use crate::qualification::{self, OpSet};
use crate::traffic::Traffic;
use crate::{AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, anomaly};

/// How a device computes: its precision and its loss scaling.
///
/// ```
/// use burn::backend::Flex;
/// use burn_amp::{AmpAutodiff, AmpConfig, Precision};
///
/// let device = Default::default();
/// AmpConfig::new()
///     .with_precision(Precision::Bf16)
///     .apply::<AmpAutodiff<Flex>>(&device)?;
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AmpConfig {
    precision: Precision,
    loss_scale: Option<LossScaleConfig>,
    when_stuck: WhenStuck,
    anomaly_detection: bool,
    op_qualification: bool,
}

/// What to do when steps in a row are skipped at the smallest loss scale
/// ([`Transition::StuckAtMinimum`](crate::Transition)): the gradients are not finite whatever the
/// scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WhenStuck {
    /// An error in the log, and no more.
    #[default]
    Log,
    /// The error, and a `Learner` stops after the step. Elsewhere as `Log`.
    Stop,
}

impl Default for AmpConfig {
    fn default() -> Self {
        Self {
            precision: Precision::Auto,
            loss_scale: None,
            when_stuck: WhenStuck::Log,
            anomaly_detection: false,
            op_qualification: true,
        }
    }
}

impl AmpConfig {
    /// Precision [`Auto`](Precision::Auto), dynamic loss scaling where it is needed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the precision. Default [`Auto`](Precision::Auto).
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets how the loss is scaled in f16. Default [`Dynamic`](crate::Dynamic) with its defaults.
    /// [`apply`](AmpConfig::apply) checks the ranges.
    pub fn with_loss_scale(mut self, loss_scale: LossScaleConfig) -> Self {
        self.loss_scale = Some(loss_scale);
        self
    }

    /// Sets what to do when no loss scale helps. Default [`WhenStuck::Log`].
    pub fn with_when_stuck(mut self, when_stuck: WhenStuck) -> Self {
        self.when_stuck = when_stuck;
        self
    }

    /// Looks for the first operation of a step whose result is not finite, in the forward and in
    /// the backward pass: after a skipped step [`LastStep::anomalies`](crate::LastStep::anomalies)
    /// says which it was. Default off. The counterpart of PyTorch's
    /// `torch.autograd.set_detect_anomaly`.
    ///
    /// To find a fault and not to train with: every operation waits for the device, up to three
    /// times for each operand and result. The environment variable `BURN_AMP_DETECT_ANOMALY=1` does
    /// it for all devices.
    pub fn with_anomaly_detection(mut self, anomaly_detection: bool) -> Self {
        self.anomaly_detection = anomaly_detection;
        self
    }

    /// Whether a device is tried before it computes in half, once for each half dtype. Default on:
    /// there are kernels that add up products in half, where a sum of 4,096 ones is 2,048, or that
    /// lose the last bits of a function. Such an operation then computes in FP32 and gives half;
    /// the log and [`AmpReport::inexact`](crate::AmpReport) name it.
    pub fn with_op_qualification(mut self, op_qualification: bool) -> Self {
        self.op_qualification = op_qualification;
        self
    }

    #[cfg(feature = "train")]
    pub(crate) fn when_stuck(&self) -> WhenStuck {
        self.when_stuck
    }

    /// Puts the configuration in force on `device`, for every thread, and gives the precision that
    /// is now in force there (never `Auto`). Starts the device's loss scaler and counts anew; a
    /// step of the explicit protocol that had begun on it is forgotten.
    ///
    /// `B` may be the backend itself, `Amp` of it or `AmpAutodiff` of it: they share the device.
    ///
    /// # Errors
    ///
    /// The device is left as it was when
    /// - the device cannot do the precision: [`AmpError::UnsupportedPrecision`],
    /// - a loss scale setting is out of range: [`AmpError::InvalidLossScale`],
    /// - a loss scale is given with bf16 or FP32: [`AmpError::LossScaleWithoutF16`]. With `Auto`
    ///   the same is a warning in the log, for the device has chosen.
    pub fn apply<B: Backend>(&self, device: &B::Device) -> Result<Precision, AmpError> {
        let settings = self.settings::<B>(device)?;
        self.put_in_force::<B>(device, settings)
    }

    /// As [`apply`](AmpConfig::apply) on several devices; whether losses are scaled on any. If it
    /// fails on one, or if `accept` does for that, all are as they were.
    #[cfg(feature = "train")]
    pub(crate) fn apply_to<B: Backend>(
        &self,
        devices: &[B::Device],
        accept: impl FnOnce(bool) -> Result<(), AmpError>,
    ) -> Result<bool, AmpError> {
        let settings: Vec<_> = devices
            .iter()
            .map(|device| self.settings::<B>(device))
            .collect::<Result<_, _>>()?;
        let scales = self.loss_scale != Some(LossScaleConfig::Disabled)
            && settings.iter().any(|s| s.precision.scales_loss());
        accept(scales)?;
        for (device, settings) in devices.iter().zip(settings) {
            self.put_in_force::<B>(device, settings)?;
        }
        Ok(scales)
    }

    /// What `device` is to be set to.
    fn settings<B: Backend>(&self, device: &B::Device) -> Result<Settings, AmpError> {
        let mut settings = Settings::of::<B>(device);
        settings.asked = self.precision != Precision::Auto;
        if settings.asked {
            settings.precision = settings.check::<B>(self.precision, device)?;
        }
        if self.has_idle_loss_scale(settings.precision) && settings.asked {
            return Err(AmpError::LossScaleWithoutF16 {
                precision: settings.precision,
            });
        }
        LossScaler::new(self.loss_scale.unwrap_or_default())?;
        settings.watched |= self.anomaly_detection;
        for half in [DType::F16, DType::BF16] {
            *settings.inexact(half) = match self.op_qualification {
                true => qualification::known::<B>(device, half),
                false => Some(OpSet::NONE),
            };
        }
        Ok(settings)
    }

    fn put_in_force<B: Backend>(
        &self,
        device: &B::Device,
        settings: Settings,
    ) -> Result<Precision, AmpError> {
        if !settings.asked {
            settings.log_auto::<B>(device);
        }
        if self.has_idle_loss_scale(settings.precision) {
            log::warn!(
                "burn-amp: {} computes in {}, which never scales the loss: the loss scale that was \
                 configured has no effect",
                name::<B>(device),
                settings.precision
            );
        }
        GradScaler::of::<B>(device).configure(self.loss_scale.unwrap_or_default())?;
        settings.traffic.reset();
        store::<B>(device, settings);
        if let Some(half) = settings.precision.compute_dtype() {
            qualification::begin::<B>(device, half);
        }
        Ok(settings.precision)
    }

    /// Whether a loss scale was given that `precision` has no use for.
    fn has_idle_loss_scale(&self, precision: Precision) -> bool {
        let scaled = self
            .loss_scale
            .is_some_and(|s| s != LossScaleConfig::Disabled);
        scaled && !precision.scales_loss()
    }
}

/// The precision in force on a device for this thread, never `Auto`: that of the innermost region,
/// else the device's own.
///
/// # Errors
///
/// [`AmpError::UnsupportedPrecision`] when a region asks for what the device cannot do.
pub fn precision_of<B: Backend>(device: &B::Device) -> Result<Precision, AmpError> {
    current::<B>(device).in_force::<B>(device)
}

/// What is known of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    precision: Precision,
    /// Whether it was asked for, and is not what `auto` stands for.
    asked: bool,
    auto: Precision,
    why_auto: &'static str,
    support: Support,
    traffic: &'static Traffic,
    /// Whether operations look for values that are not finite.
    watched: bool,
    /// What the device is not exact in, for each half dtype; nothing where that is not known yet.
    inexact_f16: Option<OpSet>,
    inexact_bf16: Option<OpSet>,
}

impl Settings {
    fn log_auto<B: Backend>(&self, device: &B::Device) {
        let (name, auto, why) = (name::<B>(device), self.auto, self.why_auto);
        log::info!("burn-amp: auto on {name} is {auto}: {why}");
    }

    fn of<B: Backend>(device: &B::Device) -> Self {
        let usage = |dtype| B::dtype_usage(device, dtype);
        let silent = is_silent(&bare_name::<B>(device));
        let (auto, why_auto) = auto(usage(DType::F16), usage(DType::BF16), silent);
        Self {
            precision: auto,
            asked: false,
            auto,
            why_auto,
            traffic: Traffic::of::<B>(device),
            support: Support {
                f16: half_support(usage(DType::F16)),
                bf16: half_support(usage(DType::BF16)),
            },
            watched: anomaly::is_wanted_by_environment(),
            inexact_f16: None,
            inexact_bf16: None,
        }
    }

    /// Tells the process that half precision is in use, where it is.
    fn announce(&self) {
        if self.precision.compute_dtype().is_some() {
            want_half();
        }
        if self.watched {
            anomaly::want();
        }
    }

    fn possible(&self, precision: Precision) -> bool {
        let dtype = precision.compute_dtype().unwrap_or(DType::F32);
        self.support.of(dtype) != HalfSupport::None
    }

    fn check<B: Backend>(
        &self,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Precision, AmpError> {
        if self.possible(precision) {
            return Ok(precision);
        }
        let possible = [Precision::F16, Precision::Bf16, Precision::F32]
            .into_iter()
            .filter(|p| self.possible(*p))
            .map(|p| p.to_string())
            .collect::<Vec<_>>()
            .join(", ");
        let dtype = precision.compute_dtype().unwrap_or(DType::F32);
        Err(AmpError::UnsupportedPrecision {
            precision,
            device: name::<B>(device),
            reported: usage_text(B::dtype_usage(device, dtype)),
            possible,
            hint: match type_name::<B>().contains("NdArray") {
                true => ", or the Flex backend, which computes in half on a CPU",
                false => "",
            },
        })
    }

    fn in_force<B: Backend>(&self, device: &B::Device) -> Result<Precision, AmpError> {
        match region() {
            None => Ok(self.precision),
            Some(Precision::Auto) => Ok(self.auto),
            Some(precision) => self.check::<B>(precision, device),
        }
    }

    /// The precision in force, and why it is.
    pub(crate) fn explained<B: Backend>(
        &self,
        device: &B::Device,
    ) -> Result<(Precision, &'static str), AmpError> {
        let precision = self.in_force::<B>(device)?;
        let why = match (region(), self.asked) {
            (Some(Precision::Auto), _) | (None, false) => self.why_auto,
            (Some(_), _) => "asked for in a region",
            (None, true) => "asked for with AmpConfig",
        };
        Ok((precision, why))
    }

    pub(crate) fn known_inexact(mut self, half: DType) -> OpSet {
        self.inexact(half).unwrap_or(OpSet::NONE)
    }

    /// Where it is noted what the device is not exact in.
    fn inexact(&mut self, half: DType) -> &mut Option<OpSet> {
        match half {
            DType::F16 => &mut self.inexact_f16,
            _ => &mut self.inexact_bf16,
        }
    }

    pub(crate) fn traffic(&self) -> &'static Traffic {
        self.traffic
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched
    }

    pub(crate) fn support(&self) -> Support {
        self.support
    }
}

fn half_support(usage: DTypeUsageSet) -> HalfSupport {
    if usage.is_superset(DTypeUsage::general()) {
        HalfSupport::Arithmetic
    } else if usage.is_superset(DTypeUsage::Storage | DTypeUsage::Accelerated) {
        HalfSupport::Contractions
    } else {
        HalfSupport::None
    }
}

/// Whether it is a GPU of LibTorch's, by the name of its backend. Burn reports there what can be
/// computed in, and nothing of what is accelerated.
fn is_silent(name: &str) -> bool {
    matches!(name, "libtorch<cuda>" | "libtorch<metal>")
}

/// The precision that `Auto` stands for, and why. A silent device gets f16, as from PyTorch's
/// autocast: where that is not fast, or bf16 is as fast, cannot be told.
fn auto(f16: DTypeUsageSet, bf16: DTypeUsageSet, silent: bool) -> (Precision, &'static str) {
    let accelerated = |usage: DTypeUsageSet| {
        usage.contains(DTypeUsage::Accelerated) && half_support(usage) != HalfSupport::None
    };
    if accelerated(bf16) {
        (Precision::Bf16, "the device accelerates bf16")
    } else if accelerated(f16) {
        (Precision::F16, "the device accelerates f16, and not bf16")
    } else if silent && half_support(f16) != HalfSupport::None {
        (
            Precision::F16,
            "PyTorch's autocast does so, and LibTorch does not tell what the device accelerates",
        )
    } else {
        (
            Precision::F32,
            "the device accelerates neither f16 nor bf16",
        )
    }
}

/// The backend without the layers that share its devices, and the device.
pub(crate) fn name<B: Backend>(device: &B::Device) -> String {
    format!("{} on {device:?}", bare_name::<B>(device))
}

fn bare_name<B: Backend>(device: &B::Device) -> String {
    let name = B::name(device);
    let mut bare = name.as_str();
    while let Some(inner) = ["amp<", "autodiff<"]
        .iter()
        .find_map(|layer| bare.strip_prefix(layer)?.strip_suffix('>'))
    {
        bare = inner;
    }
    bare.into()
}

fn usage_text(usage: DTypeUsageSet) -> String {
    if usage.is_empty() {
        return "nothing".into();
    }
    let uses: Vec<_> = usage.iter().map(|usage| format!("{usage:?}")).collect();
    uses.join(" and ")
}

/// What a device is known by: the same for the backends that share its type.
pub(crate) type DeviceKey = (TypeId, DeviceId);

pub(crate) fn key<B: Backend>(device: &B::Device) -> DeviceKey {
    (TypeId::of::<B::Device>(), device.id())
}

static DEVICES: LazyLock<Mutex<HashMap<DeviceKey, Settings>>> = LazyLock::new(Mutex::default);
/// Grows with every change of [`DEVICES`], so that threads know when their copies are stale.
static GENERATION: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static SEEN_GENERATION: Cell<u64> = const { Cell::new(0) };
    static SEEN: RefCell<Vec<(DeviceKey, Settings)>> = const { RefCell::new(Vec::new()) };
}

/// The settings of a device. Costs an operation a short walk over the devices that this thread has
/// used; no lock, no allocation, no hashing.
pub(crate) fn current<B: Backend>(device: &B::Device) -> Settings {
    let key = key::<B>(device);
    let seen = SEEN.with_borrow(|seen| {
        if SEEN_GENERATION.get() != GENERATION.load(Ordering::Acquire) {
            return None;
        }
        seen.iter().find(|(k, _)| *k == key).map(|(_, s)| *s)
    });
    seen.unwrap_or_else(|| look_up::<B>(device, key))
}

#[cold]
fn look_up<B: Backend>(device: &B::Device, key: DeviceKey) -> Settings {
    let generation = GENERATION.load(Ordering::Acquire);
    let known = lock().get(&key).copied();
    let settings = known.unwrap_or_else(|| {
        let settings = Settings::of::<B>(device);
        let (first, settings) = match lock().entry(key) {
            Entry::Occupied(known) => (false, *known.get()),
            Entry::Vacant(entry) => (true, *entry.insert(settings)),
        };
        if first {
            settings.announce();
            settings.log_auto::<B>(device);
        }
        settings
    });
    SEEN.with_borrow_mut(|seen| {
        if SEEN_GENERATION.replace(generation) != generation {
            seen.clear();
        }
        seen.push((key, settings));
    });
    settings
}

fn store<B: Backend>(device: &B::Device, settings: Settings) {
    let key = key::<B>(device);
    settings.announce();
    lock().insert(key, settings);
    GENERATION.fetch_add(1, Ordering::Release);
}

fn lock() -> std::sync::MutexGuard<'static, HashMap<DeviceKey, Settings>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a device, of a backend that computes, is not exact in. Tries it where that is not known.
pub(crate) fn inexact<B: Backend>(device: &B::Device, half: DType) -> OpSet {
    let mut settings = current::<B>(device);
    if let Some(known) = *settings.inexact(half) {
        return known;
    }
    let found = qualification::of::<B>(device, half);
    if !found.is_none() {
        log::info!(
            "burn-amp: {} is not exact in {half:?} in {}: these compute in FP32 and give {half:?}",
            name::<B>(device),
            found.names().collect::<Vec<_>>().join(", ")
        );
    }
    *settings.inexact(half) = Some(found);
    store::<B>(device, settings);
    found
}

/// The mode of an operation on `device`, before what its operands say.
///
/// # Panics
///
/// When a region asks for a precision that the device cannot do, with
/// [`AmpError::UnsupportedPrecision`]'s text.
pub(crate) fn mode<B: Backend>(device: &B::Device) -> Mode {
    let precision = current::<B>(device)
        .in_force::<B>(device)
        .unwrap_or_else(|error| panic!("{error}"));
    match precision.compute_dtype() {
        Some(dtype) => Mode::On(dtype),
        None => Mode::Off,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_prefers_accelerated_bf16_then_f16_then_fp32() {
        let none = DTypeUsageSet::empty();
        let general = DTypeUsage::general();
        let accelerated = general | DTypeUsage::Accelerated;
        let contractions = DTypeUsage::Storage | DTypeUsage::Accelerated;
        for (f16, bf16, expected) in [
            (accelerated, accelerated, Precision::Bf16),
            (accelerated, contractions, Precision::Bf16),
            (accelerated, general, Precision::F16),
            (contractions, none, Precision::F16),
            (general, general, Precision::F32),
            (none, none, Precision::F32),
            (DTypeUsage::Accelerated.into(), none, Precision::F32),
        ] {
            assert_eq!(auto(f16, bf16, false).0, expected, "{f16:?} {bf16:?}");
        }
    }

    #[test]
    fn auto_is_f16_on_a_gpu_that_does_not_tell() {
        let general = DTypeUsage::general();
        let none = DTypeUsageSet::empty();
        assert_eq!(auto(general, general, true).0, Precision::F16);
        assert_eq!(auto(none, general, true).0, Precision::F32);
        let told = general | DTypeUsage::Accelerated;
        assert_eq!(auto(general, told, true).0, Precision::Bf16);
    }

    #[test]
    fn support_is_read_from_the_usage() {
        assert_eq!(half_support(DTypeUsage::general()), HalfSupport::Arithmetic);
        assert_eq!(
            half_support(DTypeUsage::Storage | DTypeUsage::Accelerated),
            HalfSupport::Contractions
        );
        assert_eq!(half_support(DTypeUsage::Storage.into()), HalfSupport::None);
    }
}
