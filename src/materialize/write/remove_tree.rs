//! Removes a tree of any depth without following links, with two open descriptors.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::attributes::AttributeTarget;
use super::directory::Identity;

pub(super) const OWNER_RWX: u32 = 0o700;

/// Removes the directory `name` in `parent`, if it exists, with its contents. After an error, removed entries
/// stay removed. `NOTEMPTY` and `BUSY` may be temporary, because another process still writes there.
pub(crate) fn remove_tree(parent: impl AsFd, name: &[u8]) -> Result<(), Errno> {
    let Some(mut here) = open_for_removal(&parent, name)? else {
        return Ok(());
    };
    // The directories above `here`, each with the name of the next one below.
    let mut above: Vec<(Identity, Vec<u8>)> = Vec::new();
    loop {
        if let Some(full) = remove_files(&here)? {
            let below = open_for_removal(&here, &full)?;
            if let Some(below) = below {
                above.push((identity(&here)?, full));
                here = below;
            }
        } else if let Some((upper, emptied)) = above.pop() {
            here = rustix::fs::openat(&here, "..", open_flags(), Mode::empty())?;
            if identity(&here)? != upper {
                // Another process moved the directory, so `here` is unknown.
                return Err(Errno::STALE);
            }
            ignore_not_found(rustix::fs::unlinkat(&here, &*emptied, AtFlags::REMOVEDIR))?;
        } else {
            return ignore_not_found(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR));
        }
    }
}

/// Removes files and empty directories. Returns the first non-empty directory.
fn remove_files(directory: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let mut removed = Err(Errno::ISDIR);
        if entry.file_type() != FileType::Directory {
            removed = ignore_not_found(rustix::fs::unlinkat(directory, name, AtFlags::empty()));
        }
        if removed == Err(Errno::ISDIR) {
            removed = ignore_not_found(rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR));
        }
        match removed {
            Ok(()) => {}
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(Some(name.to_bytes().to_vec())),
            Err(errno) => return Err(errno),
        }
    }
    Ok(None)
}

/// Opens a directory for removal, whatever its mode; `None` when it does not exist.
fn open_for_removal(parent: impl AsFd, name: &[u8]) -> Result<Option<OwnedFd>, Errno> {
    let open = || rustix::fs::openat(&parent, name, open_flags(), Mode::empty());
    let opened = match open() {
        Err(Errno::ACCESS) => {
            let directory = AttributeTarget::Name(parent.as_fd(), name);
            let allowed = directory.chmod(OWNER_RWX);
            allowed.map_err(|error| error.errno)?;
            open()
        }
        opened => opened,
    };
    let directory = match opened {
        Err(Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    let mode = rustix::fs::fstat(&directory)?.st_mode;
    if mode & OWNER_RWX != OWNER_RWX {
        // Root needs no permission. For other users, the removal reports a failed chmod soon.
        let directory = AttributeTarget::Open(directory.as_fd());
        directory.chmod(OWNER_RWX).ok();
    }
    Ok(Some(directory))
}

fn open_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn identity(directory: &OwnedFd) -> Result<Identity, Errno> {
    Ok(Identity::of(&rustix::fs::fstat(directory)?))
}

fn ignore_not_found(removed: Result<(), Errno>) -> Result<(), Errno> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn remove_tree_with_closed_modes_leaves_link_targets() {
        let place = tempfile::tempdir().expect("a directory");
        let outside = place.path().join("outside");
        fs::create_dir(&outside).expect("made");
        fs::write(outside.join("kept"), "x").expect("written");
        let tree = place.path().join("tree");
        for directory in ["a/b/c", "a/empty", "d", "e/f"] {
            fs::create_dir_all(tree.join(directory)).expect("made");
            fs::write(tree.join(directory).join("file"), "x").expect("written");
            symlink(&outside, tree.join(directory).join("link")).expect("made");
        }
        fs::remove_dir_all(tree.join("a/empty")).expect("there");
        fs::create_dir(tree.join("a/empty")).expect("made");
        for directory in ["a/b/c", "a", "d"] {
            let none = fs::Permissions::from_mode(0o000);
            fs::set_permissions(tree.join(directory), none).expect("ours");
        }
        let parent = File::open(place.path()).expect("a directory");
        assert_eq!(remove_tree(&parent, b"tree"), Ok(()));
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        assert_eq!(remove_tree(&parent, b"tree"), Ok(()), "gone already");
    }

    #[test]
    fn remove_tree_works_at_any_depth() {
        let place = tempfile::tempdir().expect("a directory");
        let parent = File::open(place.path()).expect("a directory");
        let mut here = OwnedFd::from(parent.try_clone().expect("a descriptor"));
        for _ in 0..3000 {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).expect("made");
            here = rustix::fs::openat(&here, "d", open_flags(), Mode::empty()).expect("there");
        }
        drop(here);
        assert_eq!(remove_tree(&parent, b"d"), Ok(()));
        assert!(!place.path().join("d").exists());
    }
}
