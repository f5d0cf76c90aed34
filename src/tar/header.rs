//! One header record, typed: fields, numbers, checksum, dialect.

use super::{Device, RECORD, Timestamp};

/// Bytes in a record, as an array length.
#[expect(clippy::cast_possible_truncation, reason = "512 fits")]
pub(super) const RECORD_LEN: usize = RECORD as usize;

/// A record's bytes.
pub(super) type Record = [u8; RECORD_LEN];

/// Which fields a header has beyond those of v7.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Dialect {
    /// Neither magic: no prefix, owner names, or device numbers.
    V7,
    /// POSIX, with or without pax extensions.
    Ustar,
    /// ustar with a shorter prefix, and times and a sparse map behind it.
    Star,
    /// GNU, old and new: no prefix, a sparse map in its place.
    Gnu,
}

/// Why a numeric field says nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NumberError {
    /// Neither octal nor base-256.
    NotANumber,
    /// A number that its field cannot mean.
    OutOfRange,
}

/// A view of one header record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header<'a>(pub(super) &'a Record);

impl<'a> Header<'a> {
    fn field(self, offset: usize, len: usize) -> &'a [u8] {
        self.0.get(offset..offset + len).unwrap_or_default()
    }

    /// Whether the recorded sum is that of the bytes, taken as unsigned or, as some old programs
    /// did, as signed.
    pub(super) fn checksum_holds(self) -> bool {
        let Ok(recorded) = octal(after_nul(self.field(148, 8))) else {
            return false;
        };
        // The checksum's own field counts as blanks.
        let own = self.field(148, 8);
        let sum = i64::from(sum(self.0)) - i64::from(sum(own)) + 8 * i64::from(b' ');
        let Ok(recorded) = i64::try_from(recorded) else {
            return false;
        };
        recorded == sum || recorded == sum - 256 * (negatives(self.0) - negatives(own))
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

    /// star's `atime` and `ctime` behind a prefix that ends before them.
    fn has_star_times(self) -> bool {
        let time = |field: &[u8]| {
            matches!(field.first(), Some(b'0'..=b'7')) && field.last() == Some(&b' ')
        };
        self.field(475, 1) == b"\0" && time(self.field(476, 12)) && time(self.field(488, 12))
    }

    pub(super) fn typeflag(self) -> u8 {
        let [flag] = self
            .0
            .get(156..157)
            .and_then(|flag| flag.try_into().ok())
            .unwrap_or([0]);
        flag
    }

    /// The name, with ustar's prefix before it.
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

    /// The name of the owner; empty in v7.
    pub(super) fn user(self) -> &'a [u8] {
        self.beyond_v7(265, 32)
    }

    /// The name of the group; empty in v7.
    pub(super) fn group(self) -> &'a [u8] {
        self.beyond_v7(297, 32)
    }

    fn beyond_v7(self, offset: usize, len: usize) -> &'a [u8] {
        match self.dialect() {
            Dialect::V7 => b"",
            Dialect::Ustar | Dialect::Star | Dialect::Gnu => text(self.field(offset, len)),
        }
    }

    /// Bytes in the archive behind this record, padding aside; below 2⁶³.
    pub(super) fn size(self) -> Result<u64, NumberError> {
        size(self.field(124, 12))
    }

    /// The permission bits: the low twelve.
    pub(super) fn mode(self) -> Result<u32, NumberError> {
        let mode = number(self.field(100, 8))?;
        u32::try_from(mode & 0o7777).map_err(|_| NumberError::OutOfRange)
    }

    pub(super) fn uid(self) -> Result<u32, NumberError> {
        ranged(self.field(108, 8))
    }

    pub(super) fn gid(self) -> Result<u32, NumberError> {
        ranged(self.field(116, 8))
    }

    pub(super) fn mtime(self) -> Result<Timestamp, NumberError> {
        Ok(Timestamp {
            seconds: ranged(self.field(136, 12))?,
            nanoseconds: 0,
        })
    }

    /// The device number; 0, 0 in v7.
    pub(super) fn device(self) -> Result<Device, NumberError> {
        if self.dialect() == Dialect::V7 {
            return Ok(Device::default());
        }
        Ok(Device {
            major: ranged(self.field(329, 8))?,
            minor: ranged(self.field(337, 8))?,
        })
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().map(|&byte| u32::from(byte)).sum()
}

/// How many bytes are negative when taken as signed.
fn negatives(bytes: &[u8]) -> i64 {
    bytes.iter().map(|&byte| i64::from(byte >> 7)).sum()
}

/// A field's bytes up to its first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// A length or offset: a number from 0 up to 2⁶³ − 1.
pub(super) fn size(field: &[u8]) -> Result<u64, NumberError> {
    let size: i64 = ranged(field)?;
    u64::try_from(size).map_err(|_| NumberError::OutOfRange)
}

fn ranged<T: TryFrom<i128>>(field: &[u8]) -> Result<T, NumberError> {
    T::try_from(number(field)?).map_err(|_| NumberError::OutOfRange)
}

/// A number in octal or, when the first byte is 0x80 or 0xFF, in base 256.
fn number(field: &[u8]) -> Result<i128, NumberError> {
    let field = after_nul(field);
    match field.first() {
        Some(0x80) => Ok(base256(0, field)),
        Some(0xff) => Ok(base256(-1, field)),
        _ => octal(field).map(i128::from),
    }
}

/// Big-endian two's complement; `sign` stands for the first byte, which only marks the base.
/// Fields have at most twelve bytes, so nothing overflows.
fn base256(sign: i128, field: &[u8]) -> i128 {
    let digits = field.iter().skip(1);
    digits.fold(sign, |value, &byte| value << 8 | i128::from(byte))
}

/// The field without one leading NUL: a tar of unknown vintage wrote it when a number overflowed
/// the field before.
fn after_nul(field: &[u8]) -> &[u8] {
    field.strip_prefix(b"\0").unwrap_or(field)
}

/// Octal digits after blanks, up to a NUL, a blank, or the field's end. Nothing before a NUL is 0;
/// nothing but blanks is no number.
fn octal(field: &[u8]) -> Result<u64, NumberError> {
    let start = field.iter().position(|&byte| !is_blank(byte));
    let digits = start
        .and_then(|start| field.get(start..))
        .ok_or(NumberError::NotANumber)?;
    let mut value = 0_u64;
    for &byte in digits {
        match byte {
            b'0'..=b'7' => value = value << 3 | u64::from(byte - b'0'),
            0 => break,
            _ if is_blank(byte) => break,
            _ => return Err(NumberError::NotANumber),
        }
    }
    Ok(value)
}

/// C's `isspace`.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_base_64_make_no_sense() {
        for field in [b"+AAAAAAB", b"-AAAAAAB"] {
            assert!(number(field).is_err());
        }
    }

    #[test]
    fn octal_fields_end_at_a_blank_a_nul_or_their_end() {
        assert_eq!(octal(b"0001750\0"), Ok(0o1750));
        assert_eq!(octal(b"00001750"), Ok(0o1750));
        assert_eq!(octal(b"  1750 \0"), Ok(0o1750));
        assert_eq!(octal(b" 12 34\0"), Ok(0o12));
        assert_eq!(number(b"\x0012\0\0\0\0\0"), Ok(0o12));
        assert_eq!(octal(b"777777777777"), Ok((1 << 36) - 1));
    }

    #[test]
    fn an_empty_field_is_zero_but_one_of_blanks_is_no_number() {
        assert_eq!(octal(b"\0\0\0\0\0\0\0\0"), Ok(0));
        assert_eq!(octal(b"       \0"), Ok(0));
        assert_eq!(octal(b"        "), Err(NumberError::NotANumber));
        assert_eq!(octal(b"12q\0\0\0\0\0"), Err(NumberError::NotANumber));
        assert_eq!(octal(b"8"), Err(NumberError::NotANumber));
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

    fn summed(mut record: Record, signed: bool) -> Record {
        record[148..156].fill(b' ');
        let sum: i64 = record
            .iter()
            .map(|&byte| i64::from(byte) - if signed && byte > 127 { 256 } else { 0 })
            .sum();
        record[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        record
    }

    #[test]
    fn the_checksum_may_be_signed_or_unsigned() {
        let mut record = [0; RECORD_LEN];
        record[..5].copy_from_slice(b"n\xe4me!");
        record[200..212].fill(b'9');
        assert!(Header(&summed(record, false)).checksum_holds());
        assert!(Header(&summed(record, true)).checksum_holds());
        let mut off = summed(record, false);
        off[0] = b'm';
        assert!(!Header(&off).checksum_holds());
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
