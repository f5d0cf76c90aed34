//! Small decisions, taken by the last bytes of an input, so that its front is the format's.

/// How many bytes decide.
const LEN: usize = 4;

/// The decisions of an input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Knobs([u8; LEN]);

impl Knobs {
    /// What an input is without its decisions, and these.
    pub(super) fn split(bytes: &[u8]) -> (&[u8], Self) {
        match bytes.split_last_chunk() {
            Some((bytes, knobs)) => (bytes, Self(*knobs)),
            None => (bytes, Self([0; LEN])),
        }
    }

    /// Bytes that are pushed at once: mostly few.
    pub(super) fn push_len(self) -> usize {
        let [short, long, ..] = self.0;
        1 + usize::from(short) + 997 * usize::from(long)
    }

    /// Whether decision `number`, below 8, is taken.
    pub(super) fn flag(self, number: u8) -> bool {
        let [_, _, flags, _] = self.0;
        flags >> number & 1 == 1
    }

    /// One more number.
    pub(super) fn number(self) -> u8 {
        let [.., number] = self.0;
        number
    }
}
