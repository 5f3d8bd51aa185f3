//! A product or quotient in FP32.

use super::cast::operand_grad;
use super::sum::reduced;
use super::*;

/// The operations that keep their operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    Mul,
    Div,
}

/// A product or quotient in FP32 that keeps its operands in the dtypes `kept`.
#[derive(Debug, Clone)]
pub(crate) struct Arithmetic {
    pub op: Product,
    pub kept: [DType; 2],
    /// The dtype in which the quotient is kept instead of the dividend: the next operation may keep it too.
    pub kept_quotient: Option<DType>,
}

/// What both gradients need: shapes and dtypes of the operands, and those that are kept.
#[derive(Debug, Clone)]
pub(crate) struct Factors<B: Backend> {
    shapes: [Shape; 2],
    dtypes: [DType; 2],
    /// The first operand, or the quotient.
    lhs: Option<AmpTensor<B>>,
    is_quotient: bool,
    rhs: Option<AmpTensor<B>>,
}

impl<B: Backend> Step<B, 2> for Arithmetic {
    type Kept = Factors<B>;

    const CHECKPOINT: Checkpoint = Checkpoint::Burns;

    fn forward(&self, [lhs, rhs]: Operands<B, 2>) -> AmpTensor<B> {
        self.op.of(lhs, rhs)
    }

    fn keep(
        &self,
        operands: Operands<B, 2>,
        [lhs_tracked, rhs_tracked]: [bool; 2],
    ) -> (Self::Kept, AmpTensor<B>) {
        let shapes = operands.each_ref().map(|operand| operand.shape());
        let dtypes = operands.each_ref().map(|operand| operand.dtype());
        let [lhs, rhs] = operands;
        let out = self.op.of(lhs.clone(), rhs.clone());
        // Each gradient needs the other operand. A quotient needs `rhs` for both gradients. The
        // gradient of `rhs` also needs `lhs` or the quotient.
        let has_copy = |half| {
            lhs.shared_copy(half)
                .is_some_and(|copy| copy.get().is_some())
        };
        // Where an earlier operation keeps the rounded dividend, as in a norm of groups, nothing more is kept.
        let quotient = self.kept_quotient.filter(|half| !has_copy(*half));
        let lhs = rhs_tracked.then(|| match quotient {
            Some(dtype) => cast(out.clone(), dtype),
            None => cast(lhs, self.kept[0]),
        });
        let rhs = (lhs_tracked || self.op == Product::Div).then(|| cast(rhs, self.kept[1]));
        let kept = Factors {
            shapes,
            dtypes,
            lhs,
            is_quotient: quotient.is_some(),
            rhs,
        };
        (kept, out)
    }

    fn backward(self, ops: Ops<Self::Kept, 2>, grads: &mut Gradients) {
        let Factors {
            shapes: [left, right],
            dtypes: [lhs_dtype, rhs_dtype],
            lhs,
            is_quotient,
            rhs,
        } = ops.state;
        let divisor = rhs.clone();
        let kept = "kept where the other gradient is wanted";
        binary::<Amp<B>, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                operand_grad(grad, lhs_dtype, |grad| {
                    reduced(self.op.of(grad, rhs.expect(kept)), &left)
                })
            },
            |grad| {
                operand_grad(grad, rhs_dtype, |grad| {
                    let lhs = lhs.expect(kept);
                    if self.op == Product::Mul {
                        return reduced(mul(grad, lhs), &right);
                    }
                    let divisor = divisor.expect(kept);
                    match is_quotient {
                        // The quotient fits in half, so the product does not overflow: sum
                        // first, and divide the smaller tensor.
                        true => {
                            let grad = mul(grad, widened(lhs));
                            neg(div(reduced(grad, &right), divisor))
                        }
                        false => divisor_grad(grad, lhs, divisor, &right),
                    }
                })
            },
        );
    }
}

/// The gradient of a divisor: -lhs / rhs², ordered so that no square or product overflows.
pub(super) fn divisor_grad<B: Backend>(
    grad: AmpTensor<B>,
    lhs: AmpTensor<B>,
    rhs: AmpTensor<B>,
    shape: &Shape,
) -> AmpTensor<B> {
    let quotient = Product::Div.of(lhs, rhs.clone());
    let grad = Product::Div.of(grad, rhs);
    neg(reduced(mul(grad, quotient), shape))
}

impl Product {
    pub(super) fn of<B: Backend>(self, lhs: AmpTensor<B>, rhs: AmpTensor<B>) -> AmpTensor<B> {
        let lhs = widened(lhs);
        match self {
            Self::Mul => mul(lhs, rhs),
            Self::Div => div(lhs, rhs),
        }
    }
}
