//! A gradient has the dtype of the tensor that it belongs to, as in PyTorch: an operation on a half
//! tensor returns a half gradient. Otherwise all operations before it would compute in FP32.

use std::cell::RefCell;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, unary};
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_amp::policy::Class;
use burn_backend::TensorMetadata;

use crate::harness::{Amp, Inference, half_of, run_probed};

thread_local! {
    /// The dtypes of the gradients that arrived at probes. A pass runs on the calling thread.
    static ARRIVED: RefCell<Vec<DType>> = const { RefCell::new(Vec::new()) };
}

/// The identity, which records the dtype of its gradient.
#[derive(Debug)]
struct Probe;

impl Backward<Inference, 1> for Probe {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        unary::<Inference, _>(ops.parents, ops.node, grads, |grad| {
            ARRIVED.with_borrow_mut(|arrived| arrived.push(grad.dtype()));
            grad
        });
    }
}

fn probed(x: Tensor<Amp, 1>) -> Tensor<Amp, 1> {
    let x = x.into_primitive().tensor();
    let [x] = Amp::custom_op("probe", Class::Move, [x], |[x]| {
        let step = Probe.prepare::<NoCheckpointing>([x.node.clone()]);
        [step.compute_bound().stateless(x.primitive)]
    });
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

#[test]
fn a_half_tensor_has_a_half_gradient() {
    let mut arrived = 0;
    let mut wrong = Vec::new();
    for case in crate::cases() {
        for precision in case.inputs.precisions.clone() {
            ARRIVED.take();
            run_probed(&case, precision, probed);
            let dtypes = ARRIVED.take();
            arrived += dtypes.len();
            if dtypes.iter().any(|dtype| *dtype != half_of(precision)) {
                wrong.push(format!("{} in {precision}: {dtypes:?}", case.rows));
            }
        }
    }
    assert!(arrived > 200, "{arrived} gradients");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
