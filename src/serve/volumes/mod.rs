//! Trees that mounts share.

mod key;
mod table;

pub use key::VolumeKey;
pub use table::{Shareable, SharedTree, VolumeTable};
