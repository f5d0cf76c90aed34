//! Test options in the last bytes of an input, so that the format's bytes come first.

/// Number of option bytes.
const LEN: usize = 4;

/// The options of an input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knobs([u8; LEN]);

impl Knobs {
    /// Splits an input into its data and its options.
    pub(super) fn split(bytes: &[u8]) -> (&[u8], Self) {
        match bytes.split_last_chunk() {
            Some((bytes, knobs)) => (bytes, Self(*knobs)),
            None => (bytes, Self([0; LEN])),
        }
    }

    /// Number of bytes that are pushed at once, mostly few.
    pub(super) fn push_len(self) -> usize {
        let [short, long, ..] = self.0;
        1 + usize::from(short) + 997 * usize::from(long)
    }

    /// Whether option `number`, below 8, is set.
    pub(super) fn flag(self, number: u8) -> bool {
        let [_, _, flags, _] = self.0;
        flags >> number & 1 == 1
    }

    /// A further random number.
    pub(super) fn number(self) -> u8 {
        let [.., number] = self.0;
        number
    }
}
