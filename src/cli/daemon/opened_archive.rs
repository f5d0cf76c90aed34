//! The archive that a mount serves.

use std::sync::Arc;

use tokio::runtime::Runtime;

use super::prefetch::Recording;
use super::status_source::StatusSource;
use tarfs::Stats;
use tarfs::archive::Volume;
use tarfs::locate::SourceArchives;

pub(crate) struct OpenedArchive {
    pub content: Arc<dyn Volume>,
    /// SOURCE, absolute and without secrets, which the kernel lists and mount(8) compares with fstab.
    pub name: String,
    /// Location and number of layers, as logs and the status show it.
    pub location: String,
    /// Names of the layers, from the bottom, if SOURCE is opened as layers.
    pub layers: Vec<String>,
    /// Pinned version of the archive.
    pub version: String,
    /// Whether `version` differs for any two contents.
    pub is_strong: bool,
    pub stats: Arc<Stats>,
    pub status_source: StatusSource,
    /// The archives, if SOURCE is a directory of archives.
    pub directory: Option<Arc<SourceArchives>>,
    /// Recorder of read files, if the user wants one; ends with the mount.
    pub recording: Option<Recording>,
    /// Runtime that reads need. Declared last, so that it is dropped last.
    pub network: Runtime,
}

impl OpenedArchive {
    pub(crate) fn new(
        name: String,
        status_source: StatusSource,
        recording: Option<Recording>,
        stats: Arc<Stats>,
        network: Runtime,
    ) -> Self {
        let content = Arc::clone(&status_source.volume);
        let archives = content.archives();
        let sources = archives.iter().map(|archive| archive.source());
        let locations = sources.clone().map(|source| source.location().to_owned());
        let locations: Vec<_> = locations.collect();
        let versions = sources
            .clone()
            .map(|source| source.fingerprint().to_string());
        Self {
            name,
            location: display_name(&locations),
            version: versions.collect::<Vec<_>>().join(", "),
            is_strong: sources
                .clone()
                .all(|source| source.fingerprint().is_strong()),
            layers: if status_source.is_layered {
                locations
            } else {
                Vec::new()
            },
            content: Arc::clone(&content),
            stats,
            status_source,
            directory: None,
            recording,
            network,
        }
    }
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
