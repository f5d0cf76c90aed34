//! Headers of members, and the maps of sparse files.

use super::{Content, Event, Parser, PendingMember, State, error, padding};
use crate::base::extent::{Extent, Plain};
use crate::tar::assemble::member;
use crate::tar::error::{Error, printable};
use crate::tar::header::{Header, Record};
use crate::tar::old_sparse::HeaderMap;
use crate::tar::sparse::{MapError, MapFault, MapReader, validate_map};
use crate::tar::totals::check_depth;
use crate::tar::{Member, MemberKind, RECORD, Segment};

impl Parser {
    pub(super) fn member_header(
        &mut self,
        record: &Record,
        at: Plain,
        size: u64,
    ) -> Result<(), Error> {
        let header = Header(record);
        let mut extensions = std::mem::take(&mut self.extensions);
        let local = self.local_keywords(at, &mut extensions)?;
        let keywords = local.as_deref().unwrap_or(&self.global_keywords);
        let stored = keywords.sparse.payload_len().or(keywords.size);
        let stored = stored.unwrap_or(size);
        let mut notes = Vec::new();
        let mut member = member(header, at, stored, extensions, keywords, &mut notes);
        member.has_global_keywords = self.global_keywords.sets_attributes();
        let sparse = local.map(|keywords| keywords.sparse).unwrap_or_default();
        let pending = PendingMember {
            member,
            at,
            size: sparse.size,
            stored,
            map_bytes: 0,
        };
        match header.typeflag() {
            b'V' => self.skip(pending.rest()),
            b'M' => self.skip_damaged(&pending, "it continues a file of another volume"),
            flag => {
                self.report_notes(at, notes);
                match pending.member.kind {
                    MemberKind::File if flag == b'S' => {
                        self.file_with_header_map(pending, record)?;
                    }
                    MemberKind::File if sparse.is_map_in_payload() => {
                        self.expect_payload_map(pending, MapReader::default());
                    }
                    MemberKind::File if sparse.is_malformed => {
                        self.skip_damaged(&pending, &MapError::Malformed.to_string());
                    }
                    MemberKind::File if sparse.is_sparse => {
                        self.sparse_file(pending, &sparse.map)?;
                    }
                    MemberKind::File => {
                        self.begin_member(pending.member, at, stored, padding(stored))?;
                    }
                    // A dumpdir's listing is not content.
                    _ if flag == b'D' => {
                        self.begin_member(pending.member, at, 0, stored + padding(stored))?;
                    }
                    // Other types have no payload, even if their headers give a size.
                    _ => self.begin_member(pending.member, at, 0, 0)?,
                }
            }
        }
        Ok(())
    }

    /// Begins a file of type `S`: with its map in the header, after it, or missing in dialects without maps.
    fn file_with_header_map(
        &mut self,
        mut pending: PendingMember,
        record: &Record,
    ) -> Result<(), Error> {
        let dialect = Header(record).dialect();
        match HeaderMap::new(record, dialect, &self.options.limits) {
            None => {
                let stored = pending.stored;
                self.begin_member(pending.member, pending.at, stored, padding(stored))
            }
            Some(Err(fault)) => self.handle_map_fault(&pending, fault),
            Some(Ok(map)) => {
                pending.size = pending.size.or(Some(map.size));
                self.continue_header_map(Box::new(pending), map)
            }
        }
    }

    fn continue_header_map(
        &mut self,
        pending: Box<PendingMember>,
        map: HeaderMap,
    ) -> Result<(), Error> {
        if map.has_more {
            self.state = State::HeaderMap(pending, map);
            return Ok(());
        }
        self.sparse_file(*pending, &map.pieces)
    }

    pub(super) fn header_map(&mut self, record: &Record) -> Result<(), Error> {
        let state = std::mem::replace(&mut self.state, State::Header);
        let State::HeaderMap(pending, mut map) = state else {
            return Ok(());
        };
        match map.extend(record, &self.options.limits) {
            Ok(()) => self.continue_header_map(pending, map),
            Err(fault) => self.handle_map_fault(&pending, fault),
        }
    }

    fn expect_payload_map(&mut self, pending: PendingMember, reader: MapReader) {
        if pending.map_bytes + RECORD > pending.stored {
            self.skip_damaged(&pending, &MapError::Malformed.to_string());
        } else {
            self.state = State::PayloadMap(Box::new(pending), reader);
        }
    }

    pub(super) fn payload_map(&mut self, record: &Record) -> Result<(), Error> {
        let state = std::mem::replace(&mut self.state, State::Header);
        if let State::PayloadMap(mut pending, mut reader) = state {
            pending.map_bytes += RECORD;
            match reader.read(record, &self.options.limits) {
                Ok(Some(pieces)) => self.sparse_file(*pending, &pieces)?,
                Ok(None) => self.expect_payload_map(*pending, reader),
                Err(fault) => self.handle_map_fault(&pending, fault)?,
            }
        }
        Ok(())
    }

    fn handle_map_fault(&mut self, pending: &PendingMember, fault: MapFault) -> Result<(), Error> {
        match fault {
            MapFault::Map(fault) => self.skip_damaged(pending, &fault.to_string()),
            MapFault::Exceeded(cause) => return Err(error(pending.at, cause)),
        }
        Ok(())
    }

    fn sparse_file(&mut self, mut pending: PendingMember, pieces: &[Segment]) -> Result<(), Error> {
        let end = pieces
            .last()
            .map_or(0, |last| last.offset.saturating_add(last.len));
        let size = pending.size.unwrap_or(end);
        match validate_map(pieces, size, pending.stored - pending.map_bytes) {
            Ok((map, payload)) => {
                let rest = pending.rest() - payload;
                pending.member.size = size;
                pending.member.sparse = Some(map);
                pending.member.payload = Extent::with_len(self.offset(), payload);
                self.begin_member(pending.member, pending.at, payload, rest)
            }
            Err(fault) => {
                self.skip_damaged(&pending, &fault.to_string());
                Ok(())
            }
        }
    }

    /// Reports the member whose header is at `at`, if the limits allow it.
    fn begin_member(
        &mut self,
        member: Member,
        at: Plain,
        payload: u64,
        rest: u64,
    ) -> Result<(), Error> {
        // Counts bytes only here, where the parser knows that a map after the header is not content.
        if let Err(cause) = check_depth(&member, &self.options.limits) {
            let name = printable(&member.name);
            self.damaged(at, format!("{name}: skipped, as its path has {cause}"));
            self.skip(payload + rest);
            return Ok(());
        }
        self.totals_before_last = self.sums;
        self.sums
            .add(&member, &self.options.limits)
            .map_err(|cause| error(at, cause))?;
        self.events.push_back(Event::Member(Box::new(member)));
        self.state = State::Content(Content {
            payload,
            rest,
            is_announced: true,
        });
        Ok(())
    }

    fn skip_damaged(&mut self, pending: &PendingMember, why: &str) {
        let name = printable(&pending.member.name);
        self.damaged(pending.at, format!("{name}: skipped, as {why}"));
        self.skip(pending.rest());
    }

    /// Skips `rest` bytes that belong to no reported member.
    pub(super) fn skip(&mut self, rest: u64) {
        self.state = State::Content(Content {
            payload: 0,
            rest,
            is_announced: false,
        });
    }
}
