//! The handle on a loss scaler: a device's own, or one in force for a region.

use std::cell::RefCell;
use std::collections::HashMap;
#[cfg(feature = "train")]
use std::collections::VecDeque;
#[cfg(feature = "train")]
use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
#[cfg(feature = "train")]
use std::sync::Weak;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_backend::Backend;
use serde::{Deserialize, Serialize};

use super::history::ScaleHistory;
use super::{LossScaleConfig, LossScaler, Outcome, Transition};
use crate::device::{self, DeviceKey};
use crate::file::replace_file;
use crate::{AmpError, Anomaly};

/// A handle on a loss scaler, cheap to clone; the clones share one state, on whatever threads they
/// are.
///
/// Each device has a scaler of its own, which every `backward()` on
/// [`AmpAutodiff`](crate::AmpAutodiff) uses there, and nothing else is needed. Several models that
/// train side by side get one each with [`scope`](GradScaler::scope), or by calling its methods; so
/// do clones of one model, whose parameters have the same ids.
///
/// # The explicit protocol
///
/// Training loops that want it (feature `train`) scale, check and skip by hand, as with PyTorch's
/// `torch.amp.GradScaler`, on any autodiff backend. On `AmpAutodiff` nothing is scaled twice.
///
/// ```
/// # #[cfg(feature = "train")] {
/// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
/// # use burn::optim::{GradientsParams, SgdConfig};
/// # use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};
/// # type B = AmpAutodiff<Flex>;
/// # let device = Default::default();
/// # let mut model = LinearConfig::new(4, 2).init::<B>(&device);
/// # let mut optimizer = SgdConfig::new().init();
/// let scaler = GradScaler::new(LossScaleConfig::default())?;
/// for _ in 0..3 {
///     let input = Tensor::<B, 2>::ones([8, 4], &device);
///     # with_precision(Precision::F16, || {
///     let loss = model.forward(input).mean();
///     let grads = scaler.scale(loss).backward();
///     let grads = GradientsParams::from_grads(grads, &model);
///     let grads = scaler.unscale(&model, grads)?; // only to look at them, or to clip them
///     let (stepped_model, stepped) = scaler.step(&mut optimizer, 1e-2, model.clone(), grads)?;
///     model = stepped_model;
///     scaler.update()?;
///     # assert!(stepped);
///     # Ok::<(), burn_amp::AmpError>(()) })?;
/// }
/// # assert_eq!(scaler.state().taken_steps(), 3);
/// # }
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct GradScaler {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) scaler: LossScaler,
    history: ScaleHistory,
    last_step: Option<LastStep>,
    /// The gradients of the last step that are not yet named, by the nodes of their leaves.
    leaves: HashMap<u64, bool>,
    #[cfg(feature = "train")]
    pub(super) window: super::explicit::Window,
    #[cfg(feature = "train")]
    listeners: Vec<Weak<dyn Listener>>,
    /// Whether it is one of those of a distributed training, which step or skip together.
    is_replica: bool,
}

impl Shared {
    fn new(scaler: LossScaler) -> Self {
        Self {
            history: ScaleHistory::from(&scaler),
            scaler,
            last_step: None,
            leaves: HashMap::new(),
            #[cfg(feature = "train")]
            window: super::explicit::Window::default(),
            #[cfg(feature = "train")]
            listeners: Vec::new(),
            is_replica: false,
        }
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self::new(LossScaler::default())
    }
}

/// Who follows a scaler: called on the thread on which it happens, for as long as it is alive.
#[cfg(feature = "train")]
pub(crate) trait Listener: fmt::Debug + Send + Sync {
    /// A step was taken or skipped.
    fn step(&self, _step: &LastStep, _transition: Transition) {}

    /// It was by a backward pass, whose gradients are now absent if it was skipped.
    fn pass(&self, _step: &LastStep) {}

    /// The scaler starts anew.
    fn forget(&self) {}

    /// An optimizer took or skipped what the steps since the last batch add up to.
    fn batch(&self, _taken: bool) {}

    /// Whether this is such an optimizer.
    fn makes_batches(&self) -> bool {
        false
    }
}

/// What happened in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastStep {
    /// What the loss was multiplied with.
    pub scale: f32,
    /// How it ended.
    pub outcome: Outcome,
    /// How many parameters had a gradient that was not finite; 0 where it was another replica's.
    pub non_finite_gradients: usize,
    /// The paths of these parameters in their module, as `encoder.layers.2.weight`: the last of the
    /// module first, as the backward pass comes to them where a module declares its parts in the
    /// order of their use. They are there where the module was at hand, in the explicit protocol,
    /// with a trainer or an `AmpOptimizer`; else `GradScaler::explain` finds them.
    pub parameters: Vec<String>,
    /// The parameter that comes before the first of them and has a finite gradient: between the two
    /// the backward pass overflowed. Absent if there is none, or the module was not at hand.
    pub last_finite: Option<String>,
    /// Where anomaly detection is on, the first operation of the forward pass and that of the
    /// backward pass whose result was not finite.
    pub anomalies: Vec<Anomaly>,
}

/// What a pass found that was not finite.
#[derive(Debug, Clone, Default)]
pub(crate) struct NonFinite {
    /// Whether it is the backward pass itself that takes or skips the step.
    pub by_pass: bool,
    /// How many gradients.
    pub gradients: usize,
    /// The parameters in the order of the module, with whether their gradient is finite, where the
    /// module is known.
    pub parameters: Vec<(String, bool)>,
    /// Their nodes, with the same, where it is not.
    pub leaves: HashMap<u64, bool>,
    pub anomalies: Vec<Anomaly>,
}

impl LastStep {
    /// Whether the optimizer's step was taken.
    pub fn stepped(&self) -> bool {
        self.outcome == Outcome::Finite
    }

    /// The first parameters that were not finite, and how many more there are.
    pub(crate) fn listed(&self) -> String {
        const LISTED: usize = 8;
        let first = &self.parameters[..self.parameters.len().min(LISTED)];
        match self.parameters.len() - first.len() {
            0 if first.is_empty() => "a gradient on another device".into(),
            0 => first.join(", "),
            more => format!("{} and {more} more", first.join(", ")),
        }
    }

    /// Names the parameters, given in the order of the module with whether each is finite.
    fn name(&mut self, parameters: &[(String, bool)]) {
        let backward = || parameters.iter().rev();
        let before = backward().take_while(|(_, finite)| *finite).count();
        let bad = backward().filter(|(_, finite)| !finite);
        self.parameters = bad.map(|(path, _)| path.clone()).collect();
        self.last_finite = match self.parameters.is_empty() || before == 0 {
            true => None,
            false => backward().nth(before - 1).map(|(path, _)| path.clone()),
        };
    }
}

static OF_DEVICES: LazyLock<Mutex<HashMap<DeviceKey, GradScaler>>> = LazyLock::new(Mutex::default);

thread_local! {
    static IN_SCOPE: RefCell<Vec<GradScaler>> = const { RefCell::new(Vec::new()) };
    /// The scalers whose losses wait for their backward pass, the oldest first.
    #[cfg(feature = "train")]
    static WAITING: RefCell<VecDeque<GradScaler>> = const { RefCell::new(VecDeque::new()) };
}

impl GradScaler {
    /// A scaler of its own, for [`scope`](GradScaler::scope) or the explicit protocol.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range.
    pub fn new(config: LossScaleConfig) -> Result<Self, AmpError> {
        Ok(Self::from(LossScaler::new(config)?))
    }

    /// The scaler of a device, one for the process, with the default configuration until it is
    /// configured. Backends that share a device type (`Cuda`, `Amp<Cuda>`, `AmpAutodiff<Cuda>`)
    /// share the scaler.
    pub fn of<B: Backend>(device: &B::Device) -> Self {
        let key = device::key::<B>(device);
        lock(&OF_DEVICES).entry(key).or_default().clone()
    }

    /// Runs `f` with this scaler in force for every `backward()` on this thread, whatever the
    /// device. Scopes nest, the innermost holds; a panic leaves the scope as well.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                IN_SCOPE.with_borrow_mut(|scalers| scalers.pop());
            }
        }
        IN_SCOPE.with_borrow_mut(|scalers| scalers.push(self.clone()));
        let _leave = Leave;
        f()
    }

    /// A copy of the state as it is now.
    pub fn state(&self) -> LossScaler {
        self.shared().scaler
    }

    /// The settings.
    pub fn config(&self) -> LossScaleConfig {
        *self.state().config()
    }

    /// What the next loss is multiplied with where f16 is in force, 1 when disabled; in bf16 and
    /// FP32 nothing is.
    pub fn loss_scale(&self) -> f32 {
        self.state().scale()
    }

    /// Steps that were skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.state().skipped_steps()
    }

    /// What happened in the last step; `None` before the first. In bf16 and FP32, where nothing is
    /// scaled, no step is recorded.
    pub fn last_step(&self) -> Option<LastStep> {
        self.shared().last_step.clone()
    }

    /// The skipped steps and the changes of the scale, since the scaler was made, configured or
    /// given a state. It is no part of the state that is saved.
    pub fn history(&self) -> ScaleHistory {
        self.shared().history.clone()
    }

    /// The state and what led to it, of one moment.
    pub(crate) fn snapshot(&self) -> (LossScaler, ScaleHistory) {
        let shared = self.shared();
        (shared.scaler, shared.history.clone())
    }

    /// Goes on with another scale; the counts stay, the growth interval starts anew.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when the configuration does not allow the scale; the scaler
    /// is then as it was.
    pub fn set_scale(&self, scale: f32) -> Result<(), AmpError> {
        let mut shared = self.shared();
        shared.scaler.set_scale(scale)?;
        let state = shared.scaler;
        shared.history.set(&state);
        Ok(())
    }

    /// Starts again from a configuration, with every count at zero.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidLossScale`] when a setting is out of its range; the scaler is then as it
    /// was.
    pub fn configure(&self, config: LossScaleConfig) -> Result<(), AmpError> {
        self.load_state(LossScaler::new(config)?);
        Ok(())
    }

    /// Starts again from the scaler's own configuration, with every count at zero.
    pub fn reset(&self) {
        let config = self.config();
        self.configure(config)
            .expect("a configuration in force is valid");
    }

    /// Goes on from a state, for example one that was restored from a record. A step that the
    /// explicit protocol has begun is forgotten.
    pub fn load_state(&self, state: LossScaler) {
        self.waits_no_longer();
        #[cfg(feature = "train")]
        self.listeners()
            .iter()
            .for_each(|listener| listener.forget());
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
    /// [`AmpError::State`] when it cannot be written; what the writer took may then be a part of
    /// it.
    pub fn to_writer(&self, writer: impl Write) -> Result<(), AmpError> {
        self.written(writer)
            .map_err(|error| AmpError::unwritten("the writer", error))
    }

    fn written(&self, mut writer: impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut writer, &self.state())?;
        // What a buffer still holds would be lost without an error when it is dropped.
        writer.flush()
    }

    /// Goes on from a state that [`to_writer`](GradScaler::to_writer) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state is damaged, cut short or of a newer version; the scaler
    /// is then as it was.
    pub fn from_reader(&self, reader: impl Read) -> Result<(), AmpError> {
        let state = serde_json::from_reader(reader)
            .map_err(|error| AmpError::unread("the reader", error))?;
        self.load_state(state);
        Ok(())
    }

    /// Saves the state to a file, which afterwards holds all of it or is as it was before.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        replace_file(path, |file| self.written(file))
            .map_err(|error| AmpError::unwritten(path.display(), error))
    }

    /// Goes on from a file that [`save`](GradScaler::save) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing, or its state is damaged, cut short or of a
    /// newer version; the scaler is then as it was.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        let failed = |error: &dyn std::fmt::Display| AmpError::unread(path.display(), error);
        let bytes = std::fs::read(path).map_err(|error| failed(&error))?;
        let state = serde_json::from_slice(&bytes).map_err(|error| failed(&error))?;
        self.load_state(state);
        Ok(())
    }

    /// Takes the outcome of one step, and tells the log what it was.
    pub(crate) fn record(&self, outcome: Outcome, found: NonFinite) -> Transition {
        let (step, transition, before, after, by_pass) = {
            let mut shared = self.shared();
            let mut step = LastStep {
                scale: shared.scaler.scale(),
                outcome,
                non_finite_gradients: found.gradients,
                parameters: Vec::new(),
                last_finite: None,
                anomalies: found.anomalies,
            };
            let by_pass = found.by_pass;
            step.name(&found.parameters);
            shared.leaves = found.leaves;
            let before = shared.scaler;
            let transition = shared.scaler.update(outcome);
            let after = shared.scaler;
            shared.history.take(&step, &after);
            shared.last_step = Some(step.clone());
            (step, transition, before, after, by_pass)
        };
        tell_log(&step, transition, &before, &after);
        #[cfg(feature = "train")]
        for listener in self.listeners() {
            listener.step(&step, transition);
            if by_pass {
                listener.pass(&step);
            }
        }
        #[cfg(not(feature = "train"))]
        let _ = by_pass;
        transition
    }

    /// Names the parameters of the last step, where that was not done yet, given the nodes of those
    /// of the module in its order.
    #[cfg(feature = "train")]
    pub(crate) fn explained(&self, nodes: &[(u64, String)]) -> Option<LastStep> {
        let mut shared = self.shared();
        let leaves = std::mem::take(&mut shared.leaves);
        let step = shared.last_step.as_mut()?;
        if !leaves.is_empty() {
            let of = |(node, path): &(u64, String)| Some((path.clone(), *leaves.get(node)?));
            step.name(&nodes.iter().filter_map(of).collect::<Vec<_>>());
            step.anomalies.iter_mut().for_each(|a| a.place(nodes));
            let (step, state) = (step.clone(), shared.scaler);
            shared.history.name(&step, &state);
        }
        shared.last_step.clone()
    }

    /// From now on `listener` is told what happens.
    #[cfg(feature = "train")]
    pub(crate) fn listen(&self, listener: &Arc<impl Listener + 'static>) {
        let listener: Arc<dyn Listener> = listener.clone();
        self.shared().listeners.push(Arc::downgrade(&listener));
    }

    /// Tells that an optimizer took or skipped a batch.
    #[cfg(feature = "train")]
    pub(crate) fn batch(&self, taken: bool) {
        for listener in self.listeners() {
            listener.batch(taken);
        }
    }

    /// Whether an optimizer tells of batches.
    #[cfg(feature = "train")]
    pub(crate) fn has_batches(&self) -> bool {
        self.listeners().iter().any(|l| l.makes_batches())
    }

    #[cfg(feature = "distributed")]
    pub(crate) fn set_replica(&self, is_replica: bool) {
        self.shared().is_replica = is_replica;
    }

    #[cfg(feature = "train")]
    pub(crate) fn is_replica(&self) -> bool {
        self.shared().is_replica
    }

    #[cfg(feature = "train")]
    fn listeners(&self) -> Vec<Arc<dyn Listener>> {
        let listeners = &mut self.shared().listeners;
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.iter().filter_map(Weak::upgrade).collect()
    }

    pub(super) fn shared(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    /// Leaves the next backward pass of this thread that nobody waits for to the explicit protocol.
    #[cfg(feature = "train")]
    pub(super) fn waits_for_backward(&self) {
        WAITING.with_borrow_mut(|waiting| waiting.push_back(self.clone()));
    }

    /// Undoes [`waits_for_backward`](GradScaler::waits_for_backward) where that pass never came, so
    /// that no other loss's pass is taken for it.
    pub(super) fn waits_no_longer(&self) {
        #[cfg(feature = "train")]
        WAITING.with_borrow_mut(|waiting| {
            waiting.retain(|scaler| !Arc::ptr_eq(&scaler.shared, &self.shared));
        });
    }
}

/// A scaler of its own that goes on from a state.
impl From<LossScaler> for GradScaler {
    fn from(scaler: LossScaler) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Shared::new(scaler))),
        }
    }
}

/// The scaler that a backward pass uses.
pub(crate) enum InForce {
    /// The pass itself checks the gradients and takes or skips the step.
    Implicit(GradScaler),
    /// The explicit protocol does.
    #[cfg(feature = "train")]
    Explicit(GradScaler),
}

impl InForce {
    pub(crate) fn handle(&self) -> &GradScaler {
        match self {
            InForce::Implicit(scaler) => scaler,
            #[cfg(feature = "train")]
            InForce::Explicit(scaler) => scaler,
        }
    }
}

/// The scaler in force for the backward pass that now begins on this thread, if one `is_wanted`:
/// the explicit protocol's, else the innermost scope's, else the device's.
pub(crate) fn in_force<B: Backend>(device: &B::Device, is_wanted: bool) -> Option<InForce> {
    // Whatever becomes of this pass, it is the one that the protocol waited for.
    #[cfg(feature = "train")]
    if let Some(scaler) = WAITING.with_borrow_mut(VecDeque::pop_front) {
        return is_wanted.then_some(InForce::Explicit(scaler));
    }
    is_wanted.then(|| {
        InForce::Implicit(
            IN_SCOPE
                .with_borrow(|scalers| scalers.last().cloned())
                .unwrap_or_else(|| GradScaler::of::<B>(device)),
        )
    })
}

/// One line an event, with its values as fields. Of those that repeat the 1st, 2nd, 4th, 8th .. are
/// told, which say how many there were.
fn tell_log(step: &LastStep, transition: Transition, before: &LossScaler, after: &LossScaler) {
    let mut named = match step.parameters.is_empty() {
        true => String::new(),
        false => format!(" ({})", step.listed()),
    };
    for anomaly in &step.anomalies {
        named = format!("{named} [{anomaly}]");
    }
    let steps = after.steps();
    let in_a_row = after.skipped_in_a_row();
    let losses = after.non_finite_losses();
    match step.outcome {
        Outcome::Finite if before.skipped_in_a_row() > 1 => log::debug!(
            step = steps, scale = step.scale, skipped_in_a_row = before.skipped_in_a_row();
            "burn-amp: step taken at loss scale {}, after {} in a row that were skipped",
            step.scale,
            before.skipped_in_a_row()
        ),
        Outcome::Overflow if in_a_row.is_power_of_two() => log::debug!(
            step = steps, scale = step.scale, new_scale = after.scale(),
            gradients = step.non_finite_gradients, skipped_in_a_row = in_a_row;
            "burn-amp: {} gradients{named} overflowed at loss scale {}; step skipped, {in_a_row} in \
             a row, scale now {}",
            step.non_finite_gradients,
            step.scale,
            after.scale()
        ),
        Outcome::NonFiniteLoss if losses.is_power_of_two() => log::warn!(
            step = steps, scale = step.scale, losses = losses;
            "burn-amp: the loss is not finite{named}; step skipped, loss scale {} kept ({losses} of \
             them so far). This is not the scale's fault: look at the inputs and the learning rate, \
             and in the forward pass for values beyond 65504, which f16 does not hold (bf16 does, or \
             full_precision around the layer)",
            step.scale
        ),
        _ => {}
    }
    if transition == Transition::StuckAtMinimum {
        log::error!(
            step = steps, scale = after.scale(), skipped_in_a_row = in_a_row;
            "burn-amp: {in_a_row} steps in a row were skipped, the last of them at the minimum loss \
             scale {}: the model is not training. Its gradients{named} are not finite whatever the \
             scale; try bf16, or full_precision around the layers that overflow",
            after.scale()
        );
    }
}

/// A poisoned lock is taken as it is: nothing is called while these are held, and so nothing
/// panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
