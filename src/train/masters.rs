//! FP32 master weights of a model that was loaded in half before its precision was chosen.

use burn_core::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{DType, Tensor};

/// The model with its trained parameters in FP32, where the policy is on. Frozen parameters stay half.
pub(super) fn with_masters<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> M {
    model.map(&mut Masters)
}

/// Whether the model has trained parameters in half.
pub(super) fn is_half<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> bool {
    let mut found = Found(false);
    model.visit(&mut found);
    found.0
}

struct Masters;
struct Found(bool);

/// Whether a parameter is trained in half. Reading a lazy parameter would initialize it out of its turn.
fn is_trained_in_half<B: AutodiffBackend, const D: usize>(param: &Param<Tensor<B, D>>) -> bool {
    param.is_initialized()
        && param.is_require_grad()
        && matches!(param.val().dtype(), DType::F16 | DType::BF16)
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Found {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0 |= is_trained_in_half(param);
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Masters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if is_trained_in_half(&param) {
            // An `AmpAutodiff` gives an optimizer's tensor in FP32.
            param.map(|tensor| Tensor::from_inner(tensor.inner()).require_grad())
        } else {
            param
        }
    }
}
