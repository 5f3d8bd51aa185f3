//! The saved form of the scaler's state: every field and a version. The checks of the fields refuse a state that a
//! scaler cannot reach.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use super::config::check;
use super::{LossScaleConfig, LossScaler};
use crate::AmpError;

/// Increased when a field is added, removed or changes its meaning. Version 1 had a checksum as its last field.
const VERSION: u32 = 2;

/// More steps than any training takes, and few enough that counting on does not overflow.
const MOST_STEPS: u64 = 1 << 53;

#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    /// First in every format, so the version is read before any field that a newer version changed.
    #[serde(deserialize_with = "known")]
    version: u32,
    pub config: LossScaleConfig,
    pub scale: f32,
    pub growth_tracker: u32,
    pub hysteresis_left: u32,
    pub taken_steps: u64,
    pub skipped_steps: u64,
    pub skipped_in_a_row: u64,
    pub stuck: u32,
    pub non_finite_losses: u64,
}

impl From<LossScaler> for State {
    fn from(LossScaler { state }: LossScaler) -> Self {
        state
    }
}

impl TryFrom<State> for LossScaler {
    type Error = String;

    fn try_from(mut state: State) -> Result<Self, String> {
        state.validate().map_err(|error| error.to_string())?;
        state.version = VERSION;
        Ok(Self { state })
    }
}

fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    // A format without field names, such as bincode, does not skip the checksum.
    let has_names = deserializer.is_human_readable();
    let version = u32::deserialize(deserializer)?;
    match version {
        VERSION => Ok(version),
        1 if has_names => Ok(version),
        1 => Err(D::Error::custom(
            "the state has version 1, which this burn-amp reads from JSON only",
        )),
        _ => Err(D::Error::custom(format!(
            "the state has version {version}, but this burn-amp only reads versions up to {VERSION}"
        ))),
    }
}

impl State {
    /// The state before the first step.
    pub fn new(config: LossScaleConfig) -> Self {
        Self {
            version: VERSION,
            config,
            scale: config.init_scale(),
            hysteresis_left: match config {
                LossScaleConfig::Dynamic(dynamic) => dynamic.hysteresis,
                _ => 0,
            },
            ..Self::default()
        }
    }

    /// Checks that a scaler can reach these values.
    fn validate(&self) -> Result<(), AmpError> {
        let (interval, hysteresis) = match self.config.validated()? {
            LossScaleConfig::Dynamic(dynamic) => (dynamic.growth_interval, dynamic.hysteresis),
            _ => (1, 0),
        };
        self.config.check_scale(self.scale)?;
        for (field, count, most) in [
            (
                "growth_tracker",
                self.growth_tracker.into(),
                (interval - 1).into(),
            ),
            (
                "hysteresis_left",
                self.hysteresis_left.into(),
                hysteresis.into(),
            ),
            ("taken_steps", self.taken_steps, MOST_STEPS),
            ("skipped_steps", self.skipped_steps, MOST_STEPS),
            (
                "skipped_in_a_row",
                self.skipped_in_a_row,
                self.skipped_steps,
            ),
            ("stuck", self.stuck.into(), self.skipped_steps),
            (
                "non_finite_losses",
                self.non_finite_losses,
                self.skipped_steps,
            ),
        ] {
            check(count <= most, field, count, format!("at most {most}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StepOutcome;

    fn saved() -> serde_json::Value {
        let mut scaler = LossScaler::default();
        for outcome in [
            StepOutcome::Finite,
            StepOutcome::Overflow,
            StepOutcome::NonFiniteLoss,
        ] {
            scaler.update(outcome);
        }
        serde_json::to_value(scaler).unwrap()
    }

    fn load(value: serde_json::Value) -> Result<LossScaler, String> {
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn every_field_is_checked() {
        assert!(load(saved()).is_ok());
        let fields: Vec<_> = saved().as_object().unwrap().keys().cloned().collect();
        assert_eq!(fields.len(), 10);
        for field in &fields {
            let mut without = saved();
            without.as_object_mut().unwrap().remove(field);
            assert!(load(without).unwrap_err().contains(field.as_str()));
        }
    }

    #[test]
    fn version_1_is_read_where_fields_have_names() {
        let mut old = saved();
        old["version"] = 1.into();
        old["checksum"] = 7.into();
        assert_eq!(load(old).unwrap(), load(saved()).unwrap());
        for version in [0, 3] {
            let mut other = saved();
            other["version"] = version.into();
            let error = load(other).unwrap_err();
            assert!(error.contains(&format!("version {version}")), "{error}");
        }
    }

    /// Loads a changed state.
    fn changed(change: impl Fn(&mut State)) -> Result<LossScaler, String> {
        let mut scaler = LossScaler::default();
        for outcome in [
            StepOutcome::Finite,
            StepOutcome::Overflow,
            StepOutcome::NonFiniteLoss,
        ] {
            scaler.update(outcome);
        }
        change(&mut scaler.state);
        load(serde_json::to_value(scaler).unwrap())
    }

    #[test]
    fn a_state_that_cannot_be_is_refused() {
        assert!(changed(|_| {}).is_ok());
        let fixed = |s: &mut State| {
            *s = State::new(LossScaleConfig::Fixed(8.0));
        };
        let disabled = |s: &mut State| *s = State::new(LossScaleConfig::Disabled);
        type Change<'a> = &'a dyn Fn(&mut State);
        let cases: [(&str, Change); 18] = [
            ("scale is 0,", &|s| s.scale = 0.0),
            ("scale is -1,", &|s| s.scale = -1.0),
            ("scale is 0.5,", &|s| s.scale = 0.5),
            ("scale is 1000", &|s| s.scale = 1e38),
            ("scale is 0,", &|s| (fixed(s), s.scale = 0.0).1),
            ("scale is 2,", &|s| (disabled(s), s.scale = 2.0).1),
            ("growth_tracker is 2000,", &|s| s.growth_tracker = 2000),
            ("growth_tracker is 4294967295,", &|s| {
                s.growth_tracker = u32::MAX
            }),
            ("growth_tracker is 1,", &|s| {
                (fixed(s), s.growth_tracker = 1).1
            }),
            ("growth_tracker is 1,", &|s| {
                (disabled(s), s.growth_tracker = 1).1
            }),
            ("hysteresis_left is 2,", &|s| s.hysteresis_left = 2),
            ("hysteresis_left is 1,", &|s| {
                (fixed(s), s.hysteresis_left = 1).1
            }),
            ("skipped_in_a_row is 3,", &|s| s.skipped_in_a_row = 3),
            ("non_finite_losses is 3,", &|s| s.non_finite_losses = 3),
            ("stuck is 3,", &|s| s.stuck = 3),
            ("taken_steps is 18446744073709551615,", &|s| {
                s.taken_steps = u64::MAX
            }),
            ("skipped_steps is 18446744073709551615,", &|s| {
                s.skipped_steps = u64::MAX
            }),
            ("taken_steps is 9007199254740993,", &|s| {
                s.taken_steps = (1 << 53) + 1
            }),
        ];
        for (expected, change) in cases {
            match changed(change) {
                Ok(accepted) => panic!("{expected} accepted: {accepted:?}"),
                Err(error) => assert!(error.contains(expected), "{expected}: {error}"),
            }
        }
    }
}
