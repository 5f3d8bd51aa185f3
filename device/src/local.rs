//! Devices of this process: each is served to this process alone, over the loopback interface.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::{LazyLock, Mutex, PoisonError};

use burn::remote::RemoteHost;
use burn::server::{TokenAuthorizer, WebSocketTransport};
use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use burn_dispatch::DispatchDevice;
#[cfg(feature = "cube")]
use burn_dispatch::backends::Cube;
#[cfg(feature = "flex")]
use burn_dispatch::backends::Flex;
use tokio::runtime::{Builder, Runtime};

use crate::device::InForce;
use crate::server::enter;
use crate::{AmpReport, AmpServer, Error, Precision};

/// A device of this process that computes in mixed precision.
struct Local {
    on: Device,
    in_force: InForce,
    device: Device,
}

static LOCAL: Mutex<Vec<Local>> = Mutex::new(Vec::new());

/// Runs the servers, until the process ends. It only moves bytes: each session computes on a thread
/// of its own.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("burn-amp-device")
        .enable_all()
        .build()
        .expect("the operating system gives a thread")
});

/// One of Burn's devices, computing in `precision`.
///
/// The device is served to this process, on a free port of the loopback interface and with a
/// random token: other machines cannot reach it, and other programs of this one do not get in. A
/// second call with the same device and precision gives the same device, unless an operation that
/// panicked has ended its session: then it gives a new one, without the old one's tensors. It keeps
/// the autodiff that `device` has.
///
/// # Errors
///
/// - [`Error::Amp`] when the device does not compute in `precision`.
/// - [`Error::UnsupportedDevice`] when it is not a device of Flex or CubeCL.
/// - [`Error::Token`], [`Error::Listen`] and [`Error::Connect`] when the operating system refuses
///   random bytes or a socket.
pub fn mixed_precision(device: Device, precision: Precision) -> Result<Device, Error> {
    let on = device.clone().without_autodiff();
    let mut token = [0; 32];
    getrandom::fill(&mut token).map_err(Error::Token)?;
    let authorizer = TokenAuthorizer::new(&token).expect("a token of 32 bytes");
    let server = AmpServer::of_sessions(on.clone(), precision, authorizer)?;
    let in_force = server.in_force;

    // A panic leaves the list as it was.
    let mut list = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
    let found = list
        .iter_mut()
        .find(|local| local.on == on && local.in_force.precision == in_force.precision);
    let local = match found {
        // An operation that panics there ends the session.
        Some(local) if local.device.sync().is_err() => {
            local.device = serve(&server, &token)?;
            local.device.clone()
        }
        Some(local) => local.device.clone(),
        None => {
            let local = serve(&server, &token)?;
            list.push(Local {
                on,
                in_force,
                device: local.clone(),
            });
            local
        }
    };
    Ok(local.with_autodiff_context_from(&device))
}

impl AmpReport {
    /// The report of a device that [`mixed_precision`] gave, or a function of this crate with the name
    /// of a backend; `None` for any other. Its counts are those of all devices of this process on the
    /// same device of Burn's.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_amp_device::{AmpReport, Precision, flex};
    ///
    /// let device = flex(Precision::Bf16)?.autodiff();
    /// let report = AmpReport::of_device(&device).expect("a device of this process");
    /// assert!(report.to_string().contains("precision   bf16: asked for"));
    /// # }
    /// # Ok::<(), burn_amp_device::Error>(())
    /// ```
    pub fn of_device(device: &Device) -> Option<Self> {
        let device = device.clone().without_autodiff();
        let list = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        let local = list.iter().find(|local| local.device == device)?;
        match local.on.as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => Some(Self::in_force::<Cube>(device, local.in_force)),
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(device) => Some(Self::in_force::<Flex>(device, local.in_force)),
            _ => None,
        }
    }
}

/// Starts the server and connects to it.
fn serve(server: &AmpServer, token: &[u8]) -> Result<Device, Error> {
    // `WebSocketTransport::new` would listen on every interface.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(Error::Listen)?;
    let address = listener.local_addr().map_err(Error::Listen)?;
    let serving = server.serve_async(WebSocketTransport::from_listener(listener));
    RUNTIME.spawn(async move {
        if let Err(error) = serving.await {
            log::error!("burn-amp-device: {error}");
        }
    });
    let host = RemoteHost::websocket(&format!("ws://{address}")).with_credential(token);
    let device = Device::remote_options(&host).init()?;
    enter(&device)?;
    Ok(device)
}

/// A function of Burn's that gives a device, with a precision.
macro_rules! devices {
    ($($feature:literal $name:ident($($arg:ident: $ty:ty)?);)*) => {$(
        #[doc = concat!(
            "Burn's [`Device::", stringify!($name), "`], computing in `precision`. See \
             [`mixed_precision`]."
        )]
        ///
        /// # Errors
        ///
        /// Those of [`mixed_precision`].
        #[cfg(feature = $feature)]
        pub fn $name($($arg: $ty,)? precision: Precision) -> Result<Device, Error> {
            mixed_precision(Device::$name($($arg)?), precision)
        }
    )*};
}

devices! {
    "flex" flex();
    "cpu" cpu();
    "cuda" cuda(index: impl Into<burn::tensor::DeviceIndex>);
    "rocm" rocm(index: impl Into<burn::tensor::DeviceIndex>);
    "wgpu" wgpu(kind: DeviceKind);
    "vulkan" vulkan(kind: DeviceKind);
    "metal" metal(kind: DeviceKind);
    "webgpu" webgpu(kind: DeviceKind);
}
