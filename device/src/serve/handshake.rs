//! The beginning of a session in Burn's protocol, in the encoding of the release that this crate pins. Burn's
//! own types are private.

use serde::{Deserialize, Serialize};

/// The version of Burn's protocol.
const VERSION: u16 = if cfg!(feature = "burn-0-22") { 2 } else { 6 };

#[derive(Serialize, Deserialize)]
enum Message {
    Init(Init),
}

/// The request in a client's first message. The value of an unknown field is not read: a stranger's may be nested deeper than the
/// stack of an unoptimized build reaches.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Init {
    version: u16,
    session_id: (u64,),
    pub(crate) device_index: u32,
    #[serde(with = "serde_bytes")]
    pub(crate) credential: Vec<u8>,
}

/// Why a session is refused, in the message to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Refusal {
    Unauthorized,
    IncompatibleProtocol { server_version: u16 },
}

#[derive(Serialize)]
enum Content {
    InitRefused(Refusal),
}

#[derive(Serialize)]
struct Reply {
    content: Content,
    id: u64,
}

impl Init {
    /// Reads a client's first message.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, Refusal> {
        let messages = rmp_serde::from_slice::<[Message; 1]>(message);
        match messages {
            Ok([Message::Init(init)]) if init.version == VERSION => Ok(init),
            _ => Err(Refusal::IncompatibleProtocol {
                server_version: VERSION,
            }),
        }
    }

    /// The same message with another credential.
    pub(crate) fn with_credential(mut self, credential: &[u8]) -> Vec<u8> {
        self.credential = credential.to_vec();
        rmp_serde::to_vec(&[Message::Init(self)]).expect("plain data has an encoding")
    }
}

impl Refusal {
    pub(crate) fn encode(self) -> Vec<u8> {
        let reply = Reply {
            content: Content::InitRefused(self),
            id: 0,
        };
        rmp_serde::to_vec(&reply).expect("plain data has an encoding")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Burn's message for session 7, device 1 and the credential "abc".
    fn first() -> Vec<u8> {
        let mut first = b"\x91\x81\xa4Init\x94?\x91\x07\x01\xc4\x03abc".to_vec();
        first[8] = VERSION as u8;
        first
    }

    #[test]
    fn a_first_message_is_read_and_written_as_burn_does() {
        let init = Init::decode(&first()).unwrap();
        assert_eq!((init.device_index, &init.credential[..]), (1, &b"abc"[..]));
        assert_eq!(init.with_credential(b"abc"), first());
    }

    #[test]
    fn another_version_and_nonsense_are_refused_as_burn_does() {
        let mut later = first();
        later[8] += 1;
        // A field that is not one, with arrays in arrays.
        let nested = [&b"\x91\x81\xa4Init\x81\xa1x"[..], &[0x91; 2_000]].concat();
        let short: [&[u8]; 4] = [b"", b"\xc1", b"\x92", b"\xdd\xff\xff\xff\xff"];
        for message in short.into_iter().chain([&later[..], &nested]) {
            let refusal = Init::decode(message).err().unwrap();
            let mut expected =
                b"\x92\x81\xabInitRefused\x81\xb4IncompatibleProtocol\x91?\x00".to_vec();
            let version = expected.len() - 2;
            expected[version] = VERSION as u8;
            assert_eq!(refusal.encode(), expected);
        }
        let expected = b"\x92\x81\xabInitRefused\xacUnauthorized\x00";
        assert_eq!(Refusal::Unauthorized.encode(), expected);
    }
}
