//! Deterministic pseudo-random numbers and bytes.

/// A generator (xorshift64).
pub(crate) struct Rng(u64);

impl Rng {
    /// Generators of different seeds give different numbers.
    pub(crate) fn new(seed: u64) -> Self {
        // Never zero, because the generator would stay at zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `end`, or 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.number().checked_rem(end).unwrap_or_default()
    }

    /// Incompressible bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.number().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Words, which compress three to four times.
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
