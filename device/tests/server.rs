//! The program `burn-amp-server` and its clients, each in its own process, so that one can be killed.
#![cfg(all(feature = "flex", feature = "server"))]

include!("../src/burn.rs");

mod client;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Output, Stdio};
use std::thread;
use std::time::Duration;

use burn::nn::LinearConfig;
use burn::optim::SgdConfig;
use burn::remote::{ConnectError, RemoteHost};
use burn::tensor::{Device, Tensor};
use burn_amp_device::{
    DynamicLossScale, Error, GradScaler, Precision, connect, full_precision, with_precision,
};

use client::process::{Process, own_test};
use client::served::{MINUTE, Server, TOKEN, ends_within, program};
use client::{HALVES, assert_computed_in, product, read, tensor, within_a_minute};

/// The environment variable with the server's address, for a client's process.
const ADDRESS: &str = "BURN_AMP_TEST_ADDRESS";

fn ends(process: &mut Child) -> ExitStatus {
    ends_within(MINUTE, process)
}

/// The program's exit code and error output if it does not serve.
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
        "--no-token",
        "/data",
        "1 GiB",
        "flex",
        "RemoteHost::websocket",
    ] {
        assert!(help.contains(option), "{option} is not in\n{help}");
    }
}

#[test]
fn it_does_not_listen_beyond_this_machine_without_a_token() {
    let beyond = "reaches beyond this machine";
    assert_refuses(&["--no-token", "--listen", "0.0.0.0:0"], beyond);
    assert_refuses(&["--no-token", "--listen", "[::]:0"], beyond);
    let key = env::temp_dir().join(format!("burn-amp-{}.key", std::process::id()));
    let key = key.to_str().unwrap();
    assert_refuses(&["--no-token", "--iroh", "--key", key], beyond);
    assert!(!std::fs::exists(key).unwrap());
    assert_refuses(&["--no-token", "--token-file", "-"], "cannot be used with");
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

/// Whoever reaches the port decides how many there are.
#[test]
fn refused_tokens_do_not_fill_the_log() {
    let server = Server::start("f32");
    for _ in 0..9 {
        let host = RemoteHost::websocket(&server.address).with_credential("another token");
        let refused = within_a_minute(move || Device::remote_options(&host).init());
        assert!(matches!(refused, Err(ConnectError::Unauthorized)));
    }
    assert!(server.line("refused, 8 so far").is_some());
    let said = server.said();
    assert!(!said.contains("a session is refused"), "{said}");
}

#[test]
fn a_region_holds_on_a_device_of_another_process() {
    let server = Server::start("bf16");
    let device = server.device();
    let (x, w) = (tensor([8, 64], 1, &device), tensor([64, 8], 2, &device));
    let computed = full_precision(x, |x: Tensor<2>| x.matmul(w));
    assert_eq!(read(computed), product(&Device::flex()));
}

#[test]
fn a_region_changes_nothing_on_a_server_in_fp32() {
    let server = Server::start("f32");
    let device = server.device();
    for precision in HALVES {
        let (x, w) = (tensor([8, 64], 1, &device), tensor([64, 8], 2, &device));
        let computed = with_precision(precision, x, |x: Tensor<2>| x.matmul(w));
        assert_eq!(read(computed), product(&Device::flex()));
    }
}

#[test]
fn a_server_logs_the_operation_that_overflowed() {
    let mut program = program();
    program.args(["--token-file", "-"]);
    program.env("BURN_AMP_DETECT_ANOMALY", "1");
    let server = Server::start_as(program, "f16");
    let large = Tensor::<2>::full([2, 2], 300.0, &server.device());
    read(large.clone().matmul(large));
    let line = server.line("non-finite").expect("a warning");
    assert!(line.contains("WARN"), "{line}");
    let anomaly = "forward: matmul [2, 2] in F16, operands up to 3e2";
    assert!(line.contains(anomaly), "{line}");
}

#[test]
fn the_devices_of_one_server_exchange_tensors() {
    let mut program = program();
    program.args([
        "--token-file",
        "-",
        "--device",
        "default",
        "--device",
        "default",
    ]);
    let server = Server::start_as(program, "bf16");
    let [first, second] = [0, 1].map(|index| {
        let options = Device::remote_options(&server.host()).device_index(index);
        within_a_minute(move || options.init().unwrap())
    });
    assert_ne!(first, second);
    let x: Tensor<2> = tensor([4, 4], 1, &first);
    let there = x.clone().to_device(&second) + 1.0;
    assert_eq!(read(there), read(x + 1.0));
}

/// Clients of one server, each of which moves tensors from its first device to its second.
mod exchange {
    use super::*;

    const CREDENTIAL: &str = "BURN_AMP_TEST_CREDENTIAL";

    fn devices() -> [Device; 2] {
        let credential = env::var(CREDENTIAL).unwrap();
        let host = RemoteHost::websocket(&env::var(ADDRESS).unwrap()).with_credential(credential);
        [0, 1].map(|index| {
            let options = Device::remote_options(&host).device_index(index);
            match options.init() {
                Ok(device) => device,
                Err(ConnectError::Handshake { .. }) => {
                    println!("refused");
                    std::process::exit(0);
                }
                Err(error) => panic!("{error}"),
            }
        })
    }

    /// Keeps a device busy for seconds. Burn's client sends on a read.
    fn occupy(device: &Device) {
        let ones = Tensor::<2>::ones([512, 512], device);
        let busy = (0..12).fold(ones.clone(), |x, _| x.matmul(ones.clone()) * 0.001);
        thread::spawn(move || busy.try_into_data());
    }

    fn moved(value: f32, [near, far]: &[Device; 2]) -> Tensor<2> {
        Tensor::<2>::full([4, 4], value, near).to_device(far)
    }

    #[test]
    #[ignore = "a client's process, which the other test starts"]
    fn first_client() {
        let devices = devices();
        // The target is busy: the tensor waits on the server, under Burn's first number.
        occupy(&devices[1]);
        let moved = moved(1.0, &devices);
        devices[0].sync().unwrap();
        println!("exposed");
        let values = within_a_minute(move || read(moved));
        println!("first read {}", values[0]);
        thread::sleep(MINUTE);
    }

    #[test]
    #[ignore = "a client's process, which the other test starts"]
    fn second_client() {
        let devices = devices();
        // The source is busy: the target asks for the tensor before this client has given it.
        occupy(&devices[0]);
        let moved = moved(2.0, &devices);
        let values = within_a_minute(move || read(moved));
        println!("second read {}", values[0]);
        thread::sleep(MINUTE);
    }

    fn two_devices(token: &[&str]) -> Server {
        let mut program = program();
        program.args(token);
        program.args(["--device", "default", "--device", "default"]);
        Server::start_as(program, "f32")
    }

    fn client(name: &str, server: &Server, credential: &str) -> Process {
        let mut test = own_test(&format!("exchange::{name}"));
        Process::spawn(
            test.env(ADDRESS, &server.address)
                .env(CREDENTIAL, credential),
        )
    }

    /// On Burn 0.22, two programs of one computer need two tokens, or two servers.
    #[test]
    fn no_client_gets_another_clients_tensor() {
        let server = two_devices(&["--token-file", "-"]);
        let mut first = client("first_client", &server, TOKEN);
        first.wait_for("exposed", 1);
        let mut second = client("second_client", &server, TOKEN);
        if cfg!(feature = "burn-0-22") {
            second.wait_for("refused", 1);
            assert!(
                server
                    .line("another program there uses the server")
                    .is_some()
            );
            first.wait_for("first read 1", 1);
            // Its devices are free once it has ended.
            drop(first);
            second = client("second_client", &server, TOKEN);
        } else {
            first.wait_for("first read 1", 1);
        }
        second.wait_for("second read 2", 1);
    }

    #[test]
    fn clients_with_credentials_of_their_own_do_not_meet() {
        let server = two_devices(&["--no-token"]);
        let mut first = client("first_client", &server, "one");
        first.wait_for("exposed", 1);
        let mut second = client("second_client", &server, "another");
        second.wait_for("second read 2", 1);
        first.wait_for("first read 1", 1);
    }

    /// Its device is Burn's to refuse, and takes no place from others.
    #[test]
    fn a_client_that_asks_for_a_device_too_many_locks_nobody_out() {
        let server = two_devices(&["--token-file", "-"]);
        let ask = |index| {
            let options = Device::remote_options(&server.host()).device_index(index);
            within_a_minute(move || options.init())
        };
        let first = ask(0).unwrap();
        let refused = ask(2);
        let alone = matches!(refused, Err(ConnectError::NoSuchDevice { device_count: 2 }));
        assert!(alone, "{refused:?}");
        let second = ask(1).unwrap();
        let x: Tensor<2> = tensor([4, 4], 1, &first);
        assert_eq!(read(x.clone().to_device(&second)), read(x));
    }

    #[test]
    fn more_devices_than_a_client_can_be_told_by_are_refused() {
        let many = [["--device", "default"]; 4].concat();
        let args = [&["--no-token", "--listen", "127.0.0.1:0"], &many[..]].concat();
        if cfg!(feature = "burn-0-22") {
            assert_refuses(&args, "expected at most 3");
        } else {
            two_devices(&[&["--no-token"], &many[..]].concat());
        }
        let key = env::temp_dir().join(format!("burn-amp-{}-several.key", std::process::id()));
        let iroh = ["--iroh", "--key", key.to_str().unwrap()];
        if cfg!(feature = "burn-0-22") {
            assert_refuses(&[&iroh, &many[..4]].concat(), "expected at most 1");
        }
        let _ = std::fs::remove_file(key);
    }
}

#[test]
fn a_tensor_moves_from_one_server_to_another_through_the_client_alone() {
    let [from, to] = ["bf16", "f16"].map(Server::start);
    let [source, target] = [&from, &to].map(Server::device);
    let x: Tensor<2> = tensor([4, 4], 1, &source);
    let through = Tensor::<2>::from_data(x.clone().into_data(), &target);
    assert_eq!(read(through), read(x.clone()));
    // A server requests the tensor from the other server without a token, and is refused: an error without a
    // wait.
    let moved = x.clone().to_device(&target);
    assert!(within_a_minute(move || moved.try_into_data()).is_err());
    assert_eq!(within_a_minute(move || read(x)).len(), 16);
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
        client.wait_for("stepped", 3);
    }
}

/// A process that trains until it is killed.
fn training(address: &str) -> Process {
    let mut client = own_test("client_process");
    Process::spawn(client.env(ADDRESS, address).stderr(Stdio::piped()))
}

#[test]
#[ignore = "a client's process, which the other tests start"]
fn client_process() {
    let host = RemoteHost::websocket(&env::var(ADDRESS).unwrap()).with_credential(TOKEN);
    let device = connect(&host, MINUTE).unwrap().autodiff();
    let mut model = LinearConfig::new(64, 64).init(&device);
    let mut optimizer = SgdConfig::new().init();
    let scaler = GradScaler::new(DynamicLossScale::new().into()).unwrap();
    loop {
        let loss = model
            .forward(tensor([64, 64], 1, &device))
            .powi_scalar(2)
            .mean();
        let grads = scaler.backward(loss, &model);
        let stepped;
        (model, stepped) = scaler.step(&mut optimizer, 1e-3, model, grads);
        stepped.unwrap();
        scaler.update().unwrap();
        println!("stepped");
    }
}

#[test]
fn a_client_that_dies_within_a_step_does_not_trouble_the_next() {
    let server = Server::start("f16");
    for _ in 0..3 {
        let mut client = training(&server.address);
        client.wait_for("stepped", 2);
        // The client trains on, so it is killed within a step.
        client.child.kill().unwrap();
    }
    let device = server.device();
    assert_computed_in(Precision::F16, &product(&device));
}

#[test]
fn a_client_whose_server_dies_within_a_step_ends_with_an_error() {
    let mut server = Server::start("bf16");
    let mut client = training(&server.address);
    client.wait_for("stepped", 2);
    server.kill();
    let status = ends(&mut client.child);
    assert!(!status.success());
    let mut said = String::new();
    let mut stderr = client.child.stderr.take().unwrap();
    stderr.read_to_string(&mut said).unwrap();
    // `GradScaler::step` returns the error, and the client unwraps it.
    assert!(said.contains("Read("), "{said}");
}

#[test]
fn where_the_server_has_ended_reads_are_errors_and_nothing_hangs() {
    let mut server = Server::start("f16");
    let device = server.device().autodiff();
    let scaler = GradScaler::new(DynamicLossScale::new().into()).unwrap();
    let model = LinearConfig::new(4, 2).init(&device);
    let ones = Tensor::<2>::ones([2, 4], &device);
    device.sync().unwrap();
    server.kill();
    within_a_minute(move || {
        // Operations without a read return no error.
        let more = (0..1000).fold(ones.clone(), |sum, _| sum + ones.clone());
        assert!(more.clone().inner().try_into_data().is_err());
        assert!(device.sync().is_err());
        let grads = scaler.backward(model.forward(ones).mean(), &model);
        let (_, stepped) = scaler.step(&mut SgdConfig::new().init(), 1.0, model, grads);
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
    server.terminate();
    let status = ends(&mut server.process);
    assert!(status.success(), "{status}");
    let said = server.said();
    assert!(said.contains("ended"), "{said}");
}

#[cfg(unix)]
#[test]
fn sigterm_ends_it_within_5_seconds_whatever_is_half_open() {
    let mut server = Server::start("bf16");
    let device = server.device();
    product(&device);
    let address = server.address.strip_prefix("ws://").unwrap();
    let half_open = |request: &[u8]| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(request).unwrap();
        stream
    };
    let _nothing = half_open(b"");
    let _request = half_open(b"GET /session HTTP/1.1\r\nHo");
    // Waits until the connections are accepted.
    thread::sleep(Duration::from_millis(500));
    server.terminate();
    let status = ends_within(Duration::from_secs(5), &mut server.process);
    assert!(status.success(), "{status}");
}

#[cfg(unix)]
#[test]
fn a_second_sigterm_ends_it_at_once() {
    for signals in [1, 2] {
        let mut server = Server::start("f32");
        let device = server.device();
        let ones = Tensor::<2>::ones([1024, 1024], &device);
        // This takes more than a minute.
        let busy = (0..300).fold(ones.clone(), |x, _| x.matmul(ones.clone()) * 0.001);
        thread::spawn(move || busy.try_into_data());
        thread::sleep(Duration::from_millis(1000));
        server.terminate();
        let patience = match signals {
            1 => 5000,
            _ => {
                thread::sleep(Duration::from_millis(200));
                assert_eq!(server.process.try_wait().unwrap(), None);
                server.terminate();
                1000
            }
        };
        let status = ends_within(Duration::from_millis(patience), &mut server.process);
        assert!(status.success(), "{status}");
    }
}

#[test]
fn it_makes_a_token_unless_it_is_given_one_or_told_to_have_none() {
    let connects = |server: &Server, host: RemoteHost| {
        assert!(server.address.starts_with("ws://127.0.0.1:"));
        within_a_minute(move || Device::remote_options(&host).init())
    };
    let tokens = [0, 1].map(|_| {
        let server = Server::start_as(program(), "bf16");
        let line = server.line("token ").unwrap();
        let token = line.strip_prefix("token ").unwrap().to_string();
        assert!(token.len() >= 32, "{token}");
        let without = RemoteHost::websocket(&server.address);
        let refused = connects(&server, without.clone());
        assert!(
            matches!(refused, Err(ConnectError::Unauthorized)),
            "{refused:?}"
        );
        let device = connects(&server, without.with_credential(token.as_str())).unwrap();
        assert_computed_in(Precision::Bf16, &product(&device));
        token
    });
    assert_ne!(tokens[0], tokens[1]);

    let mut without = program();
    without.arg("--no-token");
    let server = Server::start_as(without, "bf16");
    let device = connects(&server, RemoteHost::websocket(&server.address)).unwrap();
    assert_computed_in(Precision::Bf16, &product(&device));
}

#[test]
fn a_web_page_is_refused_with_the_token_and_without() {
    let upgraded = |address: &str, more: &str| {
        let host = address.strip_prefix("ws://").unwrap();
        let mut stream = TcpStream::connect(host).unwrap();
        let request = format!(
            "GET /session HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut status = String::new();
        BufReader::new(stream).read_line(&mut status).unwrap();
        status
    };
    for argument in ["--token-file=-", "--no-token"] {
        let mut program = program();
        program.arg(argument);
        let server = Server::start_as(program, "bf16");
        let page = upgraded(&server.address, "Origin: https://example.org\r\n");
        assert!(page.starts_with("HTTP/1.1 403"), "{page}");
        let program = upgraded(&server.address, "");
        assert!(program.starts_with("HTTP/1.1 101"), "{program}");
    }
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

/// A program that listens and runs `answer`.
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
    // A later version's refusal of a session, in an encoding that never changes.
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

    // An earlier version ends the session without an answer.
    for reply in [None, Some(b"\xc1".as_slice())] {
        let error = connect(&other_server(reply), MINUTE).unwrap_err();
        let handshake = matches!(error, Error::Connect(ConnectError::Handshake { .. }));
        assert!(handshake, "{error}");
    }
}
