//! No operation is less exact than in PyTorch's autocast, nor is a loop of operations.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/on_backend.rs"]
mod on_backend;

use common::HALVES;
use common::mlp::{in_scope, scaler};
use on_backend::on_backend;

/// The operations on a backend.
macro_rules! operations_on {
    ($name:ident, $backend:ty) => {
        on_backend! { $name, $backend, use burn_amp::Precision; include!("operations.rs"); }
    };
}

operations_on!(plain, burn::backend::Autodiff<burn::backend::Flex>);
operations_on!(ours, burn_amp::AmpAutodiff<burn::backend::Flex>);

#[test]
fn no_operation_is_less_exact_than_in_autocast() {
    let mut wrong = Vec::new();
    for precision in HALVES {
        let half = precision.compute_dtype();
        for ((name, operation), (_, written)) in ours::OPERATIONS.into_iter().zip(plain::OPERATIONS)
        {
            let found = (0..24).map(|seed| {
                let of = |casts| plain::result(plain::Casts(casts), written, seed);
                let ours = || ours::result(ours::Casts(None), operation, seed);
                [of(None), of(half), in_scope(precision, &scaler(1.0), ours)]
            });
            wrong.extend(plain::less_exact(name, precision, found));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
