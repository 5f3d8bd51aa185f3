//! Devices of this process on Burn 0.23: each is a group of one device, which can have a backend of any
//! crate. Operations run on the thread that calls them.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use burn_amp_core::Chosen;
use burn_backend::get_device_settings;
use burn_dispatch::{Dispatch, DispatchDevice};
use burn_group::{GroupDevice, GroupError, MemberDevice};
use burn_ir::BackendIr;

use super::chosen;
use crate::device::{Bf16, F16};
use crate::{Amp, Error, Precision};

/// A device of this process that computes in mixed precision.
pub(super) struct Local {
    pub(super) on: Device,
    pub(super) in_force: Chosen,
    pub(super) device: Device,
}

/// Process-wide, since all threads get the same device for one Burn device and precision, and a group lasts
/// as long as the process.
pub(super) static LOCAL: Mutex<Vec<Local>> = Mutex::new(Vec::new());

/// One of Burn's devices, computing in `precision`.
///
/// In a training loop of your own, give the device to the data loader with
/// `DataLoaderBuilder::set_device`, and `device.inner()` to the loader for validation with `model.valid()`.
/// Without it a loader uses `Device::default()`, which is another device, and the first forward pass panics
/// (Burn 0.22: "input tensor 'weight' is on the wrong backend"; Burn 0.23: "The provided tensors are not on
/// the same device"). A `Learner` moves its loaders. In f16, scale the loss with
/// [`GradScaler::of`](crate::GradScaler::of).
///
/// A second call with the same device and precision returns the same device: each device lasts as long as the
/// process. The result has autodiff if `device` has autodiff. Operations run on the thread that calls them,
/// one at a time for each device. An operation that panics does so on that thread, and leaves the device and
/// its other tensors unchanged.
///
/// # Errors
///
/// - [`Error::Amp`] when the device does not compute in `precision`.
/// - [`Error::UnsupportedDevice`] when the device is not one of Flex or CubeCL.
/// - [`Error::Group`] when Burn cannot make a group of the device.
pub fn mixed_precision(device: Device, precision: Precision) -> Result<Device, Error> {
    let on = device.clone().without_autodiff();
    let local: Result<Device, Error> = on_backend!(on, local(&on, precision))?;
    Ok(local?.with_autodiff_context_from(&device))
}

/// The one device of this process for a Burn device and a precision.
fn local<B: BackendIr>(
    below: &B::Device,
    on: &Device,
    precision: Precision,
) -> Result<Device, Error> {
    let in_force = chosen::<B>(below, precision)?;
    // A panic leaves the list as it was.
    let mut list = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
    let known = |local: &&Local| local.on == *on && local.in_force.precision == in_force.precision;
    if let Some(local) = list.iter().find(known) {
        return Ok(local.device.clone());
    }
    let group = match in_force.precision {
        Precision::F16 => group::<Amp<B, F16>>(below, on),
        Precision::Bf16 => group::<Amp<B, Bf16>>(below, on),
        // In FP32 every operation goes to the backend unchanged.
        Precision::F32 | Precision::Auto => group::<B>(below, on),
    };
    let device = Device::new(DispatchDevice::from(group?));
    list.push(Local {
        on: on.clone(),
        in_force,
        device: device.clone(),
    });
    Ok(device)
}

/// A group with the default dtypes and the quantization settings of the device below.
fn group<B: BackendIr>(below: &B::Device, on: &Device) -> Result<GroupDevice, GroupError> {
    GroupDevice::with_member_settings::<B>(&[MemberDevice {
        device: below.clone(),
        settings: get_device_settings::<Dispatch>(on.as_dispatch()),
    }])
}
