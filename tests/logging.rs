//! The lines of the log. One test, in a process of its own: there is one logger for all.

mod common;

use std::sync::Mutex;

use burn::backend::{Autodiff, Flex, NdArray};
use burn::lr_scheduler::LrScheduler;
use burn::nn::LinearConfig;
use burn::nn::loss::{BinaryCrossEntropyLossConfig, CrossEntropyLossConfig};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::activation::sigmoid;
use burn::tensor::{DType, FloatDType};
use burn_amp::policy::OpPrecision;
use burn_amp::{
    Amp, AmpAutodiff, AmpConfig, DynamicLossScale, GradScaler, LossScaleConfig, Precision,
    exceptions, full_precision, with_precision,
};
use log::kv::{self, Key, Value, VisitSource};
use log::{Level, Log, Metadata, Record};

use common::activation;

type B = AmpAutodiff<Flex>;

struct Kept;

static LINES: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());
/// The fields of the errors.
static FIELDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The logger reads its scale at each line.
static READ: Mutex<Option<GradScaler>> = Mutex::new(None);

/// The fields of a line as text.
#[derive(Default)]
struct Fields(String);

impl<'kvs> VisitSource<'kvs> for Fields {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), kv::Error> {
        self.0 += &format!("{key}={value:?} ");
        Ok(())
    }
}

impl Log for Kept {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        READ.lock().unwrap().as_ref().map(GradScaler::loss_scale);
        exceptions::<B>(&Default::default()).kept_in();
        let line = record.args().to_string();
        if line.starts_with("burn-amp: ") {
            LINES.lock().unwrap().push((record.level(), line));
            if record.level() == Level::Error {
                let mut fields = Fields::default();
                record.key_values().visit(&mut fields).unwrap();
                FIELDS.lock().unwrap().push(fields.0);
            }
        }
    }

    fn flush(&self) {}
}

/// The lines logged since the last call.
fn lines() -> Vec<(Level, String)> {
    std::mem::take(&mut *LINES.lock().unwrap())
}

fn train<B: burn::tensor::backend::AutodiffBackend>(factor: f32) {
    let device = Default::default();
    let model = LinearConfig::new(4, 4).init::<B>(&device);
    let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).mean();
    (loss * factor).backward();
}

#[test]
fn the_log_is_told_once_and_why() {
    log::set_logger(&Kept).unwrap();
    log::set_max_level(log::LevelFilter::Trace);

    // An unconfigured device: its first operation logs the precision of auto and the reason, and no
    // later one does.
    (0..3).for_each(|_| train::<AmpAutodiff<NdArray>>(1.0));
    let auto = "is f32: the device accelerates neither f16 nor bf16";
    assert_eq!(
        lines(),
        [(
            Level::Info,
            format!("burn-amp: auto on ndarray on Cpu {auto}")
        )]
    );

    // A configured auto logs the same, and also a loss scale that then has no effect. Without the fallback: it would
    // mend the stuck scale below.
    let config = AmpConfig::new()
        .with_loss_scale(LossScaleConfig::Fixed(8.0))
        .with_overflow_fallback(false);
    config
        .apply::<AmpAutodiff<Flex>>(&Default::default())
        .unwrap();
    let [(Level::Info, told), (Level::Warn, warned)] = &lines()[..] else {
        panic!("two lines")
    };
    assert!(told.ends_with(auto), "{told}");
    assert!(warned.contains("has no effect"), "{warned}");

    // The loss reads a sigmoid in FP32, and has nothing to warn of.
    let losses = |config: BinaryCrossEntropyLossConfig, from: fn(Tensor<B, 1>) -> Tensor<B, 1>| {
        let device = Default::default();
        let logits = Tensor::<B, 1>::from_data([7.0, -7.0], &device);
        let targets = Tensor::from_data([0, 1], &device);
        with_precision(Precision::Bf16, || {
            let loss = config.init(&device);
            loss.forward(from(activation(logits)), targets)
                .into_scalar()
        })
    };
    let config = BinaryCrossEntropyLossConfig::new;
    let of_logits = losses(config().with_logits(true), |logits| logits);
    assert!((of_logits - 7.0009).abs() < 1e-3, "{of_logits}");
    let of_fp32 = losses(config(), |logits| full_precision(|| sigmoid(logits)));
    for loss in [of_fp32, losses(config(), sigmoid)] {
        assert!((loss - 7.0009).abs() < 1e-3, "{loss}");
    }
    // Bounds are FP32's, too.
    let bounded = |logits| sigmoid(logits).clamp(1e-4, 1.0 - 1e-4);
    assert!((losses(config(), bounded) - 7.0009).abs() < 1e-3);
    let widened = |logits| sigmoid(logits).cast(burn::tensor::DType::F32);
    assert!((losses(config(), widened) - 7.0009).abs() < 1e-3);
    let many = |logits| (0..9).fold(sigmoid(logits), |p, _| p + 0.0);
    assert!((losses(config(), many) - 7.0009).abs() < 1e-3);
    assert_eq!(lines(), []);

    // Repeated lines are summed up; a stuck scale is logged once.
    let scaler = GradScaler::new(
        DynamicLossScale::new()
            .with_init_scale(1.0)
            .with_stuck_after(2)
            .into(),
    );
    let scaler = scaler.unwrap();
    with_precision(Precision::F16, || {
        scaler.scope(|| {
            (0..5).for_each(|_| train::<AmpAutodiff<Flex>>(f32::NAN));
            train::<AmpAutodiff<Flex>>(1e-3);
            (0..5).for_each(|_| train::<AmpAutodiff<Flex>>(1e9));
            train::<AmpAutodiff<Flex>>(1e-3);
        });
    });
    let lines = lines();
    let of = |wanted: Level| lines.iter().filter(move |(level, _)| *level == wanted);
    assert!(of(Level::Warn).all(|(_, line)| line.contains("the loss is not finite")));
    assert!(of(Level::Error).all(|(_, line)| line.contains("the model is not training")));
    let has = |level, texts: &[&str]| {
        let told: Vec<_> = of(level).map(|(_, line)| line).collect();
        assert_eq!(told.len(), texts.len(), "{told:?}");
        for (line, text) in told.iter().zip(texts) {
            assert!(line.contains(text), "{line}");
        }
    };
    let losses = ["so far: 1)", "so far: 2)", "so far: 4)"];
    has(Level::Warn, &losses);
    let overflows = [
        "after 5 skipped steps in a row",
        ", 1 in a row",
        ", 2 in a row",
        ", 4 in a row",
    ];
    has(
        Level::Debug,
        &[&overflows[..], &["after 5 skipped steps in a row"]].concat(),
    );
    let stuck = [
        "2 steps in a row were skipped, the last one because its loss is not finite",
        "2 steps in a row were skipped, the last one at the minimum loss scale 1: the model is not \
         training. No loss scale makes its gradients finite. Try bf16, or full_precision",
    ];
    has(Level::Error, &stuck);
    let fields = &FIELDS.lock().unwrap()[..];
    let expected = [2, 8].map(|step| format!("step={step} scale=1.0 skipped_in_a_row=2 "));
    assert_eq!(fields, expected);

    // A loop that scales its losses and leaves the step to the optimizer.
    let unstepped = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    *READ.lock().unwrap() = Some(unstepped.clone());
    (0..2500).for_each(|_| {
        let loss = Tensor::<Autodiff<Flex>, 1>::ones([1], &Default::default());
        unstepped.scale(loss);
    });
    let [(Level::Warn, warned)] = &self::lines()[..] else {
        panic!("one line")
    };
    let text = "burn-amp: 1000 losses were scaled since the last update. If the loop calls the \
                optimizer itself, its gradients are not checked";
    assert!(warned.starts_with(text), "{warned}");

    // A checkpoint without a loss scale, or with that of another number of devices.
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    // The record of a constant learning rate is ().
    let plain = Recorder::<Flex>::record(&recorder, (), ()).unwrap();
    let record = Recorder::<Flex>::load(&recorder, plain, &Default::default()).unwrap();
    let scheduler = scaler.checkpoint_with(0.1);
    let scheduler = scheduler.load_record::<Flex>(record);
    let both = scaler.checkpoint_with(0.1).and(scaler);
    both.load_record::<Flex>(scheduler.to_record::<Flex>());
    let [(Level::Info, fresh), (Level::Info, dealt)] = &self::lines()[..] else {
        panic!("two lines")
    };
    assert!(fresh.contains("it was written without AMP: the loss scale is 1"));
    assert!(dealt.contains("has 1 loss scale(s), but the training has 2 device(s)"));

    // A checkpoint of a process that kept its exceptions in a file, and a process that does not.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("exceptions.json");
    exceptions::<B>(&Default::default()).keep_in(&path).unwrap();
    let scheduler = GradScaler::default().checkpoint_with(0.1);
    let bytes = Recorder::<Flex>::record(&recorder, scheduler.to_record::<Flex>(), ()).unwrap();
    let name = path.display().to_string();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(text(&bytes).contains(&name));
    let load = |bytes: Vec<u8>| {
        let record = Recorder::<Flex>::load(&recorder, bytes, &Default::default()).unwrap();
        GradScaler::default()
            .checkpoint_with(0.1)
            .load_record::<Flex>(record);
    };
    load(bytes.clone());
    assert_eq!(self::lines(), []);
    let place = bytes
        .windows(name.len())
        .position(|at| at == name.as_bytes());
    let mut elsewhere = bytes;
    elsewhere[place.unwrap()] = b'X';
    load(elsewhere);
    let [(Level::Info, asked)] = &self::lines()[..] else {
        panic!("one line")
    };
    assert!(
        asked.contains("the exceptions of a device were kept in X"),
        "{asked}"
    );

    // A model in half: one line, however many parameters it has.
    let train_in_half = || {
        with_precision(Precision::Bf16, || {
            let half = || Tensor::<AmpAutodiff<Flex>, 2>::ones([2, 2], &Default::default());
            let parameters = [half(), half()].map(|t| t.cast(DType::BF16).require_grad());
            parameters
                .map(|p| p.sum())
                .map(|loss| drop(loss.backward()))
        })
    };
    for _ in 0..2 {
        train_in_half();
        let [(Level::Info, widened)] = &self::lines()[..] else {
            panic!("one line")
        };
        assert!(
            widened.starts_with(
                "burn-amp: tensors in bf16 that require a gradient are trained in FP32 on flex on Cpu"
            ),
            "{widened}"
        );
    }

    // A program whose weights are plain tensors, and one that has a layer as well.
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    for has_layer in [true, false] {
        config.apply::<B>(&Default::default()).unwrap();
        self::lines();
        let x = || Tensor::<B, 2>::ones([2, 2], &Default::default());
        if has_layer {
            LinearConfig::new(2, 2)
                .init(&Default::default())
                .forward(x());
        }
        (0..2500).for_each(|_| drop(x().matmul(x())));
        let warned = self::lines();
        let is_warning = |(level, _): &&(Level, String)| *level == Level::Warn;
        let warned: Vec<_> = warned.iter().filter(is_warning).collect();
        assert_eq!(warned.len(), usize::from(!has_layer));
        if let [(_, text)] = &warned[..] {
            assert!(text.starts_with(
                "burn-amp: 1000 products and convolutions on flex on Cpu stayed FP32"
            ));
        }
    }

    // A loss that is not finite, of a step that is checked.
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    config
        .with_finite_check(true)
        .apply::<B>(&Default::default())
        .unwrap();
    self::lines();
    let x = Tensor::<B, 1>::ones([1], &Default::default()).require_grad();
    let loss = x.clone() / 0.0;
    let _: f32 = loss.clone().into_scalar();
    assert_eq!(self::lines(), []);
    drop(loss.backward());
    drop((x.sqrt() * 0.0).sqrt().backward());
    let [(Level::Warn, of_loss), (Level::Warn, of_gradient)] = &self::lines()[..] else {
        panic!("two lines")
    };
    assert!(of_loss.starts_with(
        "burn-amp: the loss is not finite; step skipped (non-finite losses so far: 1). Check"
    ));
    assert!(of_gradient.starts_with(
        "burn-amp: 1 gradient not finite; step skipped, 2 in a row. Check the inputs"
    ));
    AmpConfig::new()
        .with_precision(Precision::F32)
        .apply::<B>(&Default::default())
        .unwrap();
    self::lines();

    // A loss that is not finite, and that no step checks: one line, when the program reads it.
    let lost = |precision: Precision| {
        with_precision(precision, || {
            let x = Tensor::<AmpAutodiff<Flex>, 1>::ones([1], &Default::default()).require_grad();
            for loss in [x.clone() / 0.0, x.clone() * 2.0, x.log() * f32::NAN] {
                let _: f32 = loss.into_scalar();
            }
        });
    };
    let finite = || {
        let x = Tensor::<AmpAutodiff<Flex>, 1>::ones([1], &Default::default()).require_grad();
        let beyond_fp32 = (x.cast(FloatDType::F64) * 1e39).into_data();
        assert!(beyond_fp32.iter::<f64>().all(f64::is_finite));
    };
    with_precision(Precision::Bf16, finite);
    assert_eq!(self::lines(), []);
    for precision in [Precision::Bf16, Precision::F32] {
        lost(precision);
    }
    let [(Level::Warn, lost)] = &self::lines()[..] else {
        panic!("one line")
    };
    assert!(
        lost.starts_with("burn-amp: the program read inf on flex on Cpu"),
        "{lost}"
    );

    // Burn's cross entropy of probabilities that the policy made f16 bounds them at 1/128.
    let cross_entropy = |precision: Precision| {
        with_precision(precision, || {
            let device = Default::default();
            let gates = Tensor::<B, 2>::from_data([[0.5, 0.5]], &device).require_grad();
            let experts = Tensor::<B, 2>::from_data([[0.001, 0.999], [0.001, 0.999]], &device);
            let loss = CrossEntropyLossConfig::new()
                .with_logits(false)
                .init(&device);
            let target = || Tensor::<B, 1, Int>::from_ints([0], &device);
            let mixed = gates.matmul(experts);
            let wide = loss
                .forward(mixed.clone().cast(DType::F32), target())
                .into_scalar();
            assert!((wide / 6.907_755 - 1.0).abs() < 1e-3, "{wide}");
            loss.forward(mixed, target());
        });
    };
    (0..2).for_each(|_| cross_entropy(Precision::F16));
    cross_entropy(Precision::Bf16);
    // Other lines are of the trials of Flex's kernels.
    let mut told = self::lines();
    told.retain(|(level, _)| *level == Level::Warn);
    let [(_, bounded)] = &told[..] else {
        panic!("one line")
    };
    assert!(
        bounded.contains("probabilities.cast(DType::F32)"),
        "{bounded}"
    );

    // A backward pass that is not burn-amp's: in f16 its loss is not scaled.
    let foreign = |precision| with_precision(precision, || train::<Autodiff<Amp<Flex>>>(1e-9));
    for precision in [Precision::F32, Precision::Bf16] {
        foreign(precision);
    }
    assert_eq!(self::lines(), []);
    for precision in [Precision::F16; 2] {
        foreign(precision);
    }
    let mut told = self::lines();
    told.retain(|(level, _)| *level == Level::Warn);
    let [(_, foreign)] = &told[..] else {
        panic!("one line")
    };
    assert!(foreign.starts_with("burn-amp: linear_"), "{foreign}");
    assert!(
        foreign.contains("Give the program AmpAutodiff<..> where it trains"),
        "{foreign}"
    );
    with_precision(Precision::F16, || train::<B>(1.0));
    assert_eq!(self::lines(), []);

    // Without loss scaling no step reports an anomaly: the log has it.
    for precision in [Precision::Bf16, Precision::F32] {
        let device = Default::default();
        let watched = AmpConfig::new()
            .with_precision(precision)
            .with_anomaly_detection(true);
        watched.apply::<B>(&device).unwrap();
        self::lines();
        for _ in 0..2 {
            let small = Tensor::<B, 1>::from_data([1e-25], &device).require_grad();
            (small * 1e30 * 1e30).sum().backward();
            let large = Tensor::<B, 1>::from_data([100.0], &device).require_grad();
            large.exp().sum().backward();
        }
        let found: Vec<_> = self::lines().into_iter().map(|(_, line)| line).collect();
        let first = "burn-amp: the first non-finite result of a pass: ";
        let backward = format!("{first}backward: mul_scalar [1] in F32, operands up to 1e30");
        let exp = ["forward", "backward"]
            .map(|pass| format!("{first}{pass}: exp [1] in F32, operands up to 1e2"));
        let each = [vec![backward], exp.to_vec()].concat();
        assert_eq!(found, [each.clone(), each].concat());
    }

    // The folder of the file of exceptions is gone. What the logger asks for is not locked.
    let folder = tempfile::tempdir().unwrap();
    let kept = exceptions::<B>(&Default::default());
    kept.keep_in(folder.path().join("exceptions.json")).unwrap();
    drop(folder);
    let config = AmpConfig::new().with_op("exp", OpPrecision::Half).unwrap();
    config.apply::<B>(&Default::default()).unwrap();
    let told = self::lines();
    let has = |level, text: &str| {
        told.iter()
            .any(|(of, line)| *of == level && line.contains(text))
    };
    assert!(
        has(Level::Info, "exp computes in half, by AmpConfig::with_op"),
        "{told:?}"
    );
    assert!(
        has(Level::Warn, "the exceptions could not be written to"),
        "{told:?}"
    );
}
