//! The scaler of a device, and the warnings when f16 trains without one or without its steps. One test: the
//! log warns once in a process.

include!("../src/burn.rs");

mod client;

use std::sync::Mutex;

use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor, activation};
use burn_amp_device::{GradScaler, LossScaleConfig, Precision, flex};
use log::{Level, Log, Metadata, Record};

struct Kept;

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Log for Kept {
    fn enabled(&self, _: &Metadata) -> bool {
        true
    }

    fn log(&self, record: &Record) {
        let line = record.args().to_string();
        if record.level() == Level::Warn && line.starts_with("burn-amp") {
            WARNINGS.lock().unwrap().push(line);
        }
    }

    fn flush(&self) {}
}

fn loss(model: &Linear, device: &Device) -> Tensor<1> {
    let input = client::tensor::<2>([8, 4], 1, device);
    let output = activation::relu(model.forward(input) + 4.0);
    let target = output.clone().detach() + 1.0;
    MseLoss::new().forward(output, target, Reduction::Mean)
}

/// Runs a step without a scaler. Returns the log after the device has computed the step.
fn unscaled_step(precision: Precision) -> Vec<String> {
    let device = flex(precision).unwrap().autodiff();
    let model = LinearConfig::new(4, 2).init(&device);
    let grads = GradientsParams::from_grads(loss(&model, &device).backward(), &model);
    let model = SgdConfig::new().init().step(0.1, model, grads);
    client::read(model.weight.val().inner());
    WARNINGS.lock().unwrap().clone()
}

#[test]
fn a_device_has_one_scaler_and_f16_without_it_is_warned_of_once() {
    log::set_logger(&Kept).unwrap();
    log::set_max_level(log::LevelFilter::Trace);

    assert_eq!(unscaled_step(Precision::F32), [""; 0]);
    assert_eq!(unscaled_step(Precision::Bf16), [""; 0]);
    let warned = unscaled_step(Precision::F16);
    let [warning] = &warned[..] else {
        panic!("{warned:?}")
    };
    assert!(warning.contains("no loss was scaled"), "{warning}");
    assert!(warning.contains("GradScaler::of"), "{warning}");
    assert_eq!(unscaled_step(Precision::F16), warned);

    let device = flex(Precision::F16).unwrap();
    let scaler = GradScaler::of(&device.clone().autodiff());
    assert_eq!(scaler.loss_scale(), 65536.0);
    let mut model = LinearConfig::new(4, 2).init(&device.clone().autodiff());
    let mut optimizer = SgdConfig::new().init();
    let grads = scaler.backward(loss(&model, &device.clone().autodiff()), &model);
    let stepped;
    (model, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
    assert!(stepped.unwrap());
    scaler.update().unwrap();
    drop(model);
    // The same one, with or without autodiff, on any thread.
    let taken = move || GradScaler::of(&device).state().taken_steps();
    assert_eq!(std::thread::spawn(taken).join().unwrap(), 1);

    // A loop that scales its losses and calls the optimizer itself. Its first loss is read.
    let scaler = GradScaler::new(LossScaleConfig::Fixed(8.0)).unwrap();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(4, 2).init(&device);
    scaler.scale(loss(&model, &device) / 0.0);
    for _ in 0..2500 {
        scaler.scale(Tensor::<1>::ones([1], &device));
    }
    let [_, many] = &WARNINGS.lock().unwrap()[..] else {
        panic!("one line more")
    };
    let text = "burn-amp: 1000 losses were scaled since the last update. If the loop calls the \
                optimizer itself, its gradients are not checked";
    assert!(many.starts_with(text), "{many}");
    let grads = scaler.backward(loss(&model, &device), &model);
    let stepped;
    (_, stepped) = scaler.step(&mut optimizer, 0.1, model, grads);
    assert!(!stepped.unwrap());

    for device in [
        flex(Precision::Bf16).unwrap(),
        flex(Precision::F32).unwrap(),
        Device::flex(),
    ] {
        let scaler = GradScaler::of(&device);
        let disabled = GradScaler::new(LossScaleConfig::Disabled).unwrap();
        assert_eq!(scaler.loss_scale(), disabled.loss_scale(), "{device:?}");
        assert_eq!(scaler.state().taken_steps(), 0);
    }
}
