//! Values and gradients in half precision are right, not only finite: every differentiable
//! operation against FP64, long sums, masks and epsilons, and the dtypes that users see.

#[path = "../common/mod.rs"]
mod common;

mod dtypes;
mod elementwise;
mod gradients;
mod harness;
mod modules;
mod shapes;
mod sums;
mod survival;

use std::collections::BTreeSet;

use burn_amp::policy;

use harness::Case;

/// Rows of the policy that no case can name, and why.
const ELSEWHERE: &[(&str, &[&str])] = &[
    (
        "takes no float tensor and is no part of a graph, see dtypes",
        &[
            "float_from_data",
            "float_zeros",
            "float_ones",
            "float_full",
            "float_empty",
            "float_random",
        ],
    ),
    (
        "gives no tensor, see dtypes",
        &[
            "float_into_data",
            "tr_execute",
            "float_device",
            "float_is_require_grad",
            "float_set_require_grad",
        ],
    ),
    (
        "not implemented in Burn's autodiff",
        &["rfft", "irfft", "float_topk"],
    ),
    ("not implemented in Flex", &["float_argtopk"]),
    (
        "only where the backend has a CTC backward of its own, which Flex has not",
        &["ctc_loss_backward"],
    ),
    (
        "quantized tensors have no gradient",
        &["quantize", "quantize_dynamic", "dequantize", "q_matmul"],
    ),
];

fn cases() -> Vec<Case> {
    [elementwise::cases(), shapes::cases(), modules::cases()]
        .into_iter()
        .flatten()
        .collect()
}

#[test]
fn every_row_of_the_policy_has_a_case_or_a_reason() {
    let table: BTreeSet<&str> = policy::rows().map(|row| row.op).collect();
    let cases = cases();
    let covered: BTreeSet<&str> = cases.iter().flat_map(Case::rows).collect();
    let excused: BTreeSet<&str> = ELSEWHERE
        .iter()
        .flat_map(|(_, ops)| *ops)
        .copied()
        .collect();

    let named: BTreeSet<&str> = covered.union(&excused).copied().collect();
    let missing: Vec<_> = table.difference(&named).collect();
    let unknown: Vec<_> = named.difference(&table).collect();
    let twice: Vec<_> = covered.intersection(&excused).collect();
    assert!(missing.is_empty(), "rows without a case: {missing:?}");
    assert!(unknown.is_empty(), "cases for no row: {unknown:?}");
    assert!(twice.is_empty(), "excused, but covered: {twice:?}");
}
