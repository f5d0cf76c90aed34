//! `--dry-run`: reports the entries and writes nothing.

use std::sync::Arc;

use super::error::{Cause, Error, Problems, Reporter};
use super::options::Summary;
use super::selection::Selection;
use crate::archive::scan::{PayloadEnd, Sink};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::Plain;
use crate::tar::{Member, MemberKind};

/// Reports the entries that a [`super::Materializer`] would make.
#[derive(Debug)]
pub struct DryRunSink {
    selection: Selection,
    problems: Problems,
    /// Path of the file whose content is being read.
    current: Option<ArchivePath>,
    entries: u64,
    bytes: u64,
}

impl DryRunSink {
    /// Reports the members that `selection` selects.
    pub fn new(selection: Selection, reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            selection,
            problems: Problems::new(reporter),
            current: None,
            entries: 0,
            bytes: 0,
        }
    }

    /// Entries and payload bytes that would be written. Errors are files that are not whole, and requested paths that were not found.
    pub fn finish(self) -> Summary {
        self.selection.report_unmatched_paths(&self.problems);
        Summary::new(self.entries, self.bytes, &self.problems)
    }
}

impl Sink for DryRunSink {
    type Error = Error;

    fn member(&mut self, member: Member) -> Result<(), Error> {
        let selected = self.selection.select_member(&member, &self.problems);
        if let Some(output_path) = selected {
            self.problems.report_stripped_prefix(output_path.stripped);
            self.problems.entry(&output_path.path);
            self.entries += 1;
            if member.kind == MemberKind::File {
                self.bytes = self.bytes.saturating_add(member.payload.len());
                self.current = Some(output_path.path);
            }
        }
        Ok(())
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Error> {
        if let (Some(path), Some(cause)) = (self.current.take(), Cause::of_end(end)) {
            let is_cut = matches!(cause, Cause::Truncated);
            let cause = if is_cut { Cause::EndsEarly } else { cause };
            self.problems.add(&path, cause);
        }
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        self.problems.warn(text);
    }

    fn damage(&mut self, _offset: Plain, text: &str) {
        self.problems.damage(text, self.current.is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::materialize::test_support::{feed, file, member};
    use crate::materialize::{Glob, SelectedPath};

    // Promises: select-dry-run
    #[test]
    fn dry_run_counts_entries_and_reports_missing_paths() {
        let selection = Selection {
            exclude: vec![Glob::new(b"*.o")],
            paths: [&b"a"[..], b"missing"]
                .map(|path| SelectedPath::new(path).expect("no `..`"))
                .into(),
            ..Selection::default()
        };
        let mut sink = DryRunSink::new(selection, None);
        feed(
            &mut sink,
            [
                (member(b"a/", MemberKind::Directory), &b""[..]),
                file(b"a/b", b"12345"),
                file(b"a/b.o", b"1"),
                file(b"c", b"1"),
            ],
        );
        let summary = sink.finish();
        assert_eq!((summary.entries, summary.bytes, summary.errors), (2, 5, 1));
        assert_eq!(
            summary.problems.first().map(ToString::to_string),
            Some("missing: not in the archive (`tarfs find` shows what is; -C names a directory to write to)".to_owned())
        );
    }
}
