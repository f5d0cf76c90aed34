//! Members of an archive with their contents, in archive order, from a thread that reads ahead.

use std::cell::RefCell;
use std::io::{self, Write};
use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::error::{DAMAGED, ERROR, exception, of_error};
use super::network::{ThisProcess, runtime};
use super::opened::Opened;
use super::options;
use super::row::Row;
use crate::archive::scan::{self, Sink};
use crate::base::extent::Plain;
use crate::base::sync::Mutex;
use crate::base::thread::Thread;
use crate::index::Ino;
use crate::locate::SourceSpec;
use crate::materialize::{ContentSink, Error, Selection, ShardError, read_entries};
use crate::tar::Member;

/// Length of a piece of content.
const PIECE_BYTES: usize = 1 << 20;

/// Maximum number of messages that wait for the caller.
const MAX_PENDING_MESSAGES: usize = 16;

enum Message {
    Member(Box<Member>),
    Piece(Vec<u8>),
    /// The end of a content, and what is wrong with it.
    End(Option<String>),
    Failed(Box<dyn std::error::Error + Send + Sync>),
}

/// Members of an archive in its order, each with its content.
#[pyclass(frozen, module = "tarfs._native")]
pub(super) struct Members {
    reader: ThisProcess<Reader>,
}

struct Reader {
    state: Mutex<State>,
    // Declared after the receiver, because dropping that ends the thread.
    _thread: Thread<()>,
}

struct State {
    receiver: Receiver<Message>,
    is_in_content: bool,
}

impl Members {
    /// Reads `entries` of an indexed archive, which are in its order.
    pub(super) fn of_entries(opened: Arc<Opened>, entries: Vec<Ino>) -> PyResult<Self> {
        Self::start(move |sink| {
            let Some(archive) = opened.volume.as_archive() else {
                return;
            };
            let read = read_entries(archive, &opened.index, &entries, sink);
            if let Err(ShardError::Read(path, error)) = read {
                sink.fail(
                    ReadFailed {
                        path: path.to_string(),
                        error,
                    }
                    .into(),
                );
            }
        })
    }

    fn start(work: impl FnOnce(&mut MemberSink) + Send + 'static) -> PyResult<Self> {
        let (sender, receiver) = sync_channel(MAX_PENDING_MESSAGES);
        let run = move || work(&mut MemberSink::new(sender));
        let thread = Thread::spawn("tarfs-members", run)?;
        let state = State {
            receiver,
            is_in_content: false,
        };
        Ok(Self {
            reader: ThisProcess::new(Reader {
                state: Mutex::new(state),
                _thread: thread,
            }),
        })
    }
}

#[pymethods]
impl Members {
    /// Reads the archive `url` once, from front to back, and keeps no index.
    #[staticmethod]
    fn scan(
        py: Python<'_>,
        url: std::ffi::OsString,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let network = runtime(py)?;
        let spec = SourceSpec::from(url);
        let origin = spec.origin().to_string_lossy().into_owned();
        let context = options::context(origin, options, network)?;
        let source = py.detach(|| context.open_source(&spec));
        let source = source.map_err(|error| of_error(py, "", &error))?;
        Self::start(move |sink| {
            let (options, stats) = (&context.archive.scan, &context.source.stats);
            if let Err(error) = scan::scan(&source, options, &context.network, stats, sink) {
                sink.fail(error.into());
            }
        })
    }

    /// Skips the rest of the content, and returns the next member.
    fn next_member(&self, py: Python<'_>) -> PyResult<Option<Row>> {
        loop {
            match self.receive(py)? {
                Some(Message::Member(member)) => return Ok(Some(Row::of_member(&member))),
                Some(Message::Failed(error)) => return Err(of_error(py, "", &*error)),
                Some(Message::Piece(_) | Message::End(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// Returns the next piece of the content, or nothing at its end.
    fn next_piece<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let piece = self.piece(py)?;
        Ok(piece.map(|piece| PyBytes::new(py, &piece)))
    }

    /// Returns the rest of the content, which has `len` bytes.
    fn rest<'py>(&self, py: Python<'py>, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, len, |mut buffer| {
            while let Some(piece) = self.piece(py)? {
                let Some((now, later)) = buffer.split_at_mut_checked(piece.len()) else {
                    return Err(exception(py, ERROR, "the content has another length"));
                };
                py.detach(|| now.copy_from_slice(&piece));
                buffer = later;
            }
            Ok(())
        })
    }
}

impl Members {
    fn piece(&self, py: Python<'_>) -> PyResult<Option<Vec<u8>>> {
        if !self.reader.get(py)?.state.lock().is_in_content {
            return Ok(None);
        }
        match self.receive(py)? {
            Some(Message::Piece(piece)) => Ok(Some(piece)),
            Some(Message::End(Some(damage))) => Err(exception(py, DAMAGED, &damage)),
            Some(Message::Failed(error)) => Err(of_error(py, "", &*error)),
            Some(Message::End(None) | Message::Member(_)) | None => Ok(None),
        }
    }

    fn receive(&self, py: Python<'_>) -> PyResult<Option<Message>> {
        let reader = self.reader.get(py)?;
        Ok(py.detach(|| {
            let mut state = reader.state.lock();
            let message = state.receiver.recv().ok();
            match &message {
                Some(Message::Piece(_)) => {}
                Some(Message::Member(_)) => state.is_in_content = true,
                Some(Message::End(_) | Message::Failed(_)) | None => state.is_in_content = false,
            }
            message
        }))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{path}: cannot read it")]
struct ReadFailed {
    path: String,
    #[source]
    error: crate::archive::ReadError,
}

/// Collects what is written into pieces, and sends them.
#[derive(Clone)]
struct Pieces(Rc<RefCell<Vec<u8>>>, SyncSender<Message>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut buffer = self.0.borrow_mut();
        let len = bytes.len().min(PIECE_BYTES - buffer.len());
        buffer.extend_from_slice(bytes.get(..len).unwrap_or_default());
        if buffer.len() == PIECE_BYTES {
            send(&self.1, Message::Piece(take(&mut *buffer)))?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = take(&mut *self.0.borrow_mut());
        if piece.is_empty() {
            return Ok(());
        }
        send(&self.1, Message::Piece(piece))
    }
}

fn send(sender: &SyncSender<Message>, message: Message) -> io::Result<()> {
    let sent = sender.send(message);
    sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
}

fn output_error(error: io::Error) -> Error {
    Error::Output(Arc::new(error))
}

/// Sends members and their contents, with holes as zeros, to the caller.
struct MemberSink {
    contents: ContentSink<Pieces>,
    pieces: Pieces,
    damage: Option<String>,
}

impl MemberSink {
    fn new(sender: SyncSender<Message>) -> Self {
        let pieces = Pieces(Rc::default(), sender);
        Self {
            contents: ContentSink::new(pieces.clone(), Selection::default(), None),
            pieces,
            damage: None,
        }
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        send(&self.pieces.1, message).map_err(output_error)
    }

    /// Sends the error that ended the reading, unless the caller is gone.
    fn fail(&self, error: Box<dyn std::error::Error + Send + Sync>) {
        drop(self.send(Message::Failed(error)));
    }
}

impl Sink for MemberSink {
    type Error = Error;

    fn member(&mut self, member: Member) -> Result<(), Error> {
        self.damage = None;
        self.send(Message::Member(Box::new(member.clone())))?;
        self.contents.member(member)
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.contents.payload(bytes)
    }

    fn member_end(&mut self, cut: bool) -> Result<(), Error> {
        self.contents.member_end(cut)?;
        self.pieces.flush().map_err(output_error)?;
        let damage = cut.then(|| self.damage.take());
        let unknown = || "the archive ends in this member".to_owned();
        self.send(Message::End(
            damage.map(|text| text.unwrap_or_else(unknown)),
        ))
    }

    fn warning(&mut self, _text: &str) {}

    fn damage(&mut self, _offset: Plain, text: &str) {
        self.damage = Some(text.to_owned());
    }
}
