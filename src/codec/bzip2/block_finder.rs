//! Finds blocks by their 48 bits of magic, at any bit, and checks the header after it.

use super::bit_io::BitReader;

pub(super) const BLOCK_MAGIC: u64 = 0x3141_5926_5359;
pub(super) const STREAM_END_MAGIC: u64 = 0x1772_4538_5090;
pub(super) const MAGIC_BITS: usize = 48;
const MAGIC_MASK: u64 = (1 << MAGIC_BITS) - 1;

/// Bytes that hold any block header, whatever bit it begins at.
pub(super) const BLOCK_HEADER_LEN: usize = 33 << 10;

#[derive(Clone, Debug, Default)]
pub(super) struct MagicScanner {
    window: u64,
    pub(super) scanned: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FoundMagic {
    /// The first of its bits, counted from the first byte scanned.
    pub(super) bit: usize,
    pub(super) is_stream_end: bool,
}

impl MagicScanner {
    /// Scans `bytes` up to the end of the first magic.
    pub(super) fn find(&mut self, bytes: &[u8]) -> Option<FoundMagic> {
        for byte in bytes {
            self.window = self.window << 8 | u64::from(*byte);
            self.scanned += 1;
            // The fourth last byte is inside the magic, for any bit at which that ends.
            let [_, _, _, inner, ..] = self.window.to_le_bytes();
            if MAGIC_BYTES.get(usize::from(inner)).copied().unwrap_or(true) {
                let found = self.check();
                if found.is_some() {
                    return found;
                }
            }
        }
        None
    }

    fn check(&self) -> Option<FoundMagic> {
        (0..8).find_map(|after| {
            let magic = self.window >> after & MAGIC_MASK;
            let bit = (self.scanned * 8).checked_sub(after + MAGIC_BITS)?;
            let is_stream_end = magic == STREAM_END_MAGIC;
            (is_stream_end || magic == BLOCK_MAGIC).then_some(FoundMagic { bit, is_stream_end })
        })
    }
}

/// All values of the fourth last byte that a magic touches.
const MAGIC_BYTES: [bool; 256] = magic_bytes();

#[expect(
    clippy::indexing_slicing,
    reason = "in a constant, it would fail to compile"
)]
const fn magic_bytes() -> [bool; 256] {
    let mut magic_bytes = [false; 256];
    let mut after = 0;
    while after < 8 {
        magic_bytes[(BLOCK_MAGIC >> (24 - after) & 0xff) as usize] = true;
        magic_bytes[(STREAM_END_MAGIC >> (24 - after) & 0xff) as usize] = true;
        after += 1;
    }
    magic_bytes
}

/// Whether the bits after a magic can be a block header, as random bits almost never can; `None` if cut.
pub(super) fn check_block_header(mut reader: BitReader<'_>, level: u8) -> Option<bool> {
    let _crc = reader.read_bits(32)?;
    let _randomised = reader.read_bit()?;
    if reader.read_bits(24)? >= u64::from(level) * 100_000 {
        return Some(false);
    }
    let groups = reader.read_bits(16)?;
    let mut symbols = 0;
    for _ in 0..groups.count_ones() {
        symbols += reader.read_bits(16)?.count_ones();
    }
    let tables = reader.read_bits(3)?;
    let selectors = reader.read_bits(15)?;
    if symbols == 0 || !(2..=6).contains(&tables) || selectors == 0 {
        return Some(false);
    }
    for _ in 0..selectors {
        let mut table = 0;
        while reader.read_bit()? {
            table += 1;
            if table >= tables {
                return Some(false);
            }
        }
    }
    for _ in 0..tables {
        let mut len = reader.read_bits(5)?;
        for _ in 0..symbols + 2 {
            while (1..=20).contains(&len) && reader.read_bit()? {
                len = if reader.read_bit()? { len - 1 } else { len + 1 };
            }
            if !(1..=20).contains(&len) {
                return Some(false);
            }
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::super::bit_io::BitWriter;
    use super::*;
    use crate::codec::test_support::noise;

    #[test]
    fn magic_is_found_at_every_bit_and_across_slices() {
        for (magic, end) in [(BLOCK_MAGIC, false), (STREAM_END_MAGIC, true)] {
            for bit in 0..24 {
                let mut writer = BitWriter::new(noise(50));
                writer.write_bits(0, bit);
                writer.write_bits(magic, 48);
                let bytes = writer.finish();
                for cut in 45..bytes.len() {
                    let (first, second) = bytes.split_at(cut);
                    let mut scanner = MagicScanner::default();
                    let found = scanner.find(first).or_else(|| scanner.find(second));
                    let bit = 400 + bit as usize;
                    assert_eq!(
                        found,
                        Some(FoundMagic {
                            bit,
                            is_stream_end: end
                        })
                    );
                }
            }
        }
    }

    #[test]
    fn random_bytes_are_no_block_header() {
        let noise = noise(2_000_000);
        let all = noise.windows(1000).step_by(20);
        assert!(all.clone().count() > 90_000);
        let found =
            all.filter(|bytes| check_block_header(BitReader::new(bytes, 3), 9) == Some(true));
        assert_eq!(found.count(), 0);
    }
}
