//! A mount gives the same results and errnos as a read-only bind mount of the same tree on a local
//! file system.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{
    Access, AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, SeekFrom,
    Timestamps, UTIME_NOW, Uid, XattrFlags, accessat, chmodat, chownat, fallocate, fchmod, fchown,
    fdatasync, flock, fsync, ftruncate, getxattr, linkat, listxattr, makedev, mkdirat, mknodat,
    open, readlink, removexattr, renameat_with, rmdir, seek, setxattr, stat, statvfs, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::{Errno, read, write};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use rustix::time::Timespec;

use tarfs::internal::thread::Thread;

use crate::support::fixture::TestDir;
use crate::support::program::stderr_text;

/// A name, and an operation on a tree with its result.
type Case = (&'static str, fn(&Path) -> Result<String, Errno>);

/// Shell commands that create the tree.
const TREE: &str = r"
mkdir -p t/dir/sub t/empty t/closed
echo file >t/file; echo f1 >t/dir/f1; echo inner >t/closed/inner; cp /bin/true t/program
ln t/file t/hard; ln -s file t/link; ln -s nothing t/dangling; ln -s loop t/loop; ln -s dir t/way
mkfifo t/fifo; mknod t/device c 1 3; truncate -s 1M t/sparse
echo secret >t/secret; chown -R 7:7 t/secret t/closed; chmod 600 t/secret; chmod 700 t/closed
echo run >t/script; chmod 644 t/script
setfattr -n user.x -v value t/file; setfattr -n user.d -v value t/dir
tar --xattrs --xattrs-include='user.*' -C t -cf a.tar .
mkdir ref; tar --xattrs --xattrs-include='user.*' -C ref -xpf a.tar
mount --bind ref ref; mount -o remount,bind,ro,nosuid,nodev ref
";

/// The local tree and the mount. Dropping it unmounts.
struct Place(TestDir);

impl Place {
    fn new() -> Self {
        let place = Self(TestDir::new(&["mnt"]));
        place.shell(TREE);
        let words = ["mount", "-o", "allow_other", "--wait-index", "a.tar", "mnt"];
        place.0.succeeds(&words);
        place
    }

    fn shell(&self, script: &str) {
        let mut shell = Command::new("sh");
        let output = shell
            .args(["-euc", script])
            .current_dir(self.0.root())
            .output();
        let output = output.expect("started");
        assert!(output.status.success(), "{}", stderr_text(&output));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shell("umount -l mnt || true; umount -l ref || true");
    }
}

fn try_open(root: &Path, name: &str, flags: OFlags) -> Result<String, Errno> {
    open(root.join(name), flags | OFlags::NONBLOCK, Mode::RUSR)?;
    Ok("opened".to_owned())
}

fn done(result: rustix::io::Result<()>) -> Result<String, Errno> {
    result.map(|()| "done".to_owned())
}

fn try_rename(root: &Path, old: &str, new: &str, flags: RenameFlags) -> Result<String, Errno> {
    done(renameat_with(
        CWD,
        root.join(old),
        CWD,
        root.join(new),
        flags,
    ))
}

fn try_unlink(root: &Path, name: &str, flags: AtFlags) -> Result<String, Errno> {
    done(unlinkat(CWD, root.join(name), flags))
}

fn try_link(root: &Path, old: &str, new: &str) -> Result<String, Errno> {
    done(linkat(
        CWD,
        root.join(old),
        CWD,
        root.join(new),
        AtFlags::empty(),
    ))
}

fn try_mknod(root: &Path, name: &str, kind: FileType) -> Result<String, Errno> {
    let device = makedev(1, 3);
    done(mknodat(CWD, root.join(name), kind, Mode::RUSR, device))
}

fn read_only(root: &Path, name: &str) -> Result<rustix::fd::OwnedFd, Errno> {
    open(root.join(name), OFlags::RDONLY, Mode::empty())
}

fn try_set_mtime(root: &Path, name: &str, nanos: i64) -> Result<String, Errno> {
    let time = Timespec {
        tv_sec: 7,
        tv_nsec: nanos,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    done(utimensat(
        CWD,
        root.join(name),
        &times,
        AtFlags::SYMLINK_NOFOLLOW,
    ))
}

/// Calls truncate(2), which needs another language.
fn try_truncate(root: &Path, name: &str) -> Result<String, Errno> {
    let script = "import os, sys
try: os.truncate(sys.argv[1], 0)
except OSError as error: print(error.errno)";
    let mut python = Command::new("python3");
    let output = python.args(["-c", script]).arg(root.join(name)).output();
    let said = String::from_utf8(output.expect("python3").stdout).expect("text");
    match said.trim().parse() {
        Ok(number) => Err(Errno::from_raw_os_error(number)),
        Err(_) => Ok("done".to_owned()),
    }
}

fn try_stat(root: &Path, name: &str) -> Result<String, Errno> {
    let found = stat(root.join(name))?;
    let kind = FileType::from_raw_mode(found.st_mode);
    let len = if kind == FileType::RegularFile {
        found.st_size
    } else {
        0
    };
    Ok(format!("{:o} {} {len}", found.st_mode, found.st_uid))
}

fn try_access(root: &Path, name: &str, access: Access) -> Result<String, Errno> {
    done(accessat(CWD, root.join(name), access, AtFlags::empty()))
}

fn try_chown(root: &Path, name: &str) -> Result<String, Errno> {
    let (user, group) = (Some(Uid::from_raw(7)), Some(Gid::from_raw(7)));
    done(chownat(
        CWD,
        root.join(name),
        user,
        group,
        AtFlags::SYMLINK_NOFOLLOW,
    ))
}

fn try_getxattr(root: &Path, path: &str, name: &str, room: usize) -> Result<String, Errno> {
    let mut value = vec![0; room];
    let len = getxattr(root.join(path), name, &mut value)?;
    Ok(format!("{len} bytes, {:?}", value.get(..len)))
}

fn set(root: &Path, path: &str, name: &str, flags: XattrFlags) -> Result<String, Errno> {
    done(setxattr(root.join(path), name, b"new", flags))
}

fn try_exec(root: &Path, name: &str) -> Result<String, Errno> {
    match Command::new(root.join(name)).status() {
        Ok(status) => Ok(status.to_string()),
        Err(error) => Err(errno(&error)),
    }
}

const WRITE: OFlags = OFlags::WRONLY;
const NEW: OFlags = OFlags::WRONLY.union(OFlags::CREATE);
const EXCLUSIVE: OFlags = NEW.union(OFlags::EXCL);
const NONE: RenameFlags = RenameFlags::empty();

const OPENS: &[Case] = &[
    ("open to write", |root| try_open(root, "file", WRITE)),
    ("open to read and write", |root| {
        try_open(root, "file", OFlags::RDWR)
    }),
    ("open to append", |root| {
        try_open(root, "file", WRITE | OFlags::APPEND)
    }),
    ("open and truncate", |root| {
        try_open(root, "file", WRITE | OFlags::TRUNC)
    }),
    ("open to read and truncate", |root| {
        try_open(root, "file", OFlags::TRUNC)
    }),
    ("open to write by a link", |root| {
        try_open(root, "link", WRITE)
    }),
    ("open to write by a dangling link", |root| {
        try_open(root, "dangling", WRITE)
    }),
    ("create by a dangling link", |root| {
        try_open(root, "dangling", NEW)
    }),
    ("create", |root| try_open(root, "new", NEW)),
    ("create to read", |root| {
        try_open(root, "new", OFlags::CREATE)
    }),
    ("create exclusively", |root| {
        try_open(root, "new", EXCLUSIVE)
    }),
    ("create in a missing directory", |root| {
        try_open(root, "none/new", NEW)
    }),
    ("create in a file", |root| try_open(root, "file/new", NEW)),
    ("create what is there", |root| try_open(root, "file", NEW)),
    ("create what is there to read", |root| {
        try_open(root, "file", OFlags::CREATE)
    }),
    ("create what is there exclusively", |root| {
        try_open(root, "file", EXCLUSIVE)
    }),
    ("create a directory's name", |root| {
        try_open(root, "dir", NEW)
    }),
    ("create over a link exclusively", |root| {
        try_open(root, "link", EXCLUSIVE)
    }),
    ("create what is nameless", |root| {
        try_open(root, "dir", WRITE | OFlags::TMPFILE)
    }),
    ("open a directory to write", |root| {
        try_open(root, "dir", WRITE)
    }),
    ("open a fifo to write", |root| try_open(root, "fifo", WRITE)),
    ("open a fifo to read", |root| {
        try_open(root, "fifo", OFlags::RDONLY)
    }),
    ("open a device", |root| try_open(root, "device", WRITE)),
    ("open a device to read", |root| {
        try_open(root, "device", OFlags::RDONLY)
    }),
    ("open a file as a directory", |root| {
        try_open(root, "file", OFlags::DIRECTORY)
    }),
    ("open a link itself", |root| {
        try_open(root, "link", OFlags::NOFOLLOW)
    }),
    ("open what is not there", |root| {
        try_open(root, "none", OFlags::RDONLY)
    }),
    ("open in circles", |root| {
        try_open(root, "loop", OFlags::RDONLY)
    }),
    ("open directly", |root| {
        try_open(root, "file", OFlags::DIRECT)
    }),
    ("open without access time", |root| {
        try_open(root, "file", OFlags::NOATIME)
    }),
    ("open a path", |root| try_open(root, "file", OFlags::PATH)),
];

const NAMES: &[Case] = &[
    ("mkdir", |root| {
        done(mkdirat(CWD, root.join("new"), Mode::RWXU))
    }),
    ("mkdir of what is there", |root| {
        done(mkdirat(CWD, root.join("dir"), Mode::RWXU))
    }),
    ("mkdir over a file", |root| {
        done(mkdirat(CWD, root.join("file"), Mode::RWXU))
    }),
    ("mkdir in a missing directory", |root| {
        done(mkdirat(CWD, root.join("none/new"), Mode::RWXU))
    }),
    ("mknod of a fifo", |root| {
        try_mknod(root, "new", FileType::Fifo)
    }),
    ("mknod of a device", |root| {
        try_mknod(root, "new", FileType::CharacterDevice)
    }),
    ("mknod of a file", |root| {
        try_mknod(root, "new", FileType::RegularFile)
    }),
    ("mknod over a file", |root| {
        try_mknod(root, "file", FileType::Fifo)
    }),
    ("symlink", |root| {
        done(symlinkat("x", CWD, root.join("new")))
    }),
    ("symlink over a file", |root| {
        done(symlinkat("x", CWD, root.join("file")))
    }),
    ("link", |root| try_link(root, "file", "new")),
    ("link over a file", |root| try_link(root, "file", "dir/f1")),
    ("link of a directory", |root| try_link(root, "dir", "new")),
    ("link of nothing", |root| try_link(root, "none", "new")),
    ("link of a link", |root| try_link(root, "link", "new")),
    ("rename", |root| try_rename(root, "file", "new", NONE)),
    ("rename over a file", |root| {
        try_rename(root, "file", "dir/f1", NONE)
    }),
    ("rename to another link of it", |root| {
        try_rename(root, "file", "hard", NONE)
    }),
    ("rename to itself", |root| {
        try_rename(root, "file", "file", NONE)
    }),
    ("rename of a directory", |root| {
        try_rename(root, "dir", "new", NONE)
    }),
    ("rename into itself", |root| {
        try_rename(root, "dir", "dir/sub/new", NONE)
    }),
    ("rename of nothing", |root| {
        try_rename(root, "none", "new", NONE)
    }),
    ("rename of a file over a directory", |root| {
        try_rename(root, "file", "dir", NONE)
    }),
    ("rename of a directory over a file", |root| {
        try_rename(root, "dir", "file", NONE)
    }),
    ("rename over nothing only", |root| {
        try_rename(root, "file", "hard", RenameFlags::NOREPLACE)
    }),
    ("exchange", |root| {
        try_rename(root, "file", "dir", RenameFlags::EXCHANGE)
    }),
    ("rename and leave a whiteout", |root| {
        try_rename(root, "file", "new", RenameFlags::WHITEOUT)
    }),
    ("unlink", |root| try_unlink(root, "file", AtFlags::empty())),
    ("unlink of a link", |root| {
        try_unlink(root, "link", AtFlags::empty())
    }),
    ("unlink of nothing", |root| {
        try_unlink(root, "none", AtFlags::empty())
    }),
    ("unlink of a directory", |root| {
        try_unlink(root, "dir", AtFlags::empty())
    }),
    ("unlink in a file", |root| {
        try_unlink(root, "file/x", AtFlags::empty())
    }),
    ("rmdir", |root| done(rmdir(root.join("empty")))),
    ("rmdir of a full one", |root| done(rmdir(root.join("dir")))),
    ("rmdir of a file", |root| done(rmdir(root.join("file")))),
    ("rmdir of nothing", |root| done(rmdir(root.join("none")))),
    ("rmdir of a dot", |root| done(rmdir(root.join("empty/.")))),
    ("rmdir of two dots", |root| {
        done(rmdir(root.join("empty/..")))
    }),
];

const CHANGES: &[Case] = &[
    ("chmod", |root| {
        done(chmodat(
            CWD,
            root.join("file"),
            Mode::RWXU,
            AtFlags::empty(),
        ))
    }),
    ("chmod of a directory", |root| {
        done(chmodat(CWD, root.join("dir"), Mode::RWXU, AtFlags::empty()))
    }),
    ("chmod of nothing", |root| {
        done(chmodat(
            CWD,
            root.join("none"),
            Mode::RWXU,
            AtFlags::empty(),
        ))
    }),
    ("fchmod", |root| {
        done(fchmod(read_only(root, "file")?, Mode::RWXU))
    }),
    ("chown", |root| try_chown(root, "file")),
    ("chown of a link", |root| try_chown(root, "link")),
    ("chown of nothing", |root| try_chown(root, "none")),
    ("fchown", |root| {
        done(fchown(
            read_only(root, "file")?,
            Some(Uid::from_raw(7)),
            None,
        ))
    }),
    ("times", |root| try_set_mtime(root, "file", 8)),
    ("times of now", |root| {
        try_set_mtime(root, "file", UTIME_NOW)
    }),
    ("times of a link", |root| try_set_mtime(root, "link", 8)),
    ("times of nothing", |root| try_set_mtime(root, "none", 8)),
    ("times that make no sense", |root| {
        try_set_mtime(root, "file", 2_000_000_000)
    }),
    ("truncate", |root| try_truncate(root, "file")),
    ("truncate of a directory", |root| try_truncate(root, "dir")),
    ("truncate of nothing", |root| try_truncate(root, "none")),
    ("ftruncate", |root| {
        done(ftruncate(read_only(root, "file")?, 0))
    }),
    ("fallocate", |root| {
        let file = read_only(root, "file")?;
        done(fallocate(file, FallocateFlags::empty(), 0, 1))
    }),
    ("write", |root| {
        write(read_only(root, "file")?, b"x").map(|len| len.to_string())
    }),
    ("fsync", |root| done(fsync(read_only(root, "file")?))),
    ("fdatasync", |root| {
        done(fdatasync(read_only(root, "file")?))
    }),
    ("fsync of a directory", |root| {
        done(fsync(read_only(root, "dir")?))
    }),
    ("lock", |root| {
        let file = read_only(root, "file")?;
        done(flock(
            file,
            rustix::fs::FlockOperation::NonBlockingLockExclusive,
        ))
    }),
    ("set an attribute", |root| {
        set(root, "file", "user.new", XattrFlags::empty())
    }),
    ("set a trusted one", |root| {
        set(root, "file", "trusted.new", XattrFlags::empty())
    }),
    ("set a label", |root| {
        set(root, "file", "security.new", XattrFlags::empty())
    }),
    ("set one of nothing", |root| {
        set(root, "none", "user.new", XattrFlags::empty())
    }),
    ("set one of no kind", |root| {
        set(root, "file", "bogus.new", XattrFlags::empty())
    }),
    ("set one of a fifo", |root| {
        set(root, "fifo", "user.new", XattrFlags::empty())
    }),
    ("replace an attribute", |root| {
        set(root, "file", "user.x", XattrFlags::REPLACE)
    }),
    ("replace a missing one", |root| {
        set(root, "file", "user.no", XattrFlags::REPLACE)
    }),
    ("create one that is there", |root| {
        set(root, "file", "user.x", XattrFlags::CREATE)
    }),
    ("remove an attribute", |root| {
        done(removexattr(root.join("file"), "user.x"))
    }),
    ("remove a missing one", |root| {
        done(removexattr(root.join("file"), "user.no"))
    }),
    ("remove one of nothing", |root| {
        done(removexattr(root.join("none"), "user.no"))
    }),
];

const READS: &[Case] = &[
    ("stat", |root| try_stat(root, "file")),
    ("stat by a link", |root| try_stat(root, "way/f1")),
    ("stat of a directory", |root| try_stat(root, "dir/.")),
    ("stat of nothing", |root| try_stat(root, "none")),
    ("stat below nothing", |root| try_stat(root, "none/none")),
    ("stat below a file", |root| try_stat(root, "file/x")),
    ("stat of a file as a directory", |root| {
        try_stat(root, "file/")
    }),
    ("stat by a dangling link", |root| try_stat(root, "dangling")),
    ("stat in circles", |root| try_stat(root, "loop")),
    ("stat of a long name", |root| {
        try_stat(root, &"n".repeat(255))
    }),
    ("stat of a longer one", |root| {
        try_stat(root, &"n".repeat(256))
    }),
    ("stat of one beyond all", |root| {
        try_stat(root, &"n".repeat(1100))
    }),
    ("stat of a long path", |root| {
        try_stat(root, &"dir/../".repeat(600))
    }),
    ("stat of a name that is no text", |root| {
        let name = OsStr::from_bytes(b"\xff\xfe");
        stat(root.join(name)).map(|_| String::new())
    }),
    ("read", |root| {
        let mut bytes = [0; 9];
        let len = read(read_only(root, "file")?, &mut bytes)?;
        Ok(format!("{len} {bytes:?}"))
    }),
    ("read a directory", |root| {
        read(read_only(root, "dir")?, &mut [0; 9]).map(|len| len.to_string())
    }),
    ("seek behind the end", |root| {
        let file = read_only(root, "file")?;
        seek(file, SeekFrom::Start(99)).map(|at| at.to_string())
    }),
    ("seek before the beginning", |root| {
        let file = read_only(root, "file")?;
        seek(file, SeekFrom::End(-99)).map(|at| at.to_string())
    }),
    ("data behind the end", |root| {
        let file = read_only(root, "sparse")?;
        seek(file, SeekFrom::Data(1 << 20)).map(|at| at.to_string())
    }),
    ("data in a hole", |root| {
        let file = read_only(root, "sparse")?;
        seek(file, SeekFrom::Data(0)).map(|at| at.to_string())
    }),
    ("a hole in a hole", |root| {
        let file = read_only(root, "sparse")?;
        seek(file, SeekFrom::Hole(5)).map(|at| at.to_string())
    }),
    ("a hole at the end", |root| {
        let file = read_only(root, "file")?;
        seek(file, SeekFrom::Hole(0)).map(|at| at.to_string())
    }),
    ("readlink", |root| {
        readlink(root.join("link"), Vec::new()).map(|target| format!("{target:?}"))
    }),
    ("readlink of a file", |root| {
        readlink(root.join("file"), Vec::new()).map(|target| format!("{target:?}"))
    }),
    ("readlink of a directory", |root| {
        readlink(root.join("dir"), Vec::new()).map(|target| format!("{target:?}"))
    }),
    ("readlink of nothing", |root| {
        readlink(root.join("none"), Vec::new()).map(|target| format!("{target:?}"))
    }),
    ("an attribute", |root| {
        try_getxattr(root, "file", "user.x", 99)
    }),
    ("its length", |root| try_getxattr(root, "file", "user.x", 0)),
    ("too little room", |root| {
        try_getxattr(root, "file", "user.x", 2)
    }),
    ("a missing attribute", |root| {
        try_getxattr(root, "file", "user.no", 99)
    }),
    ("a trusted one", |root| {
        try_getxattr(root, "file", "trusted.no", 99)
    }),
    ("one of no kind", |root| {
        try_getxattr(root, "file", "bogus.no", 99)
    }),
    ("a user's one of a fifo", |root| {
        try_getxattr(root, "fifo", "user.no", 99)
    }),
    ("one of nothing", |root| {
        try_getxattr(root, "none", "user.no", 99)
    }),
    ("too long a name", |root| {
        try_getxattr(root, "file", &format!("user.{}", "n".repeat(256)), 9)
    }),
    ("all attributes", |root| {
        let mut names = [0; 99];
        let len = listxattr(root.join("dir"), &mut names)?;
        Ok(format!("{:?}", names.get(..len)))
    }),
    ("too little room for all", |root| {
        listxattr(root.join("dir"), &mut [0; 3]).map(|len| len.to_string())
    }),
    ("may read", |root| try_access(root, "file", Access::READ_OK)),
    ("may write", |root| {
        try_access(root, "file", Access::WRITE_OK)
    }),
    ("may write to a directory", |root| {
        try_access(root, "dir", Access::WRITE_OK)
    }),
    ("may write to a fifo", |root| {
        try_access(root, "fifo", Access::WRITE_OK)
    }),
    ("may run", |root| {
        try_access(root, "program", Access::EXEC_OK)
    }),
    ("may run what is none", |root| {
        try_access(root, "file", Access::EXEC_OK)
    }),
    ("is there", |root| try_access(root, "none", Access::EXISTS)),
    ("list a file", |root| {
        let listed = fs::read_dir(root.join("file"));
        listed.map(|_| String::new()).map_err(|error| errno(&error))
    }),
    ("run", |root| try_exec(root, "program")),
    ("run what is not to be run", |root| try_exec(root, "script")),
    ("run a directory", |root| try_exec(root, "dir")),
    ("run nothing", |root| try_exec(root, "none")),
    ("file system", |root| {
        let found = statvfs(root.join("file"))?;
        Ok(format!("{:?} {}", found.f_flag, found.f_namemax))
    }),
];

/// Operations of a process without root's capabilities.
const UNPRIVILEGED: &[Case] = &[
    ("another's file", |root| {
        try_open(root, "secret", OFlags::RDONLY)
    }),
    ("another's directory", |root| {
        try_open(root, "closed", OFlags::RDONLY)
    }),
    ("in another's directory", |root| {
        try_open(root, "closed/inner", OFlags::RDONLY)
    }),
    ("stat of another's", |root| try_stat(root, "secret")),
    ("stat in another's directory", |root| {
        try_stat(root, "closed/inner")
    }),
    ("nothing in another's directory", |root| {
        try_stat(root, "closed/none")
    }),
    ("into another's directory", |root| {
        try_open(root, "closed/new", NEW)
    }),
    ("may read another's", |root| {
        try_access(root, "secret", Access::READ_OK)
    }),
    ("chmod of another's", |root| {
        done(chmodat(
            CWD,
            root.join("secret"),
            Mode::RWXU,
            AtFlags::empty(),
        ))
    }),
    ("attribute of another's", |root| {
        try_getxattr(root, "secret", "user.x", 9)
    }),
    ("unlink in another's directory", |root| {
        try_unlink(root, "closed/inner", AtFlags::empty())
    }),
    ("no access time of another's", |root| {
        try_open(root, "secret", OFlags::NOATIME)
    }),
    ("run another's", |root| try_exec(root, "secret")),
];

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).expect("of the system")
}

/// Cases in which the mount and the local tree differ.
fn differences(place: &Place, cases: &[Case]) -> Vec<String> {
    let (mount, local) = (place.path("mnt"), place.path("ref"));
    let text_of = |result: Result<String, Errno>| result.unwrap_or_else(|errno| errno.to_string());
    cases
        .iter()
        .map(|(name, case)| (name, text_of(case(&mount)), text_of(case(&local))))
        .filter(|(_, here, there)| here != there)
        .map(|(name, here, there)| format!("{name}: {here}, and locally {there}"))
        .collect()
}

// Promises: readonly-errno
#[test]
fn write_calls_fail_as_on_read_only_bind_mount() {
    let place = Place::new();
    for cases in [OPENS, NAMES, CHANGES] {
        assert_eq!(differences(&place, cases), [""; 0]);
    }
    let refused = try_open(&place.path("mnt"), "file", WRITE);
    assert_eq!(refused, Err(Errno::ROFS));
}

// Promises: readonly-errno
#[test]
fn read_calls_answer_as_on_local_file_system() {
    let place = Place::new();
    assert_eq!(differences(&place, READS), [""; 0]);
    let thread = Thread::spawn("another", move || {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, none).expect("given up");
        let found = differences(&place, UNPRIVILEGED);
        let open = |flags| try_open(&place.path("mnt"), "secret", flags);
        let closed = (open(OFlags::RDONLY), open(WRITE));
        (place, found, closed)
    });
    // A process without capabilities cannot unmount, so the mount is dropped elsewhere.
    let (_place, found, closed) = thread.expect("a thread").join();
    assert_eq!(found, [""; 0]);
    // A read-only file system returns EROFS before it checks permissions. A bind mount checks
    // permissions first.
    assert_eq!(closed, (Err(Errno::ACCESS), Err(Errno::ROFS)));
}
