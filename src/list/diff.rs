//! The lines of `diff`: what differs between two trees.

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::json;
use crate::base::escape::escape;
use crate::base::sync::Mutex;
use crate::base::time::Civil;
use crate::tree::{Difference, Differences, FileId, Item, Metadata, Property, SharedOutput, Tree};

/// Lines that are sorted by path at the end, in bytes. If there are more, they are printed as they come.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Prints what differs between two trees, as lines or as JSON objects.
#[expect(
    missing_debug_implementations,
    reason = "functions have no form for it"
)]
pub struct DiffPrinter {
    is_json: bool,
    output: Arc<SharedOutput>,
    has_found: AtomicBool,
    lines: Mutex<Lines>,
    /// Files with several names: of the first tree with the one of the second, and the other way round.
    pairs: Mutex<(HashMap<FileId, FileId>, HashMap<FileId, FileId>)>,
}

#[derive(Default)]
struct Lines {
    /// Paths and lines.
    waiting: Vec<(Vec<u8>, Vec<u8>)>,
    bytes: usize,
}

impl DiffPrinter {
    /// Writes to `output`.
    pub fn new(is_json: bool, output: Arc<SharedOutput>) -> Self {
        Self {
            is_json,
            output,
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

    /// The line of a file that differs in `properties`, or that only one tree has.
    fn line<A: Tree, B: Tree>(
        &self,
        path: &[u8],
        properties: &[Property],
        first: Option<&Item<'_, A>>,
        second: Option<&Item<'_, B>>,
    ) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let (change, heading) = match (first, second) {
            (_, None) => ("only_a", "Only in A: "),
            (None, _) => ("only_b", "Only in B: "),
            _ => ("differs", ""),
        };
        let name = |property: &Property| format!("{property:?}").to_lowercase();
        if self.is_json {
            line.extend_from_slice(b"{\"path\":");
            json::write_bytes(&mut line, b"path_bytes", shown(path));
            let names: Vec<_> = properties.iter().map(name).collect();
            write!(line, ",\"change\":\"{change}\",\"properties\":{names:?}")?;
            write_side(&mut line, "a", first)?;
            write_side(&mut line, "b", second)?;
            line.extend_from_slice(b"}\n");
            return Ok(line);
        }
        write!(line, "{heading}{}", escape(path))?;
        if let (Some(first), Some(second)) = (first, second) {
            for (number, property) in properties.iter().enumerate() {
                let (comma, name) = (if number > 0 { "," } else { ":" }, name(property));
                let (one, other) = (value(*property, first)?, value(*property, second)?);
                match property {
                    Property::Content => write!(line, "{comma} {name}")?,
                    _ if one == other => write!(line, "{comma} names of the file")?,
                    _ => write!(line, "{comma} {name} {one} -> {other}")?,
                }
            }
        }
        line.push(b'\n');
        Ok(line)
    }

    /// Whether two files have as many names, but not the same ones.
    fn has_other_names(&self, first: &Metadata, second: &Metadata) -> bool {
        let (one, other) = (first.id(), second.id());
        let has_as_many = first.links == second.links && first.kind == second.kind;
        if !first.is_shared() || !has_as_many {
            return false;
        }
        let mut pairs = self.pairs.lock();
        let expected = *pairs.0.entry(one).or_insert(other);
        *pairs.1.entry(other).or_insert(one) != one || expected != other
    }
}

impl<A: Tree, B: Tree> Differences<A, B> for DiffPrinter {
    fn receive(&self, difference: Difference<'_, A, B>) -> io::Result<ControlFlow<()>> {
        let mut properties = Vec::new();
        let (path, first, second) = match difference {
            Difference::OnlyFirst(item) => (item.path(), Some(item), None),
            Difference::OnlySecond(item) => (item.path(), None, Some(item)),
            Difference::Both(differing, first, second) => {
                properties.extend_from_slice(differing);
                if self.has_other_names(&first.metadata()?, &second.metadata()?) {
                    properties.push(Property::Nlink);
                }
                if properties.is_empty() {
                    return Ok(ControlFlow::Continue(()));
                }
                (first.path(), Some(first), Some(second))
            }
        };
        let line = self.line(path, &properties, first, second)?;
        self.has_found.store(true, Ordering::Relaxed);
        let mut lines = self.lines.lock();
        lines.bytes += path.len() + line.len();
        lines.waiting.push((path.to_owned(), line));
        Ok(if lines.bytes > MAX_WAITING_BYTES {
            self.print(&mut lines)
        } else {
            ControlFlow::Continue(())
        })
    }

    fn wants_all(&self) -> bool {
        false
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.output.report(path, &error);
    }
}

/// The path in the tree, as `ls --json` shows it.
fn shown(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"./").unwrap_or(path)
}

/// Appends the object that `ls --json` shows.
fn write_side<T: Tree>(
    line: &mut Vec<u8>,
    field: &str,
    item: Option<&Item<'_, T>>,
) -> io::Result<()> {
    if let Some(item) = item {
        write!(line, ",\"{field}\":")?;
        json::write(line, shown(item.path()), item)?;
        // Without the line feed.
        line.pop();
    }
    Ok(())
}

/// The property of a file, as text.
fn value<T: Tree>(property: Property, item: &Item<'_, T>) -> io::Result<String> {
    let metadata = item.metadata()?;
    Ok(match property {
        Property::Type => metadata.kind.name().to_owned(),
        Property::Size => metadata.size.to_string(),
        Property::Content | Property::Xattrs => String::new(),
        Property::Target => escape(&item.target()?),
        Property::Device => format!("{}:{}", metadata.device.0, metadata.device.1),
        Property::Mode => format!("{:04o}", metadata.mode),
        Property::Uid => metadata.uid.to_string(),
        Property::Gid => metadata.gid.to_string(),
        Property::Mtime => {
            let mtime = metadata.mtime;
            let mtime = Civil::new(mtime.seconds, mtime.nanoseconds);
            mtime.to_rfc3339().to_string()
        }
        Property::Nlink => metadata.links.to_string(),
    })
}
