//! Serving: trees that the mounts of one process share.

mod volume_key;
mod volume_table;

pub use volume_key::VolumeKey;
pub use volume_table::{SharedVolume, VolumeTable};
