//! Immutable bytes by range: where an archive's packed bytes come from.
//!
//! A source is one version of something: its [`Fingerprint`] pins it, and bytes of another
//! version are an error, never an answer.

mod error;
mod file;
mod fingerprint;
mod http;
mod location;
mod memory;
mod stdin;

use std::fmt;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;

use crate::base::buffer::Buffer;
use crate::base::extent::Packed;

pub use error::{Cause, Error};
pub use fingerprint::Fingerprint;

/// Immutable bytes.
pub trait Source: Send + Sync + fmt::Debug {
    /// What the user calls it, without secrets.
    fn location(&self) -> &str;

    /// Which version of the bytes this is, and how many there are.
    fn fingerprint(&self) -> &Fingerprint;

    /// Whether any range can be read, or only everything from the front, once.
    fn access(&self) -> Access;

    /// Fills `buffer` with the bytes at `offset` and returns it frozen. All of it: a source that
    /// ends earlier is [`Cause::Changed`] or [`Cause::Truncated`].
    ///
    /// # Errors
    /// When the bytes cannot be had, or belong to another version.
    ///
    /// # Cancel safety
    /// Dropping the future abandons the request; the buffer goes back to its pool.
    fn read_at(&self, offset: Packed, buffer: Buffer) -> BoxFuture<'_, Result<Bytes, Error>>;

    /// Everything from the front, in pieces of any size. A source with [`Access::Stream`] gives
    /// it once; a second call is an error.
    fn stream(&self) -> BoxStream<'_, Result<Bytes, Error>>;
}

/// How a source can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Any range, any number of times, several at once.
    Ranges,
    /// Once, from the front.
    Stream,
}
