//! Tensors that are created, and not computed.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, DeviceOps, FloatDType, TensorMetadata};

use crate::AmpTensor;
use crate::device::{DeviceContext, is_of_policy, put_in_use};
use crate::policy::{HalfSupport, Mode, Support, is_half};
use crate::precision::{half_wanted, in_kernel, keep_dtypes, keeps_dtypes};
use crate::tensor::{Side, TensorFlags, converted};

/// Puts a device in use for a layer on `B`. Returns the device's half support.
///
/// # Panics
///
/// If the backend has autodiff that is not burn-amp's.
pub(crate) fn in_use<B: Backend, S: Side<B>>(device: &B::Device) -> Support {
    assert_one_autodiff::<B, S>(device.inner());
    put_in_use::<B>(device)
}

/// # Panics
///
/// If the backend has autodiff that is not burn-amp's.
pub(crate) fn assert_one_autodiff<B: Backend, S: Side<B>>(device: &B::Device) {
    assert!(
        S::RECORDS || !B::ad_enabled(device),
        "burn-amp: AmpAutodiff adds autodiff, but its backend {} has autodiff already. Use the backend \
         without autodiff: AmpAutodiff<Flex>, and not AmpAutodiff<Autodiff<Flex>> or Amp<Autodiff<Amp<Flex>>>",
        B::name(device)
    );
}

/// Creates a tensor in the requested dtype, on the device without its own autodiff. If the device
/// only stores that dtype and multiplies matrices in it, the tensor is created in FP32 and cast.
pub(crate) fn create<B: Backend, S: Side<B>>(
    device: &B::Device,
    dtype: FloatDType,
    make: impl FnOnce(&B::Device, FloatDType) -> FloatTensor<B>,
) -> AmpTensor<B, S> {
    let device = device.inner();
    let support = in_use::<B, S>(device);
    let (dtype, flags) = of_program::<B>(device, dtype);
    let asked = DType::from(dtype);
    let only_stored = is_half(asked) && support.of(asked) == HalfSupport::Contractions;
    let made = if only_stored {
        converted::<B, S>(below::<B, S, _>(|| make(device, FloatDType::F32)), asked)
    } else {
        below::<B, S, _>(|| make(device, dtype))
    };
    AmpTensor::created(made).and(flags)
}

/// Creates a tensor below this layer. What the program asked for is decided here: a layer below autodiff creates what it
/// is told.
pub(crate) fn below<B: Backend, S: Side<B>, T>(create: impl FnOnce() -> T) -> T {
    in_kernel(|| match S::RECORDS {
        true => keep_dtypes(create),
        false => create(),
    })
}

/// The dtype of a tensor that a program asks for in `dtype`, and its flags. What is asked for in the policy's half dtype
/// is the policy's, as `x.zeros_like()` of a tensor that the policy made half: it is FP32 where the policy is off, and
/// its data is FP32.
pub(crate) fn of_program<B: Backend>(
    device: &B::Device,
    dtype: FloatDType,
) -> (FloatDType, TensorFlags) {
    let half = DType::from(dtype);
    // A formula of autodiff's asks for the dtype of a gradient.
    if !is_half(half) || !half_wanted() || keeps_dtypes() || !is_of_policy::<B>(device, half) {
        return (dtype, TensorFlags::empty());
    }
    match DeviceContext::of::<B>(device).mode {
        Mode::Off => (FloatDType::F32, TensorFlags::DEMOTED),
        Mode::On(_) | Mode::KeepDtypes => (dtype, TensorFlags::DEMOTED),
    }
}

/// Flags an FP32 tensor of one value that fits in both half dtypes: it follows half operands.
pub(crate) fn constant<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    match tensor.dtype() {
        DType::F32 => tensor.and(TensorFlags::CONSTANT),
        _ => tensor,
    }
}

/// Flags FP32 zeros, with which the state of a recurrence may begin; or infinities, which are the zeros of a recurrence of
/// logarithms.
pub(crate) fn zeros<B: Backend, S: Side<B>>(tensor: AmpTensor<B, S>) -> AmpTensor<B, S> {
    match tensor.dtype() {
        DType::F32 => constant(tensor).and(TensorFlags::STATE),
        _ => tensor,
    }
}
