//! `--dry-run`: what would be written, and nothing is.

use std::sync::Arc;

use bytes::Bytes;

use super::plan::Climbs;
use super::problem::{Cause, Error, Problems, Reporter};
use super::{Selection, Summary};
use crate::archive::scan::Sink;
use crate::tar::{Kind, Member};

/// Tells a reporter which entries a [`super::Materializer`] would make.
#[derive(Debug)]
pub struct Rehearsal {
    selection: Selection,
    problems: Problems,
    entries: u64,
    bytes: u64,
}

impl Rehearsal {
    /// Takes the members that `selection` wants.
    pub fn new(selection: Selection, reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            selection,
            problems: Problems::new(reporter),
            entries: 0,
            bytes: 0,
        }
    }

    /// Entries and payload bytes that would be written; errors are paths that were not found.
    pub fn finish(self) -> Summary {
        for path in self.selection.missing() {
            self.problems.add(path, Cause::NotFound);
        }
        Summary {
            entries: self.entries,
            bytes: self.bytes,
            errors: self.problems.count(),
            problems: self.problems.take_kept(),
        }
    }
}

impl Sink for Rehearsal {
    type Error = Error;

    fn member(&mut self, mut member: Member) -> Result<(), Error> {
        match self.selection.take(&mut member) {
            Ok(Some(placed)) => {
                self.problems.entry(&placed.path);
                self.entries += 1;
                if member.kind == Kind::File {
                    self.bytes = self.bytes.saturating_add(member.payload.len());
                }
            }
            Ok(None) => {}
            Err(Climbs(path)) => self.problems.add(&path, Cause::Climbs),
        }
        Ok(())
    }

    fn payload(&mut self, _bytes: Bytes) -> Result<(), Error> {
        Ok(())
    }

    fn member_end(&mut self, _cut: bool) -> Result<(), Error> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        self.problems.warn(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::materialize::testing::{feed, file, member};
    use crate::materialize::{Glob, Wanted};

    #[test]
    fn what_would_be_written_is_counted_and_what_is_not_found_is_an_error() {
        let selection = Selection {
            exclude: vec![Glob::new(b"*.o")],
            paths: vec![Wanted::new(b"a"), Wanted::new(b"missing")],
            ..Selection::default()
        };
        let mut rehearsal = Rehearsal::new(selection, None);
        feed(
            &mut rehearsal,
            [
                (member(b"a/", Kind::Directory), &b""[..]),
                file(b"a/b", b"12345"),
                file(b"a/b.o", b"1"),
                file(b"c", b"1"),
            ],
        );
        let summary = rehearsal.finish();
        assert_eq!((summary.entries, summary.bytes, summary.errors), (2, 5, 1));
        assert_eq!(
            summary.problems.first().map(ToString::to_string),
            Some("missing: not in the archive (`tarfs ls -R` shows what is; -C names a directory to write to)".to_owned())
        );
    }
}
