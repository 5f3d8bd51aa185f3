//! What kind of backend a device is of.

use std::any::TypeId;

use burn_amp_core::Registry;
use burn_backend::{Backend, DeviceOps};

use super::DeviceKey;

/// What the name of a backend tells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BackendKind {
    /// Whether the backend joins operations into few kernels, with Burn's fusion.
    pub is_fused: bool,
    /// Whether the backend is one of CubeCL's, or one on another machine, which may be.
    pub may_be_cubecl: bool,
    pub is_libtorch: bool,
}

/// A backend is asked for its name once a device: the name is a new text each time. Backends with and without
/// fusion share their devices.
static KINDS: Registry<(TypeId, DeviceKey), BackendKind> = Registry::new();

impl BackendKind {
    pub(crate) fn of<B: Backend>(device: &B::Device) -> Self {
        let key = (TypeId::of::<B>(), super::key::<B>(device));
        let kind = KINDS.get_or_add(key, || {
            let name = B::name(device.inner());
            Self {
                is_fused: name.contains("fusion<"),
                may_be_cubecl: name.contains("cubecl<") || name.contains("remote-"),
                is_libtorch: super::bare(&name).starts_with("libtorch"),
            }
        });
        #[cfg(test)]
        if AS_FUSED.get() {
            return Self {
                is_fused: true,
                ..*kind
            };
        }
        *kind
    }
}

/// Whether the backend joins operations into few kernels, with Burn's fusion.
pub(crate) fn is_fused<B: Backend>(device: &B::Device) -> bool {
    BackendKind::of::<B>(device).is_fused
}

#[cfg(test)]
thread_local! {
    static AS_FUSED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs `f` as on a backend that joins operations.
#[cfg(test)]
pub(crate) fn as_fused<T>(f: impl FnOnce() -> T) -> T {
    AS_FUSED.set(true);
    let out = f();
    AS_FUSED.set(false);
    out
}
