//! Finds the TCP connections within this process. Independent of their content.

use std::net::SocketAddr;

/// A connection, as one of its ends sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) own: SocketAddr,
    pub(crate) peer: SocketAddr,
}

/// The connections of this process. `None` if the operating system does not list them.
#[cfg(unix)]
pub(crate) fn of_this_process() -> Option<Vec<End>> {
    // On Linux, /dev/fd is a link to /proc/self/fd, which other systems lack.
    listed(std::fs::read_dir("/proc/self/fd").or_else(|_| std::fs::read_dir("/dev/fd")))
}

/// The connections among these descriptors. None is known where there is no descriptor left to read the list.
#[cfg(unix)]
fn listed(descriptors: std::io::Result<std::fs::ReadDir>) -> Option<Vec<End>> {
    use std::os::fd::BorrowedFd;

    use socket2::SockRef;

    let descriptors = match descriptors {
        Ok(descriptors) => descriptors,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(_) => return Some(Vec::new()),
    };
    let descriptors = descriptors.filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse().ok()
    });
    let ends = descriptors.filter_map(|descriptor| {
        // SAFETY: the number is that of an open descriptor or of none. The socket's addresses are read at
        // once, and the descriptor is never closed here. If another thread closes the descriptor meanwhile,
        // or reuses its number, the result is an error or the addresses of the new socket.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let socket = SockRef::from(&descriptor);
        Some(End {
            own: socket.local_addr().ok()?.as_socket()?,
            peer: socket.peer_addr().ok()?.as_socket()?,
        })
    });
    Some(ends.collect())
}

/// The connections of this process. `None` if the operating system does not list them.
#[cfg(not(unix))]
pub(crate) fn of_this_process() -> Option<Vec<End>> {
    None
}

/// Whether the other end of a connection also belongs to this process. `None` if the operating system does
/// not list connections.
pub(crate) fn is_within(own: SocketAddr, peer: SocketAddr) -> Option<bool> {
    let other = End {
        own: peer,
        peer: own,
    };
    Some(of_this_process()?.contains(&other))
}

/// Whether this process has accepted the connections of these peers at an address, and no other. Also true if
/// the operating system does not list connections.
pub(crate) fn accepted_only(own: SocketAddr, peers: &[SocketAddr]) -> bool {
    let Some(ends) = of_this_process() else {
        return true;
    };
    let accepted: Vec<_> = ends.iter().filter(|end| end.own == own).collect();
    accepted.len() == peers.len() && accepted.iter().all(|end| peers.contains(&end.peer))
}

#[cfg(all(test, unix))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_within_this_process_is_found_while_it_is_open() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, peer) = listener.accept().unwrap();
        let own = server.local_addr().unwrap();
        assert_eq!(is_within(own, peer), Some(true));
        drop(client);
        assert_eq!(is_within(own, peer), Some(false));
    }

    #[test]
    fn a_peer_that_nobody_expects_is_noticed_once_it_is_accepted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap();
        let connect = || TcpStream::connect(own).unwrap();
        let (expected, stranger) = (connect(), connect());
        let peers = [expected.local_addr().unwrap()];
        let _expected = listener.accept().unwrap();
        assert!(accepted_only(own, &peers));
        let accepted = listener.accept().unwrap();
        assert!(!accepted_only(own, &peers));
        drop((stranger, accepted));
        assert!(accepted_only(own, &peers));
        assert!(!accepted_only(own, &[]) && !accepted_only(own, &[own, peers[0]]));
    }

    #[test]
    fn without_a_free_descriptor_no_connection_is_known() {
        let failed = |kind: std::io::ErrorKind| listed(Err(kind.into()));
        assert_eq!(failed(std::io::ErrorKind::NotFound), None);
        // "Too many open files" has no kind of its own.
        assert_eq!(failed(std::io::ErrorKind::Other), Some(vec![]));
    }
}
