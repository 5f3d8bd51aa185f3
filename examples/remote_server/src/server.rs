//! The server: Burn's own, computing on `Amp`. And how to start one as a process of its own.

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::backend::Flex;
use burn_amp::{Amp, AmpConfig, Precision};
use burn_remote::server::start_websocket;

/// Computes for a client, until the process is told to end.
pub fn serve(precision: Precision, port: u16) -> Result<(), Box<dyn Error>> {
    // Burn's server reports no error where it cannot listen.
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))?;
    let device = Default::default();
    let precision = AmpConfig::new()
        .with_precision(precision)
        .apply::<Amp<Flex>>(&device)?;
    println!("computing in {precision} on port {port}");
    start_websocket::<Amp<Flex>>(device, port);
    Ok(())
}

/// A server in another process, which ends with this value.
pub struct Server {
    pub process: Child,
    port: u16,
}

impl Server {
    /// Starts `command`, which serves at `port`, and waits until it does.
    pub fn start(command: &mut Command, port: u16) -> Result<Self, Box<dyn Error>> {
        let process = command.stdout(Stdio::null()).spawn().map_err(|error| {
            let program = command.get_program().display();
            format!("cannot start {program}: {error}")
        })?;
        let mut server = Self { process, port };
        let patience = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if let Some(status) = server.process.try_wait()? {
                return Err(format!("the server did not start: {status}").into());
            }
            if Instant::now() > patience {
                return Err(format!("nothing listens on port {port} after a minute").into());
            }
            sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    pub fn address(&self) -> String {
        format!("ws://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A free port.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?
        .local_addr()?
        .port())
}
