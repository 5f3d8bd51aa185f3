//! Regions of a precision. A device receives operations and no code. So a region is a mark on each tensor
//! that enters it, which operations pass on to their results. In the backward pass, it is a mark on the
//! gradient of each tensor that leaves it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{DType, Tensor};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_dispatch::backends::Autodiff;
#[cfg(feature = "burn-0-23")]
use burn_dispatch::backends::Group;
#[cfg(feature = "remote")]
use burn_dispatch::backends::Remote;
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_dispatch::{BackendTensor, DispatchTensor, DispatchTensorKind};

use crate::device::{UNSCALED, is_watched};
use crate::tensor::{DEPTHS, Mark};
use crate::{Precision, local};

/// Runs `f` on `input` in FP32, in the forward and in the backward pass:
/// [`with_precision`]`(Precision::F32, input, f)`. The counterpart of PyTorch's
/// `torch.autocast(enabled=False)`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::burn;
/// # use burn::{nn::LinearConfig, tensor::Tensor};
/// use burn_amp_device::{Precision, flex, full_precision};
///
/// let device = flex(Precision::F16)?.autodiff();
/// let layer = LinearConfig::new(4, 2).init(&device);
/// let x = Tensor::<2>::ones([8, 4], &device) * 30_000.0;
/// // The products are above 65504, the largest f16.
/// let large = full_precision(x, |x| x.matmul(layer.weight.val().ones_like()));
/// assert_eq!(large.max().into_scalar::<f32>(), 120_000.0);
/// # }
/// # Ok::<(), burn_amp_device::Error>(())
/// ```
pub fn full_precision<I: RegionTensors, O: RegionTensors>(input: I, f: impl FnOnce(I) -> O) -> O {
    with_precision(Precision::F32, input, f)
}

/// Runs `f` on `input` in another precision than the device's, in the forward and in the backward pass. The
/// counterpart of a nested `torch.autocast(dtype=..)` in PyTorch.
///
/// `input` and the result of `f` are tensors, or tuples, arrays, vectors and options of tensors. The region
/// follows the tensors: an operation is in the region if one of its operands is `input` or was computed from
/// `input`, on any thread and behind any server. Operations of the backward pass between the gradient of the
/// result and the gradient of `input` are also in the region. At the border of the region, `input`, the result
/// and their gradients have their own dtype, FP32 by default. Of nested regions, the inner one decides; [`Auto`](Precision::Auto) restores the device's
/// own precision.
///
/// - Pass every tensor that `f` takes from outside and that the model computes: an operation on only captured
///   tensors is not in the region, and the gradient of a captured tensor stays in the region until the
///   backward pass ends. Parameters of layers need not be passed.
/// - Integers and booleans carry no region. In a language model, pass the embedded tokens. A tensor made of
///   integers or booleans within `f`, such as `x.argmax(1).float()`, is outside the region.
/// - The result of a reduction of a whole tensor to one number is outside the region.
/// - A parameter stays in the region if it was trained there and the program called the optimizer itself: its
///   products elsewhere are then in the region's precision, too. Step with
///   [`GradScaler::step`](crate::GradScaler::step), also in bf16. With a `Learner`, call `.with_amp()`.
/// - The running statistics of a batch norm that was trained in a region stay in it until they are loaded from
///   a record: the layers behind them are then in the region in evaluation, too.
/// - A tensor that moves to another device may leave the region: begin a region there.
/// - A region that begins on another thread than the region around it, within that region's closure, ends both
///   for its tensors. Operations may run on any thread.
/// - An f64 tensor is in no region.
/// - LibTorch behind a plain Burn server refuses the bounds that mark a region. On every other backend these
///   bounds are the identity.
/// - A region in f16 on a device in another precision needs a scaler:
///   [`GradScaler::new`](crate::GradScaler::new).
/// - On a plain Burn device and on a device in FP32, `f` runs as if without a region.
/// - Where the device does not compute in `precision`, operations stay in FP32.
///
/// # Panics
///
/// - If `input` has integers or booleans, and no float tensor: no operation would be in the region.
/// - In a region within ten others.
pub fn with_precision<I: RegionTensors, O: RegionTensors>(
    precision: Precision,
    input: I,
    f: impl FnOnce(I) -> O,
) -> O {
    let [floats, others] = input.count();
    assert!(
        floats > 0 || others == 0,
        "a region without a float tensor, which no operation would be in: expected at least one float tensor \
         as input. Integers and booleans carry no region: in a language model, pass the embedded tokens"
    );
    USED.store(true, Ordering::Relaxed);
    if precision == Precision::F16 {
        UNSCALED.watch();
    }
    let within = Within::enter();
    let (enter, leave) = (
        Mark::Enter(precision, within.depth),
        Mark::Leave(within.depth),
    );
    let entered = input.marked(Pair(Some(enter), Some(leave)));
    f(entered).marked(Pair(Some(leave), Some(enter)))
}

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A region's code runs on this thread until this is dropped.
struct Within {
    /// How many regions are around the region.
    depth: u32,
}

impl Within {
    /// # Panics
    ///
    /// If too many regions are nested.
    fn enter() -> Self {
        let depth = DEPTH.get();
        assert!(
            depth < DEPTHS,
            "too many nested regions: expected at most {DEPTHS}"
        );
        DEPTH.set(depth + 1);
        Self { depth }
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        DEPTH.set(self.depth);
    }
}

/// Whether this process has regions.
static USED: AtomicBool = AtomicBool::new(false);

/// A tensor that its device keeps in half from now on. In the client, the tensor stays FP32.
pub(crate) fn in_half<const D: usize>(tensor: Tensor<D>, precision: Precision) -> Tensor<D> {
    marked(tensor, Pair(Some(Mark::Half(precision)), None))
}

/// The loss that a backward pass begins with. It is marked if anomaly detection needs the pass of each
/// operation.
pub(crate) fn begins_backward<const D: usize>(loss: Tensor<D>) -> Tensor<D> {
    if is_watched() {
        marked(loss, Pair(None, Some(Mark::Gradient)))
    } else {
        loss
    }
}

/// Whether gradients may have marks.
pub(crate) fn has_marks() -> bool {
    is_watched() || USED.load(Ordering::Relaxed)
}

/// A gradient that leaves the backward pass, without marks.
pub(crate) fn ends_backward<const D: usize>(gradient: Tensor<D>) -> Tensor<D> {
    if has_marks() {
        marked(gradient, Pair(Some(Mark::Clear), None))
    } else {
        gradient
    }
}

/// The mark of a tensor, and the mark of its gradient.
#[derive(Debug, Clone, Copy)]
pub struct Pair(pub(crate) Option<Mark>, pub(crate) Option<Mark>);

/// Tensors that enter and leave a region: one tensor, or a tuple, an array, a vector or an option of tensors.
/// Integers and booleans are the same in every precision.
pub trait RegionTensors: sealed::Marked {}

impl<T: sealed::Marked> RegionTensors for T {}

mod sealed {
    use burn::tensor::{Bool, Int, Tensor};

    use crate::region::{self, Pair};

    pub trait Marked: Sized {
        fn marked(self, pair: Pair) -> Self;

        /// How many float tensors there are, and how many others.
        fn count(&self) -> [usize; 2];
    }

    fn sum(a: [usize; 2], b: [usize; 2]) -> [usize; 2] {
        [a[0] + b[0], a[1] + b[1]]
    }

    impl<const D: usize> Marked for Tensor<D> {
        fn marked(self, pair: Pair) -> Self {
            region::marked(self, pair)
        }

        fn count(&self) -> [usize; 2] {
            [1, 0]
        }
    }

    impl<const D: usize> Marked for Tensor<D, Int> {
        fn marked(self, _: Pair) -> Self {
            self
        }

        fn count(&self) -> [usize; 2] {
            [0, 1]
        }
    }

    impl<const D: usize> Marked for Tensor<D, Bool> {
        fn marked(self, _: Pair) -> Self {
            self
        }

        fn count(&self) -> [usize; 2] {
            [0, 1]
        }
    }

    impl<T: Marked, const N: usize> Marked for [T; N] {
        fn marked(self, pair: Pair) -> Self {
            self.map(|tensor| tensor.marked(pair))
        }

        fn count(&self) -> [usize; 2] {
            self.iter().map(T::count).fold([0; 2], sum)
        }
    }

    impl<T: Marked> Marked for Vec<T> {
        fn marked(self, pair: Pair) -> Self {
            self.into_iter().map(|tensor| tensor.marked(pair)).collect()
        }

        fn count(&self) -> [usize; 2] {
            self.iter().map(T::count).fold([0; 2], sum)
        }
    }

    impl<T: Marked> Marked for Option<T> {
        fn marked(self, pair: Pair) -> Self {
            self.map(|tensor| tensor.marked(pair))
        }

        fn count(&self) -> [usize; 2] {
            self.iter().map(T::count).fold([0; 2], sum)
        }
    }

    macro_rules! tuples {
        ($(($($name:ident $place:tt),+))*) => {$(
            impl<$($name: Marked),+> Marked for ($($name,)+) {
                fn marked(self, pair: Pair) -> Self {
                    ($(self.$place.marked(pair),)+)
                }

                fn count(&self) -> [usize; 2] {
                    [$(self.$place.count()),+].into_iter().fold([0; 2], sum)
                }
            }
        )*};
    }

    tuples! { (A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, D 3) }
}

/// A tensor with marks for its device. Local devices that are not of this crate get no marks. A device behind
/// a server gets marks, which do nothing unless the server is of this crate.
fn marked<const D: usize>(tensor: Tensor<D>, pair: Pair) -> Tensor<D> {
    // In f64, the bounds would be ordinary numbers.
    if tensor.dtype() == DType::F64 {
        return tensor;
    }
    let device = tensor.device().without_autodiff();
    let in_half = match local::below(&device) {
        Some((_, in_force)) => in_force.precision != Precision::F32,
        None => local::is_remote(&device),
    };
    if !in_half {
        return tensor;
    }
    let DispatchTensor { kind, autodiff } = tensor.into_dispatch();
    let kind = match kind {
        DispatchTensorKind::Autodiff(kind) => {
            DispatchTensorKind::Autodiff(Box::new(on_backend(*kind, pair)))
        }
        kind => on_backend(kind, pair),
    };
    Tensor::from_dispatch(DispatchTensor { kind, autodiff })
}

fn on_backend(kind: DispatchTensorKind, pair: Pair) -> DispatchTensorKind {
    match kind {
        #[cfg(feature = "remote")]
        DispatchTensorKind::Remote(tensor) => {
            DispatchTensorKind::Remote(of_kind::<Remote>(tensor, pair))
        }
        #[cfg(feature = "burn-0-23")]
        DispatchTensorKind::Group(tensor) => {
            DispatchTensorKind::Group(of_kind::<Group>(tensor, pair))
        }
        other => other,
    }
}

fn of_kind<B: Backend>(tensor: BackendTensor<B>, pair: Pair) -> BackendTensor<B> {
    match tensor {
        BackendTensor::Float(tensor) => BackendTensor::Float(send::<B>(tensor, pair.0)),
        BackendTensor::Autodiff(tensor) => BackendTensor::Autodiff(tracked::<B>(tensor, pair)),
        other => other,
    }
}

/// The identity, with a mark for the gradient that returns.
fn tracked<B: Backend>(tensor: FloatTensor<Autodiff<B>>, pair: Pair) -> FloatTensor<Autodiff<B>> {
    #[derive(Debug)]
    struct Marking;

    impl<B: Backend> Backward<B, 1> for Marking {
        type State = Option<Mark>;

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let mark = ops.state;
            unary::<B, _>(ops.parents, ops.node, grads, |grad| send::<B>(grad, mark));
        }
    }

    let node = tensor.node();
    let primitive = send::<B>(tensor.into_primitive(), pair.0);
    let marking = Backward::<B, 1>::prepare::<NoCheckpointing>(Marking, [node]);
    match marking.compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(pair.1, primitive),
        OpsKind::UnTracked(prep) => prep.finish(primitive),
    }
}

fn send<B: Backend>(tensor: FloatTensor<B>, mark: Option<Mark>) -> FloatTensor<B> {
    let Some(mark) = mark else {
        return tensor;
    };
    let [lower, upper] = mark.bounds();
    B::float_clamp(tensor, lower, upper)
}
