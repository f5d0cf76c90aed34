//! SHA-256 digests, with which archives are published.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// SHA-256 digest, displayed as sha256sum(1) prints it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Sha256(pub [u8; 32]);

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Sha256 {
    /// Computes the digest of `bytes`.
    ///
    /// # Panics
    /// Never, because the digest always has 32 bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
        Self(digest.as_ref().try_into().expect("32 bytes"))
    }

    /// Parses `sha256:` and 64 digits in lower case, as images and registries write a digest.
    pub(crate) fn from_oci(text: &str) -> Option<Self> {
        let digest: Self = text.parse().ok()?;
        (text.strip_prefix("sha256:")? == digest.to_string()).then_some(digest)
    }
}

/// The text is not a SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a SHA-256 has 64 hexadecimal digits, as sha256sum prints it")]
pub struct ParseSha256Error;

impl FromStr for Sha256 {
    type Err = ParseSha256Error;

    /// Parses 64 hexadecimal digits, with an optional `sha256:` prefix.
    fn from_str(text: &str) -> Result<Self, ParseSha256Error> {
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        let (pairs, rest) = digits.as_chunks::<2>();
        let mut bytes = [0; 32];
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return Err(ParseSha256Error);
        }
        for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = nibble(high)? << 4 | nibble(low)?;
        }
        Ok(Self(bytes))
    }
}

fn nibble(digit: u8) -> Result<u8, ParseSha256Error> {
    let value = char::from(digit).to_digit(16).ok_or(ParseSha256Error)?;
    u8::try_from(value).map_err(|_| ParseSha256Error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256_round_trips_through_text() {
        let mut bytes = [0; 32];
        for (number, byte) in (0..).zip(&mut bytes) {
            *byte = number * 8 + 1;
        }
        let digest = Sha256(bytes);
        let text = digest.to_string();
        assert_eq!(text.len(), 64);
        assert!(text.starts_with("01091119"), "{text}");
        assert_eq!(text.parse(), Ok(digest));
        assert_eq!(text.to_uppercase().parse(), Ok(digest));
        assert_eq!(format!("sha256:{text}").parse(), Ok(digest));
        assert_eq!(Sha256::from_oci(&format!("sha256:{text}")), Some(digest));
        assert_eq!(Sha256::from_oci(&text), None);
    }

    #[test]
    fn malformed_sha256_is_rejected() {
        let good = Sha256([0xab; 32]).to_string();
        let wrong = [
            String::new(),
            good[1..].to_owned(),
            format!("{good}0"),
            format!("{good}00"),
            format!("g{}", &good[1..]),
            format!("+{}", &good[1..]),
            format!("md5:{good}"),
            format!("é{}", &good[2..]),
        ];
        for text in wrong {
            assert_eq!(text.parse::<Sha256>(), Err(ParseSha256Error), "{text}");
        }
    }
}
