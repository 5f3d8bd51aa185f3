//! Programs without the token, against a server and against a device of this process: each attack is bounded,
//! and does not affect descriptors, memory or an authorized client.
#![cfg(all(feature = "flex", feature = "server", target_os = "linux"))]

include!("../src/burn.rs");

mod client;

use std::env;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
#[cfg(feature = "burn-0-22")]
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::remote::ConnectError;
use burn::tensor::Device;
#[cfg(feature = "burn-0-22")]
use burn_amp_device::flex;
use burn_amp_device::{Precision, connect};

#[cfg(feature = "burn-0-22")]
use client::listening;
use client::process::{Process, own_test};
use client::served::{MINUTE, Server, program};
use client::strangers::{self, Held};
use client::{assert_computed_in, product, within};

/// The environment variable with the server's address, for a stranger's process.
const ADDRESSES: &str = "BURN_AMP_TEST_ADDRESSES";

/// A process without the token.
struct Stranger(Process);

impl Stranger {
    fn of(addresses: &[SocketAddr]) -> Self {
        let addresses: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        let mut stranger = own_test("stranger_process");
        stranger.env(ADDRESSES, addresses.join(","));
        Self(Process::spawn(stranger.stdin(Stdio::piped())))
    }

    /// Makes the stranger try something, and waits until it has tried.
    fn tries(&mut self, what: &str) {
        writeln!(self.0.child.stdin.as_mut().unwrap(), "{what}").unwrap();
        self.0.wait_for("tried", 1);
    }
}

#[test]
#[ignore = "a stranger's process, which the other tests start"]
fn stranger_process() {
    let addresses = env::var(ADDRESSES).unwrap();
    let addresses = addresses
        .split(',')
        .map(|a| a.parse::<SocketAddr>().unwrap());
    let addresses: Vec<_> = addresses.collect();
    let mut open: Vec<TcpStream> = Vec::new();
    for what in std::io::stdin().lines().map(Result::unwrap) {
        for &address in &addresses {
            match what.as_str() {
                "ask" => strangers::ask_for_nothing(address),
                "send" => open.extend(strangers::send_much(address)),
                "announce" => open.extend(strangers::announce_much(address)),
                "nonsense" => strangers::send_nonsense(address),
                "half" => open.extend(strangers::half_open(address)),
                _ => open.clear(),
            }
        }
        println!("tried");
    }
}

/// Makes a stranger try everything against `process`, which serves `good`.
fn withstands(
    process: &str,
    addresses: &[SocketAddr],
    good: &Device,
    precision: Precision,
    newcomer: impl Fn(),
) {
    let before = Held::by(process);
    let mut stranger = Stranger::of(addresses);
    let mut failures = Vec::new();
    for what in ["ask", "send", "announce", "nonsense", "half"] {
        stranger.tries(what);
        newcomer();
        // While the stranger's connections are open.
        if let Some(more) = before.more(process) {
            failures.push(format!("{what}: {more}"));
        }
        assert_computed_in(precision, &product(good));
        stranger.tries("close");
    }
    let peak = Held::by(process).peak;
    if peak > before.peak + 128 {
        failures.push(format!("a peak of {peak} MiB, {} MiB before", before.peak));
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_client_without_the_token_costs_the_server_nothing() {
    let mut limited = Command::new("sh");
    let program = program().get_program().to_owned();
    limited.args(["-c", "ulimit -n 256; exec \"$0\" --token-file - \"$@\""]);
    limited.arg(program);
    let server = Server::start_as(limited, "bf16");
    let address = server.address.strip_prefix("ws://").unwrap();
    let good = connect(&server.host(), MINUTE).unwrap();
    assert_computed_in(Precision::Bf16, &product(&good));
    let process = server.process.id().to_string();
    let addresses = [address.parse().unwrap()];
    // A client with the token is admitted meanwhile: it gets the number of devices.
    let newcomer = || {
        let host = server.host();
        let second = within(5, move || {
            Device::remote_options(&host).device_index(1).init()
        });
        let answered = matches!(second, Err(ConnectError::NoSuchDevice { device_count: 1 }));
        assert!(answered, "{second:?}");
    };
    withstands(&process, &addresses, &good, Precision::Bf16, newcomer);
    assert!(strangers::ends_with_a_ping(addresses[0]));
    let said = server.said();
    assert!(!said.contains("panicked"), "{said}");
}

#[cfg(feature = "burn-0-22")]
#[test]
fn another_program_costs_a_device_of_this_process_nothing() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let good = flex(Precision::F16).unwrap();
    let addresses = listening();
    assert!(!addresses.is_empty());
    assert_computed_in(Precision::F16, &product(&good));
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Panics on the test's own thread are its failures.
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        if !name.contains("another_program") && !name.contains("a_client_without") {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        hook(panic);
    }));
    withstands("self", &addresses, &good, Precision::F16, || ());
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
    // Tensors that move to another device still arrive.
    let bf16 = flex(Precision::Bf16).unwrap();
    let moved = client::tensor::<2>([4, 4], 1, &good).to_device(&bf16);
    let plain = client::tensor::<2>([4, 4], 1, &Device::flex());
    assert_eq!(client::read(moved), client::read(plain));
}
