//! Flags for layers.

use clap::{Args, ValueEnum};

use super::{SourceArgs, heading};
use tarfs::layers;
use tarfs::locate::{SourceSpec, TreeSpec};

/// Layers over SOURCE.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct LayerArgs {
    /// Put this archive over SOURCE and over the layers before it; repeatable
    #[arg(id = "layer", long = "layer", value_name = "SOURCE",
          conflicts_with_all = ["index", "index_sha256", "compression"], help_heading = heading::SOURCE)]
    pub layers: Vec<SourceSpec>,

    /// How a layer marks deleted files of lower layers [default: oci]
    #[arg(long, value_enum, value_name = "HOW",
          conflicts_with_all = ["index", "index_sha256", "compression"],
          help_heading = heading::SOURCE, hide_short_help = true)]
    pub whiteouts: Option<WhiteoutFormat>,
}

/// How layers mark deleted files of lower layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum WhiteoutFormat {
    /// `.wh.NAME` deletes NAME, and `.wh..wh..opq` its whole directory, as in container images
    Oci,
    /// A character device 0/0 deletes its name, and an attribute a whole directory, as in overlayfs
    Overlay,
    /// All names are plain entries
    Keep,
}

impl LayerArgs {
    /// Whether a flag for layers is given.
    pub(crate) fn is_set(&self) -> bool {
        !self.layers.is_empty() || self.whiteouts.is_some()
    }

    /// Returns `source` with the layers over it.
    pub(crate) fn tree(&self, source: &SourceArgs) -> TreeSpec {
        TreeSpec {
            source: source.source.clone(),
            layers: self.layers.clone(),
            whiteouts: self.whiteouts.map(|format| match format {
                WhiteoutFormat::Oci => layers::WhiteoutFormat::Oci,
                WhiteoutFormat::Overlay => layers::WhiteoutFormat::Overlay,
                WhiteoutFormat::Keep => layers::WhiteoutFormat::Keep,
            }),
        }
    }
}
