//! The saved form of the scaler's state: every field, a version, and a checksum over the values. The checksum
//! detects a damaged state in any format. The checks of the fields refuse an impossible state even if its
//! checksum is right.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

use super::config::check;
use super::{LossScaleConfig, LossScaler};
use crate::AmpError;

/// Increased when a field is added or changes its meaning.
const VERSION: u32 = 1;

/// More steps than any training takes, and few enough that counting on does not overflow.
const MOST_STEPS: u64 = 1 << 53;

#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// 0 except in a saved state.
    checksum: u32,
}

impl From<LossScaler> for State {
    fn from(LossScaler { state }: LossScaler) -> Self {
        let checksum = state.sum();
        Self { checksum, ..state }
    }
}

impl TryFrom<State> for LossScaler {
    type Error = String;

    fn try_from(mut state: State) -> Result<Self, String> {
        let (checksum, sum) = (state.checksum, state.sum());
        if checksum != sum {
            return Err(format!(
                "the state is damaged: its checksum is {checksum}, but its values give {sum}"
            ));
        }
        state.validate().map_err(|error| error.to_string())?;
        (state.version, state.checksum) = (VERSION, 0);
        Ok(Self { state })
    }
}

fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        version if version > VERSION => Err(D::Error::custom(format!(
            "the state has version {version}, but this burn-amp only reads versions up to {VERSION}"
        ))),
        version => Ok(version),
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
            // Of a batch, the last pass may be a good one.
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

    /// The CRC-32 of every value except the checksum.
    fn sum(&self) -> u32 {
        let (kind, floats, counts) = match self.config {
            LossScaleConfig::Disabled => (0, [0.0; 5], [0; 3]),
            LossScaleConfig::Fixed(scale) => (1, [scale, 0.0, 0.0, 0.0, 0.0], [0; 3]),
            LossScaleConfig::Dynamic(d) => (
                2,
                [
                    d.init_scale,
                    d.growth_factor,
                    d.backoff_factor,
                    d.min_scale,
                    d.max_scale,
                ],
                [d.growth_interval, d.hysteresis, d.stuck_after],
            ),
        };
        let mut hasher = crc32fast::Hasher::new();
        let words = [self.version, kind, self.scale.to_bits()]
            .into_iter()
            .chain(floats.map(f32::to_bits))
            .chain(counts)
            .chain([self.growth_tracker, self.hysteresis_left, self.stuck]);
        words.for_each(|word| hasher.update(&word.to_le_bytes()));
        for count in [
            self.taken_steps,
            self.skipped_steps,
            self.skipped_in_a_row,
            self.non_finite_losses,
        ] {
            hasher.update(&count.to_le_bytes());
        }
        hasher.finalize()
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
        assert_eq!(fields.len(), 11);
        for field in &fields {
            let mut without = saved();
            without.as_object_mut().unwrap().remove(field);
            assert!(load(without).unwrap_err().contains(field.as_str()));
        }
        for field in fields.iter().filter(|field| *field != "config") {
            let mut changed = saved();
            let value = changed[field].as_f64().unwrap();
            changed[field] = match field.as_str() {
                "scale" => (value * 2.0).into(),
                _ => (value as u64 + 1).into(),
            };
            let error = load(changed).unwrap_err();
            let expected = match field.as_str() {
                "version" => "version 2",
                _ => "damaged",
            };
            assert!(error.contains(expected), "{field}: {error}");
        }
        let settings: Vec<_> = saved()["config"]["Dynamic"]
            .as_object()
            .unwrap()
            .clone()
            .into_iter()
            .collect();
        assert_eq!(settings.len(), 8);
        for (field, value) in settings {
            let mut changed = saved();
            let dynamic = &mut changed["config"]["Dynamic"];
            dynamic[&field] = match value.as_u64() {
                Some(count) => (count + 1).into(),
                None => (value.as_f64().unwrap() * 0.5).into(),
            };
            assert!(load(changed).unwrap_err().contains("damaged"), "{field}");
        }
        let mut more = saved();
        more["more"] = 1.into();
        assert!(load(more).unwrap_err().contains("more"));
    }

    /// Loads a changed state whose checksum is right.
    fn signed(change: impl Fn(&mut State)) -> Result<LossScaler, String> {
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
        assert!(signed(|_| {}).is_ok());
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
            match signed(change) {
                Ok(accepted) => panic!("{expected} accepted: {accepted:?}"),
                Err(error) => assert!(error.contains(expected), "{expected}: {error}"),
            }
        }
    }
}
