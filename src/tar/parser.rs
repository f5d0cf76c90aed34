//! Push bytes, pull: need more · member · payload · end.

use bytes::Bytes;

use super::{Limits, Member};
use crate::base::extent::Plain;

/// How an archive is read.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Zero records do not end the archive (`--ignore-zeros`).
    pub ignore_zeros: bool,
    /// What a hostile archive may cost.
    pub limits: Limits,
}

/// What the parser found.
#[derive(Debug)]
pub enum Event {
    /// Nothing without more bytes.
    NeedInput,
    /// The next member begins; its payload follows, if it has any.
    Member(Box<Member>),
    /// The next bytes of the payload; never empty; shares the pushed bytes.
    Payload(Bytes),
    /// The member is complete, its padding included.
    MemberEnd,
    /// Something is odd and nothing is lost that GNU tar would keep.
    Warning(Warning),
    /// The archive is complete. Bytes pushed from now on are ignored.
    End,
}

/// Something odd.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Warning {
    /// The record it concerns.
    pub offset: Plain,
    /// What, and what was done about it.
    pub text: String,
}

/// Why an archive cannot be read on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("tar record at plain byte {offset}")]
pub struct Error {
    /// The record at fault.
    pub offset: Plain,
}

/// Turns plain bytes into members.
#[derive(Debug)]
pub struct Parser {}

impl Parser {
    /// A parser at the beginning of an archive.
    pub fn new(options: Options) -> Self {
        todo!("{options:?}")
    }

    /// Takes the next plain bytes; called only after [`Event::NeedInput`].
    pub fn push(&mut self, plain: Bytes) {
        todo!("{plain:?}")
    }

    /// Says that no bytes follow.
    pub fn finish(&mut self) {
        todo!()
    }

    /// The next event.
    ///
    /// # Errors
    /// When the bytes are not a tar archive, exceed a limit, or end in the middle. Fused.
    pub fn pull(&mut self) -> Result<Event, Error> {
        todo!()
    }
}
