//! What became of a step, in the words of a module.

use burn_core::module::{AutodiffModule, ModuleVisitor, Param};
use burn_core::tensor::Tensor;
use burn_core::tensor::backend::AutodiffBackend;

use crate::autodiff::tape;
use crate::{GradScaler, LastStep};

impl GradScaler {
    /// The last step, with its parameters named by the module that was trained: before the next
    /// step is taken with it. `None` before the first. For a training loop on `AmpAutodiff` that
    /// calls `backward()` itself; by the explicit protocol, a trainer and an
    /// [`AmpOptimizer`](crate::AmpOptimizer) they are named anyway.
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

/// The nodes of a module's parameters on the tape, with their paths, in its order. None where the
/// backend is no `AmpAutodiff`.
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
