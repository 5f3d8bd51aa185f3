//! Serves devices that compute in mixed precision, to programs on this machine or on others.

use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use burn::server::{
    AllowAll, Credential, IrohIdentity, IrohTransport, ServerLogging, TokenAuthorizer, Transport,
    WebSocketTransport,
};
use burn::tensor::Device;
use burn_amp_device::{AmpServer, Precision};
use clap::{Parser, ValueEnum};

/// Serves devices that compute in mixed precision.
///
/// The clients are programs on the same release of Burn:
///
///     let host = RemoteHost::websocket("ws://127.0.0.1:3000").with_credential(token);
///     let device = Device::remote_options(&host).init()?.autodiff();
///
/// In f16 a client scales its loss with burn_amp_device::GradScaler; bf16 needs nothing.
///
/// Ends on Ctrl+C or SIGTERM. RUST_LOG sets what is logged, for example RUST_LOG=debug.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// The backend that computes.
    #[arg(long)]
    backend: Backend,
    /// A device of the backend. Given several times, a client picks one by its position. For cuda
    /// and rocm default or a number; for vulkan, metal, webgpu and wgpu default, cpu, or discrete,
    /// integrated or virtual with a number, as in discrete:1.
    #[arg(long, default_value = "default")]
    device: Vec<String>,
    /// What to compute in: auto, bf16, f16 or f32.
    #[arg(long, default_value_t)]
    precision: Precision,
    /// The address to listen on, with WebSocket: unencrypted, for this machine or a trusted
    /// network. Beyond this machine it requires a token. Port 0 is a free port.
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Listen with Iroh instead: encrypted, across any network. Requires a token.
    #[arg(long, requires = "key", conflicts_with = "listen")]
    iroh: bool,
    /// The file of the server's Iroh identity. Created if it does not exist.
    #[arg(long, requires = "iroh", value_name = "FILE")]
    key: Option<PathBuf>,
    /// The file of the token that a client must present, or - for standard input. The line break at
    /// its end is not part of it.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    #[cfg(feature = "flex")]
    Flex,
    #[cfg(feature = "cpu")]
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda,
    #[cfg(feature = "rocm")]
    Rocm,
    #[cfg(feature = "wgpu")]
    Wgpu,
    #[cfg(feature = "vulkan")]
    Vulkan,
    #[cfg(feature = "metal")]
    Metal,
    #[cfg(feature = "webgpu")]
    Webgpu,
}

impl Backend {
    /// One of its devices, by the name that `--device` gives it.
    fn device(self, name: &str) -> Result<Device, String> {
        Ok(match self {
            #[cfg(feature = "flex")]
            Backend::Flex => only(name, Device::flex)?,
            #[cfg(feature = "cpu")]
            Backend::Cpu => only(name, Device::cpu)?,
            #[cfg(feature = "cuda")]
            Backend::Cuda => Device::cuda(index(name)?),
            #[cfg(feature = "rocm")]
            Backend::Rocm => Device::rocm(index(name)?),
            #[cfg(feature = "wgpu")]
            Backend::Wgpu => Device::wgpu(kind(name)?),
            #[cfg(feature = "vulkan")]
            Backend::Vulkan => Device::vulkan(kind(name)?),
            #[cfg(feature = "metal")]
            Backend::Metal => Device::metal(kind(name)?),
            #[cfg(feature = "webgpu")]
            Backend::Webgpu => Device::webgpu(kind(name)?),
        })
    }
}

#[cfg(any(feature = "flex", feature = "cpu"))]
fn only(name: &str, device: fn() -> Device) -> Result<Device, String> {
    match name {
        "default" => Ok(device()),
        _ => Err(format!(
            "--device {name}: expected default, the only device"
        )),
    }
}

#[cfg(any(feature = "cuda", feature = "rocm"))]
fn index(name: &str) -> Result<burn::tensor::DeviceIndex, String> {
    match name {
        "default" => Ok(Default::default()),
        index => index
            .parse::<usize>()
            .map(Into::into)
            .map_err(|_| format!("--device {name}: expected default or a number")),
    }
}

#[cfg(feature = "wgpu")]
fn kind(name: &str) -> Result<burn::tensor::DeviceKind, String> {
    use burn::tensor::DeviceKind;

    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    match (kind, index.parse()) {
        ("default", _) => Ok(DeviceKind::DefaultDevice),
        ("cpu", _) => Ok(DeviceKind::Cpu),
        ("discrete", Ok(index)) => Ok(DeviceKind::DiscreteGpu(index)),
        ("integrated", Ok(index)) => Ok(DeviceKind::IntegratedGpu(index)),
        ("virtual", Ok(index)) => Ok(DeviceKind::VirtualGpu(index)),
        _ => Err(format!(
            "--device {name}: expected default, cpu, or discrete, integrated or virtual with a \
             number, as in discrete:0"
        )),
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    ServerLogging::install();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn serve(args: &Args) -> Result<(), Box<dyn Error>> {
    let token = args.token_file.as_deref().map(token).transpose()?;
    let (transport, address) = transport(args, token.is_some())?;
    let devices = args.device.iter().map(|s| args.backend.device(s));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let server = match token {
        Some(token) => AmpServer::new(devices, args.precision, TokenAuthorizer::new(token)?)?,
        None => AmpServer::new(devices, args.precision, AllowAll)?,
    };
    println!("serving {} at {address}", server.precision());
    server.serve(transport)?;
    log::info!("ended");
    Ok(())
}

/// What clients reach the server through, and where.
fn transport(args: &Args, has_token: bool) -> Result<(Transport, String), Box<dyn Error>> {
    if args.iroh {
        if !has_token {
            return Err("--iroh reaches beyond this machine: it requires --token-file".into());
        }
        let key = args.key.as_deref().ok_or("--iroh requires --key")?;
        let identity = IrohIdentity::load_or_create(key)
            .map_err(|error| format!("cannot read the key {}: {error}", key.display()))?;
        let transport = IrohTransport::new(identity);
        let address = format!("iroh id {}", transport.id());
        return Ok((transport.into(), address));
    }
    let listen = args.listen;
    if !has_token && !listen.ip().is_loopback() {
        let reason = "reaches beyond this machine: it requires --token-file";
        return Err(format!("--listen {listen} {reason}").into());
    }
    let listener =
        TcpListener::bind(listen).map_err(|error| format!("cannot listen on {listen}: {error}"))?;
    let address = format!("ws://{}", listener.local_addr()?);
    Ok((WebSocketTransport::from_listener(listener).into(), address))
}

fn token(path: &Path) -> Result<Credential, String> {
    let text = match path.to_str() {
        Some("-") => io::read_to_string(io::stdin()),
        _ => fs::read_to_string(path),
    };
    let text =
        text.map_err(|error| format!("cannot read the token {}: {error}", path.display()))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(format!("the token file {} is empty", path.display())),
        token => Ok(token.into()),
    }
}
