//! Flags that several verbs share, as given; nothing here has an effect.

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

/// Where the archive is and how to read it.
#[derive(Args, Clone, Debug)]
pub(super) struct SourceArgs {
    /// The archive: a path, file://, http:// or https:// URL; a file of another archive, as
    /// tar:SOURCE!/PATH, or bytes of something, as slice:START[+LEN]:SOURCE; or an image, as
    /// oci-archive:FILE[:TAG], docker-archive:FILE[:NAME] or oci:DIR[:TAG], where FILE may be a URL
    #[arg(value_name = "SOURCE")]
    pub source: OsString,

    #[arg(
        long = "header",
        help = "Send this header with every request to SOURCE's host (never to another); with @FILE \
                those in FILE, one a line, which no list of processes shows. TARFS_HEADERS holds more \
                of either, one a line",
        value_name = "NAME: VALUE|@FILE",
        help_heading = "Network"
    )]
    pub headers: Vec<HeaderArg>,

    /// Follow redirects from https:// to http:// URLs, which are refused otherwise
    #[arg(long, help_heading = "Network")]
    pub allow_insecure_redirects: bool,

    /// Trust the certificates in this PEM file besides the system's, also one that a server made for
    /// itself
    #[arg(long, value_name = "FILE", help_heading = "Network")]
    pub cacert: Option<PathBuf>,

    /// Requests in flight at once, at the most; as many are used as bring something
    #[arg(long, value_name = "N", default_value_t = crate::fetch::DEFAULT_CONNECTIONS,
          value_parser = count_parser::<usize>(1..=256), help_heading = "Network")]
    pub connections: usize,

    /// Bytes of one request, at the most
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "8MiB",
        value_parser = parse_chunk_size,
        help_heading = "Network"
    )]
    pub chunk_size: Size,

    /// Send a request again for the rest when it is slower than SIZE a second; 0 for never
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "64KiB",
        help_heading = "Network"
    )]
    pub min_speed: Size,

    /// Seconds over which --min-speed is measured; 0 for never
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 5,
        value_parser = seconds_parser(0..=86_400),
        help_heading = "Network"
    )]
    pub min_speed_wait: u64,

    /// Seconds without progress, which is 4 KiB a second, after which a read fails; repetitions and
    /// pauses count
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = crate::source::DEFAULT_TIMEOUT.as_secs(),
        value_parser = seconds_parser(1..=86_400),
        help_heading = "Network"
    )]
    pub timeout: u64,

    /// How often a request that failed is sent again [default: 4, and as long as --timeout allows
    /// when the server of an archive that was opened cannot be reached or says it is busy]
    #[arg(long, value_name = "N", value_parser = count_parser::<u32>(0..=1_000_000),
          help_heading = "Network")]
    pub retries: Option<u32>,

    /// Memory for buffers, decoders and cached data together; the index comes on top
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = parse_memory)]
    pub memory: Size,

    /// Memory for the index of the archive, or of all layers together, on top of --memory
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub index_memory: Size,

    /// The packed format, instead of recognising it: none, gzip, lz4, zstd, xz, bzip2
    #[arg(long, value_name = "FORMAT")]
    pub compression: Option<Compression>,

    /// Of an image take what is for this platform, OS/ARCH or OS/ARCH/VARIANT [default: this
    /// machine's]
    #[arg(long, value_name = "PLATFORM")]
    pub platform: Option<Platform>,

    /// Fail unless all bytes of SOURCE have this SHA-256, as sha256sum prints it; or an image this
    /// digest. `mount` shows nothing before the whole archive matched, unless a saved index was built
    /// with the same digest
    #[arg(long, value_name = "HEX")]
    pub expect_sha256: Option<Sha256>,

    /// Read on after zero records, as for concatenated archives
    #[arg(short = 'i', long)]
    pub ignore_zeros: bool,

    /// Take the readable part of an archive that ends too early
    #[arg(long)]
    pub allow_truncated: bool,

    /// Refuse an archive with more entries than this
    #[arg(long, value_name = "N", value_parser = count_parser::<u64>(0..=u64::MAX))]
    pub max_entries: Option<u64>,
}

/// Where the cache is.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheDirArgs {
    #[arg(
        long,
        value_name = "DIR",
        env = environment::CACHE_DIR,
        help = "Where indexes and decoded data are kept [default: $XDG_CACHE_HOME/tarfs, \
                ~/.cache/tarfs, or for the system /var/cache/tarfs]",
        help_heading = "Cache"
    )]
    pub cache_dir: Option<PathBuf>,
}

impl CacheDirArgs {
    /// The directory, whether it is there or not.
    ///
    /// # Errors
    /// When neither a flag nor the environment names one.
    pub(super) fn directory(&self) -> anyhow::Result<PathBuf> {
        match &self.cache_dir {
            Some(directory) => Ok(directory.clone()),
            None => environment::cache_dir(),
        }
    }
}

/// Where saved indexes are found.
#[derive(Args, Clone, Debug)]
pub(super) struct SavedIndexArgs {
    #[command(flatten)]
    pub cache_dir: CacheDirArgs,

    /// Use this index file instead of looking in the cache
    #[arg(long, value_name = "FILE", help_heading = "Cache")]
    pub index: Option<PathBuf>,
}

/// Where saved indexes and decoded data are kept.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheArgs {
    #[command(flatten)]
    pub saved: SavedIndexArgs,

    /// Disk that decoded data of all archives may take; what was used longest ago makes room
    /// [default: all but a tenth of the disk]
    #[arg(
        long,
        value_name = "SIZE",
        env = environment::CACHE_SIZE,
        help_heading = "Cache"
    )]
    pub cache_size: Option<Size>,

    /// Keep no decoded data on disk: what is not in memory is fetched and decoded again
    #[arg(long, help_heading = "Cache")]
    pub no_disk_cache: bool,
}

/// A number of bytes as people write it: `4096`, `64K`, `8MiB`, `1.5GB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    /// `K`, `M`, `G`, `T`, alone or as `KiB`, are powers of 1024; `KB` and so on of 1000.
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
            reason = "checked to lie in range; a fraction of a byte is no byte"
        )]
        Ok(Self(bytes as u64))
    }
}

/// The memory for buffers, decoders and cached data.
fn parse_memory(text: &str) -> Result<Size, String> {
    parse_size_at_least(MIN_MEMORY, text)
}

/// The bytes of one request.
fn parse_chunk_size(text: &str) -> Result<Size, String> {
    parse_size_at_least(MIN_CHUNK_LEN, text)
}

/// The shortest request that --chunk-size may ask for, in bytes.
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

/// A parser of whole seconds.
pub(super) fn seconds_parser(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| parse_whole_number(text, &range, " of seconds")
}

/// A parser of counts.
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

    /// What a command line with these words behind the program's name says of its SOURCE.
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
