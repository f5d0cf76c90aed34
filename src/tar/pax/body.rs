//! Collects the body of a pax header, without long values that have no effect.

use super::{Field, add_note, head};
use crate::tar::error::Note;
use crate::tar::{Cause, Limit, Limits};

/// Collects the body of an extended header while its bytes arrive, without values that have no effect.
///
/// The limits concern the collected bytes, because neither a directory's list of names in an incremental
/// archive nor the resource fork of a file is an attack.
#[derive(Debug)]
pub(crate) struct Body {
    collected: Vec<u8>,
    part: Part,
    /// Bytes at the end of `collected` that begin a record.
    prefix_len: usize,
    attribute_bytes: u64,
    notes: Vec<Note>,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    /// The start of a record up to the equal sign.
    Prefix,
    /// That many more bytes of a record.
    Kept(u64),
    Skipped(u64),
}

/// Maximum bytes of a body that is collected as it is, because parsing it twice costs more than its memory.
const MAX_UNFILTERED_BYTES: u64 = 64 << 10;

/// Maximum start of a record: a length, and an attribute's name of 255 bytes in percent encoding.
pub(super) const MAX_PREFIX_BYTES: usize = 4 << 10;

impl Body {
    /// Begins a body of `len` bytes. `is_pax` tells whether it has keywords.
    pub(crate) fn new(len: u64, is_pax: bool, limits: &Limits) -> Self {
        let is_filtered = is_pax && len > MAX_UNFILTERED_BYTES.min(limits.pax_bytes);
        let part = if is_filtered {
            Part::Prefix
        } else {
            Part::Kept(len)
        };
        Self {
            collected: Vec::new(),
            part,
            prefix_len: 0,
            attribute_bytes: 0,
            notes: Vec::new(),
        }
    }

    /// Adds the next bytes, unless more than the limit have to be collected.
    pub(crate) fn push(&mut self, mut bytes: &[u8], limits: &Limits) -> Result<(), Cause> {
        while let Some((&first, behind)) = bytes.split_first() {
            match self.part {
                Part::Prefix => {
                    bytes = behind;
                    self.collect(&[first], limits)?;
                    self.prefix_len += 1;
                    if first == b'=' || self.prefix_len == MAX_PREFIX_BYTES {
                        self.part = self.choose_part(limits);
                        self.prefix_len = 0;
                    }
                }
                Part::Kept(ref mut left) | Part::Skipped(ref mut left) => {
                    let len = usize::try_from(*left).unwrap_or(usize::MAX);
                    let (piece, behind) = bytes.split_at(len.min(bytes.len()));
                    bytes = behind;
                    *left -= piece.len() as u64;
                    let is_complete = *left == 0;
                    if matches!(self.part, Part::Kept(_)) {
                        self.collect(piece, limits)?;
                    }
                    if is_complete {
                        self.part = Part::Prefix;
                    }
                }
            }
        }
        Ok(())
    }

    /// The collected bytes, and notes about attributes that were left out.
    pub(crate) fn finish(self) -> (Vec<u8>, Vec<Note>) {
        (self.collected, self.notes)
    }

    fn collect(&mut self, bytes: &[u8], limits: &Limits) -> Result<(), Cause> {
        Limit::PaxBytes.check(limits, (self.collected.len() + bytes.len()) as u64)?;
        self.collected.extend_from_slice(bytes);
        Ok(())
    }

    /// Decides by the keyword whether its value is collected, and removes the keyword if not. Collects nothing
    /// after malformed framing or the last record, because nothing after them is read.
    fn choose_part(&mut self, limits: &Limits) -> Part {
        let start = self.collected.len() - self.prefix_len;
        let prefix = self.collected.get(start..).unwrap_or_default();
        let Ok(Some(head)) = head(prefix) else {
            return Part::Skipped(u64::MAX);
        };
        let left = head.len.saturating_sub(prefix.len()) as u64;
        let is_kept = match Field::of(head.key) {
            // Malformed.
            _ if left == 0 => return Part::Skipped(u64::MAX),
            None => false,
            Some(Field::Attribute(attribute)) => {
                let bytes = self.attribute_bytes.saturating_add(left);
                // As text and in base64, values are longer than in an index.
                let is_kept = bytes <= limits.xattr_bytes.saturating_mul(2);
                if is_kept {
                    self.attribute_bytes = bytes;
                } else {
                    add_note(&mut self.notes, attribute.left_out());
                }
                is_kept
            }
            Some(_) => true,
        };
        if is_kept {
            return Part::Kept(left);
        }
        self.collected.truncate(start);
        Part::Skipped(left)
    }
}
