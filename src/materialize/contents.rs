//! `--to-stdout`: the contents of regular files, one behind the other.

use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;

use super::plan::Climbs;
use super::problem::{Cause, Error, Problems, Reporter};
use super::{Selection, Summary};
use crate::archive::scan::Sink;
use crate::base::archive_path::ArchivePath;
use crate::tar::{Kind, Member, Segment};

/// Holes are written from this.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// Writes the contents of the selected regular files; holes as zeros, links and all else not at
/// all, as GNU tar does.
#[derive(Debug)]
pub struct Contents<W> {
    output: W,
    selection: Selection,
    problems: Problems,
    current: Option<Reading>,
    entries: u64,
    bytes: u64,
}

/// A file whose content passes by.
#[derive(Debug)]
struct Reading {
    path: ArchivePath,
    /// Bytes of the file as its reader sees it.
    size: u64,
    /// The stored pieces still to come; the first one may be partly read.
    segments: std::vec::IntoIter<Segment>,
    /// Where the stored piece at hand goes on and how much of it is left; `None` before the
    /// first, and in files that are not sparse.
    segment: Option<Segment>,
    sparse: bool,
    /// How much has been written.
    offset: u64,
}

impl<W: Write> Contents<W> {
    /// Writes to `output` what `selection` wants.
    pub fn new(output: W, selection: Selection, reporter: Option<Arc<dyn Reporter>>) -> Self {
        Self {
            output,
            selection,
            problems: Problems::new(reporter),
            current: None,
            entries: 0,
            bytes: 0,
        }
    }

    /// Flushes the output and tells what was written to it, and which paths were not found.
    ///
    /// # Errors
    /// When the output cannot be flushed.
    pub fn finish(mut self) -> Result<Summary, Error> {
        self.output.flush().map_err(output_error)?;
        for path in self.selection.missing() {
            self.problems.add(path, Cause::NotFound);
        }
        Ok(Summary {
            entries: self.entries,
            bytes: self.bytes,
            errors: self.problems.count(),
            problems: self.problems.take_kept(),
        })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.output.write_all(bytes).map_err(output_error)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn put_zeros(&mut self, mut count: u64) -> Result<(), Error> {
        while count > 0 {
            let len = ZEROS
                .len()
                .min(usize::try_from(count).unwrap_or(usize::MAX));
            self.put(ZEROS.get(..len).unwrap_or_default())?;
            count -= len as u64;
        }
        Ok(())
    }

    fn put_sparse(&mut self, reading: &mut Reading, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let Some(segment) = reading.next_segment() else {
                break;
            };
            self.put_zeros(segment.offset.saturating_sub(reading.offset))?;
            let len = usize::try_from(segment.len)
                .unwrap_or(usize::MAX)
                .min(bytes.len());
            let (now, later) = bytes.split_at(len);
            self.put(now)?;
            reading.offset = segment.offset.saturating_add(len as u64);
            reading.segment = Some(Segment {
                offset: reading.offset,
                len: segment.len - len as u64,
            });
            bytes = later;
        }
        Ok(())
    }
}

impl Reading {
    fn next_segment(&mut self) -> Option<Segment> {
        match self.segment {
            Some(segment) if segment.len > 0 => Some(segment),
            _ => self.segments.find(|segment| segment.len > 0),
        }
    }
}

impl<W: Write> Sink for Contents<W> {
    type Error = Error;

    fn member(&mut self, mut member: Member) -> Result<(), Error> {
        let placed = match self.selection.take(&mut member) {
            Ok(Some(placed)) => placed,
            Ok(None) => return Ok(()),
            Err(Climbs(path)) => {
                self.problems.add(&path, Cause::Climbs);
                return Ok(());
            }
        };
        if member.kind != Kind::File {
            return Ok(());
        }
        self.problems.entry(&placed.path);
        self.current = Some(Reading {
            path: placed.path,
            size: member.size,
            sparse: member.sparse.is_some(),
            segments: member.sparse.unwrap_or_default().into_iter(),
            segment: None,
            offset: 0,
        });
        Ok(())
    }

    fn payload(&mut self, bytes: Bytes) -> Result<(), Error> {
        let Some(mut reading) = self.current.take() else {
            return Ok(());
        };
        if reading.sparse {
            self.put_sparse(&mut reading, &bytes)?;
        } else {
            self.put(&bytes)?;
        }
        self.current = Some(reading);
        Ok(())
    }

    fn member_end(&mut self, cut: bool) -> Result<(), Error> {
        let Some(reading) = self.current.take() else {
            return Ok(());
        };
        self.entries += 1;
        if cut {
            self.problems.add(&reading.path, Cause::Cut);
        } else if reading.sparse {
            self.put_zeros(reading.size.saturating_sub(reading.offset))?;
        }
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        self.problems.warn(text);
    }
}

fn output_error(error: std::io::Error) -> Error {
    Error::Output(Arc::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::materialize::testing::{feed, file, member};

    fn contents(members: Vec<(Member, &[u8])>) -> Vec<u8> {
        let mut output = Vec::new();
        let mut sink = Contents::new(&mut output, Selection::default(), None);
        feed(&mut sink, members);
        sink.finish().expect("a vector takes everything");
        output
    }

    #[test]
    fn files_come_one_behind_the_other_and_nothing_else_comes() {
        let members = vec![
            file(b"a", b"one"),
            (member(b"l", Kind::Symlink(b"a".to_vec())), &b""[..]),
            file(b"b", b"two"),
        ];
        assert_eq!(contents(members), b"onetwo");
    }

    #[test]
    fn holes_are_zeros() {
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
