//! Attacks of a program without the token on a server, and the resources of the server's process.
#![allow(dead_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// The request of a tensor that does not exist, as Burn encodes it.
const NO_SUCH_TENSOR: &[u8] = b"\x81\xadTensorRequest\xcf\x12\x34\x56\x78\x9a\xbc\xde\xf0";

/// The resources of a process.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    pub descriptors: usize,
    pub threads: usize,
    /// Resident MiB.
    pub resident: usize,
    /// The most resident MiB so far.
    pub peak: usize,
    /// Reserved MiB.
    pub reserved: usize,
}

impl Held {
    /// The resources of a process, or of this process as `self`.
    pub fn by(process: &str) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let number = |name: &str| -> usize {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse().unwrap()
        };
        Self {
            descriptors: fs::read_dir(format!("/proc/{process}/fd")).unwrap().count(),
            threads: number("Threads:"),
            resident: number("VmRSS:") / 1024,
            peak: number("VmHWM:") / 1024,
            reserved: number("VmSize:") / 1024,
        }
    }

    /// The resources that the process uses beyond these, unless it frees them within some seconds.
    pub fn more(self, process: &str) -> Option<String> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let now = Self::by(process);
            // A few descriptors and MiB come and go by themselves.
            let same = now.descriptors <= self.descriptors + 4
                && now.resident <= self.resident + 48
                && now.reserved <= self.reserved + 512;
            if same {
                return None;
            }
            if Instant::now() > end {
                return Some(format!("{now:?}, but {self:?} before"));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A connection of a stranger, upgraded to a WebSocket if the server allows it.
fn connection(address: SocketAddr, route: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(500)).ok()?;
    let patience = Some(Duration::from_secs(1));
    stream.set_read_timeout(patience).unwrap();
    stream.set_write_timeout(patience).unwrap();
    let request = format!(
        "GET {route} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => return None,
        }
    }
    head.starts_with(b"HTTP/1.1 101").then_some(stream)
}

/// The head of a binary message, masked with zeros.
fn head(length: usize) -> Vec<u8> {
    let mut head = vec![0x82];
    match length {
        0..126 => head.push(0x80 | length as u8),
        _ => {
            head.push(0x80 | 127);
            head.extend((length as u64).to_be_bytes());
        }
    }
    head.extend([0; 4]);
    head
}

fn message(content: &[u8]) -> Vec<u8> {
    [&head(content.len()), content].concat()
}

/// Sends as much as the server accepts.
fn send(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

/// Up to `count` attempts, for some seconds: an attempt without an answer takes long.
fn attempts(count: usize) -> impl Iterator<Item = usize> {
    let end = Instant::now() + Duration::from_secs(5);
    (0..count).take_while(move |_| Instant::now() < end)
}

pub const ROUTES: [&str; 2] = ["/data", "/session"];

/// Whether a ping ends a session that has shown no token. Answers to pings that nobody reads would fill the
/// server's memory.
pub fn ends_with_a_ping(address: SocketAddr) -> bool {
    let mut stream = connection(address, "/session").expect("a WebSocket");
    stream.write_all(&[0x89, 0x80, 0, 0, 0, 0]).unwrap();
    match stream.read(&mut [0]) {
        Ok(answered) => answered == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// Requests a tensor that does not exist and disconnects, 250 times.
pub fn ask_for_nothing(address: SocketAddr) {
    for _ in attempts(250) {
        if let Some(mut stream) = connection(address, "/data") {
            send(&mut stream, &message(NO_SUCH_TENSOR));
        }
    }
}

/// Sends a large message, and large messages without an end. The connections stay open.
pub fn send_much(address: SocketAddr) -> Vec<TcpStream> {
    let part = vec![0x91; 16 << 20];
    let mut open = Vec::new();
    for route in ROUTES {
        if let Some(mut stream) = connection(address, route) {
            send(&mut stream, &message(&part));
            open.push(stream);
        }
        for _ in 0..2 {
            let Some(mut stream) = connection(address, route) else {
                continue;
            };
            send(&mut stream, &head(300 << 20));
            for _ in 0..6 {
                send(&mut stream, &part);
            }
            open.push(stream);
        }
    }
    open
}

/// Announces messages of a GiB. The connections stay open.
pub fn announce_much(address: SocketAddr) -> Vec<TcpStream> {
    let mut open = Vec::new();
    for i in attempts(8) {
        if let Some(mut stream) = connection(address, ROUTES[i % 2]) {
            send(&mut stream, &head((1 << 30) - 1));
            open.push(stream);
        }
    }
    open
}

/// Sends invalid messages.
pub fn send_nonsense(address: SocketAddr) {
    for i in attempts(20) {
        if let Some(mut stream) = connection(address, ROUTES[i % 2]) {
            match i / 2 % 4 {
                0 => send(&mut stream, &message(b"\xc1nonsense")),
                1 => send(&mut stream, b"\xff\xff\xff\xff\xff\xff"),
                2 => send(&mut stream, &message(&[0x91; 64])),
                // Arrays in arrays, in a field of the first message that is not one.
                _ => {
                    let nested = [&b"\x91\x81\xa4Init\x81\xa1x"[..], &[0x91; 2_000]];
                    send(&mut stream, &message(&nested.concat()));
                }
            }
            // Waits for an answer, but only a moment.
            let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
            let _ = stream.read(&mut [0; 64]);
        }
    }
}

/// Requests without an end. The connections stay open.
pub fn half_open(address: SocketAddr) -> Vec<TcpStream> {
    let streams = attempts(150).filter_map(|_| {
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(500)).ok()?;
        send(&mut stream, b"GET /session HT");
        Some(stream)
    });
    streams.collect()
}
