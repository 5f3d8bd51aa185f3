//! The configuration of a device.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use burn_amp_core::is_watched_by_environment;
use burn_backend::Backend;
use serde::{Deserialize, Deserializer, Serialize};

use super::{BackendKind, DeviceState, name};
use crate::policy::{OpPrecision, OpPrecisions, Support};
use crate::{AmpError, GradScaler, LossScaleConfig, LossScaler, Precision, WhenStuck};

/// How a device computes: its precision, the precision of single operations, and its loss scaling.
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
#[serde(default, deny_unknown_fields)]
pub struct AmpConfig {
    precision: Precision,
    #[serde(deserialize_with = "operations")]
    operations: OpPrecisions,
    loss_scale: Option<LossScaleConfig>,
    when_stuck: WhenStuck,
    data_in_half: bool,
    finite_check: bool,
    anomaly_detection: bool,
    trials: bool,
    verification: Option<bool>,
    overflow_fallback: bool,
    replica_timeout: Duration,
}

impl Default for AmpConfig {
    fn default() -> Self {
        Self {
            precision: Precision::Auto,
            operations: OpPrecisions::default(),
            loss_scale: None,
            when_stuck: WhenStuck::Log,
            data_in_half: false,
            finite_check: false,
            anomaly_detection: false,
            trials: true,
            verification: None,
            overflow_fallback: true,
            replica_timeout: Duration::from_secs(600),
        }
    }
}

impl AmpConfig {
    /// Precision [`Auto`](Precision::Auto), dynamic loss scaling where needed.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the precision. Default [`Auto`](Precision::Auto).
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the precision of one operation, in the place of the policy's. The counterpart of
    /// `register_half_function` and `register_float_function` of NVIDIA's Apex. `op` is the operation's
    /// name in [`policy::rows`](crate::policy::rows); `float_` may be left out. The precision applies
    /// to every call of the operation in the forward pass where half precision is in force; the
    /// backward pass follows the forward pass. See [`OpPrecision`] for the meaning of the two
    /// precisions.
    ///
    /// ```
    /// # use burn::backend::Flex;
    /// # use burn_amp::{AmpAutodiff, AmpConfig, Precision, policy::OpPrecision};
    /// let config = AmpConfig::new()
    ///     .with_precision(Precision::Bf16)
    ///     .with_op("softmax", OpPrecision::Half)?
    ///     .with_op("conv2d", OpPrecision::F32)?;
    /// config.apply::<AmpAutodiff<Flex>>(&Default::default())?;
    /// # Ok::<(), burn_amp::AmpError>(())
    /// ```
    ///
    /// In FP32, in [`full_precision`](crate::full_precision) and on FP64 tensors nothing changes. The
    /// policy's precision also stays where a scalar is out of the half dtype's range, or where the
    /// device does not compute in half. A step inside another operation follows that operation:
    /// `softmax` does not change the softmax inside `attention`.
    ///
    /// # Errors
    ///
    /// - [`AmpError::UnknownOperation`] if there is no such operation,
    /// - [`AmpError::OperationPrecision`] if the operation cannot have the precision: it moves data, it
    ///   belongs to the backward pass, or it computes in the dtype of its operand anyway.
    pub fn with_op(mut self, op: &str, precision: OpPrecision) -> Result<Self, AmpError> {
        self.operations = self.operations.with(BURN, op, precision)?;
        Ok(self)
    }

    /// Sets whether a contraction, such as a product of matrices, runs in half although nothing learned takes part.
    /// Default off. Learned is a parameter, frozen or not; a tensor that requires a gradient; and what is computed
    /// from one. Anything else is data, such as positions, indices, targets or a filter bank: its values may be
    /// beyond half, and need all their bits. PyTorch's `autocast` stands around a model's forward pass; a precision
    /// of burn-amp's is a device's, and reaches batchers, constructors and metrics as well.
    ///
    /// Use it if your weights are plain tensors, and in no `Param`. It applies in training and in inference: the default
    /// is the same for [`Amp<B>`](crate::Amp) alone, so that a trained model gives the same values there. To mark a single
    /// tensor as learned, call `tensor.set_require_grad(false)`. FP32 products with an inner dimension of 1 stay FP32.
    pub fn with_data_in_half(mut self, data_in_half: bool) -> Self {
        self.data_in_half = data_in_half;
        self
    }

    /// Sets how the loss is scaled in f16. Default [`DynamicLossScale`](crate::DynamicLossScale) with its defaults.
    /// [`apply`](AmpConfig::apply) checks the ranges.
    pub fn with_loss_scale(mut self, loss_scale: LossScaleConfig) -> Self {
        self.loss_scale = Some(loss_scale);
        self
    }

    /// Sets what to do when a run is stuck: see [`Transition::Stuck`](crate::Transition). Default
    /// [`WhenStuck::Log`].
    pub fn with_when_stuck(mut self, when_stuck: WhenStuck) -> Self {
        self.when_stuck = when_stuck;
        self
    }

    /// Sets whether the loss and the gradients of each step are checked where no loss is scaled, too: in bf16 and
    /// FP32, and with [`LossScaleConfig::Disabled`]. A step that is not finite is then skipped and counted, and
    /// [`GradScaler::last_step`] names its parameters, as in f16. Without the check, such a step changes the
    /// parameters, and the log has a line once the program reads its loss. Default off: the check costs one
    /// read-back per backward pass, as in f16. DeepSpeed's `check_grad_overflow` and
    /// Megatron-LM's `check_for_nan_in_loss_and_grad` check in bf16, too.
    pub fn with_finite_check(mut self, finite_check: bool) -> Self {
        self.finite_check = finite_check;
        self
    }

    /// Looks for the first operation of a step whose result is not finite, in the forward and in
    /// the backward pass. After a skipped step, [`LastStep::anomalies`](crate::LastStep::anomalies)
    /// names the operation. Default off. The counterpart of PyTorch's
    /// `torch.autograd.set_detect_anomaly`.
    ///
    /// A forward pass without a backward pass counts towards the next step: validate on `model.valid()`.
    ///
    /// For debugging, not for training: every operation waits for the device, up to three times for
    /// each operand and result. The environment variable `BURN_AMP_DETECT_ANOMALY=1` turns
    /// detection on for all devices.
    pub fn with_anomaly_detection(mut self, anomaly_detection: bool) -> Self {
        self.anomaly_detection = anomaly_detection;
        self
    }

    /// Sets whether a trial checks an operation's kernels when it first computes in half on a
    /// device, once for each half dtype. Default on: some kernels accumulate products in half, so
    /// that 4,096 ones sum to 2,048, or lose the last bits of a function. Such an operation then
    /// computes in FP32 and returns half; the log and [`exceptions`](crate::exceptions()) name it.
    pub fn with_trials(mut self, trials: bool) -> Self {
        self.trials = trials;
        self
    }

    /// Sets whether contractions in half are verified at the shapes that a program uses. Default on where kernels are chosen by
    /// shape: on CubeCL and LibTorch, and off on Flex. The environment variable `BURN_AMP_VERIFY`, `1` or `0`, sets the
    /// default of all devices.
    ///
    /// Products, convolutions and their gradients whose shapes are new are compared with sums on the host, in FP64: some tens
    /// of values of each result, at its edges and corners and between. A value may be off by the rounding of the result, and
    /// by what a sum in FP32 adds. A call with a wrong value becomes an [exception](crate::exceptions()): it and those like it
    /// compute in FP32, and return half. A [trial](Self::with_trials) comes before an operation's first use, at shapes of its
    /// own, and checks all kinds of operations; it does not see a kernel that is wrong at some shapes alone.
    ///
    /// On LibTorch each such call is compared at once, and computed again in FP32 if it is found wrong, before its result is
    /// used. Elsewhere up to 16 calls are compared at the end of a pass, in which their results were used. Such a pass holds up
    /// to 256 MiB of operands and results to its end, and waits for the device once more; a larger call is not compared.
    ///
    /// Shapes are alike if the sizes of weights and channels are, and the other sizes up to the next power of two and in their
    /// divisors 2 to 64. Operands that are zero or all equal tell nothing: a later use is compared.
    /// [`AmpReport::unverified`](crate::AmpReport::unverified) lists what was not compared so far. `false` also ignores what is
    /// known.
    pub fn with_verification(mut self, verification: bool) -> Self {
        self.verification = Some(verification);
        self
    }

    /// Sets whether an operation that overflows f16 at any loss scale computes in FP32 from then on. Default on. Without
    /// it, as in PyTorch, every step of such a run is skipped: a loss scale mends gradients, and no forward pass.
    ///
    /// With a dynamic loss scale alone. After a step whose loss is not finite, and after an overflow at a scale that has
    /// fallen by 2^6, or to its minimum, since it last grew, the next passes are watched as by [anomaly
    /// detection](Self::with_anomaly_detection), at its cost: 1 pass, then 2, 4, .. 32. On Flex and LibTorch so are the
    /// first 32 calls of each operation after 8, 64, 512, .. steps. An operation
    /// whose finite operands give a result that is not finite becomes an [exception](crate::exceptions()) of the
    /// device: its calls that sum as many products, or have the same last dimension, run in FP32; after a second such
    /// number, all of its calls. So does one whose gradient alone overflows in 8 such steps, once the
    /// scale is at most 16, or at the minimum scale. What is not finite in FP32
    /// either is the program's own, and such steps are skipped as before. The passes of a loss are watched on its
    /// device.
    pub fn with_overflow_fallback(mut self, overflow_fallback: bool) -> Self {
        self.overflow_fallback = overflow_fallback;
        self
    }

    /// Sets how long a replica of Burn's distributed data parallel (feature `distributed`) waits
    /// for the others to report whether their gradients are finite. After that time the replica
    /// panics and names the missing replicas. Default 10 minutes, like PyTorch's for NCCL.
    pub fn with_replica_timeout(mut self, replica_timeout: Duration) -> Self {
        self.replica_timeout = replica_timeout;
        self
    }

    #[cfg(feature = "train")]
    pub(crate) fn checks(&self) -> bool {
        self.finite_check
    }

    #[cfg(feature = "train")]
    pub(crate) fn when_stuck(&self) -> WhenStuck {
        self.when_stuck
    }

    /// Applies the configuration to `device`, for every thread, and returns the precision that is
    /// now in force there (never `Auto`). Resets the device's loss scaler and counts, and discards
    /// a step of the explicit protocol that has begun on the scaler.
    ///
    /// `B` may be the backend itself, its `Amp` or its `AmpAutodiff`: all three share the device.
    ///
    /// # Errors
    ///
    /// The device is left unchanged if
    /// - the device does not support the precision: [`AmpError::UnsupportedPrecision`],
    /// - a loss scale setting is out of range: [`AmpError::InvalidLossScale`],
    /// - a loss scale is given with bf16 or FP32: [`AmpError::LossScaleWithoutF16`]. With `Auto`
    ///   this is only a warning in the log, because the device chose the precision.
    pub fn apply<B: Backend>(&self, device: &B::Device) -> Result<Precision, AmpError> {
        let settings = self.checked::<B>(device)?;
        self.put_in_force::<B>(device, settings)
    }

    /// Like [`apply`](AmpConfig::apply), on several devices. Returns whether any of them scales losses.
    /// If a device fails, all devices are left unchanged.
    #[cfg(feature = "train")]
    pub(crate) fn apply_to<B: Backend>(&self, devices: &[B::Device]) -> Result<bool, AmpError> {
        let all = devices.iter().map(|device| self.checked::<B>(device));
        let all: Vec<_> = all.collect::<Result<_, _>>()?;
        let scales = self.loss_scale != Some(LossScaleConfig::Disabled)
            && all.iter().any(|settings| settings.precision.scales_loss());
        for (device, settings) in devices.iter().zip(all) {
            self.put_in_force::<B>(device, settings)?;
        }
        Ok(scales)
    }

    /// The settings that `device` would get, if the device supports them.
    fn checked<B: Backend>(&self, device: &B::Device) -> Result<Settings, AmpError> {
        let state = DeviceState::of::<B>(device);
        let chosen = self.precision != Precision::Auto;
        let precision = if chosen {
            state.check::<B>(device, self.precision)?
        } else {
            state.auto::<B>(device).precision
        };
        if chosen && self.has_idle_loss_scale(precision) {
            return Err(AmpError::LossScaleWithoutF16 { precision });
        }
        LossScaler::new(self.loss_scale.unwrap_or_default())?;
        Ok(self.settings::<B>(device, precision))
    }

    /// The settings that operations read.
    pub(super) fn settings<B: Backend>(
        &self,
        device: &B::Device,
        precision: Precision,
    ) -> Settings {
        let kind = BackendKind::of::<B>(device);
        let compiles = kind.may_be_cubecl;
        let verifies = self.verification.or(verifies_by_environment());
        Settings {
            precision,
            support: DeviceState::of::<B>(device).support::<B>(device),
            compiles,
            verifies: verifies.unwrap_or(compiles || kind.is_libtorch),
            is_chosen: self.precision != Precision::Auto,
            watched: self.anomaly_detection || is_watched_by_environment(),
            tried: self.trials,
            falls_back: self.overflow_fallback,
            checked: self.finite_check,
            data_in_half: self.data_in_half,
            replica_timeout: self.replica_timeout,
        }
    }

    fn put_in_force<B: Backend>(
        &self,
        device: &B::Device,
        settings: Settings,
    ) -> Result<Precision, AmpError> {
        let state = DeviceState::of::<B>(device);
        let precision = settings.precision;
        if self.has_idle_loss_scale(precision) {
            log::warn!(
                "burn-amp: {} computes in {precision}, which needs no loss scale: the configured \
                 loss scale has no effect",
                name::<B>(device)
            );
        }
        GradScaler::of::<B>(device).configure(self.loss_scale.unwrap_or_default())?;
        state.statistics().reset();
        state.put_in_force(settings, self.operations);
        Ok(precision)
    }

    /// Whether a loss scale was given although `precision` never scales the loss.
    fn has_idle_loss_scale(&self, precision: Precision) -> bool {
        let given = self.loss_scale.unwrap_or(LossScaleConfig::Disabled);
        given != LossScaleConfig::Disabled && !precision.scales_loss()
    }
}

/// What the environment says of verification, if it does.
fn verifies_by_environment() -> Option<bool> {
    static ASKED: LazyLock<Option<bool>> = LazyLock::new(|| {
        let value = std::env::var("BURN_AMP_VERIFY").ok()?;
        (!value.trim().is_empty()).then(|| !matches!(value.trim(), "0" | "false"))
    });
    *ASKED
}

/// The version of Burn.
const BURN: &str = "0.21";

fn operations<'de, D: Deserializer<'de>>(from: D) -> Result<OpPrecisions, D::Error> {
    let named: BTreeMap<String, String> = Deserialize::deserialize(from)?;
    OpPrecisions::parsed(BURN, named).map_err(serde::de::Error::custom)
}

/// A configuration that passed a device's checks, in the form that operations read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// Never `Auto`.
    pub precision: Precision,
    /// What the device supports.
    pub support: Support,
    /// Whether the user set this precision; false if `Auto` selected it.
    pub is_chosen: bool,
    /// Whether anomaly detection is on.
    pub watched: bool,
    /// Whether a trial checks an operation before it computes in half.
    pub tried: bool,
    /// Whether contractions are compared with a reference at the program's shapes.
    pub verifies: bool,
    /// Whether an operation that overflows f16 at any loss scale computes in FP32.
    pub falls_back: bool,
    /// Whether the backend compiles kernels.
    pub compiles: bool,
    /// Whether a step is checked where its loss is not scaled.
    pub checked: bool,
    /// Whether a contraction in which nothing learned takes part is demoted, too.
    pub data_in_half: bool,
    /// How long a replica waits for another one.
    pub replica_timeout: Duration,
}
