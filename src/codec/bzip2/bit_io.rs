//! Bits, from the most significant of each byte on.

#[derive(Clone, Debug)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8], bit: usize) -> Self {
        Self { bytes, at: bit }
    }

    pub(super) fn read_bit(&mut self) -> Option<bool> {
        let byte = self.bytes.get(self.at / 8)?;
        let bit = byte >> (7 - self.at % 8) & 1;
        self.at += 1;
        Some(bit != 0)
    }

    /// The next `count` bits as a number; `count` is at most 64.
    pub(super) fn read_bits(&mut self, count: usize) -> Option<u64> {
        let mut number = 0;
        for _ in 0..count {
            number = number << 1 | u64::from(self.read_bit()?);
        }
        Some(number)
    }
}

pub(super) struct BitWriter {
    bytes: Vec<u8>,
    /// The low `count` (0 to 7) bits wait for more to make a byte.
    pending: u8,
    count: u8,
}

impl BitWriter {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        Self {
            bytes,
            pending: 0,
            count: 0,
        }
    }

    pub(super) fn write_bit(&mut self, bit: bool) {
        self.pending = self.pending << 1 | u8::from(bit);
        self.count += 1;
        if self.count == 8 {
            self.bytes.push(self.pending);
            self.count = 0;
        }
    }

    /// Appends the low `count` bits of `number`; `count` is at most 64.
    pub(super) fn write_bits(&mut self, number: u64, count: u32) {
        for shift in (0..count).rev() {
            self.write_bit(number >> shift & 1 != 0);
        }
    }

    /// Appends zeros up to a whole byte, and ends.
    pub(super) fn finish(mut self) -> Vec<u8> {
        while self.count > 0 {
            self.write_bit(false);
        }
        self.bytes
    }
}

/// The bytes that begin `bit` bits into `bytes`: one fewer, unless `bit` is zero.
pub(super) fn shift(bytes: &[u8], bit: u8) -> impl Iterator<Item = u8> {
    let skipped = usize::from(bit == 0);
    let next = bytes.iter().skip(1).copied().chain((0..skipped).map(|_| 0));
    bytes.iter().copied().zip(next).map(move |(this, next)| {
        let both = u16::from_be_bytes([this, next]) << bit;
        both.to_be_bytes()[0]
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn written_bits_round_trip(numbers in proptest::collection::vec((any::<u64>(), 1..65_u32), 0..20)) {
            let mut writer = BitWriter::new(vec![0xa5]);
            for (number, count) in &numbers {
                writer.write_bits(*number, *count);
            }
            let bytes = writer.finish();
            let mut reader = BitReader::new(&bytes, 8);
            for (number, count) in &numbers {
                let low = u64::MAX >> (64 - count);
                prop_assert_eq!(reader.read_bits(*count as usize), Some(number & low));
            }
        }

        #[test]
        fn shifting_moves_every_bit(bytes in proptest::collection::vec(any::<u8>(), 0..20), bit in 0..8_u8) {
            let shifted = shift(&bytes, bit).collect::<Vec<_>>();
            let len = bytes.len().saturating_sub(usize::from(bit > 0));
            prop_assert_eq!(shifted.len(), len);
            let mut reader = BitReader::new(&bytes, bit.into());
            for byte in shifted {
                prop_assert_eq!(reader.read_bits(8), Some(byte.into()));
            }
        }
    }
}
