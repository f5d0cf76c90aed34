//! The hidden directory for files of layers before they are moved to their places.

use rustix::fs::Mode;

use crate::index::Ino;
use crate::materialize::error::{StepError, WithAction};
use crate::materialize::write::{Destination, Directory};

/// Directory in the destination for files of layers before they are moved to their places.
pub const UNPLACED_DIRECTORY: &str = ".tarfs-layers";

/// Number of consecutive inodes whose files share a directory in [`UNPLACED_DIRECTORY`].
const FILES_PER_DIRECTORY: u32 = 256;

pub(super) fn make_unplaced_top(
    unplaced_top: &mut Option<Directory>,
    name: &[u8],
    destination: &mut Destination,
) -> Result<Directory, StepError> {
    if let Some(unplaced_top) = unplaced_top {
        return Ok(unplaced_top.clone());
    }
    let top = destination.top.clone();
    let made = make_private_directory(&top, name, destination)?;
    Ok(unplaced_top.insert(made).clone())
}

pub(super) fn make_private_directory(
    parent: &Directory,
    name: &[u8],
    destination: &mut Destination,
) -> Result<Directory, StepError> {
    const ACTION: &str = "create a directory for unplaced files";
    rustix::fs::mkdirat(parent, name, Mode::RWXU).with_action(ACTION)?;
    let made = destination.open_child(parent, name, true);
    made.with_action(ACTION)
}

pub(super) fn directory_name(layer: usize, ino: Ino) -> Vec<u8> {
    format!("{layer}-{}", ino.0 / FILES_PER_DIRECTORY).into_bytes()
}

/// Name of an unplaced file, unique among all layers.
pub(super) fn file_name(layer: usize, ino: Ino) -> Vec<u8> {
    format!("{layer}-{}", ino.0).into_bytes()
}
