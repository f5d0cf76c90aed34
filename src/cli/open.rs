//! From flags to a source, a scan's options, or an archive.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::runtime::Runtime;

use super::args::{CacheArgs, SavedArgs, SourceArgs};
use super::copy::Original;
use super::given::{self, Outer};
use super::headers::{self, Header};
use super::layers::{self, LayerArgs};
use super::mount::{MountArgs, Opened};
use super::output::{Progress, Task};
use super::part::Part;
use super::prefetch::Mode;
use super::telling::OfArchive;
use super::{privileges, settings};
use crate::archive::{Archive, WaitFor, IndexGuard, OpenOptions, DiskCacheMode, Callback, scan};
use crate::base::stats::Stats;
use crate::fetch;
use crate::image::{ImageRef, Transport};
use crate::index::MemoryLimit;
use crate::source::{self, Certificates, Fingerprint, Retry, Source};
use crate::layers::LayeredArchive;
use crate::tar;

/// The network's threads; everything else has threads of its own.
///
/// # Errors
/// When the system has no thread left to give.
pub(super) fn network() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("tarfs-net")
        .enable_all()
        .build()
        .context("cannot start the network's threads")
}

/// The archive at the path or URL that `args` name, with these headers and no others. If a process before this one
/// knew its version, see [`source::Options::known_version`].
///
/// # Errors
/// When it cannot be reached, or is none.
pub(super) fn source_with(
    headers: &[Header],
    args: &SourceArgs,
    known_version: Option<Fingerprint>,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Arc<dyn Source>> {
    let headers = headers.iter().cloned();
    let options = source::Options {
        headers: headers.map(|header| (header.name, header.value)).collect(),
        allow_insecure_redirects: args.allow_insecure_redirects,
        certificates: certificates(args.cacert.as_deref())?,
        known_version,
        connections: args.connections,
        timeout: Duration::from_secs(args.timeout),
        retry: retry(args),
        stats: Arc::clone(stats),
        ..source::Options::default()
    };
    let spec = args
        .source
        .to_str()
        .context("SOURCE is not UTF-8; rename it")?;
    anyhow::ensure!(!spec.is_empty(), "SOURCE is empty (name a path or a URL)");
    Ok(network.block_on(source::open(spec, options))?)
}

/// How stubborn a source is. Who gives a number means it.
fn retry(args: &SourceArgs) -> Retry {
    let usual = Retry::default();
    Retry {
        attempts: args
            .retries
            .map_or(usual.attempts, |retries| retries.saturating_add(1)),
        retries_outages: args.retries.is_none(),
        ..usual
    }
}

/// How the archive that `args` name is scanned.
pub(super) fn scan_options(args: &SourceArgs) -> scan::Options {
    scan::Options {
        compression: args.compression,
        tar: tar::Options {
            ignore_zeros: args.ignore_zeros,
            accepts_empty: false,
            limits: tar::Limits {
                entries: args.max_entries.unwrap_or(u64::MAX),
                metadata_bytes: tar::Limits::metadata_bytes_for(args.memory.0),
                ..tar::Limits::default()
            },
        },
        allow_truncated: args.allow_truncated,
        connections: args.connections,
        chunk_len: args.chunk_size.0,
        min_speed: fetch::MinSpeed {
            bytes_per_second: args.min_speed.0,
            wait: Duration::from_secs(args.min_speed_wait),
        },
        memory: LayerArgs::default().memory(args),
        workers: settings::processors(),
        // What is asked of an image is asked of its manifest, which speaks for the layers.
        sha256: args
            .expect_sha256
            .filter(|_| given::reference(args).is_none())
            .map_or(scan::Digest::Ignore, scan::Digest::Expect),
        ..scan::Options::default()
    }
}

/// How a verb opens SOURCE and what is laid over it.
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a setting of its own"
)]
#[derive(Debug)]
pub(super) struct Opening<'a> {
    pub source: &'a SourceArgs,
    pub layers: &'a LayerArgs,
    pub cache: &'a CacheArgs,
    /// What is to be done with decoded data.
    pub spooling: DiskCacheMode,
    /// Whether an index to be made may lack hashes of what nobody has to read for it.
    pub hops: bool,
    /// Whether an archive whose version nothing proves is scanned whatever was saved of it.
    pub should_rescan_unproven: bool,
    /// Whether members that are damaged or not in the tree are logged.
    pub should_log_problems: bool,
    /// Whether no progress is shown.
    pub quiet: bool,
}

/// What a verb has opened: one archive, or several as one tree.
#[derive(Debug)]
pub(super) enum Tree {
    Archive(Box<Archive>),
    LayeredArchive(LayeredArchive),
}

impl Tree {
    /// All of it.
    pub(super) fn index(&self) -> IndexGuard<'_> {
        match self {
            Self::Archive(archive) => archive.index(),
            Self::LayeredArchive(stack) => IndexGuard::Complete(stack.index()),
        }
    }
}

impl Opening<'_> {
    /// How each archive is opened.
    pub(super) fn options(&self) -> OpenOptions {
        let mut options = open_options(self.source, &self.cache.saved, self.spooling);
        options.scan.allow_skipping = self.hops;
        options.should_rescan_unproven = self.should_rescan_unproven;
        options.should_log_problems = self.should_log_problems;
        options
    }

    /// Whether it is several archives; see [`LayerArgs::make_a_stack`].
    ///
    /// # Errors
    /// When something is asked that several cannot do.
    fn is_of_layers(&self) -> anyhow::Result<bool> {
        let index = self.cache.saved.index.as_deref();
        self.layers.make_a_stack(self.source, index)
    }

    /// All of SOURCE and what is laid over it, with its index.
    ///
    /// # Errors
    /// When it cannot be opened, or is read from standard input, which gives it only once.
    pub(super) fn open(&self, network: &Runtime, stats: &Arc<Stats>) -> anyhow::Result<Tree> {
        privileges::guard(self.source, self.layers);
        let headers = headers::all(&self.source.headers)?;
        if self.is_of_layers()? {
            let outer = Outer::with(self.cache, self.quiet);
            let layers =
                layers::sources(self.source, self.layers, &headers, &outer, network, stats)?;
            let stack = layers::stack(&layers, self, network, stats)?;
            return Ok(Tree::LayeredArchive(stack));
        }
        if self.source.source == "-" {
            anyhow::bail!("standard input can only be materialized");
        }
        let outer = Outer {
            count: self.layers.outer_count(self.source),
            ..Outer::with(self.cache, self.quiet)
        };
        let source = given::source(&headers, self.source, &outer, network, stats)?;
        let _progress = indexing(source.fingerprint().len, stats, self.quiet);
        let archive = Archive::open(source, &self.options(), network.handle(), stats)?;
        Ok(Tree::Archive(Box::new(archive)))
    }
}

/// What a mount serves.
///
/// # Errors
/// When it cannot be opened.
pub(super) fn for_mount(args: &MountArgs, stats: Arc<Stats>) -> anyhow::Result<Opened> {
    let network = network()?;
    let headers = headers::all(&args.source.headers)?;
    let (source, layers) = (absolute(&args.source), layers::absolute(&args.layers));
    let has_terminal = io::stderr().is_terminal();
    let opening = Opening {
        source: &source,
        layers: &layers,
        cache: &args.cache,
        spooling: spooling(&args.cache),
        // What is fetched anyway had better be fetched while the scan goes by.
        hops: args.prefetch.prefetch != Mode::All,
        // The copy holds files of an earlier scan.
        should_rescan_unproven: args.copy_to.is_some(),
        should_log_problems: true,
        quiet: !(args.foreground || args.waits() && has_terminal),
    };
    if opening.is_of_layers()? {
        let opening = Opening {
            quiet: !(args.foreground || has_terminal),
            ..opening
        };
        let outer = Outer {
            shown_version: args.shown_version.clone(),
            ..Outer::with(&args.cache, opening.quiet)
        };
        let opened = layers::sources(&source, &layers, &headers, &outer, &network, &stats)?;
        return layers::for_mount(args, &opened, &opening, network, stats);
    }
    let outer = Outer {
        count: layers.outer_count(&source),
        shown_version: args.shown_version.clone(),
        ..Outer::with(&args.cache, opening.quiet)
    };
    let name = name(&source);
    let source = given::source(&headers, &source, &outer, &network, &stats)?;
    let progress = indexing(source.fingerprint().len, &stats, opening.quiet);
    let options = opening.options();
    if args.shown_version.is_some() {
        // Users wait, but the keeper does so as long as the source cannot be reached.
        options.scan.retry_forever.enable();
    }
    let archive = if args.waits() {
        Archive::open(source, &options, network.handle(), &stats)?
    } else {
        let archive = Archive::open_early(source, &options, network.handle(), &stats)?;
        // Nobody waits at a terminal any more, and the mount is there when the network comes back.
        options.scan.retry_forever.enable();
        archive
    };
    archive.on_available(WaitFor::End, Callback::new(move || drop(progress)));
    let archive = Arc::new(archive);
    let (recording, said) =
        super::prefetch::start(&args.prefetch, (&args.source, &headers), &archive, &network)?;
    Ok(Opened {
        name,
        location: archive.source().location().to_owned(),
        layers: Vec::new(),
        version: archive.source().fingerprint().to_string(),
        is_strong: archive.source().fingerprint().is_strong(),
        content: Arc::<Archive>::clone(&archive),
        stats,
        original: Original::of(&archive),
        telling: Box::new(OfArchive {
            archive,
            is_spooled: !args.cache.no_disk_cache,
            said,
        }),
        recording,
        network,
    })
}

/// What the kernel lists as the source of a mount of `args`, which are [absolute].
pub(super) fn name(args: &SourceArgs) -> String {
    source::redact(&args.source.to_string_lossy())
}

/// What is to be done with decoded data.
pub(super) fn spooling(cache: &CacheArgs) -> DiskCacheMode {
    if cache.no_disk_cache {
        return DiskCacheMode::Disabled;
    }
    DiskCacheMode::Enabled {
        limit_bytes: cache.cache_size.map(|size| size.0),
    }
}

/// Longest file of certificates that is read, in bytes.
const MAX_CERTIFICATES_LEN: u64 = 16 << 20;

/// The certificates in the file that --cacert names, if it is given.
fn certificates(file: Option<&Path>) -> anyhow::Result<Certificates> {
    let Some(path) = file else {
        return Ok(Certificates::default());
    };
    let read = || {
        let mut pem = Vec::new();
        let mut file = File::open(path)?.take(MAX_CERTIFICATES_LEN + 1);
        file.read_to_end(&mut pem).map(|_| pem)
    };
    let name = || format!("--cacert {}", path.display());
    let pem = read().with_context(name)?;
    if pem.len() as u64 > MAX_CERTIFICATES_LEN {
        bail!("{}: it is longer than {MAX_CERTIFICATES_LEN} bytes", name());
    }
    Certificates::from_pem(&pem).with_context(name)
}

/// The same source wherever the process goes: a mount leaves the directory it was started in, and
/// its status should name a path that everyone understands.
fn absolute(args: &SourceArgs) -> SourceArgs {
    SourceArgs {
        source: absolute_path(&args.source),
        cacert: args.cacert.as_ref().map(|path| {
            let absolute = std::path::absolute(path);
            absolute.unwrap_or_else(|_| path.clone())
        }),
        ..args.clone()
    }
}

/// The same source wherever the process goes.
pub(super) fn absolute_path(source: &OsString) -> OsString {
    let text = source.to_str();
    if let Some(part) = text.and_then(Part::parse) {
        return match absolute_path(&part.place.into()).into_string() {
            Ok(place) => Part { place, ..part }.to_string().into(),
            Err(_) => source.clone(),
        };
    }
    if let Some(mut reference) = text.and_then(ImageRef::parse) {
        let place = match reference.transport {
            // Which is refused as it is.
            Transport::Oci if reference.location.contains("://") => None,
            Transport::Oci => std::path::absolute(&reference.location).ok().map(Into::into),
            Transport::OciArchive | Transport::DockerArchive => {
                Some(absolute_path(&reference.location.clone().into()))
            }
        };
        if !reference.location.is_empty()
            && let Some(Ok(place)) = place.map(OsString::into_string)
        {
            reference.location = place;
        }
        let absolute = reference.to_string();
        // Below a directory with a colon in its name it would be read as another place.
        let is_same = ImageRef::parse(&absolute).as_ref() == Some(&reference);
        return if is_same {
            absolute.into()
        } else {
            source.clone()
        };
    }
    // Without its scheme a URL is not found, and the error should name it as it is.
    let is_path =
        text.is_none_or(|text| text != "-" && !text.contains("://") && !source::lacks_scheme(text));
    match std::path::absolute(source) {
        Ok(path) if is_path => path.into(),
        _ => source.clone(),
    }
}

/// Shows how the indexing of what has so many packed bytes goes, unless `quiet`.
pub(super) fn indexing(total_bytes: Option<u64>, stats: &Arc<Stats>, quiet: bool) -> Progress {
    let task = Task {
        verb: "indexing",
        total_bytes,
        stats: Arc::clone(stats),
    };
    Progress::start(task, quiet)
}

/// How the archive that the arguments name is opened.
pub(super) fn open_options(
    args: &SourceArgs,
    saved: &SavedArgs,
    spooling: DiskCacheMode,
) -> OpenOptions {
    OpenOptions {
        scan: scan_options(args),
        cache_dir: saved.place.directory().ok(),
        index_file: saved.index.clone(),
        index_memory: MemoryLimit::new(args.index_memory.0),
        should_rescan_unproven: false,
        should_log_problems: false,
        layer: None,
        disk_cache: spooling,
    }
}

#[cfg(test)]
mod tests {
    use super::super::args::tests::source;
    use super::*;

    #[test]
    fn what_an_archive_may_keep_grows_with_the_memory() {
        let kept = |flags: &[&str]| {
            let source = source(&[flags, &["a.tar"]].concat());
            scan_options(&source).tar.limits.metadata_bytes
        };
        assert_eq!(kept(&[]), tar::Limits::default().metadata_bytes);
        assert_eq!(kept(&["--memory=1GiB"]), 2 << 30);
    }
}
