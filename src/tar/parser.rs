//! The push parser for tar.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Buf, Bytes};

use super::assemble::{Extensions, member};
use super::error::{Cause, Error, Note, TruncatedIn, Warning, printable};
use super::header::{Dialect, Header, RECORD_LEN, Record, text};
use super::old_sparse::HeaderMap;
use super::sparse::{MapError, MapFault, MapReader, SparseKeywords, validate_map};
use super::totals::check_depth;
use super::{Limit, Limits, Member, MemberKind, MemberTotals, RECORD, Segment, pax};
use crate::base::extent::{Extent, Plain};
use crate::base::tar_checksum;

/// Options of the parser.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Zero records do not end the archive (`--ignore-zeros`).
    pub ignore_zeros: bool,
    /// A stream without bytes is an archive without members, as for layers of images.
    pub accepts_empty: bool,
    /// Limits against hostile archives.
    pub limits: Limits,
}

/// The result of [`Parser::pull`].
#[derive(Debug)]
pub enum Event {
    /// The parser needs more bytes.
    NeedInput,
    /// The next member begins. Its payload follows, if any.
    Member(Box<Member>),
    /// The next bytes of the payload, never empty. They share the pushed buffer.
    Payload(Bytes),
    /// The member and its padding are complete.
    MemberEnd,
    /// An oddity. The result is as complete as GNU tar's.
    Warning(Warning),
    /// A member or a field of one is lost, for which GNU tar's exit status is 2. Parsing continues.
    Damaged(Warning),
    /// The archive is complete. The parser ignores further bytes.
    End,
}

/// Turns plain bytes into members.
#[derive(Debug, Default)]
pub struct Parser {
    options: Options,
    input: Bytes,
    /// Front of a record, shorter than one.
    partial: Vec<u8>,
    /// Offset of `input`.
    offset: u64,
    is_finished: bool,
    state: State,
    events: VecDeque<Event>,
    failure: Option<Error>,
    extensions: Extensions,
    global_keywords: pax::Keywords,
    /// Bodies of global pax headers; `None` when too long to be stored elsewhere, or partly malformed.
    globals: Option<Arc<Vec<Vec<u8>>>>,
    is_tar: bool,
    last: LastRecord,
    sums: MemberTotals,
    totals_before_last: MemberTotals,
}

/// Maximum bytes of global pax headers stored for [`Parser::globals`].
const MAX_SAVED_GLOBAL_BYTES: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum LastRecord {
    /// Also when there is no record yet.
    #[default]
    Header,
    /// A zero record, when zero records count.
    Zero,
    Bad,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Header,
    Extension(Extension),
    HeaderMap(Box<PendingMember>, HeaderMap),
    PayloadMap(Box<PendingMember>, MapReader),
    Content(Content),
    Ended,
}

#[derive(Debug)]
struct Extension {
    flag: u8,
    /// Offset of its header.
    at: Plain,
    left: u64,
    padding: u64,
    body: pax::Body,
}

#[derive(Debug)]
struct PendingMember {
    member: Member,
    /// Offset of its header.
    at: Plain,
    /// Size of the file with holes, if known.
    size: Option<u64>,
    /// Stored bytes including a map before the payload, without padding; below 2⁶³.
    stored: u64,
    map_bytes: u64,
}

#[derive(Debug)]
struct Content {
    payload: u64,
    /// Bytes to skip after it.
    rest: u64,
    /// Whether they belong to a reported member.
    is_announced: bool,
}

enum Progress {
    Advanced,
    NeedInput,
}

impl Parser {
    /// A parser at the beginning of an archive.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            globals: Some(Arc::default()),
            ..Self::default()
        }
    }

    /// A parser that resumes at the header of a member at `at`. `sums` are the totals of the members before
    /// it, and `globals` the bodies of the global pax headers.
    ///
    /// # Errors
    /// When the bodies exceed a limit.
    pub(crate) fn resume(
        options: Options,
        at: Plain,
        sums: MemberTotals,
        globals: &[Vec<u8>],
    ) -> Result<Self, Error> {
        let mut parser = Self::new(options);
        for body in globals {
            parser.apply_global_header(at, body)?;
        }
        // The first parser has already reported these headers' oddities.
        parser.events.clear();
        parser.offset = at.0;
        parser.sums = sums;
        parser.totals_before_last = sums;
        parser.is_tar = true;
        Ok(parser)
    }

    /// Bodies of the global pax headers so far, for `Parser::resume`; `None` when too long or malformed.
    pub fn globals(&self) -> Option<&Arc<Vec<Vec<u8>>>> {
        self.globals.as_ref()
    }

    /// Totals of the members before the last one, for [`Parser::resume`].
    pub(crate) fn totals_before_last(&self) -> MemberTotals {
        self.totals_before_last
    }

    /// Adds the next plain bytes. Call it only after [`Event::NeedInput`].
    pub fn push(&mut self, plain: Bytes) {
        debug_assert!(self.input.is_empty(), "pushed before the input was used up");
        self.input = plain;
    }

    /// Marks the end of the plain bytes.
    pub fn finish(&mut self) {
        self.is_finished = true;
    }

    /// Offset of the first byte that is neither parsed nor covered by an event.
    pub fn offset(&self) -> Plain {
        Plain(self.offset)
    }

    /// The next event; an error is final.
    ///
    /// # Errors
    /// When the bytes are no tar archive, exceed a limit, or end early, after all earlier events.
    pub fn pull(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if let Some(failure) = &self.failure {
                return Err(failure.clone());
            }
            let step = match self.step() {
                Ok(Progress::NeedInput) if self.is_finished => self.finish_input(),
                Ok(Progress::NeedInput) => {
                    // Releases the buffer, even of an empty slice, because decoders may wait for it.
                    self.input = Bytes::new();
                    return Ok(Event::NeedInput);
                }
                Ok(Progress::Advanced) => Ok(()),
                Err(error) => Err(error),
            };
            self.failure = step.err();
        }
    }

    fn step(&mut self) -> Result<Progress, Error> {
        match &mut self.state {
            State::Header => self.next_record(Self::header),
            State::HeaderMap(..) => self.next_record(Self::header_map),
            State::PayloadMap(..) => self.next_record(Self::payload_map),
            State::Extension(extension) => {
                let left = extension.left + extension.padding;
                if left > 0 && self.input.is_empty() {
                    return Ok(Progress::NeedInput);
                }
                let taken = self.take(left);
                self.extension(&taken)?;
                Ok(Progress::Advanced)
            }
            State::Content(_) => Ok(self.read_content()),
            State::Ended => {
                // Releases the buffer, because decoders of the following bytes may wait for it.
                self.input = Bytes::new();
                self.events.push_back(Event::End);
                Ok(Progress::Advanced)
            }
        }
    }

    /// Remaining bytes of the member's payload and padding; 0 between members, and where the parser needs it.
    pub fn missing_payload(&self) -> u64 {
        match &self.state {
            State::Content(content) if self.input.is_empty() && self.events.is_empty() => {
                content.payload + content.rest
            }
            _ => 0,
        }
    }

    /// Number of members so far, not counting the root.
    pub fn members(&self) -> u64 {
        self.sums.members
    }

    /// Skips `len` bytes of [`missing_payload`](Self::missing_payload) as if pushed, without payload events.
    pub fn skip_payload(&mut self, len: u64) {
        let len = len.min(self.missing_payload());
        if let State::Content(content) = &mut self.state {
            let of_payload = len.min(content.payload);
            self.offset += len;
            content.payload -= of_payload;
            content.rest -= len - of_payload;
        }
    }

    fn take(&mut self, most: u64) -> Bytes {
        let len = usize::try_from(most).map_or(self.input.len(), |most| most.min(self.input.len()));
        self.offset += len as u64;
        self.input.split_to(len)
    }

    fn next_record(
        &mut self,
        then: fn(&mut Self, &Record) -> Result<(), Error>,
    ) -> Result<Progress, Error> {
        let record = if self.partial.is_empty()
            && let Some(&record) = self.input.first_chunk::<RECORD_LEN>()
        {
            self.input.advance(RECORD_LEN);
            self.offset += RECORD;
            record
        } else {
            let piece = self.take(RECORD - self.partial.len() as u64);
            self.partial.extend_from_slice(&piece);
            let Some(&record) = self.partial.first_chunk::<RECORD_LEN>() else {
                return Ok(Progress::NeedInput);
            };
            self.partial.clear();
            record
        };
        then(self, &record)?;
        Ok(Progress::Advanced)
    }

    fn header(&mut self, record: &Record) -> Result<(), Error> {
        let at = Plain(self.offset - RECORD);
        if is_zero(record) {
            self.zero_record(at);
            return Ok(());
        }
        if self.last == LastRecord::Zero {
            self.end_after_lone_zero(at);
            return Ok(());
        }
        let header = Header(record);
        if !tar_checksum::is_valid(header.0) {
            return self.reject_header(at, header, "this is not a header");
        }
        self.is_tar = true;
        // The size of a hard link is the length of its target.
        let size = match header.typeflag() {
            b'1' => Ok(0),
            _ => header.size(),
        };
        let Ok(size) = size else {
            return self.reject_header(at, header, "the size in this header makes no sense");
        };
        self.last = LastRecord::Header;
        match header.typeflag() {
            flag @ (b'x' | b'X' | b'g' | b'L' | b'K') => self.extension_header(flag, at, size),
            _ => self.member_header(record, at, size),
        }
    }

    fn zero_record(&mut self, at: Plain) {
        if self.extensions.start.take().is_some() {
            self.extensions = Extensions::default();
            self.warn(at, "an extended header amends no member".to_owned());
        }
        if self.options.ignore_zeros {
            return;
        }
        if self.last == LastRecord::Zero {
            self.state = State::Ended;
        }
        self.last = LastRecord::Zero;
    }

    fn end_after_lone_zero(&mut self, end: Plain) {
        let zero = Plain(end.0.saturating_sub(RECORD));
        self.warn(zero, "a lone zero record ends the archive".to_owned());
        self.state = State::Ended;
    }

    fn reject_header(&mut self, at: Plain, header: Header<'_>, why: &str) -> Result<(), Error> {
        if !self.is_tar {
            return Err(error(at, Cause::NotTar));
        }
        self.extensions = Extensions::default();
        if self.last != LastRecord::Bad {
            let name = match header.dialect() {
                // The record may be part of a file.
                Dialect::V7 => String::new(),
                _ => format!("{}: ", printable(&header.name())),
            };
            self.damaged(at, format!("{name}{why}; skipping to the next header"));
        }
        self.last = LastRecord::Bad;
        Ok(())
    }

    fn extension_header(&mut self, flag: u8, at: Plain, size: u64) -> Result<(), Error> {
        let limits = &self.options.limits;
        let is_name = matches!(flag, b'L' | b'K');
        if is_name {
            // A NUL follows the name.
            Limit::NameBytes
                .check(limits, size.saturating_sub(1))
                .map_err(|cause| error(at, cause))?;
        }
        self.state = State::Extension(Extension {
            flag,
            at,
            left: size,
            padding: padding(size),
            body: pax::Body::new(size, !is_name, &self.options.limits),
        });
        Ok(())
    }

    fn extension(&mut self, piece: &[u8]) -> Result<(), Error> {
        let State::Extension(extension) = &mut self.state else {
            return Ok(());
        };
        let len = usize::try_from(extension.left).unwrap_or(usize::MAX);
        let (body, padding) = piece.split_at(len.min(piece.len()));
        let (flag, at) = (extension.flag, extension.at);
        extension
            .body
            .push(body, &self.options.limits)
            .map_err(|cause| error(at, cause))?;
        extension.left -= body.len() as u64;
        extension.padding -= padding.len() as u64;
        if extension.left + extension.padding > 0 {
            return Ok(());
        }
        let State::Extension(extension) = std::mem::take(&mut self.state) else {
            return Ok(());
        };
        let (body, notes) = extension.body.finish();
        self.report_notes(at, notes);
        let name = || Some(text(&body).to_vec()).filter(|name| !name.is_empty());
        match flag {
            b'g' => return self.apply_global_header(at, &body),
            b'L' => self.extensions.long_name = name(),
            b'K' => self.extensions.long_link = name(),
            _ => {
                let mut keywords = Box::new(self.global_keywords.clone());
                self.read_keywords(&mut keywords, at, &body)?;
                self.extensions.keywords = Some(keywords);
                self.extensions.body = body;
                self.extensions.is_stale = false;
            }
        }
        self.extensions.start.get_or_insert(at);
        Ok(())
    }

    fn apply_global_header(&mut self, at: Plain, body: &[u8]) -> Result<(), Error> {
        let mut keywords = std::mem::take(&mut self.global_keywords);
        let is_clean = self.read_keywords(&mut keywords, at, body)?;
        self.save_global_header(body, is_clean);
        // A map belongs to one file.
        keywords.sparse = SparseKeywords::default();
        Limit::GlobalBytes
            .check(&self.options.limits, keywords.bytes())
            .map_err(|cause| error(at, cause))?;
        self.global_keywords = keywords;
        // Not immediately, because each global header would apply it again.
        self.extensions.is_stale = true;
        Ok(())
    }

    /// Keywords of the pax header before a member, on top of the global ones.
    fn local_keywords(
        &self,
        at: Plain,
        extensions: &mut Extensions,
    ) -> Result<Option<Box<pax::Keywords>>, Error> {
        let local = extensions.keywords.take();
        if local.is_none() || !extensions.is_stale {
            return Ok(local);
        }
        let mut keywords = Box::new(self.global_keywords.clone());
        keywords
            .read(&extensions.body, &self.options.limits, &mut Vec::new())
            .map_err(|cause| error(at, cause))?;
        Ok(Some(keywords))
    }

    fn save_global_header(&mut self, body: &[u8], is_clean: bool) {
        let Some(globals) = &mut self.globals else {
            return;
        };
        let bytes = globals.iter().map(Vec::len).sum::<usize>() + body.len();
        if is_clean && bytes <= MAX_SAVED_GLOBAL_BYTES {
            Arc::make_mut(globals).push(body.to_vec());
        } else {
            self.globals = None;
        }
    }

    /// Applies the body of a pax header. Returns whether all of it is valid.
    fn read_keywords(
        &mut self,
        keywords: &mut pax::Keywords,
        at: Plain,
        body: &[u8],
    ) -> Result<bool, Error> {
        let mut notes = Vec::new();
        let read = keywords.read(body, &self.options.limits, &mut notes);
        let is_clean = notes.is_empty();
        self.report_notes(at, notes);
        read.map_err(|cause| error(at, cause))?;
        Ok(is_clean)
    }

    fn member_header(&mut self, record: &Record, at: Plain, size: u64) -> Result<(), Error> {
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

    fn header_map(&mut self, record: &Record) -> Result<(), Error> {
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

    fn payload_map(&mut self, record: &Record) -> Result<(), Error> {
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
    fn skip(&mut self, rest: u64) {
        self.state = State::Content(Content {
            payload: 0,
            rest,
            is_announced: false,
        });
    }

    fn read_content(&mut self) -> Progress {
        let State::Content(content) = &mut self.state else {
            return Progress::Advanced;
        };
        let (payload, rest) = (content.payload, content.rest);
        if payload + rest == 0 {
            if content.is_announced {
                self.events.push_back(Event::MemberEnd);
            }
            self.state = State::Header;
            return Progress::Advanced;
        }
        let taken = self.take(if payload > 0 { payload } else { rest });
        if taken.is_empty() {
            return Progress::NeedInput;
        }
        let len = taken.len() as u64;
        if let State::Content(content) = &mut self.state {
            if payload > 0 {
                content.payload -= len;
                self.events.push_back(Event::Payload(taken));
            } else {
                content.rest -= len;
            }
        }
        Progress::Advanced
    }

    fn finish_input(&mut self) -> Result<(), Error> {
        let part = match &self.state {
            State::Header if self.last == LastRecord::Bad || !self.is_tar => {
                return self.finish_between_members();
            }
            State::Header if !is_zero(&self.partial) => TruncatedIn::Header,
            State::Header if self.extensions.start.is_some() => TruncatedIn::Extension,
            State::Header => return self.finish_between_members(),
            State::Extension(_) | State::HeaderMap(..) | State::PayloadMap(..) => {
                TruncatedIn::Extension
            }
            State::Content(Content { payload: 1.., .. }) => TruncatedIn::Payload,
            State::Content(content) => {
                if content.is_announced {
                    self.events.push_back(Event::MemberEnd);
                }
                TruncatedIn::Padding
            }
            State::Ended => return Ok(()),
        };
        Err(error(self.offset(), Cause::Truncated(part)))
    }

    fn finish_between_members(&mut self) -> Result<(), Error> {
        let is_empty = self.offset == 0 && self.partial.is_empty();
        let is_accepted = self.is_tar || (self.options.accepts_empty && is_empty);
        if self.last == LastRecord::Zero {
            self.end_after_lone_zero(self.offset());
        } else if !is_accepted {
            return Err(error(Plain(0), Cause::NotTar));
        }
        self.state = State::Ended;
        Ok(())
    }

    fn warn(&mut self, offset: Plain, text: String) {
        self.events
            .push_back(Event::Warning(Warning { offset, text }));
    }

    fn damaged(&mut self, offset: Plain, text: String) {
        self.events
            .push_back(Event::Damaged(Warning { offset, text }));
    }

    fn report_notes(&mut self, offset: Plain, notes: Vec<Note>) {
        for note in notes {
            match note {
                Note::Warning(text) => self.warn(offset, text),
                Note::Damaged(text) => self.damaged(offset, text),
            }
        }
    }
}

impl PendingMember {
    fn rest(&self) -> u64 {
        self.stored + padding(self.stored) - self.map_bytes
    }
}

fn error(offset: Plain, cause: Cause) -> Error {
    Error { offset, cause }
}

fn padding(len: u64) -> u64 {
    len.next_multiple_of(RECORD) - len
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tar::{Device, Timestamp};

    /// A header under construction, by default ustar.
    #[derive(Clone)]
    struct Block(Record);

    impl Block {
        fn new(name: &str, flag: u8, size: usize) -> Self {
            Self([0; RECORD_LEN])
                .put(0, name.as_bytes())
                .put(100, b"0000644\0")
                .put(108, b"0001750\0")
                .put(116, b"0001751\0")
                .put(124, format!("{size:011o}\0").as_bytes())
                .put(136, b"00000000100\0")
                .put(156, &[flag])
                .put(257, b"ustar\x0000")
        }

        fn gnu(name: &str, flag: u8, size: usize) -> Self {
            Self::new(name, flag, size).put(257, b"ustar  \0")
        }

        fn put(mut self, at: usize, bytes: &[u8]) -> Self {
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
            self
        }

        fn done(self) -> Vec<u8> {
            let summed = self.put(148, b"        ");
            let sum: u32 = summed.0.iter().map(|&byte| u32::from(byte)).sum();
            summed
                .put(148, format!("{sum:06o}\0 ").as_bytes())
                .0
                .to_vec()
        }

        fn with(self, payload: &[u8]) -> Vec<u8> {
            let mut bytes = self.done();
            bytes.extend_from_slice(payload);
            bytes.resize(bytes.len().next_multiple_of(RECORD_LEN), 0);
            bytes
        }
    }

    fn file(name: &str, payload: &[u8]) -> Vec<u8> {
        Block::new(name, b'0', payload.len()).with(payload)
    }

    fn extension(flag: u8, keywords: &[(&str, &str)]) -> Vec<u8> {
        let mut body = String::new();
        for (key, value) in keywords {
            let rest = format!(" {key}={value}\n");
            let mut len = rest.len() + 1;
            while format!("{len}{rest}").len() > len {
                len += 1;
            }
            body.extend([len.to_string(), rest]);
        }
        Block::new("pax", flag, body.len()).with(body.as_bytes())
    }

    fn long(flag: u8, name: &str) -> Vec<u8> {
        let body = format!("{name}\0");
        Block::gnu("././@LongLink", flag, body.len()).with(body.as_bytes())
    }

    fn zeros() -> Vec<u8> {
        vec![0; 2 * RECORD_LEN]
    }

    fn junk() -> Vec<u8> {
        vec![b'j'; RECORD_LEN]
    }

    #[derive(Clone, PartialEq, Eq, Debug, Default)]
    struct Found {
        members: Vec<(Member, Vec<u8>)>,
        remarks: Vec<String>,
    }

    impl Found {
        fn names(&self) -> Vec<&str> {
            let names = self.members.iter().map(|(member, _)| &member.name);
            names
                .map(|name| std::str::from_utf8(name).unwrap())
                .collect()
        }

        fn one(&self) -> &Member {
            assert_eq!(
                (self.members.len(), &self.remarks[..]),
                (1, &["end".to_owned()][..])
            );
            &self.members[0].0
        }
    }

    /// Parses an archive that arrives in pieces of these lengths, in turn.
    fn read_in_pieces(archive: &[u8], lens: &[usize], options: Options) -> Found {
        let mut parser = Parser::new(options);
        let mut rest = Bytes::copy_from_slice(archive);
        let mut lens = lens.iter().cycle();
        let mut found = Found::default();
        loop {
            match parser.pull() {
                Ok(Event::NeedInput) if rest.is_empty() => parser.finish(),
                Ok(Event::NeedInput) => {
                    let len = lens.next().map_or(rest.len(), |&len| len.min(rest.len()));
                    parser.push(rest.split_to(len));
                }
                Ok(Event::Member(member)) => found.members.push((*member, Vec::new())),
                Ok(Event::Payload(bytes)) => {
                    assert!(!bytes.is_empty());
                    found
                        .members
                        .last_mut()
                        .unwrap()
                        .1
                        .extend_from_slice(&bytes);
                }
                Ok(Event::MemberEnd) => {
                    let (member, payload) = found.members.last().unwrap();
                    assert_eq!(member.payload.len(), payload.len() as u64);
                    assert_eq!(member_bytes(archive, member), payload);
                }
                Ok(Event::Warning(warning)) => found.remarks.push(format!("warning {warning:?}")),
                Ok(Event::Damaged(warning)) => found.remarks.push(format!("damaged {warning:?}")),
                Ok(Event::End) => {
                    found.remarks.push("end".to_owned());
                    return found;
                }
                Err(error) => {
                    assert_eq!(parser.pull().err(), Some(error.clone()));
                    found.remarks.push(format!("{:?}", error.cause));
                    return found;
                }
            }
        }
    }

    fn member_bytes<'a>(archive: &'a [u8], member: &Member) -> &'a [u8] {
        let at = |offset: Plain| usize::try_from(offset.0).unwrap();
        &archive[at(member.payload.start())..at(member.payload.end())]
    }

    fn read(pieces: &[Vec<u8>]) -> Found {
        read_in_pieces(&pieces.concat(), &[], Options::default())
    }

    #[test]
    fn a_plain_member_has_all_its_fields() {
        let header = Block::new("name", b'0', 5)
            .put(265, b"me")
            .put(297, b"us")
            .put(345, b"dir");
        let found = read(&[header.with(b"hello"), zeros()]);
        let expected = Member {
            header: Plain(0),
            payload: Extent::with_len(Plain(512), 5),
            name: b"dir/name".to_vec(),
            kind: MemberKind::File,
            mode: 0o644,
            uid: 0o1750,
            gid: 0o1751,
            user: b"me".to_vec(),
            group: b"us".to_vec(),
            mtime: Timestamp {
                seconds: 64,
                nanoseconds: 0,
            },
            size: 5,
            sparse: None,
            xattrs: Vec::new(),
            has_global_keywords: false,
        };
        assert_eq!(found.one(), &expected);
        assert_eq!(found.members[0].1, b"hello");
    }

    #[test]
    fn payloads_share_the_pushed_bytes() {
        let archive = Bytes::from([file("a", b"hello"), zeros()].concat());
        let mut parser = Parser::new(Options::default());
        parser.push(archive.clone());
        assert!(matches!(parser.pull(), Ok(Event::Member(_))));
        let Ok(Event::Payload(payload)) = parser.pull() else {
            panic!("a payload follows its member");
        };
        assert_eq!(payload.as_ptr(), archive[RECORD_LEN..].as_ptr());
        assert_eq!(parser.offset(), Plain(517));
    }

    // Promises: types-flags
    #[test]
    fn typeflags_map_to_kinds() {
        let device = Device { major: 1, minor: 3 };
        let kinds = [
            (b'0', MemberKind::File),
            (0, MemberKind::File),
            (b'7', MemberKind::File),
            (b'S', MemberKind::File),
            (b'1', MemberKind::HardLink(b"to".to_vec())),
            (b'2', MemberKind::Symlink(b"to".to_vec())),
            (b'3', MemberKind::CharDevice(device)),
            (b'4', MemberKind::BlockDevice(device)),
            (b'5', MemberKind::Directory),
            (b'D', MemberKind::Directory),
            (b'6', MemberKind::Fifo),
        ];
        for (flag, kind) in kinds {
            let header = Block::new("name", flag, 0).put(157, b"to");
            let header = header.put(329, b"0000001\0").put(337, b"0000003\0");
            assert_eq!(read(&[header.done(), zeros()]).one().kind, kind);
        }
    }

    // Promises: types-flags
    #[test]
    fn a_trailing_slash_makes_a_file_a_directory() {
        for flag in [0, b'0', b'7'] {
            let found = read(&[Block::new("name/", flag, 0).done(), zeros()]);
            assert_eq!(found.one().kind, MemberKind::Directory);
        }
        let unknown = Block::new("name/", b'Q', 5).with(b"hello");
        let sparse = Block::new("name/", b'S', 5).with(b"hello");
        for archive in [unknown, sparse] {
            let found = read(&[archive, zeros()]);
            assert_eq!(found.members[0].0.kind, MemberKind::File);
            assert_eq!(found.members[0].1, b"hello");
        }
    }

    // Promises: limit-pax
    #[test]
    fn large_values_without_effect_do_not_end_an_archive() {
        let dumpdir = extension(b'x', &[("GNU.dumpdir", &"Y".repeat(17 << 20))]);
        let fork = "f".repeat(5 << 20);
        let attribute = ("SCHILY.xattr.com.apple.ResourceFork", &*fork);
        let fork = extension(b'x', &[attribute, ("path", "renamed")]);
        let archive = [dumpdir, file("a", b"1"), fork, file("b", b"2"), zeros()];
        let found = read(&archive);
        assert_eq!(found.names(), ["a", "renamed"]);
        assert_eq!(found.remarks.len(), 2, "{:?}", found.remarks);
        assert!(found.remarks[0].contains("com.apple.ResourceFork"));
    }

    // Promises: hardlink-content
    #[test]
    fn only_files_have_payloads_whatever_their_headers_say() {
        for flag in *b"123456" {
            let found = read(&[Block::new("a", flag, 1024).done(), file("b", b""), zeros()]);
            assert_eq!(found.names(), ["a", "b"]);
            assert_eq!(found.members[0].0.size, 0);
        }
    }

    // Promises: types-flags
    #[test]
    fn unknown_types_are_files_with_a_warning() {
        let found = read(&[Block::new("a", b'Q', 5).with(b"hello"), zeros()]);
        assert_eq!(found.members[0].0.kind, MemberKind::File);
        assert_eq!(found.members[0].1, b"hello");
        assert!(found.remarks[0].starts_with("warning"), "{found:?}");
    }

    // Promises: types-flags
    #[test]
    fn a_dumpdir_is_a_directory_without_payload() {
        let dumpdir = Block::gnu("d/", b'D', 6).with(b"Ya\0Yb\0");
        let found = read(&[dumpdir, file("b", b""), zeros()]);
        assert_eq!(found.names(), ["d/", "b"]);
        assert_eq!(found.members[0].1, b"");
    }

    // Promises: types-volumes
    #[test]
    fn volume_labels_are_no_members_and_continued_files_are_lost() {
        let label = Block::gnu("label", b'V', 5).with(b"hello");
        let found = read(&[label, file("b", b""), zeros()]);
        assert_eq!((found.names(), found.remarks.len()), (vec!["b"], 1));
        let continued = Block::gnu("c", b'M', 5).with(b"hello");
        let found = read(&[continued, file("b", b""), zeros()]);
        assert_eq!(found.names(), ["b"]);
        assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
    }

    #[test]
    fn long_names_and_pax_names_come_before_the_header() {
        let archive = [
            long(b'K', "target"),
            long(b'L', "long"),
            Block::gnu("s", b'2', 0).done(),
        ];
        let found = read(&archive);
        assert_eq!(found.one().name, b"long");
        assert_eq!(found.one().kind, MemberKind::Symlink(b"target".to_vec()));
        assert_eq!(found.one().header, Plain(0));

        let pax = extension(b'x', &[("path", "pax")]);
        let found = read(&[pax, long(b'L', "long"), file("a", b""), file("b", b"")]);
        assert_eq!(found.names(), ["pax", "b"]);
        assert_eq!(found.members[1].0.header, Plain(2560));
    }

    // Promises: types-headers
    #[test]
    fn of_two_pax_headers_the_last_counts_alone() {
        let first = extension(b'x', &[("path", "first"), ("uid", "7")]);
        let second = extension(b'X', &[("gid", "8")]);
        let found = read(&[first, second, file("a", b"")]);
        let member = found.one();
        assert_eq!(
            (&member.name[..], member.uid, member.gid),
            (&b"a"[..], 0o1750, 8)
        );
    }

    // Promises: gnu-global
    #[test]
    fn global_headers_add_up_and_give_way_to_local_ones() {
        let found = read(&[
            extension(b'g', &[("uid", "7"), ("gid", "7")]),
            extension(b'g', &[("gid", "8")]),
            file("a", b""),
            extension(b'x', &[("uid", "9")]),
            file("b", b""),
            extension(b'x', &[("gid", "")]),
            file("c", b""),
        ]);
        let owner = |number: usize| {
            let member = &found.members[number].0;
            (member.uid, member.gid)
        };
        assert_eq!(
            [owner(0), owner(1), owner(2)],
            [(7, 8), (9, 8), (7, 0o1751)]
        );
        assert_eq!(found.members[0].0.header, Plain(2048));
    }

    // Promises: hostile-sizes
    #[test]
    fn the_pax_size_wins_but_not_for_extensions_in_between() {
        let archive = [
            extension(b'x', &[("size", "1024")]),
            long(b'L', "long"),
            Block::new("a", b'0', 5).done(),
            file("inside", b""),
            file("too", b""),
            file("b", b""),
        ];
        let found = read(&archive);
        assert_eq!(found.names(), ["long", "b"]);
        assert_eq!(found.members[0].0.size, 1024);
    }

    #[test]
    fn numbers_beyond_octal_are_read() {
        let header = Block::new("a", b'0', 0)
            .put(108, b"\x80\0\0\0\xff\xff\xff\xfe")
            .put(136, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xfe");
        let found = read(&[header.done()]);
        assert_eq!(found.one().uid, 0xffff_fffe);
        assert_eq!(found.one().mtime.seconds, -2);
    }

    #[test]
    fn invalid_fields_damage_a_member_but_keep_it() {
        let header = Block::new("a", b'0', 0).put(108, b"zzz").put(136, b"zzz");
        let found = read(&[header.done()]);
        let member = &found.members[0].0;
        assert_eq!((member.uid, member.mtime.seconds), (u32::MAX, -1));
        assert_eq!(found.remarks.len(), 3);
        assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
    }

    // Promises: damaged-header
    #[test]
    fn bad_records_are_skipped_and_reported_once() {
        let pax = extension(b'x', &[("path", "lost")]);
        let found = read(&[file("a", b""), pax, junk(), junk(), file("b", b""), junk()]);
        assert_eq!(found.names(), ["a", "b"]);
        let damaged = found
            .remarks
            .iter()
            .filter(|remark| remark.starts_with("damaged"));
        assert_eq!(damaged.count(), 2);
        assert_eq!(found.remarks.last().unwrap(), "end");
    }

    #[test]
    fn invalid_size_makes_a_header_bad() {
        let header = Block::new("a", b'0', 0).put(124, &[0xff; 12]);
        let found = read(&[header.done(), file("b", b""), zeros()]);
        assert_eq!(found.names(), ["b"]);
        assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
    }

    #[test]
    fn size_of_a_hard_link_is_ignored() {
        let link = Block::new("a", b'1', 0).put(124, &[0xff; 12]);
        assert_eq!(read(&[link.done(), zeros()]).one().size, 0);
    }

    // Promises: gnu-searched
    #[test]
    fn stream_without_leading_header_is_not_tar() {
        for bytes in [
            vec![],
            b"abc".to_vec(),
            junk(),
            [junk(), file("a", b"")].concat(),
        ] {
            assert_eq!(read(&[bytes]).remarks, ["NotTar"]);
        }
    }

    #[test]
    fn an_archive_of_zeros_is_empty() {
        assert_eq!(read(&[zeros()]).remarks, ["end"]);
    }

    #[test]
    fn zero_records_end_an_archive() {
        let found = read(&[file("a", b""), zeros(), file("b", b"")]);
        assert_eq!((found.names(), found.remarks.len()), (vec!["a"], 1));
        let lone = vec![0; RECORD_LEN];
        for behind in [vec![], file("b", b""), junk()] {
            let found = read(&[file("a", b""), lone.clone(), behind]);
            assert_eq!(found.names(), ["a"]);
            assert!(found.remarks[0].contains("lone zero record"), "{found:?}");
            assert!(found.remarks[0].contains("plain 512"), "{found:?}");
        }
        assert_eq!(read(&[file("a", b"")]).remarks, ["end"]);
    }

    #[test]
    fn zero_records_can_be_ignored() {
        let options = Options {
            ignore_zeros: true,
            ..Options::default()
        };
        let archive = [file("a", b""), zeros(), file("b", b""), zeros()].concat();
        let found = read_in_pieces(&archive, &[], options);
        assert_eq!((found.names(), found.remarks.len()), (vec!["a", "b"], 1));
    }

    // Promises: gnu-cut-header
    #[test]
    fn truncated_archive_error_has_the_offset() {
        let archive = [extension(b'x', &[("path", "p")]), file("a", &[b'x'; 700])].concat();
        let cut = |len: usize| {
            let found = read(&[archive[..len].to_vec()]);
            (found.members.len(), found.remarks[0].clone())
        };
        assert_eq!(cut(100), (0, "NotTar".to_owned()));
        assert_eq!(cut(512), (0, "Truncated(Extension)".to_owned()));
        assert_eq!(cut(530), (0, "Truncated(Extension)".to_owned()));
        assert_eq!(cut(1024), (0, "Truncated(Extension)".to_owned()));
        assert_eq!(cut(1025), (0, "Truncated(Header)".to_owned()));
        assert_eq!(cut(1536), (1, "Truncated(Payload)".to_owned()));
        assert_eq!(cut(2235), (1, "Truncated(Payload)".to_owned()));
        assert_eq!(cut(2236), (1, "Truncated(Padding)".to_owned()));
        assert_eq!(cut(2560), (1, "end".to_owned()));
    }

    #[test]
    fn a_payload_that_is_whole_ends_its_member_even_without_padding() {
        let mut parser = Parser::new(Options::default());
        parser.push(Bytes::from(Block::new("a", b'0', 1).done()));
        assert!(matches!(parser.pull(), Ok(Event::Member(_))));
        assert!(matches!(parser.pull(), Ok(Event::NeedInput)));
        parser.push(Bytes::from_static(b"x"));
        assert!(matches!(parser.pull(), Ok(Event::Payload(_))));
        assert!(matches!(parser.pull(), Ok(Event::NeedInput)));
        parser.finish();
        assert!(matches!(parser.pull(), Ok(Event::MemberEnd)));
        assert!(parser.pull().is_err());
    }

    // Promises: hostile-memory, limit-name, limit-pax, limit-global, limit-error
    #[test]
    fn limits_stop_an_archive() {
        let limited = |limits: Limits, pieces: &[Vec<u8>]| {
            let options = Options {
                limits,
                ..Options::default()
            };
            read_in_pieces(&pieces.concat(), &[], options).remarks[0].clone()
        };
        let few = Limits {
            pax_bytes: 40,
            global_bytes: 8,
            name_bytes: 10,
            ..Limits::default()
        };
        let name = long(b'L', "eleven-long");
        assert!(limited(few.clone(), &[name]).contains("NameBytes"));
        let path = extension(b'x', &[("path", "eleven-long")]);
        assert!(limited(few.clone(), &[path]).contains("NameBytes"));
        let pax = extension(b'x', &[("GNU.sparse.map", &"1,".repeat(20))]);
        assert!(limited(few.clone(), &[pax]).contains("PaxBytes"));
        let global = extension(b'g', &[("path", "nine-long")]);
        assert!(limited(few, &[global]).contains("GlobalBytes"));
    }

    fn read_limited(limits: Limits, pieces: &[Vec<u8>]) -> Found {
        let options = Options {
            limits,
            ..Options::default()
        };
        read_in_pieces(&pieces.concat(), &[], options)
    }

    #[test]
    fn first_member_beyond_a_total_limit_is_not_emitted() {
        let archive = [
            Block::new("d", b'5', 0).done(),
            file("a", b"12345"),
            Block::new("pax", b'2', 0).done(),
            file("b", b"678"),
            zeros(),
        ];
        let sized = |size| {
            let limits = Limits {
                size,
                ..Limits::default()
            };
            read_limited(limits, &archive)
        };
        assert_eq!(sized(8).names(), ["d", "a", "pax", "b"]);
        let short = sized(7);
        assert_eq!(short.names(), ["d", "a", "pax"]);
        assert!(short.remarks[0].starts_with("TooLarge"), "{short:?}");
        let counted = |entries| {
            let limits = Limits {
                entries,
                ..Limits::default()
            };
            read_limited(limits, &archive)
        };
        assert_eq!(counted(4).names(), ["d", "a", "pax", "b"]);
        let few = counted(3);
        assert_eq!(few.names(), ["d", "a", "pax"]);
        assert!(few.remarks[0].starts_with("TooManyEntries"), "{few:?}");
    }

    #[test]
    fn holes_count_as_what_they_read_as() {
        let limits = Limits {
            size: 32_767,
            ..Limits::default()
        };
        let found = read_limited(limits, &[sparse_pax("1\n0\n5\n", b"hello"), zeros()]);
        assert_eq!(found.names(), Vec::<&str>::new());
        assert!(found.remarks[0].contains("total: 32768"), "{found:?}");
    }

    #[test]
    fn sizes_that_overflow_when_added_exceed_every_limit() {
        let hole = |size: &str| {
            let keywords = [("GNU.sparse.map", "0,0"), ("GNU.sparse.size", size)];
            [extension(b'x', &keywords), file("hole", b"")].concat()
        };
        let limits = Limits {
            size: 1 << 63,
            ..Limits::default()
        };
        let most = i64::MAX.to_string();
        let found = read_limited(limits, &[hole(&most), hole(&most), hole(&most), zeros()]);
        assert_eq!(found.names(), ["hole"]);
    }

    // Promises: limit-components
    #[test]
    fn a_path_that_is_too_deep_loses_its_member_alone() {
        let limits = Limits {
            path_depth: 3,
            ..Limits::default()
        };
        let pieces = [
            file("/a//b/c/", b""),
            extension(b'x', &[("path", "a/b/c/d")]),
            file("x", b"payload"),
            extension(b'x', &[("linkpath", "a/b/c/d")]),
            Block::new("hard", b'1', 512).done(),
            extension(b'x', &[("linkpath", "a/b/c/d")]),
            Block::new("soft", b'2', 0).done(),
            file("last", b"1"),
            zeros(),
        ];
        let found = read_limited(limits, &pieces);
        assert_eq!(found.names(), ["/a//b/c/", "soft", "last"]);
        let told = found.remarks.iter().filter(|remark| {
            remark.starts_with("damaged") && remark.contains("more components in a name")
        });
        assert_eq!((told.count(), found.remarks.len()), (2, 3), "{found:?}");
    }

    #[test]
    fn payload_of_too_deep_member_is_not_parsed_as_headers() {
        let limits = Limits {
            path_depth: 3,
            ..Limits::default()
        };
        let mut sparse = sparse_gnu();
        let last = sparse.len() - RECORD_LEN;
        sparse.truncate(last);
        sparse.extend(file("smuggled", b""));
        let deep = extension(b'x', &[("path", "a/b/c/d")]);
        let found = read_limited(limits, &[deep, sparse, file("last", b"1"), zeros()]);
        assert_eq!(found.names(), ["last"], "{found:?}");
    }

    // Promises: limit-metadata
    #[test]
    fn metadata_bytes_of_all_members_are_limited() {
        let limits = Limits {
            metadata_bytes: 10,
            ..Limits::default()
        };
        let large = "v".repeat(4097);
        let member = |value: &str| {
            let key = ("SCHILY.xattr.user.k", value);
            [extension(b'x', &[key]), file("f", b"")].concat()
        };
        let fits = read_limited(limits.clone(), &[member("v"), member(&large), zeros()]);
        assert_eq!(fits.names(), ["f", "f"]);
        let found = read_limited(limits, &[member(&large), member(&large), zeros()]);
        assert_eq!(found.names(), ["f"]);
        assert!(found.remarks[0].contains("MetadataBytes"), "{found:?}");
    }

    fn sparse_gnu() -> Vec<u8> {
        let piece = |offset: u64| format!("{offset:011o}\0{:011o}\0", 512);
        let mut header = Block::gnu("sparse", b'S', 5 * 512);
        for number in 0..4_usize {
            header = header.put(386 + 24 * number, piece(number as u64 * 4096).as_bytes());
        }
        let header = header.put(482, b"\x01").put(483, b"00000100000\0");
        let behind = Block([0; RECORD_LEN]).put(0, piece(5 * 4096).as_bytes());
        [header.done(), behind.0.to_vec(), vec![b'q'; 5 * 512]].concat()
    }

    fn sparse_pax(map: &str, payload: &[u8]) -> Vec<u8> {
        let keywords = [
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "sparse"),
            ("GNU.sparse.realsize", "32768"),
        ];
        let mut stored = map.as_bytes().to_vec();
        stored.resize(map.len().next_multiple_of(RECORD_LEN), 0);
        stored.extend_from_slice(payload);
        [
            extension(b'x', &keywords),
            file("GNUSparseFile.0/sparse", &stored),
        ]
        .concat()
    }

    fn pieces(numbers: &[(u64, u64)]) -> Vec<Segment> {
        let piece = |&(offset, len)| Segment { offset, len };
        numbers.iter().map(piece).collect()
    }

    #[test]
    fn header_sparse_map_continues_in_next_records() {
        let found = read(&[sparse_gnu(), file("b", b"")]);
        let member = &found.members[0].0;
        let map = [
            (0, 512),
            (4096, 512),
            (8192, 512),
            (12288, 512),
            (20480, 512),
        ];
        assert_eq!(member.sparse, Some(pieces(&map)));
        assert_eq!((member.size, member.payload.start()), (32768, Plain(1024)));
        assert_eq!(found.names(), ["sparse", "b"]);
    }

    #[test]
    fn payload_sparse_map_is_not_content() {
        let found = read(&[sparse_pax("2\n0\n3\n32768\n0\n", b"abc"), file("b", b"")]);
        let member = &found.members[0].0;
        assert_eq!(
            (member.sparse.clone(), member.size),
            (Some(pieces(&[(0, 3)])), 32768)
        );
        assert_eq!(found.members[0].1, b"abc");
        assert_eq!(found.names(), ["sparse", "b"]);
    }

    // Promises: gnu-sparse-padding
    #[test]
    fn pieces_follow_each_other_without_padding() {
        let keywords = [
            ("GNU.sparse.size", "4096"),
            ("GNU.sparse.numblocks", "2"),
            ("GNU.sparse.map", "0,3,512,2"),
        ];
        let found = read(&[extension(b'x', &keywords), file("f", b"abcde")]);
        let pieces = [(0, 3), (512, 2)].map(|(offset, len)| Segment { offset, len });
        assert_eq!(found.one().sparse.as_deref(), Some(&pieces[..]));
        assert_eq!(found.one().payload.len(), 5);
    }

    #[test]
    fn a_map_in_keywords_may_be_empty() {
        let keywords = [("GNU.sparse.size", "4096"), ("GNU.sparse.map", "4096,0")];
        let found = read(&[extension(b'x', &keywords), file("hole", b"")]);
        assert_eq!(
            (found.one().size, &found.one().sparse),
            (4096, &Some(Vec::new()))
        );
    }

    #[test]
    fn bytes_behind_the_last_piece_are_skipped() {
        let found = read(&[sparse_pax("1\n0\n3\n", &[b'x'; 2000]), file("b", b"")]);
        assert_eq!(found.members[0].1, b"xxx");
        assert_eq!(found.names(), ["sparse", "b"]);
        assert_eq!(found.remarks, ["end"]);
    }

    // Promises: gnu-sparse-unsound
    #[test]
    fn invalid_sparse_file_is_skipped_and_next_member_read() {
        let unsound = [
            "2\n0\n3\n2\n3\n",
            "1\n32767\n2\n",
            "1\n0\n9\n",
            "9\n0\n",
            "x\n",
        ];
        for map in unsound {
            let found = read(&[sparse_pax(map, b"abcdef"), file("b", b"")]);
            assert_eq!(found.names(), ["b"], "{map:?}");
            assert!(found.remarks[0].starts_with("damaged"), "{found:?}");
            assert_eq!(found.remarks[1..], ["end"], "{map:?}");
        }
    }

    #[test]
    fn a_map_does_not_reach_beyond_its_member() {
        let map = format!("300\n{}", "1\n".repeat(254));
        let found = read(&[sparse_pax(&map, b""), file("b", b"")]);
        assert_eq!(found.names(), ["b"]);
        assert_eq!(found.remarks.len(), 2);
    }

    fn archive() -> Vec<u8> {
        [
            extension(b'g', &[("comment", "hello"), ("uname", "someone")]),
            file("a", b"hello"),
            extension(b'x', &[("mtime", "-1.5"), ("SCHILY.xattr.user.k", "v")]),
            file("b", &[b'b'; 1500]),
            junk(),
            long(b'L', "long"),
            Block::gnu("s", b'2', 0).put(157, b"to").done(),
            sparse_gnu(),
            sparse_pax("2\n0\n3\n32768\n0\n", b"abc"),
            Block::new("d/", b'5', 0).done(),
            zeros(),
        ]
        .concat()
    }

    proptest! {
        #[test]
        fn events_do_not_depend_on_push_boundaries(
            lens in prop::collection::vec(1_usize..1500, 1..20),
            cut in 0..archive().len(),
        ) {
            let archive = &archive()[..cut];
            let whole = read_in_pieces(archive, &[], Options::default());
            let pieces = read_in_pieces(archive, &lens, Options::default());
            prop_assert_eq!(whole, pieces);
        }

        #[test]
        fn flipped_bytes_neither_panic_nor_loop(
            flips in prop::collection::vec((0..archive().len(), any::<u8>()), 1..20),
            healed: bool,
        ) {
            let mut archive = archive();
            for (at, byte) in flips {
                archive[at] = byte;
                if healed {
                    heal(&mut archive, at);
                }
            }
            read_in_pieces(&archive, &[], Options::default());
        }
    }

    /// Corrects the checksum of the record around `at`, so that the parser reads it.
    fn heal(archive: &mut [u8], at: usize) {
        let start = at - at % RECORD_LEN;
        if let Some(record) = archive[start..].first_chunk_mut::<RECORD_LEN>() {
            let healed = Block(*record).done();
            record.copy_from_slice(&healed);
        }
    }

    #[test]
    fn parser_that_needs_input_holds_no_buffer() {
        let pool = crate::base::buffer_pool::BufferPool::new(RECORD);
        let mut record = pool.acquire(RECORD_LEN).expect("open");
        record.copy_from_slice(&Block::new("a", b'x', 1).done());
        let mut parser = Parser::new(Options::default());
        parser.push(record.freeze());
        while !matches!(parser.pull(), Ok(Event::NeedInput)) {}
        assert_eq!(pool.used_bytes(), 0);
    }
}
