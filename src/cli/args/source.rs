//! Location of the archive, and how to read it.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::Args;

use super::given::GivenArgs;
use super::heading;
use super::server::ServerArgs;
use super::size::{count_parser, seconds_parser, size_parser};
use tarfs::Sha256;
use tarfs::archive::scan::MIN_MEMORY;
use tarfs::codec::Compression;
use tarfs::image::Platform;
use tarfs::internal::size::Size;
use tarfs::locate::SourceSpec;
use tarfs::source::{CONNECTIONS, DEFAULT_CONNECTIONS, HeaderArg, RETRIES, TIMEOUT_SECONDS};

/// Location of the archive, and how to read it.
#[derive(Args, Clone, Debug)]
pub(crate) struct SourceArgs {
    // The first field, because each other field takes its argument out of those that were parsed.
    #[command(flatten)]
    pub given: GivenArgs,

    /// An archive or image: a path, a URL, or another form that `tarfs --help` lists
    #[arg(value_name = "SOURCE")]
    pub source: SourceSpec,

    /// Location whose host receives the headers, if it is not SOURCE.
    #[arg(skip)]
    pub headers_origin: Option<OsString>,

    /// Send this header to SOURCE's host, and to no other; @FILE reads headers from FILE, one per line
    ///
    /// Other users can list the arguments of a process, so secrets are safer in FILE. `TARFS_HEADERS` holds more
    /// headers or @FILE, one per line.
    #[arg(long = "header", value_name = "NAME: VALUE|@FILE", help_heading = heading::SOURCE)]
    pub headers: Vec<HeaderArg>,

    /// Follow redirects from https:// to http:// URLs [default: refuse them]
    #[arg(long, help_heading = heading::NETWORK, hide_short_help = true)]
    pub allow_insecure_redirects: bool,

    #[command(flatten)]
    pub server: ServerArgs,

    /// Endpoint of the object store [default: that of its own tools' variables, or the cloud's]
    #[arg(long, value_name = "URL", help_heading = heading::NETWORK, hide_short_help = true)]
    pub endpoint_url: Option<String>,

    /// Directory with the mirrors of registries: REGISTRY/hosts.toml, as for containerd
    #[arg(long, value_name = "DIR", default_value = tarfs::source::DEFAULT_HOSTS_DIR,
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub hosts_dir: PathBuf,

    /// Maximum number of concurrent requests
    ///
    /// tarfs sends fewer if more do not increase the throughput.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CONNECTIONS,
          value_parser = count_parser::<usize>(CONNECTIONS),
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub connections: usize,

    /// Maximum bytes of one request
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = size_parser(4096),
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub chunk_size: Size,

    /// Retry the rest of a request that is slower than SIZE bytes per second; 0 disables this
    #[arg(long, value_name = "SIZE", default_value = "64KiB",
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub min_speed: Size,

    /// Seconds over which --min-speed is measured; 0 disables it
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = seconds_parser(0..=86_400),
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub min_speed_wait: u64,

    /// Fail a read after this many seconds without progress
    ///
    /// Progress is at least 4 KiB per second. Retries and the pauses between them count.
    #[arg(long, value_name = "SECONDS", default_value_t = tarfs::source::DEFAULT_TIMEOUT.as_secs(),
          value_parser = seconds_parser(TIMEOUT_SECONDS),
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub timeout: u64,

    /// Maximum retries of a failed request [default: 4]
    ///
    /// Without this flag, tarfs retries for as long as --timeout allows if the archive is open already and
    /// its server is unreachable or busy.
    #[arg(long, value_name = "N", value_parser = count_parser::<u32>(RETRIES),
          help_heading = heading::NETWORK, hide_short_help = true)]
    pub retries: Option<u32>,

    /// Memory for buffers, decoders and cached data together, without the index
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = size_parser(MIN_MEMORY),
          help_heading = heading::LIMITS, hide_short_help = true)]
    pub memory: Size,

    /// Memory for the index of the archive or of all layers, in addition to --memory
    #[arg(long, value_name = "SIZE", default_value = "2GiB",
          help_heading = heading::LIMITS, hide_short_help = true)]
    pub index_memory: Size,

    /// Compression format: none, gzip, lz4, zstd, xz or bzip2 [default: detected]
    #[arg(long, value_name = "FORMAT", help_heading = heading::SOURCE, hide_short_help = true)]
    pub compression: Option<Compression>,

    /// Platform of an image, as OS/ARCH or OS/ARCH/VARIANT [default: this machine's]
    #[arg(long, value_name = "PLATFORM", help_heading = heading::SOURCE, hide_short_help = true)]
    pub platform: Option<Platform>,

    /// Fail unless SOURCE has this SHA-256, or an image this digest
    ///
    /// The digest is that of all bytes of SOURCE, as sha256sum prints it. `mount` shows nothing before the
    /// whole archive matches, unless a saved index was built with the same digest.
    #[arg(long, value_name = "HEX", help_heading = heading::SOURCE, hide_short_help = true)]
    pub expect_sha256: Option<Sha256>,

    /// Continue after zero records, as in concatenated archives
    #[arg(short = 'i', long, help_heading = heading::SOURCE, hide_short_help = true)]
    pub ignore_zeros: bool,

    /// Accept a truncated archive and use its readable part
    #[arg(long, help_heading = heading::SOURCE, hide_short_help = true)]
    pub allow_truncated: bool,

    /// Refuse an archive with more entries than this [default: no limit]
    #[arg(long, value_name = "N", value_parser = count_parser::<u64>(0..=u64::MAX),
          help_heading = heading::LIMITS, hide_short_help = true)]
    pub max_entries: Option<u64>,
}

impl SourceArgs {
    /// Location whose host receives the headers.
    pub(crate) fn origin(&self) -> &OsStr {
        let other = self.headers_origin.as_deref();
        other.unwrap_or_else(|| self.source.origin())
    }
}
