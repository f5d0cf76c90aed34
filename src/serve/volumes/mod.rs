//! Trees that mounts share.

mod key;
mod table;

pub use key::VolumeKey;
pub(super) use key::relevant;
pub use table::{Shareable, SharedTree, VolumeTable};
