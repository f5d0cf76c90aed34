//! Numbers and bytes that look random and are the same in every run.

/// A generator (xorshift64).
pub(crate) struct Rng(u64);

impl Rng {
    /// Generators of different seeds give different numbers.
    pub(crate) fn new(seed: u64) -> Self {
        // Never zero, from which the generator would not get away.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `end`; 0 when there is none.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.number().checked_rem(end).unwrap_or_default()
    }

    /// Bytes that no compressor makes shorter.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Words, which compressors make three to four times shorter.
    pub(crate) fn text(&mut self, len: usize) -> Vec<u8> {
        const SYLLABLES: [&str; 16] = [
            "ta", "rfs", "no", "de", "lin", "k ", "a", "the", "of ", "ra", "nge", "sp", "an",
            " of", ", ", ".\n",
        ];
        let mut text = Vec::with_capacity(len + 64);
        while text.len() < len {
            let mut number = self.number();
            for _ in 0..16 {
                let syllable = SYLLABLES.iter().cycle().nth((number % 16) as usize);
                text.extend_from_slice(syllable.expect("endless").as_bytes());
                number >>= 4;
            }
        }
        text.truncate(len);
        text
    }
}
