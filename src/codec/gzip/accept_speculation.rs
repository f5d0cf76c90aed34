//! Decodes members in parallel: takes the output of jobs that began at a guessed block.

use bytes::Bytes;

use super::speculation_queue::{Match, SpeculationQueue};
use super::speculative::{BlockEnd, UnresolvedPiece};
use super::trailer::MemberChecksum;
use super::{Decoder, State};
use crate::base::extent::Plain;
use crate::codec::{Job, Pull, SeekPoint};

impl Decoder {
    pub(super) fn find_match(&mut self, unused_bits: u8) -> Match {
        let bit = self.bit(unused_bits);
        self.speculation
            .as_mut()
            .map_or(Match::Miss, |speculation| speculation.find_match(bit))
    }

    pub(super) fn begin_speculation(&mut self) -> bool {
        let Some(limits) = self.limits else {
            return false;
        };
        let packed_len = self.input.offset().0.saturating_sub(self.member_start.0.0);
        let plain_len = self.plain.0.saturating_sub(self.member_start.1.0);
        if self.speculation.is_none() && packed_len < limits.partition_len as u64 {
            return false;
        }
        let (pool, offset) = (&self.pool, self.input.offset());
        let decoded_lens = (packed_len, plain_len);
        let speculation = self.speculation.get_or_insert_with(|| {
            SpeculationQueue::new(limits, pool.clone(), offset, decoded_lens)
        });
        let Some(work) = speculation.start_next(&self.input, decoded_lens) else {
            return false;
        };
        self.output.push_unordered(Pull::Speculative(work));
        true
    }

    pub(super) fn wants_input(&self) -> bool {
        let speculation = self.speculation.as_ref();
        speculation.is_some_and(|speculation| speculation.wants_input(&self.input))
    }

    pub(super) fn accept_speculative_output(&mut self) {
        let Some(decoded) = self
            .speculation
            .as_mut()
            .and_then(SpeculationQueue::take_match)
        else {
            return;
        };
        let State::Block {
            bit, window, check, ..
        } = &mut self.state
        else {
            return;
        };
        let (bit, window, mut check) = (*bit, window.clone(), check.take());
        let start = BlockEnd {
            bit: self.bit((8 - bit) % 8),
            plain: 0,
        };
        let marks = self.checkpoints(&decoded, start, &window);
        let end = decoded.end;
        let next_window = decoded.window_at(end.plain, &window);
        self.push_speculative_pieces(decoded.pieces, marks, &window, check.as_mut());
        self.plain = Plain(self.plain.0.saturating_add(end.plain as u64));
        let len = end.bit.div_ceil(8).saturating_sub(self.input.offset().0);
        let tail = usize::try_from(len.saturating_sub(4)).unwrap_or(usize::MAX);
        let tail = self.input.peek_at(tail).map(u32::from_be_bytes);
        self.tail = tail.unwrap_or(decoded.last_byte.into());
        self.input.skip(len);
        if decoded.is_last {
            self.state = State::deflate(check);
            self.end_deflate();
        } else {
            self.state = State::Block {
                bit: u8::try_from(end.bit % 8).unwrap_or_default(),
                is_byte_pending: false,
                window: next_window,
                check,
            };
        }
    }

    /// Pushes jobs that resolve `pieces`, with the seek points `marks` between their bytes.
    fn push_speculative_pieces(
        &mut self,
        pieces: Vec<UnresolvedPiece>,
        mut marks: Vec<(usize, SeekPoint)>,
        window: &Bytes,
        mut check: Option<&mut MemberChecksum>,
    ) {
        self.output.flush();
        let mut from = 0;
        for piece in pieces {
            let to = from + piece.len;
            let inside = marks.extract_if(.., |(plain, _)| *plain < to);
            let inside: Vec<_> = inside
                .map(|(plain, seek_point)| (plain - from, seek_point))
                .collect();
            let part = check.as_mut().map(|check| check.part());
            let window = window.clone();
            let finish = move || {
                let plain = piece.resolve(&window);
                if let Some(part) = part {
                    part.set_bytes(&plain);
                }
                plain
            };
            if inside.iter().all(|(plain, _)| *plain == 0) {
                for (_, seek_point) in inside {
                    self.output.push_seek_point(seek_point);
                }
                self.output.push(Pull::Job(Job::new(|| Ok(finish()))));
            } else {
                // A job makes one piece, and here there are several.
                self.output.push_with_seek_points(finish(), inside);
            }
            from = to;
        }
    }
}
