//! The mount of several layers as one tree.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use bytes::Bytes;
use tokio::runtime::Runtime;

use super::args::{LayerArgs, MountArgs, SourceArgs};
use super::open_archive::{self, OpenRequest};
use super::resolve::{self, OuterArchiveOptions};
use crate::cli::args::headers::Header;
use crate::cli::commands::copy::CopySource;
use crate::cli::commands::mount::OpenedArchive;
use crate::cli::daemon::prefetch;
use crate::cli::daemon::status_source::LayeredStatus;
use tarfs::archive::scan::Digest;
use tarfs::base::stats::Stats;
use tarfs::layers::{Layer, LayeredArchive};
use tarfs::source::{self, MemorySource};

/// Maximum number of layers of one tree, including those of images.
const MAX_LAYERS: usize = 1000;

impl LayerArgs {
    /// Whether `source` is opened as layers; an image always is, because of its whiteouts.
    ///
    /// # Errors
    /// A flag for a single archive, such as `index`, is given for an image.
    pub(crate) fn is_layered(
        &self,
        source: &SourceArgs,
        index: Option<&Path>,
    ) -> anyhow::Result<bool> {
        resolve::reject_single_archive_flags(source, index)?;
        Ok(self.is_set() || resolve::image_reference(source).is_some())
    }

    /// Number of archives around `source` and around its layers.
    pub(crate) fn outer_archive_count(&self, source: &SourceArgs) -> u64 {
        let names = std::iter::once(&source.source).chain(&self.layers);
        names.map(|name| resolve::outer_archive_count(name)).sum()
    }

    /// Returns the memory for `source` and its layers, without that for the archives around them.
    pub(crate) fn memory_budget(&self, source: &SourceArgs) -> u64 {
        resolve::memory_without_outer(source.memory.0, self.outer_archive_count(source))
    }
}

/// Opens SOURCE and its layers, from the bottom, with all layers of each image.
///
/// Sends `headers` to SOURCE's host and to no other.
///
/// # Errors
/// A layer is unreachable or of the wrong kind.
pub(crate) fn open_sources(
    args: &SourceArgs,
    layers: &LayerArgs,
    headers: &[Header],
    outer: &OuterArchiveOptions,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<Vec<Layer>> {
    let names = || std::iter::once(&args.source).chain(&layers.layers);
    ensure!(
        names().filter(|name| *name == "-").count() < 2,
        "standard input can only be one of the layers"
    );
    let outer = &OuterArchiveOptions {
        count: layers.outer_archive_count(args),
        ..outer.clone()
    };
    let mut opened = Vec::new();
    for (number, name) in names().enumerate() {
        let is_ours = number == 0 || is_same_host(&args.source, name);
        let args = SourceArgs {
            source: name.clone(),
            expect_sha256: args.expect_sha256.filter(|_| number == 0),
            ..args.clone()
        };
        let headers = if is_ours { headers } else { &[] };
        // The digest of an image is that of its manifest, which contains those of its layers.
        let digest = open_archive::scan_options(&args).sha256;
        let sources = resolve::open_layers(headers, &args, outer, network, stats)?;
        opened.extend(sources.into_iter().map(|source| Layer { source, digest }));
    }
    ensure!(
        opened.len() <= MAX_LAYERS,
        "{} layers are more than the {MAX_LAYERS} that one tree can have",
        opened.len()
    );
    if opened.is_empty() {
        // An image without layers is an empty tree, like an image with one empty layer.
        let source = Arc::new(MemorySource::new("an image without layers", Bytes::new()));
        let digest = Digest::Ignore;
        opened.push(Layer { source, digest });
    }
    Ok(opened)
}

/// Whether `other` has the same host as `source`, so that it may receive the same headers.
fn is_same_host(source: &OsString, other: &OsString) -> bool {
    match (
        resolve::outermost_location(source),
        resolve::outermost_location(other),
    ) {
        (Some(source), Some(other)) => source::is_same_origin(&source, &other),
        _ => false,
    }
}

/// Opens the tree that `layers` form.
///
/// # Errors
/// A layer cannot be opened, or they form no valid tree.
pub(crate) fn open_layered(
    layers: &[Layer],
    request: &OpenRequest<'_>,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<LayeredArchive> {
    let lens = layers.iter().map(|layer| layer.source.fingerprint().len);
    let _progress = open_archive::start_indexing_progress(lens.sum(), stats, request.quiet);
    let mut options = request.options();
    options.scan.memory = request.layers.memory_budget(request.source);
    // An entry that one layer lacks may be in another one.
    options.should_log_problems = false;
    let whiteouts = request.layers.whiteouts();
    let stack = LayeredArchive::open(layers, &options, whiteouts, network.handle(), stats);
    Ok(stack?)
}

/// Opens the layers that a mount serves.
///
/// # Errors
/// A layer cannot be opened, or they form no valid tree.
pub(crate) fn open_for_mount(
    args: &MountArgs,
    layers: &[Layer],
    request: &OpenRequest<'_>,
    network: Runtime,
    stats: Arc<Stats>,
) -> anyhow::Result<OpenedArchive> {
    // A profile does not contain the layer of a file, nor its name there.
    ensure!(
        args.prefetch.record.is_none() && args.prefetch.replay.is_none(),
        "--record and --replay are for a single archive"
    );
    let stack = open_layered(layers, request, &network, &stats)?;
    for layer in stack.layers() {
        prefetch::start_for_layer(&args.prefetch, layer, layers.len())?;
    }
    let stack = Arc::new(stack);
    let locations = locations(layers);
    let read = Arc::clone(&stack);
    let index = Arc::clone(stack.index());
    let versions = layers.iter().map(|layer| layer.source.fingerprint());
    Ok(OpenedArchive {
        name: open_archive::mount_source_name(request.source),
        location: display_name(&locations),
        layers: locations,
        version: versions
            .clone()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", "),
        is_strong: versions.clone().all(source::Fingerprint::is_strong),
        copy_source: CopySource::new(
            move || Some(Arc::clone(&index)),
            move |ino, offset, len| read.read_blocking(ino, offset, len),
        ),
        content: Arc::<LayeredArchive>::clone(&stack),
        status_source: Box::new(LayeredStatus {
            stack,
            has_disk_cache: !args.cache.no_disk_cache,
        }),
        recording: None,
        stats,
        network,
    })
}

/// Returns the locations of the layers, from the bottom.
pub(crate) fn locations(layers: &[Layer]) -> Vec<String> {
    let locations = layers
        .iter()
        .map(|layer| layer.source.location().to_owned());
    locations.collect()
}

/// Returns one name for all layers.
fn display_name(locations: &[String]) -> String {
    match locations {
        [] => String::new(),
        [only] => only.clone(),
        [bottom, _] => format!("{bottom} + 1 layer"),
        [bottom, above @ ..] => format!("{bottom} + {} layers", above.len()),
    }
}

/// Makes the paths of the layers absolute.
pub(crate) fn with_absolute_paths(layers: &LayerArgs) -> LayerArgs {
    LayerArgs {
        layers: layers
            .layers
            .iter()
            .map(open_archive::absolute_source)
            .collect(),
        ..layers.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::parse_source;

    #[test]
    fn outer_archives_share_one_fraction_of_the_memory() {
        let memory = |name: &str, layers: &[&str]| {
            let source = parse_source(&["--memory", "64MiB", name]);
            let layers = LayerArgs {
                layers: layers.iter().map(OsString::from).collect(),
                whiteouts: None,
            };
            (
                layers.memory_budget(&source) >> 20,
                layers.outer_archive_count(&source),
            )
        };
        assert_eq!(memory("a.tar", &[]), (64, 0));
        assert_eq!(memory("oci:a", &["b.tar"]), (64, 0));
        assert_eq!(memory("oci-archive:a", &[]), (48, 1));
        let above = ["docker-archive:b", "oci-archive:c"];
        assert_eq!(memory("a.tar", &above), (48, 2));
        assert_eq!(memory("slice:512:a.tar", &[]), (64, 0));
        assert_eq!(
            memory("tar:tar:a.tar!/b.tar!/c.tar", &["tar:d!/e"]),
            (48, 3)
        );
        assert_eq!(memory("docker-archive:tar:a.tar!/b.tar", &[]), (48, 2));
    }
}
