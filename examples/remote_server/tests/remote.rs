//! `Amp` behind a server of Burn's, over loopback: both are processes of their own, so that one can
//! die. Client and server are those of the example.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex};
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_amp::{AmpAutodiff, AmpConfig, Precision, with_precision};
use burn_remote::server::start_websocket;
use burn_remote::{RemoteBackend, RemoteDevice};

use remote_server::client::Remote;
use remote_server::data::Digits;
use remote_server::server::{Server, free_port, serve};
use remote_server::train;
use shared::close::{HALVES, relative_error, roundoff};
use shared::mlp::{data as read, scaler, values};

type B = Autodiff<RemoteBackend>;

/// The environment variables that give the processes below their role, and the server's precision and
/// port.
const PRECISION: &str = "BURN_AMP_TEST_SERVER_PRECISION";
const PORT: &str = "BURN_AMP_TEST_SERVER_PORT";

/// This test binary again, as one of the processes below.
fn process(name: &str, precision: &str, port: u16) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env(PRECISION, precision);
    command.env(PORT, port.to_string());
    command
}

fn port() -> u16 {
    env::var(PORT).unwrap().parse().unwrap()
}

#[test]
#[ignore = "a server's process, which the other tests start"]
fn server_process() {
    match env::var(PRECISION).unwrap().as_str() {
        "plain" => start_websocket::<Flex>(Default::default(), port()),
        precision => serve(precision.parse().unwrap(), port()).unwrap(),
    }
}

#[test]
#[ignore = "a client's process, which the other tests start"]
fn client_process() {
    let remote = Remote::connect(&format!("ws://127.0.0.1:{}", port())).unwrap();
    let after_step = |_| println!("stepped");
    remote.train(&Digits::load(), 1000, 1, after_step);
}

fn serving(precision: &str) -> Server {
    let port = free_port().unwrap();
    Server::start(&mut process("server_process", precision, port), port).unwrap()
}

fn device(server: &Server) -> RemoteDevice {
    RemoteDevice::new(&server.address())
}

#[test]
fn the_server_computes_in_half_and_the_client_sees_fp32() {
    let exact = {
        let [x, w] = [1, 2].map(|seed| values::<Flex, 2>([8, 64], seed));
        read(x.matmul(w.transpose()))
    };
    for precision in HALVES {
        let server = serving(&precision.to_string());
        let device = device(&server);
        let [x, w] = [1, 2].map(|seed| {
            let here = values::<Flex, 2>([8, 64], seed).into_data();
            Tensor::<RemoteBackend, 2>::from_data(here, &device)
        });
        let product = x.matmul(w.transpose());
        assert_eq!(product.dtype(), DType::F32);
        let data = product.into_data();
        assert_eq!(data.dtype, DType::F32);
        let error = relative_error(&data.to_vec::<f32>().unwrap(), &exact);
        let half = roundoff(precision);
        assert!(
            error > half / 16.0 && error < 3.0 * half,
            "{precision}: {error}"
        );
    }
}

#[test]
fn gradients_too_small_for_f16_survive_the_loss_scale_on_a_plain_client() {
    let server = serving("f16");
    let device = device(&server);
    // dL/dw = 2^-26 everywhere, a quarter of the least that f16 holds, and 2^-16 in f16 with the
    // scale, which times 2^-10 in f16 would be gone again.
    let scaler = scaler(1024.0);
    let weight = Tensor::<B, 2>::ones([4, 4], &device);
    let model = Weight {
        weight: Param::from_tensor(weight),
    };
    let x = Tensor::<B, 2>::ones([1, 4], &device);
    let small = Tensor::<B, 2>::from_data(TensorData::from([[2f32.powi(-26)]]), &device);
    let loss = (x.matmul(model.weight.val()) * small).sum();
    let mut grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    scaler.unscale(&model, &mut grads).unwrap();
    let grad = grads.get::<RemoteBackend, 2>(model.weight.id).unwrap();
    assert_eq!(read(grad), [2f32.powi(-26); 16]);

    let (model, stepped) = scaler.step(&mut SgdConfig::new().init(), 1.0, model, grads);
    assert!(stepped.unwrap());
    // 1 - 2^-26 is 1 in FP32.
    assert_eq!(read(model.weight.val()), [1.0; 16]);
}

#[derive(Module, Debug)]
struct Weight<B: Backend> {
    weight: Param<Tensor<B, 2>>,
}

#[test]
fn an_overflow_on_the_server_is_a_skipped_step_of_a_plain_client() {
    let server = serving("f16");
    let device = device(&server);
    let scaler = scaler(65536.0);
    let model = Weight {
        weight: Param::from_tensor(Tensor::<B, 2>::ones([4, 4], &device)),
    };
    let x = Tensor::<B, 2>::ones([2, 4], &device);
    let loss = (x.matmul(model.weight.val()) * 8.0).sum();
    let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    let (model, stepped) = scaler.step(&mut SgdConfig::new().init(), 1.0, model, grads);
    assert!(!stepped.unwrap());
    scaler.update().unwrap();
    assert_eq!(read(model.weight.val()), [1.0; 16]);
    assert_eq!((scaler.loss_scale(), scaler.skipped_steps()), (32768.0, 1));
}

#[test]
fn the_digits_train_on_a_server_as_they_do_here() {
    const EPOCHS: usize = 3;
    let digits = Digits::load();
    for precision in HALVES {
        AmpConfig::new()
            .with_precision(precision)
            .apply::<AmpAutodiff<Flex>>(&Default::default())
            .unwrap();
        let (_, here) = train::train::<AmpAutodiff<Flex>>(
            &Default::default(),
            &digits,
            EPOCHS,
            5,
            train::step,
            drop,
        );
        let server = serving(&precision.to_string());
        let remote = Remote::connect(&server.address()).unwrap();
        let there = match precision.scales_loss() {
            true => remote.train_scaled(&digits, EPOCHS, 5, drop).unwrap().0,
            false => remote.train(&digits, EPOCHS, 5, drop),
        };
        drop(remote);
        assert_eq!(here.losses.len(), there.losses.len());
        assert!(here.test_accuracy > 0.95, "{}", here.test_accuracy);
        let digits_apart = (here.test_accuracy - there.test_accuracy).abs() * 449.0;
        assert!(digits_apart < 9.0, "{precision}: {digits_apart}");
    }
}

#[test]
fn amp_on_the_client_trains_on_a_server_that_knows_nothing_of_it() {
    let server = serving("plain");
    let device = device(&server);
    for precision in HALVES {
        let scaler = scaler(1024.0);
        let gradient = |precision| {
            with_precision(precision, || {
                scaler.scope(|| {
                    let there = |seed, shape: [usize; 2]| {
                        let here = values::<Flex, 2>(shape, seed).into_data();
                        Tensor::<AmpAutodiff<RemoteBackend>, 2>::from_data(here, &device)
                    };
                    let w = there(1, [16, 8]).require_grad();
                    let y = there(2, [4, 16]).matmul(w.clone()).tanh();
                    let grads = y.powi_scalar(2).mean().backward();
                    read(w.grad(&grads).unwrap())
                })
            })
        };
        let error = relative_error(&gradient(precision), &gradient(Precision::F32));
        let half = roundoff(precision);
        assert!(
            error > half / 16.0 && error < 8.0 * half,
            "{precision}: {error}"
        );
    }
}

#[cfg(unix)]
#[test]
fn a_client_whose_server_dies_within_a_step_ends_with_an_error() {
    let server = serving("bf16");
    let port: u16 = server
        .address()
        .rsplit(':')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let mut client = process("client_process", "bf16", port)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start the client: {error}"));
    let steps = BufReader::new(client.stdout.take().unwrap()).lines();
    let steps = steps.filter(|line| line.as_ref().unwrap().ends_with("stepped"));
    assert_eq!(steps.take(3).count(), 3);
    // The server is stopped first, so that the client waits for an answer, as it does in every step.
    let stop = format!("kill -STOP {}", server.process.id());
    // A shell has `kill` itself; a program of that name is not everywhere.
    let stopped = Command::new("sh")
        .args(["-c", &stop])
        .output()
        .unwrap_or_else(|error| panic!("cannot start sh: {error}"));
    let said = String::from_utf8_lossy(&stopped.stderr);
    assert!(stopped.status.success(), "sh -c {stop:?}: {said}");
    sleep(Duration::from_millis(500));
    assert!(client.try_wait().unwrap().is_none());
    let address = server.address();
    drop(server);

    let status = ends_within(&mut client, Duration::from_secs(60));
    let mut said = String::new();
    client
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("training on {address} failed")),
        "{said}"
    );
}

fn ends_within(process: &mut std::process::Child, limit: Duration) -> ExitStatus {
    let patience = Instant::now() + limit;
    loop {
        match process.try_wait().unwrap() {
            Some(status) => return status,
            None if Instant::now() > patience => {
                process.kill().unwrap();
                panic!("the client hangs");
            }
            None => sleep(Duration::from_millis(50)),
        }
    }
}

#[test]
fn where_no_server_listens_the_client_says_so() {
    let address = format!("ws://127.0.0.1:{}", free_port().unwrap());
    let error = Remote::connect(&address).err().unwrap().to_string();
    assert!(
        error.contains(&format!("no server answers at {address}")),
        "{error}"
    );
    let error = Remote::connect("localhost:3000").err().unwrap().to_string();
    assert!(error.contains("expected an address like ws://"), "{error}");
}

#[test]
fn a_server_without_a_port_of_its_own_does_not_start() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = serve(Precision::Bf16, port).unwrap_err().to_string();
    assert!(
        error.contains(&format!("cannot listen on port {port}")),
        "{error}"
    );
}
