//! Trees with entries of every kind, mounted by the kernel.

use std::collections::HashSet;
use std::ffi::CString;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    SeekFrom as Sparse, XattrFlags, getxattr, getxattr_query, listxattr, makedev, seek, setxattr,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use tarfs::ArchivePath;
use tarfs::Stats;
use tarfs::archive::{
    Archive, BuiltIndex, Callback, IndexGuard, IsWanted, MemoryUse, ReadError, ReadReply, Volume,
    WaitFor,
};
use tarfs::fuse::{
    Force, Mount, MountOptions, NewMount, Subtree, TarFilesystem, UnmountError, is_mounted,
};
use tarfs::index::{Builder, Index, Ino, LazyIndex, Options, Origin};
use tarfs::internal::thread::Thread;
use tarfs::materialize::{Materializer, Options as MaterializeOptions, XattrFilter};
use tarfs::tar::{Device, Member, MemberKind, Segment, Timestamp};
use tarfs::{Extent, Plain};

use crate::support::wait;

/// An archive in memory.
#[derive(Debug)]
struct MemoryArchive {
    index: Index,
    plain: Vec<u8>,
    speed: ReplyTiming,
}

/// How an archive answers reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReplyTiming {
    /// At once.
    AtOnce,
    /// From another thread.
    Later,
    /// Never: the reply is dropped.
    Never,
}

impl MemoryArchive {
    fn bytes(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        let entry = self.index.entry(ino).ok_or(ReadError::NotAFile)?;
        let end = entry.size().min(offset + u64::from(len));
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(offset)).expect("small")];
        for piece in entry.pieces(offset, u64::from(len)) {
            for number in 0..piece.plain.len() {
                let target = (piece.offset + number).checked_sub(offset);
                let target = target.and_then(|target| usize::try_from(target).ok());
                let source = usize::try_from(piece.plain.start().0 + number).expect("small");
                let slot = target.and_then(|target| bytes.get_mut(target));
                if let (Some(slot), Some(byte)) = (slot, self.plain.get(source)) {
                    *slot = *byte;
                }
            }
        }
        Ok(bytes.into())
    }
}

impl Volume for MemoryArchive {
    fn index(&self) -> IndexGuard<'_> {
        IndexGuard::new(BuiltIndex::Complete(&self.index))
    }

    fn is_scan_over(&self) -> bool {
        true
    }

    fn on_available(&self, _awaited: WaitFor, then: Callback) {
        then.run();
    }

    fn try_read(&self, ino: Ino, offset: u64, len: u32) -> Option<Result<Bytes, ReadError>> {
        (self.speed == ReplyTiming::AtOnce).then(|| self.bytes(ino, offset, len))
    }

    fn read(&self, ino: Ino, offset: u64, len: u32, _wanted: IsWanted, done: ReadReply) {
        if self.speed == ReplyTiming::Later {
            let bytes = self.bytes(ino, offset, len);
            Thread::spawn("later", move || done(bytes))
                .expect("a thread")
                .join();
        }
    }

    fn read_blocking(&self, ino: Ino, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        self.bytes(ino, offset, len)
    }

    fn complete_index(&self) -> Option<LazyIndex> {
        None
    }

    fn archives(&self) -> Vec<&Archive> {
        Vec::new()
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse::default()
    }
}

/// Members and the plain bytes of their payloads.
#[derive(Default)]
struct Sample {
    members: Vec<Member>,
    plain: Vec<u8>,
}

impl Sample {
    fn add(&mut self, name: &str, kind: MemberKind) -> &mut Member {
        self.members.push(Member {
            header: Plain(self.members.len() as u64 * 512),
            payload: Extent::with_len(Plain(self.plain.len() as u64), 0),
            mode: if kind == MemberKind::Directory {
                0o755
            } else {
                0o644
            },
            ..Member::new(name, kind)
        });
        self.members.last_mut().expect("just pushed")
    }

    fn file(&mut self, name: &str, content: &[u8]) -> &mut Member {
        let payload = Extent::with_len(Plain(self.plain.len() as u64), content.len() as u64);
        self.plain.extend_from_slice(content);
        let member = self.add(name, MemberKind::File);
        member.payload = payload;
        member.size = content.len() as u64;
        member
    }

    fn content(self, speed: ReplyTiming) -> MemoryArchive {
        let mut builder = Builder::new(Options::default());
        for member in &self.members {
            builder.add_member(member).expect("well-formed");
        }
        MemoryArchive {
            index: builder.finish(Origin::default()),
            plain: self.plain,
            speed,
        }
    }

    fn mount(self) -> Mounted {
        Mounted::new(self.content(ReplyTiming::AtOnce), Subtree::WHOLE, "")
    }
}

/// A mount in its own directory. Dropping it unmounts.
struct Mounted {
    mount: Option<Mount>,
    stats: Arc<Stats>,
    ended: mpsc::Receiver<()>,
    directory: tempfile::TempDir,
}

impl Mounted {
    fn new(content: impl Volume, view: Subtree, options: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut taken = MountOptions::default();
        taken.apply(options).expect("known options");
        let stats = Arc::new(Stats::default());
        let tree = TarFilesystem::new(Arc::new(content), view, &taken, Arc::clone(&stats))
            .with_xattrs(XattrFilter::everything());
        let (sender, ended) = mpsc::channel();
        let on_end = move || drop(sender);
        let mount = NewMount::on(directory.path(), "sample.tar", &taken)
            .expect("these tests need FUSE: /dev/fuse, and root or fusermount3");
        let mount = Mount::serve(tree, mount, on_end).expect("served");
        Self {
            mount: Some(mount),
            stats,
            ended,
            directory,
        }
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    fn stat(&self, name: &str) -> fs::Metadata {
        fs::symlink_metadata(self.path(name)).expect("there")
    }

    fn mount(&self) -> &Mount {
        self.mount.as_ref().expect("mounted")
    }

    /// Whether the session has ended and the directory is empty again.
    fn is_gone(&self) -> bool {
        let ended = self.ended.recv_timeout(wait::WAIT_TIMEOUT);
        ended == Err(mpsc::RecvTimeoutError::Disconnected)
            && fs::read_dir(self.directory.path())
                .expect("readable")
                .next()
                .is_none()
    }
}

fn one_file() -> Sample {
    let mut sample = Sample::default();
    sample.file("file", b"content");
    sample
}

// Promises: types-flags, times-nanoseconds, times-mount
#[test]
fn every_kind_of_entry_is_shown_correctly() {
    let mut sample = Sample::default();
    let file = sample.file("dir/file", b"content");
    (file.mode, file.uid, file.gid) = (0o4750, 1234, 5678);
    file.mtime = Timestamp {
        seconds: -2,
        nanoseconds: 123_456_789,
    };
    sample.add("link", MemberKind::Symlink(b"dir/file".to_vec()));
    let (major, minor) = (259, 70_000);
    sample.add(
        "char",
        MemberKind::CharDevice(Device { major: 1, minor: 3 }),
    );
    sample.add("block", MemberKind::BlockDevice(Device { major, minor }));
    sample.add("fifo", MemberKind::Fifo).mode = 0o600;
    let mounted = sample.mount();

    let file = mounted.stat("dir/file");
    assert!(file.is_file());
    assert_eq!(file.mode() & 0o7777, 0o4750);
    assert_eq!((file.uid(), file.gid(), file.size()), (1234, 5678, 7));
    assert_eq!((file.mtime(), file.mtime_nsec()), (-2, 123_456_789));
    assert_eq!((file.ctime(), file.ctime_nsec()), (-2, 123_456_789));
    assert_eq!((file.atime(), file.atime_nsec()), (-2, 123_456_789));
    assert!(mounted.stat("dir").is_dir());
    assert_eq!(mounted.stat("dir").nlink(), 2);
    assert_eq!(mounted.stat("").nlink(), 3);
    let target = fs::read_link(mounted.path("link")).expect("a link");
    assert_eq!(target, Path::new("dir/file"));
    assert_eq!(mounted.stat("link").size(), 8);
    assert!(mounted.stat("char").file_type().is_char_device());
    assert_eq!(mounted.stat("char").rdev(), makedev(1, 3));
    assert!(mounted.stat("block").file_type().is_block_device());
    assert_eq!(mounted.stat("block").rdev(), makedev(major, minor));
    assert!(mounted.stat("fifo").file_type().is_fifo());
    let missing = fs::metadata(mounted.path("missing")).expect_err("absent");
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

// Promises: names-bytes, error-line
#[test]
fn names_need_not_be_utf8() {
    let mut sample = Sample::default();
    sample.add("name", MemberKind::File).name = b"caf\xe9".to_vec();
    let mounted = sample.mount();
    let names: Vec<_> = fs::read_dir(mounted.path(""))
        .expect("readable")
        .map(|entry| entry.expect("readable").file_name())
        .collect();
    assert_eq!(names, [OsStr::from_bytes(b"caf\xe9")]);
    assert!(mounted.path(OsStr::from_bytes(b"caf\xe9")).exists());
}

// Promises: hardlink-inode
#[test]
fn hard_links_share_inode_and_link_count() {
    let mut sample = one_file();
    sample.add("again", MemberKind::HardLink(b"file".to_vec()));
    let mounted = sample.mount();
    assert_eq!(mounted.stat("file").ino(), mounted.stat("again").ino());
    assert_eq!(mounted.stat("again").nlink(), 2);
    assert_eq!(
        fs::read(mounted.path("again")).expect("readable"),
        b"content"
    );
}

#[test]
fn content_is_the_same_by_immediate_and_late_replies() {
    let content: Vec<u8> = (0..3_000_000_u32)
        .map(|number| (number % 251) as u8)
        .collect();
    for speed in [ReplyTiming::AtOnce, ReplyTiming::Later] {
        let mut sample = one_file();
        sample.file("large", &content);
        let mounted = Mounted::new(sample.content(speed), Subtree::WHOLE, "");
        let file = File::open(mounted.path("large")).expect("there");
        let mut bytes = [0; 1000];
        file.read_exact_at(&mut bytes, 1_234_567).expect("inside");
        assert_eq!(Some(&bytes[..]), content.get(1_234_567..1_235_567));
        assert_eq!(file.read_at(&mut bytes, 2_999_990).expect("at the end"), 10);
        assert_eq!(file.read_at(&mut bytes, 5_000_000).expect("past it"), 0);
        assert_eq!(fs::read(mounted.path("large")).expect("readable"), content);
        assert_eq!(
            fs::read(mounted.path("file")).expect("readable"),
            b"content"
        );
        assert!(mounted.stats.served_bytes.get() >= 3_000_007);
    }
}

// Promises: holes-kept
#[test]
fn holes_are_reported_and_use_no_blocks() {
    const MIB: u64 = 1 << 20;
    let mut sample = Sample::default();
    let file = sample.file("sparse", &[7; 8192]);
    file.size = 3 * MIB;
    file.sparse = Some(vec![
        Segment {
            offset: MIB,
            len: 4096,
        },
        Segment {
            offset: 2 * MIB,
            len: 4096,
        },
    ]);
    sample.file("dense", &[1; 513]);
    let mounted = sample.mount();
    assert_eq!(mounted.stat("sparse").blocks(), 16);
    assert_eq!(mounted.stat("dense").blocks(), 2);
    let mut file = File::open(mounted.path("sparse")).expect("there");
    assert_eq!(seek(&file, Sparse::Data(0)), Ok(MIB));
    assert_eq!(seek(&file, Sparse::Hole(MIB)), Ok(MIB + 4096));
    assert_eq!(seek(&file, Sparse::Data(MIB + 4096)), Ok(2 * MIB));
    assert_eq!(seek(&file, Sparse::Data(2 * MIB + 4096)), Err(Errno::NXIO));
    assert_eq!(seek(&file, Sparse::Hole(0)), Ok(0));
    file.seek(SeekFrom::Start(MIB - 1)).expect("inside");
    let mut bytes = [9; 3];
    file.read_exact(&mut bytes).expect("inside");
    assert_eq!(bytes, [0, 7, 7]);
    let dense = File::open(mounted.path("dense")).expect("there");
    assert_eq!(seek(&dense, Sparse::Hole(0)), Ok(513));
}

// Promises: xattr-default, xattr-errno
#[test]
fn extended_attributes_are_listed_and_returned() {
    let mut sample = one_file();
    sample.file("tagged", b"").xattrs = vec![
        (b"user.comment".to_vec(), b"hello".to_vec()),
        (b"trusted.note".to_vec(), b"\0\x01".to_vec()),
        (
            b"SCHILY.acl.access".to_vec(),
            b"user::rw-,user:1000:r--,group::r--,mask::r--,other::---".to_vec(),
        ),
    ];
    let mounted = sample.mount();
    let tagged = mounted.path("tagged");
    let mut buffer = [0; 512];
    let len = listxattr(&tagged, &mut buffer[..]).expect("listed");
    let names: HashSet<_> = buffer
        .get(..len)
        .expect("inside")
        .split(|&b| b == 0)
        .collect();
    assert!(names.contains(&b"user.comment"[..]));
    assert!(names.contains(&b"system.posix_acl_access"[..]));
    // The length, the bytes, too small a buffer, and a missing name.
    assert_eq!(getxattr_query(&tagged, "user.comment"), Ok(5));
    assert_eq!(getxattr(&tagged, "user.comment", &mut buffer[..]), Ok(5));
    assert_eq!(buffer.get(..5), Some(&b"hello"[..]));
    let small = &mut [0; 3][..];
    assert_eq!(getxattr(&tagged, "user.comment", small), Err(Errno::RANGE));
    assert_eq!(
        getxattr(&tagged, "user.missing", &mut buffer[..]),
        Err(Errno::NODATA)
    );
    let len = getxattr(&tagged, "system.posix_acl_access", &mut buffer[..]).expect("an ACL");
    assert_eq!(len, 4 + 5 * 8);
    assert_eq!(buffer.get(..4), Some(&[2, 0, 0, 0][..]));
    assert_eq!(buffer.get(16..20), Some(&1000_u32.to_le_bytes()[..]));
    assert_eq!(listxattr(mounted.path("file"), &mut buffer[..]), Ok(0));
}

// Promises: xattr-errno
#[test]
fn security_labels_are_unsupported_without_any() {
    let label = "security.selinux";
    let mut buffer = [0; 64];
    for (attribute, answer) in [("user.comment", Errno::OPNOTSUPP), (label, Errno::NODATA)] {
        let mut sample = one_file();
        sample.file("tagged", b"").xattrs = vec![(attribute.into(), b"hello".to_vec())];
        let mounted = sample.mount();
        let asked = getxattr(mounted.path("tagged"), attribute, &mut buffer[..]);
        assert_eq!(asked, Ok(5));
        let asked = getxattr(mounted.path("file"), label, &mut buffer[..]);
        assert_eq!(asked, Err(answer));
        let other = getxattr(mounted.path("file"), "user.other", &mut buffer[..]);
        assert_eq!(other, Err(Errno::NODATA));
    }
}

// Promises: xattr-errno
#[test]
fn getxattr_without_any_attributes_is_not_supported() {
    let mounted = one_file().mount();
    let mut buffer = [0; 16];
    let refused = getxattr(mounted.path("file"), "user.comment", &mut buffer[..]);
    assert_eq!(refused, Err(Errno::OPNOTSUPP));
    assert_eq!(listxattr(mounted.path("file"), &mut buffer[..]), Ok(0));
}

// Promises: names-order
#[test]
fn large_directory_is_listed_once_in_archive_order() {
    const COUNT: usize = 50_000;
    // The archive's order differs from the order of names.
    let numbers = || (0..COUNT).map(|number| number * 7919 % COUNT);
    let mut sample = Sample::default();
    for number in numbers() {
        sample.add(&format!("many/{number:05}"), MemberKind::File);
    }
    let mounted = sample.mount();
    for _cold_then_cached in 0..2 {
        let names: Vec<_> = fs::read_dir(mounted.path("many"))
            .expect("readable")
            .map(|entry| entry.expect("readable").file_name().into_string())
            .collect::<Result<_, _>>()
            .expect("digits");
        let expected = numbers().map(|number| format!("{number:05}"));
        assert!(names.into_iter().eq(expected));
        assert!(mounted.path("many/07919").exists());
    }
}

// Promises: readonly-errno
#[test]
fn mount_is_read_only() {
    let mut sample = one_file();
    sample.file("tagged", b"").xattrs = vec![(b"user.a".to_vec(), b"b".to_vec())];
    let mounted = sample.mount();
    let file = mounted.path("file");
    let is_refused = |result: io::Result<()>| {
        result.expect_err("refused").kind() == ErrorKind::ReadOnlyFilesystem
    };
    assert!(is_refused(
        OpenOptions::new().write(true).open(&file).map(drop)
    ));
    assert!(is_refused(fs::write(mounted.path("new"), b"x")));
    assert!(is_refused(fs::create_dir(mounted.path("new"))));
    assert!(is_refused(fs::remove_file(&file)));
    assert!(is_refused(fs::rename(&file, mounted.path("other"))));
    assert!(is_refused(fs::hard_link(&file, mounted.path("other"))));
    assert!(is_refused(std::os::unix::fs::symlink(
        "a",
        mounted.path("b")
    )));
    let set = setxattr(&file, "user.x", b"y", XattrFlags::empty());
    assert_eq!(set, Err(Errno::ROFS));
}

// Promises: write-threads
#[test]
fn fuse_destination_gets_more_writers_than_local_one() {
    let mounted = one_file().mount();
    let local = tempfile::tempdir().expect("a directory");
    let count = |directory: &Path| {
        let sink = Materializer::new(
            directory,
            MaterializeOptions::for_this_user(),
            Arc::default(),
        );
        sink.expect("a directory").writer_count()
    };
    assert_eq!(count(local.path()), 2);
    assert_eq!(count(mounted.directory.path()), 16);
}

// Promises: error-alone, error-eio, error-reported
#[test]
fn unanswered_read_fails_with_eio_and_the_rest_works() {
    let mounted = Mounted::new(one_file().content(ReplyTiming::Never), Subtree::WHOLE, "");
    let error = fs::read(mounted.path("file")).expect_err("not answered");
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert_eq!(mounted.stat("file").size(), 7);
}

#[test]
fn statfs_counts_entries_and_reports_full() {
    let mounted = one_file().mount();
    let found = rustix::fs::statvfs(mounted.directory.path()).expect("answered");
    assert_eq!((found.f_files, found.f_ffree), (2, 0));
    assert_eq!((found.f_blocks, found.f_bfree), (1, 0));
    assert_eq!(found.f_namemax, 255);
}

// Promises: owner-mount
#[test]
fn owner_and_mode_options_are_applied() {
    let content = one_file().content(ReplyTiming::AtOnce);
    let mounted = Mounted::new(content, Subtree::WHOLE, "uid=7,gid=8,umask=077");
    let file = mounted.stat("file");
    assert_eq!(
        (file.uid(), file.gid(), file.mode() & 0o7777),
        (7, 8, 0o600)
    );
}

// Promises: inode-number, option-part
#[test]
fn subtree_is_shown_under_its_own_root() {
    let mut sample = Sample::default();
    sample.file("top/README", b"");
    sample.file("top/src/lib/deep", b"deep");
    let content = sample.content(ReplyTiming::AtOnce);
    let view = Subtree::new(&content.index, b"top/src", 0).expect("a directory");
    assert_eq!(Subtree::new(&content.index, b"", 2), Ok(view));
    assert!(Subtree::new(&content.index, b"", 4).is_err());
    for path in [&b"top/README"[..], b"top/README/", b"../top", b"top/none"] {
        assert!(Subtree::new(&content.index, path, 0).is_err());
    }
    let deep = content
        .index
        .find(&ArchivePath::sanitize(b"top/src/lib/deep").path)
        .map(|entry| u64::from(entry.ino().0));

    let mounted = Mounted::new(content, view, "");
    assert_eq!(mounted.stat("").ino(), 1);
    assert_eq!(Some(mounted.stat("lib/deep").ino()), deep);
    assert_eq!(mounted.stat("lib/..").ino(), 1);
    assert_eq!(
        fs::read(mounted.path("lib/deep")).expect("readable"),
        b"deep"
    );
    assert!(!mounted.path("README").exists());
}

// Promises: option-permissions
#[test]
fn default_permissions_enforces_modes_and_acls() {
    let mut sample = Sample::default();
    sample.file("secret", b"secret").mode = 0o600;
    let shared = sample.file("shared", b"shared");
    shared.mode = 0o640;
    shared.xattrs = vec![(
        b"SCHILY.acl.access".to_vec(),
        b"user::rw-,user:65534:r--,group::---,mask::r--,other::---".to_vec(),
    )];
    let mounted = Mounted::new(
        sample.content(ReplyTiming::AtOnce),
        Subtree::WHOLE,
        "allow_other",
    );
    let as_nobody = |name: &str| {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "cat"])
            .arg(mounted.path(name))
            .output()
            .expect("setpriv, from util-linux")
            .stdout
    };
    assert_eq!(as_nobody("secret"), b"");
    assert_eq!(as_nobody("shared"), b"shared");
}

// Promises: option-permissions
#[test]
fn default_permissions_alone_admits_only_the_owner() {
    let mut sample = Sample::default();
    sample.file("file", b"content").mode = 0o644;
    let content = sample.content(ReplyTiming::AtOnce);
    let mounted = Mounted::new(content, Subtree::WHOLE, "default_permissions");
    assert_eq!(
        fs::read(mounted.path("file")).expect("the owner"),
        b"content"
    );
    let other = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "cat"])
        .arg(mounted.path("file"))
        .output()
        .expect("setpriv, from util-linux");
    assert_eq!(other.stdout, b"");
}

/// Unmounts `place` by umount(2). A program that another test starts has copies of this process's descriptors until it
/// runs, among them those of the mount, and makes it busy for that moment.
fn unmount_in_kernel(place: &Path) {
    wait::wait_until("the mount is unused", || {
        match rustix::mount::unmount(place, UnmountFlags::empty()) {
            Err(Errno::BUSY) => false,
            unmounted => {
                unmounted.expect("root");
                true
            }
        }
    });
}

#[test]
fn session_ends_on_any_unmount() {
    let mounted = one_file().mount();
    mounted.mount().unmount(Force::No).expect("not in use");
    assert!(mounted.is_gone());

    let mounted = one_file().mount();
    unmount_in_kernel(mounted.directory.path());
    assert!(mounted.is_gone());

    let mounted = one_file().mount();
    let helped = Command::new("fusermount3")
        .arg("-u")
        .arg(mounted.directory.path())
        .status();
    assert!(helped.expect("fusermount3, from fuse3").success());
    assert!(mounted.is_gone());
    let gone = mounted.mount().unmount(Force::No);
    assert!(matches!(gone, Err(UnmountError::NotMounted(_))));
}

#[test]
fn unmount_spares_other_mount_with_reused_id() {
    // Another test can take the number first. Then a new mount releases its own.
    let (gone, other) = (0..100)
        .find_map(|_| {
            let gone = one_file().mount();
            let number = gone.mount().target().device;
            unmount_in_kernel(gone.directory.path());
            assert!(gone.is_gone());
            // The kernel assigns the lowest free number, so it may first assign a few lower ones.
            let mut others: Vec<Mounted> = Vec::new();
            while others.len() < 20 {
                others.push(one_file().mount());
                if others.last()?.mount().target().device == number {
                    return Some((gone, others.pop()?));
                }
            }
            None
        })
        .expect("a number is used again");
    for force in [Force::No, Force::Yes] {
        let result = gone.mount().unmount(force);
        assert!(matches!(result, Err(UnmountError::NotMounted(_))));
    }
    drop(gone);
    let read = fs::read(other.path("file"));
    assert_eq!(read.expect("still mounted"), b"content");
}

#[test]
fn busy_mount_is_unmounted_only_by_force() {
    let mounted = one_file().mount();
    let mut file = File::open(mounted.path("file")).expect("there");
    let busy = mounted.mount().unmount(Force::No);
    assert!(matches!(busy, Err(UnmountError::Busy(_))));
    mounted.mount().unmount(Force::Yes).expect("by force");
    assert!(mounted.is_gone());
    let cut = file.read(&mut [0; 4]).expect_err("cut off");
    assert_eq!(cut.kind(), ErrorKind::NotConnected);
}

#[test]
fn mount_on_top_is_not_mistaken_for_ours() {
    let lower = one_file().mount();
    let options = MountOptions::default();
    let content = Arc::new(one_file().content(ReplyTiming::AtOnce));
    let tree = TarFilesystem::new(content, Subtree::WHOLE, &options, Arc::default());
    let upper = NewMount::on(lower.directory.path(), "upper", &options).expect("stacked");
    let upper = Mount::serve(tree, upper, || {}).expect("served");
    assert!(matches!(
        lower.mount().unmount(Force::No),
        Err(UnmountError::NotMounted(_))
    ));
    drop(upper);
    assert!(lower.path("file").exists());
}

#[test]
fn users_of_a_new_mount_wait_until_it_is_served() {
    let directory = tempfile::tempdir().expect("a directory");
    let options = MountOptions::default();
    let mount = NewMount::on(directory.path(), "sample", &options);
    let mount = mount.expect("these tests need FUSE: /dev/fuse, and root or fusermount3");
    let file = directory.path().join("file");
    let (started, start) = mpsc::channel();
    let user = Thread::spawn("user", move || {
        started.send(()).expect("received");
        fs::metadata(file).expect("served").len()
    });
    start.recv().expect("started");
    let content = Arc::new(one_file().content(ReplyTiming::AtOnce));
    let tree = TarFilesystem::new(content, Subtree::WHOLE, &options, Arc::default());
    let served = Mount::serve(tree, mount, || {}).expect("served");
    assert!(user.expect("a thread").join() > 0);
    drop(served);
}

// Promises: start-answers
#[test]
fn new_mount_without_a_server_is_unmounted() {
    let directory = tempfile::tempdir().expect("a directory");
    let mount = NewMount::on(directory.path(), "sample", &MountOptions::default());
    let mount = mount.expect("these tests need FUSE: /dev/fuse, and root or fusermount3");
    let target = mount.target.clone();
    assert!(is_mounted(target.device));
    drop(mount);
    assert!(!is_mounted(target.device));
}

#[test]
fn dropped_mount_is_unmounted() {
    let mut mounted = one_file().mount();
    drop(mounted.mount.take());
    assert!(mounted.is_gone());
}

// Promises: start-answers
#[test]
fn failed_mount_leaves_nothing_mounted() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let missing = file.path().with_extension("missing");
    for place in [file.path(), &missing] {
        let refused = NewMount::on(place, "sample", &MountOptions::default());
        let error = refused.expect_err("refused");
        assert!(error.to_string().contains(&*place.to_string_lossy()));
    }
}

/// A FUSE mount that answers only the handshake, so that a test sees its requests.
struct SilentMount(File);

impl SilentMount {
    fn new(mountpoint: &Path) -> Self {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let mut device = device.expect("FUSE");
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,subtype=tarfs",
            device.as_raw_fd()
        );
        let data = CString::new(data).expect("no zero");
        let flags = MountFlags::RDONLY;
        rustix::mount::mount("silent", mountpoint, "fuse", flags, &*data).expect("root");
        let mut request = vec![0; 1 << 20];
        let len = device.read(&mut request).expect("the handshake");
        assert!(len > 16);
        // The header: length, error and number. The body: version 7.31, no flags, and writes of 4 KiB.
        let mut reply = [80_u32.to_ne_bytes(), [0; 4]].concat();
        reply.extend(request.iter().skip(8).take(8));
        for word in [7_u32, 31, 0, 0, 0, 4096] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.resize(80, 0);
        device.write_all(&reply).expect("answered");
        Self(device)
    }

    fn has_requests(&self) -> bool {
        let mut polled = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())) == Ok(1)
    }
}

// Promises: unmount-next
#[test]
fn ended_mount_never_opens_the_next_one_at_its_path() {
    let mut first = one_file().mount();
    let place = first.directory.path().to_owned();
    unmount_in_kernel(&place);
    // Often with the number of the first one, which the kernel reuses at once.
    let next = SilentMount::new(&place);
    let ended = first.ended.recv_timeout(wait::WAIT_TIMEOUT);
    assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected));
    let mount = first.mount.take().expect("made");
    assert!(!mount.is_mounted());
    assert!(matches!(
        mount.unmount(Force::No),
        Err(UnmountError::NotMounted(_))
    ));
    drop(mount);
    assert!(!next.has_requests(), "asked whether it is alive");
    unmount_in_kernel(&place);
}
