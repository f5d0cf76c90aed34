//! One header record, typed: fields, numbers, checksum, dialect.

use super::{Device, RECORD, Timestamp};
use crate::base::tar_checksum::{parse_octal, strip_leading_nul};

#[expect(clippy::cast_possible_truncation, reason = "512 fits")]
pub(super) const RECORD_LEN: usize = RECORD as usize;

pub(super) type Record = [u8; RECORD_LEN];

/// Dialect of a header, which decides about fields beyond those of v7.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Dialect {
    /// No magic: no prefix, owner names, or device numbers.
    V7,
    /// POSIX, with or without pax extensions.
    Ustar,
    /// ustar with a shorter prefix, followed by times and a sparse map.
    Star,
    /// GNU, old and new: a sparse map instead of the prefix.
    Gnu,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NumberError {
    NotANumber,
    OutOfRange,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Header<'a>(pub(super) &'a Record);

impl<'a> Header<'a> {
    fn field(self, offset: usize, len: usize) -> &'a [u8] {
        self.0.get(offset..offset + len).unwrap_or_default()
    }

    pub(super) fn dialect(self) -> Dialect {
        if self.field(257, 8) == b"ustar  \0" {
            Dialect::Gnu
        } else if self.field(257, 6) != b"ustar\0" {
            Dialect::V7
        } else if self.has_star_times() {
            Dialect::Star
        } else {
            Dialect::Ustar
        }
    }

    fn has_star_times(self) -> bool {
        let time = |field: &[u8]| {
            matches!(field.first(), Some(b'0'..=b'7')) && field.last() == Some(&b' ')
        };
        self.field(475, 1) == b"\0" && time(self.field(476, 12)) && time(self.field(488, 12))
    }

    pub(super) fn typeflag(self) -> u8 {
        self.0.get(156).copied().unwrap_or_default()
    }

    /// With ustar's prefix.
    pub(super) fn name(self) -> Vec<u8> {
        let name = text(self.field(0, 100));
        let prefix = match self.dialect() {
            Dialect::Ustar | Dialect::Star => text(self.field(345, 155)),
            Dialect::V7 | Dialect::Gnu => b"",
        };
        if prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, b"/", name].concat()
    }

    pub(super) fn link(self) -> &'a [u8] {
        text(self.field(157, 100))
    }

    pub(super) fn user(self) -> &'a [u8] {
        self.ustar_text(265, 32)
    }

    pub(super) fn group(self) -> &'a [u8] {
        self.ustar_text(297, 32)
    }

    fn ustar_text(self, offset: usize, len: usize) -> &'a [u8] {
        match self.dialect() {
            Dialect::V7 => b"",
            Dialect::Ustar | Dialect::Star | Dialect::Gnu => text(self.field(offset, len)),
        }
    }

    pub(super) fn size(self) -> Result<u64, NumberError> {
        size(self.field(124, 12))
    }

    pub(super) fn mode(self) -> Result<u32, NumberError> {
        let mode = number(self.field(100, 8))?;
        u32::try_from(mode & 0o7777).map_err(|_| NumberError::OutOfRange)
    }

    pub(super) fn uid(self) -> Result<u32, NumberError> {
        number_in_range(self.field(108, 8))
    }

    pub(super) fn gid(self) -> Result<u32, NumberError> {
        number_in_range(self.field(116, 8))
    }

    pub(super) fn mtime(self) -> Result<Timestamp, NumberError> {
        Ok(Timestamp {
            seconds: number_in_range(self.field(136, 12))?,
            nanoseconds: 0,
        })
    }

    pub(super) fn device(self) -> Result<Device, NumberError> {
        if self.dialect() == Dialect::V7 {
            return Ok(Device::default());
        }
        Ok(Device {
            major: number_in_range(self.field(329, 8))?,
            minor: number_in_range(self.field(337, 8))?,
        })
    }
}

/// The bytes up to the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// A length or offset: a number from 0 up to 2⁶³ − 1.
pub(super) fn size(field: &[u8]) -> Result<u64, NumberError> {
    let size: i64 = number_in_range(field)?;
    u64::try_from(size).map_err(|_| NumberError::OutOfRange)
}

fn number_in_range<T: TryFrom<i128>>(field: &[u8]) -> Result<T, NumberError> {
    T::try_from(number(field)?).map_err(|_| NumberError::OutOfRange)
}

/// A number in octal, or in base 256 if the first byte is 0x80 or 0xFF.
fn number(field: &[u8]) -> Result<i128, NumberError> {
    let field = strip_leading_nul(field);
    match field.first() {
        Some(0x80) => Ok(base256(0, field)),
        Some(0xff) => Ok(base256(-1, field)),
        _ => parse_octal(field)
            .map(i128::from)
            .ok_or(NumberError::NotANumber),
    }
}

/// Big-endian two's complement of at most twelve bytes. `sign` replaces the first, which marks the base.
fn base256(sign: i128, field: &[u8]) -> i128 {
    let digits = field.iter().skip(1);
    digits.fold(sign, |value, &byte| value << 8 | i128::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: gnu-base64
    #[test]
    fn base_64_numbers_are_rejected() {
        for field in [b"+AAAAAAB", b"-AAAAAAB"] {
            assert!(number(field).is_err());
        }
    }

    #[test]
    fn a_leading_nul_is_ignored() {
        assert_eq!(number(b"\x0012\0\0\0\0\0"), Ok(0o12));
    }

    #[test]
    fn base_256_counts_down_from_minus_one_as_well() {
        assert_eq!(number(b"\x80\0\0\0\xff\xff\xff\xff"), Ok(0xffff_ffff));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xfe"), Ok(-2));
        assert_eq!(
            number(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\0"),
            Ok(-256)
        );
    }

    #[test]
    fn sizes_beyond_what_a_file_can_have_are_out_of_range() {
        assert_eq!(size(&[0xff; 12]), Err(NumberError::OutOfRange));
        assert_eq!(
            size(b"\x80\0\0\0\x80\0\0\0\0\0\0\0"),
            Err(NumberError::OutOfRange)
        );
        assert_eq!(
            size(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"),
            Ok(i64::MAX.unsigned_abs())
        );
    }

    #[test]
    fn a_prefix_counts_in_ustar_only() {
        let mut record = [0; RECORD_LEN];
        record[..4].copy_from_slice(b"name");
        record[345..351].copy_from_slice(b"prefix");
        assert_eq!(Header(&record).name(), b"name");
        record[257..265].copy_from_slice(b"ustar\x0000");
        assert_eq!(Header(&record).name(), b"prefix/name");
        record[257..265].copy_from_slice(b"ustar  \0");
        assert_eq!(Header(&record).name(), b"name");
    }

    #[test]
    fn a_star_prefix_ends_before_the_times() {
        let mut record = [0; RECORD_LEN];
        record[..4].copy_from_slice(b"name");
        record[257..265].copy_from_slice(b"ustar\x0000");
        record[345..475].fill(b'p');
        record[476..500].copy_from_slice(b"12345670123 12345670123 ");
        record[508..].copy_from_slice(b"tar\0");
        assert_eq!(Header(&record).dialect(), Dialect::Star);
        let name = [&[b'p'; 130][..], b"/name"].concat();
        assert_eq!(Header(&record).name(), name);
    }
}
