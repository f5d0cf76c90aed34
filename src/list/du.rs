//! Sums of the space that directories use, as du(1) shows them.
//!
//! A file counts once, where a walk by one thread finds it first. Lines have the order of such a walk: what is below a
//! directory, then the directory. A directory with files of several names waits for its starting point, because a
//! directory before it may have one of them, too.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, LinkedList};
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::vec;

use crate::base::sync::Mutex;

use crate::tree::{
    FileId, FileKind, FollowedLinks, Item, Level, Metadata, SharedOutput, Tree, Visit, Visitor,
};

/// Lines that wait for earlier ones, in bytes. If there are more, the later ones are written first.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// The quantity that is summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Measure {
    /// Space in use, in bytes.
    #[default]
    Space,
    /// Sizes for a reader, in bytes.
    ApparentSize,
    /// Number of files.
    Inodes,
}

/// Options of [`DiskUsage`].
#[derive(Clone, Copy, Debug)]
pub struct DuOptions {
    /// The quantity that is summed.
    pub measure: Measure,
    /// Whether files have lines, too.
    pub all: bool,
    /// Depth below the starting points down to which lines are shown.
    pub max_depth: usize,
    /// Whether there are several starting points, of which one may be below another.
    pub has_several_starts: bool,
    /// The links that are followed. With all of them, each file counts once, where it is found first.
    pub links: FollowedLinks,
    /// Formats a sum.
    pub format: fn(u64) -> String,
}

/// Sum of a directory and of what is below it, with the lines of the latter.
#[derive(Debug, Default)]
pub struct Sum {
    /// Without files of several names.
    total: AtomicU64,
    /// Number of the directory in the one above it.
    number: u64,
    /// Parts below it, by number.
    parts: Mutex<Vec<(u64, Part)>>,
}

/// A part of the output.
#[derive(Debug)]
enum Part {
    Lines(Lines),
    /// A file with several names that has a line, and its path.
    Shared(FileId, u64, Box<[u8]>),
    /// Files with several names that have no lines, one after the other.
    Files(Vec<(FileId, u64)>),
    /// A directory with such files below it.
    Directory(Box<Directory>),
}

/// A directory whose sum is not complete.
#[derive(Debug)]
struct Directory {
    /// Without files of several names.
    total: u64,
    /// Those that were counted below it.
    shared: u64,
    /// Its path, if it has a line.
    path: Option<Vec<u8>>,
    parts: vec::IntoIter<(u64, Part)>,
}

/// A list, because a deep tree would copy its lines for each level.
type Lines = LinkedList<Vec<u8>>;

/// Sums the space of a tree, and writes the lines.
#[derive(Debug)]
pub struct DiskUsage {
    options: DuOptions,
    output: Arc<SharedOutput>,
    /// Bytes of lines that wait.
    waiting: AtomicUsize,
    /// Files that were counted, with the number of the starting point: those with several names, and all if there are
    /// several starting points.
    seen: Mutex<HashMap<FileId, usize>>,
    /// Number of the current starting point, from 1 on.
    start: AtomicUsize,
    grand_total: AtomicU64,
}

impl DiskUsage {
    /// Writes to `output`.
    pub fn new(options: DuOptions, output: Arc<SharedOutput>) -> Self {
        Self {
            options,
            output,
            waiting: AtomicUsize::new(0),
            seen: Mutex::default(),
            start: AtomicUsize::new(0),
            grand_total: AtomicU64::new(0),
        }
    }

    /// The state of the next starting point: its sum so far. `None` if it is no directory, and is done.
    pub fn start(&self, item: &Item<'_, impl Tree>) -> Option<Sum> {
        self.start.fetch_add(1, Ordering::Relaxed);
        let (metadata, value) = self.value(item)?;
        if item.kind() == FileKind::Directory {
            return Some(Sum {
                total: AtomicU64::new(value),
                ..Sum::default()
            });
        }
        if !self.may_repeat(&metadata) || self.count(metadata.id()) {
            self.grand_total.fetch_add(value, Ordering::Relaxed);
            self.output.write_last(&self.line(value, item.path()));
        }
        None
    }

    /// Writes the line of the starting point at `path`, which could not be opened.
    pub fn end_closed(&self, sum: &Sum, path: &[u8]) {
        let total = sum.total.load(Ordering::Relaxed);
        self.grand_total.fetch_add(total, Ordering::Relaxed);
        self.output.write_last(&self.line(total, path));
    }

    /// The sum of all starting points.
    pub fn grand_total(&self) -> u64 {
        self.grand_total.load(Ordering::Relaxed)
    }

    /// A file's attributes and its value. `None` if they cannot be examined, or it was counted at an earlier starting
    /// point.
    fn value(&self, item: &Item<'_, impl Tree>) -> Option<(Metadata, u64)> {
        let is_followed = self.options.links.includes(item.depth());
        let found = item.metadata().and_then(|found| {
            // A link that was not followed has no target.
            if is_followed && found.kind == FileKind::Symlink {
                item.target_kind()?;
            }
            Ok(found)
        });
        let report = |error| self.output.report(item.path(), &error);
        let metadata = found.map_err(report).ok()?;
        if self.options.links == FollowedLinks::All {
            let is_new = self.count(metadata.id());
            return is_new.then(|| (metadata, self.measured(&metadata)));
        }
        if self.options.has_several_starts {
            let start = self.start.load(Ordering::Relaxed);
            let mut seen = self.seen.lock();
            let known = if metadata.is_shared() {
                seen.get(&metadata.id()).copied()
            } else {
                Some(*seen.entry(metadata.id()).or_insert(start))
            };
            if known.is_some_and(|known| known < start) {
                return None;
            }
        }
        Some((metadata, self.measured(&metadata)))
    }

    /// Counts a file with several names. Returns whether this is its first one.
    fn count(&self, id: FileId) -> bool {
        match self.seen.lock().entry(id) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(self.start.load(Ordering::Relaxed));
                true
            }
        }
    }

    /// Whether a file that was not counted yet may come again, by another name.
    fn may_repeat(&self, metadata: &Metadata) -> bool {
        metadata.is_shared() && self.options.links != FollowedLinks::All
    }

    fn measured(&self, metadata: &Metadata) -> u64 {
        match self.options.measure {
            Measure::Space => metadata.blocks.saturating_mul(512),
            Measure::ApparentSize => metadata.size,
            Measure::Inodes => 1,
        }
    }

    /// A line, also of the grand total.
    pub fn line(&self, total: u64, path: &[u8]) -> Vec<u8> {
        let mut line = (self.options.format)(total).into_bytes();
        line.push(b'\t');
        line.extend_from_slice(&self.output.shown(path));
        line.push(b'\n');
        line
    }
}

impl DiskUsage {
    /// The output of a directory, whose parts are in order.
    fn joined(&self, total: u64, path: Option<Vec<u8>>, parts: Vec<(u64, Part)>) -> Part {
        if parts
            .iter()
            .any(|(_, part)| !matches!(part, Part::Lines(_)))
        {
            let parts = parts.into_iter();
            return Part::Directory(Box::new(Directory {
                total,
                shared: 0,
                path,
                parts,
            }));
        }
        let mut text = Lines::new();
        for (_, part) in parts {
            if let Part::Lines(mut lines) = part {
                text.append(&mut lines);
            }
        }
        if let Some(path) = path {
            let line = self.line(total, &path);
            self.waiting.fetch_add(line.len(), Ordering::Relaxed);
            text.push_back(line);
        }
        Part::Lines(text)
    }

    /// Counts files with several names in order, and writes the lines. It goes on after an error, so that no deep tree is
    /// dropped by recursion.
    fn write(&self, part: Part) -> ControlFlow<()> {
        let (mut next, mut above) = (Some(part), Vec::<Directory>::new());
        loop {
            let part = next
                .take()
                .or_else(|| above.last_mut()?.parts.next().map(|part| part.1));
            match part {
                Some(Part::Lines(lines)) => {
                    for line in lines {
                        self.waiting.fetch_sub(line.len(), Ordering::Relaxed);
                        self.output.write_last(&line);
                    }
                }
                Some(Part::Shared(id, value, path)) if self.count(id) => {
                    if let Some(directory) = above.last_mut() {
                        directory.shared = directory.shared.saturating_add(value);
                    }
                    self.output.write_last(&self.line(value, &path));
                }
                Some(Part::Files(files)) => {
                    let first = files.into_iter().filter(|(id, _)| self.count(*id));
                    let sum = first.fold(0_u64, |sum, (_, value)| sum.saturating_add(value));
                    if let Some(directory) = above.last_mut() {
                        directory.shared = directory.shared.saturating_add(sum);
                    }
                }
                Some(Part::Shared(..)) => {}
                Some(Part::Directory(directory)) => above.push(*directory),
                None => {
                    let Some(done) = above.pop() else {
                        return self.output.write(b"");
                    };
                    if let Some(path) = done.path {
                        let total = done.total.saturating_add(done.shared);
                        self.output.write_last(&self.line(total, &path));
                    }
                    match above.last_mut() {
                        Some(parent) => parent.shared = parent.shared.saturating_add(done.shared),
                        None => drop(self.grand_total.fetch_add(done.shared, Ordering::Relaxed)),
                    }
                }
            }
        }
    }
}

impl<T: Tree + Send + 'static> Visitor<T> for DiskUsage {
    type State = Sum;

    fn is_sequential(&self) -> bool {
        self.options.links == FollowedLinks::All
    }

    fn visit(&self, names: &Visit<'_, T, Sum>, descend: &mut Vec<(usize, Sum)>) -> ControlFlow<()> {
        let level = names.level;
        let has_lines = self.options.all && level.depth < self.options.max_depth;
        let (mut total, mut parts, mut bytes) = (0_u64, Vec::new(), 0);
        let mut is_after_directory = true;
        for (index, item) in names.items() {
            let Some((metadata, value)) = self.value(&item) else {
                continue;
            };
            let number = names.place_of(index);
            if item.kind() == FileKind::Directory {
                let sum = Sum {
                    total: AtomicU64::new(value),
                    number,
                    parts: Mutex::default(),
                };
                descend.push((index, sum));
                is_after_directory = true;
            } else if self.may_repeat(&metadata) && has_lines {
                let path = item.path().into();
                parts.push((number, Part::Shared(metadata.id(), value, path)));
            } else if self.may_repeat(&metadata) {
                let file = (metadata.id(), value);
                match parts.last_mut() {
                    Some((_, Part::Files(files))) if !is_after_directory => files.push(file),
                    _ => parts.push((number, Part::Files(vec![file]))),
                }
                is_after_directory = false;
            } else {
                total = total.saturating_add(value);
                if has_lines {
                    let line = self.line(value, item.path());
                    bytes += line.len();
                    parts.push((number, Part::Lines(Lines::from([line]))));
                }
            }
        }
        for (_, part) in &mut parts {
            if let Part::Files(files) = part {
                files.shrink_to_fit();
            }
        }
        level.state.total.fetch_add(total, Ordering::Relaxed);
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        level.state.parts.lock().append(&mut parts);
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<T, Sum>>) -> ControlFlow<()> {
        let total = level.state.total.load(Ordering::Relaxed);
        let mut parts = std::mem::take(&mut *level.state.parts.lock());
        parts.sort_by_key(|part| part.0);
        let path = (level.depth <= self.options.max_depth).then(|| level.path());
        let part = self.joined(total, path, parts);
        let is_complete = matches!(part, Part::Lines(_));
        let has_too_many = self.waiting.load(Ordering::Relaxed) > MAX_WAITING_BYTES;
        match &level.parent {
            Some(parent) => {
                parent.state.total.fetch_add(total, Ordering::Relaxed);
                if !(is_complete && has_too_many) {
                    let number = level.state.number;
                    parent.state.parts.lock().push((number, part));
                    return ControlFlow::Continue(());
                }
            }
            None => {
                self.grand_total.fetch_add(total, Ordering::Relaxed);
            }
        }
        self.write(part)
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.output.report(path, &error);
    }
}
