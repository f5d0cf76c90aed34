//! Flags for layers.

use std::ffi::OsString;

use clap::{Args, ValueEnum};

use tarfs::layers;

/// Layers over SOURCE.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct LayerArgs {
    /// Put this archive over SOURCE and over the layers before it; repeatable
    #[arg(long = "layer", value_name = "SOURCE",
          conflicts_with_all = ["index", "compression"])]
    pub layers: Vec<OsString>,

    /// How a layer marks deleted files of lower layers [default: oci]
    #[arg(long, value_enum, value_name = "HOW",
          conflicts_with_all = ["index", "compression"])]
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

    /// Returns how whiteouts are marked.
    pub(crate) fn whiteouts(&self) -> layers::WhiteoutFormat {
        match self.whiteouts {
            None | Some(WhiteoutFormat::Oci) => layers::WhiteoutFormat::Oci,
            Some(WhiteoutFormat::Overlay) => layers::WhiteoutFormat::Overlay,
            Some(WhiteoutFormat::Keep) => layers::WhiteoutFormat::Keep,
        }
    }
}
