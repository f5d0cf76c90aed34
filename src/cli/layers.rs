//! The flags of what is laid over an archive, and a mount of several as one.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use bytes::Bytes;
use clap::{Args, ValueEnum};
use tokio::runtime::Runtime;

use super::args::SourceArgs;
use super::copy::CopySource;
use super::headers::Header;
use super::mount::{MountArgs, OpenedArchive};
use super::open_archive::{self, OpenRequest};
use super::prefetch;
use super::resolve::{self, OuterArchiveOptions};
use super::status_source::LayeredStatus;
use crate::archive::scan::Digest;
use crate::base::stats::Stats;
use crate::layers::{self, Layer, LayeredArchive};
use crate::source::{self, MemorySource};

/// Layers of one tree; an image may have as many by itself.
const MAX_LAYERS: usize = 1000;

/// What is laid over SOURCE.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct LayerArgs {
    /// Lay this archive over SOURCE, and over the layers named before it; a path or URL, as often as
    /// wanted
    #[arg(long = "layer", value_name = "SOURCE", help_heading = "Layers",
          conflicts_with_all = ["index", "compression"])]
    pub layers: Vec<OsString>,

    /// How a layer says what of those below is gone: by .wh. names (oci, the default), by devices 0/0
    /// and attributes (overlay), or not at all (keep)
    #[arg(long, value_enum, value_name = "HOW", help_heading = "Layers",
          conflicts_with_all = ["index", "compression"])]
    pub whiteouts: Option<WhiteoutFormat>,
}

/// How layers say what of those below is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum WhiteoutFormat {
    /// `.wh.NAME` hides NAME, `.wh..wh..opq` all of its directory.
    Oci,
    /// A character device 0/0 hides its name, an attribute all of a directory.
    Overlay,
    /// Whatever is there is an entry.
    Keep,
}

impl LayerArgs {
    /// Whether SOURCE is a layer at all.
    pub(super) fn is_set(&self) -> bool {
        !self.layers.is_empty() || self.whiteouts.is_some()
    }

    /// Whether `source` and what is laid over it are opened together: an image always is, as its
    /// layers say what of those below is gone.
    ///
    /// # Errors
    /// When what is asked with it is of a single archive, as the `index` that is to be used.
    pub(super) fn is_layered(
        &self,
        source: &SourceArgs,
        index: Option<&Path>,
    ) -> anyhow::Result<bool> {
        resolve::reject_single_archive_flags(source, index)?;
        Ok(self.is_set() || resolve::image_reference(source).is_some())
    }

    /// How many archives there are around `source` and what is laid over it.
    pub(super) fn outer_archive_count(&self, source: &SourceArgs) -> u64 {
        let names = std::iter::once(&source.source).chain(&self.layers);
        names.map(|name| resolve::outer_archive_count(name)).sum()
    }

    /// Memory for `source` and what is laid over it, without what archives around them take.
    pub(super) fn memory_budget(&self, source: &SourceArgs) -> u64 {
        resolve::memory_without_outer(source.memory.0, self.outer_archive_count(source))
    }

    /// How the layers are to be read.
    pub(super) fn whiteouts(&self) -> layers::WhiteoutFormat {
        match self.whiteouts {
            None | Some(WhiteoutFormat::Oci) => layers::WhiteoutFormat::Oci,
            Some(WhiteoutFormat::Overlay) => layers::WhiteoutFormat::Overlay,
            Some(WhiteoutFormat::Keep) => layers::WhiteoutFormat::Keep,
        }
    }
}

/// SOURCE and what is laid over it, from the bottom; of an image each of its layers. `headers` go to
/// SOURCE's host, and to no other.
///
/// # Errors
/// When one cannot be reached, or is none.
pub(super) fn open_sources(
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
        // What is expected of an image is expected of its manifest, which speaks for its layers.
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
        // An image without layers is an empty tree, as one with an empty layer is.
        let source = Arc::new(MemorySource::new("an image without layers", Bytes::new()));
        let digest = Digest::Ignore;
        opened.push(Layer { source, digest });
    }
    Ok(opened)
}

/// Whether what may be told to the host of `source` may be told to that of `other`.
fn is_same_host(source: &OsString, other: &OsString) -> bool {
    match (
        resolve::outermost_location(source),
        resolve::outermost_location(other),
    ) {
        (Some(source), Some(other)) => source::is_same_origin(&source, &other),
        _ => false,
    }
}

/// The tree that `layers` make.
///
/// # Errors
/// When one of them cannot be opened, or they make no tree.
pub(super) fn open_layered(
    layers: &[Layer],
    request: &OpenRequest<'_>,
    network: &Runtime,
    stats: &Arc<Stats>,
) -> anyhow::Result<LayeredArchive> {
    let lens = layers.iter().map(|layer| layer.source.fingerprint().len);
    let _progress = open_archive::start_indexing_progress(lens.sum(), stats, request.quiet);
    let mut options = request.options();
    options.scan.memory = request.layers.memory_budget(request.source);
    // What one layer lacks can be an entry of another one.
    options.should_log_problems = false;
    let whiteouts = request.layers.whiteouts();
    let stack = LayeredArchive::open(layers, &options, whiteouts, network.handle(), stats);
    Ok(stack?)
}

/// What a mount of several layers serves.
///
/// # Errors
/// When one of them cannot be opened, or they make no tree.
pub(super) fn open_for_mount(
    args: &MountArgs,
    layers: &[Layer],
    request: &OpenRequest<'_>,
    network: Runtime,
    stats: Arc<Stats>,
) -> anyhow::Result<OpenedArchive> {
    // Which layer's files, and by which names, the profile cannot tell.
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

/// What the layers are called, from the bottom.
pub(super) fn locations(layers: &[Layer]) -> Vec<String> {
    let locations = layers
        .iter()
        .map(|layer| layer.source.location().to_owned());
    locations.collect()
}

/// What the whole is called.
fn display_name(locations: &[String]) -> String {
    match locations {
        [] => String::new(),
        [only] => only.clone(),
        [bottom, _] => format!("{bottom} + 1 layer"),
        [bottom, above @ ..] => format!("{bottom} + {} layers", above.len()),
    }
}

/// SOURCE wherever the process goes, and what is laid over it.
pub(super) fn with_absolute_paths(layers: &LayerArgs) -> LayerArgs {
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
    use super::super::args::tests::parse_source;
    use super::*;

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
