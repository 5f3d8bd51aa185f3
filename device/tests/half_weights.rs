//! A model for inference with its weights in half behind the device: half the memory, the same
//! results. The memory of this process is counted, and Flex computes in it.
#![cfg(feature = "flex")]

include!("../src/burn.rs");

#[path = "../../xtask/src/bench/alloc.rs"]
#[allow(dead_code)]
mod alloc;
mod client;

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_amp_device::{AmpError, Error, Precision, flex, half_weights};

use client::{HALVES, read, roundoff, tensor};

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    norm: LayerNorm,
    linear: Linear,
}

const VOCABULARY: usize = 512;
const WIDTH: usize = 512;
/// The bytes of the weights in FP32.
const BYTES: usize = (VOCABULARY * WIDTH + WIDTH * 1024) * 4;

impl Model {
    fn new(device: &Device) -> Self {
        device.seed(1);
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            linear: LinearConfig::new(WIDTH, 1024).init(device),
        }
    }

    /// The output for FP32 rows. Rows of the embedding would be rounded.
    fn forward(&self, device: &Device) -> Vec<f32> {
        let x = tensor([4, WIDTH], 3, device);
        read(self.linear.forward(self.norm.forward(x)))
    }

    fn rows(&self, device: &Device) -> Vec<f32> {
        let rows = Tensor::<2, Int>::from_data([[0, 3, 1, 511]], device);
        read(self.embedding.forward(rows))
    }
}

/// The tests count the memory of the process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn weights_take_half_the_memory_and_give_the_same_results() {
    let _alone = alone();
    for precision in HALVES {
        let device = flex(precision).unwrap();
        // Permanent allocations of a first model are not counted.
        let computed = || device.sync().unwrap();
        Model::new(&device).forward(&device);
        computed();
        let mark = alloc::Mark::set();
        let model = Model::new(&device);
        let rows = model.rows(&device);
        // Parameters are created at their first use. A use in an operation would also cast them.
        model.linear.weight.val();
        computed();
        let whole = mark.live();
        let expected = model.forward(&device);

        let model = half_weights(model, precision).unwrap();
        assert_eq!(model.linear.weight.val().dtype(), DType::F32);
        let found = model.forward(&device);
        computed();
        let halved = mark.live();
        let saved = whole as f64 - halved as f64;
        let expected_saved = BYTES as f64 / 2.0;
        assert!(
            (saved / expected_saved - 1.0).abs() < 0.05,
            "{precision}: {whole} bytes, then {halved}"
        );
        // The linear layer rounds its weight anyway.
        assert_eq!(found, expected);
        let rounded = model.rows(&device);
        let largest = rows
            .iter()
            .fold(0f32, |largest, row| largest.max(row.abs()));
        for (rounded, row) in rounded.iter().zip(&rows) {
            assert!((rounded - row).abs() <= largest * roundoff(precision));
        }
        assert_ne!(rounded, rows);

        // A clone shares the weights; reading gives FP32 data of the rounded values.
        let clone = model.clone();
        let data = clone.linear.weight.val().into_data();
        assert_eq!(data.dtype(), DType::F32);
        let once: Vec<f32> = data.try_to_vec().unwrap();
        let twice = half_weights(model, precision).unwrap();
        assert_eq!(read(twice.linear.weight.val()), once);
    }
}

#[test]
fn a_record_has_the_rounded_values_and_loads_as_fp32() {
    let _alone = alone();
    let device = flex(Precision::Bf16).unwrap();
    let model = half_weights(Model::new(&device), Precision::Bf16).unwrap();
    let expected = model.forward(&device);
    let weight = read(model.linear.weight.val());
    let record = model.into_record();
    device.seed(9);
    let fresh = LinearConfig::new(WIDTH, 1024).init(&device);
    assert_ne!(read(fresh.weight.val()), weight);
    let loaded = Model::new(&device).load_record(record);
    assert_eq!(read(loaded.linear.weight.val()), weight);
    assert_eq!(loaded.forward(&device), expected);
}

#[test]
fn what_is_no_weight_in_half_is_an_error_that_says_so() {
    let _alone = alone();
    let bf16 = flex(Precision::Bf16).unwrap();
    let layer = |device: &Device| LinearConfig::new(8, 4).init(device);
    let error = half_weights(layer(&bf16), Precision::Auto).unwrap_err();
    assert!(matches!(
        error,
        Error::Amp(AmpError::NotHalf {
            precision: Precision::Auto
        })
    ));
    // In the words of the program, and not as the server or group that Burn has for it.
    let plain = format!("{:?}", Device::flex());
    for (device, named) in [
        (Device::flex(), plain.clone()),
        (flex(Precision::F32).unwrap(), format!("{plain} in f32")),
        (flex(Precision::F16).unwrap(), format!("{plain} in f16")),
        (
            bf16.clone().autodiff(),
            format!("{plain} in bf16, with autodiff"),
        ),
    ] {
        let error = half_weights(layer(&device), Precision::Bf16).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "the weight weight is on {named}: expected a device of burn-amp-device in bf16, \
                 without autodiff. Pass the precision of the device, load the record into a model on \
                 `burn_amp_device::mixed_precision(device, precision)`, or call `valid()` on a model that \
                 was trained there"
            )
        );
    }
    let large = |precision, value: f32| {
        let device = flex(precision).unwrap();
        let mut large = layer(&device);
        large.weight = large.weight.map(|weight| weight * 0.0 + value);
        half_weights(large, precision)
    };
    let overflow = |precision, value: f32, says: &str| {
        let error = large(precision, value).unwrap_err();
        assert!(
            matches!(&error, Error::Amp(AmpError::WeightOverflow { parameter, value: largest })
                if parameter == "weight" && *largest == value.abs()),
            "{error}"
        );
        assert!(error.to_string().contains(says), "{error}");
    };
    overflow(Precision::F16, 1e5, "use bf16");
    // The lowest FP32 value, as in a mask.
    overflow(Precision::F16, f32::MIN, "clamp it");
    overflow(Precision::Bf16, f32::MIN, "clamp it");
    let largest = 3.3895314e38;
    for value in [largest, f32::INFINITY] {
        let model = large(Precision::Bf16, value).unwrap();
        assert_eq!(read(model.weight.val()), [value; 32]);
    }
}
