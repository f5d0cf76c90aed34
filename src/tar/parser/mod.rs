//! The push parser for tar.

mod extensions;
mod members;

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Buf, Bytes};

use crate::base::extent::Plain;
use crate::base::tar_checksum;
use crate::tar::assemble::Extensions;
use crate::tar::error::{Cause, Error, Note, TruncatedIn, Warning, printable};
use crate::tar::header::{Dialect, Header, RECORD_LEN, Record};
use crate::tar::old_sparse::HeaderMap;
use crate::tar::sparse::MapReader;
use crate::tar::{Limits, Member, MemberTotals, RECORD, pax};

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
    /// The second one of two.
    EndMarker,
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
    /// it, and `globals` the bodies of the global pax headers. Bodies that exceed a limit are an error.
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

    /// Whether two zero records ended the archive, so that no member after the last one is lost.
    pub fn has_end_marker(&self) -> bool {
        self.last == LastRecord::EndMarker
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
            self.last = LastRecord::EndMarker;
        } else {
            self.last = LastRecord::Zero;
        }
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
mod tests;
