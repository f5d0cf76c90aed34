//! Push bytes, pull: need more · member · payload · end.

use std::collections::VecDeque;

use bytes::{Buf, Bytes};

use super::error::{Cause, Error, Note, Part, Warning, shown};
use super::gnu::HeaderMap;
use super::header::{Header, RECORD_LEN, Record, text};
use super::limits::Limit;
use super::member::{Extensions, member};
use super::sparse::{MapError, MapFault, MapReader, checked};
use super::{Kind, Limits, Member, RECORD, Segment, pax};
use crate::base::extent::{Extent, Plain};

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
    /// Something is lost, a member or a field of one, as it is for GNU tar, whose exit status is
    /// then 2; what follows can be read.
    Damaged(Warning),
    /// The archive is complete. Bytes pushed from now on are ignored.
    End,
}

/// Turns plain bytes into members.
#[derive(Debug)]
pub struct Parser {
    options: Options,
    /// Pushed and not yet taken.
    input: Bytes,
    /// The part of a record that earlier pushes brought; less than a record.
    partial: Vec<u8>,
    /// Where `input` begins.
    offset: u64,
    /// Whether no bytes follow `input`.
    finished: bool,
    state: State,
    /// Found and not yet pulled.
    events: VecDeque<Event>,
    failure: Option<Error>,
    /// What amends the next header.
    extensions: Extensions,
    /// What global pax headers left in force.
    global: pax::Keywords,
    /// Whether a header was ever found.
    is_tar: bool,
    /// Whether the last record was zero.
    after_zero: bool,
    /// Whether the last record was no header, though it should have been.
    lost: bool,
}

#[derive(Debug)]
enum State {
    /// A header is next.
    Header,
    /// The body of an extension is next.
    Extension(Extension),
    /// A record with more of a sparse map is next.
    HeaderMap(Box<Draft>, HeaderMap),
    /// A record of the map before a payload is next.
    PayloadMap(Box<Draft>, MapReader),
    /// A payload is next, or what is skipped.
    Content(Content),
    /// Nothing is next.
    Ended,
}

/// An extension whose body is being gathered.
#[derive(Debug)]
struct Extension {
    flag: u8,
    /// Its header.
    at: Plain,
    /// Bytes of the body still to come.
    left: u64,
    /// Bytes of padding behind it.
    padding: u64,
    body: Vec<u8>,
}

/// A sparse member whose map is being read.
#[derive(Debug)]
struct Draft {
    member: Member,
    /// Its header.
    at: Plain,
    /// Bytes of the file with its holes, as far as they are known.
    size: Option<u64>,
    /// Bytes in the archive, the map before the payload included, padding aside; below 2⁶³.
    stored: u64,
    /// How many of them the map has taken.
    taken: u64,
}

/// Bytes behind a header.
#[derive(Debug)]
struct Content {
    /// Bytes of payload still to come.
    payload: u64,
    /// Bytes to skip behind them.
    rest: u64,
    /// Whether they belong to a member that was announced.
    announced: bool,
}

/// What one step came to.
enum Progress {
    Made,
    Starved,
}

impl Parser {
    /// A parser at the beginning of an archive.
    pub fn new(options: Options) -> Self {
        Self {
            options,
            input: Bytes::new(),
            partial: Vec::new(),
            offset: 0,
            finished: false,
            state: State::Header,
            events: VecDeque::new(),
            failure: None,
            extensions: Extensions::default(),
            global: pax::Keywords::default(),
            is_tar: false,
            after_zero: false,
            lost: false,
        }
    }

    /// Takes the next plain bytes; called only after [`Event::NeedInput`].
    pub fn push(&mut self, plain: Bytes) {
        debug_assert!(self.input.is_empty(), "pushed before the input was used up");
        self.input = plain;
    }

    /// Says that no bytes follow.
    pub fn finish(&mut self) {
        self.finished = true;
    }

    /// The first byte that no event covers and that the parser has not looked at.
    pub fn offset(&self) -> Plain {
        Plain(self.offset)
    }

    /// The next event.
    ///
    /// # Errors
    /// When the bytes are not a tar archive, exceed a limit, or end in the middle; everything
    /// before that was pulled by then. Fused.
    pub fn pull(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            if let Some(failure) = &self.failure {
                return Err(failure.clone());
            }
            let step = match self.step() {
                Ok(Progress::Starved) if self.finished => self.close(),
                Ok(Progress::Starved) => return Ok(Event::NeedInput),
                Ok(Progress::Made) => Ok(()),
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
                    return Ok(Progress::Starved);
                }
                let taken = self.take(left);
                self.extension(&taken)?;
                Ok(Progress::Made)
            }
            State::Content(_) => Ok(self.content()),
            State::Ended => {
                self.events.push_back(Event::End);
                Ok(Progress::Made)
            }
        }
    }

    /// Up to `most` bytes of the input.
    fn take(&mut self, most: u64) -> Bytes {
        let len = usize::try_from(most).map_or(self.input.len(), |most| most.min(self.input.len()));
        self.offset += len as u64;
        self.input.split_to(len)
    }

    /// Hands the next record on, once it is complete.
    fn next_record(
        &mut self,
        then: fn(&mut Self, &Record) -> Result<(), Error>,
    ) -> Result<Progress, Error> {
        if self.partial.is_empty()
            && let Some(&record) = self.input.first_chunk::<RECORD_LEN>()
        {
            self.input.advance(RECORD_LEN);
            self.offset += RECORD;
            then(self, &record)?;
            return Ok(Progress::Made);
        }
        let missing = RECORD - self.partial.len() as u64;
        let piece = self.take(missing);
        self.partial.extend_from_slice(&piece);
        let Some(&record) = self.partial.first_chunk::<RECORD_LEN>() else {
            return Ok(Progress::Starved);
        };
        self.partial.clear();
        then(self, &record)?;
        Ok(Progress::Made)
    }

    fn header(&mut self, record: &Record) -> Result<(), Error> {
        let at = Plain(self.offset - RECORD);
        if is_zero(record) {
            self.zero(at);
            return Ok(());
        }
        if self.after_zero && !self.options.ignore_zeros {
            self.end_after_lone_zero();
            return Ok(());
        }
        let header = Header(record);
        if !header.checksum_holds() {
            return self.no_header(at, "this is not a header");
        }
        self.is_tar = true;
        // A hard link's size says how long its target is.
        let size = match header.typeflag() {
            b'1' => Ok(0),
            _ => header.size(),
        };
        let Ok(size) = size else {
            return self.no_header(at, "the size in this header makes no sense");
        };
        self.lost = false;
        match header.typeflag() {
            flag @ (b'x' | b'X' | b'g' | b'L' | b'K') => self.extension_header(flag, at, size),
            _ => self.member_header(record, at, size),
        }
    }

    fn zero(&mut self, at: Plain) {
        if self.extensions.start.take().is_some() {
            self.extensions = Extensions::default();
            self.warn(at, "an extended header amends no member".to_owned());
        }
        if self.options.ignore_zeros {
            return;
        }
        if self.after_zero {
            self.state = State::Ended;
        }
        self.after_zero = true;
    }

    fn end_after_lone_zero(&mut self) {
        let zero = Plain(self.offset.saturating_sub(2 * RECORD));
        self.warn(zero, "a lone zero record ends the archive".to_owned());
        self.state = State::Ended;
    }

    fn no_header(&mut self, at: Plain, why: &str) -> Result<(), Error> {
        if !self.is_tar {
            return Err(error(at, Cause::NotTar));
        }
        self.extensions = Extensions::default();
        if !self.lost {
            self.damaged(at, format!("{why}; skipping to the next header"));
        }
        self.lost = true;
        Ok(())
    }

    fn extension_header(&mut self, flag: u8, at: Plain, size: u64) -> Result<(), Error> {
        let limits = &self.options.limits;
        let checked = match flag {
            // A name is followed by a NUL.
            b'L' | b'K' => Limit::NameBytes.check(limits, size.saturating_sub(1)),
            _ => Limit::PaxBytes.check(limits, size),
        };
        checked.map_err(|exceeded| error(at, exceeded.into()))?;
        self.state = State::Extension(Extension {
            flag,
            at,
            left: size,
            padding: padding(size),
            body: Vec::new(),
        });
        Ok(())
    }

    /// Takes a piece of an extension's body and padding.
    fn extension(&mut self, piece: &[u8]) -> Result<(), Error> {
        let State::Extension(extension) = &mut self.state else {
            return Ok(());
        };
        let len = usize::try_from(extension.left).unwrap_or(usize::MAX);
        let (body, padding) = piece.split_at(len.min(piece.len()));
        extension.body.extend_from_slice(body);
        extension.left -= body.len() as u64;
        extension.padding -= padding.len() as u64;
        if extension.left + extension.padding > 0 {
            return Ok(());
        }
        let (flag, at) = (extension.flag, extension.at);
        let body = std::mem::take(&mut extension.body);
        self.state = State::Header;
        self.amend(flag, at, &body)
    }

    /// Applies a complete extension.
    fn amend(&mut self, flag: u8, at: Plain, body: &[u8]) -> Result<(), Error> {
        let name = || Some(text(body).to_vec()).filter(|name| !name.is_empty());
        match flag {
            b'g' => return self.global(at, body),
            b'L' => self.extensions.long_name = name(),
            b'K' => self.extensions.long_link = name(),
            _ => {
                let mut keywords = Box::new(self.global.clone());
                self.read_keywords(&mut keywords, at, body)?;
                self.extensions.keywords = Some(keywords);
            }
        }
        self.extensions.start.get_or_insert(at);
        Ok(())
    }

    fn global(&mut self, at: Plain, body: &[u8]) -> Result<(), Error> {
        let mut keywords = std::mem::take(&mut self.global);
        self.read_keywords(&mut keywords, at, body)?;
        // A map belongs to one file.
        keywords.sparse = super::sparse::Keywords::default();
        Limit::GlobalBytes
            .check(&self.options.limits, keywords.bytes())
            .map_err(|exceeded| error(at, exceeded.into()))?;
        self.global = keywords;
        Ok(())
    }

    fn read_keywords(
        &mut self,
        keywords: &mut pax::Keywords,
        at: Plain,
        body: &[u8],
    ) -> Result<(), Error> {
        let mut notes = Vec::new();
        let read = keywords.read(body, &self.options.limits, &mut notes);
        self.note(at, notes);
        read.map_err(|exceeded| error(at, exceeded.into()))
    }

    fn member_header(&mut self, record: &Record, at: Plain, size: u64) -> Result<(), Error> {
        let header = Header(record);
        let mut extensions = std::mem::take(&mut self.extensions);
        let local = extensions.keywords.take();
        let keywords = local.as_deref().unwrap_or(&self.global);
        let stored = keywords.size.unwrap_or(size);
        let mut notes = Vec::new();
        let member = member(header, at, stored, extensions, keywords, &mut notes);
        let sparse = local.map(|keywords| keywords.sparse).unwrap_or_default();
        let draft = Draft {
            member,
            at,
            size: sparse.size,
            stored,
            taken: 0,
        };
        match header.typeflag() {
            b'V' => self.skip(&draft),
            b'M' => self.lose(&draft, "it continues a file of another volume"),
            flag => {
                self.note(at, notes);
                match draft.member.kind {
                    Kind::File if flag == b'S' => self.file_with_header_map(draft, record)?,
                    Kind::File if sparse.is_map_in_payload() => {
                        self.payload_map_is_next(draft, MapReader::default())
                    }
                    Kind::File if sparse.is_sparse => self.sparse_file(draft, &sparse.map),
                    Kind::File => self.announce(draft.member, stored, padding(stored)),
                    // A dumpdir's listing is not content.
                    _ if flag == b'D' => self.announce(draft.member, 0, stored + padding(stored)),
                    // Whatever their headers say, the others have no payload.
                    _ => self.announce(draft.member, 0, 0),
                }
            }
        }
        Ok(())
    }

    /// A file of type `S`, whose map is in the header, behind it, or, in dialects without one,
    /// nowhere.
    fn file_with_header_map(&mut self, mut draft: Draft, record: &Record) -> Result<(), Error> {
        let dialect = Header(record).dialect();
        match HeaderMap::new(record, dialect, &self.options.limits) {
            None => {
                let stored = draft.stored;
                self.announce(draft.member, stored, padding(stored));
                Ok(())
            }
            Some(Err(fault)) => self.map_fault(&draft, fault),
            Some(Ok(map)) => {
                draft.size = draft.size.or(Some(map.size));
                self.header_map_goes_on(Box::new(draft), map);
                Ok(())
            }
        }
    }

    fn header_map_goes_on(&mut self, draft: Box<Draft>, map: HeaderMap) {
        if map.continues {
            self.state = State::HeaderMap(draft, map);
        } else {
            self.sparse_file(*draft, &map.pieces);
        }
    }

    fn header_map(&mut self, record: &Record) -> Result<(), Error> {
        let state = std::mem::replace(&mut self.state, State::Header);
        if let State::HeaderMap(draft, mut map) = state {
            match map.extend(record, &self.options.limits) {
                Ok(()) => self.header_map_goes_on(draft, map),
                Err(fault) => self.map_fault(&draft, fault)?,
            }
        }
        Ok(())
    }

    fn payload_map_is_next(&mut self, draft: Draft, reader: MapReader) {
        if draft.taken + RECORD > draft.stored {
            self.lose(&draft, &MapError::Malformed.to_string());
        } else {
            self.state = State::PayloadMap(Box::new(draft), reader);
        }
    }

    fn payload_map(&mut self, record: &Record) -> Result<(), Error> {
        let state = std::mem::replace(&mut self.state, State::Header);
        if let State::PayloadMap(mut draft, mut reader) = state {
            draft.taken += RECORD;
            match reader.read(record, &self.options.limits) {
                Ok(Some(pieces)) => self.sparse_file(*draft, &pieces),
                Ok(None) => self.payload_map_is_next(*draft, reader),
                Err(fault) => self.map_fault(&draft, fault)?,
            }
        }
        Ok(())
    }

    fn map_fault(&mut self, draft: &Draft, fault: MapFault) -> Result<(), Error> {
        match fault {
            MapFault::Map(fault) => {
                self.lose(draft, &fault.to_string());
                Ok(())
            }
            MapFault::Exceeded(exceeded) => Err(error(draft.at, exceeded.into())),
        }
    }

    /// Announces a sparse file whose map is complete, if it is sound.
    fn sparse_file(&mut self, mut draft: Draft, pieces: &[Segment]) {
        let end = pieces
            .last()
            .map_or(0, |last| last.offset.saturating_add(last.len));
        let size = draft.size.unwrap_or(end);
        match checked(pieces, size, draft.stored - draft.taken) {
            Ok((map, payload)) => {
                let rest = draft.rest() - payload;
                draft.member.size = size;
                draft.member.sparse = Some(map);
                draft.member.payload = Extent::with_len(self.offset(), payload);
                self.announce(draft.member, payload, rest);
            }
            Err(fault) => self.lose(&draft, &fault.to_string()),
        }
    }

    fn announce(&mut self, member: Member, payload: u64, rest: u64) {
        self.events.push_back(Event::Member(Box::new(member)));
        self.state = State::Content(Content {
            payload,
            rest,
            announced: true,
        });
    }

    /// Skips a member, and says why it is lost.
    fn lose(&mut self, draft: &Draft, why: &str) {
        let name = shown(&draft.member.name);
        self.damaged(draft.at, format!("{name}: skipped, as {why}"));
        self.skip(draft);
    }

    fn skip(&mut self, draft: &Draft) {
        self.state = State::Content(Content {
            payload: 0,
            rest: draft.rest(),
            announced: false,
        });
    }

    fn content(&mut self) -> Progress {
        let State::Content(content) = &mut self.state else {
            return Progress::Made;
        };
        let (payload, rest) = (content.payload, content.rest);
        if payload + rest == 0 {
            if content.announced {
                self.events.push_back(Event::MemberEnd);
            }
            self.state = State::Header;
            return Progress::Made;
        }
        let taken = self.take(if payload > 0 { payload } else { rest });
        if taken.is_empty() {
            return Progress::Starved;
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
        Progress::Made
    }

    /// What it means that no bytes follow.
    fn close(&mut self) -> Result<(), Error> {
        let part = match &self.state {
            State::Header if self.lost || !self.is_tar => return self.close_between_members(),
            State::Header if !is_zero(&self.partial) => Part::Header,
            State::Header if self.extensions.start.is_some() => Part::Extension,
            State::Header => return self.close_between_members(),
            State::Extension(_) | State::HeaderMap(..) | State::PayloadMap(..) => Part::Extension,
            State::Content(Content { payload: 1.., .. }) => Part::Payload,
            State::Content(content) => {
                if content.announced {
                    self.events.push_back(Event::MemberEnd);
                }
                Part::Padding
            }
            State::Ended => return Ok(()),
        };
        Err(error(self.offset(), Cause::Truncated(part)))
    }

    fn close_between_members(&mut self) -> Result<(), Error> {
        if self.after_zero {
            let zero = Plain(self.offset.saturating_sub(RECORD));
            self.warn(zero, "a lone zero record ends the archive".to_owned());
        } else if !self.is_tar {
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

    fn note(&mut self, offset: Plain, notes: Vec<Note>) {
        for note in notes {
            match note {
                Note::Odd(text) => self.warn(offset, text),
                Note::Lost(text) => self.damaged(offset, text),
            }
        }
    }
}

impl Draft {
    /// Bytes up to the next header.
    fn rest(&self) -> u64 {
        self.stored + padding(self.stored) - self.taken
    }
}

fn error(offset: Plain, cause: Cause) -> Error {
    Error { offset, cause }
}

/// Bytes that fill the last record of `len` bytes.
fn padding(len: u64) -> u64 {
    len.next_multiple_of(RECORD) - len
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}
