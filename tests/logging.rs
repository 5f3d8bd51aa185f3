//! What the log is told. One test, in a process of its own: there is one logger for all.

use std::sync::Mutex;

use burn::backend::{Flex, NdArray};
use burn::lr_scheduler::LrScheduler;
use burn::nn::LinearConfig;
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn_amp::{
    AmpAutodiff, AmpConfig, AmpLrScheduler, Dynamic, GradScaler, LossScaleConfig, Precision,
    with_precision,
};
use log::{Level, Log, Metadata, Record};

struct Kept;

static LINES: Mutex<Vec<(Level, String)>> = Mutex::new(Vec::new());

impl Log for Kept {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let line = record.args().to_string();
        if line.starts_with("burn-amp: ") {
            LINES.lock().unwrap().push((record.level(), line));
        }
    }

    fn flush(&self) {}
}

/// What was logged since the last time.
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

    // An unconfigured device: what auto is, and why, at its first operation and never again.
    (0..3).for_each(|_| train::<AmpAutodiff<NdArray>>(1.0));
    let auto = "is f32: the device accelerates neither f16 nor bf16";
    assert_eq!(
        lines(),
        [(
            Level::Info,
            format!("burn-amp: auto on ndarray on Cpu {auto}")
        )]
    );

    // The same when auto is asked for; and a scale that then has no effect is not dropped silently.
    let config = AmpConfig::new().with_loss_scale(LossScaleConfig::Fixed(8.0));
    config
        .apply::<AmpAutodiff<Flex>>(&Default::default())
        .unwrap();
    let [(Level::Info, told), (Level::Warn, warned)] = &lines()[..] else {
        panic!("two lines")
    };
    assert!(told.ends_with(auto), "{told}");
    assert!(warned.contains("has no effect"), "{warned}");

    // A loss that is not finite, each time; a scale that is stuck, once.
    let scaler = GradScaler::new(
        Dynamic::new()
            .with_init_scale(1.0)
            .with_stuck_after(2)
            .into(),
    );
    let scaler = scaler.unwrap();
    with_precision(Precision::F16, || {
        scaler.scope(|| {
            train::<AmpAutodiff<Flex>>(f32::NAN);
            (0..4).for_each(|_| train::<AmpAutodiff<Flex>>(1e9));
        });
    });
    let lines = lines();
    let of = |wanted: Level| lines.iter().filter(move |(level, _)| *level == wanted);
    assert!(of(Level::Warn).all(|(_, line)| line.contains("the loss is not finite")));
    assert!(of(Level::Error).all(|(_, line)| line.contains("the model is not training")));
    let counts = [Level::Warn, Level::Debug, Level::Error].map(|level| of(level).count());
    assert_eq!(counts, [1, 4, 1], "{lines:?}");

    // A checkpoint that knows of no loss scale, or of another number of devices.
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::new();
    // That of a constant is ().
    let plain = Recorder::<Flex>::record(&recorder, (), ()).unwrap();
    let record = Recorder::<Flex>::load(&recorder, plain, &Default::default()).unwrap();
    let scheduler = AmpLrScheduler::new(0.1, [scaler.clone()]);
    let scheduler = scheduler.load_record::<Flex>(record);
    let both = AmpLrScheduler::new(0.1, [scaler.clone(), scaler]);
    both.load_record::<Flex>(scheduler.to_record::<Flex>());
    let [(Level::Info, fresh), (Level::Info, dealt)] = &self::lines()[..] else {
        panic!("two lines")
    };
    assert!(fresh.contains("as one written without AMP: the loss scale is 1"));
    assert!(dealt.contains("has 1 loss scale(s), and the training has 2 device(s)"));
}
