//! How the loss is scaled. Independent of tensors, backends and devices.

use serde::{Deserialize, Serialize};

use crate::AmpError;

/// How the loss is scaled while f16 is in force.
///
/// Loss scaling follows Micikevicius et al., "Mixed Precision Training" (2018), section 3.2. The
/// scale is a unitless factor; a power of two costs no rounding. The defaults are those of
/// PyTorch's `torch.amp.GradScaler`, plus a minimum and a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum LossScaleConfig {
    /// As large as the gradients allow, adjusted during training.
    Dynamic(DynamicLossScale),
    /// A constant scale, positive and finite. Steps that overflow are still skipped; after 20 in a
    /// row the run is [`Stuck`](crate::Transition::Stuck).
    Fixed(f32),
    /// No scaling and no check: gradients below 6e-8 flush to zero in f16.
    Disabled,
}

/// The settings of dynamic loss scaling; [`LossScaler`](crate::LossScaler) gives the rule. A step
/// is an optimizer step, not a batch. Only where `loss.backward()` itself scales the loss, as on
/// burn-amp's `AmpAutodiff` outside of a `Learner` with `.with_amp()`, a step is a backward pass: multiply
/// `growth_interval` by the number of batches that are accumulated there.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicLossScale {
    /// The scale of the first step, from `min_scale` to `max_scale`. Default 65536.
    pub init_scale: f32,
    /// Multiplies the scale after `growth_interval` good steps. Above 1. Default 2.
    pub growth_factor: f32,
    /// Multiplies the scale after an overflow. Between 0 and 1. Default 0.5.
    pub backoff_factor: f32,
    /// Steps with finite gradients, without an overflow between them, before the scale grows. At
    /// least 1. Default 2000.
    pub growth_interval: u32,
    /// The scale never falls below this positive value. Default 1.
    pub min_scale: f32,
    /// The scale never grows above this finite value. Default 2^24, as in Apex.
    pub max_scale: f32,
    /// Overflows needed before the scale backs off, as in Megatron-LM. Refilled after
    /// `growth_interval` good steps. At least 1. Default 1.
    pub hysteresis: u32,
    /// Skipped steps that leave the scale as it is, without a step taken between them, before
    /// [`Stuck`](crate::Transition::Stuck): losses that are not finite, and overflows at
    /// `min_scale`. At least 1. Default 20.
    pub stuck_after: u32,
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            min_scale: 1.0,
            max_scale: 16_777_216.0,
            hysteresis: 1,
            stuck_after: 20,
        }
    }
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        LossScaleConfig::Dynamic(DynamicLossScale::default())
    }
}

/// The builder methods of the [`DynamicLossScale`] settings.
macro_rules! settings {
    ($($with:ident $field:ident: $ty:ty;)*) => {$(
        #[doc = concat!("Sets [`", stringify!($field), "`](DynamicLossScale::", stringify!($field), ").")]
        pub fn $with(mut self, $field: $ty) -> Self {
            self.$field = $field;
            self
        }
    )*};
}

impl DynamicLossScale {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The range of valid scales, in words.
    fn bounds(&self) -> String {
        let (min, max) = (self.min_scale, self.max_scale);
        format!("a number from min_scale ({min}) to max_scale ({max})")
    }

    settings! {
        with_init_scale init_scale: f32;
        with_growth_factor growth_factor: f32;
        with_backoff_factor backoff_factor: f32;
        with_growth_interval growth_interval: u32;
        with_min_scale min_scale: f32;
        with_max_scale max_scale: f32;
        with_hysteresis hysteresis: u32;
        with_stuck_after stuck_after: u32;
    }
}

impl From<DynamicLossScale> for LossScaleConfig {
    fn from(dynamic: DynamicLossScale) -> Self {
        LossScaleConfig::Dynamic(dynamic)
    }
}

impl LossScaleConfig {
    /// The scale of the first step; 1 when disabled.
    pub(crate) fn init_scale(&self) -> f32 {
        match self {
            LossScaleConfig::Dynamic(dynamic) => dynamic.init_scale,
            LossScaleConfig::Fixed(scale) => *scale,
            LossScaleConfig::Disabled => 1.0,
        }
    }

    /// Checks a scale that is set or loaded.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when `scale` is not positive and finite, or outside a dynamic
    /// configuration's bounds, or not 1 while loss scaling is disabled.
    pub(super) fn check_scale(&self, scale: f32) -> Result<(), AmpError> {
        let (holds, expected) = match self {
            LossScaleConfig::Dynamic(dynamic) => (
                (dynamic.min_scale..=dynamic.max_scale).contains(&scale),
                dynamic.bounds(),
            ),
            LossScaleConfig::Fixed(_) => (is_positive(scale), POSITIVE.into()),
            LossScaleConfig::Disabled => (scale == 1.0, "1 while loss scaling is disabled".into()),
        };
        check(holds, "scale", scale, expected)
    }

    /// Returns the configuration if every setting is in range.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] names the first setting out of range.
    pub(crate) fn validated(self) -> Result<Self, AmpError> {
        match self {
            LossScaleConfig::Disabled => {}
            LossScaleConfig::Fixed(scale) => {
                check(is_positive(scale), "fixed scale", scale, POSITIVE)?;
            }
            LossScaleConfig::Dynamic(d) => {
                check(is_positive(d.min_scale), "min_scale", d.min_scale, POSITIVE)?;
                let holds = d.max_scale.is_finite() && d.max_scale >= d.min_scale;
                let expected = format!("a finite number, at least min_scale ({})", d.min_scale);
                check(holds, "max_scale", d.max_scale, expected)?;
                let holds = (d.min_scale..=d.max_scale).contains(&d.init_scale);
                check(holds, "init_scale", d.init_scale, d.bounds())?;
                let holds = d.growth_factor > 1.0 && d.growth_factor.is_finite();
                let expected = "a finite number above 1";
                check(holds, "growth_factor", d.growth_factor, expected)?;
                let holds = d.backoff_factor > 0.0 && d.backoff_factor < 1.0;
                let expected = "a number between 0 and 1";
                check(holds, "backoff_factor", d.backoff_factor, expected)?;
                for (field, count) in [
                    ("growth_interval", d.growth_interval),
                    ("hysteresis", d.hysteresis),
                    ("stuck_after", d.stuck_after),
                ] {
                    check(count >= 1, field, count, "at least 1")?;
                }
            }
        }
        Ok(self)
    }
}

const POSITIVE: &str = "a positive and finite number";

fn is_positive(scale: f32) -> bool {
    scale > 0.0 && scale.is_finite()
}

/// Returns the error of a setting unless `holds`.
pub(super) fn check(
    holds: bool,
    field: &'static str,
    given: impl ToString,
    expected: impl Into<String>,
) -> Result<(), AmpError> {
    if holds {
        Ok(())
    } else {
        Err(AmpError::InvalidLossScale {
            field,
            given: given.to_string(),
            expected: expected.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(change: impl Fn(&mut DynamicLossScale)) -> (&'static str, String) {
        let mut dynamic = DynamicLossScale::default();
        change(&mut dynamic);
        match LossScaleConfig::Dynamic(dynamic).validated() {
            Err(AmpError::InvalidLossScale { field, given, .. }) => (field, given),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_defaults_are_valid_and_are_pytorchs() {
        let config = LossScaleConfig::default().validated().unwrap();
        assert_eq!(config.init_scale(), 65536.0);
        assert_eq!(
            LossScaleConfig::Disabled.validated().unwrap().init_scale(),
            1.0
        );
        assert_eq!(
            LossScaleConfig::Fixed(512.0)
                .validated()
                .unwrap()
                .init_scale(),
            512.0
        );
    }

    #[test]
    fn each_setting_out_of_range_is_named_with_its_value() {
        assert_eq!(rejected(|d| d.min_scale = 0.0), ("min_scale", "0".into()));
        assert_eq!(rejected(|d| d.max_scale = 0.5), ("max_scale", "0.5".into()));
        assert_eq!(
            rejected(|d| d.max_scale = f32::INFINITY),
            ("max_scale", "inf".into())
        );
        assert_eq!(
            rejected(|d| d.init_scale = 0.5),
            ("init_scale", "0.5".into())
        );
        assert_eq!(
            rejected(|d| d.init_scale = f32::NAN),
            ("init_scale", "NaN".into())
        );
        assert_eq!(
            rejected(|d| d.growth_factor = 1.0),
            ("growth_factor", "1".into())
        );
        assert_eq!(
            rejected(|d| d.backoff_factor = 1.0),
            ("backoff_factor", "1".into())
        );
        assert_eq!(
            rejected(|d| d.backoff_factor = 0.0),
            ("backoff_factor", "0".into())
        );
        assert_eq!(
            rejected(|d| d.growth_interval = 0),
            ("growth_interval", "0".into())
        );
        assert_eq!(rejected(|d| d.hysteresis = 0), ("hysteresis", "0".into()));
        assert_eq!(rejected(|d| d.stuck_after = 0), ("stuck_after", "0".into()));
        for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let error = LossScaleConfig::Fixed(scale).validated().unwrap_err();
            assert!(error.to_string().contains("fixed scale"), "{error}");
        }
    }
}
