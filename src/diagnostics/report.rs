//! The report of mixed precision on a device, to print or to keep.

use std::fmt;

use burn_amp_core::{Casts, Chosen, counted, grouped, line, report_lines};
use burn_backend::Backend;
use serde::{Deserialize, Serialize};

use crate::device::{self, DeviceState};
use crate::policy::{Exception, Reason};
use crate::{AmpError, GradScaler, LossScaleConfig, Precision, ScaleHistory};

/// A snapshot of a device's precision, loss scale, steps and casts. Printed, it is a short table;
/// serde keeps every field.
///
/// ```
/// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
/// # use burn_amp::{AmpAutodiff, AmpReport, GradScaler, LossScaleConfig, Precision};
/// # use burn_amp::with_precision;
/// # type B = AmpAutodiff<Flex>;
/// # let device = Default::default();
/// # let scaler = GradScaler::new(LossScaleConfig::default())?;
/// # let model = LinearConfig::new(4, 2).init::<B>(&device);
/// # let report = with_precision(Precision::F16, || scaler.scope(|| {
/// # model.forward(Tensor::<B, 2>::ones([8, 4], &device) * 1e30).mean().backward();
/// println!("{}", AmpReport::of::<B>(&device)?);
/// # AmpReport::of::<B>(&device).map(|report| report.with_scaler(&scaler))
/// # }))?.to_string();
/// # assert!(report.contains("precision   f16: asked for in a region"), "{report}");
/// # assert!(report.contains("0 taken, 1 skipped: 1 loss not finite"), "{report}");
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
///
/// ```text
/// device      flex on Cpu
/// precision   f16: asked for with AmpConfig
/// loss scale  32768: dynamic, from 65536, lowest 32768, highest 65536
/// steps       2 taken, 1 skipped: 1 overflow
///             step 2 at 65536: 2 gradients not finite
/// FP32 here   linear, linear_weight_backward: computed in FP32, then rounded to f16
/// casts       14 (714 B) to f16 or bf16, 24 (1.3 KiB) to FP32 or wider
/// read-backs  4
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AmpReport {
    /// The device and its backend, without the mixed-precision and autodiff layers.
    pub device: String,
    /// The precision in force on this thread, never `Auto`.
    pub precision: Precision,
    /// Why this precision is in force.
    pub reason: String,
    /// Whether the precision scales losses, or the loss of a step so far was scaled, as in a region.
    pub scales_loss: bool,
    /// How losses are scaled in f16.
    pub loss_scaling: LossScaleConfig,
    /// The factor on the next loss in f16; 1 if loss scaling is disabled.
    pub loss_scale: f32,
    /// Steps whose gradients were checked and finite. In bf16 and FP32 nothing is checked, and no
    /// step is counted, without [`AmpConfig::with_finite_check`](crate::AmpConfig::with_finite_check).
    pub taken_steps: u64,
    /// Skipped steps, for any reason.
    pub skipped_steps: u64,
    /// Skipped steps whose loss itself was not finite. The other skipped steps overflowed.
    pub non_finite_losses: u64,
    /// Steps skipped since the last step taken.
    pub skipped_in_a_row: u64,
    /// Which steps were skipped and why, and how the scale changed.
    pub history: ScaleHistory,
    /// Operations that this device computes in another precision than the policy's table says, each with its
    /// [reason](crate::policy::Reason): see [`exceptions`](crate::exceptions()). Of what is tried, only operations that
    /// have run on the device so far. Empty where FP32 is in force.
    pub exceptions: Vec<Exception>,
    /// Calls of contractions in half that were not verified so far: see
    /// [`AmpConfig::with_verification`](crate::AmpConfig::with_verification).
    pub unverified: Vec<String>,
    /// Casts of tensors to f16 or bf16, since the device was configured.
    pub casts_to_half: Casts,
    /// Casts of tensors to FP32 or F64, since the device was configured.
    pub casts_from_half: Casts,
    /// Contractions that stayed FP32 because nothing learned took part, since the device was configured. See
    /// [`AmpConfig::with_data_in_half`](crate::AmpConfig::with_data_in_half).
    pub contractions_of_data: u64,
    /// How often burn-amp itself read values back since the device was configured: to check gradients and losses, to
    /// compare kernels, and for anomaly detection. The host waits for the device each time. Reads of the program, and
    /// of a trainer's losses, are not counted.
    pub read_backs: u64,
}

/// How many of the latest skipped steps the text shows.
const SHOWN: usize = 5;

impl AmpReport {
    /// The report of a device, with its own loss scaler. The precision is this thread's; the counts
    /// are those of all threads.
    ///
    /// # Errors
    ///
    /// [`AmpError::UnsupportedPrecision`] when a region requests a precision that the device lacks.
    pub fn of<B: Backend>(device: &B::Device) -> Result<Self, AmpError> {
        let Chosen { precision, why } = device::explained::<B>(device)?;
        let state = DeviceState::of::<B>(device);
        let mut exceptions = state.exceptions().in_force(precision);
        let settings = state.in_force::<B>(device);
        exceptions.retain(|exception| match exception.reason {
            Reason::Tried => settings.tried,
            Reason::Verified => settings.verifies,
            _ => true,
        });
        let statistics = state.statistics();
        let unscaled = Self {
            device: device::name::<B>(device),
            precision,
            reason: why.into(),
            scales_loss: false,
            loss_scaling: LossScaleConfig::Disabled,
            loss_scale: 1.0,
            taken_steps: 0,
            skipped_steps: 0,
            non_finite_losses: 0,
            skipped_in_a_row: 0,
            history: ScaleHistory::default(),
            exceptions,
            unverified: match settings.verifies {
                true => state.exceptions().unverified(precision),
                false => Vec::new(),
            },
            casts_to_half: statistics.to_half.casts(),
            casts_from_half: statistics.from_half.casts(),
            contractions_of_data: statistics.contractions_of_data(),
            read_backs: statistics.read_backs(),
        };
        Ok(unscaled.with_scaler(&GradScaler::of::<B>(device)))
    }

    /// The same report with another scaler's steps, for a model with its own scaler.
    pub fn with_scaler(self, scaler: &GradScaler) -> Self {
        let state = scaler.state();
        Self {
            scales_loss: self.precision.scales_loss() || scaler.shared.has_scaled(),
            loss_scaling: *state.config(),
            loss_scale: state.scale(),
            taken_steps: state.taken_steps(),
            skipped_steps: state.skipped_steps(),
            non_finite_losses: state.non_finite_losses(),
            skipped_in_a_row: state.skipped_in_a_row(),
            history: scaler.history(),
            ..self
        }
    }

    /// All steps that the scaler counted, including skipped steps.
    pub fn steps(&self) -> u64 {
        self.taken_steps + self.skipped_steps
    }
}

impl fmt::Display for AmpReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { history, .. } = self;
        writeln!(f, "device      {}", self.device)?;
        writeln!(f, "precision   {}: {}", self.precision, self.reason)?;
        if !self.scales_loss {
            writeln!(f, "loss scale  none: {} needs none", self.precision)?;
        } else {
            write!(f, "loss scale  {}: ", self.loss_scale)?;
            match self.loss_scaling {
                LossScaleConfig::Dynamic(_) => {
                    let lowest = history.scales().fold(self.loss_scale, f32::min);
                    let highest = history.scales().fold(self.loss_scale, f32::max);
                    let first = history.first_scale;
                    writeln!(
                        f,
                        "dynamic, from {first}, lowest {lowest}, highest {highest}"
                    )?;
                }
                LossScaleConfig::Fixed(_) => writeln!(f, "fixed")?,
                LossScaleConfig::Disabled => writeln!(f, "disabled")?,
            }
        }
        if self.scales_loss || self.steps() > 0 {
            let (taken, skipped) = (grouped(self.taken_steps), grouped(self.skipped_steps));
            let losses = self.non_finite_losses;
            let reasons = [
                counted(self.skipped_steps - losses, "overflow", "overflows"),
                counted(losses, "loss not finite", "losses not finite"),
            ];
            let reasons = reasons.into_iter().flatten().collect::<Vec<_>>().join(", ");
            let colon = if reasons.is_empty() { "" } else { ": " };
            writeln!(
                f,
                "steps       {taken} taken, {skipped} skipped{colon}{reasons}"
            )?;
            let earlier = history.skipped().count().saturating_sub(SHOWN);
            if earlier > 0 {
                writeln!(f, "            the last {SHOWN} of them:")?;
            }
            for (step, skipped) in history.skipped().skip(earlier) {
                writeln!(f, "            step {} at {skipped}", grouped(step))?;
            }
            if self.skipped_in_a_row > 1 {
                let in_a_row = grouped(self.skipped_in_a_row);
                writeln!(f, "            the last {in_a_row} steps were skipped")?;
            }
        }
        f.write_str(&report_lines(self.precision, &self.exceptions))?;
        let not_yet = "not compared with a reference yet";
        f.write_str(&line("unverified", &self.unverified, "calls", not_yet))?;
        let (to, from) = (self.casts_to_half, self.casts_from_half);
        writeln!(
            f,
            "casts       {to} to f16 or bf16, {from} to FP32 or wider"
        )?;
        let of_data = self.contractions_of_data;
        if let Some(of_data) = counted(of_data, "contraction", "contractions") {
            writeln!(
                f,
                "data        {of_data} in FP32: nothing learned took part"
            )?;
        }
        write!(f, "read-backs  {}", grouped(self.read_backs))
    }
}
