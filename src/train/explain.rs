//! What happened in a step, with the module's parameter names.

use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;

use super::gradients::for_each_parameter;
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
    let mut nodes = Vec::new();
    for_each_parameter::<B, M>(module, |_, path, value| {
        let tensor = value();
        let node = tape::id::<B, _>(&tensor, &B::float_device(&tensor));
        nodes.extend(node.map(|node| (node, path.join("."))));
    });
    nodes
}
