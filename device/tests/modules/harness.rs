//! Runs a case on each device.

use std::any::type_name;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::prelude::*;
use burn::remote::RemoteHost;
use burn::server::{RemoteServer, WebSocketTransport};
use burn::tensor::Gradients;
use burn_amp::Precision;
use tokio::runtime::{Builder, Runtime};

use crate::cases::{Case, Comparison, FEEDS, Feed, Seen};
use crate::values::Rng;

/// The purpose of a run of a case.
pub trait Run {
    const NAME: &str;
    const TRAINS: bool;

    fn on(device: Device) -> Device;
}

pub struct Inference;
pub struct Training;
pub struct Checkpointed;

impl Run for Inference {
    const NAME: &str = "inference";
    const TRAINS: bool = false;

    fn on(device: Device) -> Device {
        device
    }
}

impl Run for Training {
    const NAME: &str = "training";
    const TRAINS: bool = true;

    fn on(device: Device) -> Device {
        device.autodiff()
    }
}

impl Run for Checkpointed {
    const NAME: &str = "gradient checkpointing";
    const TRAINS: bool = true;

    fn on(device: Device) -> Device {
        device.autodiff().gradient_checkpointing()
    }
}

/// Types and settings that differ between the releases of Burn that the cases run on: float tensors
/// of a backend and a rank, ints and booleans, and a module.
macro_rules! floats {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$rank>
    };
}
macro_rules! ints {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$rank, burn::tensor::Int>
    };
}
macro_rules! bools {
    ($backend:ident, $rank:tt) => {
        burn::tensor::Tensor<$rank, burn::tensor::Bool>
    };
}
macro_rules! of {
    ($backend:ident, $module:ident) => {
        $module
    };
}
macro_rules! with_two_offset_groups {
    ($config:expr) => {
        $config.with_offset_groups(2)
    };
}

/// Whether an attention drops probabilities, after the softmax: gradients that the softmax cancels stay zero.
pub const DROPOUT_AFTER_SOFTMAX: bool = true;

/// Cases with their own tolerances, and the reasons.
const TOLERANCES: &[(&str, [f64; 2])] = &[
    // With padding or dilation, Burn's autodiff on the client unfolds by a convolution with a one-hot
    // kernel, and a contraction runs in half: 0.75 roundoffs in the gradient of FP32 values.
    ("unfold4d_strided_padded_dilated", [1.0, 1.5]),
];

/// Cases that do not train in f16, and the reasons.
const NOT_TRAINED_IN_F16: &[&str] = &[
    // The autodiff of Burn 0.22 on the client sends attention as products and a softmax, and scales the
    // scores after the product: the server computes a product beyond 65504. In inference the server gets the
    // whole attention.
    #[cfg(feature = "burn-0-22")]
    "dot_product_attention_of_large_values",
];

/// The gradient of one leaf.
type Gradient = Box<dyn Fn(&Gradients) -> Option<Vec<f32>>>;

/// Makes the inputs of a case, equal on every device, and records the results.
pub struct Lab<B: Run> {
    pub device: Device,
    rng: Rng,
    modules: usize,
    feed: Feed,
    /// The scale of the loss, a power of two.
    scale: f32,
    seen: Vec<Seen>,
    loss: Option<Tensor<1>>,
    leaves: Vec<(String, Gradient)>,
    cancelling: Vec<&'static str>,
    unordered: Vec<&'static str>,
    seeded: Option<MutexGuard<'static, ()>>,
    run: PhantomData<B>,
}

impl<B: Run> Lab<B> {
    fn new(device: Device, feed: Feed, scale: f32) -> Self {
        Self {
            device: B::on(device),
            rng: Rng(7),
            modules: 0,
            feed,
            scale,
            seen: Vec::new(),
            loss: None,
            leaves: Vec::new(),
            cancelling: Vec::new(),
            unordered: Vec::new(),
            seeded: None,
            run: PhantomData,
        }
    }

    /// A differentiable input, standard normal.
    pub fn input<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.scaled_input(shape, 1.0)
    }

    /// A differentiable input, normal, with this standard deviation, a power of two.
    pub fn scaled_input<const D: usize>(&mut self, shape: [usize; D], std: f32) -> Tensor<D> {
        let values = self.values(shape, |rng| rng.normal_in_bf16() * std);
        self.feed(values)
    }

    /// A differentiable input within (0, 1), not close to either.
    pub fn probabilities<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        let values = self.values(shape, Rng::probability_in_bf16);
        self.feed(values)
    }

    /// The given tensor, after the layer that the input of this run comes from.
    pub fn feed<const D: usize>(&mut self, values: Tensor<D>) -> Tensor<D> {
        let leaf = values.set_require_grad(B::TRAINS);
        self.watch(format!("input {}", self.leaves.len()), leaf.clone());
        if self.feed == Feed::Leaf {
            return leaf;
        }
        let features = leaf.dims()[D - 1];
        burn::tensor::module::linear(leaf, Tensor::eye(features, &self.device), None)
    }

    /// FP32 data without a gradient, standard normal.
    pub fn constant<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.values(shape, Rng::normal_in_bf16)
    }

    /// FP32 data without a gradient, within (0, 1).
    pub fn constant_probabilities<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.values(shape, Rng::probability_in_bf16)
    }

    /// Integers from 0 to below `end`.
    pub fn integers<const D: usize>(&mut self, shape: [usize; D], end: usize) -> Tensor<D, Int> {
        let count = shape.iter().product();
        let values: Vec<i32> = (0..count)
            .map(|_| (self.rng.next() as usize % end) as i32)
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    /// Integers as given.
    pub fn ints<const N: usize>(&self, values: [i32; N]) -> Tensor<1, Int> {
        Tensor::from_data(values, &self.device)
    }

    /// Gives a module's parameters and buffers this lab's values and watches their gradients.
    pub fn module<M: Module>(&mut self, module: M) -> M {
        let name = format!("{}", self.modules);
        self.modules += 1;
        let module = module.map(&mut Fill::<B> {
            rng: &mut self.rng,
            device: self.device.clone(),
            path: Vec::new(),
            run: PhantomData,
        });
        module.visit(&mut Watch {
            lab: self,
            path: vec![name],
        });
        module
    }

    /// For modules that draw random numbers: the same ones in every run.
    pub fn seed(&mut self) {
        // Flex has one generator for the whole process.
        static DRAWING: Mutex<()> = Mutex::new(());
        self.seeded = Some(DRAWING.lock().unwrap_or_else(PoisonError::into_inner));
        self.device.seed(7);
    }

    /// The gradients of parameters whose path has this end are zero up to rounding, in any precision. They
    /// are compared with the largest gradient of the case.
    pub fn cancels(&mut self, end: &'static str) {
        self.cancelling.push(end);
    }

    /// The gradients of leaves whose name has this end are added up in no fixed order: in FP32 they are equal
    /// up to rounding.
    pub fn adds_in_any_order(&mut self, end: &'static str) {
        self.unordered.push(end);
    }

    /// An output: compared, and part of the loss, weighted at random.
    pub fn output<const D: usize>(&mut self, name: &str, output: Tensor<D>) {
        self.buffer(name, output.clone());
        let weights = self.values(output.dims(), Rng::weight);
        let loss = (output * weights).sum();
        self.loss = Some(match self.loss.take() {
            Some(others) => others + loss,
            None => loss,
        });
    }

    /// A value that is compared and not part of the loss.
    pub fn buffer<const D: usize>(&mut self, name: &str, value: Tensor<D>) {
        self.seen.push(Seen {
            name: name.to_string(),
            values: Some(floats(value)),
            is_gradient: false,
            cancels: false,
            unordered: false,
        });
    }

    fn values<const D: usize>(
        &mut self,
        shape: [usize; D],
        draw: impl Fn(&mut Rng) -> f32,
    ) -> Tensor<D> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| draw(&mut self.rng)).collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    fn watch<const D: usize>(&mut self, name: String, leaf: Tensor<D>) {
        let scale = self.scale;
        let read = move |gradients: &Gradients| {
            let scaled = floats(leaf.grad(gradients)?);
            Some(scaled.into_iter().map(|g| g / scale).collect())
        };
        self.leaves.push((name, Box::new(read)));
    }

    fn finish(mut self) -> Vec<Seen> {
        let loss = self.loss.take().expect("an output");
        if !B::TRAINS {
            return self.seen;
        }
        let gradients = loss.mul_scalar(self.scale).backward();
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

/// The values that the client reads: FP32, whatever precision the server computed in.
fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("FP32")
}

/// Fills parameters.
struct Fill<'a, B> {
    rng: &'a mut Rng,
    device: Device,
    path: Vec<String>,
    run: PhantomData<B>,
}

impl<B: Run> ModuleMapper for Fill<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A parameter that is not initialized yet stays uninitialized: its initializer would draw from the
        // backend's generator, which all tests share.
        let trained = !param.is_initialized() || param.is_require_grad();
        let shape = param.lazy_shape();
        let name = self.path.last().map(String::as_str);
        let values = self.rng.parameter(name, &shape);
        let tensor = Tensor::from_data(TensorData::new(values, shape), &self.device);
        Param::initialized(param.id, tensor.set_require_grad(trained && B::TRAINS))
    }
}

/// Watches the gradients of a module's parameters.
struct Watch<'a, B: Run> {
    lab: &'a mut Lab<B>,
    path: Vec<String>,
}

impl<B: Run> ModuleVisitor for Watch<'_, B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.lab.watch(self.path.join("."), param.val());
        }
    }
}

/// Flex behind Burn's own server, over the same transport.
fn plain() -> Device {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    });
    static PLAIN: Mutex<Option<Device>> = Mutex::new(None);

    let mut plain = PLAIN.lock().unwrap_or_else(PoisonError::into_inner);
    // An operation that panics on the server ends the session.
    if let Some(device) = plain.as_ref().filter(|device| device.sync().is_ok()) {
        return device.clone();
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = RemoteServer::new([Device::flex()]);
    RUNTIME.spawn(server.serve_async(WebSocketTransport::from_listener(listener)));
    let host = RemoteHost::websocket(&format!("ws://{address}"));
    let device = Device::remote_options(&host).init().unwrap();
    plain.insert(device).clone()
}

fn run<C: Case, B: Run>(device: Device, feed: Feed, scale: f32) -> Vec<Seen> {
    let mut lab = Lab::<B>::new(device, feed, scale);
    C::run(&mut lab);
    lab.finish()
}

/// A case on plain Burn, run once for all precisions.
fn run_plain<C: Case, B: Run>(feed: Feed) -> Arc<[Seen]> {
    type Runs = BTreeMap<(&'static str, Feed), Arc<OnceLock<Arc<[Seen]>>>>;
    static RUNS: Mutex<Runs> = Mutex::new(BTreeMap::new());

    let this = {
        let mut runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
        runs.entry((type_name::<(C, B)>(), feed))
            .or_default()
            .clone()
    };
    let of_plain = || run::<C, B>(plain(), feed, 1.0).into();
    this.get_or_init(of_plain).clone()
}

/// A case on plain Burn and under AMP, for each feed: in inference, and in training with and
/// without checkpointing.
pub fn comparisons<C: Case>(precision: Precision) -> Vec<Comparison> {
    let own = TOLERANCES.iter().find(|(name, _)| *name == C::NAME);
    let trains = precision != Precision::F16 || !NOT_TRAINED_IN_F16.contains(&C::NAME);
    let mut all = Vec::new();
    for (feed, tolerance) in FEEDS.into_iter().zip(own.map_or(C::ROUNDOFFS, |own| own.1)) {
        all.push(compared::<C, Inference>(feed, precision, tolerance));
        if trains {
            all.push(compared::<C, Training>(feed, precision, tolerance));
            all.push(compared::<C, Checkpointed>(feed, precision, tolerance));
        }
    }
    all
}

fn compared<C: Case, B: Run>(feed: Feed, precision: Precision, tolerance: f64) -> Comparison {
    // A scale without overflows, as training would find it.
    let scale = match precision {
        Precision::F16 => 128.0,
        _ => 1.0,
    };
    let amp = burn_amp::flex(precision).unwrap();
    Comparison {
        what: format!("{feed:?}, {}", B::NAME),
        burn: run_plain::<C, B>(feed),
        amp: run::<C, B>(amp, feed, scale),
        trains: B::TRAINS,
        tolerance,
    }
}

/// Checks that the input is rounded to the precision: otherwise every tolerance would hold.
#[test]
fn what_an_activation_feeds_is_in_the_precision() {
    let third = 1.0 / 3.0;
    for (precision, rounded) in [
        (Precision::F32, third),
        (Precision::F16, 0.333_251_95),
        (Precision::Bf16, 0.333_984_38),
    ] {
        let device = burn_amp::flex(precision).unwrap();
        let mut lab = Lab::<Inference>::new(device, Feed::Activation, 1.0);
        let values = Tensor::<1>::from_data([third; 2], &lab.device);
        assert_eq!(floats(lab.feed(values)), [rounded; 2]);
    }
}
