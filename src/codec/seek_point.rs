//! Seek points, where decoding can start again, and their spacing.

use bytes::Bytes;

use super::Cause;
use crate::base::extent::{Packed, Plain};

/// Minimum plain bytes between two seek points. Smaller frames, members and blocks are merged.
pub(crate) const MIN_SPAN_LEN: u64 = 1 << 20;

/// Plain bytes between seek points inside long frames.
pub(crate) const CHECKPOINT_INTERVAL: u64 = 4 << 20;

/// Maximum plain bytes of a span, cut here without a seek point. A checkpoint may wait for a block's end.
pub(crate) const MAX_SPAN_LEN: u64 = 2 * CHECKPOINT_INTERVAL;

/// Minimum ratio of the packed bytes to all windows together.
const WINDOWS_DIVISOR: u64 = 100;

/// The zstd level of windows. Over 188 windows of 32 KiB of a tar of /usr/share and /usr/bin, level 1 takes
/// 0.10 ms a window and makes it 2.21 times smaller, 3: 0.17 ms, 2.26; 9: 0.52 ms, 2.36; 19: 8.8 ms, 2.47.
/// Inflating the 4 MiB of a window takes 5 ms: level 3 costs 3 %, the next tenth more than decoding itself.
const WINDOW_ZSTD_LEVEL: i32 = 3;

/// State of a seek point between two frames of lz4 or zstd.
pub(super) const STATE_BETWEEN_FRAMES: u32 = 0;

/// An offset where decoding can start; self-contained with an empty `window`, else a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeekPoint {
    /// The packed byte that holds the first bit to decode.
    pub packed: Packed,
    /// Bits of that byte before: the least significant in deflate, the most significant in bzip2; 0 to 7.
    pub bit: u8,
    /// The plain byte that is decoded first.
    pub plain: Plain,
    /// Additional state of the codec, in its own format; see docs/index-format.md.
    pub state: u32,
    /// The plain bytes before to which the codec may refer, packed by `pack_window`; may be empty.
    pub window: Bytes,
}

impl SeekPoint {
    /// A self-contained seek point at the first bit of `packed`.
    pub(super) fn without_window(packed: Packed, plain: Plain, state: u32) -> Self {
        Self {
            packed,
            bit: 0,
            plain,
            state,
            window: Bytes::new(),
        }
    }
}

/// Decides which seek points to keep; the first is at the start of the stream.
///
/// One without a window is kept if the span before it has [`MIN_SPAN_LEN`] plain bytes. A checkpoint has a
/// window, which takes space in the index. It is kept after [`CHECKPOINT_INTERVAL`], or later if all windows
/// would otherwise exceed 1 % of the packed bytes so far.
/// Where data packs to a third, 4 MiB plain are 1.4 MB packed and allow 14 kB, about a packed window of 32
/// KiB. So gzip gets a checkpoint every 4 MiB. Spans grow only where windows pack worse than the data around
/// them: to 6.4 MB with windows of 32 kB at a packed half. Linked lz4's windows of 64 KiB, packed to a half
/// by zstd where lz4 reached two thirds, give 5 MB.
pub(super) struct Spacing {
    is_enabled: bool,
    /// The packed offset since which windows are counted.
    origin: Packed,
    last: Option<Plain>,
    windows_bytes: u64,
    /// Bytes of all windows, including the one that was last rejected.
    rejected_bytes: u64,
}

impl Spacing {
    /// For a stream from its start. If not `is_enabled`, no seek point is ever due.
    pub(super) fn start(is_enabled: bool) -> Self {
        Self {
            is_enabled,
            origin: Packed(0),
            last: None,
            windows_bytes: 0,
            rejected_bytes: 0,
        }
    }

    /// For a stream from `seek_point`, which is not repeated. Counts windows from here on.
    pub(super) fn resume(is_enabled: bool, seek_point: &SeekPoint) -> Self {
        Self {
            origin: seek_point.packed,
            last: Some(seek_point.plain),
            ..Self::start(is_enabled)
        }
    }

    /// Whether a seek point without a window is due at `plain`.
    pub(super) fn is_frame_due(&self, plain: Plain) -> bool {
        let since_last = self.since_last(plain);
        self.is_enabled && since_last.is_none_or(|bytes| bytes >= MIN_SPAN_LEN)
    }

    /// Like [`Spacing::is_frame_due`]. If so, records it.
    pub(super) fn try_mark_frame(&mut self, plain: Plain) -> bool {
        let due = self.is_frame_due(plain);
        if due {
            self.last = Some(plain);
        }
        due
    }

    /// Whether to call [`Spacing::try_checkpoint`]: a long span, and `packed` allows the rejected window.
    pub(super) fn is_checkpoint_due(&self, plain: Plain, packed: Packed) -> bool {
        self.is_enabled
            && self
                .since_last(plain)
                .is_some_and(|bytes| bytes >= CHECKPOINT_INTERVAL)
            && self.rejected_bytes <= self.affordable_bytes(packed)
    }

    /// Packs `window`, and records a checkpoint if due at `plain` and within the windows' share of `packed`.
    pub(super) fn try_checkpoint(
        &mut self,
        plain: Plain,
        packed: Packed,
        window: &[u8],
    ) -> Option<Bytes> {
        if !self.is_checkpoint_due(plain, packed) {
            return None;
        }
        let window = pack_window(window);
        let windows_bytes = self.windows_bytes.saturating_add(window.len() as u64);
        if windows_bytes > self.affordable_bytes(packed) {
            self.rejected_bytes = windows_bytes;
            return None;
        }
        self.windows_bytes = windows_bytes;
        self.rejected_bytes = 0;
        self.last = Some(plain);
        Some(window)
    }

    fn since_last(&self, plain: Plain) -> Option<u64> {
        Some(plain.0.saturating_sub(self.last?.0))
    }

    fn affordable_bytes(&self, packed: Packed) -> u64 {
        packed.0.saturating_sub(self.origin.0) / WINDOWS_DIVISOR
    }
}

/// Packs a window for a seek point: one zstd frame, or empty if `window` is.
pub(super) fn pack_window(window: &[u8]) -> Bytes {
    if window.is_empty() {
        return Bytes::new();
    }
    let packed = zstd::bulk::compress(window, WINDOW_ZSTD_LEVEL);
    Bytes::from(packed.expect("the destination has room for the worst case"))
}

/// The window behind [`SeekPoint::window`]: at most `max_len` bytes, whatever the frame claims.
pub(super) fn unpack_window(packed: &[u8], max_len: usize) -> Result<Vec<u8>, Cause> {
    if packed.is_empty() {
        return Ok(Vec::new());
    }
    zstd::bulk::decompress(packed, max_len)
        .map_err(|error| Cause::Malformed(format!("the window of a seek point: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1_u64;
        std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .take(len)
        .collect()
    }

    #[test]
    fn first_seek_point_is_at_the_start() {
        let mut spacing = Spacing::start(true);
        assert!(!spacing.is_checkpoint_due(Plain(0), Packed(0)));
        assert!(spacing.try_mark_frame(Plain(0)));
        assert!(!spacing.try_mark_frame(Plain(0)));
    }

    #[test]
    fn small_frames_share_a_seek_point() {
        let mut spacing = Spacing::start(true);
        let made = (0..64).filter(|number| spacing.try_mark_frame(Plain(number * 65_280)));
        assert_eq!(made.collect::<Vec<_>>(), [0, 17, 34, 51]);
    }

    #[test]
    fn no_seek_point_is_due_when_disabled() {
        let mut spacing = Spacing::start(false);
        assert!(!spacing.try_mark_frame(Plain(0)));
        assert_eq!(
            spacing.try_checkpoint(Plain(1 << 40), Packed(1 << 40), b"w"),
            None
        );
    }

    #[test]
    fn resumed_seek_point_is_not_repeated() {
        let seek_point = SeekPoint {
            packed: Packed(5 << 20),
            bit: 0,
            plain: Plain(10 << 20),
            state: 0,
            window: Bytes::new(),
        };
        let mut spacing = Spacing::resume(true, &seek_point);
        assert!(!spacing.try_mark_frame(seek_point.plain));
        assert!(spacing.try_mark_frame(Plain(11 << 20)));
    }

    // Promises: seek-points
    #[test]
    fn windows_stay_within_one_percent_of_the_packed_bytes() {
        let window = noise(32 << 10);
        let mut spacing = Spacing::start(true);
        assert!(spacing.try_mark_frame(Plain(0)));
        let (mut windows_bytes, mut checkpoints) = (0, 0);
        // A ratio of two: 4 MiB plain are 2 MiB packed, which pay for 20 KiB of windows.
        for mib in 0_u64..1024 {
            let (plain, packed) = (Plain(mib << 20), Packed(mib << 19));
            if let Some(window) = spacing.try_checkpoint(plain, packed, &window) {
                windows_bytes += window.len() as u64;
                checkpoints += 1;
                assert!(windows_bytes * 100 <= packed.0);
            }
        }
        assert!(checkpoints > 512 * 1024 / 3300 * 9 / 10, "{checkpoints}");
    }

    #[test]
    fn rejected_window_is_not_packed_again_until_affordable() {
        let mut spacing = Spacing::start(true);
        assert!(spacing.try_mark_frame(Plain(0)));
        let packed = |window: u64| Packed((window + 100) * 100);
        assert_eq!(
            spacing.try_checkpoint(Plain(CHECKPOINT_INTERVAL), Packed(1000), &noise(32 << 10)),
            None
        );
        assert!(!spacing.is_checkpoint_due(Plain(2 * CHECKPOINT_INTERVAL), Packed(1001)));
        assert!(spacing.is_checkpoint_due(Plain(2 * CHECKPOINT_INTERVAL), packed(32 << 10)));
    }

    #[test]
    fn windows_round_trip() {
        for window in [Vec::new(), vec![7; 32 << 10], noise(64 << 10)] {
            let packed = pack_window(&window);
            assert_eq!(unpack_window(&packed, 64 << 10), Ok(window));
        }
    }

    #[test]
    fn window_longer_than_the_limit_is_rejected() {
        let packed = pack_window(&vec![0; 65_537]);
        assert!(matches!(
            unpack_window(&packed, 65_536),
            Err(Cause::Malformed(_))
        ));
        assert!(matches!(
            unpack_window(b"junk", 65_536),
            Err(Cause::Malformed(_))
        ));
    }
}
