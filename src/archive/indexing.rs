//! The sink that makes an archive usable: members become the index, spans fill memory and spool.

use bytes::Bytes;

use super::keeper::Keeper;
use super::scan::Sink;
use crate::cache::{Key, Memory};
use crate::index::{Builder, Span};
use crate::tar::Member;

/// Builds an index, and keeps spans where they are wanted.
pub(super) struct Indexing<'a> {
    pub(super) builder: Builder,
    /// What is decoded anyway is kept for the readers that come after.
    pub(super) memory: Option<&'a Memory>,
    pub(super) keeper: Option<Keeper>,
    /// The bytes of the span that is going by, when someone wants to keep them.
    pub(super) gathered: Vec<u8>,
    /// Oddities, for the user.
    pub(super) warnings: Vec<String>,
}

/// Oddities that are kept; a hostile archive has one in every record.
const MAX_WARNINGS: usize = 100;

/// Nothing that concerns one member stops an index.
#[derive(Debug)]
pub(super) enum Never {}

impl Sink for Indexing<'_> {
    type Error = Never;

    fn member(&mut self, member: Member) -> Result<(), Never> {
        // What is refused is among the builder's problems, with its path.
        self.builder
            .member(&member)
            .map_or(Ok(()), |_placed| Ok(()))
    }

    fn payload(&mut self, _bytes: Bytes) -> Result<(), Never> {
        Ok(())
    }

    fn member_end(&mut self, _cut: bool) -> Result<(), Never> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(text.to_owned());
        }
    }

    fn span_piece(&mut self, bytes: &Bytes) {
        if self.memory.is_some() || self.keeper.is_some() {
            self.gathered.extend_from_slice(bytes);
        }
    }

    fn span_end(&mut self, span: Span) {
        let seek_point = span.seek_point.as_ref();
        self.builder.span(span.plain, span.hash, seek_point);
        let bytes: Bytes = std::mem::take(&mut self.gathered).into_boxed_slice().into();
        if let Some(keeper) = &mut self.keeper {
            keeper.goes_by(&span, &bytes);
        }
        if let Some(memory) = self.memory {
            let key = Key {
                layer: 0,
                span: span.number,
            };
            memory.insert(key, bytes);
        }
    }
}
