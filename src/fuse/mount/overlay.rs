//! Writable mounts: an overlay over the read-only mount. The overlay is overlayfs, or fuse-overlayfs for
//! users who may not mount overlayfs. It clones the read-only mount, which is then reachable by no path and
//! ends with the overlay.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::mount::MountFlags;
use rustix::process::{getegid, geteuid};
use rustix::thread::{CapabilitySet, capabilities};
use serde::{Deserialize, Serialize};

use super::error::MountError;
use super::mountinfo;
use super::options::MountOptions;
use super::pinned::proc_fd_path;
use super::syscalls::{self, Mountpoint};
use crate::base::foreign_command::foreign_command;
use crate::base::passwd::IdMap;
use crate::fuse::attr::Ownership;

const OVERLAY_FS_TYPE: &str = "overlay";
const FUSE_OVERLAYFS: &str = "fuse-overlayfs";
const FUSE_OVERLAYFS_FS_TYPE: &str = "fuse.fuse-overlayfs";
/// Directories to search for the helper, because `PATH` may be missing or lead to another user's program.
const FUSE_OVERLAYFS_DIRS: [&str; 2] = ["/usr/bin", "/usr/local/bin"];
/// Starts a program in a new user namespace. Needs util-linux 2.36.
const UNSHARE: &str = "/usr/bin/unshare";

/// The directories that receive the changes of a writable mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UpperDirs {
    /// Holds new and changed files.
    pub upper: PathBuf,
    /// Working directory of overlayfs, on the same file system.
    pub work: PathBuf,
    /// Whether the directories are deleted after unmount.
    pub is_temporary: bool,
}

/// The type of an overlay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OverlayKind {
    /// The kernel's overlayfs.
    Overlayfs,
    /// The program fuse-overlayfs.
    FuseOverlayfs,
}

impl OverlayKind {
    /// Its type in the kernel's table of mounts.
    pub(super) fn fs_type(self) -> &'static str {
        match self {
            Self::Overlayfs => OVERLAY_FS_TYPE,
            Self::FuseOverlayfs => FUSE_OVERLAYFS_FS_TYPE,
        }
    }

    /// The name for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Overlayfs => "overlayfs",
            Self::FuseOverlayfs => FUSE_OVERLAYFS,
        }
    }
}

pub(super) fn check_available() -> Result<(), MountError> {
    if may_mount() || find_fuse_overlayfs().is_some() {
        Ok(())
    } else {
        Err(MountError::Overlay(Errno::PERM.into(), false))
    }
}

pub(super) fn mount_overlay(
    lower: &Path,
    upper: &UpperDirs,
    mountpoint: &Mountpoint,
    source: &str,
    options: &MountOptions,
) -> Result<OverlayKind, MountError> {
    // Only the initial user namespace can use `trusted.*` attributes.
    let in_namespace = !IdMap::of_users().is_initial();
    let data = overlay_options(lower, upper, in_namespace);
    if may_mount() {
        check_options_len(&data, rustix::param::page_size())?;
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL);
    let mut flags = syscalls::mount_flags(options);
    flags.set(MountFlags::RDONLY, options.read_only == Some(true));
    let path = proc_fd_path(&mountpoint.0);
    let mount = |data: CString| rustix::mount::mount(source, &path, OVERLAY_FS_TYPE, flags, &*data);
    let refused = match data.and_then(mount) {
        Ok(()) => return Ok(OverlayKind::Overlayfs),
        Err(errno) => errno,
    };
    let helper = find_fuse_overlayfs();
    // At other errors the kernel would reject the same directories again.
    let may_help = matches!(refused, Errno::PERM | Errno::ACCESS | Errno::NODEV);
    match helper {
        Some(helper) if may_help => {
            mount_with_fuse_overlayfs(&helper, lower, upper, &mountpoint.path()?, options)?;
            Ok(OverlayKind::FuseOverlayfs)
        }
        helper => Err(MountError::Overlay(refused.into(), helper.is_some())),
    }
}

fn overlay_options(lower: &Path, upper: &UpperDirs, in_namespace: bool) -> Vec<u8> {
    let mut data = layer_options(lower, upper);
    for word in overlay_flags(upper.is_temporary, in_namespace) {
        data.push(b',');
        data.extend(word.as_bytes());
    }
    data
}

fn layer_options(lower: &Path, upper: &UpperDirs) -> Vec<u8> {
    let mut words = b"lowerdir=".to_vec();
    words.extend(escape(lower, b":,\\"));
    words.extend(b",upperdir=");
    words.extend(escape(&upper.upper, b",\\"));
    words.extend(b",workdir=");
    words.extend(escape(&upper.work, b",\\"));
    words
}

/// Rejects options that mount(2) would truncate. It reads one page, and the last byte ends the text.
fn check_options_len(data: &[u8], page_len: usize) -> Result<(), MountError> {
    let max_len = page_len.saturating_sub(1);
    if data.len() > max_len {
        return Err(MountError::OverlayOptionsTooLong(data.len(), max_len));
    }
    Ok(())
}

/// The overlayfs features to set, whatever the kernel's defaults are.
fn overlay_flags(is_temporary: bool, in_namespace: bool) -> Vec<&'static str> {
    // With an index, changed hard links stay together. But it needs lower file handles that never expire.
    let mut words = vec!["index=off"];
    // One device number for all files, so that du -x and tar --one-file-system skip none. Our 32-bit inode
    // numbers leave overlayfs enough bits.
    words.push("xino=on");
    if in_namespace {
        // A user namespace allows only `user.*` attributes. They exclude the two features below.
        words.push("userxattr");
    } else if is_temporary {
        // A chmod or a renamed directory copies no data up. The upper directory then fits only exactly this
        // archive, which a temporary one always has.
        words.extend(["metacopy=on", "redirect_dir=on"]);
    } else {
        // A named upper directory has whole files, because the archive below may differ next time.
        words.extend(["metacopy=off", "redirect_dir=off"]);
    }
    if is_temporary {
        // The directories are deleted at unmount, so nothing needs a sync.
        words.push("volatile");
    }
    words
}

fn escape(path: &Path, special: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for &byte in path.as_os_str().as_bytes() {
        if special.contains(&byte) {
            text.push(b'\\');
        }
        text.push(byte);
    }
    text
}

fn mount_with_fuse_overlayfs(
    helper: &Path,
    lower: &Path,
    upper: &UpperDirs,
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<(), MountError> {
    let mut layers = layer_options(lower, upper);
    if !may_mount() {
        if options.ownership == Ownership::default() {
            // This user could neither change files of other users nor give files to them.
            let (user, group) = (geteuid().as_raw(), getegid().as_raw());
            layers.extend(format!(",squash_to_uid={user},squash_to_gid={group}").into_bytes());
        }
        match mount_in_user_namespace(helper, &layers, mountpoint, options) {
            Err(MountError::Overlay(cause, _)) => tracing::warn!(
                %cause,
                "{FUSE_OVERLAYFS} runs without a user namespace: it cannot make directories without write \
                 permission, as dpkg does"
            ),
            done => return done,
        }
    }
    let options = [layers.as_slice(), fuse_overlayfs_flags(options).as_bytes()].join(&b',');
    let mut command = foreign_command(helper);
    command.arg("-o").arg(OsStr::from_bytes(&options));
    run_fuse_overlayfs(command.arg(mountpoint))
}

/// As [`mount_with_fuse_overlayfs`], in a user namespace. The helper marks a new directory with an extended
/// attribute. Without write permission a directory accepts it only with `CAP_DAC_OVERRIDE`, which the helper
/// has there. It cannot use fusermount3 there, so this process mounts and the helper inherits the device.
fn mount_in_user_namespace(
    helper: &Path,
    layers: &[u8],
    mountpoint: &Path,
    options: &MountOptions,
) -> Result<(), MountError> {
    let name = format!("fsname={FUSE_OVERLAYFS},subtype={FUSE_OVERLAYFS}");
    let access = "default_permissions,noatime";
    let words = format!("{},{access},{name}", fuse_overlayfs_flags(options));
    let device = syscalls::mount_with_fusermount(mountpoint, &words)?;
    fcntl_setfd(&device, FdFlags::empty())?;
    let mut command = foreign_command(UNSHARE);
    command
        .args(["--user", "--map-current-user", "--keep-caps", "--"])
        .arg(helper)
        .arg("-o")
        .arg(OsStr::from_bytes(layers))
        .arg(format!("/dev/fd/{}", device.as_raw_fd()));
    run_fuse_overlayfs(&mut command)
        .inspect_err(|_| syscalls::unmount_or_warn(FUSE_OVERLAYFS_FS_TYPE, mountpoint, None))
}

fn fuse_overlayfs_flags(options: &MountOptions) -> String {
    let is_read_only = options.read_only == Some(true);
    let flags = [
        (is_read_only, "ro"),
        (!is_read_only, "rw"),
        (options.noexec, "noexec"),
        (options.nosymfollow, "nosymfollow"),
        (!options.suid, "nosuid"),
        (!options.dev, "nodev"),
        (options.allow_other, "allow_other"),
    ];
    let wanted = flags.iter().filter(|(wanted, _)| *wanted);
    let words: Vec<_> = wanted.map(|(_, word)| *word).collect();
    words.join(",")
}

/// Runs the helper until it has mounted. It then continues in the background.
fn run_fuse_overlayfs(command: &mut Command) -> Result<(), MountError> {
    let refused = |message: String| MountError::Overlay(io::Error::other(message), true);
    let output = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| {
            let program = Path::new(command.get_program()).display();
            refused(format!("cannot start {program}: {error}"))
        })?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last_line = stderr.trim().lines().next_back();
    let message = last_line.map_or_else(|| output.status.to_string(), str::to_owned);
    Err(refused(format!("{FUSE_OVERLAYFS}: {message}")))
}

fn find_fuse_overlayfs() -> Option<PathBuf> {
    let places = FUSE_OVERLAYFS_DIRS.map(|place| Path::new(place).join(FUSE_OVERLAYFS));
    places.into_iter().find(|place| place.is_file())
}

fn may_mount() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// Whether the mount at `mountpoint` is a tarfs overlay. Only tarfs names a lower directory that way.
pub(super) fn is_tarfs_overlay(mountpoint: &Path) -> io::Result<bool> {
    Ok(lower_dir_of(mountpoint)?.is_some_and(|lower| is_tarfs_lower_dir(&lower)))
}

fn lower_dir_of(mountpoint: &Path) -> io::Result<Option<PathBuf>> {
    let top = mountinfo::top_mount(mountpoint)?.filter(|top| top.fs_type == OVERLAY_FS_TYPE);
    let Some(top) = top else {
        return Ok(None);
    };
    let mut words = top.options.split(|&byte| byte == b',');
    let lower = words.find_map(|word| word.strip_prefix(b"lowerdir="));
    Ok(lower.map(|lower| PathBuf::from(OsString::from_vec(mountinfo::unescape(lower)))))
}

/// Prefix of a scratch directory's name. It holds the lower mount until the overlay covers it.
pub const SCRATCH_PREFIX: &str = "tarfs-writable-";
/// Name of the mountpoint in the scratch directory.
pub const LOWER_DIR_NAME: &str = "lower";

fn is_tarfs_lower_dir(lower: &Path) -> bool {
    let scratch = lower.parent().and_then(Path::file_name);
    lower.file_name().is_some_and(|name| name == LOWER_DIR_NAME)
        && scratch.is_some_and(|name| name.as_bytes().starts_with(SCRATCH_PREFIX.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upper(is_temporary: bool) -> UpperDirs {
        UpperDirs {
            upper: "/v/a,b/upper".into(),
            work: "/v/a:b/work".into(),
            is_temporary,
        }
    }

    fn text(is_temporary: bool, in_namespace: bool) -> String {
        let data = overlay_options(Path::new("/l:o,w\\"), &upper(is_temporary), in_namespace);
        String::from_utf8(data).expect("UTF-8")
    }

    // Promises: upper-whole, upper-quick, writable-exceptions
    #[test]
    fn overlay_options_follow_upper_dirs_and_namespace() {
        assert_eq!(
            text(false, false),
            "lowerdir=/l\\:o\\,w\\\\,upperdir=/v/a\\,b/upper,workdir=/v/a:b/work,\
             index=off,xino=on,metacopy=off,redirect_dir=off"
        );
        assert!(text(true, false).ends_with("metacopy=on,redirect_dir=on,volatile"));
        assert!(text(true, true).ends_with("index=off,xino=on,userxattr,volatile"));
    }

    // Promises: upper-named
    #[test]
    fn overlay_options_longer_than_a_page_fail() {
        assert!(check_options_len(&[b'x'; 4095], 4096).is_ok());
        let refused = check_options_len(&[b'x'; 4096], 4096).expect_err("too long");
        let message = refused.to_string();
        assert!(
            message.ends_with("take 4096 bytes, and the kernel reads 4095"),
            "{message}"
        );
    }

    #[test]
    fn lower_dir_of_tarfs_is_recognized() {
        assert!(is_tarfs_lower_dir(Path::new(
            "/var/tmp/tarfs-writable-0f/lower"
        )));
        assert!(!is_tarfs_lower_dir(Path::new(
            "/var/tmp/tarfs-writable-0f/upper"
        )));
        assert!(!is_tarfs_lower_dir(Path::new("/var/lib/docker/lower")));
    }
}
