//! Listings in order, as ls(1) prints them.

use std::cmp::Reverse;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::base::sync::Mutex;
use crate::tar::Timestamp;

use super::composefs::Dump;
use super::drawing::{Counts, Drawing};
use super::json;
use super::long::{Columns, Style};
use crate::tree::{
    Batch, FileKind, Item, Level, Metadata, OpenLevels, Place, SharedOutput, Start, Tree, Visit,
    Visitor, push_component,
};

/// Bytes of lines that are written at once.
const WRITE_BYTES: usize = 64 << 10;

/// The order of the names in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// By the bytes of the name.
    #[default]
    Name,
    /// Large files first.
    Size,
    /// New files first.
    Time,
    /// As they are stored.
    Stored,
}

/// Options of a listing.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ListOptions {
    /// The order within a directory.
    pub order: Order,
    /// Whether the order is reversed, unless it is [`Order::Stored`].
    pub reverse: bool,
    /// Whether subdirectories are listed, too, each behind its own line. Names are paths then.
    pub recursive: bool,
    /// Whether names are shown that begin with a dot.
    pub all: bool,
    /// Whether each line is a JSON object, with a path.
    pub json: bool,
    /// Whether each line is one of composefs-dump(5).
    pub composefs: bool,
    /// How subdirectories are drawn below their directories, if they are.
    pub drawing: Option<Drawing>,
    /// The parts of other lines.
    pub style: Style,
}

impl ListOptions {
    /// Files with a higher value come first.
    fn key(&self, metadata: &Metadata) -> (u64, Timestamp) {
        match self.order {
            Order::Size => (metadata.size, Timestamp::default()),
            _ => (0, metadata.mtime),
        }
    }
}

/// Lists directories of a tree.
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub struct Lister<T> {
    tree: Arc<T>,
    options: ListOptions,
    output: Arc<SharedOutput>,
    /// Without widths.
    columns: Columns,
    filter: Option<Filter>,
    /// Path of the directory in which all files are, for errors; empty in an archive.
    source: Vec<u8>,
    dump: Mutex<Dump>,
    counts: Counts,
}

type Filter = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// A directory whose names are being listed.
struct Frame<T: Tree> {
    level: Arc<Level<T, ()>>,
    /// The open directory, while none below it is listed.
    directory: Option<Arc<T::Directory>>,
    /// Its path; empty while a directory below it is listed, so that a deep tree needs no memory for each level.
    path: Vec<u8>,
    batch: Batch,
    /// Attributes of the names in `batch`, if they were read for the order.
    metadata: Vec<Option<Metadata>>,
    /// Numbers of the names that are left, the next one last.
    order: Vec<u32>,
    /// Where the next names are read; `None` if all are.
    position: Option<u64>,
    columns: Columns,
    /// Lines of a drawing before each name; empty as the path.
    indent: String,
    /// Lengths of the path and of these lines.
    lens: (usize, usize),
}

impl<T: Tree + Send + 'static> Lister<T> {
    /// Writes to `output`.
    pub fn new(tree: Arc<T>, options: ListOptions, output: Arc<SharedOutput>) -> Self {
        Self {
            tree,
            columns: Columns::new(options.style),
            options,
            output,
            filter: None,
            source: Vec::new(),
            dump: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// Leaves out the lines of files for whose numbers `filter` is false. Directories are still walked.
    pub fn show_only(&mut self, filter: impl Fn(u64) -> bool + Send + Sync + 'static) {
        self.filter = Some(Box::new(filter));
    }

    /// Names `source` in errors, the directory in which all files are.
    pub fn set_source(&mut self, source: &[u8]) {
        source.clone_into(&mut self.source);
    }

    /// Reports an error about the file at `path`, which is that of a line.
    fn report_at(&self, path: &[u8], error: &io::Error) {
        let mut whole = self.source.clone();
        if path.is_empty() {
            return self.output.report(&whole, error);
        }
        push_component(&mut whole, path);
        self.output.report(&whole, error);
    }

    /// Whether the lines need no order and no widths, so that several threads may write them
    /// ([`walk_parallel`](crate::tree::walk_parallel)).
    pub fn is_unordered(&self) -> bool {
        let options = &self.options;
        let needs_order =
            options.order != Order::Stored || options.composefs || options.drawing.is_some();
        !needs_order && !self.needs_widths()
    }

    fn is_reversed(&self) -> bool {
        self.options.reverse && self.options.order != Order::Stored
    }

    /// Whether lines show attributes, so that they report those that cannot be read.
    fn shows_metadata(&self) -> bool {
        self.options.json || self.options.composefs || self.columns.have_widths()
    }

    fn needs_widths(&self) -> bool {
        let options = &self.options;
        // Files in the order of a directory have no other column, and are written as they are read.
        let is_streamed =
            options.order == Order::Stored && !options.recursive && !options.style.long;
        !options.json && !is_streamed && self.columns.have_widths()
    }

    /// Writes the lines of `items` with their names, in columns.
    pub fn list_items(&self, items: &[(Item<'_, T>, &[u8])]) -> ControlFlow<()> {
        let (mut columns, mut lines) = (self.columns, Vec::new());
        if self.needs_widths() {
            for (item, _) in items {
                columns.measure(item);
            }
        }
        for (item, name) in items {
            self.write_line(&mut lines, &columns, name, item);
        }
        self.output.write(&lines)
    }

    /// Writes the name of a directory, before its contents. An empty line is above it unless it `is_first`.
    pub fn write_heading(&self, name: &[u8], is_first: bool) -> ControlFlow<()> {
        let mut line = if is_first { Vec::new() } else { b"\n".to_vec() };
        self.columns.push_name(&mut line, name);
        line.extend_from_slice(b":\n");
        self.output.write(&line)
    }

    /// Writes the numbers of drawn directories and files, if there is a drawing.
    pub fn write_counts(&self) -> ControlFlow<()> {
        match self.options.drawing {
            Some(_) => self.output.write(self.counts.line().as_bytes()),
            None => ControlFlow::Continue(()),
        }
    }

    /// The order of files as in a directory, unless that is the order in which they are stored.
    pub fn sort_items(&self, items: &mut [(Item<'_, T>, &[u8])]) {
        let options = self.options;
        let key = |item: &Item<'_, T>| item.metadata().ok().map(|metadata| options.key(&metadata));
        match options.order {
            Order::Stored => return,
            Order::Name => items.sort_by_key(|(_, name)| *name),
            Order::Size | Order::Time => {
                items.sort_by_key(|(item, name)| (Reverse(key(item)), *name));
            }
        }
        if self.is_reversed() {
            items.reverse();
        }
    }

    /// Writes the lines of the directory `item`, called `path`, and, if so wanted, of those below it. Breaks if the output
    /// has ended, and returns whether the directory could be opened.
    pub fn list_directory(&self, item: &Item<'_, T>, path: &[u8]) -> ControlFlow<(), bool> {
        let directory = match item.open() {
            Ok(directory) => directory,
            Err(error) => {
                self.output.report(item.path(), &error);
                return ControlFlow::Continue(false);
            }
        };
        let start = Start {
            path: path.to_owned(),
            inode: item.inode(),
            directory,
            state: (),
        };
        let level = Level::at_start(start, &OpenLevels::new(&*self.tree, 1));
        let mut lines = Vec::new();
        if self.options.drawing.is_some() {
            self.columns.push_name(&mut lines, item.path());
            lines.push(b'\n');
        }
        let mut frames = vec![self.frame(level, path)];
        while let Some(frame) = frames.last_mut() {
            let Some(number) = frame.order.pop() else {
                let has_more = self.read(frame);
                if !has_more
                    && let Some(done) = frames.pop()
                    && let Some(above) = frames.last_mut()
                {
                    above.resume(done);
                }
                continue;
            };
            let below = self.list_number(frame, number, &mut lines);
            if lines.len() >= WRITE_BYTES {
                self.output.write(&lines)?;
                lines.clear();
            }
            if let Some(below) = below {
                frame.pause();
                frames.push(below);
            }
        }
        self.output.write(&lines)?;
        ControlFlow::Continue(true)
    }

    fn frame(&self, level: Arc<Level<T, ()>>, path: &[u8]) -> Frame<T> {
        let mut frame = Frame {
            level,
            directory: None,
            path: path.to_owned(),
            batch: Batch::default(),
            metadata: Vec::new(),
            order: Vec::new(),
            position: Some(0),
            columns: self.columns,
            indent: String::new(),
            lens: (0, 0),
        };
        if self.is_streamed() && self.needs_widths() {
            // A second reading is cheaper than keeping all.
            while self.read(&mut frame) {
                self.measure(&mut frame);
            }
            frame.position = Some(0);
        }
        frame
    }

    /// Opens the directory of `frame` again, if another one was listed meanwhile.
    fn reopen(&self, frame: &mut Frame<T>) -> Option<Arc<T::Directory>> {
        if frame.directory.is_none() {
            let opened = frame.level.open(&self.tree);
            let opened = opened.inspect_err(|error| self.report_at(&frame.path, error));
            frame.directory = opened.ok();
        }
        frame.directory.clone()
    }

    /// Whether names are listed in the order in which they are read.
    fn is_streamed(&self) -> bool {
        let is_sorted = match self.options.order {
            Order::Name => self.tree.is_sorted(),
            Order::Stored => !self.tree.is_sorted(),
            Order::Size | Order::Time => false,
        };
        // A drawing needs to know which name is the last.
        is_sorted && !self.is_reversed() && self.options.drawing.is_none()
    }

    /// Reads the next names of a directory. Returns whether there are some.
    fn read(&self, frame: &mut Frame<T>) -> bool {
        let is_streamed = self.is_streamed();
        frame.batch = Batch::default();
        while let Some(mut position) = frame.position {
            let before = frame.batch.len();
            let Some(directory) = self.reopen(frame) else {
                frame.position = None;
                break;
            };
            if let Err(error) = self.tree.read(&directory, &mut position, &mut frame.batch) {
                self.report_at(&frame.path, &error);
                frame.position = None;
            } else {
                frame.position = (frame.batch.len() > before).then_some(position);
            }
            for (name, error) in frame.batch.take_failed() {
                let mut path = frame.path.clone();
                push_component(&mut path, &name);
                self.report_at(&path, &error);
            }
            if is_streamed {
                break;
            }
        }
        self.sort(frame);
        if !is_streamed && self.needs_widths() {
            self.measure(frame);
        }
        !frame.batch.is_empty()
    }

    fn sort(&self, frame: &mut Frame<T>) {
        let batch = &frame.batch;
        let is_shown = |number: &u32| {
            let name = batch.get(*number as usize);
            self.options.all || name.is_some_and(|found| !found.name.starts_with(b"."))
        };
        let count = u32::try_from(batch.len()).unwrap_or(u32::MAX);
        let mut order: Vec<u32> = (0..count).filter(is_shown).collect();
        frame.metadata.clear();
        if !self.is_streamed() {
            let name = |number: u32| batch.get(number as usize).map(|found| found.name);
            if self.options.order != Order::Stored {
                order.sort_by(|&left, &right| name(left).cmp(&name(right)));
            }
            if matches!(self.options.order, Order::Size | Order::Time) {
                let items = (0..batch.len()).map(|number| frame.item(&self.tree, number));
                let metadata = |item: Option<Item<'_, T>>| {
                    let (item, needs_report) = (item?, !self.shows_metadata());
                    let metadata = item.metadata();
                    let metadata = metadata.inspect_err(|error| {
                        if needs_report {
                            self.report_at(item.path(), error);
                        }
                    });
                    metadata.ok()
                };
                frame.metadata = items.map(metadata).collect();
                let key = |metadata: &Metadata| self.options.key(metadata);
                let metadata = |number: u32| frame.metadata.get(number as usize)?.as_ref();
                order.sort_by_key(|&number| Reverse(metadata(number).map(key)));
            }
            if self.is_reversed() {
                order.reverse();
            }
        }
        order.reverse();
        frame.order = order;
    }

    fn measure(&self, frame: &mut Frame<T>) {
        let mut columns = frame.columns;
        for item in frame
            .order
            .iter()
            .filter_map(|&number| frame.item(&self.tree, number as usize))
        {
            columns.measure(&item);
        }
        frame.columns = columns;
    }

    /// Writes the line of a name, and returns the directory to list next.
    fn list_number(
        &self,
        frame: &mut Frame<T>,
        number: u32,
        lines: &mut Vec<u8>,
    ) -> Option<Frame<T>> {
        self.reopen(frame)?;
        let item = frame.item(&self.tree, number as usize)?;
        let is_last = frame.order.is_empty();
        let branch = self.options.drawing.map(|drawing| drawing.branch(is_last));
        if let Some((before, _)) = branch {
            lines.extend_from_slice(frame.indent.as_bytes());
            lines.extend_from_slice(before.as_bytes());
            self.counts.add(item.kind());
        }
        self.write_line(lines, &frame.columns, self.shown(&item), &item);
        if !self.options.recursive || item.kind() != FileKind::Directory {
            return None;
        }
        let name = frame.batch.get(number as usize)?;
        match frame.level.open_child(&self.tree, name, ()) {
            Ok(level) => Some(Frame {
                indent: branch.map_or_else(String::new, |(_, below)| frame.indent.clone() + below),
                ..self.frame(level, item.path())
            }),
            Err(error) => {
                self.report_at(item.path(), &error);
                None
            }
        }
    }

    fn shown<'i>(&self, item: &'i Item<'_, T>) -> &'i [u8] {
        if self.options.drawing.is_none() && (self.options.recursive || self.options.json) {
            item.path()
        } else {
            item.name()
        }
    }

    fn write_line(&self, lines: &mut Vec<u8>, columns: &Columns, name: &[u8], item: &Item<'_, T>) {
        let filter = self.filter.as_ref();
        if filter.is_some_and(|shows| !shows(item.inode())) {
            return;
        }
        let written = if self.options.json {
            json::write(lines, name, item)
        } else if self.options.composefs {
            self.dump.lock().write(lines, name, item)
        } else {
            columns.write(lines, name, item)
        };
        if let Err(error) = written {
            self.report_at(item.path(), &error);
        }
    }
}

impl<T: Tree> Frame<T> {
    /// Closes the directory, and forgets what [`Self::resume`] gives back.
    fn pause(&mut self) {
        self.directory = None;
        self.lens = (self.path.len(), self.indent.len());
        (self.path, self.indent) = (Vec::new(), String::new());
    }

    /// Goes on after `below`, a directory in this one.
    fn resume(&mut self, below: Self) {
        (self.path, self.indent) = (below.path, below.indent);
        self.path.truncate(self.lens.0);
        self.indent.truncate(self.lens.1);
    }

    /// A file, if the directory is open.
    fn item<'a>(&'a self, tree: &'a T, number: usize) -> Option<Item<'a, T>> {
        let name = self.batch.get(number)?;
        let place = Place {
            directory: self.directory.as_deref()?,
            inode: self.level.inode,
            path: &self.path,
            start: b"",
            depth: 0,
        };
        let mut item = Item::in_directory(tree, &place, name);
        if let Some(Some(known)) = self.metadata.get(number) {
            item.set_metadata(*known);
        }
        Some(item)
    }
}

impl<T: Tree + Send + 'static> Visitor<T> for Lister<T> {
    type State = ();

    fn makes_calls(&self) -> bool {
        self.options.json
    }

    fn visit(&self, names: &Visit<'_, T, ()>, descend: &mut Vec<(usize, ())>) -> ControlFlow<()> {
        let mut lines = Vec::new();
        for (number, item) in names.items() {
            if !self.options.all && item.name().starts_with(b".") {
                continue;
            }
            self.write_line(&mut lines, &self.columns, self.shown(&item), &item);
            if self.options.recursive && item.kind() == FileKind::Directory {
                descend.push((number, ()));
            }
        }
        self.output.write(&lines)
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.report_at(path, &error);
    }
}
