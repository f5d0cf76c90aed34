//! A lower bound of the time of `tarfs materialize`: the same design without everything that is
//! optional.
//!
//! ```text
//! floor [--verify] URL DIR [CONNECTIONS]
//! ```
//!
//! Ranges are fetched in parallel, and independent lz4 blocks are decoded in parallel directly from
//! the received chunks. Only kind, name and size are read from headers, and two threads write. Owners,
//! modes, times and attributes are not set, names are trusted, and every failure ends the process.
//! Checksums are verified only with `--verify`, for the whole frame, as lz4(1) and tarfs do. Its xxh32
//! cannot be computed in parallel, nor faster than a processor multiplies. `URL` is
//! `http://HOST:PORT/…` of a plain `.tar` or a `.tar.lz4` on a server with range requests.

use std::collections::{BTreeMap, HashSet};
use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::panic;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use bytes::Bytes;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use tarfs::internal::buffer_pool::{Buffer, BufferPool};
use xxhash_rust::xxh32::Xxh32;

/// Default number of connections. Slow networks need more.
const CONNECTIONS: usize = 4;
const CHUNK_LEN: usize = 4 << 20;
const DECODERS: usize = 2;
const WRITERS: usize = 2;

/// Maximum length of an lz4 block, packed or plain.
const MAX_BLOCK_LEN: usize = 4 << 20;
/// Space before a chunk for the start of a block that began in the previous chunk.
const HEADROOM: usize = MAX_BLOCK_LEN + 8;
/// Number of chunks in memory beyond one for each connection.
const SPARE_CHUNKS: usize = 2;
/// Number of plain blocks in memory.
const BLOCKS: usize = 8;
/// Number of files, or bytes of payload, that are passed to a writer at once.
const BATCH_FILES: usize = 64;
const BATCH_BYTES: usize = 1 << 20;

const RECORD: usize = 512;

fn main() {
    // A panic ends the process, because other threads would wait for the failed one for ever.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |failure| {
        report(failure);
        std::process::abort();
    }));
    // Cargo adds a word of its own.
    let mut arguments = env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .peekable();
    let verifies = arguments.next_if_eq("--verify").is_some();
    let (Some(url), Some(directory)) = (arguments.next(), arguments.next()) else {
        panic!("usage: floor [--verify] URL DIR [CONNECTIONS]");
    };
    let connections = arguments.next().map_or(CONNECTIONS, |number| {
        number.parse().expect("a number of connections")
    });
    let root = rustix::fs::open(&directory, OFlags::PATH, Mode::empty()).expect("a directory");
    let hash = verifies.then(|| Xxh32::new(0));
    materialize(&Remote::find(&url), connections, &Arc::new(root), hash);
}

fn materialize(remote: &Remote, connections: usize, root: &Arc<OwnedFd>, mut hash: Option<Xxh32>) {
    let chunks = connections + SPARE_CHUNKS;
    let is_packed = remote.path.rsplit('.').next() == Some("lz4");
    let headroom = if is_packed { HEADROOM } else { 0 };
    let pool = &BufferPool::new(((headroom + CHUNK_LEN) * chunks) as u64);
    let blocks = &BufferPool::new((MAX_BLOCK_LEN * BLOCKS) as u64);
    let next = &Mutex::new(0);
    let (arrived, arrivals) = sync_channel(chunks);
    let (job, jobs) = sync_channel(BLOCKS);
    let (slot, slots) = sync_channel(BLOCKS);
    let (batch, batches) = sync_channel(WRITERS);
    let (jobs, batches) = (&Mutex::new(jobs), &Mutex::new(batches));
    let links = thread::scope(|scope| {
        for _ in 0..connections {
            let arrived = arrived.clone();
            scope.spawn(move || remote.fetch(headroom, next, pool, &arrived));
        }
        drop(arrived);
        for _ in 0..DECODERS {
            scope.spawn(|| decode(jobs, blocks));
        }
        for _ in 0..WRITERS {
            scope.spawn(|| write(batches));
        }
        let chunks = InOrder {
            arrivals,
            early: BTreeMap::new(),
            next: 0,
        };
        scope.spawn(move || {
            if is_packed {
                walk(chunks, &job, &slot);
            } else {
                chunks.for_each(|chunk| send(&slot, Slot::Ready(chunk.freeze())));
            }
        });
        let mut tree = Tree::new(Arc::clone(root), batch);
        for slot in slots {
            let plain = match slot {
                Slot::Ready(bytes) => bytes,
                Slot::Coming(block) => block.recv().expect("decoded"),
                Slot::Checksum(stored) => {
                    if let Some(hash) = &hash {
                        assert_eq!(hash.digest(), stored, "the frame's checksum");
                    }
                    continue;
                }
            };
            if let Some(hash) = &mut hash {
                hash.update(&plain);
            }
            tree.push(&plain);
        }
        tree.finish()
    });
    for (target, path) in links {
        rustix::fs::linkat(root, &target, root, &path, AtFlags::empty()).expect("a link");
    }
}

fn send<T>(sender: &SyncSender<T>, item: T) {
    assert!(sender.send(item).is_ok(), "receivers stay to the end");
}

/// The next item of a queue with several consumers.
fn receive<T>(queue: &Mutex<Receiver<T>>) -> Option<T> {
    let queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    queue.recv().ok()
}

/// A file on an HTTP server. There is no HTTP library, so the kernel copies directly into the chunk.
struct Remote {
    authority: String,
    path: String,
    len: usize,
}

impl Remote {
    fn find(url: &str) -> Self {
        let rest = url.strip_prefix("http://").expect("an http:// URL");
        let (authority, path) = rest.split_once('/').expect("a path in the URL");
        let mut remote = Self {
            authority: authority.to_owned(),
            path: format!("/{path}"),
            len: 0,
        };
        remote.len = remote.ask(&mut remote.connect(), "HEAD", "");
        remote
    }

    fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(&self.authority).expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        BufReader::with_capacity(1024, stream)
    }

    /// Sends a request and reads the head of the response. Returns the length of the body.
    fn ask(&self, connection: &mut BufReader<TcpStream>, method: &str, header: &str) -> usize {
        let Self {
            authority, path, ..
        } = self;
        let request = format!("{method} {path} HTTP/1.1\r\nHost: {authority}\r\n{header}\r\n");
        let sent = connection.get_mut().write_all(request.as_bytes());
        sent.expect("a request is sent");
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let len = connection.read_line(&mut head).expect("an answer");
            assert!(len > 0, "the server hung up");
        }
        let status = head.get(9..12).unwrap_or_default();
        assert!(matches!(status, "200" | "206"), "the server says {head}");
        let len = head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length")
                .then(|| value.parse().ok())?
        });
        len.expect("a Content-Length")
    }

    /// Fetches chunks into buffers that have `headroom` before the chunk's bytes.
    fn fetch(
        &self,
        headroom: usize,
        next: &Mutex<usize>,
        pool: &BufferPool,
        arrived: &SyncSender<(usize, Buffer)>,
    ) {
        let mut connection = self.connect();
        loop {
            // The buffer is taken under the lock, so the oldest chunk always has one.
            let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
            let number = *next;
            let start = number * CHUNK_LEN;
            if start >= self.len {
                return;
            }
            *next += 1;
            let len = CHUNK_LEN.min(self.len - start);
            let mut buffer = pool.acquire(headroom + CHUNK_LEN).expect("open");
            drop(next);
            buffer.truncate(headroom + len);
            let range = format!("Range: bytes={start}-{}\r\n", start + len - 1);
            assert_eq!(self.ask(&mut connection, "GET", &range), len);
            let body = buffer.get_mut(headroom..).expect("as taken");
            connection.read_exact(body).expect("a body");
            send(arrived, (number, buffer));
        }
    }
}

/// Chunks in the order of the file.
struct InOrder {
    arrivals: Receiver<(usize, Buffer)>,
    early: BTreeMap<usize, Buffer>,
    next: usize,
}

impl Iterator for InOrder {
    type Item = Buffer;

    fn next(&mut self) -> Option<Buffer> {
        loop {
            if let Some(buffer) = self.early.remove(&self.next) {
                self.next += 1;
                return Some(buffer);
            }
            let (number, buffer) = self.arrivals.recv().ok()?;
            self.early.insert(number, buffer);
        }
    }
}

/// Plain bytes, or the place where a decoder puts them.
enum Slot {
    Ready(Bytes),
    Coming(Receiver<Bytes>),
    /// Checksum of all plain bytes.
    Checksum(u32),
}

/// A packed block, and the destination of its plain bytes.
struct Job {
    packed: Bytes,
    plain: SyncSender<Bytes>,
}

/// Finds the blocks of a single lz4 frame.
fn walk(mut chunks: InOrder, job: &SyncSender<Job>, slot: &SyncSender<Slot>) {
    const STORED: u32 = 1 << 31;
    let mut rest = Bytes::new();
    let mut checksum_len = None;
    'frame: loop {
        let mut buffer = chunks.next().expect("the frame has an end");
        let start = HEADROOM - rest.len();
        let output = buffer.get_mut(start..HEADROOM).expect("less than a block");
        output.copy_from_slice(&rest);
        rest = buffer.freeze().slice(start..);
        let checksum_len = *checksum_len.get_or_insert_with(|| frame_header(&mut rest));
        while let Some((len, behind)) = rest.split_first_chunk() {
            let len = u32::from_le_bytes(*len);
            let block_len = (len & !STORED) as usize;
            if len == 0 {
                break 'frame;
            }
            if behind.len() < block_len + checksum_len {
                break;
            }
            let packed = rest.slice(4..4 + block_len);
            rest = rest.slice(4 + block_len + checksum_len..);
            if len & STORED != 0 {
                send(slot, Slot::Ready(packed));
                continue;
            }
            let (plain, coming) = sync_channel(1);
            send(job, Job { packed, plain });
            send(slot, Slot::Coming(coming));
        }
    }
    // The checksum of the frame may be in the next chunk.
    let mut end = rest.slice(4..).to_vec();
    drop(rest);
    chunks.for_each(|chunk| end.extend_from_slice(chunk.get(HEADROOM..).unwrap_or_default()));
    if let Ok(stored) = end.try_into() {
        send(slot, Slot::Checksum(u32::from_le_bytes(stored)));
    }
}

/// Strips the frame header. Returns the length of each block's checksum.
fn frame_header(frame: &mut Bytes) -> usize {
    let [0x04, 0x22, 0x4d, 0x18, flags, ..] = **frame else {
        panic!("no lz4 frame");
    };
    assert!(flags & 0x20 != 0, "the blocks are not independent");
    let content_len = if flags & 0x08 == 0 { 0 } else { 8 };
    *frame = frame.slice(4 + 2 + content_len + 1..);
    if flags & 0x10 == 0 { 0 } else { 4 }
}

fn decode(jobs: &Mutex<Receiver<Job>>, pool: &BufferPool) {
    loop {
        // The buffer is taken first, so the oldest job always has one.
        let mut buffer = pool.acquire(MAX_BLOCK_LEN).expect("open");
        let Some(job) = receive(jobs) else { return };
        let len = unpack(&job.packed, &mut buffer).expect("a block");
        buffer.truncate(len);
        send(&job.plain, buffer.freeze());
    }
}

/// Decodes a block with the decoder that tarfs uses.
#[expect(unsafe_code, reason = "liblz4 has no safe interface")]
fn unpack(packed: &[u8], output: &mut [u8]) -> Option<usize> {
    let packed_len = packed.len().try_into().ok()?;
    let room_len = output.len().try_into().ok()?;
    let (from, to) = (packed.as_ptr().cast(), output.as_mut_ptr().cast());
    // SAFETY: both pointers are valid for these lengths, and the regions do not overlap.
    let len = unsafe { lz4_sys::LZ4_decompress_safe(from, to, packed_len, room_len) };
    len.try_into().ok()
}

/// An entry to create below a directory.
struct Work {
    directory: Arc<OwnedFd>,
    name: Vec<u8>,
    what: EntryKind,
}

enum EntryKind {
    /// Bytes of a file. The first writer creates the file.
    Piece {
        offset: u64,
        bytes: Bytes,
    },
    Symlink(Vec<u8>),
    Fifo,
}

fn write(batches: &Mutex<Receiver<Vec<Work>>>) {
    while let Some(batch) = receive(batches) {
        for work in batch {
            let (directory, name) = (&work.directory, &work.name);
            let mode = Mode::from_raw_mode(0o666);
            match work.what {
                EntryKind::Piece { offset, bytes } => {
                    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
                    let file = rustix::fs::openat(directory, name, flags, mode).expect("a file");
                    let mut written = 0;
                    while let Some(bytes) = bytes.get(written..).filter(|left| !left.is_empty()) {
                        written += rustix::io::pwrite(&file, bytes, offset + written as u64)
                            .expect("output in DIR");
                    }
                }
                EntryKind::Symlink(target) => {
                    rustix::fs::symlinkat(target, directory, name).expect("a symbolic link");
                }
                EntryKind::Fifo => {
                    rustix::fs::mknodat(directory, name, FileType::Fifo, mode, 0).expect("a FIFO");
                }
            }
        }
    }
}

/// The tree that the headers describe. It creates directories itself and sends the rest to the
/// writers.
struct Tree {
    root: Arc<OwnedFd>,
    state: State,
    /// The first part of a record or extension.
    gathered: Vec<u8>,
    /// Name of the next member from an extension.
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    long_size: Option<u64>,
    directories: HashSet<Vec<u8>>,
    /// The most recent directory.
    current: (Vec<u8>, Arc<OwnedFd>),
    batches: SyncSender<Vec<Work>>,
    batch: Vec<Work>,
    batch_bytes: usize,
    /// Targets and names of hard links, which are made at the end.
    links: Vec<(Vec<u8>, Vec<u8>)>,
}

enum State {
    Header,
    Extension {
        kind: u8,
        len: usize,
    },
    /// Payload bytes, of which `left` remain.
    Payload {
        path: Vec<u8>,
        offset: u64,
        left: u64,
    },
    Padding(usize),
    End,
}

impl Tree {
    fn new(root: Arc<OwnedFd>, batches: SyncSender<Vec<Work>>) -> Self {
        Self {
            state: State::Header,
            gathered: Vec::new(),
            long_name: None,
            long_link: None,
            long_size: None,
            directories: HashSet::from([Vec::new()]),
            current: (Vec::new(), Arc::clone(&root)),
            root,
            batches,
            batch: Vec::new(),
            batch_bytes: 0,
            links: Vec::new(),
        }
    }

    /// Processes the next plain bytes.
    fn push(&mut self, plain: &Bytes) {
        let mut at = 0;
        while at < plain.len() {
            let here = plain.get(at..).unwrap_or_default();
            match &mut self.state {
                State::Header => at += self.gather(here, RECORD, Self::header),
                State::Extension { len, .. } => {
                    let len = len.next_multiple_of(RECORD);
                    at += self.gather(here, len, Self::extension);
                }
                State::Payload { path, offset, left } => {
                    let len = here.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    let (path, offset_now) = (path.clone(), *offset);
                    *offset += len as u64;
                    *left -= len as u64;
                    if *left == 0 {
                        let end = usize::try_from(*offset % RECORD as u64).expect("small");
                        self.state = State::Padding(end.next_multiple_of(RECORD) - end);
                    }
                    let bytes = plain.slice(at..at + len);
                    self.file(&path, offset_now, bytes);
                    at += len;
                }
                State::Padding(left) => {
                    let len = here.len().min(*left);
                    *left -= len;
                    if *left == 0 {
                        self.state = State::Header;
                    }
                    at += len;
                }
                State::End => return,
            }
        }
    }

    /// Takes bytes from `here` until `len` are gathered, and passes them to `then`. Returns the number
    /// of bytes taken.
    fn gather(&mut self, here: &[u8], len: usize, then: fn(&mut Self, &[u8])) -> usize {
        let taken = here.len().min(len - self.gathered.len());
        self.gathered.extend(here.iter().take(taken));
        if self.gathered.len() == len {
            let gathered = std::mem::take(&mut self.gathered);
            then(self, &gathered);
            self.gathered = gathered;
            self.gathered.clear();
        }
        taken
    }

    fn header(&mut self, record: &[u8]) {
        let field = |start: usize, len: usize| text(record.get(start..start + len).expect("512"));
        let (name, prefix) = (field(0, 100), field(345, 155));
        let kind = record.get(156).copied().unwrap_or_default();
        if name.is_empty() && prefix.is_empty() {
            self.state = State::End;
            return;
        }
        let size = number(record.get(124..136).expect("512"));
        if matches!(kind, b'x' | b'g' | b'L' | b'K') {
            let len = usize::try_from(size).expect("a short extension");
            self.state = State::Extension { kind, len };
            return;
        }
        let size = self.long_size.take().unwrap_or(size);
        let path = self.long_name.take().unwrap_or_else(|| {
            let is_ustar = field(257, 5) == b"ustar" && !prefix.is_empty();
            if is_ustar && record.get(263) == Some(&b'0') {
                [prefix, b"/", name].concat()
            } else {
                name.to_vec()
            }
        });
        let path = below_root(&path);
        let link = self.long_link.take();
        let link = link.unwrap_or_else(|| field(157, 100).to_vec());
        match kind {
            b'1' => self.links.push((below_root(&link), path)),
            b'2' => self.add(&path, EntryKind::Symlink(link)),
            b'3' | b'4' | b'6' => self.add(&path, EntryKind::Fifo),
            b'5' => self.make_directory(&path),
            _ if size == 0 => self.file(&path, 0, Bytes::new()),
            _ => {
                self.state = State::Payload {
                    path,
                    offset: 0,
                    left: size,
                };
            }
        }
    }

    fn extension(&mut self, body: &[u8]) {
        let State::Extension { kind, len } = self.state else {
            unreachable!("only called in this state");
        };
        self.state = State::Header;
        let body = body.get(..len).expect("gathered");
        match kind {
            b'L' => self.long_name = Some(text(body).to_vec()),
            b'K' => self.long_link = Some(text(body).to_vec()),
            b'x' => self.pax_records(body),
            _ => {}
        }
    }

    fn pax_records(&mut self, mut body: &[u8]) {
        while let Some(space) = body.iter().position(|&byte| byte == b' ') {
            let (len, _) = body.split_at(space);
            let len = std::str::from_utf8(len)
                .ok()
                .and_then(|len| len.parse().ok());
            let (record, rest) = body.split_at(len.expect("a length"));
            let record = record.get(space + 1..record.len() - 1).expect("a record");
            let middle = record.iter().position(|&byte| byte == b'=');
            let (key, value) = record.split_at(middle.expect("a value"));
            let value = value.get(1..).unwrap_or_default();
            match key {
                b"path" if self.long_name.is_none() => self.long_name = Some(value.to_vec()),
                b"GNU.sparse.name" => self.long_name = Some(value.to_vec()),
                b"linkpath" => self.long_link = Some(value.to_vec()),
                b"size" => {
                    let value = std::str::from_utf8(value).ok();
                    self.long_size = value.and_then(|value| value.parse().ok());
                }
                _ => {}
            }
            body = rest;
        }
    }

    fn file(&mut self, path: &[u8], offset: u64, bytes: Bytes) {
        self.add(path, EntryKind::Piece { offset, bytes });
    }

    fn add(&mut self, path: &[u8], what: EntryKind) {
        let (parent, name) = split(path);
        if self.current.0 != parent {
            self.make_directory(parent);
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let here = if parent.is_empty() { b"." } else { parent };
            let directory = rustix::fs::openat(&self.root, here, flags, Mode::empty());
            self.current = (parent.to_vec(), Arc::new(directory.expect("a directory")));
        }
        if let EntryKind::Piece { bytes, .. } = &what {
            self.batch_bytes += bytes.len();
        }
        self.batch.push(Work {
            directory: Arc::clone(&self.current.1),
            name: name.to_vec(),
            what,
        });
        if self.batch.len() >= BATCH_FILES || self.batch_bytes >= BATCH_BYTES {
            self.flush_batch();
        }
    }

    fn flush_batch(&mut self) {
        self.batch_bytes = 0;
        send(&self.batches, std::mem::take(&mut self.batch));
    }

    fn make_directory(&mut self, path: &[u8]) {
        if self.directories.contains(path) {
            return;
        }
        self.make_directory(split(path).0);
        match rustix::fs::mkdirat(&self.root, path, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => panic!("a directory cannot be made: {errno}"),
        }
        self.directories.insert(path.to_vec());
    }

    /// Returns the hard links, which remain to be made.
    fn finish(mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.flush_batch();
        self.links
    }
}

/// A field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    let mut parts = field.split(|&byte| byte == 0);
    parts.next().unwrap_or_default()
}

/// A number, octal or in base 256.
fn number(field: &[u8]) -> u64 {
    if let Some((0x80.., rest)) = field.split_first() {
        return rest.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    }
    let digits = field.iter().filter(|byte| (b'0'..=b'7').contains(byte));
    digits.fold(0, |sum, &digit| sum * 8 + u64::from(digit - b'0'))
}

fn below_root(path: &[u8]) -> Vec<u8> {
    let path = path.strip_prefix(b"./").unwrap_or(path);
    let path = path.strip_suffix(b"/").unwrap_or(path);
    if path == b"." {
        Vec::new()
    } else {
        path.to_vec()
    }
}

/// Splits a path into its parent, which is empty for the root, and its name.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (
            path.get(..slash).unwrap_or_default(),
            path.get(slash + 1..).unwrap_or_default(),
        ),
        None => (b"", path),
    }
}
