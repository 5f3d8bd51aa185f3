//! What happened in a step, with the module's parameter names.

use burn_core::module::{AutodiffModule, ModuleVisitor, Param};
use burn_core::tensor::Tensor;
use burn_core::tensor::backend::AutodiffBackend;

use crate::autodiff::tape;
use crate::{GradScaler, LastStep};

impl GradScaler {
    /// The last step, with its parameters named after the trained module; `None` before the first
    /// step. Call it before the module takes its next step. For training loops on `AmpAutodiff`
    /// that call `backward()` themselves. The explicit protocol, a trainer and an
    /// [`AmpOptimizer`](crate::AmpOptimizer) already name the parameters.
    ///
    /// ```
    /// # use burn::{backend::Flex, nn::LinearConfig, tensor::Tensor};
    /// # use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};
    /// # type B = AmpAutodiff<Flex>;
    /// # let device = Default::default();
    /// # let scaler = GradScaler::new(LossScaleConfig::default())?;
    /// # let model = LinearConfig::new(4, 2).init::<B>(&device);
    /// # let input = Tensor::<B, 2>::ones([8, 4], &device) * 1e30;
    /// # let grads = with_precision(Precision::F16, || scaler.scope(|| {
    /// let grads = model.forward(input).mean().backward();
    /// # grads }));
    /// # assert!(model.weight.grad(&grads).is_none());
    /// if let Some(step) = scaler.explain(&model).filter(|step| !step.stepped()) {
    ///     println!("not finite: {}", step.parameters.join(", "));
    ///     # assert!(step.parameters.contains(&"weight".to_string()));
    /// }
    /// # Ok::<(), burn_amp::AmpError>(())
    /// ```
    pub fn explain<B: AutodiffBackend, M: AutodiffModule<B>>(
        &self,
        module: &M,
    ) -> Option<LastStep> {
        self.explained(&nodes::<B, M>(module))
    }
}

/// The tape nodes of a module's parameters with their paths, in module order. Empty if the backend
/// is not an `AmpAutodiff`.
pub(crate) fn nodes<B: AutodiffBackend, M: AutodiffModule<B>>(module: &M) -> Vec<(u64, String)> {
    let mut nodes = Nodes::default();
    module.visit(&mut nodes);
    nodes.found
}

#[derive(Default)]
struct Nodes {
    path: Vec<String>,
    found: Vec<(u64, String)>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Nodes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let device = tensor.device();
        if let Some(node) = tape::id::<B, _>(&tensor.into_primitive().tensor(), &device) {
            self.found.push((node, self.path.join(".")));
        }
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}
