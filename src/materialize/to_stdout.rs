//! `--to-stdout` concatenates the contents of regular files, and `cat` writes a tar archive.

use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;

use super::error::{Cause, Error, Problems, Reporter};
use super::options::Summary;
use super::selection::Selection;
use crate::archive::scan::{PayloadEnd, Sink};
use crate::base::archive_path::ArchivePath;
use crate::base::extent::Plain;
use crate::tar::{self, Member, MemberKind, Segment};

/// For holes.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// Writes the contents of the selected regular files, as GNU tar does, or a tar archive of all members.
///
/// Holes are written as zeros. Without headers, links and special files are skipped.
#[derive(Debug)]
pub struct ContentSink<W> {
    output: W,
    /// Whether the output is a tar archive.
    is_tar: bool,
    selection: Selection,
    problems: Problems,
    current: Option<CurrentFile>,
    entries: u64,
    bytes: u64,
}

#[derive(Debug)]
struct CurrentFile {
    path: ArchivePath,
    /// Size of the file, with holes.
    size: u64,
    /// Segments not started yet.
    segments: std::vec::IntoIter<Segment>,
    /// `None` before the first one, and in files that are not sparse.
    segment: Option<Segment>,
    sparse: bool,
    offset: u64,
}

impl<W: Write> ContentSink<W> {
    /// Writes the members that `selection` selects to `output`.
    pub fn new(output: W, selection: Selection, reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            output,
            is_tar: false,
            selection,
            problems: Problems::new(reporter),
            current: None,
            entries: 0,
            bytes: 0,
        }
    }

    /// Writes all members to `output` as a tar archive in pax format. A cut content is filled with zeros.
    pub fn tar(output: W, reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            is_tar: true,
            ..Self::new(output, Selection::default(), reporter)
        }
    }

    /// Flushes the output and returns the summary.
    ///
    /// # Errors
    /// When the output cannot be flushed.
    pub fn finish(mut self) -> Result<Summary, Error> {
        if self.is_tar {
            self.output.write_all(&tar::END).map_err(output_error)?;
        }
        self.output.flush().map_err(output_error)?;
        self.selection.report_unmatched_paths(&self.problems);
        Ok(Summary::new(self.entries, self.bytes, &self.problems))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.output.write_all(bytes).map_err(output_error)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn write_zeros(&mut self, mut count: u64) -> Result<(), Error> {
        while count > 0 {
            let len = ZEROS
                .len()
                .min(usize::try_from(count).unwrap_or(usize::MAX));
            self.write(ZEROS.get(..len).unwrap_or_default())?;
            count -= len as u64;
        }
        Ok(())
    }

    fn write_sparse(&mut self, file: &mut CurrentFile, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let Some(segment) = file.next_segment() else {
                break;
            };
            self.write_zeros(segment.offset.saturating_sub(file.offset))?;
            let len = usize::try_from(segment.len)
                .unwrap_or(usize::MAX)
                .min(bytes.len());
            let (now, later) = bytes.split_at(len);
            self.write(now)?;
            file.offset = segment.offset.saturating_add(len as u64);
            file.segment = Some(Segment {
                offset: file.offset,
                len: segment.len - len as u64,
            });
            bytes = later;
        }
        Ok(())
    }
}

impl CurrentFile {
    fn next_segment(&mut self) -> Option<Segment> {
        match self.segment {
            Some(segment) if segment.len > 0 => Some(segment),
            _ => self.segments.find(|segment| segment.len > 0),
        }
    }
}

impl<W: Write> Sink for ContentSink<W> {
    type Error = Error;

    fn member(&mut self, member: Member) -> Result<(), Error> {
        let selected = self.selection.select_member(&member, &self.problems);
        if self.is_tar {
            let header = tar::encode_header(&member);
            self.output.write_all(&header).map_err(output_error)?;
        }
        let Some(output_path) = selected.filter(|_| member.kind == MemberKind::File) else {
            return Ok(());
        };
        self.problems.entry(&output_path.path);
        self.current = Some(CurrentFile {
            path: output_path.path,
            size: member.size,
            sparse: member.sparse.is_some(),
            segments: member.sparse.unwrap_or_default().into_iter(),
            segment: None,
            offset: 0,
        });
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        let Some(mut file) = self.current.take() else {
            return Ok(());
        };
        if file.sparse {
            self.write_sparse(&mut file, &bytes)?;
        } else {
            self.write(&bytes)?;
            file.offset = file.offset.saturating_add(bytes.len() as u64);
        }
        self.current = Some(file);
        Ok(())
    }

    fn member_end(&mut self, end: PayloadEnd) -> Result<(), Error> {
        let Some(file) = self.current.take() else {
            return Ok(());
        };
        self.entries += 1;
        if let Some(cause) = Cause::of_end(end) {
            self.problems.add(&file.path, cause);
        }
        if self.is_tar || file.sparse && end == PayloadEnd::Complete {
            self.write_zeros(file.size.saturating_sub(file.offset))?;
        }
        if self.is_tar {
            let padding = ZEROS.get(..tar::padding(file.size));
            self.output
                .write_all(padding.unwrap_or_default())
                .map_err(output_error)?;
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

fn output_error(error: std::io::Error) -> Error {
    Error::Output(Arc::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::materialize::test_support::{feed, file, member};

    fn contents(members: Vec<(Member, &[u8])>) -> Vec<u8> {
        let mut output = Vec::new();
        let mut sink = ContentSink::new(&mut output, Selection::default(), None);
        feed(&mut sink, members);
        sink.finish().expect("a vector takes everything");
        output
    }

    // Promises: select-dry-run
    #[test]
    fn to_stdout_concatenates_regular_files_only() {
        let members = vec![
            file(b"a", b"one"),
            (member(b"l", MemberKind::Symlink(b"a".to_vec())), &b""[..]),
            file(b"b", b"two"),
        ];
        assert_eq!(contents(members), b"onetwo");
    }

    #[test]
    fn to_stdout_writes_holes_as_zeros() {
        let (mut sparse, payload) = file(b"s", b"abcd");
        sparse.size = 10;
        sparse.sparse = Some(vec![
            Segment { offset: 2, len: 3 },
            Segment { offset: 6, len: 1 },
            Segment { offset: 10, len: 0 },
        ]);
        assert_eq!(contents(vec![(sparse, payload)]), b"\0\0abc\0d\0\0\0");
    }
}
