//! The handle to a loss scaler: a device's own scaler, or one in force for a scope.

use std::cell::RefCell;

use burn_amp_core::{Findings, SharedScaler, scaler_handle};

#[cfg(feature = "train")]
use super::Losses;
use crate::StepOutcome;
use crate::precision;

/// Without the explicit protocol there are no losses to check.
#[cfg(not(feature = "train"))]
type Losses = ();

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
    pub(crate) shared: SharedScaler<Losses>,
}

scaler_handle!(GradScaler);

thread_local! {
    /// The scalers of this thread's active scopes, innermost last. Like a precision region, a scope
    /// covers the code that runs inside it: `precision` counts the scopes that apply.
    static IN_SCOPE: RefCell<Vec<InScope>> = const { RefCell::new(Vec::new()) };
}

/// A scaler in force.
struct InScope {
    scaler: GradScaler,
    /// In a pass of a training loop: what the backward passes did so far.
    #[cfg(feature = "train")]
    passes: Option<Passes>,
}

/// A backward pass that was taken or skipped.
#[cfg(feature = "train")]
pub(crate) struct Pass {
    /// What the loss was multiplied by, if it was scaled.
    pub scale: Option<f32>,
    pub outcome: StepOutcome,
    pub findings: Findings,
}

/// The backward passes of a training loop that were checked.
#[cfg(feature = "train")]
#[derive(Default)]
pub(crate) struct Passes {
    /// Those with the loop's scaler.
    pub own: Vec<Pass>,
    /// Whether one with another scaler was skipped.
    pub other_skipped: bool,
    /// Whether the program scaled a loss with another scaler: its protocol checks the gradients, if the program follows it.
    pub other_scaled: bool,
}

#[cfg(feature = "train")]
impl Passes {
    /// Whether one of them was skipped.
    pub fn are_skipped(&self) -> bool {
        let is_skipped = |pass: &Pass| pass.outcome != StepOutcome::Finite;
        self.other_skipped || self.own.iter().any(is_skipped)
    }
}

impl GradScaler {
    /// Runs `f` with this scaler in force for every `backward()` on this thread, on any device.
    /// Scopes nest, and the innermost scope wins. A panic also ends the scope.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        within(
            InScope {
                scaler: self.clone(),
                #[cfg(feature = "train")]
                passes: None,
            },
            f,
        )
    }

    /// Records and logs the outcome of a backward pass whose loss was multiplied by `scale`, if it was scaled. The
    /// pass itself takes or skips the step; in a training loop, its part of the step.
    pub(crate) fn record_pass(&self, scale: Option<f32>, outcome: StepOutcome, findings: Findings) {
        #[cfg(feature = "train")]
        let Some(Pass { findings, .. }) = self.given_to_loop(Pass {
            scale,
            outcome,
            findings,
        }) else {
            return;
        };
        self.shared.record(scale, outcome, findings);
    }
}

#[cfg(feature = "train")]
impl GradScaler {
    /// Runs a micro-batch of a training loop with this scaler in force on this thread. The loop records the passes.
    pub(crate) fn pass<T>(&self, f: impl FnOnce() -> T) -> (T, Passes) {
        let scope = InScope {
            scaler: self.clone(),
            passes: Some(Passes::default()),
        };
        within(scope, || {
            let out = f();
            let passes = IN_SCOPE.with_borrow_mut(|scopes| scopes.last_mut()?.passes.take());
            (out, passes.unwrap_or_default())
        })
    }

    /// Gives a pass to the loop that runs it. Returns the pass if its scaler is not the loop's.
    fn given_to_loop(&self, pass: Pass) -> Option<Pass> {
        let (outcome, mut pass) = (pass.outcome, Some(pass));
        in_loop(|scaler, passes| match scaler.shared.is(&self.shared) {
            true => passes.own.extend(pass.take()),
            false => passes.other_skipped |= outcome != StepOutcome::Finite,
        });
        pass
    }
}

/// Tells the training loop that runs here, as in the `TrainStep` of a `Learner`, that the program has scaled a loss.
#[cfg(feature = "train")]
pub(crate) fn other_scaled() {
    in_loop(|_, passes| passes.other_scaled = true);
}

/// The scaler of the training loop that runs here.
#[cfg(feature = "train")]
pub(crate) fn of_loop() -> Option<GradScaler> {
    in_loop(|scaler, _| scaler.clone())
}

#[cfg(feature = "train")]
fn in_loop<T>(f: impl FnOnce(&GradScaler, &mut Passes) -> T) -> Option<T> {
    IN_SCOPE.with_borrow_mut(|scopes| {
        let scopes = scopes[precision::scopes()].iter_mut().rev();
        let mut loops = scopes.filter_map(|scope| Some((&scope.scaler, scope.passes.as_mut()?)));
        loops.next().map(|(scaler, passes)| f(scaler, passes))
    })
}

fn within<T>(scope: InScope, f: impl FnOnce() -> T) -> T {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_SCOPE.with_borrow_mut(|scopes| scopes.pop());
        }
    }
    IN_SCOPE.with_borrow_mut(|scopes| scopes.push(scope));
    let _leave = Leave;
    precision::in_scope(f)
}

/// The scaler of the explicit protocol, and the scale. A scaled loss, and every tensor computed from
/// it, carries them to the backward pass.
#[derive(Debug, Clone)]
pub(crate) struct ScaledLoss {
    pub(crate) scaler: GradScaler,
    pub(crate) scale: f32,
}

impl ScaledLoss {
    /// Whether the gradients of both have the same scale and the same scaler.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.scaler.shared.is(&other.scaler.shared) && self.scale == other.scale
    }
}

/// The scaler of the innermost scope of this thread.
pub(crate) fn in_scope() -> Option<GradScaler> {
    IN_SCOPE.with_borrow(|scopes| Some(scopes[precision::scopes()].last()?.scaler.clone()))
}
