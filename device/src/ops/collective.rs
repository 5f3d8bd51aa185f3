//! Burn's collective operations between devices, from Burn 0.23 on. They go to the backend. A backend without
//! collectives of its own uses Burn's default, which transfers and adds.

use burn_amp_core::policy::{HalfSupport, TensorFlags};
use burn_backend::distributed::ReduceOperation;
use burn_backend::ops::CollectiveOps;
use burn_backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorMetadata};

use super::delegate;
use crate::device::{DeviceState, Session};
use crate::{Amp, AmpTensor};

impl<B: Backend, P: Session> CollectiveOps<Self> for Amp<B, P> {
    fn float_all_reduce(
        tensors: Vec<FloatTensor<Self>>,
        op: ReduceOperation,
    ) -> Vec<FloatTensor<Self>> {
        let reduced = B::float_all_reduce(as_declared(tensors, "float_all_reduce"), op);
        reduced.into_iter().map(AmpTensor::plain).collect()
    }

    fn float_reduce_scatter(
        tensors: Vec<FloatTensor<Self>>,
        dim: usize,
        op: ReduceOperation,
    ) -> Vec<FloatTensor<Self>> {
        let tensors = as_declared(tensors, "float_reduce_scatter");
        let reduced = B::float_reduce_scatter(tensors, dim, op);
        reduced.into_iter().map(AmpTensor::plain).collect()
    }

    fn float_all_gather(tensors: Vec<FloatTensor<Self>>, dim: usize) -> Vec<FloatTensor<Self>> {
        moved(tensors, "float_all_gather", |tensors| {
            B::float_all_gather(tensors, dim)
        })
    }

    fn float_all_to_all(
        tensors: Vec<FloatTensor<Self>>,
        split_dim: usize,
        concat_dim: usize,
    ) -> Vec<FloatTensor<Self>> {
        moved(tensors, "float_all_to_all", |tensors| {
            B::float_all_to_all(tensors, split_dim, concat_dim)
        })
    }

    /// A device may not support the half dtype of a tensor from another device.
    fn float_broadcast(
        tensor: FloatTensor<Self>,
        devices: &[Device<Self>],
    ) -> Vec<FloatTensor<Self>> {
        let dtype = tensor.dtype();
        let has_it = |device| DeviceState::of::<B>(device).support::<B>(device).of(dtype);
        let tensor = if devices.iter().all(|to| has_it(to) != HalfSupport::None) {
            tensor
        } else {
            tensor.into_declared("float_broadcast")
        };
        let like = tensor.clone();
        let sent = B::float_broadcast(tensor.into_primitive(), devices);
        let sent = sent.into_iter();
        sent.map(|tensor| like.clone().moved(|_| tensor)).collect()
    }

    delegate! {
        fn int_all_reduce(tensors: Vec<IntTensor<Self>>, op: ReduceOperation) -> Vec<IntTensor<Self>>;
        fn int_all_gather(tensors: Vec<IntTensor<Self>>, dim: usize) -> Vec<IntTensor<Self>>;
        fn int_reduce_scatter(tensors: Vec<IntTensor<Self>>, dim: usize, op: ReduceOperation) -> Vec<IntTensor<Self>>;
        fn int_all_to_all(tensors: Vec<IntTensor<Self>>, split_dim: usize, concat_dim: usize) -> Vec<IntTensor<Self>>;
        fn int_broadcast(tensor: IntTensor<Self>, devices: &[Device<Self>]) -> Vec<IntTensor<Self>>;
        fn bool_all_gather(tensors: Vec<BoolTensor<Self>>, dim: usize) -> Vec<BoolTensor<Self>>;
        fn bool_all_to_all(tensors: Vec<BoolTensor<Self>>, split_dim: usize, concat_dim: usize) -> Vec<BoolTensor<Self>>;
        fn bool_broadcast(tensor: BoolTensor<Self>, devices: &[Device<Self>]) -> Vec<BoolTensor<Self>>;
    }
}

/// Replicas may hold the same tensor in different dtypes: all of them reduce it in the dtype of
/// the client, where a sum over many devices is as exact as without mixed precision.
fn as_declared<B: Backend>(tensors: Vec<AmpTensor<B>>, op: &'static str) -> Vec<FloatTensor<B>> {
    let tensors = tensors.into_iter();
    tensors
        .map(|tensor| tensor.into_declared(op).into_primitive())
        .collect()
}

/// Moves tensors of one dtype unchanged. Tensors of different dtypes only share the client's dtype.
fn moved<B: Backend>(
    tensors: Vec<AmpTensor<B>>,
    op: &'static str,
    run: impl FnOnce(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>,
) -> Vec<AmpTensor<B>> {
    let Some(first) = tensors.first() else {
        return Vec::new();
    };
    let state = |tensor: &AmpTensor<B>| (tensor.dtype(), tensor.flags(), tensor.operand().terms);
    let (declared, first) = (first.declared(), state(first));
    let (tensors, flags, terms) = if tensors.iter().all(|tensor| state(tensor) == first) {
        let primitives = tensors.into_iter().map(AmpTensor::into_primitive);
        (primitives.collect(), first.1, first.2)
    } else {
        (as_declared(tensors, op), TensorFlags::empty(), 1)
    };
    let moved = run(tensors).into_iter();
    moved
        .map(|tensor| AmpTensor::new(tensor, declared, flags).with_terms(terms))
        .collect()
}
