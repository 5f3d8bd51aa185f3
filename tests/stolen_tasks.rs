//! A thread that waits for a kernel may run any other task meanwhile: rayon's threads steal tasks.
//! Regions, scopes and the marks of a backward pass must not apply to that task.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Flex;
use burn::tensor::{DType, Tensor};
use burn_amp::policy::Class;
use burn_amp::{Amp, AmpAutodiff, AmpConfig, Precision, full_precision, with_precision};
use rayon::prelude::*;

use common::mlp::scaler;

type B = AmpAutodiff<Flex>;

fn configured() {
    let config = AmpConfig::new().with_precision(Precision::Bf16);
    config.apply::<B>(&Default::default()).unwrap();
}

/// Runs a task in a kernel, as a thread does that steals the task while it waits.
fn in_a_kernel(task: impl FnOnce()) {
    let x = Tensor::<Amp<Flex>, 1>::ones([1], &Default::default());
    let x = x.into_primitive().tensor();
    Amp::<Flex>::custom_op("kernel", Class::Fp32, [x], |operands| {
        task();
        operands
    });
}

fn product() -> Tensor<B, 2> {
    let ones = || Tensor::<B, 2>::ones([4, 4], &Default::default());
    ones().require_grad().matmul(ones())
}

#[test]
fn a_stolen_task_is_outside_the_region_and_the_scope() {
    configured();
    let outer = scaler(8.0);
    outer.scope(|| {
        full_precision(|| {
            in_a_kernel(|| {
                assert_eq!(product().dtype(), DType::BF16);
                // The device's own scaler: that of a device in bf16 scales nothing.
                with_precision(Precision::F16, || product().sum().backward());
                let inner = scaler(4.0);
                inner.scope(|| with_precision(Precision::F16, || product().sum().backward()));
                assert_eq!(inner.taken_steps(), 1);
            });
            let panicked = catch_unwind(AssertUnwindSafe(|| in_a_kernel(|| panic!("in a kernel"))));
            assert!(panicked.is_err());
            assert_eq!(product().dtype(), DType::F32);
        });
        with_precision(Precision::F16, || product().sum().backward());
    });
    assert_eq!(outer.taken_steps(), 1);
}

/// Products on all threads of the pool that Flex's kernels use too. No backward passes: Burn's autodiff
/// holds the lock of a graph while it runs the graph's kernels, and then locks every graph, so a thread
/// that steals a backward pass within its own waits for itself, in plain Burn as well.
#[test]
fn every_task_of_a_pool_computes_in_the_precision_of_the_device() {
    configured();
    rayon::ThreadPoolBuilder::new()
        .num_threads(8)
        .build_global()
        .expect("the only pool of this program");
    let dtypes: Vec<_> = (0..256)
        .into_par_iter()
        .map(|_| {
            let ones = || Tensor::<B, 2>::ones([256, 256], &Default::default());
            ones().require_grad().matmul(ones()).dtype()
        })
        .collect();
    let others: Vec<_> = dtypes
        .iter()
        .filter(|dtype| **dtype != DType::BF16)
        .collect();
    assert_eq!(others.len(), 0, "of {}: {others:?}", dtypes.len());
}
