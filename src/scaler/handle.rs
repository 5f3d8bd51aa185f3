//! The handle to a loss scaler: a device's own scaler, or one in force for a scope.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::io::{Read, Write};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "train")]
use std::sync::Weak;

use burn_amp_core::{NonFinite, RecordedStep};
use parking_lot::{Mutex, MutexGuard};

use crate::precision;
use crate::{AmpError, LastStep, LossScaleConfig, LossScaler, Outcome, ScaleHistory, Transition};

/// A handle to a loss scaler. Cheap to clone; all clones share one state, on any thread.
///
/// Each device has its own scaler, and every `backward()` on [`AmpAutodiff`](crate::AmpAutodiff)
/// uses it without further setup. To train several models side by side, give each its own scaler
/// with [`scope`](GradScaler::scope), or by calling its methods. This includes clones of one model,
/// whose parameters have the same ids.
///
/// # The explicit protocol
///
/// With the feature `train`, a training loop can scale, check and skip by hand on any autodiff
/// backend, as with PyTorch's `torch.amp.GradScaler`. On `AmpAutodiff` nothing is scaled twice.
///
/// ```
/// # #[cfg(feature = "train")] {
/// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
/// # use burn::optim::{GradientsParams, SgdConfig};
/// # use burn_amp::{AmpAutodiff, AmpConfig, GradScaler, LossScaleConfig, Precision};
/// # type B = AmpAutodiff<Flex>;
/// # let device = Default::default();
/// # let mut model = LinearConfig::new(4, 2).init::<B>(&device);
/// # let mut optimizer = SgdConfig::new().init();
/// # AmpConfig::new().with_precision(Precision::F16).apply::<B>(&device)?;
/// let scaler = GradScaler::new(LossScaleConfig::default())?;
/// for _ in 0..3 {
///     let input = Tensor::<B, 2>::ones([8, 4], &device);
///     let loss = model.forward(input).mean();
///     let grads = scaler.scale(loss).backward();
///     let mut grads = GradientsParams::from_grads(grads, &model);
///     scaler.unscale(&model, &mut grads)?; // only to look at them, or to clip them
///     let stepped;
///     (model, stepped) = scaler.step(&mut optimizer, 1e-2, model, grads);
///     let stepped = stepped?;
///     scaler.update()?;
///     # assert!(stepped);
/// }
/// # assert_eq!(scaler.taken_steps(), 3);
/// # }
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
#[derive(Clone, Default)]
pub struct GradScaler {
    shared: Arc<Mutex<Shared>>,
}

impl fmt::Debug for GradScaler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("GradScaler")
            .field("loss_scale", &state.scale())
            .field("taken_steps", &state.taken_steps())
            .field("skipped_steps", &state.skipped_steps())
            .finish_non_exhaustive()
    }
}

// The lock alone is not unwind safe. Nothing panics while it is held.
impl UnwindSafe for GradScaler {}
impl RefUnwindSafe for GradScaler {}

#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) scaler: LossScaler,
    pub(crate) history: ScaleHistory,
    last_step: Option<LastStep>,
    /// Gradients of the last step whose parameters are not named yet, by leaf node.
    leaves: HashMap<u64, bool>,
    #[cfg(feature = "train")]
    pub(crate) pending: super::PendingStep,
    #[cfg(feature = "train")]
    listeners: Vec<Weak<dyn Listener>>,
    /// Whether this scaler belongs to a replica. Replicas step or skip together.
    is_replica: bool,
}

impl Shared {
    fn new(scaler: LossScaler) -> Self {
        Self {
            history: ScaleHistory::from(&scaler),
            scaler,
            ..Self::default()
        }
    }
}

/// Observes a scaler. Called on the thread of the step, until the observer is dropped.
#[cfg(feature = "train")]
pub(crate) trait Listener: Send + Sync {
    /// A step was taken or skipped. If `by_pass`, the backward pass itself did so, and the gradients
    /// of a skipped step are absent.
    fn step(&self, step: &LastStep, by_pass: bool);

    /// After such a step: no change of the scale helps. The error says why.
    fn stuck(&self, _error: &AmpError) {}

    /// The scaler starts over.
    fn forget(&self) {}

    /// An optimizer took or skipped a batch: all steps since the previous batch together.
    fn batch(&self, _taken: bool) {}

    /// Whether this listener is an optimizer that reports batches.
    fn makes_batches(&self) -> bool {
        false
    }
}

thread_local! {
    /// The scalers of this thread's active scopes, innermost last. Like a precision region, a scope
    /// covers the code that runs inside it: `precision` knows which scopes apply.
    static IN_SCOPE: RefCell<Vec<GradScaler>> = const { RefCell::new(Vec::new()) };
}

impl GradScaler {
    /// A new scaler, for [`scope`](GradScaler::scope) or the explicit protocol.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range.
    pub fn new(config: LossScaleConfig) -> Result<Self, AmpError> {
        Ok(Self::from(LossScaler::new(config)?))
    }

    /// Runs `f` with this scaler in force for every `backward()` on this thread, on any device.
    /// Scopes nest, and the innermost scope wins. A panic also ends the scope.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                IN_SCOPE.with_borrow_mut(|scalers| scalers.pop());
            }
        }
        IN_SCOPE.with_borrow_mut(|scalers| scalers.push(self.clone()));
        let _leave = Leave;
        precision::in_scope(f)
    }

    /// A copy of the state as it is now.
    pub fn state(&self) -> LossScaler {
        self.shared().scaler
    }

    /// The settings.
    pub fn config(&self) -> LossScaleConfig {
        *self.state().config()
    }

    /// What the next loss is multiplied by in f16; 1 when disabled. In bf16 and FP32 no loss is
    /// multiplied by it: [`AmpReport`](crate::AmpReport) knows the device's precision, and says so.
    pub fn loss_scale(&self) -> f32 {
        self.state().scale()
    }

    /// Steps skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.state().skipped_steps()
    }

    /// How many steps were taken, of those whose gradients were checked.
    pub fn taken_steps(&self) -> u64 {
        self.state().taken_steps()
    }

    /// What happened in the last step; `None` before the first step. In bf16 and FP32 nothing is
    /// scaled, and no step is recorded.
    pub fn last_step(&self) -> Option<LastStep> {
        self.shared().last_step.clone()
    }

    /// The skipped steps and scale changes since the scaler was created, configured or given a
    /// state. The history is not part of the saved state.
    pub fn history(&self) -> ScaleHistory {
        self.shared().history.clone()
    }

    /// Sets the scale. The counts are kept, and the growth interval starts over.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when the configuration does not allow the scale. The scaler
    /// is then unchanged.
    pub fn set_scale(&self, scale: f32) -> Result<(), AmpError> {
        let shared = &mut *self.shared();
        shared.scaler.set_scale(scale)?;
        shared.history.push(None, &shared.scaler);
        Ok(())
    }

    /// Starts over with a configuration, with every count at zero.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range. The scaler is then
    /// unchanged.
    pub fn configure(&self, config: LossScaleConfig) -> Result<(), AmpError> {
        self.load_state(LossScaler::new(config)?);
        Ok(())
    }

    /// Starts over with the scaler's own configuration, with every count at zero.
    pub fn reset(&self) {
        let config = self.config();
        self.configure(config)
            .expect("a configuration in force is valid");
    }

    /// Continues from a state, for example from a record. Discards a pending step of the explicit
    /// protocol.
    pub fn load_state(&self, state: LossScaler) {
        #[cfg(feature = "train")]
        self.listeners().iter().for_each(|l| l.forget());
        let mut shared = self.shared();
        *shared = Shared {
            #[cfg(feature = "train")]
            listeners: std::mem::take(&mut shared.listeners),
            is_replica: shared.is_replica,
            ..Shared::new(state)
        };
    }

    /// Writes the state as JSON.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state cannot be written. The writer may then hold part of it.
    pub fn to_writer(&self, writer: impl Write) -> Result<(), AmpError> {
        self.state().to_writer(writer)
    }

    /// Continues from a state that [`to_writer`](GradScaler::to_writer) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state is damaged, truncated or from a newer version. The scaler
    /// is then unchanged.
    pub fn from_reader(&self, reader: impl Read) -> Result<(), AmpError> {
        self.load_state(LossScaler::from_reader(reader)?);
        Ok(())
    }

    /// Saves the state to a file. The file ends up complete, or stays as it was.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        self.state().save(path)
    }

    /// Continues from a file that [`save`](GradScaler::save) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing, or its state is damaged, truncated or from a
    /// newer version. The scaler is then unchanged.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        self.load_state(LossScaler::load(path)?);
        Ok(())
    }

    /// Records and logs the outcome of one step whose loss was multiplied by `scale`. Another
    /// thread may have changed the current scale since.
    pub(crate) fn record(&self, scale: f32, outcome: Outcome, mut found: NonFinite) -> Transition {
        let mut shared = self.shared();
        let Shared {
            scaler, history, ..
        } = &mut *shared;
        let leaves = std::mem::take(&mut found.leaves);
        #[cfg(feature = "train")]
        let by_pass = found.by_pass;
        let recorded = RecordedStep::of(scaler, history, scale, outcome, found);
        shared.leaves = leaves;
        shared.last_step = Some(recorded.step.clone());
        drop(shared);
        recorded.log(", or full_precision around the layers that overflow");
        #[cfg(feature = "train")]
        for listener in self.listeners() {
            listener.step(&recorded.step, by_pass);
            if let Some(error) = recorded.stuck() {
                listener.stuck(&error);
            }
        }
        recorded.transition
    }

    #[cfg(any(test, feature = "distributed"))]
    pub(crate) fn set_replica(&self, is_replica: bool) {
        self.shared().is_replica = is_replica;
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }
}

#[cfg(feature = "train")]
impl GradScaler {
    /// Names the parameters of the last step, unless they are already named. `nodes` holds the
    /// module's nodes and paths, in module order.
    pub(crate) fn explained(&self, nodes: &[(u64, String)]) -> Option<LastStep> {
        let shared = &mut *self.shared();
        let leaves = std::mem::take(&mut shared.leaves);
        let step = shared.last_step.as_mut()?;
        if !leaves.is_empty() {
            let of = |(node, path): &(u64, String)| Some((path.clone(), *leaves.get(node)?));
            step.name(&nodes.iter().filter_map(of).collect::<Vec<_>>());
            step.anomalies.iter_mut().for_each(|a| a.place(nodes));
            shared.history.name(step, &shared.scaler);
        }
        Some(step.clone())
    }

    /// Notifies `listener` from now on.
    pub(crate) fn listen(&self, listener: &Arc<impl Listener + 'static>) {
        let listener: Arc<dyn Listener> = listener.clone();
        self.shared().listeners.push(Arc::downgrade(&listener));
    }

    /// Reports that an optimizer took or skipped a batch.
    pub(crate) fn batch(&self, taken: bool) {
        self.listeners().iter().for_each(|l| l.batch(taken));
    }

    /// Whether an optimizer reports batches.
    pub(crate) fn has_batches(&self) -> bool {
        self.listeners().iter().any(|l| l.makes_batches())
    }

    pub(crate) fn is_replica(&self) -> bool {
        self.shared().is_replica
    }

    fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        let listeners = &mut self.shared().listeners;
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }
}

/// A new scaler that continues from a state.
impl From<LossScaler> for GradScaler {
    fn from(scaler: LossScaler) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared::new(scaler))),
        }
    }
}

/// What a scaled loss, and every tensor computed from it, carries to the backward pass: the scaler
/// of the explicit protocol, and the scale.
#[derive(Debug, Clone)]
pub(crate) struct ScaledLoss {
    pub(crate) scaler: GradScaler,
    pub(crate) scale: f32,
}

impl ScaledLoss {
    /// Whether the gradients of both have the same scale and the same scaler.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.scaler.shared, &other.scaler.shared) && self.scale == other.scale
    }
}

/// The scaler of the innermost scope of this thread.
pub(crate) fn in_scope() -> Option<GradScaler> {
    let innermost = precision::innermost_scope()?;
    IN_SCOPE.with_borrow(|scalers| scalers.get(innermost).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dynamic, ScaleEntry};

    fn scaler(dynamic: Dynamic) -> GradScaler {
        GradScaler::new(LossScaleConfig::Dynamic(dynamic)).unwrap()
    }

    fn take(scaler: &GradScaler, outcome: Outcome) {
        scaler.record(scaler.loss_scale(), outcome, Default::default());
    }

    #[test]
    fn debug_prints_a_line() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0));
        take(&scaler, Outcome::Overflow);
        let text = "GradScaler { loss_scale: 2.0, taken_steps: 0, skipped_steps: 1, .. }";
        assert_eq!(format!("{scaler:?}"), text);
    }

    #[test]
    fn has_the_skipped_steps_and_the_changes_and_nothing_else() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0).with_growth_interval(2));
        take(&scaler, Outcome::Finite);
        assert_eq!(scaler.history().entries, []);
        take(&scaler, Outcome::Finite);
        take(&scaler, Outcome::NonFiniteLoss);
        take(&scaler, Outcome::Overflow);
        scaler.set_scale(4.0).unwrap();
        scaler.set_scale(16.0).unwrap();
        let history = scaler.history();
        let entry = |e: &ScaleEntry| (e.step, e.scale, e.skipped.as_ref().map(|s| s.outcome));
        assert_eq!(
            history.entries.iter().map(entry).collect::<Vec<_>>(),
            [
                (2, 8.0, None),
                (3, 8.0, Some(Outcome::NonFiniteLoss)),
                (4, 4.0, Some(Outcome::Overflow)),
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
        let scaler = scaler(Dynamic::new().with_init_scale(4.0));
        take(&scaler, Outcome::Finite);
        take(&scaler, Outcome::Overflow);
        scaler.load_state(scaler.state());
        let history = scaler.history();
        assert_eq!((history.first_step, history.first_scale), (2, 2.0));
        assert!(history.entries.is_empty());
    }

    #[test]
    fn the_oldest_make_room_and_leave_the_scale_that_they_led_to() {
        let scaler = scaler(Dynamic::new().with_init_scale(4.0));
        (0..1024 + 3).for_each(|_| take(&scaler, Outcome::Overflow));
        let history = scaler.history();
        assert_eq!(history.entries.len(), 1024);
        // 4, 2, 1: the scale after the third overflow.
        assert_eq!((history.first_step, history.first_scale), (3, 1.0));
        assert_eq!(history.entries[0].step, 4);
    }
}
