//! The Rust blocks of the README, which compile if the features allow it.

include!("../src/burn.rs");

#[path = "../../tests/common/readme.rs"]
mod readme;

use burn::remote::RemoteHost;
use burn::tensor::Device;
#[cfg(any(feature = "flex", feature = "vulkan"))]
use burn_amp_device::{Error, Precision};
use readme::assert_blocks_stand_in;

#[test]
fn every_block_of_the_readme_stands_here() {
    assert_blocks_stand_in(
        &[include_str!("readme.rs")],
        include_str!("../README.md"),
        "rust,ignore",
        "",
        9,
    );
}

#[cfg(feature = "vulkan")]
#[allow(dead_code, unused_variables, non_upper_case_globals)]
fn the_line_that_changes() -> Result<Device, Error> {
    const kind: burn::tensor::DeviceKind = burn::tensor::DeviceKind::DefaultDevice;
    let device = Device::vulkan(kind).autodiff(); // before
    let device = burn_amp_device::vulkan(kind, Precision::Bf16)?.autodiff(); // after
    Ok(device)
}

#[allow(dead_code)]
mod region {
    use burn::module::Module;
    use burn::nn::Linear;
    use burn::tensor::Tensor;
    use burn_amp_device::full_precision;

    #[derive(Module, Debug)]
    pub struct Model {
        sensitive: Linear,
    }

    impl Model {
        pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            let x = full_precision(x, |x| self.sensitive.forward(x));
            burn::tensor::activation::relu(x)
        }
    }
}

#[allow(dead_code)]
fn a_device_on_another_machine(token: &str) -> Result<Device, Box<dyn std::error::Error>> {
    let host = RemoteHost::websocket("ws://gpu:3000").with_credential(token);
    let device = Device::remote_options(&host).init()?.autodiff();
    Ok(device)
}

#[cfg(feature = "flex")]
#[test]
fn a_scaler_trains_in_f16() -> Result<(), Error> {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::SgdConfig;
    use burn::tensor::Tensor;
    use burn_amp_device::GradScaler;

    let device = burn_amp_device::flex(Precision::F16)?.autodiff();
    let mut model: Linear = LinearConfig::new(1, 1).init(&device);
    let before = model.weight.val().into_data();
    let (mut optimizer, lr) = (SgdConfig::new().init(), 0.1);
    let batches = (0..2).map(|_| Tensor::<2>::full([8, 1], 0.1, &device));

    let scaler = GradScaler::of(&device); // once, before the loop
    for batch in batches {
        let loss = model.forward(batch).mean();
        let grads = scaler.backward(loss, &model);
        let stepped;
        (model, stepped) = scaler.step(&mut optimizer, lr, model, grads);
        stepped?; // the model is here even after an error
        scaler.update()?;
    }
    assert_ne!(model.weight.val().into_data(), before);
    assert_eq!(scaler.state().taken_steps() + scaler.skipped_steps(), 2);
    Ok(())
}

#[cfg(all(feature = "flex", feature = "train"))]
mod learner {
    use std::sync::Arc;

    use burn::data::dataloader::DataLoader;
    use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    use burn::module::Module;
    use burn::nn::Linear;
    use burn::optim::ModuleOptimizer;
    use burn::tensor::{Device, Tensor};
    use burn::train::{
        InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput,
        TrainStep,
    };
    use burn_amp_device::{AmpTrainingExt, Error, GradScaler};

    #[derive(Module, Debug)]
    struct Model {
        linear: Linear,
    }

    impl Model {
        fn regress(&self, batch: Tensor<2>) -> RegressionOutput {
            let output = self.linear.forward(batch.clone());
            RegressionOutput::new((output.clone() - batch.clone()).mean(), output, batch)
        }
    }

    impl TrainStep for Model {
        type Input = Tensor<2>;
        type Output = RegressionOutput;

        fn step(&self, batch: Tensor<2>) -> TrainOutput<RegressionOutput> {
            let item = self.regress(batch);
            let scaler = GradScaler::of(&item.loss.device());
            let grads = scaler.scale(item.loss.clone()).backward();
            TrainOutput::new(self, grads, item)
        }
    }

    impl InferenceStep for Model {
        type Input = Tensor<2>;
        type Output = RegressionOutput;

        fn step(&self, batch: Tensor<2>) -> RegressionOutput {
            self.regress(batch)
        }
    }

    type Loader = Arc<dyn DataLoader<Tensor<2>>>;

    /// tests/learner.rs tests the behaviour.
    #[allow(dead_code)]
    fn trains(
        (directory, train, valid): (&str, Loader, Loader),
        device: Device,
        (model, optimizer, schedule): (Model, ModuleOptimizer, ModuleLrScheduler),
    ) -> Result<LearningResult<Model>, Error> {
        let schedule = GradScaler::of(&device).checkpoint_with(schedule);
        let learner = Learner::new(model, optimizer, schedule);
        let result = SupervisedTraining::new(directory, train, valid)
            .with_default_checkpointers()
            .with_amp()
            .launch(learner)?;
        Ok(result)
    }
}

#[cfg(feature = "flex")]
#[test]
fn a_device_has_a_report() -> Result<(), Error> {
    use burn_amp_device::AmpReport;

    let device = burn_amp_device::flex(Precision::F16)?.autodiff();
    if let Some(report) = AmpReport::of_device(&device) {
        println!("{report}");
    }
    let report = AmpReport::of_device(&device).expect("a device of this crate");
    assert!(report.to_string().contains("precision   f16"), "{report}");
    Ok(())
}

#[cfg(feature = "flex")]
#[test]
fn a_trainer_trains_in_f16() -> Result<(), Error> {
    use burn::nn::LinearConfig;
    use burn::optim::SgdConfig;
    use burn::tensor::Tensor;
    use burn_amp_device::MixedPrecisionTrainerConfig;

    let device = burn_amp_device::flex(Precision::F16)?.autodiff();
    let (model, optimizer) = (
        LinearConfig::new(4, 1).init(&device),
        SgdConfig::new().init(),
    );
    let input = Tensor::<2>::ones([8, 4], &device);
    let target = Tensor::<2>::zeros([8, 1], &device);
    let path = &std::env::temp_dir().join(format!("burn-amp-{}-readme", std::process::id()));
    let mut trainer = MixedPrecisionTrainerConfig::new()
        .with_grads_accumulation(2)
        .with_grad_clipping_norm(Some(1.0))
        .init(model, optimizer, 1e-3)?; // a learning rate or a schedule
    let metrics = trainer.train_step(input, target, |model, input, target| {
        (model.forward(input) - target).powi_scalar(2).mean()
    })?;
    trainer.save_file(path)?; // later: trainer.load_file(path)?
    trainer.load_file(path)?;
    assert!(metrics.loss.is_finite() && !metrics.stepped());
    std::fs::remove_file(path).unwrap();
    Ok(())
}

/// tests/half_parameters.rs tests the behaviour.
#[cfg(feature = "store")]
#[allow(dead_code, unused_variables, unused_mut)]
fn a_file_in_half_loads_as_fp32(model: burn::nn::Linear, record: burn::store::ModuleRecord) {
    use burn::module::Module;
    use burn::store::{FloatCastAdapter, SafetensorsStore};
    use burn::tensor::DType;

    let model = model.load_record(record.cast_to_module_dtype()); // a record of Burn's
    let mut store = SafetensorsStore::from_file("model.safetensors") // a file, with Burn's feature `store`
        .with_from_adapter(FloatCastAdapter::to(DType::F32));
}
