//! Where log events go: the terminal at first, or what a service manager gave as such; and once a mount
//! is ready, a file, or in the background the system's log. From then on a terminal that is stopped, or a
//! pipe that nobody reads, loses events rather than to stop the mount.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use indicatif::ProgressBar;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::settings;

/// Where syslog(3) sends its messages; journald listens there, too.
const SYSTEM_LOG: &str = "/dev/log";
/// syslog's facility for background processes, in the place where it belongs.
const DAEMON: u8 = 3 << 3;

/// Bytes that a pipe takes at once when it takes any (`PIPE_BUF`, pipe(7)).
const AT_ONCE_BYTES: usize = 4096;
/// How long an event waits at the most for what takes none; those after it do not wait any more.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};
const NONE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// Whether others wait for this process, so that it waits for nobody to take an event.
static IS_SERVING: AtomicBool = AtomicBool::new(false);

/// Events that were lost since the last one that was not.
static LOST: AtomicU64 = AtomicU64::new(0);

/// The progress bar on the terminal, if one is drawn.
static PROGRESS_BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

static SINK: Mutex<Sink> = Mutex::new(Sink::Terminal);

/// Where the next event goes besides, until another sink is chosen.
static COPY: Mutex<Sink> = Mutex::new(Sink::Nowhere);

/// Where the next event goes.
#[derive(Debug)]
enum Sink {
    Terminal,
    /// What is the terminal leads to the journal, which takes a priority in front of each line.
    Journal,
    File(File),
    /// What `--log-file` names and is no regular file: a pipe or a terminal.
    Stream(File),
    System(UnixDatagram),
    Nowhere,
}

/// Sends events of `level` and above to stderr, until another sink is chosen. Later calls change
/// nothing.
pub(super) fn start(level: Level) {
    if leads_to(settings::journal_stream()) {
        choose(Sink::Journal);
    }
    let started = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .with_writer(Lines)
        .try_init();
    if started.is_err() {
        tracing::debug!("the log was started before");
    }
}

/// Whether stderr is the stream with this device and inode.
fn leads_to(stream: Option<(u64, u64)>) -> bool {
    let Some(stream) = stream else {
        return false;
    };
    // Whoever starts a process may give it another stderr and leave the variable.
    let found = rustix::fs::fstat(io::stderr());
    found.is_ok_and(|found| stream == (found.st_dev, found.st_ino))
}

/// What stands in front of a line of `level` on stderr: its priority, where that leads to the journal.
pub(super) fn mark(level: Level) -> String {
    match *SINK.lock().unwrap_or_else(PoisonError::into_inner) {
        Sink::Journal => marked(level),
        _ => String::new(),
    }
}

/// A priority as sd-daemon(3) has it.
fn marked(level: Level) -> String {
    format!("<{}>", severity(level))
}

/// Lets lines on the terminal appear above `bar`, or above none.
pub(super) fn set_progress_bar(bar: Option<ProgressBar>) {
    *PROGRESS_BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar;
}

/// Calls `write`, which writes lines to the terminal, with the progress bar hidden.
pub(super) fn above_progress<T>(write: impl FnOnce() -> T) -> T {
    let bar = PROGRESS_BAR
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// From now on events that find no room are lost.
pub(super) fn serve() {
    IS_SERVING.store(true, Ordering::Relaxed);
}

/// Sends events from now on to `file` as well, or else to the system's log, until another sink is chosen.
pub(super) fn copy_to(file: Option<File>) {
    let sink = file.map_or_else(of_system, of_file);
    *COPY.lock().unwrap_or_else(PoisonError::into_inner) = sink;
}

/// Sends events to `file` from now on, with the time.
pub(super) fn write_to_file(file: File) {
    choose(of_file(file));
}

fn of_file(file: File) -> Sink {
    let is_regular = file.metadata().is_ok_and(|found| found.is_file());
    if is_regular {
        Sink::File(file)
    } else {
        Sink::Stream(file)
    }
}

/// Sends events to the journal or syslog from now on; to nobody where there is neither.
pub(super) fn write_to_system() {
    choose(of_system());
}

fn of_system() -> Sink {
    let socket = UnixDatagram::unbound().and_then(|socket| {
        // A log that is full must not stop a mount.
        socket.set_nonblocking(true)?;
        socket.connect(SYSTEM_LOG)?;
        Ok(socket)
    });
    socket.map_or(Sink::Nowhere, Sink::System)
}

fn choose(sink: Sink) {
    *COPY.lock().unwrap_or_else(PoisonError::into_inner) = Sink::Nowhere;
    *SINK.lock().unwrap_or_else(PoisonError::into_inner) = sink;
}

/// Makes a line for each event.
#[derive(Clone, Copy, Debug)]
struct Lines;

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line::new(Level::INFO)
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Line {
        Line::new(*event.level())
    }
}

/// One event, sent when complete.
struct Line {
    level: Level,
    text: Vec<u8>,
}

impl Line {
    fn new(level: Level) -> Self {
        Self {
            level,
            text: Vec::new(),
        }
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        for sink in [&SINK, &COPY] {
            let sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
            // There is nobody left to tell.
            drop(self.send(&sink));
        }
    }
}

impl Line {
    fn send(&self, sink: &Sink) -> io::Result<()> {
        match sink {
            Sink::Terminal => above_progress(|| say(&io::stderr(), "", &self.text)),
            Sink::Journal => say(&io::stderr(), &marked(self.level), &self.text),
            Sink::File(file) => { file }.write_all(&[now().as_bytes(), b" ", &self.text].concat()),
            Sink::Stream(file) => say(file, &format!("{} ", now()), &self.text),
            Sink::System(socket) => socket.send(&datagram(self.level, &self.text)).map(drop),
            Sink::Nowhere => Ok(()),
        }
    }
}

/// Writes a line to `target` behind `mark`, and before it how many there was no room for.
fn say(target: &(impl AsFd + ?Sized), mark: &str, text: &[u8]) -> io::Result<()> {
    let lost = LOST.load(Ordering::Relaxed);
    let patience = match (IS_SERVING.load(Ordering::Relaxed), lost) {
        (false, _) => None,
        (true, 0) => Some(&PATIENCE),
        (true, _) => Some(&NONE),
    };
    let mut line = mark.as_bytes().to_vec();
    if lost > 0 {
        line.extend(format!(" WARN {lost} messages before this one are lost\n{mark}").bytes());
    }
    line.extend_from_slice(text);
    match write_where_there_is_room(target, &line, patience) {
        Ok(()) => {
            LOST.fetch_sub(lost, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => {
            LOST.fetch_add(1, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// Writes `bytes` to `target` without waiting for longer than `patience` for room, if that is limited.
///
/// # Errors
/// When there is none; part of it may be written.
fn write_where_there_is_room(
    target: impl AsFd,
    bytes: &[u8],
    patience: Option<&Timespec>,
) -> io::Result<()> {
    for mut part in bytes.chunks(AT_ONCE_BYTES) {
        while !part.is_empty() {
            let mut polled = [PollFd::new(&target, PollFlags::OUT)];
            if poll(&mut polled, patience)? == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let written = rustix::io::write(&target, part)?;
            part = part.get(written..).unwrap_or_default();
        }
    }
    Ok(())
}

/// A message as syslog(3) sends it: severity and facility, name and process, text.
fn datagram(level: Level, text: &[u8]) -> Vec<u8> {
    let priority = DAEMON | severity(level);
    let mut message = format!("<{priority}>tarfs[{}]: ", std::process::id()).into_bytes();
    message.extend_from_slice(text.trim_ascii());
    message
}

fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

fn now() -> String {
    let mut text = String::new();
    match SystemTime.format_time(&mut Writer::new(&mut text)) {
        Ok(()) => text,
        Err(_) => String::from("(no time)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_lost_and_not_waited_for() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let line = [b'a'; 3 * AT_ONCE_BYTES / 2];
        let soon = Timespec::default();
        let write = || write_where_there_is_room(&writer, &line, Some(&soon));
        let error = (0..1000).find_map(|_| write().err()).expect("full");
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let mut some = vec![0; 16 << 10];
        io::Read::read_exact(&mut reader, &mut some).expect("written");
        write().expect("there is room again");
    }

    #[test]
    fn a_datagram_carries_its_priority_and_no_line_end() {
        let expected = format!("<27>tarfs[{}]: ERROR it broke", std::process::id());
        assert_eq!(
            datagram(Level::ERROR, b"ERROR it broke\n"),
            expected.as_bytes()
        );
        assert_eq!(severity(Level::TRACE), 7);
    }
}
