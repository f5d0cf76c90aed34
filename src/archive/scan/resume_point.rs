//! Resume points: positions at which a later scan can continue, and their encoding.

use std::sync::Arc;

use bytes::Bytes;

use crate::base::extent::{Packed, Plain};
use crate::codec::{Compression, SeekPoint};
use crate::tar::MemberTotals;

/// A position in front of a member.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResumePoint {
    /// Packed format.
    pub compression: Compression,
    /// Seek point at which decoding starts: at the member, or before it.
    pub seek_point: SeekPoint,
    /// Start of the member's first header.
    pub member: Plain,
    /// Totals of the members before it.
    pub(crate) sums: MemberTotals,
    /// Bodies of the global pax headers before it.
    pub globals: Arc<Vec<Vec<u8>>>,
}

impl ResumePoint {
    /// Encodes for [`ResumePoint::decode`]: numbers of eight bytes, and strings with their lengths in front.
    pub fn encode(&self) -> Vec<u8> {
        let point = &self.seek_point;
        let [members, size, metadata_bytes] = self.sums.to_array();
        let numbers = [
            self.compression.code().into(),
            self.member.0,
            point.packed.0,
            point.bit.into(),
            point.plain.0,
            point.state.into(),
            members,
            size,
            metadata_bytes,
        ];
        let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        let globals = self.globals.iter().map(Vec::as_slice);
        for text in [&point.window[..]].into_iter().chain(globals) {
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text);
        }
        bytes
    }

    /// Decodes the result of [`ResumePoint::encode`]; `None` if it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (numbers, mut rest) = bytes.split_first_chunk::<72>()?;
        let (numbers, _) = numbers.as_chunks::<8>();
        let mut numbers = numbers.iter().map(|number| u64::from_le_bytes(*number));
        let compression = Compression::from_code(numbers.next()?)?;
        let member = Plain(numbers.next()?);
        let mut seek_point = SeekPoint {
            packed: Packed(numbers.next()?),
            bit: u8::try_from(numbers.next()?).ok()?,
            plain: Plain(numbers.next()?),
            state: u32::try_from(numbers.next()?).ok()?,
            window: Bytes::new(),
        };
        let sums = MemberTotals::from_array([numbers.next()?, numbers.next()?, numbers.next()?]);
        let mut texts = Vec::new();
        while let Some((len, behind)) = rest.split_first_chunk::<8>() {
            let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
            let (text, behind) = behind.split_at_checked(len)?;
            texts.push(text.to_vec());
            rest = behind;
        }
        let mut texts = texts.into_iter();
        seek_point.window = texts.next()?.into();
        (rest.is_empty() && seek_point.plain <= member).then_some(Self {
            compression,
            seek_point,
            member,
            sums,
            globals: Arc::new(texts.collect()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resume_point() -> ResumePoint {
        ResumePoint {
            compression: Compression::Bzip2,
            seek_point: SeekPoint {
                packed: Packed(1 << 40),
                bit: 7,
                plain: Plain(512),
                state: u32::MAX,
                window: Bytes::from_static(b"window"),
            },
            member: Plain(1024),
            sums: MemberTotals::from_array([3, 1 << 50, 99]),
            globals: Arc::new(vec![b"11 a=bcdef\n".to_vec(), Vec::new()]),
        }
    }

    #[test]
    fn encoded_resume_point_decodes_to_itself() {
        let resume_point = resume_point();
        assert_eq!(
            ResumePoint::decode(&resume_point.encode()),
            Some(resume_point.clone())
        );
        let bare = ResumePoint {
            globals: Arc::default(),
            ..resume_point
        };
        assert_eq!(ResumePoint::decode(&bare.encode()), Some(bare));
    }

    #[test]
    fn invalid_bytes_decode_to_no_resume_point() {
        let bytes = resume_point().encode();
        let whole = ResumePoint::decode(&bytes);
        for len in 0..bytes.len() {
            assert_ne!(ResumePoint::decode(&bytes[..len]), whole, "{len}");
        }
        for (place, byte) in [(0, 6), (31, 1), (47, 1), (79, 255)] {
            let mut bytes = bytes.clone();
            bytes[place] = byte;
            assert_eq!(ResumePoint::decode(&bytes), None, "{place}");
        }
        let behind = ResumePoint {
            member: Plain(511),
            ..resume_point()
        };
        assert_eq!(ResumePoint::decode(&behind.encode()), None);
    }
}
