//! Serves devices that compute in mixed precision, to programs on this machine or on others.

include!("../burn.rs");

use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use burn::server::{AllowAll, IrohIdentity, IrohTransport, ServerLogging, TokenAuthorizer};
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
/// In f16 a client scales its loss with burn_amp_device::GradScaler. In bf16 no scaling is needed.
///
/// A client presents the token that the program prints, or the token of --token-file. Over WebSocket, a
/// connection without a valid token may last 5 seconds and send 16 KiB, and at most 64 such connections are
/// open. Web pages are refused. Burn's route /data, which needs no token, is also refused: a tensor goes from
/// one server to another through the client. With --iroh, Burn's own server accepts the connections, without
/// these limits. A client with the token may do everything.
///
/// A message of 1 GiB or more ends a session, so tensors must be smaller. An allocation that fails on a CPU
/// backend ends this program. With several devices, Burn's own server also listens on a port of the loopback
/// interface: programs of this machine can use up memory and descriptors there. On Burn 0.22, a server has at
/// most three devices, or one with --iroh, and each has one session for the programs of one address. Quantization does not work on
/// remote devices of Burn.
///
/// Ends within 5 seconds after Ctrl+C or SIGTERM, and at once after a second signal. RUST_LOG sets the log
/// level, for example RUST_LOG=debug.
#[derive(Parser)]
#[command(version, verbatim_doc_comment)]
struct Args {
    /// The backend that computes.
    #[arg(long)]
    backend: Backend,
    /// A device of the backend. If given several times, a client selects a device by its position. For cuda
    /// and rocm default or a number; for vulkan, metal, webgpu and wgpu default, cpu, or discrete, integrated
    /// or virtual with a number, as in discrete:1.
    #[arg(long, default_value = "default")]
    device: Vec<String>,
    /// The precision to compute in: auto, bf16, f16 or f32.
    #[arg(long, default_value_t)]
    precision: Precision,
    /// The address to listen on, with WebSocket: unencrypted, for this machine or a trusted
    /// network. Port 0 is a free port.
    #[arg(long, default_value = "127.0.0.1:3000", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Listen with Iroh instead: encrypted, across any network.
    #[arg(long, requires = "key", conflicts_with = "listen")]
    iroh: bool,
    /// The file of the server's Iroh identity. Created if it does not exist.
    #[arg(long, requires = "iroh", value_name = "FILE")]
    key: Option<PathBuf>,
    /// The file of the token that a client must present, or - for standard input. The line break at its end
    /// is not part of the token. Without this option the program creates a token and prints it.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Admit every program of this machine without a token, and no other machine.
    #[arg(long, conflicts_with = "token_file")]
    no_token: bool,
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
    /// A device of this backend, by its name in `--device`.
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
    if args.no_token {
        require_this_machine(args)?;
    }
    let token = match &args.token_file {
        Some(path) => Some(token(path)?),
        None if args.no_token => None,
        None => Some(new_token()?),
    };
    let listening = Listening::open(args)?;
    let devices = args.device.iter().map(|s| args.backend.device(s));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let server = match token.as_deref() {
        Some(token) => AmpServer::new(devices, args.precision, TokenAuthorizer::new(token)?)?,
        None => AmpServer::new(devices, args.precision, AllowAll)?,
    };
    println!("serving {} at {}", server.precision(), listening.address());
    if let (Some(token), None) = (&token, &args.token_file) {
        println!("token {token}");
    }
    match listening {
        Listening::WebSocket(listener, _) => server.serve_on(listener)?,
        Listening::Iroh(transport) => server.serve(transport)?,
    }
    log::info!("ended");
    Ok(())
}

/// Fails where the server could be reached from another machine.
fn require_this_machine(args: &Args) -> Result<(), String> {
    let listens = match args.iroh {
        true => "--iroh".to_string(),
        false if args.listen.ip().is_loopback() => return Ok(()),
        false => format!("--listen {}", args.listen),
    };
    Err(format!(
        "{listens} reaches beyond this machine: leave --no-token out, or listen on 127.0.0.1"
    ))
}

/// The transport of the server's clients.
enum Listening {
    /// With the listener's address.
    WebSocket(TcpListener, SocketAddr),
    Iroh(IrohTransport),
}

impl Listening {
    fn open(args: &Args) -> Result<Self, Box<dyn Error>> {
        if args.iroh {
            let key = args.key.as_deref().ok_or("--iroh requires --key")?;
            let identity = IrohIdentity::load_or_create(key)
                .map_err(|error| format!("cannot read the key {}: {error}", key.display()))?;
            return Ok(Self::Iroh(IrohTransport::new(identity)));
        }
        let listen = args.listen;
        let listener = TcpListener::bind(listen)
            .map_err(|error| format!("cannot listen on {listen}: {error}"))?;
        let address = listener.local_addr()?;
        Ok(Self::WebSocket(listener, address))
    }

    fn address(&self) -> String {
        match self {
            Self::WebSocket(_, address) => format!("ws://{address}"),
            Self::Iroh(transport) => format!("iroh id {}", transport.id()),
        }
    }
}

/// A token of 32 random bytes, in hexadecimal.
fn new_token() -> Result<String, String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| {
        format!("the operating system returned no random bytes for a token: {error}")
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn token(path: &Path) -> Result<String, String> {
    let text = match path.to_str() {
        Some("-") => io::read_to_string(io::stdin()),
        _ => fs::read_to_string(path),
    };
    let text =
        text.map_err(|error| format!("cannot read the token {}: {error}", path.display()))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(format!("the token file {} is empty", path.display())),
        token => Ok(token.to_string()),
    }
}
