//! Incremental reader of gzip member headers (RFC 1952, section 2.3).

use flate2::Crc;

use crate::codec::Cause;

const MAGIC: [u8; 2] = [0x1f, 0x8b];
const FIXED_LEN: usize = 10;
const DEFLATE: u8 = 8;

const FHCRC: u8 = 1 << 1;
const FEXTRA: u8 = 1 << 2;
const FNAME: u8 = 1 << 3;
const FCOMMENT: u8 = 1 << 4;
/// Bits without a meaning; bit 5 once said "encrypted".
const RESERVED: u8 = 0b1110_0000;

/// A header under construction. Skips names and comments of any length; keeps at most a 64 KiB extra field.
#[derive(Debug, Default)]
pub(super) struct Header {
    part: HeaderPart,
    flags: u8,
    /// The part so far, where its bytes matter.
    field: Vec<u8>,
    extra_len: usize,
    /// Bytes of a BGZF member with header and trailer, at most 64 KiB. Only BGZF stores it.
    pub(super) member_len: Option<usize>,
    /// Over all bytes before [`HeaderPart::Crc`].
    crc: Crc,
    pub(super) len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum HeaderPart {
    #[default]
    Fixed,
    ExtraLen,
    Extra,
    Name,
    Comment,
    Crc,
    Done,
}

#[derive(PartialEq, Eq, Debug)]
pub(super) enum HeaderError {
    NoMagic,
    /// A member begins, but it cannot be decoded.
    Invalid(Cause),
}

impl Header {
    /// Reads on; returns how many bytes belong to the header: all, unless it [is done](Self::is_done). After
    /// an error, [`Header::len`] does not count the bytes up to the fault.
    pub(super) fn push(&mut self, input: &[u8]) -> Result<usize, HeaderError> {
        let mut rest = input;
        while !self.is_done() && (!rest.is_empty() || self.missing_len() == Some(0)) {
            let (taken, complete) = match self.missing_len() {
                Some(wanted) => (wanted.min(rest.len()), wanted <= rest.len()),
                None => match rest.iter().position(|&byte| byte == 0) {
                    Some(zero) => (zero + 1, true),
                    None => (rest.len(), false),
                },
            };
            let (part, after) = rest.split_at(taken);
            self.append(part)?;
            rest = after;
            if complete {
                self.end_part()?;
            }
        }
        Ok(input.len() - rest.len())
    }

    pub(super) fn is_done(&self) -> bool {
        self.part == HeaderPart::Done
    }

    /// Number of missing bytes of the current part; `None` when it ends with a zero byte.
    fn missing_len(&self) -> Option<usize> {
        let len = match self.part {
            HeaderPart::Fixed => FIXED_LEN,
            HeaderPart::ExtraLen | HeaderPart::Crc => 2,
            HeaderPart::Extra => self.extra_len,
            HeaderPart::Name | HeaderPart::Comment => return None,
            HeaderPart::Done => 0,
        };
        Some(len - self.field.len())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HeaderError> {
        if self.part != HeaderPart::Crc {
            self.crc.update(bytes);
        }
        if !matches!(self.part, HeaderPart::Name | HeaderPart::Comment) {
            self.field.extend_from_slice(bytes);
        }
        let mut magic = self.field.iter().zip(&MAGIC);
        if self.part == HeaderPart::Fixed && magic.any(|(byte, magic)| byte != magic) {
            return Err(HeaderError::NoMagic);
        }
        self.len = self.len.saturating_add(bytes.len() as u64);
        Ok(())
    }

    fn end_part(&mut self) -> Result<(), HeaderError> {
        let field = std::mem::take(&mut self.field);
        match (self.part, field.as_slice()) {
            (HeaderPart::Fixed, &[_, _, method, flags, ..]) => self.parse_fixed(method, flags)?,
            (HeaderPart::ExtraLen, &[low, high]) => {
                self.extra_len = usize::from(u16::from_le_bytes([low, high]));
                self.part = HeaderPart::Extra;
                return Ok(());
            }
            (HeaderPart::Extra, extra) => self.member_len = bgzf_member_len(extra),
            (HeaderPart::Crc, &[low, high]) => self.check_crc(u16::from_le_bytes([low, high]))?,
            _ => {}
        }
        let optional = [
            (HeaderPart::ExtraLen, FEXTRA),
            (HeaderPart::Name, FNAME),
            (HeaderPart::Comment, FCOMMENT),
            (HeaderPart::Crc, FHCRC),
        ];
        let next = optional
            .into_iter()
            .find(|&(part, flag)| part as u8 > self.part as u8 && self.flags & flag != 0);
        self.part = next.map_or(HeaderPart::Done, |(part, _)| part);
        Ok(())
    }

    fn parse_fixed(&mut self, method: u8, flags: u8) -> Result<(), HeaderError> {
        let unsupported = |what: String| Err(HeaderError::Invalid(Cause::Unsupported(what)));
        if method != DEFLATE {
            return unsupported(format!("gzip compression method {method}"));
        }
        if flags & RESERVED != 0 {
            return unsupported(format!("gzip flags {flags:#04x}"));
        }
        self.flags = flags;
        Ok(())
    }

    fn check_crc(&self, expected: u16) -> Result<(), HeaderError> {
        let computed = self.crc.sum() & 0xffff;
        Cause::compare_checksums("CRC-16 of a gzip header", expected, computed)
            .map_err(HeaderError::Invalid)
    }
}

/// The member length in the subfield `BC` of an extra field.
fn bgzf_member_len(mut extra: &[u8]) -> Option<usize> {
    while let [id @ .., low, high] = extra.get(..4)? {
        let (subfield, rest) = extra
            .get(4..)?
            .split_at_checked(usize::from(u16::from_le_bytes([*low, *high])))?;
        if let (b"BC", &[low, high]) = (id, subfield) {
            return Some(usize::from(u16::from_le_bytes([low, high])) + 1);
        }
        extra = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], step: usize) -> Result<(Header, usize), HeaderError> {
        let mut header = Header::default();
        let mut taken = 0;
        for piece in bytes.chunks(step) {
            if header.is_done() {
                break;
            }
            taken += header.push(piece)?;
        }
        Ok((header, taken))
    }

    fn full() -> Vec<u8> {
        let mut bytes = vec![
            0x1f,
            0x8b,
            8,
            FHCRC | FEXTRA | FNAME | FCOMMENT,
            1,
            2,
            3,
            4,
            0,
            3,
        ];
        bytes.extend_from_slice(b"\x0c\0XX\x02\0abBC\x02\0\xff\x10");
        bytes.extend_from_slice(b"name\0comment\0");
        let mut crc = Crc::new();
        crc.update(&bytes);
        bytes.extend_from_slice(&crc.sum().to_le_bytes()[..2]);
        bytes
    }

    #[test]
    fn optional_header_fields_are_skipped_at_every_step_size() {
        let mut bytes = full();
        let len = bytes.len();
        bytes.extend_from_slice(b"deflate");
        for step in 1..=bytes.len() {
            let (header, taken) = read(&bytes, step).expect("a header");
            assert!(header.is_done());
            assert_eq!((taken, header.len), (len, len as u64));
            assert_eq!(header.member_len, Some(0x1100));
        }
    }

    #[test]
    fn header_without_options_is_ten_bytes() {
        let (header, taken) = read(&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 0], 11).expect("one");
        assert!(header.is_done());
        assert_eq!((taken, header.member_len), (10, None));
    }

    #[test]
    fn empty_extra_field_ends_with_its_length() {
        let bytes = [0x1f, 0x8b, 8, FEXTRA, 0, 0, 0, 0, 0, 0xff, 0, 0];
        for step in [1, 12] {
            let (header, taken) = read(&bytes, step).expect("a header");
            assert!(header.is_done());
            assert_eq!(taken, 12);
        }
    }

    #[test]
    fn bit_flips_in_a_header_with_crc_never_complete_it() {
        let bytes = full();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            if let Some(byte) = bytes.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
            }
            let read = read(&bytes, usize::MAX);
            // Without the flag there is no CRC to check.
            assert!(bit == 3 * 8 + 1 || !matches!(read, Ok((header, _)) if header.is_done()));
        }
    }

    #[test]
    fn unsupported_gzip_headers_are_named() {
        let error = read(&[0x1f, 0x8b, 7, 0, 0, 0, 0, 0, 0, 0], 10).err();
        let cause = Cause::Unsupported("gzip compression method 7".to_owned());
        assert_eq!(error, Some(HeaderError::Invalid(cause)));
        let error = read(&[0x1f, 0x8b, 8, 0x20, 0, 0, 0, 0, 0, 0], 10).err();
        assert!(matches!(
            error,
            Some(HeaderError::Invalid(Cause::Unsupported(_)))
        ));
        assert_eq!(read(&[0x1f, 0x8c], 1).err(), Some(HeaderError::NoMagic));
    }

    #[test]
    fn extra_fields_with_wrong_lengths_have_no_member_length() {
        assert_eq!(bgzf_member_len(b"BC\x02\0\x01"), None);
        assert_eq!(bgzf_member_len(b"BC\x03\0\x01\0\0"), None);
        assert_eq!(bgzf_member_len(b"XX\xff\xffBC\x02\0\x01\0"), None);
        assert_eq!(bgzf_member_len(b"BC\x02\0\xff\xff"), Some(65_536));
    }
}
