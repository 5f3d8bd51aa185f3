//! The decision, and what the tests of its parts share.

mod casts;
mod values;

use super::*;
use crate::dtype::tests::DType;
use crate::policy::HalfSupport;
use crate::policy::table::OPS;
use Class::{Activation, Fp32, Fp32Inside, Keep, LowerPrecision, Move, Promote, PromoteSum};
use DType::{BF16, F16, F32, F64};

pub(crate) const CLASSES: [Class; 8] = [
    LowerPrecision,
    Fp32,
    Fp32Inside,
    Promote,
    PromoteSum,
    Keep,
    Activation,
    Move,
];

/// A device with full half support and without trials.
#[derive(Clone, Copy)]
pub(crate) struct Here {
    pub(crate) mode: Mode<DType>,
    pub(crate) is_kernel: bool,
    pub(crate) support: Support,
    pub(crate) exact: Option<bool>,
    /// Of each operand, its elements and whether it is tracked.
    pub(crate) sizes: [(usize, Option<bool>); 2],
    /// The inner dimension of a product.
    pub(crate) inner: usize,
    pub(crate) data_in_half: bool,
    pub(crate) declared: Option<DType>,
    pub(crate) changed: Option<OpPrecision>,
}

pub(crate) const ON: Here = Here {
    mode: Mode::On(F16),
    is_kernel: false,
    support: Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Arithmetic,
    },
    exact: None,
    sizes: [(1, Some(false)); 2],
    inner: 8,
    data_in_half: true,
    declared: None,
    changed: None,
};

pub(crate) const BELOW: Here = Here {
    mode: Mode::KeepDtypes,
    is_kernel: true,
    ..ON
};

pub(crate) const OFF: Here = Here {
    mode: Mode::Off,
    ..ON
};

/// A device that only contracts in bf16.
pub(crate) const CONTRACTS: Here = Here {
    mode: Mode::On(BF16),
    support: Support {
        f16: HalfSupport::Arithmetic,
        bf16: HalfSupport::Contractions,
    },
    ..ON
};

impl Here {
    fn layer(&self) -> Layer<DType> {
        Layer {
            data_in_half: self.data_in_half,
            mode: self.mode,
            is_kernel: self.is_kernel,
            support: self.support,
            declared: self.declared,
            known: Known::default().with_configured(self.changed),
        }
    }
}

impl Site<DType> for Here {
    fn tried(&self, _: TriedOp, _: DType) -> Option<bool> {
        self.exact
    }

    fn elements(&self, operand: usize) -> usize {
        self.sizes[operand].0
    }

    fn inner_dimension(&self) -> usize {
        self.inner
    }

    fn is_tracked(&self, operand: usize) -> Option<bool> {
        self.sizes.get(operand).and_then(|size| size.1)
    }
}

pub(crate) fn decide(
    op: &Op,
    operands: &[Operand<DType>],
    scalars: &[f64],
    here: &Here,
) -> Decision<DType> {
    super::decide(op, operands, scalars, &here.layer(), here)
}

pub(crate) fn with(dtype: DType, flags: TensorFlags) -> Operand<DType> {
    Operand {
        dtype,
        flags,
        terms: 1,
    }
}

pub(crate) fn plain(dtypes: &[DType]) -> Vec<Operand<DType>> {
    let plain = |dtype: &DType| with(*dtype, TensorFlags::empty());
    dtypes.iter().map(plain).collect()
}

/// An operation of a class that no row names.
pub(crate) fn of(class: Class, operands: &[Operand<DType>], here: Here) -> Decision<DType> {
    decide(&Op::custom("", class, Role::Forward), operands, &[], &here)
}

/// The casts of operands and result.
pub(crate) fn casts(class: Class, dtypes: &[DType], here: Here) -> (Option<DType>, Option<DType>) {
    let decision = of(class, &plain(dtypes), here);
    (decision.operands, decision.result)
}

pub(crate) const NONE: (Option<DType>, Option<DType>) = (None, None);

pub(crate) fn named(
    name: &'static str,
    operands: &[Operand<DType>],
    here: Here,
) -> Decision<DType> {
    decide(&Op::named(name), operands, &[], &here)
}

#[test]
fn the_shortcut_for_fp32_is_what_the_rows_say() {
    let flags = [KEPT, TensorFlags::DEMOTED, TensorFlags::CONSTANT];
    let flags = flags.iter().flat_map(TensorFlags::iter);
    let flags: Vec<_> = flags.chain([TensorFlags::empty(), KEPT]).collect();
    let pairs = flags.iter().flat_map(|a| flags.iter().map(|b| (*a, *b)));
    let operands = pairs.flat_map(|(a, b)| {
        let one = [F32, F16, F64].map(|dtype| vec![with(dtype, a)]);
        let two = [F32, F16].map(|dtype| vec![with(F32, a), with(dtype, b)]);
        one.into_iter().chain(two)
    });
    let operands: Vec<_> = operands.collect();
    let mut shortcuts = 0;
    for op in OPS {
        for mode in [Mode::Off, Mode::KeepDtypes] {
            for (is_kernel, tracked, declared) in [
                (true, Some(false), None),
                (false, Some(true), None),
                (true, None, Some(F32)),
                (true, None, Some(F16)),
            ] {
                let here = Here {
                    mode,
                    is_kernel,
                    declared,
                    sizes: [(1024, tracked), (1, tracked)],
                    ..ON
                };
                let layer = here.layer();
                for operands in &operands {
                    for scalars in [&[][..], &[1e-9, 1e9]] {
                        let call = Request::of(op, operands, scalars, &layer, &here);
                        if call.is_fp32_alone() {
                            shortcuts += 1;
                            let what = (op.name, operands);
                            assert_eq!(call.alone(), call.by_row(), "{what:?}");
                        }
                    }
                }
            }
        }
    }
    assert!(shortcuts > 10_000, "{shortcuts}");
}
