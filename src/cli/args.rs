//! Flags shared by several verbs: parsed values without side effects.

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::environment;
use super::headers::HeaderArg;
use crate::archive::scan::MIN_MEMORY;
use crate::base::sha256::Sha256;
use crate::codec::Compression;
use crate::image::Platform;

/// Location of the archive, and how to read it.
#[derive(Args, Clone, Debug)]
pub(super) struct SourceArgs {
    /// The archive: a path, a file://, http:// or https:// URL, or an image
    ///
    /// Other forms: tar:SOURCE!/PATH is a file inside another archive. slice:START[+LEN]:SOURCE is a range
    /// of bytes of SOURCE. An image is oci-archive:FILE[:TAG], docker-archive:FILE[:NAME] or oci:DIR[:TAG],
    /// where FILE may be a URL.
    #[arg(value_name = "SOURCE")]
    pub source: OsString,

    #[arg(
        long = "header",
        help = "Send this header to SOURCE's host; @FILE reads headers from FILE, one per line",
        long_help = "Send this header with every request to SOURCE's host, and to no other; @FILE reads \
                     headers from FILE, one per line\n\n\
                     Other users can list the arguments of a process, so secrets are safer in FILE. \
                     TARFS_HEADERS holds more headers or @FILE, one per line.",
        value_name = "NAME: VALUE|@FILE",
        help_heading = "Network"
    )]
    pub headers: Vec<HeaderArg>,

    /// Follow redirects from https:// to http:// URLs [default: refuse them]
    #[arg(long, help_heading = "Network")]
    pub allow_insecure_redirects: bool,

    /// Also trust the certificates in this PEM file, for example a self-signed one
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub cacert: Option<PathBuf>,

    /// Maximum number of concurrent requests
    ///
    /// tarfs sends fewer if more do not increase the throughput.
    #[arg(long, value_name = "N", default_value_t = crate::fetch::DEFAULT_CONNECTIONS,
          value_parser = count_parser::<usize>(1..=256), help_heading = "Network")]
    pub connections: usize,

    /// Maximum bytes of one request
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "8MiB",
        value_parser = parse_chunk_size,
        help_heading = "Network"
    )]
    pub chunk_size: Size,

    /// Retry the rest of a request that is slower than SIZE bytes per second; 0 disables this
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64KiB",
        help_heading = "Network"
    )]
    pub min_speed: Size,

    /// Seconds over which --min-speed is measured; 0 disables it
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 5,
        value_parser = seconds_parser(0..=86_400),
        help_heading = "Network"
    )]
    pub min_speed_wait: u64,

    /// Fail a read after this many seconds without progress
    ///
    /// Progress is at least 4 KiB per second. Retries and the pauses between them count.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = crate::source::DEFAULT_TIMEOUT.as_secs(),
        value_parser = seconds_parser(1..=86_400),
        help_heading = "Network"
    )]
    pub timeout: u64,

    /// Maximum retries of a failed request [default: 4]
    ///
    /// Without this flag, tarfs retries for as long as --timeout allows if the archive is open already and
    /// its server is unreachable or busy.
    #[arg(long, value_name = "N", value_parser = count_parser::<u32>(0..=1_000_000),
          help_heading = "Network")]
    pub retries: Option<u32>,

    /// Memory for buffers, decoders and cached data together, without the index
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_memory)]
    pub memory: Size,

    /// Memory for the index of the archive or of all layers, in addition to --memory
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub index_memory: Size,

    /// Compression format: none, gzip, lz4, zstd, xz or bzip2 [default: detected]
    #[arg(long, value_name = "FORMAT")]
    pub compression: Option<Compression>,

    /// Platform of an image, as OS/ARCH or OS/ARCH/VARIANT [default: this machine's]
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<Platform>,

    /// Fail unless SOURCE has this SHA-256, or an image this digest
    ///
    /// The digest is that of all bytes of SOURCE, as sha256sum prints it. `mount` shows nothing before the
    /// whole archive matches, unless a saved index was built with the same digest.
    #[arg(long, value_name = "HEX")]
    pub expect_sha256: Option<Sha256>,

    /// Continue after zero records, as in concatenated archives
    #[arg(short = 'i', long)]
    pub ignore_zeros: bool,

    /// Accept a truncated archive and use its readable part
    #[arg(long)]
    pub allow_truncated: bool,

    /// Refuse an archive with more entries than this [default: no limit]
    #[arg(long, value_name = "N", value_parser = count_parser::<u64>(0..=u64::MAX))]
    pub max_entries: Option<u64>,
}

/// Location of the cache.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheDirArgs {
    #[arg(
        long,
        value_name = "DIR",
        env = environment::CACHE_DIR,
        help = "Directory for indexes and decoded data [default: $XDG_CACHE_HOME/tarfs, \
                ~/.cache/tarfs, or /var/cache/tarfs for system mounts]",
        help_heading = "Cache"
    )]
    pub cache_dir: Option<PathBuf>,
}

impl CacheDirArgs {
    /// Returns the cache directory, which may not exist yet.
    ///
    /// # Errors
    /// Neither a flag nor the environment names a directory.
    pub(super) fn directory(&self) -> anyhow::Result<PathBuf> {
        match &self.cache_dir {
            Some(directory) => Ok(directory.clone()),
            None => environment::cache_dir(),
        }
    }
}

/// Location of saved indexes.
#[derive(Args, Clone, Debug)]
pub(super) struct SavedIndexArgs {
    #[command(flatten)]
    pub cache_dir: CacheDirArgs,

    /// Use this index file instead of looking in the cache
    #[arg(long, value_name = "FILE", help_heading = "Cache")]
    pub index: Option<PathBuf>,
}

/// Location and size of the cache of indexes and decoded data.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheArgs {
    #[command(flatten)]
    pub saved: SavedIndexArgs,

    /// Maximum disk space for decoded data of all archives [default: leave 10 % of the disk free]
    ///
    /// The least recently used data is evicted first.
    #[arg(
        long,
        value_name = "SIZE",
        env = environment::CACHE_SIZE,
        help_heading = "Cache"
    )]
    pub cache_size: Option<Size>,

    /// Keep no decoded data on disk
    ///
    /// Data that is not in memory is fetched and decoded again.
    #[arg(long, help_heading = "Cache")]
    pub no_disk_cache: bool,
}

/// A number of bytes as users write it: `4096`, `64K`, `8MiB`, `1.5GB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// `K`, `M`, `G`, `T` and `KiB` and so on are powers of 1024; `KB` and so on are powers of 1000.
    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("'{text}' is not a size like 4096, 64K, 8MiB or 1.5GB");
        let end = text
            .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let unit = unit.trim().to_ascii_lowercase();
        let (exponent, base) = match unit.as_str() {
            "" | "b" => (0, 1024_f64),
            "k" | "kib" => (1, 1024.0),
            "m" | "mib" => (2, 1024.0),
            "g" | "gib" => (3, 1024.0),
            "t" | "tib" => (4, 1024.0),
            "kb" => (1, 1000.0),
            "mb" => (2, 1000.0),
            "gb" => (3, 1000.0),
            "tb" => (4, 1000.0),
            _ => return Err(invalid()),
        };
        let bytes = number * base.powi(exponent);
        if !(0.0..=9e18).contains(&bytes) {
            return Err(invalid());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the range is checked, and fractions of a byte are dropped"
        )]
        Ok(Self(bytes as u64))
    }
}

/// Parses --memory.
fn parse_memory(text: &str) -> Result<Size, String> {
    parse_size_at_least(MIN_MEMORY, text)
}

/// Parses --chunk-size.
fn parse_chunk_size(text: &str) -> Result<Size, String> {
    parse_size_at_least(MIN_CHUNK_LEN, text)
}

/// Minimum of --chunk-size, in bytes.
const MIN_CHUNK_LEN: u64 = 4096;

fn parse_size_at_least(min: u64, text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    if size.0 < min {
        let (min, unit) = match min {
            bytes if bytes.is_multiple_of(1 << 20) => (bytes >> 20, "MiB"),
            bytes => (bytes >> 10, "KiB"),
        };
        return Err(format!("the smallest valid value is {min}{unit}"));
    }
    Ok(size)
}

/// Returns a parser of whole seconds within `range`.
pub(super) fn seconds_parser(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| parse_whole_number(text, &range, " of seconds")
}

/// Returns a parser of whole numbers within `range`.
pub(super) fn count_parser<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let count = parse_whole_number(text, &range, "")?;
        T::try_from(count).map_err(|_| format!("{count} is too large"))
    }
}

fn parse_whole_number(text: &str, range: &RangeInclusive<u64>, unit: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    let (start, end) = (range.start(), range.end());
    number.ok_or_else(|| match *end {
        u64::MAX => format!(
            "expected a whole number{unit}, for example {}",
            start.max(&1)
        ),
        end => format!("expected a whole number{unit} from {start} to {end}"),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        source: SourceArgs,
    }

    /// Parses `words`, the arguments after the program's name.
    pub(in super::super) fn parse_source(words: &[&str]) -> SourceArgs {
        TestCommand::parse_from([&["tarfs"], words].concat()).source
    }

    #[test]
    fn size_below_minimum_is_rejected_with_the_minimum() {
        assert_eq!(parse_memory("32MiB"), Ok(Size(32 << 20)));
        let refused = parse_memory("31MiB").expect_err("too little");
        assert_eq!(refused, "the smallest valid value is 32MiB");
        let refused = parse_chunk_size("0").expect_err("nothing");
        assert_eq!(refused, "the smallest valid value is 4KiB");
    }

    #[test]
    fn number_out_of_range_is_rejected_with_the_range() {
        assert_eq!(seconds_parser(1..=60)("60"), Ok(60));
        for invalid in ["abc", "0", "61", "-1", "1.5", "", "99999999999999999999"] {
            let refused = seconds_parser(1..=60)(invalid).expect_err("out of range");
            assert_eq!(refused, "expected a whole number of seconds from 1 to 60");
        }
        let refused = count_parser::<u64>(0..=u64::MAX)("many").expect_err("no number");
        assert_eq!(refused, "expected a whole number, for example 1");
        assert!(count_parser::<u8>(0..=1000)("300").is_err());
    }

    #[test]
    fn size_with_unit_is_parsed() {
        let size = |text: &str| text.parse::<Size>().ok().map(|size| size.0);
        assert_eq!(size("4096"), Some(4096));
        assert_eq!(size("64K"), Some(65536));
        assert_eq!(size("8MiB"), Some(8 << 20));
        assert_eq!(size("1.5GB"), Some(1_500_000_000));
        for invalid in ["", "x", "1X", "-1", "1e99T", "99999999999999T"] {
            assert_eq!(size(invalid), None, "{invalid}");
        }
    }
}
