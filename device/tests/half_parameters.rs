//! Parameters that are half in the program, as Burn's records and stores leave those of a file in half: they keep
//! the file's dtype.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

mod client;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Initializer, Linear, LinearConfig,
};
use burn::optim::SgdConfig;
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_amp_device::{
    AmpError, DynamicLossScale, Error, GradScaler, MixedPrecisionTrainer,
    MixedPrecisionTrainerConfig, Precision, flex,
};

use client::{HALVES, read};

/// A model of tokens: with half parameters everything is half, so no operation mixes dtypes.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    linear: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let ones = Initializer::Ones;
        Self {
            embedding: EmbeddingConfig::new(4, 4)
                .with_initializer(ones.clone())
                .init(device),
            linear: LinearConfig::new(4, 4).with_initializer(ones).init(device),
        }
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.linear.weight.val().device();
        let tokens = Tensor::<2, Int>::from_data(TensorData::from([[0i32, 1]]), &device);
        self.linear.forward(self.embedding.forward(tokens)).sum()
    }

    fn bias(&self) -> Tensor<1> {
        self.linear.bias.as_ref().unwrap().val().inner()
    }
}

struct To(FloatDType);

impl ModuleMapper for To {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0))
    }
}

/// A file of half weights.
fn file(half: Precision) -> ModuleRecord {
    let dtype = match half {
        Precision::F16 => FloatDType::F16,
        _ => FloatDType::BF16,
    };
    Net::new(&Device::flex()).map(&mut To(dtype)).into_record()
}

fn trainer(model: Net) -> MixedPrecisionTrainer<Net> {
    // So that no gradient here overflows.
    let scale = DynamicLossScale::new().with_init_scale(8.0);
    let mut config = MixedPrecisionTrainerConfig::new();
    let device = model.linear.weight.val().device();
    if GradScaler::of(&device).state().is_enabled() {
        config = config.with_loss_scale(Some(scale.into()));
    }
    config.init(model, SgdConfig::new().init(), 1e-4).unwrap()
}

/// The bias after 100 steps of 2e-4 each, which bf16 would round away.
fn assert_trains(trainer: &mut MixedPrecisionTrainer<Net>, case: &str) {
    for _ in 0..100 {
        let step = trainer.train_step((), (), |model, (), ()| model.loss());
        assert!(step.unwrap().stepped(), "{case}");
    }
    let bias = trainer.model().bias();
    assert_eq!(bias.dtype(), DType::F32, "{case}");
    let bias: Vec<f32> = read(bias);
    assert!((bias[0] - 0.98).abs() < 1e-3, "{case}: {bias:?}");
}

fn precisions() -> impl Iterator<Item = (Precision, Precision)> {
    let on = [Precision::F16, Precision::Bf16, Precision::F32];
    on.into_iter().flat_map(|on| HALVES.map(|half| (on, half)))
}

#[test]
fn a_trainer_trains_them_in_fp32() {
    for (precision, half) in precisions() {
        let case = format!("{half} parameters on a device in {precision}");
        let device = flex(precision).unwrap().autodiff();
        let model = Net::new(&device).load_record(file(half));
        assert_ne!(model.bias().dtype(), DType::F32);
        assert_trains(&mut trainer(model), &case);
    }
}

#[test]
fn a_trainers_record_of_them_trains_in_fp32() {
    for (precision, half) in precisions() {
        let case = format!("a record in {half} on a device in {precision}");
        let device = flex(precision).unwrap().autodiff();
        let mut trainer = trainer(Net::new(&device));
        let mut record = trainer.to_record().unwrap();
        record.model = file(half);
        trainer.load_record(record).unwrap();
        assert_trains(&mut trainer, &case);
    }
}

/// Burn's operations take operands of one dtype: with the trained parameters, the frozen ones become FP32.
#[test]
fn a_frozen_parameter_follows_the_trained_ones_and_stays_half_beside_fp32() {
    let device = flex(Precision::Bf16).unwrap().autodiff();
    let mut model = Net::new(&device).load_record(file(Precision::Bf16));
    model.embedding = model.embedding.no_grad();
    let mut trainer = trainer(model);
    assert_trains(&mut trainer, "a frozen embedding");
    let embedding = trainer.model().embedding.weight.val();
    assert!(embedding.dtype() == DType::F32 && !embedding.is_require_grad());

    let mut model = Net::new(&device);
    let half = Net::new(&device).load_record(file(Precision::Bf16));
    model.embedding = half.embedding.no_grad();
    let trainer = MixedPrecisionTrainerConfig::new()
        .init(model, SgdConfig::new().init(), 1e-4)
        .unwrap();
    let embedding = trainer.model().embedding.weight.val();
    assert_eq!(embedding.dtype(), DType::BF16);
}

/// Its running statistics are no parameters that are trained.
#[test]
fn a_batch_norm_of_a_file_in_half_trains() {
    #[derive(Module, Debug)]
    struct Normed {
        linear: Linear,
        norm: BatchNorm,
    }

    impl Normed {
        fn new(device: &Device) -> Self {
            Self {
                linear: LinearConfig::new(4, 2).init(device),
                norm: BatchNormConfig::new(2).init(device),
            }
        }
    }

    for precision in HALVES {
        let device = flex(precision).unwrap().autodiff();
        let file = Normed::new(&Device::flex()).map(&mut To(FloatDType::BF16));
        let model = Normed::new(&device).load_record(file.into_record());
        // A forward pass before the training leaves an update of the statistics in half.
        let first = Tensor::<2>::ones([2, 4], &device).cast(FloatDType::BF16);
        model.norm.forward(model.linear.forward(first));
        let mut trainer = MixedPrecisionTrainerConfig::new()
            .init(model, SgdConfig::new().init(), 1e-4)
            .unwrap();
        let input = Tensor::<2>::from_data([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]], &device);
        let step = trainer.train_step(input, (), |model, input, ()| {
            model.norm.forward(model.linear.forward(input)).sum()
        });
        assert!(step.unwrap().loss.is_finite());
        trainer.to_record().unwrap();
    }
}

fn assert_refused(error: Error, call: &str, half: Precision) {
    let text = error.to_string();
    assert!(text.contains("Cast the parameter to FP32"), "{text}");
    match error {
        Error::Amp(AmpError::HalfParameter {
            call: of,
            parameter,
            precision,
        }) => {
            assert_eq!(
                (of, parameter.as_str(), precision),
                (call, "embedding.weight", half)
            )
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_step_is_refused_that_would_be_rounded_away() {
    for (precision, half) in precisions() {
        let device = flex(precision).unwrap().autodiff();
        let model = Net::new(&device).load_record(file(half));
        let scaler = GradScaler::of(&device);
        let mut grads = scaler.backward(model.loss(), &model);
        assert_refused(
            scaler.unscale(&model, &mut grads).unwrap_err(),
            "unscale",
            half,
        );
        let mut optimizer = SgdConfig::new().init();
        let (model, stepped) = scaler.step(&mut optimizer, 1e-4, model, grads);
        assert_refused(stepped.unwrap_err(), "step", half);
        assert_eq!(read(model.bias()), [1.0; 4]);
        // As the README says.
        let model = Net::new(&device).load_record(file(half).cast_to_module_dtype());
        assert_trains(&mut trainer(model), "cast to the module's dtype");

        // A record that is loaded into a trainer's model.
        let mut trainer = trainer(Net::new(&device));
        let loaded = trainer.model().clone().load_record(file(half));
        *trainer.model_mut() = loaded;
        let step = trainer.train_step((), (), |model, (), ()| model.loss());
        assert_refused(step.unwrap_err(), "unscale", half);
    }
}
