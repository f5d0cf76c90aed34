//! Platforms of images: operating system, architecture and variant; pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Platform of an image, in Go's words, as the specification requires.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
pub struct Platform {
    /// `linux`, for instance.
    #[serde(default)]
    pub os: String,
    /// `amd64`, for instance.
    #[serde(default)]
    pub architecture: String,
    /// `v8`, for instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// Error: the text is no platform.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a platform is OS/ARCH or OS/ARCH/VARIANT, as linux/amd64 or linux/arm/v7")]
pub struct ParsePlatformError;

impl Platform {
    /// The platform of this machine.
    pub fn host() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "powerpc64" if cfg!(target_endian = "little") => "ppc64le",
            "powerpc64" => "ppc64",
            "loongarch64" => "loong64",
            other => other,
        };
        Self {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: None,
        }
    }

    /// How well `self` serves `wanted`: lower is better, `None` for not at all.
    ///
    /// A wanted variant must match exactly. Without one, the usual variant is best.
    pub fn distance(&self, wanted: &Self) -> Option<u8> {
        if self.os != wanted.os || self.architecture != wanted.architecture {
            return None;
        }
        let usual = match self.architecture.as_str() {
            "arm64" => Some("v8"),
            "arm" => Some("v7"),
            "amd64" => Some("v1"),
            _ => None,
        };
        let own = self.variant.as_deref().or(usual);
        match wanted.variant.as_deref() {
            Some(wanted) => (own == Some(wanted)).then_some(0),
            None if self.variant.is_none() => Some(0),
            None if own == usual => Some(1),
            None => Some(2),
        }
    }
}

impl FromStr for Platform {
    type Err = ParsePlatformError;

    fn from_str(text: &str) -> Result<Self, ParsePlatformError> {
        let mut words = text.split('/').map(str::to_owned);
        let (os, architecture) = (words.next(), words.next());
        let platform = Self {
            os: os.unwrap_or_default(),
            architecture: architecture.unwrap_or_default(),
            variant: words.next(),
        };
        let is_named = |word: &str| !word.is_empty();
        let is_complete = is_named(&platform.os)
            && is_named(&platform.architecture)
            && platform.variant.as_deref().is_none_or(is_named)
            && words.next().is_none();
        is_complete.then_some(platform).ok_or(ParsePlatformError)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        let mut variant = self.variant.iter();
        variant.try_for_each(|variant| write!(f, "/{variant}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn platform(text: &str) -> Platform {
        text.parse().expect("a platform")
    }

    #[test]
    fn platform_round_trips() {
        for text in ["linux/amd64", "linux/arm/v7"] {
            assert_eq!(platform(text).to_string(), text);
        }
        for wrong in [
            "",
            "linux",
            "linux/",
            "/amd64",
            "linux/arm/",
            "linux/arm/v7/x",
        ] {
            assert_eq!(
                wrong.parse::<Platform>(),
                Err(ParsePlatformError),
                "{wrong}"
            );
        }
    }

    #[test]
    fn requested_variant_is_exact_and_default_variant_is_preferred() {
        let distance = |own: &str, wanted: &str| platform(own).distance(&platform(wanted));
        assert_eq!(distance("linux/amd64", "linux/amd64"), Some(0));
        assert_eq!(distance("linux/amd64", "linux/arm64"), None);
        assert_eq!(distance("windows/amd64", "linux/amd64"), None);
        assert_eq!(distance("linux/arm/v7", "linux/arm"), Some(1));
        assert_eq!(distance("linux/arm/v5", "linux/arm"), Some(2));
        assert_eq!(distance("linux/arm/v5", "linux/arm/v7"), None);
        assert_eq!(distance("linux/arm64", "linux/arm64/v8"), Some(0));
        assert_eq!(distance("linux/arm64/v8", "linux/arm64"), Some(1));
        assert_eq!(distance("linux/amd64/v3", "linux/amd64"), Some(2));
    }
}
