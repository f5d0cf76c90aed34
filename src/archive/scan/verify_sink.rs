//! Sink that verifies an archive: counts members, compares spans with an index, and builds another one.

use std::sync::Arc;

use bytes::Bytes;

use super::Summary;
use crate::archive::sink::Sink;
use crate::base::extent::Plain;
use crate::base::span_hash::SpanHasher;
use crate::codec::Compression;
use crate::index::{Builder, Index, Problem, TooMuchMemory};
use crate::tar::Member;

/// Maximum number of findings that are kept as text. The others are only counted.
const MAX_FINDINGS: usize = 100;

/// Result of a scan that only verifies an archive.
#[derive(Debug, Default)]
pub struct VerifySink {
    /// Packed format, once it is detected.
    pub compression: Option<Compression>,
    /// Number of members found so far.
    pub members: u64,
    /// Receives the members, and finds those that are not in the tree.
    pub builder: Option<Builder>,
    /// Whether the scan ends if the builder exceeds its memory. Otherwise the builder is dropped, with a warning.
    pub needs_builder: bool,
    /// The first members missing in the tree of a dropped builder, and the number of all.
    pub missing: (Vec<Problem>, u64),
    overflow: Option<TooMuchMemory>,
    warnings: Findings,
    comparison: Option<IndexComparison>,
}

#[derive(Clone, Debug, Default)]
struct Findings {
    texts: Vec<String>,
    more: u64,
}

impl Findings {
    fn add(&mut self, text: impl FnOnce() -> String) {
        if self.texts.len() < MAX_FINDINGS {
            self.texts.push(text());
        } else {
            self.more += 1;
        }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.texts.push(format!("and {} more", self.more));
        }
        self.texts
    }
}

#[derive(Debug)]
struct IndexComparison {
    index: Arc<Index>,
    span: u32,
    seen: u64,
    hasher: SpanHasher,
    mismatches: Findings,
}

impl VerifySink {
    /// Verifies an archive, and compares each span with its hash in `index`. The scan needs
    /// [`spans`](crate::archive::scan::Options::spans), and must not skip payloads.
    pub fn with_index(index: Arc<Index>) -> Self {
        Self {
            comparison: Some(IndexComparison {
                hasher: SpanHasher::new(index.block_len()),
                index,
                span: 0,
                seen: 0,
                mismatches: Findings::default(),
            }),
            ..Self::default()
        }
    }

    /// Oddities without data loss.
    pub fn warnings(&self) -> Vec<String> {
        let overflow = self
            .overflow
            .iter()
            .map(|error| format!("the tree may lack later members and hard links: {error}"));
        overflow.chain(self.warnings.clone().finish()).collect()
    }

    /// Differences between the index and the archive. `summary` is the result of the scan.
    pub fn differences(self, summary: &Summary) -> Vec<String> {
        self.comparison
            .map(|comparison| comparison.differences(summary))
            .unwrap_or_default()
    }
}

impl IndexComparison {
    fn add_bytes(&mut self, mut bytes: &[u8]) {
        // Bytes after the last span are found by the comparison of lengths.
        while let Some(extent) = self.index.span_extent(self.span) {
            let left = usize::try_from(extent.len() - self.seen).unwrap_or(usize::MAX);
            let (piece, rest) = bytes.split_at(left.min(bytes.len()));
            self.hasher.update(piece);
            self.seen += piece.len() as u64;
            bytes = rest;
            if self.seen < extent.len() {
                break;
            }
            self.end_span();
        }
    }

    fn end_span(&mut self) {
        let number = self.span;
        let (found, _) = self.hasher.finish();
        let span = self.index.span(number).ok().flatten();
        let hash = span.map(|span| span.hash);
        // A span without a hash was skipped by the scan that built the index.
        if hash.is_none_or(|hash| hash.is_some_and(|hash| hash != found)) {
            let extent = self.index.span_extent(number);
            self.mismatches.add(|| match extent {
                Some(extent) => format!(
                    "the index has another hash for plain bytes {} to {}",
                    extent.start().0,
                    extent.end().0
                ),
                None => format!("the index is damaged at decoded block {number}"),
            });
        }
        self.seen = 0;
        self.span += 1;
    }

    fn differences(mut self, summary: &Summary) -> Vec<String> {
        let origin = self.index.origin().clone();
        let content_id = Some(origin.content_id).filter(|id| *id != [0; 32]);
        let differs_in = [
            (
                "another packed format",
                origin.compression != summary.compression,
            ),
            (
                "another packed length",
                origin.packed_bytes != summary.packed_len,
            ),
            (
                "another plain length",
                origin.plain_bytes != summary.plain_len,
            ),
            (
                "another content id",
                content_id.is_some() && content_id != summary.content_id,
            ),
            (
                "another SHA-256",
                origin.sha256.is_some() && origin.sha256 != summary.sha256,
            ),
        ];
        for (what, _) in differs_in.into_iter().filter(|&(_, differs)| differs) {
            self.mismatches
                .add(|| format!("the index is of an archive with {what}"));
        }
        if self.span < self.index.span_count() {
            let (seen, count) = (self.span, self.index.span_count());
            self.mismatches.add(|| {
                format!("the archive ends in decoded block {seen} of {count} in the index")
            });
        }
        self.mismatches.finish()
    }
}

impl Sink for VerifySink {
    type Error = TooMuchMemory;

    fn begin(&mut self, compression: Compression) {
        self.compression = Some(compression);
    }

    fn member(&mut self, member: Member) -> Result<(), TooMuchMemory> {
        if let Some(builder) = &mut self.builder {
            // The index records a refused member as a problem.
            builder.add_member(&member).ok();
            if let Err(error) = builder.check_memory() {
                if self.needs_builder {
                    return Err(error);
                }
                let index = builder.index();
                self.missing = (index.problems().to_vec(), index.problem_count());
                self.overflow = Some(error);
                self.builder = None;
            }
        }
        self.members += 1;
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        self.warnings.add(|| text.to_owned());
    }

    fn damage(&mut self, _offset: Plain, text: &str) {
        self.warning(text);
    }

    fn span_piece(&mut self, bytes: &Bytes) {
        if let Some(comparison) = &mut self.comparison {
            comparison.add_bytes(bytes);
        }
    }
}
