//! A trained model with its weights in half on their device, for inference.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};

use crate::{AmpError, Error, Precision, local, region};

/// The model with its weights in half precision on their device, which halves the weights' memory. The
/// counterpart of PyTorch's `model.half()` and `model.bfloat16()`, for inference. The program still sees FP32
/// tensors, and reads FP32 data.
///
/// Weights are the FP32 parameters of two or more dimensions. Biases and the parameters of normalization
/// layers (modules whose name contains `Norm`) stay FP32, and parameters of any other dtype are unchanged.
/// Linear layers, convolutions and attention return the same results as before, since they round their
/// weights anyway, except in a region in FP32, where the weights were not rounded before, and except a linear layer
/// with `LinearLayout::Col`, whose sum with the bias becomes half. An embedding returns
/// rounded rows in half: what a transformer adds to them is then half, too, as is the sum of a half tensor and a
/// table of positions or an attention's bias. The memory is free once nothing else, such as a clone
/// of the model, holds the FP32 weights. Call this function after a record is loaded: loading replaces the
/// weights by FP32. A record of the model has the rounded values. Do not train the model: updates of half
/// weights are rounded away.
///
/// Behind a server, this needs burn-amp-server or [`AmpServer`](crate::AmpServer). Any other server, or a
/// device that cannot store the precision, keeps FP32.
///
/// # Errors
///
/// - [`Error::Amp`] with [`AmpError::NotHalf`] when the precision is neither f16 nor bf16, or with
///   [`AmpError::WeightOverflow`] when a finite weight is beyond the range of the precision. One number is
///   read back for each weight.
/// - [`Error::HalfWeights`] when a weight is on a device that this crate did not create, on a device in
///   another precision, or on a device with autodiff. The precision of a server is not checked.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn_amp_device::burn;
/// use burn::{nn::LinearConfig, tensor::Tensor};
/// use burn_amp_device::{Precision, flex, half_weights};
///
/// let device = flex(Precision::Bf16)?;
/// let model = LinearConfig::new(64, 64).init(&device);
/// let input = Tensor::<2>::ones([1, 64], &device);
/// let expected = model.forward(input.clone()).into_data();
///
/// let model = half_weights(model, Precision::Bf16)?;
/// assert_eq!(model.forward(input).into_data(), expected);
/// # }
/// # Ok::<(), burn_amp_device::Error>(())
/// ```
pub fn half_weights<M: Module>(model: M, precision: Precision) -> Result<M, Error> {
    if !precision.is_half() {
        return Err(AmpError::NotHalf { precision }.into());
    }
    let mut weights = Weights {
        precision,
        path: Vec::new(),
        error: None,
    };
    let model = model.map(&mut weights);
    match weights.error {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Weights {
    precision: Precision,
    /// The names of the fields, and of the modules that contain them.
    path: Vec<(String, String)>,
    error: Option<Error>,
}

impl Weights {
    fn is_of_a_norm(&self) -> bool {
        let module = self.path.last().map(|(_, module)| module.as_str());
        module.is_some_and(|module| module.contains("Norm"))
    }

    fn parameter(&self) -> String {
        let names: Vec<_> = self.path.iter().map(|(name, _)| name.as_str()).collect();
        names.join(".")
    }

    /// Checks that the device of a weight computes in this precision, and that no finite value is beyond its
    /// range. Infinities are allowed.
    fn check<const D: usize>(&self, weight: &Tensor<D>) -> Result<(), Error> {
        let device = weight.device();
        if !holds_half(&device, self.precision) {
            return Err(Error::HalfWeights {
                parameter: self.parameter(),
                device: local::described(&device),
                precision: self.precision,
            });
        }
        // Infinities in a weight are allowed.
        let infinite = weight.clone().abs().equal_scalar(f32::INFINITY);
        let finite = weight.clone().abs().mask_fill(infinite, 0.0);
        let largest = finite.max().try_into_data().map_err(Error::Read)?;
        let value = largest.iter::<f32>().next().unwrap_or(0.0);
        if value > self.precision.largest() {
            let parameter = self.parameter();
            return Err(AmpError::WeightOverflow { parameter, value }.into());
        }
        Ok(())
    }
}

/// Whether a device is one of this crate in this precision. A device behind a server counts as one. In
/// another precision, each operation would round a weight twice.
fn holds_half(device: &Device, precision: Precision) -> bool {
    !device.is_autodiff()
        && match local::below(device) {
            Some((_, in_force)) => in_force.precision == precision,
            None => local::is_remote(device),
        }
}

impl ModuleMapper for Weights {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D < 2 || self.error.is_some() || self.is_of_a_norm() || param.val().dtype() != DType::F32
        {
            return param;
        }
        if let Err(error) = self.check(&param.val()) {
            self.error = Some(error);
            return param;
        }
        let precision = self.precision;
        param.map(|weight| region::in_half(weight, precision))
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push((name.into(), container_type.into()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}
