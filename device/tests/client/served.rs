//! The program `burn-amp-server` in its own process.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use burn::remote::RemoteHost;
use burn::tensor::Device;

pub const TOKEN: &str = "a token of the tests";
pub const MINUTE: Duration = Duration::from_secs(60);

pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_burn-amp-server"))
}

/// A server in another process, which ends when this value is dropped.
pub struct Server {
    pub process: Child,
    pub address: String,
    said: Receiver<String>,
}

impl Server {
    /// Serves Flex on a free port, to clients that have [`TOKEN`].
    pub fn start(precision: &str) -> Self {
        let mut program = program();
        program.args(["--token-file", "-"]);
        Self::start_as(program, precision)
    }

    /// The same with the rest of the command line in `program`, which gets [`TOKEN`] as input.
    pub fn start_as(mut program: Command, precision: &str) -> Self {
        let mut process = program
            .args(["--backend", "flex", "--precision", precision])
            .args(["--listen", "127.0.0.1:0"])
            // The backtrace of a panic takes seconds to print.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = process.stdin.take().unwrap();
        // A program that reads no token may have ended already.
        let _ = writeln!(input, "{TOKEN}");
        drop(input);
        let said = lines([
            Box::new(process.stdout.take().unwrap()),
            Box::new(process.stderr.take().unwrap()),
        ]);
        let mut lines = said.iter();
        let line = lines.find(|line| line.starts_with("serving "));
        let line = line.expect("a server that starts");
        let (served, address) = line.split_once(" at ").unwrap();
        assert_eq!(served, format!("serving {precision}"));
        let address = address.to_string();
        Self {
            process,
            address,
            said,
        }
    }

    pub fn host(&self) -> RemoteHost {
        RemoteHost::websocket(&self.address).with_credential(TOKEN)
    }

    /// A client without burn-amp-device.
    pub fn device(&self) -> Device {
        Device::remote_options(&self.host()).init().unwrap()
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sends SIGTERM, as a service manager does.
    #[cfg(unix)]
    pub fn terminate(&self) {
        let terminate = format!("kill -TERM {}", self.process.id());
        // `kill` is built into the shell; not every system has a program `kill`.
        let mut shell = Command::new("sh");
        assert!(shell.args(["-c", &terminate]).status().unwrap().success());
    }

    /// The next line of the output that contains `part`.
    pub fn line(&self, part: &str) -> Option<String> {
        let end = Instant::now() + MINUTE;
        loop {
            let patience = end.saturating_duration_since(Instant::now());
            let line = self.said.recv_timeout(patience).ok()?;
            if line.contains(part) {
                return Some(line);
            }
        }
    }

    /// Ends the server, and returns the rest of its output.
    pub fn said(mut self) -> String {
        // The server may have ended already.
        let _ = self.process.kill();
        self.said.iter().collect::<Vec<_>>().join("\n")
    }
}

/// The lines of several outputs, read as they arrive, so that no pipe fills up.
fn lines(outputs: [Box<dyn Read + Send>; 2]) -> Receiver<String> {
    let (sender, lines) = channel();
    for output in outputs {
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The receiver may have been dropped.
                let _ = sender.send(line);
            }
        });
    }
    lines
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The exit status of a process that ends within `patience`.
pub fn ends_within(patience: Duration, process: &mut Child) -> ExitStatus {
    let end = Instant::now() + patience;
    loop {
        match process.try_wait().unwrap() {
            Some(status) => return status,
            None if Instant::now() > end => {
                process.kill().unwrap();
                panic!("the process did not end within {patience:?}");
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}
