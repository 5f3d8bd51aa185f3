//! The loss scale: its rule against PyTorch's published one, its invariants under any configuration
//! and any outcomes, and its saved state through every format, whole or damaged.

use std::fmt::Debug;
use std::fs;
use std::io::{self, BufWriter, Cursor, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use burn::backend::Flex;
use burn::record::{
    BinBytesRecorder, BinFileRecorder, BinGzFileRecorder, BytesRecorder, CompactRecorder,
    DefaultRecorder, DoublePrecisionSettings, FileRecorder, FullPrecisionSettings,
    HalfPrecisionSettings, JsonGzFileRecorder, NamedMpkBytesRecorder, NamedMpkFileRecorder,
    NamedMpkGzFileRecorder, PrettyJsonFileRecorder, Recorder, RecorderError,
};
use burn_amp::{
    AmpAutodiff, AmpError, DynamicLossScale, GradScaler, LossScaleConfig, LossScaler, StepOutcome,
    StuckReason, Transition,
};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shared as _; // with what it instantiates
use tempfile::{TempDir, tempdir};

use StepOutcome::{Finite, NonFiniteLoss, Overflow};

type B = AmpAutodiff<Flex>;

fn scaler(dynamic: DynamicLossScale) -> LossScaler {
    LossScaler::new(LossScaleConfig::Dynamic(dynamic)).unwrap()
}

/// Bounds that no test reaches.
fn unbounded() -> DynamicLossScale {
    DynamicLossScale::new()
        .with_min_scale(f32::MIN_POSITIVE)
        .with_max_scale(f32::MAX)
}

/// PyTorch's rule, and nothing more. With factors that are exact in FP32, this stands for:
///
/// ```python
/// import torch
/// scale, tracker = torch.tensor([65536.0]), torch.tensor([0], dtype=torch.int32)
/// for found_inf in outcomes:
///     torch._amp_update_scale_(
///         scale, tracker, torch.tensor([float(found_inf)]), growth, backoff, interval
///     )
///     print(scale.item(), tracker.item())
/// ```
struct PyTorch {
    scale: f32,
    tracker: u32,
    growth: f64,
    backoff: f64,
    interval: u32,
}

impl PyTorch {
    fn of(dynamic: &DynamicLossScale) -> Self {
        Self {
            scale: dynamic.init_scale,
            tracker: 0,
            growth: f64::from(dynamic.growth_factor),
            backoff: f64::from(dynamic.backoff_factor),
            interval: dynamic.growth_interval,
        }
    }

    fn update(&mut self, found_inf: bool) {
        if found_inf {
            self.scale = (f64::from(self.scale) * self.backoff) as f32;
            self.tracker = 0;
            return;
        }
        self.tracker += 1;
        if self.tracker == self.interval {
            let grown = (f64::from(self.scale) * self.growth) as f32;
            if grown.is_finite() {
                self.scale = grown;
            }
            self.tracker = 0;
        }
    }
}

#[test]
fn the_scale_follows_pytorchs_rule_over_10000_outcomes() {
    let configs = [
        unbounded().with_growth_interval(1),
        unbounded().with_growth_interval(2),
        unbounded().with_growth_interval(7).with_init_scale(1.0),
        unbounded().with_growth_interval(100),
        unbounded(),
        unbounded()
            .with_growth_interval(3)
            .with_growth_factor(1.1)
            .with_backoff_factor(0.7),
        unbounded()
            .with_growth_interval(1)
            .with_growth_factor(4.0)
            .with_backoff_factor(0.25)
            .with_init_scale(3e-5),
    ];
    for (seed, dynamic) in configs.into_iter().enumerate() {
        let mut random = StdRng::seed_from_u64(seed as u64);
        let mut scaler = scaler(dynamic);
        let mut expected = PyTorch::of(&dynamic);
        let mut overflows = 0;
        for step in 0..10_000 {
            // As in training, gradients of any size are the likelier to overflow the larger the
            // scale.
            let gradient = 2f32.powf(random.random_range(-16.0..24.0));
            let found_inf = gradient * expected.scale > 65504.0;
            overflows += u64::from(found_inf);

            let before = expected.scale;
            expected.update(found_inf);
            let transition = scaler.update(if found_inf { Overflow } else { Finite });
            assert_eq!(
                (scaler.scale(), scaler.growth_tracker()),
                (expected.scale, expected.tracker),
                "step {step} of {dynamic:?}"
            );
            let expected = match expected.scale {
                scale if scale > before => Transition::Grown,
                scale if scale < before => Transition::BackedOff,
                _ => Transition::Kept,
            };
            assert_eq!(transition, expected, "step {step} of {dynamic:?}");
        }
        assert!(
            overflows > 10,
            "{overflows} overflows are too few to test with"
        );
        assert_eq!(scaler.skipped_steps(), overflows);
    }
}

#[test]
fn within_bounds_it_is_pytorchs_rule_clamped() {
    let bounded = DynamicLossScale::new()
        .with_min_scale(0.75)
        .with_max_scale(5000.0);
    for (seed, (interval, overflow_rate)) in [(1, 0.45), (1, 0.5), (2, 0.3), (5, 0.13)]
        .into_iter()
        .enumerate()
    {
        let dynamic = bounded
            .with_init_scale(100.0)
            .with_growth_interval(interval);
        let mut random = StdRng::seed_from_u64(seed as u64);
        let mut scaler = scaler(dynamic);
        let mut expected = PyTorch::of(&dynamic);
        let (mut at_min, mut at_max) = (0, 0);
        for step in 0..10_000 {
            let found_inf = random.random_bool(overflow_rate);
            expected.update(found_inf);
            expected.scale = expected.scale.clamp(0.75, 5000.0);
            scaler.update(if found_inf { Overflow } else { Finite });
            assert_eq!(
                (scaler.scale(), scaler.growth_tracker()),
                (expected.scale, expected.tracker),
                "step {step} of {dynamic:?}"
            );
            at_min += u32::from(scaler.scale() == 0.75);
            at_max += u32::from(scaler.scale() == 5000.0);
        }
        assert!(
            at_min > 10 && at_max > 10,
            "{at_min} and {at_max} at the bounds"
        );
    }
}

/// PyTorch has no floor: 600 steps with 15% overflows, which never leave it 2000 good steps in a
/// row, end at 65536 / 2^90 or so. Here they end at the minimum.
#[test]
fn the_scale_does_not_collapse() {
    let mut random = StdRng::seed_from_u64(0);
    let mut scaler = LossScaler::default();
    let mut unbounded = PyTorch::of(&DynamicLossScale::default());
    for _ in 0..600 {
        let found_inf = random.random_bool(0.15);
        unbounded.update(found_inf);
        scaler.update(if found_inf { Overflow } else { Finite });
    }
    assert!(unbounded.scale < 1e-15, "{}", unbounded.scale);
    assert_eq!(scaler.scale(), 1.0);
}

// ---- any configuration, any outcomes ----

/// Positive finite numbers of any size; as bits they are ordered as they are as numbers.
fn positive() -> impl Strategy<Value = f32> {
    prop_oneof![
        (1..f32::INFINITY.to_bits()).prop_map(f32::from_bits),
        (-24..24).prop_map(|exponent: i32| 2f32.powi(exponent)),
        0.001f32..100_000.0,
    ]
}

prop_compose! {
    fn valid()(
        mut scales in [positive(), positive(), positive()],
        growth_factor in prop_oneof![Just(2.0), 1.0001f32..10.0, (1.0f32.to_bits() + 1..f32::INFINITY.to_bits()).prop_map(f32::from_bits)],
        backoff_factor in prop_oneof![Just(0.5), 0.0001f32..0.9999, (1..1.0f32.to_bits()).prop_map(f32::from_bits)],
        growth_interval in prop_oneof![1u32..5, 1u32..60, Just(u32::MAX)],
        hysteresis in prop_oneof![Just(1), 1u32..5, Just(u32::MAX)],
        stuck_after in prop_oneof![1u32..5, Just(20), Just(u32::MAX)],
    ) -> DynamicLossScale {
        scales.sort_by(f32::total_cmp);
        let [min_scale, init_scale, max_scale] = scales;
        DynamicLossScale {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
            stuck_after,
        }
    }
}

fn any_config() -> impl Strategy<Value = LossScaleConfig> {
    prop_oneof![
        8 => valid().prop_map(LossScaleConfig::Dynamic),
        1 => positive().prop_map(LossScaleConfig::Fixed),
        1 => Just(LossScaleConfig::Disabled),
    ]
}

/// Outcomes of which each kind may be rare or frequent, and come in rows.
fn outcomes() -> impl Strategy<Value = Vec<StepOutcome>> {
    let row = (
        prop_oneof![Just(Finite), Just(Overflow), Just(NonFiniteLoss)],
        1usize..8,
    );
    proptest::collection::vec(row, 0..40).prop_map(|rows| {
        rows.into_iter()
            .flat_map(|(outcome, times)| std::iter::repeat_n(outcome, times))
            .collect()
    })
}

fn bounds(config: &LossScaleConfig) -> (f32, f32) {
    match config {
        LossScaleConfig::Dynamic(dynamic) => (dynamic.min_scale, dynamic.max_scale),
        LossScaleConfig::Fixed(scale) => (*scale, *scale),
        LossScaleConfig::Disabled => (1.0, 1.0),
    }
}

/// Hysteresis by its history: strikes since the scale last had its chance to grow.
struct Strikes {
    dynamic: DynamicLossScale,
    scale: f32,
    good: u32,
    strikes: u32,
    /// Overflows that began at the minimum and losses not finite, since the last good step.
    stuck: u32,
}

impl Strikes {
    fn update(&mut self, outcome: StepOutcome) -> Transition {
        let DynamicLossScale {
            growth_factor,
            backoff_factor,
            min_scale,
            max_scale,
            ..
        } = self.dynamic;
        let before = self.scale;
        match outcome {
            NonFiniteLoss => {
                self.stuck += 1;
                if self.stuck == self.dynamic.stuck_after {
                    return Transition::Stuck(StuckReason::NonFiniteLoss);
                }
            }
            Finite => {
                self.stuck = 0;
                self.good += 1;
                if self.good == self.dynamic.growth_interval {
                    self.good = 0;
                    self.strikes = 0;
                    self.scale = (before * growth_factor).clamp(min_scale, max_scale);
                }
            }
            Overflow => {
                self.good = 0;
                self.strikes += 1;
                if before == min_scale {
                    self.stuck += 1;
                }
                if self.strikes >= self.dynamic.hysteresis {
                    self.scale = (before * backoff_factor).clamp(min_scale, max_scale);
                }
                if before == min_scale && self.stuck == self.dynamic.stuck_after {
                    return Transition::Stuck(StuckReason::MinimumScale);
                }
            }
        }
        match self.scale {
            scale if scale > before => Transition::Grown,
            scale if scale < before => Transition::BackedOff,
            _ => Transition::Kept,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_scale_stays_within_its_bounds_and_the_counts_add_up(
        config in any_config(),
        outcomes in outcomes(),
    ) {
        let mut scaler = LossScaler::new(config).unwrap();
        let (min, max) = bounds(&config);
        for step in 0..outcomes.len() {
            let before = scaler;
            let transition = scaler.update(outcomes[step]);

            let scale = scaler.scale();
            prop_assert!(scale.is_finite() && scale > 0.0, "{scale}");
            prop_assert!((min..=max).contains(&scale), "{scale} is not in {min}..={max}");
            match transition {
                Transition::Kept => prop_assert_eq!(scale, before.scale()),
                Transition::Grown => prop_assert!(scale > before.scale()),
                Transition::BackedOff => prop_assert!(scale < before.scale()),
                Transition::Stuck(reason) => {
                    let expected = match (outcomes[step], config) {
                        (_, LossScaleConfig::Disabled) => StuckReason::Unscaled,
                        (NonFiniteLoss, _) => StuckReason::NonFiniteLoss,
                        (_, LossScaleConfig::Dynamic(_)) => StuckReason::MinimumScale,
                        (_, _) => StuckReason::FixedScale,
                    };
                    prop_assert_eq!(reason, expected);
                    prop_assert_eq!(scale, before.scale());
                    prop_assert!(reason != StuckReason::MinimumScale || scale == min);
                }
            }

            let past = &outcomes[..=step];
            let count = |wanted| past.iter().filter(|outcome| **outcome == wanted).count() as u64;
            let in_a_row = past.iter().rev().take_while(|outcome| **outcome != Finite).count();
            prop_assert_eq!(scaler.taken_steps(), count(Finite));
            prop_assert_eq!(scaler.skipped_steps(), count(Overflow) + count(NonFiniteLoss));
            prop_assert_eq!(scaler.taken_steps() + scaler.skipped_steps(), past.len() as u64);
            prop_assert_eq!(scaler.non_finite_losses(), count(NonFiniteLoss));
            prop_assert_eq!(scaler.skipped_in_a_row(), in_a_row as u64);
        }
        prop_assert_eq!(*scaler.config(), config);
    }

    /// Wherever they are put in, losses that are not finite change neither scale nor tracker, nor
    /// anything that comes later.
    #[test]
    fn a_loss_that_is_not_finite_never_moves_the_scale(config in any_config(), outcomes in outcomes()) {
        let mut with = LossScaler::new(config).unwrap();
        let mut without = with;
        for outcome in outcomes {
            let moved = |t| matches!(t, Transition::Grown | Transition::BackedOff);
            let transition = with.update(outcome);
            let expected = outcome != NonFiniteLoss && moved(without.update(outcome));
            prop_assert_eq!(moved(transition), expected);
            prop_assert_eq!(with.scale(), without.scale());
            prop_assert_eq!(with.growth_tracker(), without.growth_tracker());
        }
    }

    #[test]
    fn hysteresis_counts_overflows_since_the_scale_could_grow(
        dynamic in valid(),
        outcomes in outcomes(),
    ) {
        let mut scaler = scaler(dynamic);
        let mut expected = Strikes {
            dynamic,
            scale: dynamic.init_scale,
            good: 0,
            strikes: 0,
            stuck: 0,
        };
        for outcome in outcomes {
            prop_assert_eq!(scaler.update(outcome), expected.update(outcome));
            prop_assert_eq!(scaler.scale(), expected.scale);
            prop_assert_eq!(scaler.growth_tracker(), expected.good);
        }
    }

    /// One setting or several out of range: the error names one of them with its value.
    #[test]
    fn an_invalid_configuration_is_refused_and_the_setting_is_named(
        dynamic in valid(),
        bad in proptest::sample::subsequence((0..8).collect::<Vec<usize>>(), 1..=3),
        pick in 0usize..100,
    ) {
        let mut invalid = dynamic;
        let mut expected = Vec::new();
        let below = f32::from_bits(dynamic.min_scale.to_bits() - 1);
        let above = f32::from_bits(dynamic.max_scale.to_bits() + 1);
        for setting in bad {
            let (field, given) = match setting {
                0 => {
                    invalid.min_scale = [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY][pick % 5];
                    ("min_scale", invalid.min_scale.to_string())
                }
                1 => {
                    invalid.max_scale = [below, -1.0, f32::NAN, f32::INFINITY][pick % 4];
                    ("max_scale", invalid.max_scale.to_string())
                }
                2 => {
                    invalid.init_scale = [below, above, f32::NAN, -f32::INFINITY][pick % 4];
                    ("init_scale", invalid.init_scale.to_string())
                }
                3 => {
                    invalid.growth_factor = [1.0, 0.5, -2.0, f32::NAN, f32::INFINITY][pick % 5];
                    ("growth_factor", invalid.growth_factor.to_string())
                }
                4 => {
                    invalid.backoff_factor = [0.0, 1.0, -0.5, 2.0, f32::NAN][pick % 5];
                    ("backoff_factor", invalid.backoff_factor.to_string())
                }
                5 => {
                    invalid.growth_interval = 0;
                    ("growth_interval", "0".into())
                }
                6 => {
                    invalid.hysteresis = 0;
                    ("hysteresis", "0".into())
                }
                _ => {
                    invalid.stuck_after = 0;
                    ("stuck_after", "0".into())
                }
            };
            expected.push((field, given));
        }

        let error = LossScaler::new(invalid.into()).unwrap_err();
        let AmpError::InvalidLossScale { field, given, .. } = &error else {
            panic!("{error:?}");
        };
        prop_assert!(expected.contains(&(*field, given.clone())), "{error}: not of {expected:?}");
        let text = error.to_string();
        prop_assert!(text.contains(&format!("{field} is {given}, expected ")), "{text}");
    }

    /// Any numbers: a configuration that is accepted keeps the invariants.
    #[test]
    fn any_numbers_at_all_are_refused_or_safe(
        floats in any::<[u32; 5]>(),
        counts in any::<[u32; 3]>(),
        outcomes in outcomes(),
    ) {
        let [init_scale, growth_factor, backoff_factor, min_scale, max_scale] =
            floats.map(f32::from_bits);
        let [growth_interval, hysteresis, stuck_after] = counts.map(|count| count % 4);
        let config = LossScaleConfig::Dynamic(DynamicLossScale {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
            stuck_after,
        });
        for config in [config, LossScaleConfig::Fixed(init_scale)] {
            let Ok(mut scaler) = LossScaler::new(config) else {
                continue;
            };
            for outcome in &outcomes {
                scaler.update(*outcome);
                prop_assert!(scaler.scale().is_finite() && scaler.scale() > 0.0);
            }
        }
    }

    #[test]
    fn a_state_saved_at_any_point_goes_on_as_if_it_had_not_been(
        config in any_config(),
        before in outcomes(),
        after in outcomes(),
    ) {
        let mut state = LossScaler::new(config).unwrap();
        for outcome in before {
            state.update(outcome);
        }
        let json = serde_json::to_string(&state).unwrap();
        let bin = BinBytesRecorder::<FullPrecisionSettings>::new();
        let mpk = NamedMpkBytesRecorder::<HalfPrecisionSettings>::new();
        let mut restored: [LossScaler; 3] = [
            serde_json::from_str(&json).unwrap(),
            through_bytes(&bin, state),
            through_bytes(&mpk, state),
        ];
        for outcome in std::iter::once(None).chain(after.into_iter().map(Some)) {
            let transition = outcome.map(|outcome| state.update(outcome));
            for restored in &mut restored {
                prop_assert_eq!(outcome.map(|outcome| restored.update(outcome)), transition);
                prop_assert_eq!(*restored, state);
            }
        }
    }
}

// ---- Burn's recorders ----

/// States in which, together, every field is something else than it was at first, with numbers that
/// no half precision holds.
fn states() -> Vec<LossScaler> {
    let dynamic = DynamicLossScale {
        init_scale: 123_456.79,
        growth_factor: 1.9,
        backoff_factor: 0.1,
        growth_interval: 1003,
        min_scale: 0.1,
        max_scale: 1.234_567_8e9,
        hysteresis: 5,
        stuck_after: 70_001,
    };
    let after = |mut state: LossScaler, outcomes: &[(StepOutcome, usize)]| {
        for (outcome, times) in outcomes {
            (0..*times).for_each(|_| {
                state.update(*outcome);
            });
        }
        state
    };
    let growing = after(
        scaler(dynamic),
        &[(Overflow, 3), (Finite, 1001), (NonFiniteLoss, 300)],
    );
    let stuck = after(growing, &[(Finite, 2), (Overflow, 300), (NonFiniteLoss, 7)]);
    let fixed = LossScaler::new(LossScaleConfig::Fixed(1e-7)).unwrap();
    let disabled = LossScaler::new(LossScaleConfig::Disabled).unwrap();
    vec![
        LossScaler::default(),
        growing,
        stuck,
        after(fixed, &[(Finite, 3), (Overflow, 2)]),
        after(disabled, &[(Finite, 3)]),
    ]
}

#[test]
fn the_states_differ_from_a_fresh_one_in_every_field() {
    let [fresh, growing, stuck] =
        [0, 1, 2].map(|state| serde_json::to_value(states()[state]).unwrap());
    for (field, value) in fresh.as_object().unwrap() {
        let changed = growing[field] != *value || stuck[field] != *value;
        assert!(changed || field == "version", "{field}");
    }
    for (setting, value) in fresh["config"]["Dynamic"].as_object().unwrap() {
        assert_ne!(growing["config"]["Dynamic"][setting], *value, "{setting}");
    }
}

fn through_bytes<R: BytesRecorder<B, Vec<u8>>>(recorder: &R, state: LossScaler) -> LossScaler {
    let bytes = recorder.record(state, ()).unwrap();
    recorder.load(bytes, &Default::default()).unwrap()
}

fn through_file<R: FileRecorder<B>>(
    folder: &TempDir,
    recorder: &R,
    state: LossScaler,
) -> LossScaler {
    let path = folder.path().join("state");
    recorder.record(state, path.clone()).unwrap();
    recorder.load(path, &Default::default()).unwrap()
}

/// Through every recorder that `$settings` can be given to.
macro_rules! recorders_restore {
    ($($settings:ty),+) => {
        let folder = tempdir().unwrap();
        for state in states() {
            $(
                assert_eq!(through_bytes(&BinBytesRecorder::<$settings>::new(), state), state);
                assert_eq!(through_bytes(&NamedMpkBytesRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &BinFileRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &BinGzFileRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &JsonGzFileRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &PrettyJsonFileRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &NamedMpkFileRecorder::<$settings>::new(), state), state);
                assert_eq!(through_file(&folder, &NamedMpkGzFileRecorder::<$settings>::new(), state), state);
            )+
        }
    };
}

#[test]
fn every_recorder_restores_every_field_whatever_its_precision() {
    recorders_restore!(
        FullPrecisionSettings,
        HalfPrecisionSettings,
        DoublePrecisionSettings
    );
}

#[test]
fn burns_default_recorders_restore_every_field() {
    let folder = tempdir().unwrap();
    for state in states() {
        assert_eq!(through_file(&folder, &DefaultRecorder::new(), state), state);
        assert_eq!(through_file(&folder, &CompactRecorder::new(), state), state);
    }
}

// ---- files, whole and damaged ----

/// A scaler in a state that a load has to leave alone, or to replace.
fn running() -> GradScaler {
    GradScaler::from(states()[1])
}

/// The state that is saved; another one than [`running`]'s.
fn saved() -> LossScaler {
    states()[2]
}

fn json_of(state: LossScaler) -> Vec<u8> {
    let mut bytes = Vec::new();
    GradScaler::from(state).write_state(&mut bytes).unwrap();
    bytes
}

/// The error is about the state, and names the place, the reason, and that nothing changed.
#[track_caller]
fn assert_says(error: AmpError, action: &str, place: &str, reason: &str) {
    assert!(matches!(error, AmpError::State { .. }), "{error:?}");
    let text = error.to_string();
    let (way, rest) = match action {
        "read" => (
            "from",
            "Nothing was changed. Was this written by the same type, such as by `GradScaler::save_file`?",
        ),
        _ => ("to", "An existing file there is unchanged"),
    };
    let begin = format!("cannot {action} the state {way} {place}: ");
    assert!(
        text.starts_with(&begin),
        "{text:?} does not start with {begin:?}"
    );
    for part in [reason, rest] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

/// A load is refused, and the scaler is as it was.
#[track_caller]
fn assert_refused(path: &Path, reason: &str) {
    let scaler = running();
    let error = scaler.load_file(path).unwrap_err();
    assert_says(error, "read", &path.display().to_string(), reason);
    assert_eq!(scaler.state(), running().state());
}

#[test]
fn a_file_or_a_writer_keeps_everything() {
    let folder = tempdir().unwrap();
    for (i, state) in states().into_iter().enumerate() {
        let path = folder.path().join(format!("{i}.json"));
        // A second save replaces the first.
        running().save_file(&path).unwrap();
        GradScaler::from(state).save_file(&path).unwrap();
        let other = || match state.is_enabled() {
            true => running(),
            false => GradScaler::new(LossScaleConfig::Disabled).unwrap(),
        };
        let loaded = other();
        loaded.load_file(&path).unwrap();
        assert_eq!(loaded.state(), state);

        let read = other();
        read.read_state(Cursor::new(json_of(state))).unwrap();
        assert_eq!(read.state(), state);
        assert_eq!(fs::read(&path).unwrap(), json_of(state));
    }
    let names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), states().len(), "{names:?}");
}

/// As after a change of precision.
#[test]
fn a_file_does_not_turn_loss_scaling_on_or_off() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("scaler.json");
    let disabled = || GradScaler::new(LossScaleConfig::Disabled).unwrap();
    let fresh = GradScaler::new(running().config()).unwrap();
    for (saved, loading, expected) in [
        (disabled(), running(), fresh.state()),
        (running(), disabled(), disabled().state()),
    ] {
        saved.save_file(&path).unwrap();
        loading.load_file(&path).unwrap();
        assert_eq!(loading.state(), expected);
    }
}

#[test]
fn what_is_no_state_is_refused() {
    let folder = tempdir().unwrap();
    assert_refused(&folder.path().join("missing.json"), "No such file");
    assert_refused(folder.path(), "directory");
    for (name, bytes, reason) in [
        ("empty.json", &b""[..], "EOF"),
        ("text.json", b"loss scale 65536", "expected value"),
        ("other.json", b"{\"precision\": \"F16\"}", "version"),
        ("list.json", b"[1, 2, 3]", "expected value"),
        ("binary.json", b"\xff\xfe\x00\x01", "expected value"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        assert_refused(&path, reason);
        let scaler = running();
        let error = scaler.read_state(bytes).unwrap_err();
        assert_says(error, "read", "the reader", reason);
        assert_eq!(scaler.state(), running().state());
    }
    let mut more = json_of(saved());
    more.extend(b"{}");
    let path = folder.path().join("more.json");
    fs::write(&path, more).unwrap();
    assert_refused(&path, "trailing");
}

#[test]
fn a_state_cut_short_is_refused_wherever_it_is_cut() {
    let bytes = json_of(saved());
    let folder = tempdir().unwrap();
    let path = folder.path().join("state.json");
    for length in 0..bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        assert_refused(&path, "EOF");
        let scaler = running();
        let error = scaler.read_state(&bytes[..length]).unwrap_err();
        assert_says(error, "read", "the reader", "EOF");
        assert_eq!(scaler.state(), running().state());
    }
}

#[test]
fn a_reader_or_a_writer_that_fails_is_an_error() {
    struct Fails;
    impl io::Read for Fails {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is gone"))
        }
    }
    impl Write for Fails {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is full"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let scaler = running();
    let read = scaler.read_state(Fails).unwrap_err();
    assert_says(read, "read", "the reader", "the disk is gone");
    let written = scaler.write_state(Fails).unwrap_err();
    assert_says(written, "write", "the writer", "the disk is full");
    // A buffer fails only when it is flushed.
    let buffered = scaler.write_state(BufWriter::with_capacity(1 << 16, Fails));
    assert_says(
        buffered.unwrap_err(),
        "write",
        "the writer",
        "the disk is full",
    );
    assert_eq!(scaler.state(), running().state());
}

/// A newer version will have fields that this version lacks: the error names the version.
#[test]
fn a_newer_version_is_refused_by_its_version() {
    let folder = tempdir().unwrap();
    let text = String::from_utf8(json_of(saved())).unwrap();
    let reason = "the state has version 3, but this burn-amp only reads versions up to 2";
    for (name, newer) in [
        ("same-fields", text.clone()),
        (
            "new-field",
            text.replace("\"scale\":", "\"news\": [1, {}],\n  \"scale\":"),
        ),
        (
            "without-a-field",
            text.replace("\"stuck\":", "\"stuck_steps\":"),
        ),
        ("changed-field", text.replace("\"Dynamic\"", "\"Dynamics\"")),
    ] {
        let newer = newer.replace("\"version\": 2,", "\"version\": 3,");
        assert_ne!(newer, text);
        let path = folder.path().join(name);
        fs::write(&path, &newer).unwrap();
        assert_refused(&path, reason);
        let error = running().read_state(newer.as_bytes()).unwrap_err();
        assert_says(error, "read", "the reader", reason);
    }
}

#[test]
fn a_save_that_fails_leaves_the_file_that_was_there() {
    let folder = tempdir().unwrap();
    let scaler = running();
    let good = folder.path().join("good.json");
    GradScaler::from(saved()).save_file(&good).unwrap();
    let whole = fs::read(&good).unwrap();

    let below_a_file = good.join("state.json");
    let no_folder = folder.path().join("no/such/folder/state.json");
    let a_folder = folder.path().join("folder");
    fs::create_dir_all(&a_folder).unwrap();
    for (path, reason) in [
        (below_a_file, "Not a directory"),
        (no_folder, "No such file"),
        (a_folder.clone(), "directory"),
    ] {
        let error = scaler.save_file(&path).unwrap_err();
        assert_says(error, "write", &path.display().to_string(), reason);
    }
    assert!(a_folder.is_dir());

    let mut names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["folder", "good.json"], "nothing half-written stays");
    assert_eq!(fs::read(&good).unwrap(), whole);
    assert_eq!(scaler.state(), running().state());
}

/// Mutations of each format.
const MUTATIONS: u64 = 200;

/// Flips, deletes, inserts or swaps some bytes after the first `from`.
fn mutated(bytes: &[u8], from: usize, random: &mut StdRng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.random_range(1..=4) {
        let at = random.random_range(from..bytes.len());
        match random.random_range(0..4) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => {
                let end = bytes.len().min(at + random.random_range(1..4));
                bytes.drain(at..end);
                if bytes.len() == from {
                    bytes.push(0);
                }
            }
            2 => bytes.insert(at, random.random()),
            _ => {
                let other = random.random_range(from..bytes.len());
                bytes.swap(at, other);
            }
        }
    }
    bytes
}

/// Every mutation is refused, or gives a state that a scaler can go on from; and many are refused.
#[track_caller]
fn mutations<E: Debug>(
    format: &str,
    bytes: &[u8],
    from: usize,
    load: impl Fn(Vec<u8>) -> Result<LossScaler, E>,
) {
    assert_eq!(load(bytes.to_vec()).unwrap(), saved(), "{format}");
    let mut random = StdRng::seed_from_u64(0);
    let mut refused = 0;
    for mutation in 0..MUTATIONS {
        match load(mutated(bytes, from, &mut random)) {
            Ok(mut state) => {
                state.update(StepOutcome::Overflow);
                state.update(StepOutcome::Finite);
                let scaler = GradScaler::from(state);
                scaler.read_state(&json_of(state)[..]).unwrap();
                assert_eq!(scaler.state(), state, "mutation {mutation} of {format}");
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        refused > MUTATIONS / 4,
        "{format}: only {refused} of {MUTATIONS} refused"
    );
}

#[test]
fn a_mutated_json_file_is_refused_or_is_a_state() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("state.json");
    mutations("JSON", &json_of(saved()), 0, |bytes| {
        let read_state = running().read_state(&bytes[..]);
        fs::write(&path, bytes).unwrap();
        let scaler = running();
        let loaded = scaler.load_file(&path);
        assert_eq!(loaded.is_ok(), read_state.is_ok());
        if loaded.is_err() {
            assert_eq!(scaler.state(), running().state());
        }
        loaded.map(|()| scaler.state())
    });
}

/// The bytes of a file that a recorder wrote, and how it reads other bytes.
fn mutated_files<R: FileRecorder<B>>(format: &str, recorder: R, from: impl Fn(&[u8]) -> usize) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("state");
    recorder.record(saved(), path.clone()).unwrap();
    let file = path.with_extension(R::file_extension());
    let bytes = fs::read(&file).unwrap();
    mutations(format, &bytes, from(&bytes), |bytes| {
        fs::write(&file, bytes).unwrap();
        recorder.load::<LossScaler>(path.clone(), &Default::default())
    });
}

/// Where the state begins in bincode. Before it are Burn's metadata. If a length there is damaged,
/// bincode allocates as much memory as it says, without comparing it with the data: that may end the
/// process.
fn item(bytes: &[u8]) -> usize {
    let settings = b"FullPrecisionSettings";
    let last = bytes
        .windows(settings.len())
        .rposition(|window| window == settings);
    last.unwrap() + settings.len()
}

#[test]
fn mutated_records_are_refused_or_are_states() {
    type Full = FullPrecisionSettings;
    let whole = |_: &[u8]| 0;
    mutated_files("pretty-json", PrettyJsonFileRecorder::<Full>::new(), whole);
    mutated_files("json-gz", JsonGzFileRecorder::<Full>::new(), whole);
    mutated_files("mpk", NamedMpkFileRecorder::<Full>::new(), whole);
    mutated_files("mpk-gz", NamedMpkGzFileRecorder::<Full>::new(), whole);
    mutated_files("bin", BinFileRecorder::<Full>::new(), item);

    let mpk = NamedMpkBytesRecorder::<Full>::new();
    let bytes = Recorder::<B>::record(&mpk, saved(), ()).unwrap();
    mutations("mpk bytes", &bytes, 0, |bytes| {
        Recorder::<B>::load(&mpk, bytes, &Default::default())
    });

    let bin = BinBytesRecorder::<Full>::new();
    let bytes = Recorder::<B>::record(&bin, saved(), ()).unwrap();
    mutations("bin bytes", &bytes, item(&bytes), |bytes| {
        load_bin(&bin, bytes)
    });
}

/// Burn's `BinBytesRecorder` unwraps bincode's result, also our error.
fn load_bin(
    recorder: &BinBytesRecorder<FullPrecisionSettings>,
    bytes: Vec<u8>,
) -> Result<LossScaler, String> {
    let load = || Recorder::<B>::load(recorder, bytes, &Default::default());
    match catch_unwind(AssertUnwindSafe(load)) {
        Ok(loaded) => loaded.map_err(|error: RecorderError| error.to_string()),
        Err(panic) => {
            let text = panic.downcast::<String>().unwrap();
            assert!(
                text.starts_with("called `Result::unwrap()` on an `Err` value: "),
                "{text}"
            );
            Err(*text)
        }
    }
}

#[test]
fn a_record_cut_short_is_refused_wherever_it_is_cut() {
    let mpk = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    let bytes = Recorder::<B>::record(&mpk, saved(), ()).unwrap();
    for length in 0..bytes.len() {
        let cut = bytes[..length].to_vec();
        let loaded: Result<LossScaler, _> = Recorder::<B>::load(&mpk, cut, &Default::default());
        assert!(loaded.is_err(), "{length} of {} bytes", bytes.len());
    }
    let bin = BinBytesRecorder::<FullPrecisionSettings>::new();
    let bytes = Recorder::<B>::record(&bin, saved(), ()).unwrap();
    for length in 0..bytes.len() {
        let loaded = load_bin(&bin, bytes[..length].to_vec());
        assert!(loaded.is_err(), "{length} of {} bytes", bytes.len());
    }
}

/// The error names the version of a record of another version, also in bincode, where the rest would be
/// misread.
#[test]
fn a_newer_record_is_refused_by_its_version() {
    let reason = "the state has version 3";
    let mpk = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    let mut bytes = Recorder::<B>::record(&mpk, saved(), ()).unwrap();
    // The metadata before it have a version too.
    let name = bytes.windows(7).rposition(|name| name == b"version");
    let version = &mut bytes[name.unwrap() + 7];
    assert_eq!(*version, 2);
    *version = 3;
    let loaded: Result<LossScaler, _> = Recorder::<B>::load(&mpk, bytes, &Default::default());
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");

    let bin = BinBytesRecorder::<FullPrecisionSettings>::new();
    let mut bytes = Recorder::<B>::record(&bin, saved(), ()).unwrap();
    let version = item(&bytes);
    assert_eq!(bytes[version], 2);
    // The state of version 1 was longer: what follows it would be misread.
    for (other, reason) in [
        (3, reason),
        (1, "version 1, which this burn-amp reads from JSON"),
    ] {
        bytes[version] = other;
        let error = load_bin(&bin, bytes.clone()).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
