//! Operations in FP32 in a process that uses half precision elsewhere.

use burn_backend::Backend;

use crate::AmpTensor;
use crate::device::DeviceState;
use crate::diagnostics::compare;
use crate::policy::{Effect, Mode, Op, fp32_alone};
use crate::precision::{creates_parameter, keeps_dtypes, region};
use crate::tensor::{Side, TensorFlags};

/// The flags of the result, where an operation on these tensors is the backend's own: no function of the backward pass,
/// on FP32 without a trace of half, on a device or in a region that computes in FP32 and watches nothing. The policy
/// decides nothing there, and is not asked.
#[inline]
pub(crate) fn alone<B: Backend, S: Side<B>, const N: usize>(
    op: Op,
    tensors: [&AmpTensor<B, S>; N],
) -> Option<TensorFlags> {
    // A workaround makes such views.
    if op.is_backward() || op.effect == Effect::Transposes || compare::is_on::<B, S>() {
        return None;
    }
    let any: TensorFlags = tensors.iter().map(|tensor| tensor.flags).collect();
    let keeps = any.contains(TensorFlags::GRADIENT) || keeps_dtypes() || creates_parameter();
    let mode = match keeps {
        // Recorded, the layer below has to be told.
        true if S::RECORDS => return None,
        true => Mode::KeepDtypes,
        false => Mode::Off,
    };
    let flags = fp32_alone(any, mode)?;
    let are_fp32 = tensors.iter().all(|tensor| tensor.is_fp32());
    let state = || DeviceState::of::<B>(&tensors[0].device());
    (are_fp32 && state().computes_fp32(region())).then_some(flags)
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn_backend::{FloatDType, Shape};

    use super::*;
    use crate::call::{Call, op};
    use crate::precision::{creating_parameter, keep_dtypes, with_precision};
    use crate::scaler::ScaledLoss;
    use crate::tensor::{Above, Below};
    use crate::{Amp, GradScaler, Precision, full_precision, policy};

    fn tensor<B: Backend, S: Side<B>>(dtype: FloatDType, flags: TensorFlags) -> AmpTensor<B, S> {
        let ones = B::float_ones(Shape::new([2]), &B::Device::default(), dtype);
        AmpTensor::new(ones, flags)
    }

    /// The flags by `alone`, which are those of the decision, if any.
    fn flags<B: Backend, S: Side<B>>(op: Op, tensor: &AmpTensor<B, S>) -> Option<TensorFlags> {
        let decision = Call::new(op, [tensor]).decision;
        let flags = alone(op, [tensor]);
        if let Some(flags) = flags {
            let casts = (decision.rounded, decision.operands, decision.result);
            assert_eq!(casts, (None, None, None), "{}", op.name);
            assert_eq!((decision.flags, decision.terms), (flags, 1), "{}", op.name);
            assert!(S::RECORDS || !decision.keeps_dtypes);
            assert!(decision.records_in.is_none() && !decision.is_of_data);
        }
        flags
    }

    fn flags_are_those_of_the_decision<B: Backend, S: Side<B>>() {
        // The process uses half, and the device computes in FP32.
        with_precision(Precision::Bf16, || ());
        use TensorFlags as Flags;
        let of = |flags| tensor::<B, S>(FloatDType::F32, flags);
        for op in policy::rows().map(|row| Op::named(row.op)) {
            if op.is_backward() || op.effect == Effect::Transposes {
                assert_eq!(flags(op, &of(Flags::empty())), None);
                continue;
            }
            for tensor in [
                Flags::empty(),
                Flags::LEARNED,
                Flags::DEMOTED | Flags::FROM_F16,
                Flags::UNBOUNDED,
            ]
            .map(of)
            {
                assert!(flags(op, &tensor).is_some(), "{} of {tensor:?}", op.name);
                assert!(full_precision(|| flags(op, &tensor)).is_some());
                assert_eq!(with_precision(Precision::Auto, || flags(op, &tensor)), None);
                // Kernels keep their dtypes anyway; recorded, the layer below has to be told.
                assert_eq!(keep_dtypes(|| flags(op, &tensor)).is_none(), S::RECORDS);
                assert_eq!(
                    creating_parameter(|| flags(op, &tensor)).is_none(),
                    S::RECORDS
                );
            }
            assert_eq!(flags(op, &of(Flags::GRADIENT)).is_none(), S::RECORDS);
            for trace in [
                Flags::FITS_F16,
                Flags::CONSTANT,
                Flags::BINARY,
                Flags::EXACT_BF16,
            ] {
                assert_eq!(flags(op, &of(trace)), None);
            }
        }
        let exp = op!(float_exp);
        let bf16 = || with_precision(Precision::Bf16, || flags(exp, &of(Flags::empty())));
        assert_eq!(bf16(), None);
        assert_eq!(
            flags(exp, &tensor::<B, S>(FloatDType::BF16, Flags::DEMOTED)),
            None
        );
        assert_eq!(flags(exp, &of(Flags::GRADIENT).divided_later(2.0)), None);
        let scaled = ScaledLoss {
            scaler: GradScaler::default(),
            scale: 2.0,
        };
        assert_eq!(
            flags(exp, &of(Flags::empty()).with_scaled(Some(scaled))),
            None
        );
    }

    #[test]
    fn kernels_have_the_flags_of_the_decision() {
        flags_are_those_of_the_decision::<Flex, Below>();
    }

    #[test]
    fn recorded_operations_have_the_flags_of_the_decision() {
        flags_are_those_of_the_decision::<Autodiff<Amp<Flex>>, Above>();
    }
}
