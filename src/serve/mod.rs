//! Serving: what the mounts of one process share.

mod volume_table;

pub use volume_table::{SharedVolume, VolumeKey, VolumeTable};
