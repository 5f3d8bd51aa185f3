//! A trained model with its weights in half, for inference or as a frozen base.

use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::tensor::backend::Backend;
use burn_core::tensor::{DType, ElementConversion, FloatDType, Tensor, TensorPrimitive};

use crate::precision::{keep_dtypes, want_half};
use crate::tensor::TensorFlags;
use crate::{Amp, AmpError, Precision};

/// The model with its weights in half precision, which halves their memory. The counterpart of
/// PyTorch's `model.half()` and `model.bfloat16()`, for inference and for frozen weights: optimizers need FP32. Set the
/// device to this precision: in FP32 each call would cast the weights back.
///
/// Weights are the FP32 parameters of two or more dimensions. Biases and the parameters of normalization
/// layers (modules whose name has `Norm`) stay FP32. Parameters of any other dtype are unchanged. Linear
/// layers, convolutions and attention give the same results as before, since they round their weights anyway;
/// an embedding gives rounded rows in half. A parameter in arithmetic, such as a table of positions or an
/// attention's bias, is rounded, and its sum with a half tensor is half. In
/// [`full_precision`](crate::full_precision), operations on the rounded weights run in FP32. Call
/// `half_weights` after `load_record`, which makes the weights FP32 again. A record made of the model has the
/// rounded values. Load such a record into a new model to train it further: after `train()` on the model
/// itself, its half weights are frozen, since Burn's `Param::map` forgets that they were trained.
///
/// To train adapters beside a frozen base in half (LoRA), freeze the base, halve it, and add what is trained afterwards:
/// `Base::<AmpAutodiff<B>>::from_inner(half_weights(base.no_grad().valid(), precision)?)`. The example `lora` does so.
///
/// # Errors
///
/// - [`AmpError::NotHalf`] when the precision is neither f16 nor bf16.
/// - [`AmpError::WeightOverflow`] when a finite weight is beyond the range of the precision. One
///   number is read back for each weight.
///
/// ```
/// use burn::{backend::Flex, module::AutodiffModule, nn::{Linear, LinearConfig}};
/// use burn::tensor::{DType, Tensor};
/// use burn_amp::{Amp, AmpAutodiff, AmpConfig, Precision, half_weights};
///
/// let device = Default::default();
/// AmpConfig::new()
///     .with_precision(Precision::Bf16)
///     .apply::<Amp<Flex>>(&device)?;
/// let trained: Linear<AmpAutodiff<Flex>> = LinearConfig::new(64, 64).init(&device);
/// let model = trained.valid();
/// let input = Tensor::<Amp<Flex>, 2>::ones([1, 64], &device);
/// let expected = model.forward(input.clone()).into_data();
///
/// let model = half_weights(model, Precision::Bf16)?;
/// assert_eq!(model.weight.val().dtype(), DType::BF16);
/// assert_eq!(model.bias.as_ref().unwrap().val().dtype(), DType::F32);
/// assert_eq!(model.forward(input).into_data(), expected);
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
///
/// A model on [`AmpAutodiff`](crate::AmpAutodiff) does not compile: its weights would no longer be leaves, and would
/// not be trained. Call `model.valid()` first.
///
/// ```compile_fail,E0277
/// # use burn::{backend::Flex, nn::{Linear, LinearConfig}};
/// # use burn_amp::{AmpAutodiff, Precision, half_weights};
/// let trained: Linear<AmpAutodiff<Flex>> = LinearConfig::new(64, 64).init(&Default::default());
/// half_weights(trained, Precision::Bf16);
/// ```
pub fn half_weights<B: Backend, M: Module<Amp<B>>>(
    model: M,
    precision: Precision,
) -> Result<M, AmpError> {
    let dtype = match precision {
        Precision::F16 => FloatDType::F16,
        Precision::Bf16 => FloatDType::BF16,
        Precision::F32 | Precision::Auto => return Err(AmpError::NotHalf { precision }),
    };
    // In a process in FP32, operations do not look for half operands until then.
    want_half();
    let mut weights = Weights {
        precision,
        dtype,
        path: Vec::new(),
        error: None,
    };
    let model = model.map(&mut weights);
    weights.error.map_or(Ok(model), Err)
}

struct Weights {
    precision: Precision,
    dtype: FloatDType,
    /// The names of the fields, and of the modules that they belong to.
    path: Vec<(String, String)>,
    error: Option<AmpError>,
}

impl Weights {
    fn is_of_a_norm(&self) -> bool {
        let module = self.path.last().map(|(_, module)| module.as_str());
        module.is_some_and(|module| module.contains("Norm"))
    }

    /// Checks that no finite value is beyond the precision's range. Infinities in a weight are allowed.
    fn check<B: Backend, const D: usize>(&self, weight: &Tensor<B, D>) -> Result<(), AmpError> {
        let infinite = weight.clone().abs().equal_elem(f32::INFINITY);
        let finite = weight.clone().abs().mask_fill(infinite, 0.0);
        let value: f32 = finite.max().into_scalar().elem();
        if value > self.precision.largest() {
            let names: Vec<_> = self.path.iter().map(|(name, _)| name.as_str()).collect();
            let parameter = names.join(".");
            return Err(AmpError::WeightOverflow { parameter, value });
        }
        Ok(())
    }
}

impl<B: Backend> ModuleMapper<Amp<B>> for Weights {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Amp<B>, D>>,
    ) -> Param<Tensor<Amp<B>, D>> {
        if D < 2 || self.is_of_a_norm() || param.val().dtype() != DType::F32 {
            return param;
        }
        if let Err(error) = self.check(&param.val()) {
            self.error.get_or_insert(error);
            return param;
        }
        let dtype = self.dtype;
        param.map(|weight| {
            // Not as a program asks for the dtype of a half tensor, and in a region of FP32 as well.
            let half = keep_dtypes(|| weight.cast(dtype)).into_primitive().tensor();
            let flags = half.flags() | TensorFlags::WEIGHT;
            Tensor::from_primitive(TensorPrimitive::Float(half.with_flags(flags)))
        })
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push((name.into(), container_type.into()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}
