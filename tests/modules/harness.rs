//! How a case is run on each backend.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Amp, AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};

use crate::cases::{Case, Comparison, FEEDS, Feed, Seen};
use crate::common::{Inner, ON_LIBTORCH, possible};
use crate::values::Rng;

/// A backend that cases run on, for training or for inference.
pub trait Run: Backend {
    /// Those of a backward pass, where there is one.
    type Gradients;

    fn gradients(loss: Tensor<Self, 1>) -> Option<Self::Gradients>;

    /// Gives the gradient's dtype and data.
    fn gradient<const D: usize>(
        leaf: &Tensor<Self, D>,
        gradients: &Self::Gradients,
    ) -> Option<(DType, TensorData)>;
}

macro_rules! training {
    ($($backend:ty),*) => {$(
        impl Run for $backend {
            type Gradients = <$backend as AutodiffBackend>::Gradients;

            fn gradients(loss: Tensor<Self, 1>) -> Option<Self::Gradients> {
                Some(loss.backward())
            }

            fn gradient<const D: usize>(
                leaf: &Tensor<Self, D>,
                gradients: &Self::Gradients,
            ) -> Option<(DType, TensorData)> {
                let gradient = leaf.grad(gradients)?;
                Some((gradient.dtype(), gradient.into_data()))
            }
        }
    )*};
}

macro_rules! inference {
    ($($backend:ty),*) => {$(
        impl Run for $backend {
            type Gradients = ();

            fn gradients(_loss: Tensor<Self, 1>) -> Option<()> {
                None
            }

            fn gradient<const D: usize>(
                _leaf: &Tensor<Self, D>,
                _gradients: &(),
            ) -> Option<(DType, TensorData)> {
                None
            }
        }
    )*};
}

type Plain<C> = Autodiff<Inner, C>;

training!(Plain<NoCheckpointing>, AmpAutodiff<Inner, NoCheckpointing>);
training!(Plain<BalancedCheckpointing>, AmpAutodiff<Inner, BalancedCheckpointing>);
inference!(Inner, Amp<Inner>);

/// The backend of the values that half is compared with. On CubeCL's backends it is another one: with fusion
/// and autotune, Burn 0.21's own FP32 can be wrong (`docs/upstream`).
#[cfg(any(feature = "cuda", feature = "wgpu"))]
type Reference = burn::backend::Flex;
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
type Reference = Inner;

#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod reference {
    use super::*;

    training!(Autodiff<Reference, NoCheckpointing>, Autodiff<Reference, BalancedCheckpointing>);
    inference!(Reference);
}

/// Types and settings that differ between the releases of Burn that the cases run on: float tensors
/// of a backend and a rank, ints and booleans, and a module.
macro_rules! floats {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$backend, $rank>
    };
}
macro_rules! ints {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$backend, $rank, burn::tensor::Int>
    };
}
macro_rules! bools {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$backend, $rank, burn::tensor::Bool>
    };
}
macro_rules! of {
    ($backend:ident, $module:ident) => {
        $module<$backend>
    };
}

/// Burn takes as many offset groups as weight groups.
macro_rules! with_two_offset_groups {
    ($config:expr) => {
        $config
    };
}

/// Whether an attention drops probabilities. It drops scores, which the softmax does not cancel.
pub const DROPOUT_AFTER_SOFTMAX: bool = false;

/// The gradient of one leaf.
type Gradient<B> = Box<dyn Fn(&<B as Run>::Gradients) -> Option<Vec<f32>>>;

/// Makes the inputs of a case, equal on every backend, and records its results.
pub struct Lab<B: Run> {
    pub device: B::Device,
    rng: Rng,
    modules: usize,
    feed: Feed,
    activation: DType,
    seen: Vec<Seen>,
    loss: Option<Tensor<B, 1>>,
    leaves: Vec<(String, Gradient<B>)>,
    cancelling: Vec<&'static str>,
    unordered: Vec<&'static str>,
    seeded: Option<MutexGuard<'static, ()>>,
}

impl<B: Run> Lab<B> {
    fn new(feed: Feed, activation: DType) -> Self {
        Self {
            device: Default::default(),
            rng: Rng(7),
            modules: 0,
            feed,
            activation,
            seen: Vec::new(),
            loss: None,
            leaves: Vec::new(),
            cancelling: Vec::new(),
            unordered: Vec::new(),
            seeded: None,
        }
    }

    /// A differentiable input, standard normal.
    pub fn input<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        self.scaled_input(shape, 1.0)
    }

    /// A differentiable input, normal, with this standard deviation, a power of two.
    pub fn scaled_input<const D: usize>(&mut self, shape: [usize; D], std: f32) -> Tensor<B, D> {
        let values = self.values(shape, |rng| rng.normal_in_bf16() * std);
        self.feed(values)
    }

    /// A differentiable input within (0, 1), not close to either.
    pub fn probabilities<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        let values = self.values(shape, Rng::probability_in_bf16);
        self.feed(values)
    }

    /// The given values, after the layer that the input of this run comes from.
    pub fn feed<const D: usize>(&mut self, values: Tensor<B, D>) -> Tensor<B, D> {
        let leaf = values.require_grad();
        self.watch(format!("input {}", self.leaves.len()), leaf.clone());
        if self.feed == Feed::Leaf {
            return leaf;
        }
        let features = leaf.dims()[D - 1];
        let activation =
            burn::tensor::module::linear(leaf, Tensor::eye(features, &self.device), None);
        assert_eq!(activation.dtype(), self.activation);
        activation
    }

    /// FP32 data without a gradient, standard normal.
    pub fn constant<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        self.values(shape, Rng::normal_in_bf16)
    }

    /// FP32 data without a gradient, within (0, 1).
    pub fn constant_probabilities<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<B, D> {
        self.values(shape, Rng::probability_in_bf16)
    }

    /// Integers from 0 to below `end`.
    pub fn integers<const D: usize>(&mut self, shape: [usize; D], end: usize) -> Tensor<B, D, Int> {
        let count = shape.iter().product();
        let values: Vec<i32> = (0..count)
            .map(|_| (self.rng.next() as usize % end) as i32)
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    /// Integers as given.
    pub fn ints<const N: usize>(&self, values: [i32; N]) -> Tensor<B, 1, Int> {
        Tensor::from_data(values, &self.device)
    }

    /// Gives a module's parameters and buffers this lab's values and watches their gradients.
    pub fn module<M: Module<B>>(&mut self, module: M) -> M {
        let name = format!("{}", self.modules);
        self.modules += 1;
        let module = module.map(&mut Fill {
            rng: &mut self.rng,
            device: self.device.clone(),
            path: Vec::new(),
        });
        module.visit(&mut Watch {
            lab: self,
            path: vec![name],
        });
        module
    }

    /// For modules that draw random numbers: the same ones in every run.
    pub fn seed(&mut self) {
        static DRAWING: Mutex<()> = Mutex::new(());
        self.seeded = Some(DRAWING.lock().unwrap_or_else(PoisonError::into_inner));
        B::seed(&self.device, 7);
    }

    /// Gradients of parameters whose path ends so are zero but for rounding, in any precision. They
    /// are measured against the largest gradient of the case.
    pub fn cancels(&mut self, end: &'static str) {
        self.cancelling.push(end);
    }

    /// Gradients of leaves whose name ends so are added up in no certain order: FP32's are equal
    /// but for rounding.
    pub fn adds_in_any_order(&mut self, end: &'static str) {
        self.unordered.push(end);
    }

    /// An output: compared, and part of the loss, weighted at random.
    pub fn output<const D: usize>(&mut self, name: &str, output: Tensor<B, D>) {
        self.buffer(name, output.clone());
        let weights = self.values(output.dims(), Rng::weight);
        let loss = (output * weights).sum();
        self.loss = Some(match self.loss.take() {
            Some(others) => others + loss,
            None => loss,
        });
    }

    /// A value that is compared and not part of the loss.
    pub fn buffer<const D: usize>(&mut self, name: &str, value: Tensor<B, D>) {
        self.seen.push(Seen {
            name: name.to_string(),
            values: Some(floats(value.into_data())),
            is_gradient: false,
            cancels: false,
            unordered: false,
        });
    }

    fn values<const D: usize>(
        &mut self,
        shape: [usize; D],
        draw: impl Fn(&mut Rng) -> f32,
    ) -> Tensor<B, D> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| draw(&mut self.rng)).collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    fn watch<const D: usize>(&mut self, name: String, leaf: Tensor<B, D>) {
        let read = move |gradients: &B::Gradients| {
            let (dtype, data) = B::gradient(&leaf, gradients)?;
            assert_eq!(dtype, DType::F32);
            Some(floats(data))
        };
        self.leaves.push((name, Box::new(read)));
    }

    fn finish(mut self) -> Vec<Seen> {
        let Some(gradients) = B::gradients(self.loss.take().expect("an output")) else {
            return self.seen;
        };
        for (name, gradient) in &self.leaves {
            self.seen.push(Seen {
                name: format!("gradient of {name}"),
                values: gradient(&gradients),
                is_gradient: true,
                cancels: self.cancelling.iter().any(|end| name.ends_with(end)),
                unordered: self.unordered.iter().any(|end| name.ends_with(end)),
            });
        }
        self.seen
    }
}

fn floats(data: TensorData) -> Vec<f32> {
    data.to_vec().expect("FP32")
}

/// Fills parameters.
struct Fill<'a, B: Backend> {
    rng: &'a mut Rng,
    device: B::Device,
    path: Vec<String>,
}

impl<B: Backend> ModuleMapper<B> for Fill<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        // A parameter that is not initialized yet stays so: its initializer would draw from the
        // backend's generator, which all tests share.
        let trained = !param.is_initialized() || param.is_require_grad();
        let shape = param.lazy_shape();
        let name = self.path.last().map(String::as_str);
        let values = self.rng.parameter(name, &shape);
        let tensor = Tensor::from_data(TensorData::new(values, shape), &self.device);
        Param::initialized(param.id, tensor.set_require_grad(trained))
    }
}

/// Watches the gradients of a module's parameters.
struct Watch<'a, B: Run> {
    lab: &'a mut Lab<B>,
    path: Vec<String>,
}

impl<B: Run> ModuleVisitor<B> for Watch<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if param.is_require_grad() {
            self.lab.watch(self.path.join("."), param.val());
        }
    }
}

/// A case on one backend in the precision that is in force.
fn run<C: Case, B: Run>(feed: Feed, activation: DType) -> Vec<Seen> {
    let mut lab = Lab::<B>::new(feed, activation);
    C::run(&mut lab);
    lab.finish()
}

/// One rounding to half: with a smaller tolerance on FP32 inputs, a case demotes nothing.
const ROUNDED: f64 = 0.5;

/// A case on plain Burn in FP32: on the reference, `R`, if AMP demotes some of its operations and it draws no
/// random numbers; otherwise on the backend under test, `B`. Two backends may have other formulas: on Vulkan, the
/// gradient of Burn's own GELU is a roundoff of f16 from Flex's.
fn run_plain<C: Case, B: Run, R: Run>(feed: Feed, precision: Precision) -> Arc<[Seen]> {
    let [on_fp32, _] = C::ROUNDOFFS;
    if precision != Precision::F32 && on_fp32 >= ROUNDED {
        let mut lab = Lab::<R>::new(feed, DType::F32);
        C::run(&mut lab);
        if lab.seeded.is_none() {
            return lab.finish().into();
        }
    }
    run::<C, B>(feed, DType::F32).into()
}

/// Cases on which plain Burn panics with LibTorch too: these always, and PReLU in inference, where Burn
/// passes slopes of more than one dimension to LibTorch's own function.
const NOT_ON_LIBTORCH: [&str; 3] = [
    "deform_conv2d",
    "deform_conv2d_masked_strided_padded_grouped",
    "interpolate_lanczos",
];
const ONLY_TRAINED_ON_LIBTORCH: [&str; 3] = ["activation_wrapper", "prelu", "prelu_of_many_slopes"];
/// Cases of which plain Burn recomputes a wrong gradient with LibTorch: an operation behind `permute` changes the
/// input in place (burn#5375).
const KEPT_ON_LIBTORCH: [&str; 3] = [
    "local_response_norm",
    "local_response_norm_of_even_size",
    "local_response_norm_of_large_values",
];

/// A case on plain Burn and under AMP, for each feed: in inference, and in training under each
/// strategy.
///
/// None where the backend does not support the precision, which is an error that `device.rs` tests, or
/// does not support the case.
pub fn comparisons<C: Case>(precision: Precision) -> Vec<Comparison> {
    let mut all = Vec::new();
    if possible([precision]).is_empty() || ON_LIBTORCH && NOT_ON_LIBTORCH.contains(&C::NAME) {
        return all;
    }
    let infers = !ON_LIBTORCH || !ONLY_TRAINED_ON_LIBTORCH.contains(&C::NAME);
    for (feed, tolerance) in FEEDS.into_iter().zip(C::ROUNDOFFS) {
        if infers {
            all.push(Comparison {
                what: format!("{feed:?}, inference"),
                burn: run_plain::<C, Inner, Reference>(feed, precision),
                amp: run_amp::<C, Amp<Inner>>(feed, precision),
                trains: false,
                tolerance,
            });
        }
        let kept = || {
            run_plain::<C, Autodiff<Inner, NoCheckpointing>, Autodiff<Reference, NoCheckpointing>>(
                feed, precision,
            )
        };
        all.push(Comparison {
            what: format!("{feed:?}"),
            burn: kept(),
            amp: run_amp::<C, AmpAutodiff<Inner, NoCheckpointing>>(feed, precision),
            trains: true,
            tolerance,
        });
        all.push(Comparison {
            what: format!("{feed:?}, balanced checkpointing"),
            burn: if ON_LIBTORCH && KEPT_ON_LIBTORCH.contains(&C::NAME) {
                kept()
            } else {
                run_plain::<
                    C,
                    Autodiff<Inner, BalancedCheckpointing>,
                    Autodiff<Reference, BalancedCheckpointing>,
                >(feed, precision)
            },
            amp: run_amp::<C, AmpAutodiff<Inner, BalancedCheckpointing>>(feed, precision),
            trains: true,
            tolerance,
        });
    }
    all
}

fn run_amp<C: Case, B: Run>(feed: Feed, precision: Precision) -> Vec<Seen> {
    let activation = precision.compute_dtype().unwrap_or(DType::F32);
    // Training would find a scale that overflows nothing; this is one.
    let scaler = GradScaler::new(LossScaleConfig::Fixed(128.0)).expect("a valid scale");
    scaler.scope(|| with_precision(precision, || run::<C, B>(feed, activation)))
}
