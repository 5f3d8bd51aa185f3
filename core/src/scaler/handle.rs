//! A loss scaler that clones of a handle share, with the step under way. Independent of tensors.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::left::LeftSteps;
use super::protocol::MANY_LOSSES;
use super::step::named;
use super::{
    Findings, LastStep, LossScaler, PendingStep, RecordedStep, ScaleHistory, StepOutcome,
    Transition,
};
use crate::AmpError;

/// What the clones of a `GradScaler` share, on any thread: the scaler, which other handles may share, and the
/// step that is under way. `L` is the package's record of the losses of a step.
#[derive(Default)]
pub struct SharedScaler<L: Default>(Arc<Handle<L>>);

#[derive(Default)]
struct Handle<L: Default> {
    state: Arc<Mutex<Shared<L>>>,
    step: Mutex<OwnStep<L>>,
}

/// The step of the explicit protocol that is under way.
#[derive(Default)]
struct OwnStep<L> {
    pending: PendingStep<L>,
    /// The scaler's generation. In a later one, there is no step.
    generation: u64,
    /// Whether a step has ended here: a training keeps this handle, and its step ends with the handle.
    has_updated: bool,
}

/// The scaler behind the lock.
#[derive(Default)]
pub struct Shared<L> {
    /// The state machine.
    pub scaler: LossScaler,
    /// Its skipped steps and scale changes.
    pub history: ScaleHistory,
    /// The result of the last step.
    pub last_step: Option<LastStep>,
    /// The number of that step.
    last_number: u64,
    /// Steps under way whose handles were dropped.
    left: LeftSteps<L>,
    /// How often a state was loaded, which discards all steps under way.
    generation: u64,
    /// Whether the device of the scaler computes in a precision that needs no loss scale.
    unscaled: bool,
    /// Whether a step was recorded whose loss was scaled.
    has_scaled: bool,
    /// Gradients of the last step whose parameters are not named yet, by leaf node.
    leaves: HashMap<u64, bool>,
    listeners: Vec<Weak<dyn Listener>>,
}

/// Observes a scaler. Called on the thread of the step, until the observer is dropped.
pub trait Listener: Send + Sync {
    /// A step was taken or skipped.
    fn ended(&self, _step: &RecordedStep) {}

    /// The run is stuck since the last step.
    fn stuck(&self, _error: &AmpError) {}
}

impl<L: Default> Clone for SharedScaler<L> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<L: Default> From<LossScaler> for SharedScaler<L> {
    fn from(scaler: LossScaler) -> Self {
        Self::of(Arc::new(Mutex::new(Shared::from(scaler))))
    }
}

/// A panic of another thread leaves the state as it was.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A step under way outlives its handle, as in `GradScaler::of(&device).scale(loss).backward()`.
impl<L: Default> Drop for Handle<L> {
    fn drop(&mut self) {
        let own = std::mem::take(&mut *locked(&self.step));
        let mut state = locked(&self.state);
        let is_under_way = own.pending.losses_given() > 0 && !own.has_updated;
        let is_left = is_under_way && own.generation == state.generation;
        let oldest = is_left.then(|| state.left.push(own.pending));
        // A step that is dropped waits for its device, and not under the lock.
        drop(state);
        drop(oldest);
    }
}

/// A run that was reported as stuck is reported again after as many steps more.
impl<L: Default> From<LossScaler> for Shared<L> {
    fn from(mut scaler: LossScaler) -> Self {
        scaler.forget_reported();
        Self {
            history: ScaleHistory::from(&scaler),
            scaler,
            ..Self::default()
        }
    }
}

/// The step under way, locked.
pub struct Pending<'a, L>(MutexGuard<'a, OwnStep<L>>);

impl<L> Deref for Pending<'_, L> {
    type Target = PendingStep<L>;

    fn deref(&self) -> &PendingStep<L> {
        &self.0.pending
    }
}

impl<L> DerefMut for Pending<'_, L> {
    fn deref_mut(&mut self) -> &mut PendingStep<L> {
        &mut self.0.pending
    }
}

impl<L: Default> SharedScaler<L> {
    fn of(state: Arc<Mutex<Shared<L>>>) -> Self {
        let step = Mutex::default();
        Self(Arc::new(Handle { state, step }))
    }

    /// Another handle on the scaler, with no step under way. Clones of a handle share their step.
    pub fn another(&self) -> Self {
        Self::of(self.0.state.clone())
    }

    /// Locks the scaler. Do not visit a module while it is locked: the module's code may call this scaler. Nor
    /// lock the step.
    pub fn lock(&self) -> MutexGuard<'_, Shared<L>> {
        locked(&self.0.state)
    }

    /// Locks the step that is under way. Do not visit a module while it is locked.
    pub fn pending(&self) -> Pending<'_, L> {
        let generation = self.lock().generation;
        let mut own = locked(&self.0.step);
        if own.generation != generation {
            *own = OwnStep {
                generation,
                ..OwnStep::default()
            };
        }
        Pending(own)
    }

    /// Counts a loss. Returns the scaler, and the scale of the step under way. A step that a dropped handle
    /// left on this thread goes on.
    pub fn count_loss(&self) -> (LossScaler, f32) {
        let mut pending = self.pending();
        let shared = &mut *self.lock();
        if pending.losses_given() == 0
            && let Some(left) = shared.left.of_this_thread()
        {
            *pending = shared.left.take(left);
        }
        (shared.scaler, pending.scale(&shared.scaler))
    }

    /// Checks the step under way for a call. If this handle has none, that is the step that a dropped handle left:
    /// that of this thread, or the only one, which this handle then continues unless the check fails. Such a
    /// handle is `GradScaler::of(&device)` in a `TrainStep`, which may run on a thread of its own.
    ///
    /// # Errors
    ///
    /// That of the check, and [`AmpError::SeveralSteps`] where there is more than one such step. Nothing is changed
    /// then.
    pub fn checked(
        &self,
        call: &'static str,
        check: impl FnOnce(&PendingStep<L>) -> Result<(), AmpError>,
    ) -> Result<(), AmpError> {
        let mut pending = self.pending();
        let left = &mut self.lock().left;
        let several = |steps| AmpError::SeveralSteps { call, steps };
        if pending.losses_given() > 0 {
            // Some losses of this step were given to a scaler that was dropped.
            return match left.of_this_thread() {
                Some(_) => Err(several(2)),
                None => check(&pending),
            };
        }
        match left.only().map_err(several)? {
            None => check(&pending),
            Some(place) => {
                check(left.at(place))?;
                *pending = left.take(place);
                Ok(())
            }
        }
    }

    /// The scale that the losses of the step under way are multiplied by, or else the next loss.
    pub fn scale_of_step(&self) -> f32 {
        let given = self.pending().scale_given();
        let shared = self.lock();
        let left = || {
            let place = shared.left.only().ok()??;
            shared.left.at(place).scale_given()
        };
        let given = given.or_else(left);
        given.unwrap_or(shared.scaler.scale())
    }

    /// Discards the step under way, or if there is none the one that a dropped handle left on this thread.
    pub fn discard(&self) -> PendingStep<L> {
        let own = std::mem::take(&mut *self.pending());
        if own.losses_given() > 0 {
            return own;
        }
        let left = &mut self.lock().left;
        left.of_this_thread()
            .map(|place| left.take(place))
            .unwrap_or_default()
    }

    /// Forgets the steps that dropped handles left on this thread, and on threads that have ended.
    pub fn forget_left(&self) {
        let forgotten = self.lock().left.forget();
        drop(forgotten);
    }

    /// Whether both handles share one scaler.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.state, &other.0.state)
    }

    /// Sets whether the device of the scaler computes in a precision that needs no loss scale.
    pub fn set_unscaled(&self, unscaled: bool) {
        self.lock().unscaled = unscaled;
    }

    /// The scale that the next loss on the scaler's device is multiplied by, in the device's own precision.
    /// A region of another precision is not considered.
    pub fn loss_scale(&self) -> f32 {
        let shared = self.lock();
        if shared.unscaled {
            1.0
        } else {
            shared.scaler.scale()
        }
    }

    /// Whether the caller must read back the checks of the losses now: after every 1,000 losses of a step.
    /// Logs a warning after the first 1,000.
    pub fn has_many_losses(&self) -> bool {
        // Not under the lock: the program's logger may call this scaler.
        let given = self.pending().many_losses();
        if given == Some(MANY_LOSSES) {
            log::warn!(
                "burn-amp: {MANY_LOSSES} losses were scaled since the last update. If the loop calls the \
                 optimizer itself, its gradients are not checked, and the first overflow reaches the \
                 parameters: call scaler.step(..) and scaler.update()"
            );
        }
        given.is_some()
    }

    /// Whether the window of a trainer, of `micro_batches`, has lost its step, as after
    /// `scaler.load_state(..)`: its gradients may carry another scale than the next ones. Logs a warning.
    pub fn has_dropped(&self, micro_batches: usize) -> bool {
        let dropped = micro_batches > 0 && self.pending().losses_given() == 0;
        if dropped {
            log::warn!(
                "burn-amp: {micro_batches} micro-batches of the trainer's window are dropped: its scaler \
                 has discarded the step, or has ended it"
            );
        }
        dropped
    }

    /// Sets the scale, and records a change in the history.
    pub fn set_scale(&self, scale: f32) -> Result<(), AmpError> {
        let shared = &mut *self.lock();
        shared.scaler.set_scale(scale)?;
        shared.history.push(None, &shared.scaler);
        Ok(())
    }

    /// Continues from a state. Discards the steps under way.
    pub fn load_state(&self, state: LossScaler) {
        let mut shared = self.lock();
        let next = Shared {
            listeners: std::mem::take(&mut shared.listeners),
            unscaled: shared.unscaled,
            generation: shared.generation + 1,
            ..Shared::from(state)
        };
        let left = std::mem::replace(&mut *shared, next);
        drop(shared);
        drop(left);
    }

    /// Continues from a saved state. If only one of the two scales the loss, as after a change of precision,
    /// the scaler starts over with its own configuration, and the log has a warning.
    pub fn resume_state(&self, saved: LossScaler) {
        let own = self.lock().scaler;
        if saved.is_enabled() == own.is_enabled() {
            return self.load_state(saved);
        }
        let words = |scaler: LossScaler| if scaler.is_enabled() { "on" } else { "off" };
        log::warn!(
            "burn-amp: loss scaling is {} in the saved state and {} here, as after a change of precision: \
             the loss scaler starts over with its own configuration",
            words(saved),
            words(own)
        );
        let fresh = LossScaler::new(*own.config());
        self.load_state(fresh.expect("a configuration in force is valid"));
    }

    /// Ends the step of the explicit protocol and records it.
    pub fn update(&self) -> Result<Transition, AmpError> {
        self.checked("update", PendingStep::check_update)?;
        let ended = {
            let own = &mut *self.pending().0;
            own.has_updated = true;
            own.pending.update()?
        };
        Ok(
            ended.map_or(Transition::Kept, |(scale, outcome, findings)| {
                self.record(scale, outcome, findings)
            }),
        )
    }

    /// Records the outcome of one step whose loss was multiplied by `scale`, if it was scaled, then logs it and
    /// notifies the listeners. Another thread may have changed the current scale since.
    pub fn record(
        &self,
        scale: Option<f32>,
        outcome: StepOutcome,
        findings: Findings,
    ) -> Transition {
        let recorded = {
            let shared = &mut *self.lock();
            let (scaler, history) = (&mut shared.scaler, &mut shared.history);
            let recorded = RecordedStep::of(scaler, history, scale, outcome, &findings);
            shared.leaves = findings.leaves;
            shared.has_scaled |= scale.is_some();
            shared.last_step = Some(recorded.step.clone());
            shared.last_number = shared.scaler.steps();
            recorded
        };
        recorded.log();
        let listeners = self.listeners();
        listeners.iter().for_each(|l| l.ended(&recorded));
        self.report_stuck(recorded.transition, &recorded.after, &recorded.step);
        recorded.transition
    }

    /// Logs that the run is stuck since a step, if it is, and notifies the listeners.
    fn report_stuck(&self, transition: Transition, scaler: &LossScaler, step: &LastStep) {
        if let Transition::Stuck(reason) = transition {
            scaler.log_stuck(reason, step);
            let error = scaler.stuck_error(reason, step);
            self.listeners().iter().for_each(|l| l.stuck(&error));
        }
    }

    /// Whether a step was recorded whose loss was scaled.
    pub fn has_scaled(&self) -> bool {
        self.lock().has_scaled
    }

    /// The result of the last step, also before its `update`.
    pub fn last_step(&self) -> Option<LastStep> {
        let under_way = self.pending().so_far();
        let under_way = under_way.map(|(scale, outcome, findings)| {
            LastStep::of(scale.unwrap_or(1.0), outcome, &findings)
        });
        under_way.or_else(|| self.lock().last_step.clone())
    }

    /// Names the parameters of the last step that are a module's, unless they are already named. `nodes` holds
    /// the module's nodes and paths, in module order.
    pub fn explained(&self, nodes: &[(u64, String)]) -> Option<LastStep> {
        let shared = &mut *self.lock();
        let step = shared.last_step.as_mut()?;
        let named = named(&mut shared.leaves, nodes);
        if !named.is_empty() {
            step.name(&named);
            step.anomalies.iter_mut().for_each(|a| a.place(nodes));
            shared.history.name(step, shared.last_number);
        }
        Some(step.clone())
    }

    /// Notifies `listener` from now on, unless it is notified already.
    pub fn listen(&self, listener: &Arc<impl Listener + 'static>) {
        let listeners = &mut self.lock().listeners;
        let is =
            |other: &Weak<dyn Listener>| std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(listener));
        if !listeners.iter().any(is) {
            let listener: Arc<dyn Listener> = listener.clone();
            listeners.push(Arc::downgrade(&listener));
        }
    }

    /// The listeners that have not been dropped.
    pub fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        let listeners = &mut self.lock().listeners;
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

/// The methods of a `GradScaler` that need no tensor. Its field `shared` is a [`SharedScaler`].
///
/// A macro, since the handles are types of two packages: behind a `Deref` these methods would be
/// missing from paths (`GradScaler::state`) and from the links of the documentation.
#[doc(hidden)]
#[macro_export]
macro_rules! scaler_handle {
    ($GradScaler:ident) => {
        impl $GradScaler {
            /// A new scaler.
            ///
            /// # Errors
            ///
            /// [`AmpError::InvalidLossScale`](crate::AmpError::InvalidLossScale) when a setting is
            /// out of its range.
            pub fn new(config: $crate::LossScaleConfig) -> Result<Self, $crate::AmpError> {
                Ok(Self::from($crate::LossScaler::new(config)?))
            }

            /// A copy of the current state.
            pub fn state(&self) -> $crate::LossScaler {
                self.shared.lock().scaler
            }

            /// The settings.
            pub fn config(&self) -> $crate::LossScaleConfig {
                *self.state().config()
            }

            /// The scale that the next loss is multiplied by, or the next step's losses after a
            /// [`set_scale`](Self::set_scale) within a step: 1 when disabled, and for the scaler of a device in
            /// bf16 or FP32. A scaler of your own belongs to no device: its scale is for f16,
            /// and in bf16 and FP32 no loss is multiplied by it. PyTorch's `get_scale`.
            pub fn loss_scale(&self) -> f32 {
                self.shared.loss_scale()
            }

            /// Steps skipped so far.
            pub fn skipped_steps(&self) -> u64 {
                self.state().skipped_steps()
            }

            /// How many steps were taken, of those whose gradients were checked.
            pub fn taken_steps(&self) -> u64 {
                self.state().taken_steps()
            }

            /// The result of the last step, from `step` on; `None` before the first step. Before `update`, a step
            /// of several optimizers is as far as it is known. Where gradients are not checked, no step is recorded: in bf16 and
            /// FP32, unless `AmpConfig::with_finite_check` of burn-amp is on.
            pub fn last_step(&self) -> Option<$crate::LastStep> {
                self.shared.last_step()
            }

            /// The skipped steps and scale changes since the scaler was created, configured or
            /// given a state. The history is not part of the saved state.
            pub fn history(&self) -> $crate::ScaleHistory {
                self.shared.lock().history.clone()
            }

            /// Sets the scale. The counts are kept, and the growth interval starts over. A step under way
            /// keeps the scale of its first loss.
            ///
            /// # Errors
            ///
            /// [`AmpError::InvalidLossScale`](crate::AmpError::InvalidLossScale) when the
            /// configuration does not allow the scale. The scaler is then unchanged.
            pub fn set_scale(&self, scale: f32) -> Result<(), $crate::AmpError> {
                self.shared.set_scale(scale)
            }

            /// Starts over with a configuration, with every count at zero. Discards the steps that are under way.
            ///
            /// # Errors
            ///
            /// [`AmpError::InvalidLossScale`](crate::AmpError::InvalidLossScale) when a setting is
            /// out of its range. The scaler is then unchanged.
            pub fn configure(
                &self,
                config: $crate::LossScaleConfig,
            ) -> Result<(), $crate::AmpError> {
                self.load_state($crate::LossScaler::new(config)?);
                Ok(())
            }

            /// Starts over with the scaler's own configuration, with every count at zero. Discards the steps that
            /// are under way.
            pub fn reset(&self) {
                self.configure(self.config())
                    .expect("a configuration in force is valid");
            }

            /// Continues from a state, for example from a record. Discards the steps of the explicit protocol
            /// that are under way. PyTorch's `load_state_dict`.
            pub fn load_state(&self, state: $crate::LossScaler) {
                self.shared.load_state(state);
            }

            /// Writes the state as JSON, in the form that burn-amp and burn-amp-device read.
            ///
            /// # Errors
            ///
            /// [`AmpError::State`](crate::AmpError::State) when the state cannot be written. The
            /// writer may then hold part of it.
            pub fn write_state(&self, writer: impl std::io::Write) -> Result<(), $crate::AmpError> {
                self.state().to_writer(writer)
            }

            /// Continues from a state that [`write_state`](Self::write_state) wrote. If only one of the two
            /// scales the loss, as after a change of precision, the scaler starts over with its own
            /// configuration, and the log has a warning.
            ///
            /// # Errors
            ///
            /// [`AmpError::State`](crate::AmpError::State) when the state is truncated, impossible or
            /// from a newer version. The scaler is then unchanged.
            pub fn read_state(&self, reader: impl std::io::Read) -> Result<(), $crate::AmpError> {
                self.shared
                    .resume_state($crate::LossScaler::from_reader(reader)?);
                Ok(())
            }

            /// Saves the state to a file. The file is either complete or unchanged.
            ///
            /// # Errors
            ///
            /// [`AmpError::State`](crate::AmpError::State) when the file cannot be written.
            pub fn save_file(
                &self,
                path: impl AsRef<std::path::Path>,
            ) -> Result<(), $crate::AmpError> {
                self.state().save(path)
            }

            /// Continues from a file that [`save_file`](Self::save_file) wrote, of burn-amp or of
            /// burn-amp-device. If only one of the two scales the loss, as after a change of precision, the
            /// scaler starts over with its own configuration, and the log has a warning.
            ///
            /// # Errors
            ///
            /// [`AmpError::State`](crate::AmpError::State) when the file is missing, or its state
            /// is truncated, impossible or from a newer version. The scaler is then unchanged.
            pub fn load_file(
                &self,
                path: impl AsRef<std::path::Path>,
            ) -> Result<(), $crate::AmpError> {
                self.shared.resume_state($crate::LossScaler::load(path)?);
                Ok(())
            }
        }

        /// A new scaler that continues from a state.
        impl From<$crate::LossScaler> for $GradScaler {
            fn from(scaler: $crate::LossScaler) -> Self {
                let shared = scaler.into();
                Self { shared }
            }
        }

        impl std::fmt::Debug for $GradScaler {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let state = self.state();
                f.debug_struct(stringify!($GradScaler))
                    .field("loss_scale", &state.scale())
                    .field("taken_steps", &state.taken_steps())
                    .field("skipped_steps", &state.skipped_steps())
                    .finish_non_exhaustive()
            }
        }
    };
}

#[cfg(test)]
// A handle has more methods than these tests call, and here it is not public.
#[allow(dead_code, clippy::wrong_self_convention)]
mod tests {
    use super::*;
    use crate::{DynamicLossScale, ScaleEntry};

    struct GradScaler {
        shared: SharedScaler<()>,
    }

    scaler_handle!(GradScaler);

    fn scaler(dynamic: DynamicLossScale) -> GradScaler {
        GradScaler::new(dynamic.into()).unwrap()
    }

    fn take(scaler: &GradScaler, outcome: StepOutcome) {
        let scale = scaler.loss_scale();
        let findings = Findings::default();
        scaler.shared.record(Some(scale), outcome, findings);
    }

    #[test]
    fn debug_prints_a_line() {
        let scaler = scaler(DynamicLossScale::new().with_init_scale(4.0));
        take(&scaler, StepOutcome::Overflow);
        let text = "GradScaler { loss_scale: 2.0, taken_steps: 0, skipped_steps: 1, .. }";
        assert_eq!(format!("{scaler:?}"), text);
    }

    #[test]
    fn the_parameters_of_a_skipped_pass_are_named_later() {
        let scaler = scaler(DynamicLossScale::new());
        let overflow = Findings {
            leaves: [(7, false), (8, true)].into(),
            ..Findings::default()
        };
        scaler
            .shared
            .record(Some(1.0), StepOutcome::Overflow, overflow);
        let nodes = [(7, "first".to_owned()), (8, "second".to_owned())];
        let step = scaler.shared.explained(&nodes).unwrap();
        assert_eq!(
            (step.stepped(), &step.parameters[..]),
            (false, &["first".to_owned()][..])
        );
        let history = scaler.history();
        let named: Vec<_> = history
            .skipped()
            .map(|(nth, s)| (nth, s.first_parameter.clone()))
            .collect();
        assert_eq!(named, [(1, Some("first".to_owned()))]);
    }

    /// Losses that ask for the scaler's state as they are dropped, as a program's logger may.
    #[derive(Default)]
    struct Asks(Weak<Mutex<Shared<Asks>>>);

    impl Drop for Asks {
        fn drop(&mut self) {
            if let Some(state) = self.0.upgrade() {
                assert!(state.try_lock().is_ok(), "dropped under the lock");
            }
        }
    }

    #[test]
    fn a_step_is_dropped_without_the_lock() {
        let state = || LossScaler::new(DynamicLossScale::new().into()).unwrap();
        let scaler = SharedScaler::<Asks>::from(state());
        let leave = || {
            let own = scaler.another();
            let mut step = own.pending();
            step.scale(&state());
            step.losses = Asks(Arc::downgrade(&own.0.state));
        };
        (0..100).for_each(|_| leave());
        scaler.forget_left();
        leave();
        scaler.load_state(state());
    }

    #[test]
    fn has_the_skipped_steps_and_the_changes_and_nothing_else() {
        let scaler = scaler(
            DynamicLossScale::new()
                .with_init_scale(4.0)
                .with_growth_interval(2),
        );
        take(&scaler, StepOutcome::Finite);
        assert_eq!(scaler.history().entries, []);
        take(&scaler, StepOutcome::Finite);
        take(&scaler, StepOutcome::NonFiniteLoss);
        take(&scaler, StepOutcome::Overflow);
        scaler.set_scale(4.0).unwrap();
        scaler.set_scale(16.0).unwrap();
        let history = scaler.history();
        let entry = |e: &ScaleEntry| (e.step, e.scale, e.skipped.as_ref().map(|s| s.outcome));
        assert_eq!(
            history.entries.iter().map(entry).collect::<Vec<_>>(),
            [
                (2, 8.0, None),
                (3, 8.0, Some(StepOutcome::NonFiniteLoss)),
                (4, 4.0, Some(StepOutcome::Overflow)),
                (4, 16.0, None),
            ]
        );
        assert_eq!(
            history.skipped().map(|(step, _)| step).collect::<Vec<_>>(),
            [3, 4]
        );
        assert_eq!(
            history.scales().collect::<Vec<_>>(),
            [4.0, 8.0, 8.0, 4.0, 16.0]
        );
    }

    #[test]
    fn begins_where_a_state_was_loaded() {
        let scaler = scaler(DynamicLossScale::new().with_init_scale(4.0));
        take(&scaler, StepOutcome::Finite);
        take(&scaler, StepOutcome::Overflow);
        scaler.load_state(scaler.state());
        let history = scaler.history();
        assert_eq!((history.first_step, history.first_scale), (2, 2.0));
        assert!(history.entries.is_empty());
    }

    #[test]
    fn a_run_that_continues_from_a_stuck_one_is_reported_too() {
        let stuck_after_two = DynamicLossScale::new()
            .with_init_scale(1.0)
            .with_min_scale(1.0)
            .with_stuck_after(2);
        let stuck = |scaler: &GradScaler| {
            let findings = Findings::default();
            let recorded = scaler
                .shared
                .record(Some(1.0), StepOutcome::Overflow, findings);
            matches!(recorded, Transition::Stuck(_))
        };
        let first = scaler(stuck_after_two);
        assert_eq!([(); 3].map(|_| stuck(&first)), [false, true, false]);
        let next = GradScaler::from(first.state());
        assert_eq!([(); 2].map(|_| stuck(&next)), [false, true]);
        first.load_state(next.state());
        assert_eq!([(); 2].map(|_| stuck(&first)), [false, true]);
        // Half of a count goes on.
        let half = scaler(stuck_after_two);
        assert!(!stuck(&half));
        assert!(stuck(&GradScaler::from(half.state())));
    }

    #[test]
    fn the_oldest_make_room_and_leave_the_scale_that_they_led_to() {
        let scaler = scaler(DynamicLossScale::new().with_init_scale(4.0));
        (0..1024 + 3).for_each(|_| take(&scaler, StepOutcome::Overflow));
        let history = scaler.history();
        assert_eq!(history.entries.len(), 1024);
        // 4, 2, 1: the scale after the third overflow.
        assert_eq!((history.first_step, history.first_scale), (3, 1.0));
        assert_eq!(history.entries[0].step, 4);
    }
}
