//! A minimal FUSE filesystem, as a lower bound of the cost of a mount.
//!
//! It serves a directory's tree from memory with the same kernel settings as a mount of tarfs. Lookups
//! are array accesses, and nothing is verified. It runs until it is unmounted.
//!
//! ```text
//! bare DIR MOUNTPOINT
//! ```

use std::collections::HashMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::linux::fs::MetadataExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyXattr, Request, Session,
    SessionACL,
};

const TTL: Duration = Duration::from_hours(365 * 24);

const MAX_REQUEST_BYTES: u32 = 1 << 20;

fn main() -> anyhow::Result<()> {
    let mut words = env::args_os().skip(1);
    let (Some(directory), Some(mountpoint)) = (words.next(), words.next()) else {
        anyhow::bail!("usage: bare DIR MOUNTPOINT");
    };
    let tree = MemoryFs::read(Path::new(&directory))?;
    let mut config = Config::default();
    config.n_threads = Some(2);
    config.acl = SessionACL::All;
    config.mount_options = vec![
        MountOption::RO,
        MountOption::DefaultPermissions,
        MountOption::FSName("bare".to_owned()),
    ];
    let session = Session::new(tree, &mountpoint, &config).context("cannot mount")?;
    let mounted = PathBuf::from(mountpoint);
    // The mount's first stat waits for the session, which runs on this thread.
    #[expect(
        clippy::disallowed_methods,
        reason = "the crate's own threads are joined by their owner"
    )]
    let raising = std::thread::spawn(move || raise_read_ahead(&mounted));
    session.run()?;
    raising.join().ok().context("panicked")?
}

/// Raises the read-ahead as a mount of tarfs does.
fn raise_read_ahead(mountpoint: &Path) -> anyhow::Result<()> {
    let device = fs::metadata(mountpoint)?.st_dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    Ok(fs::write(file, "1024")?)
}

/// A tree in memory.
struct MemoryFs {
    /// Indexed by inode number minus one.
    nodes: Vec<Node>,
    names: HashMap<(u64, OsString), u64>,
}

struct Node {
    attributes: FileAttr,
    parent: u64,
    children: Vec<(OsString, u64)>,
    /// A file's bytes, or a link's target.
    content: Vec<u8>,
}

impl MemoryFs {
    fn read(directory: &Path) -> anyhow::Result<Self> {
        let mut tree = Self {
            nodes: Vec::new(),
            names: HashMap::new(),
        };
        let mut known = HashMap::new();
        tree.add(directory, 1, &mut known)?;
        let mut directories = vec![(directory.to_owned(), 1)];
        while let Some((path, inode)) = directories.pop() {
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                let child = tree.add(&entry.path(), inode, &mut known)?;
                tree.names.insert((inode, entry.file_name()), child);
                if let Some(node) = tree.node_mut(inode) {
                    node.children.push((entry.file_name(), child));
                }
                if entry.file_type()?.is_dir() {
                    directories.push((entry.path(), child));
                }
            }
        }
        for node in &mut tree.nodes {
            node.children.sort_by_key(|(_, inode)| *inode);
        }
        Ok(tree)
    }

    /// Adds the entry at `path` and returns its number. A hard link has its target's number.
    fn add(
        &mut self,
        path: &Path,
        parent: u64,
        known: &mut HashMap<u64, u64>,
    ) -> anyhow::Result<u64> {
        let metadata = fs::symlink_metadata(path)?;
        if let Some(&inode) = known.get(&metadata.st_ino()) {
            return Ok(inode);
        }
        let content = if metadata.is_file() {
            fs::read(path)?
        } else if metadata.is_symlink() {
            fs::read_link(path)?.as_os_str().as_bytes().to_vec()
        } else {
            Vec::new()
        };
        let inode = self.nodes.len() as u64 + 1;
        known.insert(metadata.st_ino(), inode);
        self.nodes.push(Node {
            attributes: attributes(&metadata, inode)?,
            parent,
            children: Vec::new(),
            content,
        });
        Ok(inode)
    }

    fn node(&self, inode: u64) -> Result<&Node, Errno> {
        let place = usize::try_from(inode)
            .ok()
            .and_then(|inode| inode.checked_sub(1));
        place
            .and_then(|place| self.nodes.get(place))
            .ok_or(Errno::ENOENT)
    }

    fn node_mut(&mut self, inode: u64) -> Option<&mut Node> {
        self.nodes
            .get_mut(usize::try_from(inode).ok()?.checked_sub(1)?)
    }

    /// Calls `add` for the entries of a listing from `offset` on, until `add` is full.
    fn list(
        &self,
        node: &Node,
        offset: u64,
        mut add: impl FnMut(&FileAttr, u64, &OsStr) -> bool,
    ) -> Result<(), Errno> {
        let parent = self.node(node.parent)?;
        let dots = [
            (&node.attributes, OsStr::new(".")),
            (&parent.attributes, OsStr::new("..")),
        ];
        for (number, (attributes, name)) in (0_u64..).zip(dots) {
            if offset <= number && add(attributes, number + 1, name) {
                return Ok(());
            }
        }
        let from = offset.saturating_sub(2);
        let rest = node
            .children
            .get(usize::try_from(from).unwrap_or(usize::MAX)..);
        for (number, (name, inode)) in (from..).zip(rest.unwrap_or_default()) {
            if add(&self.node(*inode)?.attributes, number + 3, name) {
                break;
            }
        }
        Ok(())
    }
}

fn attributes(metadata: &Metadata, inode: u64) -> anyhow::Result<FileAttr> {
    let kind = metadata.file_type();
    let kind = match () {
        () if kind.is_dir() => FileType::Directory,
        () if kind.is_symlink() => FileType::Symlink,
        () if kind.is_char_device() => FileType::CharDevice,
        () if kind.is_block_device() => FileType::BlockDevice,
        () if kind.is_fifo() => FileType::NamedPipe,
        () => FileType::RegularFile,
    };
    let seconds = u64::try_from(metadata.st_mtime()).unwrap_or_default();
    let mtime: SystemTime = UNIX_EPOCH + Duration::from_secs(seconds);
    Ok(FileAttr {
        ino: INodeNo(inode),
        size: metadata.st_size(),
        blocks: metadata.st_blocks(),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: mtime,
        kind,
        perm: u16::try_from(metadata.st_mode() & 0o7777)?,
        nlink: u32::try_from(metadata.st_nlink())?,
        uid: metadata.st_uid(),
        gid: metadata.st_gid(),
        rdev: u32::try_from(metadata.st_rdev())?,
        blksize: 4096,
        flags: 0,
    })
}

impl Filesystem for MemoryFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA;
        let offered = wanted & config.capabilities();
        config.add_capabilities(offered).ok();
        config.set_max_write(MAX_REQUEST_BYTES).ok();
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.names.get(&(parent.0, name.to_owned()));
        match found.map(|&inode| self.node(inode)) {
            Some(Ok(node)) => reply.entry(&TTL, &node.attributes, Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.node(ino.0) {
            Ok(node) => reply.attr(&TTL, &node.attributes),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.node(ino.0) {
            Ok(node) => reply.data(&node.content),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.node(ino.0) {
            Ok(node) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX);
                let rest = node.content.get(from..).unwrap_or_default();
                let len = rest.len().min(size as usize);
                reply.data(rest.get(..len).unwrap_or_default());
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.node(ino.0).and_then(|node| {
            self.list(node, offset, |attributes, next, name| {
                reply.add(attributes.ino, next, attributes.kind, name)
            })
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.node(ino.0).and_then(|node| {
            self.list(node, offset, |attributes, next, name| {
                reply.add(attributes.ino, next, name, &TTL, attributes, Generation(0))
            })
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn getxattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _req: &Request, _ino: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
