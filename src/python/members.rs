//! Members of an archive with their contents, in archive order, from a thread that reads ahead.

use std::error::Error as StdError;
use std::ffi::OsString;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::error::{DAMAGED, ERROR, exception, of_error};
use super::opened::{Opened, cause};
use super::options;
use super::process::{ProcessLocal, call, receive};
use super::row::Row;
use crate::archive::scan::{self, PayloadEnd, Sink};
use crate::base::extent::Plain;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::index::Ino;
use crate::locate::SourceSpec;
use crate::materialize::{ContentSink, Error, Selection, read_entries};
use crate::tar::Member;

/// Maximum number of messages that wait for the caller.
const MAX_PENDING_MESSAGES: usize = 16;

enum Message {
    Member(Box<Member>),
    Piece(Vec<u8>),
    /// The end of a content or of the archive, and its damage.
    End(Option<String>),
    /// The end of the archive, or why it cannot be read further.
    Over(Result<(), Box<dyn StdError + Send + Sync>>),
}

/// Iterates over members in the order of the archive: each is a row, the pieces of its content, and `None` or the
/// exception for its damage.
#[pyclass(frozen, module = "tarfs._native")]
pub(super) struct Members {
    // The receiver is dropped first, which ends the thread.
    reader: ProcessLocal<(Mutex<Receiver<Message>>, Thread<()>)>,
}

impl Members {
    /// Reads `entries` of an indexed archive, which are in its order.
    pub(super) fn of_entries(opened: Arc<Opened>, entries: Vec<Ino>) -> PyResult<Self> {
        Self::start(move |sink| {
            let read = read_entries(&*opened.volume, &opened.index, &entries, sink);
            read.map(drop).map_err(cause)
        })
    }

    fn start(
        work: impl FnOnce(&mut MemberSink) -> Result<(), Box<dyn StdError + Send + Sync>>
        + Send
        + 'static,
    ) -> PyResult<Self> {
        let (sender, receiver) = sync_channel(MAX_PENDING_MESSAGES);
        let run = move || {
            let output = Sender(sender);
            let mut sink = MemberSink {
                contents: ContentSink::new(output.clone(), Selection::default(), None),
                output,
                damage: None,
                first_damage: None,
            };
            let result = work(&mut sink);
            // The caller may be gone, which is the error then.
            drop(sink.output.send(Message::Over(result)));
        };
        let thread = Thread::spawn("tarfs-members", run)?;
        let reader = ProcessLocal::new((Mutex::new(receiver), thread));
        Ok(Self { reader })
    }
}

#[pymethods]
impl Members {
    /// Reads the archive `url` once, from front to back, and keeps no index.
    #[staticmethod]
    fn scan(py: Python<'_>, url: OsString, options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let spec = SourceSpec::from(url);
        let context = options::context(py, &spec, options)?;
        let scan_options = context.archive_options(&spec.clone().into(), false).scan;
        let own = context.clone();
        let source = call(py, move || own.open_source(&spec))?;
        let source = source.map_err(|error| of_error(py, &error))?;
        Self::start(move |sink| {
            let (network, stats) = (&context.network, &context.source.stats);
            let summary = scan::scan(&source, &scan_options, network, stats, sink)?;
            Ok(sink.report_lost_members(source.location(), summary.damages)?)
        })
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let (receiver, _) = self.reader.get(py)?;
        let message = match receive(py, receiver)? {
            Some(Message::Member(member)) => Row::of_member(&member).into_pyobject(py)?.into_any(),
            Some(Message::Piece(piece)) => PyBytes::new(py, &piece).into_any(),
            Some(Message::End(None)) => py.None().into_bound(py),
            Some(Message::End(Some(damage))) => return Err(exception(py, DAMAGED, &damage)),
            Some(Message::Over(Err(error))) => return Err(of_error(py, &*error)),
            Some(Message::Over(Ok(()))) => return Ok(None),
            None => return Err(exception(py, ERROR, "the members end here")),
        };
        Ok(Some(message.unbind()))
    }
}

/// Sends messages, and what is written as pieces.
#[derive(Clone)]
struct Sender(SyncSender<Message>);

impl Sender {
    fn send(&self, message: Message) -> Result<(), Error> {
        let closed = |_| Error::Output(Arc::new(io::ErrorKind::BrokenPipe.into()));
        self.0.send(message).map_err(closed)
    }
}

impl Write for Sender {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.send(Message::Piece(bytes.to_vec()));
        sent.map_or_else(|error| Err(io::Error::other(error)), |()| Ok(bytes.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sends members and their contents, with holes as zeros, to the caller.
struct MemberSink {
    contents: ContentSink<Sender>,
    output: Sender,
    damage: Option<String>,
    first_damage: Option<String>,
}

impl MemberSink {
    /// Reports the number of damaged places of the archive, where members may be lost.
    fn report_lost_members(&mut self, location: &str, damages: u64) -> Result<(), Error> {
        let Some(first) = self.first_damage.take().filter(|_| damages > 0) else {
            return Ok(());
        };
        let text = format!("{location}: members may be lost at {damages} damaged places: {first}");
        self.output.send(Message::End(Some(text)))
    }
}

impl Sink for MemberSink {
    type Error = Error;

    fn member(&mut self, member: Member) -> Result<(), Error> {
        self.damage = None;
        self.output
            .send(Message::Member(Box::new(member.clone())))?;
        self.contents.member(member)
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.contents.payload(bytes)
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Error> {
        self.contents.member_end(end)?;
        let unknown = || "the archive ends in this member".to_owned();
        let is_complete = end == PayloadEnd::Complete;
        let damage = (!is_complete).then(|| self.damage.take().unwrap_or_else(unknown));
        self.output.send(Message::End(damage))
    }

    fn warning(&mut self, _text: &str) {}

    fn damage(&mut self, _offset: Plain, text: &str) {
        self.first_damage.get_or_insert_with(|| text.to_owned());
        self.damage = Some(text.to_owned());
    }
}
