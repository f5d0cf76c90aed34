//! The interface of trees: the entries of an archive, or the files of a directory.

use std::borrow::Cow;
use std::io::{self, Read};

use crate::tar::Timestamp;

/// The type of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A FIFO.
    Fifo,
    /// A socket. Archives have none.
    Socket,
}

impl FileKind {
    pub(crate) const ALL: [Self; 7] = [
        Self::File,
        Self::Directory,
        Self::Symlink,
        Self::CharDevice,
        Self::BlockDevice,
        Self::Fifo,
        Self::Socket,
    ];

    /// The type that a mode of stat(2) has.
    pub(crate) fn from_mode(mode: u32) -> Option<Self> {
        let has_bits = |kind: &Self| kind.bits() == mode & 0o170_000;
        Self::ALL.into_iter().find(has_bits)
    }

    /// The letter of `find -type` and `-printf %y`. `ls -l` shows a file as `-` instead.
    pub fn letter(self) -> char {
        self.forms().0
    }

    /// The name in JSON.
    pub(crate) fn name(self) -> &'static str {
        self.forms().1
    }

    /// The bits in a mode of stat(2).
    pub(crate) fn bits(self) -> u32 {
        self.forms().2
    }

    fn forms(self) -> (char, &'static str, u32) {
        match self {
            Self::File => ('f', "file", 0o100_000),
            Self::Directory => ('d', "directory", 0o040_000),
            Self::Symlink => ('l', "symlink", 0o120_000),
            Self::CharDevice => ('c', "char", 0o020_000),
            Self::BlockDevice => ('b', "block", 0o060_000),
            Self::Fifo => ('p', "fifo", 0o010_000),
            Self::Socket => ('s', "socket", 0o140_000),
        }
    }
}

/// The attributes of a file, as lstat(2) shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metadata {
    /// The type.
    pub kind: FileKind,
    /// Permission bits, the low twelve.
    pub mode: u32,
    /// Number of names.
    pub links: u64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size for a reader, in bytes.
    pub size: u64,
    /// Space in use, in units of 512 bytes.
    pub blocks: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// Number in its file system.
    pub inode: u64,
    /// The file system that holds it; 0 in an archive that no mount shows.
    pub file_system: u64,
    /// Time of last access; in an archive, of last modification.
    pub atime: Timestamp,
    /// Time of last modification.
    pub mtime: Timestamp,
    /// Time of last change of attributes; in an archive, of last modification.
    pub ctime: Timestamp,
}

/// A file, by its file system and its number.
pub type FileId = (u64, u64);

impl Metadata {
    /// Tells the file from others.
    pub fn id(&self) -> FileId {
        (self.file_system, self.inode)
    }

    /// Whether the file may have other names. Those of a directory are not counted.
    pub fn is_shared(&self) -> bool {
        self.links > 1 && self.kind != FileKind::Directory
    }

    /// Whether it is a device.
    pub fn is_device(&self) -> bool {
        matches!(self.kind, FileKind::CharDevice | FileKind::BlockDevice)
    }
}

/// A name in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name<'a> {
    /// The name.
    pub name: &'a [u8],
    /// The type of the file.
    pub kind: FileKind,
    /// The file's number.
    pub inode: u64,
}

impl<'a> Name<'a> {
    /// The name of a directory.
    pub fn directory(name: &'a [u8], inode: u64) -> Self {
        Self {
            name,
            kind: FileKind::Directory,
            inode,
        }
    }
}

/// Names read from a directory.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
    /// End of each name in `bytes`, type and number.
    rows: Vec<(usize, FileKind, u64)>,
    /// Number of names in the directory before these.
    first: u64,
    /// Names of files whose type cannot be found out.
    failed: Vec<(Vec<u8>, io::Error)>,
}

impl Batch {
    /// Adds a name.
    pub fn push(&mut self, name: &[u8], kind: FileKind, inode: u64) {
        self.bytes.extend_from_slice(name);
        self.rows.push((self.bytes.len(), kind, inode));
    }

    /// Notes a name of a file whose type cannot be found out.
    pub fn fail(&mut self, name: &[u8], error: io::Error) {
        self.failed.push((name.to_owned(), error));
    }

    /// Takes the names of files whose types cannot be found out, with the reasons.
    pub(crate) fn take_failed(&mut self) -> Vec<(Vec<u8>, io::Error)> {
        std::mem::take(&mut self.failed)
    }

    /// Number of names in the directory before these.
    pub fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn set_first(&mut self, first: u64) {
        self.first = first;
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it has no names.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The name with this number.
    pub fn get(&self, number: usize) -> Option<Name<'_>> {
        let &(end, kind, inode) = self.rows.get(number)?;
        let before = number.checked_sub(1).and_then(|row| self.rows.get(row));
        let start = before.map_or(0, |&(end, ..)| end);
        let name = self.bytes.get(start..end)?;
        Some(Name { name, kind, inode })
    }

    /// The names, in the order in which they were read.
    pub fn iter(&self) -> impl Iterator<Item = Name<'_>> {
        (0..self.len()).filter_map(|number| self.get(number))
    }
}

/// Whether a path, or a symbolic link, leads to nothing.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// Appends `name` to `path`, with a slash between them if there is none.
pub(crate) fn push_component(path: &mut Vec<u8>, name: &[u8]) {
    if path.last().is_some_and(|&last| last != b'/') {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// Name and value of an extended attribute.
pub type Xattr = (Vec<u8>, Vec<u8>);

/// The content of a file, from front to back.
pub trait Content: Read {
    /// Length of the hole at the position; 0 where bytes are stored, and at the end.
    ///
    /// # Errors
    /// It cannot be found out.
    fn hole(&mut self) -> io::Result<u64>;

    /// Moves the position over `len` bytes of the hole there.
    ///
    /// # Errors
    /// The position cannot be moved.
    fn skip(&mut self, len: u64) -> io::Result<()>;
}

/// Which symbolic links a verb follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FollowedLinks {
    /// None.
    #[default]
    None,
    /// Starting points that lead to directories.
    StartDirectories,
    /// Starting points.
    Starts,
    /// All. A link that leads to nothing is itself.
    All,
}

impl FollowedLinks {
    /// Whether a link at this depth below a starting point is followed.
    pub(crate) fn includes(self, depth: usize) -> bool {
        match self {
            Self::None | Self::StartDirectories => false,
            Self::Starts => depth == 0,
            Self::All => true,
        }
    }
}

/// A tree of files. Several threads use it at the same time. A tree that follows links has the files behind them in
/// their places.
pub trait Tree: Sync {
    /// An open directory.
    type Directory: Send + Sync;

    /// Opens the directory `name` in `parent`. A symbolic link in its place is an error, unless links are followed.
    ///
    /// # Errors
    /// It is gone, no directory, or may not be read.
    fn open(&self, parent: &Self::Directory, name: Name<'_>) -> io::Result<Self::Directory>;

    /// Appends the names from `position` on to `batch`, and advances `position`, which starts at 0. Appends
    /// nothing at the end. Only one thread reads a directory at a time.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn read(
        &self,
        directory: &Self::Directory,
        position: &mut u64,
        batch: &mut Batch,
    ) -> io::Result<()>;

    /// The attributes of a file in `directory`.
    ///
    /// # Errors
    /// It is gone, or its attributes cannot be read.
    fn metadata(&self, directory: &Self::Directory, name: Name<'_>) -> io::Result<Metadata>;

    /// The type of the file `name`, with `follows` of the file behind a link.
    ///
    /// # Errors
    /// It is gone, or a link leads to nothing or to itself.
    fn kind(&self, _: &Self::Directory, name: Name<'_>, _follows: bool) -> io::Result<FileKind> {
        Ok(name.kind)
    }

    /// The target of a symbolic link in `directory`.
    ///
    /// # Errors
    /// It is gone, or no link.
    fn target(&self, directory: &Self::Directory, name: Name<'_>) -> io::Result<Cow<'_, [u8]>>;

    /// The extended attributes of a file in `directory`, as they are set on a file.
    ///
    /// # Errors
    /// It is gone, or they cannot be read.
    fn xattrs(&self, _: &Self::Directory, _: Name<'_>) -> io::Result<Vec<Xattr>> {
        Ok(Vec::new())
    }

    /// Whether a file in `directory` has an ACL, as far as that can be read.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn has_acl(&self, _: &Self::Directory, _: Name<'_>) -> io::Result<bool> {
        Ok(false)
    }

    /// The bytes of the access ACL of a file in `directory`, if it has one.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn access_acl(&self, _: &Self::Directory, _: Name<'_>) -> io::Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Number of directories that may be open at a time; `None` for any number.
    fn max_open(&self) -> Option<usize> {
        None
    }

    /// Numbers that tell an open directory from all others.
    ///
    /// # Errors
    /// They cannot be read.
    fn identity(&self, _: &Self::Directory) -> io::Result<FileId> {
        Ok((0, 0))
    }

    /// Opens a regular file in `directory` for reading.
    ///
    /// # Errors
    /// It is gone, no regular file, or may not be read.
    fn content(&self, _: &Self::Directory, _: Name<'_>) -> io::Result<Box<dyn Content + '_>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Whether only paths of other files imply a directory, so that it has no attributes of its own.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn is_implied(&self, _: Name<'_>) -> io::Result<bool> {
        Ok(false)
    }

    /// Offset of the first stored byte of a file in a plain archive, if it has any.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn offset(&self, _: Name<'_>) -> io::Result<Option<u64>> {
        Ok(None)
    }

    /// Whether its use takes no system calls.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// Whether links are followed, so that a directory may be below itself.
    fn follows_links(&self) -> bool {
        false
    }

    /// Whether directories are read in the order of the names' bytes.
    fn is_sorted(&self) -> bool {
        false
    }

    /// The owner's name, if any.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn user(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>>;

    /// The group's name, if any.
    ///
    /// # Errors
    /// It cannot be loaded.
    fn group(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>>;
}
