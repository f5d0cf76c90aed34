//! Checksum of a tar header, which identifies archives and verifies headers.

const HEADER_LEN: usize = 512;

const CHECKSUM_FIELD: std::ops::Range<usize> = 148..156;

/// Whether `header` is a complete header with a correct checksum. The sum is over all bytes, with the
/// checksum field as blanks. Some old programs summed signed bytes.
pub(crate) fn is_valid(header: &[u8]) -> bool {
    let Some(field) = header
        .get(CHECKSUM_FIELD)
        .filter(|_| header.len() == HEADER_LEN)
    else {
        return false;
    };
    let Some(recorded) =
        parse_octal(strip_leading_nul(field)).and_then(|sum| i64::try_from(sum).ok())
    else {
        return false;
    };
    let sum = sum(header) - sum(field) + sum(&[b' '; 8]);
    recorded == sum || recorded == sum - 256 * (count_negative(header) - count_negative(field))
}

fn sum(bytes: &[u8]) -> i64 {
    bytes.iter().map(|&byte| i64::from(byte)).sum()
}

fn count_negative(bytes: &[u8]) -> i64 {
    bytes.iter().map(|&byte| i64::from(byte >> 7)).sum()
}

/// Strips one leading NUL, which an unknown old tar wrote when the number before overflowed its field.
pub(crate) fn strip_leading_nul(field: &[u8]) -> &[u8] {
    field.strip_prefix(b"\0").unwrap_or(field)
}

/// Parses octal digits after blanks, up to a NUL, a blank, or the field's end. Later bytes are ignored, as in
/// GNU tar. No digits before a NUL mean 0. `None` without digits.
pub(crate) fn parse_octal(field: &[u8]) -> Option<u64> {
    let start = field.iter().position(|&byte| !is_blank(byte))?;
    let mut value = 0_u64;
    for &byte in field.get(start..)? {
        match byte {
            b'0'..=b'7' => value = value << 3 | u64::from(byte - b'0'),
            0 => break,
            _ if is_blank(byte) => break,
            _ => return None,
        }
    }
    Some(value)
}

/// C's `isspace`.
fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header_with_checksum(signed: bool, written: impl Fn(i64) -> Vec<u8>) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[..5].copy_from_slice(b"n\xe4me!");
        header[200..212].fill(b'9');
        header[CHECKSUM_FIELD].fill(b' ');
        let own = |&byte: &u8| i64::from(byte) - if signed && byte > 127 { 256 } else { 0 };
        let field = written(header.iter().map(own).sum());
        header[CHECKSUM_FIELD][..field.len()].copy_from_slice(&field);
        header
    }

    #[test]
    fn checksum_may_be_signed_or_unsigned() {
        let usual = |sum| format!("{sum:06o}\0 ").into_bytes();
        for signed in [false, true] {
            let mut header = header_with_checksum(signed, usual);
            assert!(is_valid(&header), "{signed}");
            header[0] = b'm';
            assert!(!is_valid(&header), "{signed}");
        }
        assert!(
            !is_valid(&header_with_checksum(false, usual)[..511]),
            "a part of a header"
        );
    }

    #[test]
    fn checksum_ends_at_its_terminator() {
        let ends: [&[u8]; 5] = [b"\0 ", b"\0X", b" 7", b"\0\xff", b" \0"];
        for end in ends {
            let header =
                header_with_checksum(false, |sum| [format!("{sum:06o}").as_bytes(), end].concat());
            assert!(is_valid(&header), "{end:?}");
        }
        let digits = header_with_checksum(false, |sum| format!("{sum:06o}X ").into_bytes());
        assert!(!is_valid(&digits), "no terminator");
    }

    #[test]
    fn octal_fields_end_at_a_blank_a_nul_or_their_end() {
        assert_eq!(parse_octal(b"0001750\0"), Some(0o1750));
        assert_eq!(parse_octal(b"00001750"), Some(0o1750));
        assert_eq!(parse_octal(b"  1750 \0"), Some(0o1750));
        assert_eq!(parse_octal(b" 12 34\0"), Some(0o12));
        assert_eq!(parse_octal(b"777777777777"), Some((1 << 36) - 1));
    }

    #[test]
    fn empty_octal_field_is_zero_and_blank_one_is_invalid() {
        assert_eq!(parse_octal(b"\0\0\0\0\0\0\0\0"), Some(0));
        assert_eq!(parse_octal(b"       \0"), Some(0));
        for field in [&b"        "[..], b"12q\0\0\0\0\0", b"8", b""] {
            assert_eq!(parse_octal(field), None);
        }
    }
}
