//! The client: plain Burn on a `RemoteBackend`, and for f16 a scaled loss.

use std::error::Error;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{panic, process, thread};

use burn::backend::Autodiff;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_amp::{AmpError, DynamicLossScale, GradScaler};
use burn_remote::{RemoteBackend, RemoteDevice};

use crate::data::Digits;
use crate::train::{LEARNING_RATE, Trained, step, train};

type B = Autodiff<RemoteBackend>;

/// A server to train on, from the thread that connected to it.
pub struct Remote {
    device: RemoteDevice,
    connected: Arc<AtomicBool>,
}

impl Remote {
    /// Connects to `ws://host:port`. While this value lives, the process ends if the server ends, with
    /// an error that names the server.
    pub fn connect(address: &str) -> Result<Self, Box<dyn Error>> {
        let host = address
            .strip_prefix("ws://")
            .ok_or_else(|| format!("{address}: expected an address like ws://127.0.0.1:3000"))?;
        TcpStream::connect(host)
            .map_err(|error| format!("no server answers at {address}: {error}"))?;
        let remote = Self {
            device: RemoteDevice::new(address),
            connected: Arc::new(AtomicBool::new(true)),
        };
        remote.end_with_server(address.to_string());
        Ok(remote)
    }

    /// Burn's client panics when it cannot send, on a thread of its own and on the caller's. While the
    /// client waits for an answer, it sends nothing and would wait forever. So another thread sends a
    /// little each second.
    fn end_with_server(&self, address: String) {
        const PULSE: &str = "pulse";
        let (before, training) = (panic::take_hook(), thread::current().id());
        let connected = self.connected.clone();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current();
            let ours =
                thread.id() == training || matches!(thread.name(), Some(PULSE | "tokio-rt-worker"));
            if ours && connected.load(Ordering::Relaxed) {
                eprintln!(
                    "error: training on {address} failed. Does the server still run?\n{info}"
                );
                process::exit(1);
            }
            before(info);
        }));
        let (connected, device) = (self.connected.clone(), self.device.clone());
        let pulse = move || {
            while connected.load(Ordering::Relaxed) {
                drop(Tensor::<RemoteBackend, 1>::zeros([1], &device));
                thread::sleep(Duration::from_secs(1));
            }
        };
        let pulse = thread::Builder::new().name(PULSE.into()).spawn(pulse);
        pulse.expect("a thread");
    }

    /// Trains without any mixed-precision code: on a server that computes in bf16 or FP32.
    pub fn train(
        &self,
        digits: &Digits,
        epochs: usize,
        seed: u64,
        after_step: impl FnMut(f64),
    ) -> Trained {
        train::<B>(&self.device, digits, epochs, seed, step, after_step).1
    }

    /// Trains with a scaled loss: on a server that computes in f16. Also returns the skipped steps.
    pub fn train_scaled(
        &self,
        digits: &Digits,
        epochs: usize,
        seed: u64,
        after_step: impl FnMut(f64),
    ) -> Result<(Trained, u64), AmpError> {
        let scaler = GradScaler::new(DynamicLossScale::new().into())?;
        let (_, trained) = train::<B>(
            &self.device,
            digits,
            epochs,
            seed,
            |optimizer, model, loss| {
                let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
                let (model, stepped) = scaler.step(optimizer, LEARNING_RATE, model, grads);
                stepped.expect("a scaled loss, stepped once");
                scaler.update().expect("a step");
                model
            },
            after_step,
        );
        Ok((trained, scaler.skipped_steps()))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.connected.store(false, Ordering::Relaxed);
    }
}
