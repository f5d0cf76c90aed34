//! Destinations of log events.
//!
//! Events go to stderr, and once a mount is ready to a file, or in the background to the system's log. From
//! then on, a stopped terminal or an unread pipe loses events instead of blocking the mount.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use indicatif::ProgressBar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::cli::environment;
use tarfs::internal::sync::Mutex;

/// Socket of syslog(3), on which journald also listens.
const SYSLOG_SOCKET: &str = "/dev/log";
/// Syslog's facility for background processes, in its bit position.
const SYSLOG_FACILITY_DAEMON: u8 = 3 << 3;

/// Bytes that a writable pipe accepts at once (`PIPE_BUF`, pipe(7)).
const PIPE_BUF_BYTES: usize = 4096;
/// Timeout of an event for a blocked destination. Later events do not wait.
const BLOCKED_WRITE_TIMEOUT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
const NO_WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Whether logging must not block, because others wait for this process.
static MUST_NOT_BLOCK: AtomicBool = AtomicBool::new(false);

/// Events lost since the last one that was written.
static LOST_EVENTS: AtomicU64 = AtomicU64::new(0);

static PROGRESS_BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

static LOG_SINK: Mutex<LogSink> = Mutex::new(LogSink::Terminal);

/// Additional destination of events, until another one is chosen.
static COPY_SINK: Mutex<LogSink> = Mutex::new(LogSink::Discard);

/// Also receives warnings and errors, with their level.
static LISTENER: Mutex<Option<Listener>> = Mutex::new(None);

type Listener = fn(Level, &str);

#[derive(Debug)]
enum LogSink {
    Terminal,
    /// Stderr leads to the journal, which accepts a priority before each line.
    Journal,
    File(File),
    /// A `--log-file` that is not a regular file, such as a pipe or a terminal.
    Stream(File),
    Syslog(UnixDatagram),
    Discard,
}

/// Sends events of `level` and above to stderr until another sink is chosen. Later calls have no effect.
pub(crate) fn init(level: Level) {
    if is_stderr(environment::journal_stream()) {
        set_sink(LogSink::Journal);
    }
    let started = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .with_writer(EventWriter)
        .try_init();
    if started.is_err() {
        tracing::debug!("the log was started before");
    }
}

/// Whether stderr is the stream with this device and inode.
fn is_stderr(stream: Option<(u64, u64)>) -> bool {
    let Some(stream) = stream else {
        return false;
    };
    // A parent process may replace stderr without clearing the variable.
    let found = rustix::fs::fstat(io::stderr());
    found.is_ok_and(|found| stream == (found.st_dev, found.st_ino))
}

/// Returns the prefix of a line of `level` on stderr: its priority, if the journal reads it.
pub(crate) fn journal_prefix(level: Level) -> String {
    match *LOG_SINK.lock() {
        LogSink::Journal => priority_prefix(level),
        _ => String::new(),
    }
}

/// Formats a priority as in sd-daemon(3).
fn priority_prefix(level: Level) -> String {
    format!("<{}>", syslog_severity(level))
}

/// Sets the progress bar that log lines must not overwrite.
pub(crate) fn set_progress_bar(bar: Option<ProgressBar>) {
    *PROGRESS_BAR.lock() = bar;
}

/// Calls `write`, which writes to the terminal, with the progress bar hidden.
pub(crate) fn suspend_progress_bar<T>(write: impl FnOnce() -> T) -> T {
    let bar = PROGRESS_BAR.lock().clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Drops events from now on instead of blocking.
pub(crate) fn never_block() {
    MUST_NOT_BLOCK.store(true, Ordering::Relaxed);
}

/// Copies events to `file`, or to the system's log, until another sink is chosen.
pub(crate) fn start_copying_to(file: Option<File>) {
    let sink = file.map_or_else(syslog_sink, file_sink);
    *COPY_SINK.lock() = sink;
}

/// Sends events to `file` from now on, with timestamps. Without it, to the journal or syslog, or nowhere.
pub(crate) fn log_to(file: Option<File>) {
    set_sink(file.map_or_else(syslog_sink, file_sink));
}

/// Passes warnings and errors to `listener`, too, which must log nothing.
pub(crate) fn listen(listener: Listener) {
    *LISTENER.lock() = Some(listener);
}

/// Logs the event `text` of another process.
pub(crate) fn repeat(level: Level, text: &str) {
    let text = text.as_bytes().to_vec();
    drop(EventLine { level, text });
}

fn file_sink(file: File) -> LogSink {
    let is_regular = file.metadata().is_ok_and(|found| found.is_file());
    if is_regular {
        LogSink::File(file)
    } else {
        LogSink::Stream(file)
    }
}

fn syslog_sink() -> LogSink {
    let socket = UnixDatagram::unbound().and_then(|socket| {
        // A full log must not block a mount.
        socket.set_nonblocking(true)?;
        socket.connect(SYSLOG_SOCKET)?;
        Ok(socket)
    });
    socket.map_or(LogSink::Discard, LogSink::Syslog)
}

fn set_sink(sink: LogSink) {
    *COPY_SINK.lock() = LogSink::Discard;
    *LOG_SINK.lock() = sink;
}

#[derive(Clone, Copy, Debug)]
struct EventWriter;

impl<'a> MakeWriter<'a> for EventWriter {
    type Writer = EventLine;

    fn make_writer(&'a self) -> EventLine {
        EventLine::new(Level::INFO)
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> EventLine {
        EventLine::new(*event.level())
    }
}

/// One event, sent when it is complete.
struct EventLine {
    level: Level,
    text: Vec<u8>,
}

impl EventLine {
    fn new(level: Level) -> Self {
        Self {
            level,
            text: Vec::new(),
        }
    }

    fn send(&self, sink: &LogSink) -> io::Result<()> {
        let may_block = !MUST_NOT_BLOCK.load(Ordering::Relaxed);
        match sink {
            LogSink::Terminal => {
                let (prefix, text) = user_message(self.level, &self.text);
                suspend_progress_bar(|| write_line(&io::stderr(), may_block, prefix, text))
            }
            LogSink::Journal => {
                let prefix = priority_prefix(self.level);
                write_line(&io::stderr(), may_block, &prefix, &self.text)
            }
            LogSink::File(file) => {
                { file }.write_all(&[format_now().as_bytes(), b" ", &self.text].concat())
            }
            // The mount is not ready yet when events are copied to it.
            LogSink::Stream(file) => {
                write_line(file, false, &format!("{} ", format_now()), &self.text)
            }
            LogSink::Syslog(socket) => socket
                .send(&syslog_datagram(self.level, &self.text))
                .map(drop),
            LogSink::Discard => Ok(()),
        }
    }
}

impl Write for EventLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for EventLine {
    fn drop(&mut self) {
        for sink in [&LOG_SINK, &COPY_SINK] {
            let sink = sink.lock();
            // An error in the log cannot be logged.
            drop(self.send(&sink));
        }
        let listener = *LISTENER.lock();
        if let Some(listener) = listener
            && self.level <= Level::WARN
        {
            listener(self.level, &String::from_utf8_lossy(&self.text));
        }
    }
}

/// Writes a line with `prefix` to `target`, after the number of lost lines, if any.
fn write_line(
    target: &(impl AsFd + ?Sized),
    may_block: bool,
    prefix: &str,
    text: &[u8],
) -> io::Result<()> {
    let lost = LOST_EVENTS.load(Ordering::Relaxed);
    let timeout = match (may_block, lost) {
        (true, _) => None,
        (false, 0) => Some(&BLOCKED_WRITE_TIMEOUT),
        (false, _) => Some(&NO_WAIT),
    };
    let mut line = prefix.as_bytes().to_vec();
    if lost > 0 {
        line.extend(format!(" WARN {lost} messages before this one are lost\n{prefix}").bytes());
    }
    line.extend_from_slice(text);
    match write_with_timeout(target, &line, timeout) {
        Ok(()) => {
            LOST_EVENTS.fetch_sub(lost, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => {
            LOST_EVENTS.fetch_add(1, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// Writes `bytes`, and waits at most `timeout` for space, if given. A part may be written on `WouldBlock`.
fn write_with_timeout(
    target: impl AsFd,
    bytes: &[u8],
    timeout: Option<&Timespec>,
) -> io::Result<()> {
    for mut part in bytes.chunks(PIPE_BUF_BYTES) {
        while !part.is_empty() {
            let mut polled = [PollFd::new(&target, PollFlags::OUT)];
            if poll(&mut polled, timeout)? == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let written = rustix::io::write(&target, part)?;
            part = part.get(written..).unwrap_or_default();
        }
    }
    Ok(())
}

/// Prefix and text of an event for a user; debug messages keep the style of a log.
fn user_message(level: Level, text: &[u8]) -> (&'static str, &[u8]) {
    let prefix = match level {
        Level::ERROR | Level::INFO => "tarfs: ",
        Level::WARN => "tarfs: warning: ",
        _ => return ("", text),
    };
    let word = level.as_str().as_bytes();
    let rest = text.trim_ascii_start().strip_prefix(word);
    rest.map_or(("", text), |rest| (prefix, rest.trim_ascii_start()))
}

/// Formats a message of syslog(3): severity and facility, name and process, text.
fn syslog_datagram(level: Level, text: &[u8]) -> Vec<u8> {
    let priority = SYSLOG_FACILITY_DAEMON | syslog_severity(level);
    let mut message = format!("<{priority}>tarfs[{}]: ", std::process::id()).into_bytes();
    message.extend_from_slice(text.trim_ascii());
    message
}

fn syslog_severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn format_now() -> String {
    let mut text = String::new();
    match SystemTime.format_time(&mut Writer::new(&mut text)) {
        Ok(()) => text,
        Err(_) => String::from("(no time)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: block-terminal
    #[test]
    fn log_to_a_full_pipe_times_out_and_is_lost() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let line = [b'a'; 3 * PIPE_BUF_BYTES / 2];
        let soon = Timespec::default();
        let write = || write_with_timeout(&writer, &line, Some(&soon));
        let error = (0..1000).find_map(|_| write().err()).expect("full");
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let mut some = vec![0; 16 << 10];
        io::Read::read_exact(&mut reader, &mut some).expect("written");
        write().expect("there is room again");
    }

    #[test]
    fn user_messages_begin_with_the_name_of_the_program() {
        let message = |level, text: &'static str| {
            let (prefix, text) = user_message(level, text.as_bytes());
            format!("{prefix}{}", String::from_utf8_lossy(text))
        };
        assert_eq!(
            message(Level::WARN, " WARN it is odd\n"),
            "tarfs: warning: it is odd\n"
        );
        assert_eq!(
            message(Level::ERROR, "ERROR it broke\n"),
            "tarfs: it broke\n"
        );
        assert_eq!(message(Level::INFO, " INFO mounted\n"), "tarfs: mounted\n");
        assert_eq!(message(Level::DEBUG, "DEBUG sent\n"), "DEBUG sent\n");
    }

    #[test]
    fn syslog_datagram_has_priority_and_no_newline() {
        let expected = format!("<27>tarfs[{}]: ERROR it broke", std::process::id());
        assert_eq!(
            syslog_datagram(Level::ERROR, b"ERROR it broke\n"),
            expected.as_bytes()
        );
        assert_eq!(syslog_severity(Level::TRACE), 7);
    }
}
