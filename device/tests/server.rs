//! The program `burn-amp-server` and its clients, each a process of its own, so that one can die.
#![cfg(all(feature = "flex", feature = "server"))]

mod client;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use burn::nn::LinearConfig;
use burn::optim::SgdConfig;
use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{Dynamic, Error, GradScaler, Precision, connect};

use client::{HALVES, assert_computed_in, product, tensor, within_a_minute};

const TOKEN: &str = "a token of the tests";
const MINUTE: Duration = Duration::from_secs(60);
/// What tells a client's process where its server is.
const ADDRESS: &str = "BURN_AMP_TEST_ADDRESS";

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_burn-amp-server"))
}

/// A server in another process, which ends with this value.
struct Server {
    process: Child,
    address: String,
    output: BufReader<ChildStdout>,
}

impl Server {
    /// Serves Flex on a free port, to clients that have [`TOKEN`].
    fn start(precision: &str) -> Self {
        let mut process = program()
            .args(["--backend", "flex", "--precision", precision])
            .args(["--listen", "127.0.0.1:0", "--token-file", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = process.stdin.take().unwrap();
        writeln!(input, "{TOKEN}").unwrap();
        drop(input);
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("serving ") {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "it did not start");
        }
        let (served, address) = line.trim_end().split_once(" at ").unwrap();
        assert_eq!(served, format!("serving {precision}"));
        Self {
            process,
            address: address.to_string(),
            output,
        }
    }

    fn host(&self) -> RemoteHost {
        RemoteHost::websocket(&self.address).with_credential(TOKEN)
    }

    /// A client as any program on Burn is one.
    fn device(&self) -> Device {
        Device::remote_options(&self.host()).init().unwrap()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn ends(process: &mut Child) -> ExitStatus {
    let patience = Instant::now() + MINUTE;
    loop {
        match process.try_wait().unwrap() {
            Some(status) => return status,
            None if Instant::now() > patience => {
                process.kill().unwrap();
                panic!("the process hangs");
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// What the program says where it does not serve.
fn refusal(args: &[&str]) -> (Option<i32>, String) {
    let mut process = program()
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let status = ends(&mut process);
    let mut said = String::new();
    process
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    (status.code(), said)
}

#[track_caller]
fn assert_refuses(args: &[&str], expected: &str) {
    let (code, said) = refusal(&[&["--backend", "flex"], args].concat());
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains(expected), "{said}");
}

fn temporary(name: &str, content: &str) -> PathBuf {
    let file = env::temp_dir().join(format!("burn-amp-{}-{name}", std::process::id()));
    std::fs::write(&file, content).unwrap();
    file
}

#[test]
fn the_help_names_every_option() {
    let Output { stdout, status, .. } = program().arg("--help").output().unwrap();
    assert!(status.success());
    let help = String::from_utf8(stdout).unwrap();
    for option in [
        "--backend",
        "--device",
        "--precision",
        "--listen",
        "--iroh",
        "--key",
        "--token-file",
        "flex",
        "RemoteHost::websocket",
    ] {
        assert!(help.contains(option), "{option} is not in\n{help}");
    }
}

#[test]
fn it_does_not_listen_beyond_this_machine_without_a_token() {
    assert_refuses(&["--listen", "0.0.0.0:0"], "requires --token-file");
    assert_refuses(&["--listen", "[::]:0"], "requires --token-file");
    let key = env::temp_dir().join(format!("burn-amp-{}.key", std::process::id()));
    let key = key.to_str().unwrap();
    assert_refuses(&["--iroh", "--key", key], "requires --token-file");
    assert!(!std::fs::exists(key).unwrap());
    let empty = temporary("empty", "\n");
    let args = [
        "--listen",
        "0.0.0.0:0",
        "--token-file",
        empty.to_str().unwrap(),
    ];
    assert_refuses(&args, "is empty");
    std::fs::remove_file(empty).unwrap();
}

#[test]
fn what_it_cannot_do_it_says() {
    assert_refuses(&["--precision", "fp8"], "unknown precision \"fp8\"");
    assert_refuses(&["--device", "discrete:0"], "expected default");
    assert_refuses(&["--token-file", "/no/such/file"], "/no/such/file");
    assert_refuses(&["--iroh"], "--key");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    assert_refuses(
        &["--listen", &address],
        &format!("cannot listen on {address}"),
    );
}

#[test]
fn a_plain_client_computes_in_half_with_the_token_alone() {
    for precision in HALVES {
        let server = Server::start(&precision.to_string());
        assert_computed_in(precision, &product(&server.device()));
        let host = RemoteHost::websocket(&server.address);
        for host in [host.clone(), host.with_credential("another token")] {
            let refused = within_a_minute(move || Device::remote_options(&host).init());
            let unauthorized = matches!(refused, Err(ConnectError::Unauthorized));
            assert!(unauthorized, "{refused:?}");
        }
        let second = Device::remote_options(&server.host()).device_index(1);
        let refused = within_a_minute(move || second.init());
        let alone = matches!(refused, Err(ConnectError::NoSuchDevice { device_count: 1 }));
        assert!(alone, "{refused:?}");
    }
}

#[test]
fn two_clients_at_once_do_not_see_each_other() {
    let server = Server::start("bf16");
    let address = &server.address;
    let clients: Vec<_> = (0..2).map(|_| training(address)).collect();
    let device = server.device();
    for _ in 0..50 {
        assert_computed_in(Precision::Bf16, &product(&device));
    }
    for mut client in clients {
        client.wait_for_steps(3);
    }
}

/// A process that trains without an end.
struct Client {
    process: Child,
    output: BufReader<ChildStdout>,
}

fn training(address: &str) -> Client {
    let mut process = Command::new(env::current_exe().unwrap())
        .args(["--exact", "client_process", "--ignored", "--nocapture"])
        .env(ADDRESS, address)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(process.stdout.take().unwrap());
    Client { process, output }
}

impl Client {
    fn wait_for_steps(&mut self, steps: usize) {
        let lines = (&mut self.output).lines().map(Result::unwrap);
        let stepped = lines.filter(|line| line.ends_with("stepped"));
        assert_eq!(stepped.take(steps).count(), steps);
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "a client's process, which the other tests start"]
fn client_process() {
    let host = RemoteHost::websocket(&env::var(ADDRESS).unwrap()).with_credential(TOKEN);
    let device = connect(&host, MINUTE).unwrap().autodiff();
    let mut model = LinearConfig::new(64, 64).init(&device);
    let mut optimizer = SgdConfig::new().init();
    let scaler = GradScaler::new(Dynamic::new().into()).unwrap();
    loop {
        let loss = model
            .forward(tensor([64, 64], 1, &device))
            .powi_scalar(2)
            .mean();
        let grads = scaler.backward(loss, &model);
        (model, _) = scaler.step(&mut optimizer, 1e-3, model, grads).unwrap();
        scaler.update().unwrap();
        println!("stepped");
    }
}

#[test]
fn a_client_that_dies_within_a_step_does_not_trouble_the_next() {
    let server = Server::start("f16");
    for _ in 0..3 {
        let mut client = training(&server.address);
        client.wait_for_steps(2);
        // It steps on, so it dies within a step.
        client.process.kill().unwrap();
    }
    let device = server.device();
    assert_computed_in(Precision::F16, &product(&device));
}

#[test]
fn a_client_whose_server_dies_within_a_step_ends_with_an_error() {
    let mut server = Server::start("bf16");
    let mut client = training(&server.address);
    client.wait_for_steps(2);
    server.kill();
    let status = ends(&mut client.process);
    assert!(!status.success());
    let mut said = String::new();
    let mut stderr = client.process.stderr.take().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    // `GradScaler::step` gives the error, and the client unwraps it.
    assert!(said.contains("Read("), "{said}");
}

#[test]
fn where_the_server_has_ended_reads_are_errors_and_nothing_hangs() {
    let mut server = Server::start("f16");
    let device = server.device().autodiff();
    let scaler = GradScaler::new(Dynamic::new().into()).unwrap();
    let model = LinearConfig::new(4, 2).init(&device);
    let ones = Tensor::<2>::ones([2, 4], &device);
    device.sync().unwrap();
    server.kill();
    within_a_minute(move || {
        // Operations themselves go nowhere.
        let more = (0..1000).fold(ones.clone(), |sum, _| sum + ones.clone());
        assert!(more.clone().inner().try_into_data().is_err());
        assert!(device.sync().is_err());
        let grads = scaler.backward(model.forward(ones).mean(), &model);
        let stepped = scaler.step(&mut SgdConfig::new().init(), 1.0, model, grads);
        assert!(matches!(stepped, Err(Error::Read(_))));
        assert_eq!(scaler.state().steps(), 0);
        // Burn's methods without `try` panic.
        let read = std::panic::AssertUnwindSafe(|| more.inner().into_data());
        assert!(std::panic::catch_unwind(read).is_err());
    });
    let host = server.host();
    let gone = within_a_minute(move || Device::remote_options(&host).device_index(1).init());
    let unreachable = matches!(gone, Err(ConnectError::Unreachable { .. }));
    assert!(unreachable, "{gone:?}");
}

#[cfg(unix)]
#[test]
fn sigterm_ends_it_cleanly_while_clients_are_connected() {
    let mut server = Server::start("bf16");
    let device = server.device();
    product(&device);
    let terminate = format!("kill -TERM {}", server.process.id());
    // A shell has `kill` itself; a program of that name is not everywhere.
    assert!(
        Command::new("sh")
            .args(["-c", &terminate])
            .status()
            .unwrap()
            .success()
    );
    let status = ends(&mut server.process);
    assert!(status.success(), "{status}");
    let mut said = String::new();
    server.output.read_to_string(&mut said).unwrap();
    assert!(said.contains("ended"), "{said}");
}

#[test]
fn with_iroh_its_id_is_in_its_key() {
    let key = env::temp_dir().join(format!("burn-amp-{}-iroh.key", std::process::id()));
    let token = temporary("iroh", TOKEN);
    let id = || {
        let mut process = program()
            .args(["--backend", "flex", "--precision", "bf16", "--iroh"])
            .args([PathBuf::from("--key"), key.clone()])
            .args([PathBuf::from("--token-file"), token.clone()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut lines = lines.map(Result::unwrap);
        let line = lines.find(|line| line.starts_with("serving "));
        process.kill().unwrap();
        process.wait().unwrap();
        line.unwrap()
    };
    let first = id();
    assert!(first.starts_with("serving bf16 at iroh id "), "{first}");
    assert_eq!(id(), first);
    for file in [key, token] {
        std::fs::remove_file(file).unwrap();
    }
}

/// Something that listens and does `answer`.
fn listener(answer: impl Fn(TcpStream) + Send + 'static) -> RemoteHost {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        listener
            .incoming()
            .for_each(|stream| answer(stream.unwrap()))
    });
    RemoteHost::websocket(&format!("ws://{address}"))
}

#[test]
fn something_that_is_no_server_is_an_error() {
    let http = listener(|mut stream| {
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
    });
    let error = connect(&http, MINUTE).unwrap_err();
    let unreachable = matches!(error, Error::Connect(ConnectError::Unreachable { .. }));
    assert!(unreachable, "{error}");

    let hangs_up = listener(drop);
    let error = connect(&hangs_up, MINUTE).unwrap_err();
    assert!(matches!(error, Error::Connect(_)), "{error}");

    let silent = listener(std::mem::forget);
    let patience = Duration::from_millis(500);
    let error = connect(&silent, patience).unwrap_err();
    assert!(matches!(error, Error::NoAnswer { .. }), "{error}");
}

/// A server that answers the handshake of a session with `reply`, or ends the session.
fn other_server(reply: Option<&'static [u8]>) -> RemoteHost {
    listener(move |stream| {
        let mut socket = tungstenite::accept(stream).unwrap();
        socket.read().unwrap();
        if let Some(reply) = reply {
            socket.send(reply.to_vec().into()).unwrap();
        }
        let _ = socket.close(None);
        let _ = socket.flush();
    })
}

#[test]
fn a_server_of_another_version_of_burn_is_an_error() {
    // As a later version refuses a session, in an encoding that never changes.
    let later = b"\x92\x81\xabInitRefused\x81\xb4IncompatibleProtocol\x91\x63\x00";
    let error = connect(&other_server(Some(later)), MINUTE).unwrap_err();
    let version = matches!(
        error,
        Error::Connect(ConnectError::IncompatibleProtocol {
            server_version: 0x63,
            ..
        })
    );
    assert!(version, "{error}");

    // An earlier one ends it without an answer.
    for reply in [None, Some(b"\xc1".as_slice())] {
        let error = connect(&other_server(reply), MINUTE).unwrap_err();
        let handshake = matches!(error, Error::Connect(ConnectError::Handshake { .. }));
        assert!(handshake, "{error}");
    }
}
