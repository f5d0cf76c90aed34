//! Kinds of items, and the reader of a journal, which ends at a torn one.

use std::fs::File;
use std::io::{self, BufReader, Read};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Maximum size of an item. A larger one invalidates the journal.
pub(super) const MAX_ITEM_BYTES: usize = 8 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ItemKind {
    RunKey = 1,
    Entry = 2,
    Directory = 3,
    Link = 4,
    Checkpoint = 5,
    Touch = 6,
    Replace = 7,
    Make = 8,
}

impl ItemKind {
    pub(super) const ALL: [Self; 8] = [
        Self::RunKey,
        Self::Entry,
        Self::Directory,
        Self::Link,
        Self::Checkpoint,
        Self::Touch,
        Self::Replace,
        Self::Make,
    ];
}

/// Reads items while their checksums are right.
pub(super) struct ItemReader<'a> {
    pub(super) input: BufReader<&'a File>,
    pub(super) chain: u64,
    pub(super) end: u64,
}

impl ItemReader<'_> {
    pub(super) fn next_item(&mut self) -> io::Result<Option<(ItemKind, Vec<u8>)>> {
        let mut head = [0; 5];
        if !self.read_exact_or_eof(&mut head)? {
            return Ok(None);
        }
        let [first, second, third, fourth, kind] = head;
        let len = u32::from_le_bytes([first, second, third, fourth]) as usize;
        let kind = ItemKind::ALL.into_iter().find(|all| *all as u8 == kind);
        let Some(kind) = kind.filter(|_| len <= MAX_ITEM_BYTES) else {
            return Ok(None);
        };
        // The item's length may be wrong, so the buffer grows only with the data.
        let mut item = head.to_vec();
        (&mut self.input).take(len as u64).read_to_end(&mut item)?;
        let mut sum = [0; 8];
        if item.len() != head.len() + len || !self.read_exact_or_eof(&mut sum)? {
            return Ok(None);
        }
        let chain = xxh3_64_with_seed(&item, self.chain);
        if chain != u64::from_le_bytes(sum) {
            return Ok(None);
        }
        self.chain = chain;
        self.end += (item.len() + sum.len()) as u64;
        Ok(Some((kind, item.split_off(head.len()))))
    }

    fn read_exact_or_eof(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        match self.input.read_exact(buffer) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}
