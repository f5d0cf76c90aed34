//! The lines of `diff`: what differs between two trees.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::escape::escape;
use super::super::json::{type_name, write_bytes, write_time};
use super::super::output::SharedOutput;
use super::super::tree::{FileKind, Metadata, Tree};
use super::compare::{Difference, Differences, Property, Side};
use crate::base::sync::Mutex;
use crate::base::time::Civil;

/// Lines that are sorted by path at the end, in bytes. If there are more, they are printed as they come.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// A file, by its file system and its number.
type Id = (u64, u64);

type Report = Box<dyn Fn(&[u8], io::Error) + Send + Sync>;

/// Prints what differs between two trees, as lines or as JSON objects.
pub struct DiffPrinter {
    is_json: bool,
    output: Arc<SharedOutput>,
    report: Report,
    has_found: AtomicBool,
    lines: Mutex<Lines>,
    /// Files with several names: of the first tree with the one of the second, and the other way round.
    pairs: Mutex<(HashMap<Id, Id>, HashMap<Id, Id>)>,
}

#[derive(Default)]
struct Lines {
    /// Paths and lines.
    waiting: Vec<(Vec<u8>, Vec<u8>)>,
    bytes: usize,
}

impl DiffPrinter {
    /// Writes to `output`, and passes errors to `report` with the path that they are about.
    pub fn new(
        is_json: bool,
        output: Arc<SharedOutput>,
        report: impl Fn(&[u8], io::Error) + Send + Sync + 'static,
    ) -> Self {
        Self {
            is_json,
            output,
            report: Box::new(report),
            has_found: AtomicBool::new(false),
            lines: Mutex::default(),
            pairs: Mutex::default(),
        }
    }

    /// Prints the lines that wait. Returns whether anything differs.
    pub fn finish(&self) -> bool {
        let printed = self.print(&mut self.lines.lock());
        self.has_found.load(Ordering::Relaxed) || printed.is_break()
    }

    fn print(&self, lines: &mut Lines) -> ControlFlow<()> {
        let mut waiting = std::mem::take(lines).waiting;
        waiting.sort_unstable();
        waiting
            .iter()
            .try_for_each(|line| self.output.write(&line.1))
    }

    /// Whether two files have as many names, but not the same ones.
    fn has_other_names(&self, first: &Metadata, second: &Metadata) -> bool {
        let id = |metadata: &Metadata| (metadata.file_system, metadata.inode);
        let (one, other) = (id(first), id(second));
        if first.kind == FileKind::Directory || first.links < 2 || first.links != second.links {
            return false;
        }
        let mut pairs = self.pairs.lock();
        let expected = *pairs.0.entry(one).or_insert(other);
        *pairs.1.entry(other).or_insert(one) != one || expected != other
    }
}

impl<A: Tree> Differences<A> for DiffPrinter {
    /// A time without a fraction equals any time in its second, because many archives have whole seconds.
    fn prepare(&self, _: &A, first: &mut Metadata, second: &mut Metadata) {
        let (one, other) = (&mut first.mtime, &mut second.mtime);
        if one.seconds == other.seconds && (one.nanoseconds == 0 || other.nanoseconds == 0) {
            (one.nanoseconds, other.nanoseconds) = (0, 0);
        }
    }

    fn receive(&self, path: &[u8], difference: Difference<'_>) -> ControlFlow<()> {
        let mut found = Vec::new();
        if let Difference::Both {
            properties,
            first,
            second,
        } = difference
        {
            found.extend_from_slice(properties);
            if !properties.contains(&Property::Kind)
                && self.has_other_names(&first.metadata, &second.metadata)
            {
                found.push(Property::Links);
            }
            if found.is_empty() {
                return ControlFlow::Continue(());
            }
        }
        self.has_found.store(true, Ordering::Relaxed);
        let line = if self.is_json {
            object(path, &difference, &found)
        } else {
            text(path, &difference, &found)
        };
        let mut lines = self.lines.lock();
        lines.bytes += path.len() + line.len();
        lines.waiting.push((path.to_owned(), line));
        if lines.bytes > MAX_WAITING_BYTES {
            return self.print(&mut lines);
        }
        ControlFlow::Continue(())
    }

    fn wants_all(&self) -> bool {
        false
    }

    fn report(&self, path: &[u8], error: io::Error) {
        (self.report)(path, error);
    }
}

fn text(path: &[u8], difference: &Difference<'_>, properties: &[Property]) -> Vec<u8> {
    let path = escape(path);
    let text = match difference {
        Difference::OnlyFirst(_) => format!("Only in A: {path}\n"),
        Difference::OnlySecond(_) => format!("Only in B: {path}\n"),
        Difference::Both { first, second, .. } => {
            let mut text = format!("{path}: ");
            for (number, &property) in properties.iter().enumerate() {
                let comma = if number > 0 { ", " } else { "" };
                let name = name(property);
                let (one, other) = (value(property, first), value(property, second));
                // Only properties without a value can be equal here.
                let written = match property {
                    Property::Content => write!(text, "{comma}{name}"),
                    Property::Links if one == other => write!(text, "{comma}names of the file"),
                    _ => write!(text, "{comma}{name} {one} -> {other}"),
                };
                written.expect("a String takes everything");
            }
            text.push('\n');
            text
        }
    };
    text.into_bytes()
}

fn name(property: Property) -> &'static str {
    match property {
        Property::Kind => "type",
        Property::Size => "size",
        Property::Content => "content",
        Property::Target => "target",
        Property::Device => "device",
        Property::Mode => "mode",
        Property::Uid => "uid",
        Property::Gid => "gid",
        Property::Mtime => "mtime",
        Property::Links => "nlink",
    }
}

fn value(property: Property, side: &Side) -> String {
    let metadata = &side.metadata;
    match property {
        Property::Kind => type_name(metadata.kind).to_owned(),
        Property::Size => metadata.size.to_string(),
        Property::Content => String::new(),
        Property::Target => escape(&side.target),
        Property::Device => format!("{}:{}", metadata.device.0, metadata.device.1),
        Property::Mode => format!("{:04o}", metadata.mode),
        Property::Uid => metadata.uid.to_string(),
        Property::Gid => metadata.gid.to_string(),
        Property::Mtime => {
            let mtime = metadata.mtime;
            Civil::new(mtime.seconds, mtime.nanoseconds)
                .to_rfc3339()
                .to_string()
        }
        Property::Links => metadata.links.to_string(),
    }
}

fn object(path: &[u8], difference: &Difference<'_>, properties: &[Property]) -> Vec<u8> {
    let mut text = b"{\"path\":".to_vec();
    let path = path.strip_prefix(b"./").unwrap_or(path);
    write_bytes(&mut text, b"path_bytes", path);
    let written = match difference {
        Difference::OnlyFirst(side) => {
            write!(
                text,
                ",\"change\":\"only_a\",\"type\":\"{}\"",
                type_name(side.metadata.kind)
            )
        }
        Difference::OnlySecond(kind) => {
            write!(
                text,
                ",\"change\":\"only_b\",\"type\":\"{}\"",
                type_name(*kind)
            )
        }
        Difference::Both { first, second, .. } => {
            let names: Vec<_> = properties
                .iter()
                .map(|it| format!("\"{}\"", name(*it)))
                .collect();
            let names = names.join(",");
            write!(text, ",\"change\":\"differs\",\"properties\":[{names}]")
                .and_then(|()| write_side(&mut text, "a", properties, first))
                .and_then(|()| write_side(&mut text, "b", properties, second))
        }
    };
    written.expect("a Vec takes everything");
    text.extend_from_slice(b"}\n");
    text
}

/// Appends the properties of one side, as `ls --json` shows them.
fn write_side(
    text: &mut Vec<u8>,
    field: &str,
    properties: &[Property],
    side: &Side,
) -> io::Result<()> {
    write!(text, ",\"{field}\":{{")?;
    let valued = properties.iter().filter(|it| **it != Property::Content);
    for (number, &property) in valued.enumerate() {
        text.extend_from_slice(if number > 0 { b"," } else { b"" });
        let (name, metadata) = (name(property), &side.metadata);
        match property {
            Property::Content => {}
            Property::Kind | Property::Mode => {
                write!(text, "\"{name}\":\"{}\"", value(property, side))?;
            }
            Property::Size | Property::Uid | Property::Gid | Property::Links => {
                write!(text, "\"{name}\":{}", value(property, side))?;
            }
            Property::Target => {
                text.extend_from_slice(b"\"target\":");
                write_bytes(text, b"target_bytes", &side.target);
            }
            Property::Device => {
                let (major, minor) = metadata.device;
                write!(text, "\"major\":{major},\"minor\":{minor}")?;
            }
            Property::Mtime => {
                text.extend_from_slice(b"\"mtime\":");
                write_time(text, metadata.mtime)?;
            }
        }
    }
    text.push(b'}');
    Ok(())
}

impl fmt::Debug for DiffPrinter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiffPrinter")
            .field("is_json", &self.is_json)
            .finish_non_exhaustive()
    }
}
