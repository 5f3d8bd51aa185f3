//! The policy where Burn's own interpreter runs the operations that a client sends: the client
//! describes FP32 tensors, reads FP32, and moves tensors from one session to another.

include!("../src/burn.rs");

mod common;

use burn_amp_device::{AmpReport, Precision};
use burn_backend::{DType, Shape, TensorData, TensorMetadata, try_read_sync};
use burn_dispatch::{backends::Flex, devices::FlexDevice};
use burn_ir::{
    FloatOperationIr, HandleKind, MatmulOpIr, OperationIr, TensorId, TensorIr, TensorStatus,
    UnaryOpIr,
};
use burn_router::TensorInterpreter;
use common::{A, half, on};

/// A session of a client.
struct Session {
    interpreter: TensorInterpreter<A>,
    tensors: u64,
}

impl Session {
    fn new() -> Self {
        Self {
            interpreter: TensorInterpreter::new(FlexDevice),
            tensors: 0,
        }
    }

    /// A client's description of a square tensor: FP32, and another operation may still use it.
    fn describe(&mut self) -> TensorIr {
        self.tensors += 1;
        TensorIr {
            id: TensorId::new(self.tensors),
            shape: Shape::new([2, 2]),
            status: TensorStatus::ReadOnly,
            dtype: DType::F32,
        }
    }

    fn send(&mut self, values: [f32; 4]) -> TensorIr {
        let tensor = self.describe();
        let data = TensorData::new(values.to_vec(), [2, 2]);
        self.interpreter.register_tensor_data_id(tensor.id, data);
        tensor
    }

    fn run(&mut self, op: FloatOperationIr) {
        self.interpreter
            .register_op(OperationIr::Float(DType::F32, op));
    }

    fn matmul(&mut self, lhs: &TensorIr, rhs: &TensorIr) -> TensorIr {
        let out = self.describe();
        let [lhs, rhs] = [lhs.clone(), rhs.clone()];
        self.run(FloatOperationIr::Matmul(MatmulOpIr {
            lhs,
            rhs,
            out: out.clone(),
        }));
        out
    }

    fn exp(&mut self, input: &TensorIr) -> TensorIr {
        let out = self.describe();
        let input = input.clone();
        self.run(FloatOperationIr::Exp(UnaryOpIr {
            input,
            out: out.clone(),
        }));
        out
    }

    fn read(&mut self, tensor: &TensorIr) -> Vec<f32> {
        let data = try_read_sync(self.interpreter.read_tensor_async(tensor.clone()));
        data.expect("a CPU")
            .expect("values")
            .try_to_vec()
            .expect("FP32, as the client knows it")
    }

    fn real_dtype(&mut self, tensor: &TensorIr) -> DType {
        match self.interpreter.get_tensor(tensor) {
            HandleKind::Float(tensor) => tensor.dtype(),
            other => panic!("a {} tensor", other.name()),
        }
    }
}

#[test]
fn a_client_sees_fp32_whatever_the_session_computes_in() {
    for precision in [Precision::F16, Precision::Bf16] {
        let _alone = on(precision);
        let mut session = Session::new();
        let (x, weight) = (
            session.send([0.5, -1.0, 1.5, 2.0]),
            session.send([1.0, 0.0, 0.0, 1.0]),
        );
        let product = session.matmul(&x, &weight);
        assert_eq!(session.real_dtype(&product), half(precision));
        assert_eq!(session.read(&product), [0.5, -1.0, 1.5, 2.0]);
        let exp = session.exp(&product);
        assert_eq!(session.real_dtype(&exp), DType::F32);
        assert_eq!(session.read(&exp), [0.5f32, -1.0, 1.5, 2.0].map(f32::exp));
    }
}

#[test]
fn a_half_tensor_moves_to_another_session() {
    let _alone = on(Precision::Bf16);
    let (mut from, mut to) = (Session::new(), Session::new());
    let (x, weight) = (
        from.send([0.5, -1.0, 1.5, 2.0]),
        from.send([1.0, 0.0, 0.0, 1.0]),
    );
    let product = from.matmul(&x, &weight);
    let moved = to.describe();
    to.interpreter
        .register_tensor_to_device(moved.id, from.interpreter.get_tensor(&product));
    assert_eq!(to.real_dtype(&moved), DType::BF16);
    assert_eq!(to.read(&moved), [0.5, -1.0, 1.5, 2.0]);
}

#[test]
fn fp32_is_the_backends_own() {
    let _alone = on(Precision::F32);
    let mut session = Session::new();
    let x = session.send([0.1, -1.1, 1.3, 2.7]);
    let product = session.matmul(&x, &x);
    assert_eq!(session.real_dtype(&product), DType::F32);
    assert_eq!(AmpReport::of::<Flex>(&FlexDevice).casts.len(), 0);
}
