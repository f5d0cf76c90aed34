//! The sink that makes an archive usable: members become the index, spans fill memory and spool.

use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use super::catalog::Catalog;
use super::leash::Leash;
use super::scan::Sink;
use super::spooler::Spooler;
use crate::base::extent::{Extent, Plain};
use crate::base::free_list::{self, FreeList};
use crate::cache::{Key, Memory};
use crate::codec::Compression;
use crate::index::{NewDigests, Problem, Refused, Span, TooMuchMemory};
use crate::tar::Member;

/// Builds an index, and keeps spans where they are wanted.
pub(super) struct Indexing<'a> {
    pub(super) catalog: &'a Catalog,
    /// How long the source says it is.
    pub(super) packed_bytes: Option<u64>,
    /// Set when nobody wants the index any more.
    pub(super) abandoned: &'a AtomicBool,
    /// What is decoded anyway is kept for the readers that come after.
    pub(super) memory: Option<&'a Memory>,
    /// Whose spans they are there.
    pub(super) layer: u16,
    /// To who stores it before it leaves memory.
    pub(super) leash: &'a Leash,
    pub(super) spooler: Option<Spooler>,
    /// The bytes of the span that is going by, when someone wants to keep them.
    pub(super) gathered: Option<free_list::RecycledBuffer>,
    /// Where the memory for these comes from.
    pub(super) free_list: FreeList,
    /// The last span; the next one begins behind it, and is as long.
    pub(super) last: Extent<Plain>,
    /// Whether the index had room for the last span.
    pub(super) room: Result<(), TooMuchMemory>,
    /// Oddities, for the user.
    pub(super) warnings: Vec<String>,
}

/// Oddities that are kept; a hostile archive has one in every record.
const MAX_WARNINGS: usize = 100;

/// What stops it; nothing that concerns one member does.
#[derive(Debug)]
pub(super) enum Stop {
    /// Nobody wants the index any more.
    Abandoned,
    /// The index needs more memory than is allowed.
    Memory(TooMuchMemory),
    /// There are more entries than are allowed.
    Full {
        /// The member that needs one more.
        name: Vec<u8>,
        /// Its header.
        at: Plain,
    },
}

impl From<TooMuchMemory> for Stop {
    fn from(error: TooMuchMemory) -> Self {
        Self::Memory(error)
    }
}

impl Sink for Indexing<'_> {
    type Error = Stop;

    fn begin(&mut self, compression: Compression) {
        let packed_bytes = self.packed_bytes;
        self.catalog
            .grow(|builder| builder.packed_as(compression, packed_bytes));
    }

    fn member(&mut self, member: Member) -> Result<(), Stop> {
        if self.abandoned.load(Ordering::Relaxed) {
            return Err(Stop::Abandoned);
        }
        let placed = self.catalog.grow(|builder| {
            let placed = builder.member(&member);
            builder.check_memory().map(|()| placed)
        });
        match placed.transpose()? {
            Some(Err(Refused::Full)) => Err(Stop::Full {
                name: member.name,
                at: member.header,
            }),
            // What else is refused is among the builder's problems, with its path.
            Some(Ok(_) | Err(_)) | None => Ok(()),
        }
    }

    fn payload(&mut self, _bytes: Bytes) -> Result<(), Stop> {
        self.check_room()
    }

    fn member_end(&mut self, _cut: bool) -> Result<(), Stop> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(text.to_owned());
        }
    }

    fn check_room(&mut self) -> Result<(), Stop> {
        if self.abandoned.load(Ordering::Relaxed) {
            return Err(Stop::Abandoned);
        }
        Ok(self.room?)
    }

    fn damage(&mut self, offset: Plain, text: &str) {
        let problem = Problem {
            path: None,
            offset: Some(offset),
            what: text.to_owned(),
        };
        self.catalog.grow(|builder| builder.problem(problem));
    }

    fn digests(&mut self, digests: &NewDigests) {
        self.catalog.grow(|builder| builder.digests(digests));
    }

    fn span_piece(&mut self, bytes: &Bytes) {
        if self.memory.is_some() || self.spooler.is_some() {
            let gathered = &mut self.gathered;
            gathered
                .get_or_insert_with(|| {
                    let len = usize::try_from(self.last.len()).unwrap_or_default();
                    self.free_list
                        .empty(len.max(bytes.len()), self.last.end().0)
                })
                .append(bytes);
        }
    }

    fn span_end(&mut self, span: Span, checksums: &[u64]) {
        let keeps = span.hash.is_some();
        let gathered = self.gathered.take();
        let bytes = gathered.map_or_else(Bytes::new, free_list::RecycledBuffer::freeze);
        self.last = span.plain;
        if let Some(spooler) = &mut self.spooler
            && keeps
        {
            spooler.goes_by(&span, &bytes);
        }
        if let Some(memory) = self.memory
            && keeps
        {
            let key = Key {
                layer: self.layer,
                span: span.number,
            };
            // Before there is room for this one. A third is what is yet to be stored, as what was
            // stored last has been read last, and leaves memory last.
            let most = memory.room() / 3;
            if most >= span.plain.len() {
                self.leash.wait(span.plain.start(), most);
            }
            memory.insert(key, bytes);
        }
        // Last: from here on someone may look for the bytes.
        let seek_point = span.seek_point.as_ref();
        let room = self.catalog.grow(|builder| {
            builder.span(span.plain, keeps.then_some(checksums), seek_point);
            builder.check_memory()
        });
        self.room = room.unwrap_or(Ok(()));
    }
}
