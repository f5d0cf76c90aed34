//! Sums of the space that directories use, as du(1) shows them.
//!
//! A file with several names counts once. Lines have the order of a walk by one thread: what is below a directory,
//! then the directory.

use std::collections::{HashSet, LinkedList};
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::base::sync::Mutex;

use super::item::Item;
use super::output::SharedOutput;
use super::parallel_walk::{Level, Visit, Visitor};
use super::tree::{FileId, FileKind, Metadata, Tree};

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
    /// Formats a sum.
    pub format: fn(u64) -> String,
}

/// Sum of a directory and of what is below it, with the lines of the latter.
#[derive(Debug, Default)]
pub struct Sum {
    total: AtomicU64,
    /// Number of the directory in the one above it.
    number: u64,
    /// Lines of what is below it, by number.
    lines: Mutex<Vec<(u64, Lines)>>,
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
    /// Files with several names that were counted.
    seen: Mutex<HashSet<FileId>>,
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
            grand_total: AtomicU64::new(0),
        }
    }

    /// The state of a starting point: its sum so far. `None` if it is no directory, and is done.
    pub fn start(&self, item: &Item<'_, impl Tree>) -> Option<Sum> {
        let value = self.value(item)?;
        if item.kind() == FileKind::Directory {
            return Some(Sum {
                total: AtomicU64::new(value),
                ..Sum::default()
            });
        }
        self.grand_total.fetch_add(value, Ordering::Relaxed);
        self.output.write_last(&self.line(value, item.path()));
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

    /// The value of a file, or `None` if it was counted before or cannot be examined.
    fn value(&self, item: &Item<'_, impl Tree>) -> Option<u64> {
        let metadata = match item.metadata() {
            Ok(metadata) => metadata,
            Err(error) => {
                self.output.report(item.path(), &error);
                return None;
            }
        };
        if metadata.is_shared() && !self.seen.lock().insert(metadata.id()) {
            return None;
        }
        Some(self.measured(&metadata))
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
        line.extend_from_slice(path);
        line.push(b'\n');
        line
    }
}

impl<T: Tree + Send + 'static> Visitor<T> for DiskUsage {
    type State = Sum;

    fn visit(&self, names: &Visit<'_, T, Sum>, descend: &mut Vec<(usize, Sum)>) -> ControlFlow<()> {
        let level = names.level;
        let has_lines = self.options.all && level.depth < self.options.max_depth;
        let (mut total, mut lines) = (0_u64, Vec::new());
        for (index, item) in names.items() {
            let Some(value) = self.value(&item) else {
                continue;
            };
            let number = names.place_of(index);
            if item.kind() == FileKind::Directory {
                let sum = Sum {
                    total: AtomicU64::new(value),
                    number,
                    lines: Mutex::default(),
                };
                descend.push((index, sum));
            } else {
                total = total.saturating_add(value);
                if has_lines {
                    lines.push((number, Lines::from([self.line(value, item.path())])));
                }
            }
        }
        level.state.total.fetch_add(total, Ordering::Relaxed);
        let bytes = lines.iter().flat_map(|line| &line.1).map(Vec::len).sum();
        self.waiting.fetch_add(bytes, Ordering::Relaxed);
        level.state.lines.lock().append(&mut lines);
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<T, Sum>>) -> ControlFlow<()> {
        let total = level.state.total.load(Ordering::Relaxed);
        let mut lines = std::mem::take(&mut *level.state.lines.lock());
        lines.sort_by_key(|line| line.0);
        let mut text = Lines::new();
        for (_, mut below) in lines {
            text.append(&mut below);
        }
        if level.depth <= self.options.max_depth {
            let line = self.line(total, &level.path());
            self.waiting.fetch_add(line.len(), Ordering::Relaxed);
            text.push_back(line);
        }
        let has_too_many = self.waiting.load(Ordering::Relaxed) > MAX_WAITING_BYTES;
        match &level.parent {
            Some(parent) => {
                parent.state.total.fetch_add(total, Ordering::Relaxed);
                if !has_too_many {
                    let number = level.state.number;
                    parent.state.lines.lock().push((number, text));
                    return ControlFlow::Continue(());
                }
            }
            None => {
                self.grand_total.fetch_add(total, Ordering::Relaxed);
            }
        }
        for line in text {
            self.waiting.fetch_sub(line.len(), Ordering::Relaxed);
            self.output.write(&line)?;
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.output.report(path, &error);
    }
}
