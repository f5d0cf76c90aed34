//! Detects formats by magic bytes.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::base::tar_checksum;

/// A compression format.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, thiserror::Error, Serialize, Deserialize)]
pub enum Compression {
    /// None: packed bytes are plain bytes.
    #[default]
    #[error("plain")]
    None,
    /// gzip (RFC 1952), any number of members.
    #[error("gzip")]
    Gzip,
    /// lz4 frames, modern and legacy.
    #[error("lz4")]
    Lz4,
    /// Zstandard (RFC 8878).
    #[error("zstd")]
    Zstd,
    /// xz.
    #[error("xz")]
    Xz,
    /// bzip2.
    #[error("bzip2")]
    Bzip2,
}

impl Compression {
    /// All formats, by their [codes](Self::code).
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::Gzip,
        Self::Lz4,
        Self::Zstd,
        Self::Xz,
        Self::Bzip2,
    ];

    /// Code in an index and in the journal of a run, which must not change.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The format with this [code](Self::code).
    pub fn from_code(code: u64) -> Option<Self> {
        let code = usize::try_from(code).ok()?;
        Self::ALL.get(code).copied()
    }
}

impl FromStr for Compression {
    type Err = UnknownCompression;

    /// Parses the output of [`Display`](std::fmt::Display) and the usual file name extensions.
    fn from_str(name: &str) -> Result<Self, UnknownCompression> {
        match name {
            "plain" | "none" => Ok(Self::None),
            "gzip" | "gz" => Ok(Self::Gzip),
            "lz4" => Ok(Self::Lz4),
            "zstd" | "zst" => Ok(Self::Zstd),
            "xz" => Ok(Self::Xz),
            "bzip2" | "bz2" => Ok(Self::Bzip2),
            _ => Err(UnknownCompression),
        }
    }
}

/// No [`Compression`] has this name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not one of plain, gzip, lz4, zstd, xz and bzip2")]
pub struct UnknownCompression;

/// The format of a source, from its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detected {
    /// A format that can be decoded.
    Supported(Compression),
    /// A format that is recognised and not supported, by name.
    Unsupported(&'static str),
    /// An encrypted file.
    Encrypted(Encryption),
    /// A web page.
    WebPage,
    /// A file that Git LFS has not replaced by its content yet.
    GitLfsPointer,
    /// Frames that lz4 and zstd skip, with so many bytes, after which the format is visible.
    Skippable(u64),
    /// Neither packed nor a tar archive, as far as known.
    Unknown,
}

/// How a file is encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Encryption {
    /// A message of `OpenPGP` (RFC 9580), binary or in ASCII armor.
    #[error("OpenPGP")]
    OpenPgp,
    /// Output of `openssl enc`.
    #[error("OpenSSL")]
    OpenSsl,
    /// Output of `openssl enc -a`, which is base64.
    #[error("OpenSSL")]
    OpenSslBase64,
    /// A file of age, binary or in ASCII armor.
    #[error("age")]
    Age,
}

impl Encryption {
    /// The command that decrypts such a file.
    pub fn decrypt_command(self) -> &'static str {
        match self {
            Self::OpenPgp => "gpg --decrypt",
            Self::OpenSsl => "openssl enc -d",
            Self::OpenSslBase64 => "openssl enc -d -a",
            Self::Age => "age --decrypt",
        }
    }
}

/// Bytes that [`detect`] needs: one tar record.
pub(crate) const DETECT_LEN: usize = 512;

/// Magics at the start of a file, in any order, because none is a prefix of another.
const MAGICS: [(&[u8], Detected); 26] = [
    (b"\x1f\x8b", Detected::Supported(Compression::Gzip)),
    (b"\x04\x22\x4d\x18", Detected::Supported(Compression::Lz4)),
    (b"\x02\x21\x4c\x18", Detected::Supported(Compression::Lz4)),
    (b"\x28\xb5\x2f\xfd", Detected::Supported(Compression::Zstd)),
    (b"\xfd7zXZ\0", Detected::Supported(Compression::Xz)),
    (b"LZIP", Detected::Unsupported("lzip")),
    (b"\x1f\x9d", Detected::Unsupported("compress (.Z)")),
    (b"\x89LZO\0\r\n\x1a\n", Detected::Unsupported("lzop")),
    (b"PK\x03\x04", Detected::Unsupported("zip")),
    (b"PK\x05\x06", Detected::Unsupported("zip")),
    (b"7z\xbc\xaf\x27\x1c", Detected::Unsupported("7-Zip")),
    (b"Rar!\x1a\x07", Detected::Unsupported("RAR")),
    (b"070701", Detected::Unsupported("cpio")),
    (b"070702", Detected::Unsupported("cpio")),
    (b"070707", Detected::Unsupported("cpio")),
    (b"\xc7\x71", Detected::Unsupported("cpio")),
    (b"\xed\xab\xee\xdb", Detected::Unsupported("RPM")),
    (
        b"!<arch>\ndebian",
        Detected::Unsupported("a Debian package"),
    ),
    (b"hsqs", Detected::Unsupported("squashfs")),
    (b"sqsh", Detected::Unsupported("squashfs")),
    (
        b"version https://git-lfs.github.com/",
        Detected::GitLfsPointer,
    ),
    (
        b"-----BEGIN PGP MESSAGE-----",
        Detected::Encrypted(Encryption::OpenPgp),
    ),
    (b"Salted__", Detected::Encrypted(Encryption::OpenSsl)),
    (
        b"U2FsdGVkX1",
        Detected::Encrypted(Encryption::OpenSslBase64),
    ),
    (b"age-encryption.org/", Detected::Encrypted(Encryption::Age)),
    (
        b"-----BEGIN AGE ENCRYPTED FILE-----",
        Detected::Encrypted(Encryption::Age),
    ),
];

/// Detects a format by the first bytes, `DETECT_LEN` of them or all there are.
///
/// A tar header has priority, because a member's name may begin with a magic. All zeros are an empty archive,
/// and no bytes at all are [`Detected::Unknown`].
pub fn detect(first: &[u8]) -> Detected {
    if is_tar(first) {
        return Detected::Supported(Compression::None);
    }
    if let Some(&(_, detected)) = MAGICS.iter().find(|(magic, _)| first.starts_with(magic)) {
        return detected;
    }
    match first {
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Detected::Supported(Compression::Bzip2),
        [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => detect_after_skippable_frames(first),
        _ if is_lzma(first) => Detected::Unsupported("lzma"),
        _ if is_openpgp(first) => Detected::Encrypted(Encryption::OpenPgp),
        _ if is_web_page(first) => Detected::WebPage,
        _ => Detected::Unknown,
    }
}

/// The format of the frame after skippable ones; lz4 and zstd share those. zstd if there is none, because pzstd
/// begins its files so, and no known writer of lz4 does.
fn detect_after_skippable_frames(first: &[u8]) -> Detected {
    let mut start = 0_u64;
    loop {
        let at = usize::try_from(start).unwrap_or(usize::MAX);
        match first.get(at..) {
            Some(&[0x50..=0x5f, 0x2a, 0x4d, 0x18, l0, l1, l2, l3, ..]) => {
                start += 8 + u64::from(u32::from_le_bytes([l0, l1, l2, l3]));
            }
            Some([0x04, 0x22, 0x4d, 0x18, ..] | [0x02, 0x21, 0x4c, 0x18, ..]) => {
                return Detected::Supported(Compression::Lz4);
            }
            Some(magic) if magic.len() >= 4 || start == 0 => {
                return Detected::Supported(Compression::Zstd);
            }
            _ => return Detected::Skippable(start),
        }
    }
}

/// Whether this is an `.lzma` header, which has no magic: properties (always 0x5d in practice), a dictionary
/// of 2^n or 2^n + 2^(n-1) bytes, and a length, unknown or below 256 GiB, as in liblzma.
fn is_lzma(first: &[u8]) -> bool {
    let [0x5d, d0, d1, d2, d3, l0, l1, l2, l3, l4, l5, l6, l7, ..] = *first else {
        return false;
    };
    let dictionary = u32::from_le_bytes([d0, d1, d2, d3]);
    let top_bits = dictionary.unbounded_shl(dictionary.leading_zeros());
    let len = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
    (top_bits == 1 << 31 || top_bits == 3 << 30 || dictionary == u32::MAX)
        && (len == u64::MAX || len < 1 << 38)
}

/// Whether this is an `OpenPGP` message with a session key for a public key (tag 1) or a password (tag 3).
fn is_openpgp(first: &[u8]) -> bool {
    let Some((&header, rest)) = first.split_first() else {
        return false;
    };
    // The two formats of packet headers (RFC 9580, 4.2), and how many bytes of length follow.
    let (tag, len_size) = match (header, rest.first()) {
        (0x80..=0xbf, _) if header & 3 < 3 => (header >> 2 & 0xf, 1 << (header & 3)),
        (0xc0..=0xff, Some(..=191)) => (header & 0x3f, 1),
        (0xc0..=0xff, Some(192..=223)) => (header & 0x3f, 2),
        (0xc0..=0xff, Some(255)) => (header & 0x3f, 5),
        _ => return false,
    };
    let Some(body) = rest.get(len_size..) else {
        return false;
    };
    match tag {
        // Version, key ID, algorithm; or version, length and version of a fingerprint.
        1 => matches!(
            body,
            [3, _, _, _, _, _, _, _, _, 1 | 2 | 16 | 18 | 25 | 26, ..] | [6, 21 | 33, 4 | 6, ..]
        ),
        // Version, cipher, key derivation; or with a mode of encryption in between.
        3 => matches!(
            body,
            [4, 1..=13, 0 | 1 | 3 | 4, 1..=14, ..]
                | [5, 1..=13, 1..=3, 0 | 1 | 3 | 4, ..]
                | [6, _, 1..=13, 1..=3, ..]
        ),
        _ => false,
    }
}

fn is_web_page(first: &[u8]) -> bool {
    let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
    let first = first.trim_ascii_start();
    [&b"<!doctype html"[..], b"<html"].iter().any(|tag| {
        let begins = first.get(..tag.len());
        begins.is_some_and(|begins| begins.eq_ignore_ascii_case(tag))
    })
}

/// Whether this is tar, even empty. If the checksum is wrong, the magic decides, and the parser reports it.
fn is_tar(first: &[u8]) -> bool {
    let magic = first
        .get(257..)
        .is_some_and(|rest| rest.starts_with(b"ustar"));
    let zeros = !first.is_empty() && first.iter().all(|&byte| byte == 0);
    magic || zeros || first.get(..512).is_some_and(tar_checksum::is_valid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: Detected = Detected::Supported(Compression::None);
    const LZ4: Detected = Detected::Supported(Compression::Lz4);
    const ZSTD: Detected = Detected::Supported(Compression::Zstd);

    /// A v7 header: no magic, but a checksum.
    fn v7(name: &[u8]) -> [u8; 512] {
        let mut record = [0; 512];
        record[..name.len()].copy_from_slice(name);
        record[100..108].copy_from_slice(b"0000644\0");
        record[148..156].copy_from_slice(b"        ");
        let sum: u32 = record.iter().map(|&byte| u32::from(byte)).sum();
        record[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        record
    }

    fn skippable(len: usize, next: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x50\x2a\x4d\x18".to_vec();
        bytes.extend_from_slice(&u32::try_from(len).expect("short").to_le_bytes());
        bytes.resize(bytes.len() + len, 7);
        bytes.extend_from_slice(next);
        bytes
    }

    #[test]
    fn codes_of_formats_are_those_of_version_8_of_the_index() {
        let codes = ["plain", "gzip", "lz4", "zstd", "xz", "bzip2"];
        for (code, name) in (0..).zip(codes) {
            let format: Compression = name.parse().expect("known");
            assert_eq!(format.code(), code);
            assert_eq!(Compression::from_code(code.into()), Some(format));
        }
        assert_eq!(Compression::from_code(6), None);
        assert_eq!(Compression::from_code(u64::MAX), None);
    }

    // Promises: format-detected, format-override
    #[test]
    fn every_magic_is_recognised_and_none_is_a_prefix_of_another() {
        for (number, (magic, detected)) in MAGICS.iter().enumerate() {
            assert_eq!(detect(magic), *detected);
            let others = MAGICS
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != number);
            assert!(
                others
                    .into_iter()
                    .all(|(_, (other, _))| !other.starts_with(magic))
            );
        }
        assert_eq!(detect(b"BZh9"), Detected::Supported(Compression::Bzip2));
        assert_eq!(detect(b"BZh0"), Detected::Unknown);
    }

    // Promises: format-error
    #[test]
    fn lzma_is_recognised_without_a_magic() {
        let lzma = b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff\0";
        assert_eq!(detect(lzma), Detected::Unsupported("lzma"));
        assert_eq!(
            detect(b"]\x01\x02\x03\x04 text that begins so"),
            Detected::Unknown
        );
    }

    // Promises: format-error
    #[test]
    fn web_pages_are_recognised() {
        for page in ["<!DOCTYPE html>", "\u{feff}\n <html lang=en>"] {
            assert_eq!(detect(page.as_bytes()), Detected::WebPage, "{page}");
        }
    }

    // Promises: format-error
    #[test]
    fn openpgp_messages_are_recognised_by_their_first_packet() {
        let encrypted = Detected::Encrypted(Encryption::OpenPgp);
        for packet in [
            &b"\x8c\x0d\x04\x09\x03\x02\xbe\x28"[..],
            b"\xc3\x0d\x04\x09\x03\x08\xbe\x28",
            b"\x84\x5e\x03\x91\x11\x7f\xa1\x21\x0b\x10\x6e\x12\x01\x07",
            b"\xc1\xc0\x4c\x03\x91\x11\x7f\xa1\x21\x0b\x10\x6e\x01\x07",
            b"\xc1\xff\0\0\x01\x0c\x03\x91\x11\x7f\xa1\x21\x0b\x10\x6e\x01\x07",
        ] {
            assert_eq!(detect(packet), encrypted, "{packet:x?}");
            for len in 0..6 {
                assert_eq!(detect(&packet[..len.min(packet.len())]), Detected::Unknown);
            }
        }
        for other in [
            &b"\x8c\x0d\x04\x63\x03\x02"[..],
            b"\x8f\x04\x09\x03\x02",
            b"\x84\x5e\x02",
        ] {
            assert_eq!(detect(other), Detected::Unknown, "{other:x?}");
        }
    }

    // Promises: format-detected
    #[test]
    fn frame_after_skippable_frames_decides_the_format() {
        let lz4 = b"\x04\x22\x4d\x18";
        assert_eq!(detect(&skippable(4, lz4)), LZ4);
        assert_eq!(
            detect(&skippable(0, &skippable(9, b"\x02\x21\x4c\x18"))),
            LZ4
        );
        assert_eq!(detect(&skippable(4, b"\x28\xb5\x2f\xfd")), ZSTD);
        let hidden = Detected::Skippable(1008);
        assert_eq!(detect(&skippable(1000, lz4)[..DETECT_LEN]), hidden);
        assert_eq!(detect(&skippable(1000, b"\x28\xb5")), hidden);
        assert_eq!(detect(&skippable(0, b"")), Detected::Skippable(8));
        assert_eq!(detect(&skippable(0, lz4)[..7]), ZSTD);
    }

    // Promises: format-detected
    #[test]
    fn tar_headers_of_every_format_are_plain() {
        assert_eq!(detect(&v7(b"file")), PLAIN);
        let mut ustar = v7(b"file");
        ustar[257..262].copy_from_slice(b"ustar");
        assert_eq!(detect(&ustar), PLAIN, "with a wrong checksum too");
        assert_eq!(detect(&v7(b"BZh9")), PLAIN, "a name may look like a magic");
    }

    // Promises: format-checksum-field
    #[test]
    fn bytes_after_the_checksum_do_not_hide_an_archive() {
        let mut record = v7(b"file");
        record[155] = b'X';
        assert_eq!(detect(&record), PLAIN);
    }

    // Promises: format-error
    #[test]
    fn zeros_are_an_empty_archive_and_no_bytes_are_unknown() {
        assert_eq!(detect(&[0; 512]), PLAIN);
        assert_eq!(detect(b""), Detected::Unknown);
        assert_eq!(detect(b"<!DOCTYPE text>"), Detected::Unknown);
        assert_eq!(detect(&[b'x'; 512]), Detected::Unknown);
    }

    #[test]
    fn compression_names_round_trip() {
        for name in ["plain", "gzip", "lz4", "zstd", "xz", "bzip2"] {
            let compression: Compression = name.parse().expect("a name");
            assert_eq!(compression.to_string(), name);
        }
        assert_eq!("none".parse(), Ok(Compression::None));
        assert_eq!("gz".parse(), Ok(Compression::Gzip));
        assert_eq!("zst".parse(), Ok(Compression::Zstd));
        assert_eq!("bz2".parse(), Ok(Compression::Bzip2));
        assert_eq!("lzma".parse::<Compression>(), Err(UnknownCompression));
    }

    proptest! {
        #[test]
        fn magic_is_recognised_whatever_follows(rest in prop::collection::vec(any::<u8>(), 0..600)) {
            for (magic, detected) in MAGICS {
                prop_assert_eq!(detect(&[magic, &rest].concat()), detected);
            }
            // Nothing else begins with a skippable frame.
            let skippable = detect(&[b"\x5a\x2a\x4d\x18", &rest[..]].concat());
            let is_hidden = matches!(skippable, Detected::Skippable(8..));
            prop_assert!(is_hidden || [LZ4, ZSTD].contains(&skippable), "{:?}", skippable);
        }
    }
}
