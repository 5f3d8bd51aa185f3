//! Tests of the proof on small models, and the figures of `docs/own_tape.md`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};

use burn_backend::FloatDType;
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_dispatch::backends::autodiff::checkpoint::base::Checkpointer;
use burn_dispatch::backends::autodiff::checkpoint::strategy::NoCheckpointing;
use burn_dispatch::backends::autodiff::grads::Gradients;
use burn_dispatch::backends::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_dispatch::backends::{Autodiff, Flex};
use burn_dispatch::devices::FlexDevice;

use super::{loss, on_tape};
use crate::Precision;
use crate::device::{Bf16, F16};
use crate::local::flex;
use crate::region::full_precision;

/// The system's allocator, with the bytes of each thread counted: other threads of this process run at the
/// same time.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// Safety: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Layers of one width with ReLU, as in the example `memory`, with other parts where a test has them.
#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
    norm: Option<BatchNorm>,
    dropout: Option<Dropout>,
    head: Linear,
}

#[derive(Debug, Clone)]
struct Batch {
    rows: Tensor<2>,
    targets: Tensor<1, Int>,
}

const CLASSES: usize = 10;

/// One test at a time: a device has one random generator for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mlp {
    fn new(width: usize, layers: usize, device: &Device) -> Self {
        device.seed(1);
        let layer = |_| LinearConfig::new(width, width).init(device);
        Self {
            layers: (0..layers).map(layer).collect(),
            norm: None,
            dropout: None,
            head: LinearConfig::new(width, CLASSES).init(device),
        }
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        loss_of(self.forward(batch.rows), batch.targets)
    }

    fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        let layers = self.layers.iter();
        let x = layers.fold(rows, |x, layer| {
            let x = relu(layer.forward(x));
            let x = match &self.norm {
                Some(norm) => norm.forward(x),
                None => x,
            };
            match &self.dropout {
                Some(dropout) => dropout.forward(x),
                None => x,
            }
        });
        self.head.forward(x)
    }
}

fn loss_of(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, targets)
}

impl Batch {
    fn new(rows: usize, width: usize, device: &Device) -> Self {
        device.seed(2);
        let classes = (0..rows).map(|row| (row % CLASSES) as i64);
        Self {
            rows: Tensor::random([rows, width], Distribution::Normal(0.0, 1.0), device),
            targets: Tensor::from_data(TensorData::from(&*classes.collect::<Vec<_>>()), device),
        }
    }
}

/// How a loss gets its gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// By Burn, in FP32.
    Burn,
    /// By today's device, with autodiff in the client.
    Client,
    /// By the device's own tape.
    Own,
}

impl Way {
    const ALL: [Self; 3] = [Self::Burn, Self::Client, Self::Own];

    fn device(self) -> Device {
        match self {
            Self::Burn => Device::flex(),
            Self::Client => flex(Precision::Bf16).unwrap(),
            Self::Own => on_tape::<Bf16>(),
        }
        .autodiff()
    }

    fn loss(self, model: &Mlp, batch: Batch) -> Tensor<1> {
        match self {
            Self::Own => loss(model, None, |model| model.loss(batch)),
            _ => model.loss(batch),
        }
    }
}

/// The values of the parameters, or of their gradients.
struct Values<'a> {
    of: Option<&'a GradientsParams>,
    values: Vec<Option<Vec<f32>>>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = match self.of {
            Some(grads) => grads.get::<D>(param.id),
            None => Some(param.val().inner()),
        };
        let values = tensor.map(|tensor| tensor.into_data().iter::<f32>().collect());
        self.values.push(values);
    }
}

fn parameters(model: &impl Module) -> Vec<Option<Vec<f32>>> {
    values(model, None)
}

fn values(model: &impl Module, of: Option<&GradientsParams>) -> Vec<Option<Vec<f32>>> {
    let mut values = Values {
        of,
        values: Vec::new(),
    };
    model.visit(&mut values);
    values.values
}

/// The parameters of another model, in the order of modules.
struct Loaded(std::vec::IntoIter<Option<Vec<f32>>>);

impl ModuleMapper for Loaded {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.0.next().flatten().expect("a model like this one");
        param.map(|tensor| {
            let wanted = tensor.is_require_grad();
            let data = TensorData::new(values, tensor.shape());
            Tensor::from_data(data, &tensor.device()).set_require_grad(wanted)
        })
    }
}

/// A model and a batch on a device, equal on all devices.
fn on(device: &Device, like: &Mlp, rows: usize, width: usize) -> (Mlp, Batch) {
    let loaded = &mut Loaded(parameters(like).into_iter());
    let (mut model, plain) = (Mlp::new(width, like.layers.len(), device), Device::flex());
    model.norm = like
        .norm
        .as_ref()
        .map(|_| BatchNormConfig::new(width).init(device));
    model.dropout.clone_from(&like.dropout);
    let Batch { rows, targets } = Batch::new(rows, width, &plain);
    let moved = Batch {
        rows: Tensor::from_data(rows.into_data(), device),
        targets: Tensor::from_data(targets.into_data(), device),
    };
    (model.map(loaded), moved)
}

/// The gradients of all parameters, by each way.
fn gradients(like: &Mlp, rows: usize, width: usize) -> [Vec<Option<Vec<f32>>>; 3] {
    Way::ALL.map(|way| {
        let (model, batch) = on(&way.device(), like, rows, width);
        let grads = GradientsParams::from_grads(way.loss(&model, batch.clone()).backward(), &model);
        values(&model, Some(&grads))
    })
}

/// The norm of the difference divided by the norm, over all values.
fn relative_error(of: &[Option<Vec<f32>>], exact: &[Option<Vec<f32>>]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    assert_eq!(of.len(), exact.len());
    for (of, exact) in of.iter().zip(exact) {
        let (of, exact) = (of.as_ref().unwrap(), exact.as_ref().unwrap());
        assert_eq!(of.len(), exact.len());
        for (of, exact) in of.iter().zip(exact) {
            difference += f64::from(of - exact).powi(2);
            norm += f64::from(*exact).powi(2);
        }
    }
    (difference / norm).sqrt()
}

/// A rounding to bf16.
const BF16: f64 = 1.0 / 256.0;

#[test]
fn gradients_are_those_of_fp32_within_the_roundings_of_bf16() {
    let _alone = alone();
    let like = Mlp::new(32, 3, &Device::flex().autodiff());
    let [burn, client, own] = gradients(&like, 64, 32);
    let [of_client, of_own] = [&client, &own].map(|of| relative_error(of, &burn));
    println!("relative error: client {of_client:.2e}, own {of_own:.2e}");
    // Each of four layers rounds operands and results, forward and backward.
    assert!(of_own > 0.0 && of_own < 16.0 * BF16, "{of_own}");
    assert!(of_own < 1.5 * of_client, "{of_own} {of_client}");
}

/// The bytes that a step keeps for its backward pass, and its peak, without parameters and batch.
fn held(way: Way, like: &Mlp, rows: usize, width: usize) -> [isize; 2] {
    let (model, batch) = on(&way.device(), like, rows, width);
    drop(way.loss(&model, batch.clone()).backward());
    let before = LIVE.get();
    PEAK.set(before);
    let mut kept = 0;
    let computed = |model: &Mlp| {
        let loss = model.loss(batch);
        kept = LIVE.get() - before;
        loss
    };
    let loss = match way {
        Way::Own => loss(&model, None, |model| computed(&model)),
        _ => computed(&model),
    };
    let grads = loss.backward();
    let peak = PEAK.get() - before;
    drop(grads);
    [kept, peak]
}

#[test]
fn a_step_keeps_one_half_tensor_a_layer() {
    let _alone = alone();
    let (rows, width, layers) = (1024, 128, 4);
    let like = Mlp::new(width, layers, &Device::flex().autodiff());
    let all = Way::ALL.map(|way| held(way, &like, rows, width));
    println!("bytes kept and at the peak, Burn, client, own: {all:?}");
    let [burn, client, own] = all.map(|[kept, _]| kept);
    // Each layer's result and weight in half, and the batch in half where it was in FP32; a few
    // tensors of the loss in FP32.
    let half = |elements: usize| 2 * elements as isize;
    let least = (layers as isize) * half(rows * width + width * width) - half(rows * width);
    let of_loss = 4 * 2 * half(rows * CLASSES);
    assert!(
        least <= own && own < least + of_loss + 65_536,
        "{own} {least}"
    );
    assert!(2 * own < client && 4 * own < burn, "{own} {client} {burn}");
}

#[test]
fn an_overflow_leaves_no_gradient_and_the_step_is_skipped_exactly() {
    let _alone = alone();
    let device = on_tape::<F16>().autodiff();
    let like = Mlp::new(32, 2, &Device::flex().autodiff());
    let (mut model, batch) = on(&device, &like, 64, 32);
    let mut optimizer = AdamConfig::new().init();
    let mut step = |model: Mlp, scale| {
        let loss = loss(&model, Some(scale), |model| model.loss(batch.clone()));
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let count = grads.len();
        (optimizer.step(1e-2, model, grads), count)
    };
    let before = parameters(&model);
    let (stepped, count) = step(model, 1e30);
    assert_eq!(count, 0);
    assert_eq!(parameters(&stepped), before);
    // Adam's first step moves each parameter by the rate, so the skipped step left Adam's state unchanged.
    let (stepped, count) = step(stepped, 1024.0);
    assert_eq!(count, before.len());
    let after = parameters(&stepped);
    let moved = before
        .iter()
        .flatten()
        .flatten()
        .zip(after.iter().flatten().flatten());
    let largest = moved.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!((largest - 1e-2).abs() < 1e-4, "{largest}");
    model = stepped;
    drop(model);
}

/// Burn's autodiff keeps a node of each operation until a backward pass. A device with a tape adds a node to
/// all of its operations: a full version has to pass untracked tensors below the tape.
#[test]
fn operations_without_a_backward_pass_leave_their_nodes() {
    let _alone = alone();
    let today = left(&flex(Precision::Bf16).unwrap());
    let [burn, own] = [Way::Burn.device(), on_tape::<Bf16>()].map(|device| left(&device));
    println!(
        "bytes an operation leaves: Burn's autodiff {burn}, today's device {today}, own {own}"
    );
    assert_eq!(today, 0);
    assert!(own > 0, "Burn has it no more: the full version is simpler");
}

#[test]
fn training_follows_fp32() {
    let _alone = alone();
    let like = Mlp::new(32, 2, &Device::flex().autodiff());
    let [burn, _, own] = Way::ALL.map(|way| {
        let (mut model, batch) = on(&way.device(), &like, 64, 32);
        let mut optimizer = SgdConfig::new().init();
        let losses = (0..20).map(|_| {
            let loss = way.loss(&model, batch.clone());
            let value: f32 = loss.clone().into_scalar();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.5, model.clone(), grads);
            value
        });
        losses.collect::<Vec<_>>()
    });
    println!("losses: Burn {burn:?}, own {own:?}");
    assert!(own[19] < 0.8 * own[0]);
    for (burn, own) in burn.iter().zip(&own) {
        assert!(
            (burn - own).abs() < 4.0 * BF16 as f32 * burn,
            "{burn} {own}"
        );
    }
}

#[test]
fn several_losses_factors_and_tensors_from_outside_have_their_gradients() {
    let _alone = alone();
    let like = Mlp::new(32, 2, &Device::flex().autodiff());
    let [burn, client, own] = Way::ALL.map(|way| {
        let (model, batch) = on(&way.device(), &like, 64, 32);
        let outside = Tensor::<1>::ones([1], &model.head.weight.device()).require_grad();
        let losses = match way {
            Way::Own => {
                let first = loss(&model, None, |model| {
                    model.loss(batch.clone()) * outside.clone()
                });
                let second = loss(&model, None, |model| {
                    model.loss(batch.clone()).powi_scalar(2)
                });
                first * 0.5 + second + model.head.weight.val().powi_scalar(2).sum()
            }
            _ => {
                let loss = model.loss(batch.clone());
                let first = loss.clone() * outside.clone();
                first * 0.5 + loss.powi_scalar(2) + model.head.weight.val().powi_scalar(2).sum()
            }
        };
        let grads = losses.backward();
        let of_outside: f32 = outside.grad(&grads).unwrap().into_scalar();
        let grads = GradientsParams::from_grads(grads, &model);
        (of_outside, values(&model, Some(&grads)))
    });
    assert!(
        (own.0 - burn.0).abs() < BF16 as f32 * burn.0,
        "{} {}",
        own.0,
        burn.0
    );
    let [of_client, of_own] = [&client.1, &own.1].map(|of| relative_error(of, &burn.1));
    assert!(
        of_own < 16.0 * BF16 && of_own < 1.5 * of_client,
        "{of_own} {of_client}"
    );
}

#[test]
fn shared_and_frozen_parameters_dropout_and_batch_norm_are_as_on_todays_device() {
    let _alone = alone();
    let like = Mlp {
        norm: Some(BatchNormConfig::new(32).init(&Device::flex().autodiff())),
        dropout: Some(DropoutConfig::new(0.5).init()),
        ..Mlp::new(32, 2, &Device::flex().autodiff())
    };
    let [_, client, own] = Way::ALL.map(|way| {
        let device = way.device();
        let (mut model, batch) = on(&device, &like, 64, 32);
        model.layers.push(model.layers[0].clone());
        let weight = model.layers[1].weight.clone();
        model.layers[1].weight = weight.set_require_grad(false);
        device.seed(3);
        let grads = way.loss(&model, batch.clone()).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        let mut all = values(&model, Some(&grads));
        assert!(all.iter().filter(|values| values.is_none()).count() >= 1);
        all.retain(Option::is_some);
        let running = model.norm.as_ref().unwrap().running_mean.value_sync();
        let running: Vec<f32> = running.into_data().iter().collect();
        (all, running)
    });
    let error = relative_error(&own.0, &client.0);
    println!("own against the client's, dropout and batch norm: {error:.2e}");
    assert!(error < 8.0 * BF16, "{error}");
    assert!(own.1.iter().any(|mean| *mean != 0.0));
    let running = relative_error(&[Some(own.1)], &[Some(client.1)]);
    assert!(running < 2.0 * BF16, "{running}");
}

#[test]
fn a_region_in_fp32_is_exact_in_both_passes() {
    let _alone = alone();
    let like = Mlp::new(32, 2, &Device::flex().autodiff());
    let [burn, rounded] = [Way::Burn, Way::Own].map(|way| {
        let (model, batch) = on(&way.device(), &like, 64, 32);
        let region = |model: Mlp| {
            full_precision(batch.rows.clone(), |rows| {
                loss_of(model.forward(rows), batch.targets.clone())
            })
        };
        let loss = match way {
            Way::Own => loss(&model, None, region),
            _ => region(model.clone()),
        };
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        values(&model, Some(&grads))
    });
    let error = relative_error(&rounded, &burn);
    assert!(error < 1e-6, "{error}");
}

#[cfg(feature = "train")]
mod learner {
    use burn::train::{ClassificationOutput, ItemLazy, TrainOutput, TrainStep};

    use super::*;
    use crate::own_tape::off_tape;

    impl TrainStep for Mlp {
        type Input = Batch;
        type Output = ClassificationOutput;

        fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
            let mut output = None;
            let loss = loss(self, None, |model| {
                let logits = model.forward(batch.rows);
                output = Some(off_tape(logits.clone()));
                loss_of(logits, batch.targets.clone())
            });
            let output = output.expect("a closure that ran");
            let grads = loss.backward();
            TrainOutput::new(
                self,
                grads,
                ClassificationOutput::new(loss, output, batch.targets),
            )
        }
    }

    #[test]
    fn a_train_step_gives_a_learner_its_gradients_and_its_item() {
        let _alone = alone();
        let like = Mlp::new(32, 2, &Device::flex().autodiff());
        let [_, client, own] = gradients(&like, 64, 32);
        let (model, batch) = on(&on_tape::<Bf16>().autodiff(), &like, 64, 32);
        let TrainOutput { grads, item } = model.step(batch.clone());
        assert_eq!(values(&model, Some(&grads)), own);
        assert!(relative_error(&own, &client) < 2.0 * BF16);
        let item = item.sync().unwrap();
        assert_eq!(item.output.dims(), [64, CLASSES]);
        // Metrics compute on the logits in bf16.
        let [again, loss] = [loss_of(item.output, batch.targets), item.loss]
            .map(|loss| f64::from(loss.into_scalar::<f32>()));
        assert!((again - loss).abs() < BF16 * loss, "{again} for {loss}");
        let before = parameters(&model);
        let stepped = model.optimize(&mut SgdConfig::new().init(), 0.5.into(), grads);
        assert_ne!(parameters(&stepped), before);
    }
}

/// A step of a client's backward pass that itself records holds the lock of its graph and waits for the
/// registry of graphs. A thread that merges this graph with another graph holds the registry and waits for
/// the graph. This is why the device's pass runs before the client's pass, and not within a step of that
/// pass.
#[test]
#[ignore = "ends in a deadlock of Burn's autodiff, which this shows"]
fn a_pass_within_a_step_and_a_thread_with_the_same_parameter_wait_for_each_other() {
    type Recorded = Autodiff<Flex>;

    #[derive(Debug)]
    struct Records;

    impl Backward<Flex, 1> for Records {
        type State = Sender<()>;

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            unary::<Flex, _>(ops.parents, ops.node, grads, |grad| {
                ops.state.send(()).expect("a thread that waits");
                thread::sleep(Duration::from_secs(1));
                drop(leaf());
                grad
            });
        }
    }

    fn leaf() -> FloatTensor<Recorded> {
        let one = Flex::float_ones([1].into(), &FlexDevice, FloatDType::F32);
        Recorded::float_set_require_grad(Recorded::from_inner(one), true)
    }

    let (begun, begins) = channel();
    let (ended, ends) = channel();
    let parameter = leaf();
    let (of_pass, value) = (parameter.clone(), parameter.primitive().clone());
    let pass_ended = ended.clone();
    thread::spawn(move || {
        let step = Backward::<Flex, 1>::prepare::<NoCheckpointing>(Records, [of_pass.node()]);
        let OpsKind::Tracked(step) = step.compute_bound().stateful() else {
            unreachable!("a leaf is tracked");
        };
        drop(Recorded::backward(step.finish(begun, value)));
        pass_ended.send(()).expect("a test that waits");
    });
    begins.recv().expect("a pass that begins");
    thread::spawn(move || {
        drop(Recorded::float_mul(parameter, leaf()));
        ended.send(()).expect("a test that waits");
    });
    let found = ends.recv_timeout(Duration::from_secs(10));
    assert_eq!(
        found,
        Err(RecvTimeoutError::Timeout),
        "no deadlock any more"
    );
}

/// `cargo test --release --lib --no-default-features --features burn-0-23,flex figures -- --ignored
/// --nocapture`: the MLP of the example `memory`.
#[test]
#[ignore = "a measurement, in release"]
fn figures() {
    let (rows, width, layers) = (4096, 512, 6);
    let like = Mlp::new(width, layers, &Device::flex().autodiff());
    let mib = |bytes: isize| bytes as f64 / f64::from(1 << 20);
    let all = Way::ALL.map(|way| held(way, &like, rows, width));
    for (way, [kept, peak]) in Way::ALL.into_iter().zip(all) {
        let [of_kept, of_peak] = [
            kept as f64 / all[0][0] as f64,
            peak as f64 / all[0][1] as f64,
        ];
        println!(
            "{way:?}: kept {:.1} MiB, {of_kept:.3}; peak {:.1} MiB, {of_peak:.3}",
            mib(kept),
            mib(peak),
        );
    }
    let [burn, client, own] = gradients(&like, rows, width);
    println!(
        "relative error to FP32: client {:.2e}, own {:.2e}; own to client {:.2e}",
        relative_error(&client, &burn),
        relative_error(&own, &burn),
        relative_error(&own, &client),
    );
    for (rows, width, layers, steps) in [(4096, 512, 6, 5), (8, 16, 6, 300)] {
        paired(rows, width, layers, steps);
    }
}

/// The bytes that an untracked operation without a backward pass leaves.
fn left(device: &Device) -> isize {
    let count = 1000;
    let mut x = Tensor::<1>::ones([4], device);
    x = x + 1.0;
    let before = LIVE.get();
    for _ in 0..count {
        x = x + 1.0;
    }
    (LIVE.get() - before) / count
}

/// Prints the milliseconds of a step with SGD, with the ways in turn.
fn paired(rows: usize, width: usize, layers: usize, steps: usize) {
    let like = Mlp::new(width, layers, &Device::flex().autodiff());
    let mut runs = Way::ALL.map(|way| {
        let (model, batch) = on(&way.device(), &like, rows, width);
        (way, model, batch, Vec::<Duration>::new())
    });
    for step in 0..=steps {
        for (way, model, batch, times) in &mut runs {
            let begin = Instant::now();
            let grads = way.loss(model, batch.clone()).backward();
            let grads = GradientsParams::from_grads(grads, &*model);
            *model = SgdConfig::new().init().step(1e-3, model.clone(), grads);
            if step > 0 {
                times.push(begin.elapsed());
            }
        }
    }
    for (way, .., times) in &mut runs {
        times.sort();
        let median = times[times.len() / 2].as_secs_f64() * 1e3;
        println!(
            "{way:?}: {rows} rows, {layers} layers of {width}: {median:.3} ms a step, median of {steps}"
        );
    }
}
