//! `tarfs mount --writable`: the directories of the overlay and their lifetime.
//!
//! `upper` and `work` are in the --upper directory, for later mounts too, or else in a scratch directory,
//! which only this user can enter and which is removed with the mount. The read-only mount is also in a
//! scratch directory until the overlay covers it.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::fs::{
    AtFlags, CWD, Timestamps, XattrFlags, lgetxattr, llistxattr, lsetxattr, statfs, utimensat,
};
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::cli::environment;
use tarfs::fuse::{
    Force, LOWER_DIR_NAME, Mount, MountOptions, MountTarget, SCRATCH_PREFIX, SuperblockWatch,
    TopMount, UpperDirs, mount_overlay,
};
use tarfs::internal::directory::create_missing_dir;
use tarfs::internal::lock::{LockHolder, LockKind, lock as lock_file};
use tarfs::internal::publish::random_suffix;
use tarfs::layers::WhiteoutFormat;
use tarfs::serve::OverlayStatus;
use tarfs::tree::remove_tree;

/// `OVERLAYFS_SUPER_MAGIC`, `FUSE_SUPER_MAGIC` and `NFS_SUPER_MAGIC`, which overlayfs rejects for `upper`.
const UNSUPPORTED_FS_TYPES: [i128; 3] = [0x794c_7630, 0x6573_5546, 0x6969];

#[derive(Debug)]
pub(crate) struct OverlayDirs {
    /// The --upper directory and its lock. Without it, `upper` and `work` are in the scratch directory.
    persistent: Option<(PathBuf, File)>,
    scratch: OnceLock<ScratchDir>,
}

/// Scratch directory of one mount, removed with it.
#[derive(Debug)]
struct ScratchDir {
    path: PathBuf,
    /// The end of the overlay that writes to it, if that is known. Unset without one.
    overlay: OnceLock<Option<SuperblockWatch>>,
    /// Programs that delete old temporary files skip a locked directory.
    _lock: Option<File>,
}

impl ScratchDir {
    fn at(path: PathBuf) -> Self {
        let lock = File::open(&path).ok();
        if let Some(lock) = &lock {
            // No process locks it exclusively, so this lock is always granted.
            lock_file(lock, LockKind::Shared, Duration::ZERO).ok();
        }
        Self {
            path,
            overlay: OnceLock::new(),
            _lock: lock,
        }
    }

    /// Watches for the end of the overlay at `site`, which writes to this directory from now on.
    fn watch_overlay(&self, site: &MountTarget) {
        let watch = SuperblockWatch::on(&site.mountpoint);
        let watch = watch.inspect_err(
            |error| tracing::warn!(%error, "the end of the overlay cannot be watched"),
        );
        self.overlay.get_or_init(|| watch.ok());
    }
}

impl OverlayDirs {
    /// Locks the directory `upper`, if there is one, before the long work.
    pub(crate) fn open(upper: Option<&Path>, mountpoint: &Path) -> anyhow::Result<Self> {
        let persistent = upper.map(|named| open_persistent_dir(named, mountpoint));
        Mount::check_writable()?;
        Ok(Self {
            persistent: persistent.transpose()?,
            scratch: OnceLock::new(),
        })
    }

    /// A path for the scratch directory.
    pub(crate) fn new_scratch(&self) -> anyhow::Result<PathBuf> {
        new_scratch(self.persistent.is_none())
    }

    /// Creates the directory `scratch`, and returns that for the read-only mount until the overlay covers it.
    pub(crate) fn create_scratch(&self, scratch: PathBuf) -> anyhow::Result<PathBuf> {
        create_scratch(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
        let scratch = self.scratch.get_or_init(|| ScratchDir::at(scratch));
        Ok(scratch.path.join(LOWER_DIR_NAME))
    }

    /// The scratch directory, if it was created.
    pub(crate) fn scratch(&self) -> Option<&Path> {
        self.scratch.get().map(|scratch| &*scratch.path)
    }

    fn upper(&self) -> UpperDirs {
        let persistent = self.persistent.as_ref().map(|(home, _)| home);
        let scratch = self.scratch.get().map(|scratch| &scratch.path);
        let home = persistent.or(scratch).cloned().unwrap_or_default();
        UpperDirs {
            upper: home.join("upper"),
            work: home.join("work"),
            is_temporary: self.persistent.is_none(),
        }
    }

    /// Mounts the overlay over `lower`, the mount of the archive in a [scratch directory](Self::create_scratch). If that
    /// fails, `lower` is unchanged.
    pub(crate) fn mount_overlay(
        &self,
        lower: &MountTarget,
        source: &str,
        mountpoint: &Path,
        options: &MountOptions,
    ) -> anyhow::Result<(MountTarget, OverlayStatus)> {
        let upper = self.upper();
        create_upper(&lower.mountpoint, &upper)
            .with_context(|| format!("cannot make {}", upper.upper.display()))?;
        let target = mount_overlay(lower, &upper, source, mountpoint, options, |site| {
            if let Some(scratch) = self.scratch.get().filter(|_| upper.is_temporary) {
                scratch.watch_overlay(site);
            }
        })?;
        // If this fails, they are removed with the mount.
        drop(fs::remove_dir(&lower.mountpoint));
        if let (false, Some(scratch)) = (upper.is_temporary, lower.mountpoint.parent()) {
            drop(fs::remove_dir(scratch));
        }
        let kind = target.overlay.map_or("", |(cover, _)| cover.name());
        let status = OverlayStatus {
            upper: upper.upper.to_string_lossy().into_owned(),
            is_temporary: upper.is_temporary,
            by: kind.to_owned(),
        };
        Ok((target, status))
    }

    /// Removes the scratch directory, as [`remove_scratch_after`].
    pub(crate) fn finish(self, timeout: Option<Duration>) {
        let Some(scratch) = self.scratch.get() else {
            return;
        };
        match scratch.overlay.get() {
            Some(end) => remove_scratch_after(&scratch.path, end.as_ref(), timeout),
            None => remove_scratch(&scratch.path),
        }
    }
}

/// Creates the --upper directory if it is missing, for this user alone, and locks it.
fn open_persistent_dir(named: &Path, mountpoint: &Path) -> anyhow::Result<(PathBuf, File)> {
    let name = || named.display().to_string();
    create_missing_dir(named, 0o700).with_context(|| format!("cannot make {}", name()))?;
    let home = fs::canonicalize(named).with_context(|| format!("cannot use {}", name()))?;
    let mountpoint = tarfs::fuse::canonical_mountpoint(mountpoint)?;
    ensure!(
        !home.starts_with(&mountpoint),
        "{}: the mount on {} would hide it (name a directory beside it)",
        home.display(),
        mountpoint.display()
    );
    let lock = File::open(&home).with_context(|| format!("cannot use {}", name()))?;
    match lock_file(&lock, LockKind::Exclusive, Duration::ZERO) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => bail!(
            "{}: another mount writes there ({} has locked it)",
            home.display(),
            LockHolder::of(&lock)
        ),
        Err(errno) => return Err(errno).with_context(|| format!("cannot lock {}", name())),
    }
    Ok((home, lock))
}

/// A path for a scratch directory in the best place, for `upper` too if `holds_upper`.
fn new_scratch(holds_upper: bool) -> anyhow::Result<PathBuf> {
    let places = environment::scratch_dirs();
    let fit = places
        .iter()
        .find(|place| !holds_upper || supports_upper(place));
    let Some(place) = fit.or(places.first()) else {
        bail!("there is no place for temporary directories");
    };
    let name = format!("{SCRATCH_PREFIX}{}", random_suffix());
    let found = fs::canonicalize(place);
    let found = found.with_context(|| format!("cannot make a directory in {}", place.display()));
    Ok(found?.join(name))
}

/// Creates a scratch directory with a mountpoint.
fn create_scratch(scratch: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(scratch)?;
    let made = fs::create_dir(scratch.join(LOWER_DIR_NAME));
    made.or_else(|error| {
        fs::remove_dir(scratch)?;
        Err(error)
    })
}

/// Unmounts what a dead monitor has mounted in its directory `scratch`, and the overlay on `mountpoint` that uses it.
pub(crate) fn unmount_abandoned(mountpoint: &Path, scratch: &Path) {
    let lower = scratch.join(LOWER_DIR_NAME);
    // No other mount has this name among its options.
    let name = scratch.file_name().unwrap_or_default().as_bytes();
    let is_of_scratch = |top: &TopMount| top.has_in_options(name);
    let overlay = tarfs::fuse::top_mount(mountpoint).ok().flatten();
    let below = tarfs::fuse::top_mount(&lower).ok().flatten();
    let found = [
        (mountpoint, overlay.filter(is_of_scratch)),
        (&*lower, below),
    ];
    for (path, top) in found {
        let Some(top) = top else {
            continue;
        };
        if let Err(error) = tarfs::fuse::unmount(path, Some(top.device), Force::Yes) {
            tracing::warn!(%error, "cannot unmount");
        }
    }
}

/// Removes the directory `scratch` after the `end` of the overlay that writes to it, because the users of that would see
/// empty directories. Leaves one with files if the end is unknown, or does not come within `timeout`.
pub(crate) fn remove_scratch_after(
    scratch: &Path,
    end: Option<&SuperblockWatch>,
    timeout: Option<Duration>,
) {
    if end.is_some_and(|end| end.wait(timeout)) {
        return remove_scratch(scratch);
    }
    drop(fs::remove_dir(scratch.join(LOWER_DIR_NAME)));
    if fs::remove_dir(scratch).is_err() && scratch.exists() {
        let scratch = scratch.display();
        tracing::error!(%scratch, "this directory stays, because the mount may be in use");
    }
}

/// Removes a scratch directory if it exists, but no directory without the scratch prefix.
fn remove_scratch(scratch: &Path) {
    let (Some(parent), Some(name)) = (scratch.parent(), scratch.file_name()) else {
        return;
    };
    if !name.as_bytes().starts_with(SCRATCH_PREFIX.as_bytes()) {
        return;
    }
    let removed = File::open(parent).and_then(|parent| Ok(remove_tree(&parent, name.as_bytes())?));
    if let Err(error) = removed {
        let scratch = scratch.display();
        tracing::warn!(%error, %scratch, "cannot remove the directory with the files written to the mount");
    }
}

/// Whether overlayfs accepts `directory` for `upper`, as far as is known.
fn supports_upper(directory: &Path) -> bool {
    statfs(directory).is_ok_and(|found| is_supported_fs_type(found.f_type.into()))
}

/// Compares 32 bits, because `f_type` is a signed word on some machines.
fn is_supported_fs_type(f_type: i128) -> bool {
    !UNSUPPORTED_FS_TYPES.contains(&(f_type & 0xFFFF_FFFF))
}

/// Creates the missing directories of `upper`. The overlay shows its attributes, so they come from `lower`.
fn create_upper(lower: &Path, upper: &UpperDirs) -> io::Result<()> {
    create_missing_dir(&upper.work, 0o700)?;
    if upper.upper.is_dir() {
        return Ok(());
    }
    // The final name appears only with all attributes.
    let new = upper.upper.with_extension("new");
    create_missing_dir(&new, 0o700)?;
    copy_attributes(lower, &new)?;
    fs::rename(new, &upper.upper)
}

/// Copies attributes from `from` to `to`, as far as this user may.
fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    let found = fs::metadata(from)?;
    if rustix::process::geteuid().is_root() {
        for (user, group) in [(Some(found.uid()), None), (None, Some(found.gid()))] {
            match chown(to, user, group) {
                // The ID is not mapped in this user namespace.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {}
                done => done?,
            }
        }
    }
    fs::set_permissions(to, Permissions::from_mode(found.mode() & 0o7777))?;
    for name in list_xattrs(from)? {
        // Attributes of overlayfs itself must not be copied.
        if WhiteoutFormat::Overlay.hides_xattr(&name) {
            continue;
        }
        let name = OsStr::from_bytes(&name);
        let mut value = vec![0; 1 << 16];
        let copied = lgetxattr(from, name, &mut value).and_then(|len| {
            lsetxattr(
                to,
                name,
                value.get(..len).unwrap_or_default(),
                XattrFlags::empty(),
            )
        });
        match copied {
            // Not permitted, not supported, removed, or of users that are not mapped here.
            Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NODATA | Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let time = |tv_sec, nanos: i64| Timespec {
        tv_sec,
        tv_nsec: nanos,
    };
    let times = Timestamps {
        last_access: time(found.atime(), found.atime_nsec()),
        last_modification: time(found.mtime(), found.mtime_nsec()),
    };
    Ok(utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn list_xattrs(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let mut list = vec![0; 1 << 16];
    let len = match llistxattr(path, &mut list) {
        Ok(len) => len,
        Err(Errno::OPNOTSUPP) => 0,
        Err(errno) => return Err(errno.into()),
    };
    list.truncate(len);
    let names = list
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty());
    Ok(names.map(<[u8]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: upper-root
    #[test]
    fn new_upper_copies_root_attributes_and_existing_keeps_its_own() {
        let place = tempfile::tempdir().expect("a directory");
        let lower = place.path().join("lower");
        fs::create_dir(&lower).expect("made");
        fs::set_permissions(&lower, Permissions::from_mode(0o1751)).expect("set");
        lsetxattr(&lower, "user.colour", b"red", XattrFlags::empty()).expect("set");
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 5,
                tv_nsec: 6,
            },
            last_modification: Timespec {
                tv_sec: 7,
                tv_nsec: 8,
            },
        };
        utimensat(CWD, &lower, &times, AtFlags::empty()).expect("set");
        let upper = UpperDirs {
            upper: place.path().join("upper"),
            work: place.path().join("work"),
            is_temporary: false,
        };
        create_upper(&lower, &upper).expect("made");
        let found = fs::metadata(&upper.upper).expect("there");
        assert_eq!(found.mode() & 0o7777, 0o1751);
        assert_eq!((found.mtime(), found.mtime_nsec()), (7, 8));
        let mut value = [0; 8];
        assert_eq!(lgetxattr(&upper.upper, "user.colour", &mut value), Ok(3));

        fs::set_permissions(&upper.upper, Permissions::from_mode(0o700)).expect("set");
        create_upper(&lower, &upper).expect("there");
        let found = fs::metadata(&upper.upper).expect("there");
        assert_eq!(found.mode() & 0o7777, 0o700);
    }

    #[test]
    fn unsupported_upper_filesystem_is_skipped() {
        // ext4, and overlayfs.
        assert!(is_supported_fs_type(0xef53) && !is_supported_fs_type(0x794c_7630));
    }

    #[test]
    fn only_a_scratch_directory_is_removed() {
        let place = tempfile::tempdir().expect("a directory");
        let kept = place.path().join("kept");
        let scratch = place.path().join(format!("{SCRATCH_PREFIX}1"));
        for directory in [&kept, &scratch] {
            fs::create_dir_all(directory.join("deep")).expect("made");
            remove_scratch(directory);
        }
        assert!(kept.exists() && !scratch.exists());
        remove_scratch(&scratch);
    }

    // Promises: upper-temporary
    #[test]
    fn scratch_directory_with_files_stays_if_the_end_of_the_overlay_is_unknown() {
        let place = tempfile::tempdir().expect("a directory");
        let scratch = place.path().join(format!("{SCRATCH_PREFIX}1"));
        create_scratch(&scratch).expect("made");
        fs::create_dir(scratch.join("upper")).expect("made");
        remove_scratch_after(&scratch, None, None);
        assert!(scratch.join("upper").exists());
        fs::remove_dir(scratch.join("upper")).expect("empty");
        fs::create_dir(scratch.join(LOWER_DIR_NAME)).expect("made");
        remove_scratch_after(&scratch, None, None);
        assert!(!scratch.exists(), "no overlay was mounted");
        remove_scratch_after(&scratch, None, None);
    }

    #[test]
    fn scratch_directory_stays_until_the_end_of_the_overlay() {
        let place = tempfile::tempdir().expect("a directory");
        let scratch = place.path().join(format!("{SCRATCH_PREFIX}1"));
        create_scratch(&scratch).expect("made");
        fs::create_dir(scratch.join("upper")).expect("made");
        let (end, ender) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("descriptors");
        let end = SuperblockWatch(end);
        remove_scratch_after(&scratch, Some(&end), Some(Duration::ZERO));
        assert!(scratch.join("upper").exists());
        rustix::io::write(&ender, b"1").expect("room");
        remove_scratch_after(&scratch, Some(&end), None);
        assert!(!scratch.exists());
    }
}
