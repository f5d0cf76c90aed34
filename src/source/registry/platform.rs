//! Platforms of images: operating system, architecture and variant; pure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::bounded_serde::null_as_default;

/// Platform of an image, in Go's words, as the specification requires.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
pub struct Platform {
    /// `linux`, for instance.
    #[serde(default, deserialize_with = "null_as_default")]
    pub os: String,
    /// `amd64`, for instance.
    #[serde(default, deserialize_with = "null_as_default")]
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
    /// A processor also runs programs for lower variants of its architecture, as in containerd. Without a wanted
    /// variant the usual one is best, and others are better than none.
    pub fn distance(&self, wanted: &Self) -> Option<u8> {
        let (own, wanted) = (self.normalized(), wanted.normalized());
        if own.os != wanted.os || own.architecture != wanted.architecture {
            return None;
        }
        let usual = match own.architecture.as_str() {
            "arm64" => Some("v8"),
            "arm" => Some("v7"),
            "amd64" => Some("v1"),
            _ => None,
        };
        let variant = own.variant.as_deref().or(usual);
        let best = wanted.variant.as_deref().or(usual);
        let other = wanted.variant.is_none().then_some(u8::MAX);
        match (level(variant), level(best)) {
            _ if variant == best => Some(0),
            (Some(level), Some(best)) if level < best => Some(best - level),
            _ => other,
        }
    }

    /// The platform in the words of Go, as containerd translates those of other programs.
    fn normalized(&self) -> Self {
        let os = self.os.to_ascii_lowercase();
        let architecture = self.architecture.to_ascii_lowercase();
        let (architecture, usual) = match architecture.as_str() {
            "i386" | "i686" | "x86" => ("386", None),
            "x86_64" | "x86-64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "armhf" => ("arm", Some("v7")),
            "armel" => ("arm", Some("v6")),
            other => (other, None),
        };
        let variant = self
            .variant
            .as_deref()
            .filter(|variant| !variant.is_empty());
        let variant = variant.map(|variant| {
            let variant = variant.to_ascii_lowercase();
            let is_number = variant.bytes().all(|byte| byte.is_ascii_digit());
            if is_number {
                format!("v{variant}")
            } else {
                variant
            }
        });
        Self {
            os: if os == "macos" {
                "darwin".to_owned()
            } else {
                os
            },
            architecture: architecture.to_owned(),
            variant: variant.or_else(|| usual.map(str::to_owned)),
        }
    }
}

/// The number of a variant such as `v7`.
fn level(variant: Option<&str>) -> Option<u8> {
    variant?.strip_prefix('v')?.parse().ok()
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

    // Promises: image-platform
    #[test]
    fn lower_variants_and_other_names_of_a_platform_are_served() {
        let distance = |own: &str, wanted: &str| platform(own).distance(&platform(wanted));
        assert_eq!(distance("linux/amd64", "linux/amd64"), Some(0));
        assert_eq!(distance("linux/amd64", "linux/arm64"), None);
        assert_eq!(distance("windows/amd64", "linux/amd64"), None);
        assert_eq!(distance("linux/arm/v7", "linux/arm"), Some(0));
        assert_eq!(distance("linux/arm/v6", "linux/arm"), Some(1));
        assert_eq!(distance("linux/arm/v5", "linux/arm/v7"), Some(2));
        assert_eq!(distance("linux/arm/v7", "linux/arm/v5"), None);
        assert_eq!(distance("linux/arm/v8", "linux/arm"), Some(u8::MAX));
        assert_eq!(distance("linux/arm64", "linux/arm64/v8"), Some(0));
        assert_eq!(distance("linux/arm64/v8", "linux/arm64"), Some(0));
        assert_eq!(distance("linux/amd64/v3", "linux/amd64"), Some(u8::MAX));
        assert_eq!(distance("linux/amd64/v1", "linux/amd64/v3"), Some(2));
        for (other, name) in [
            ("linux/aarch64", "linux/arm64"),
            ("Linux/X86_64", "linux/amd64"),
            ("linux/x86-64", "linux/amd64"),
            ("linux/armhf", "linux/arm/v7"),
            ("linux/armel", "linux/arm/v6"),
            ("linux/arm/7", "linux/arm/v7"),
            ("linux/i386", "linux/386"),
            ("macOS/arm64", "darwin/arm64"),
        ] {
            assert_eq!(distance(name, other), Some(0), "{other}");
            assert_eq!(distance(other, name), Some(0), "{other}");
        }
        assert_eq!(
            distance("linux/mips/softfloat", "linux/mips"),
            Some(u8::MAX)
        );
        assert_eq!(distance("linux/mips/softfloat", "linux/mips/x"), None);
    }
}
