//! Weights that burn-store loads are learned: their products run in half. So are those of a model from ONNX, whose
//! generated code creates its constants as below.

use std::path::Path;

use burn::backend::Flex;
use burn::module::{Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_amp::{Amp, AmpAutodiff, Precision, with_precision};
use burn_store::{ModuleSnapshot, SafetensorsStore};

/// As burn-onnx generates it: a layer, and a constant that is multiplied.
#[derive(Module, Debug)]
struct Imported<B: Backend> {
    linear: Linear<B>,
    constant: Param<Tensor<B, 2>>,
}

impl<B: Backend> Imported<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            linear: LinearConfig::new(4, 4).init(device),
            constant: Param::uninitialized(
                ParamId::new(),
                |device, _require_grad| Tensor::zeros([4, 4], device),
                device.clone(),
                false,
                [4, 4].into(),
            ),
        }
    }

    /// The dtypes of what the layer and the constant make of data.
    fn dtypes(&self) -> [DType; 2] {
        let x = || Tensor::<B, 2>::ones([3, 4], &self.linear.weight.device());
        [self.linear.forward(x()), x().matmul(self.constant.val())].map(|y| y.dtype())
    }
}

fn loaded<B: Backend>(file: &Path) -> Imported<B> {
    let mut model = Imported::new(&Default::default());
    let mut store = SafetensorsStore::from_file(file);
    model.load_from(&mut store).expect("a whole file");
    model
}

fn check<B: Backend>(file: &Path, half: DType) {
    assert_eq!(loaded::<B>(file).dtypes(), [half; 2]);
    assert_eq!(loaded::<B>(file).no_grad().dtypes(), [half; 2]);
    let mut frozen = Imported::<B>::new(&Default::default()).no_grad();
    frozen
        .load_from(&mut SafetensorsStore::from_file(file))
        .expect("a whole file");
    assert_eq!(frozen.dtypes(), [half; 2]);
}

#[test]
fn stored_weights_are_learned() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("imported.safetensors");
    let model = Imported::<Flex>::new(&Default::default());
    let mut store = SafetensorsStore::from_file(&file).overwrite(true);
    model.save_into(&mut store).expect("a folder for tests");
    for precision in [Precision::F16, Precision::Bf16] {
        let half = precision.compute_dtype().expect("a half precision");
        with_precision(precision, || {
            check::<AmpAutodiff<Flex>>(&file, half);
            check::<Amp<Flex>>(&file, half);
        });
    }
}
