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

#[derive(Clone)]
struct InScope {
    scaler: GradScaler,
    /// Whether a backward pass takes or skips the step itself. If not, a training loop does.
    decides: bool,
}

impl GradScaler {
    /// Runs `f` with this scaler in force for every `backward()` on this thread, on any device.
    /// Scopes nest, and the innermost scope wins. A panic also ends the scope.
    pub fn scope<T>(&self, f: impl FnOnce() -> T) -> T {
        let (scaler, decides) = (self.clone(), true);
        within(InScope { scaler, decides }, f)
    }

    /// Records and logs the outcome of a backward pass whose loss was multiplied by `scale`. The
    /// pass itself takes or skips the step.
    pub(crate) fn record_pass(&self, scale: f32, outcome: StepOutcome, findings: Findings) {
        self.shared.record_pass(scale, outcome, findings);
    }
}

#[cfg(feature = "train")]
impl GradScaler {
    /// Runs a pass of a training loop, which takes or skips the step by the explicit protocol: each `backward()` of a
    /// loss on this thread is as that of `self.scale(loss)`.
    pub(crate) fn pass<T>(&self, f: impl FnOnce() -> T) -> T {
        let (scaler, decides) = (self.clone(), false);
        within(InScope { scaler, decides }, f)
    }

    /// Another handle on the scaler, with a step of its own.
    pub(crate) fn another(&self) -> Self {
        let shared = self.shared.another();
        Self { shared }
    }
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

/// The innermost scope of this thread.
fn innermost() -> Option<InScope> {
    let innermost = precision::innermost_scope()?;
    IN_SCOPE.with_borrow(|scopes| scopes.get(innermost).cloned())
}

/// The scaler of the innermost scope of this thread.
pub(crate) fn in_scope() -> Option<GradScaler> {
    Some(innermost()?.scaler)
}

/// The scaler and the scale of the next loss in the pass of a training loop.
pub(crate) fn of_loop() -> Option<ScaledLoss> {
    let scaler = innermost().filter(|scope| !scope.decides)?.scaler;
    let (_, scale) = scaler.shared.count_loss();
    Some(ScaledLoss { scaler, scale })
}
