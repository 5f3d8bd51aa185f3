//! The server and the client of the example, which its tests take as well.

pub mod client;
#[path = "../../digits/data.rs"]
pub mod data;
#[path = "../../digits/model.rs"]
pub mod model;
pub mod server;
#[path = "../../digits/train.rs"]
pub mod train;

#[cfg(doctest)]
#[doc = include_str!("../../../src/guide/remote.md")]
mod guide {}
