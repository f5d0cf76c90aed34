//! The entries of an archive, as a [`Tree`].

use std::borrow::Cow;
use std::io::{self, Read};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use bytes::{Buf, Bytes};

use crate::base::passwd::Accounts;
use crate::base::resolve::PathError;
use crate::base::xattr::filter::XattrFilter;
use crate::base::xattr::posix_acl::{self, Kind};
use crate::index::{Entry, EntryKind, Index, Ino, LazyIndex};

use super::interface::{
    Batch, Content, FileKind, FollowedLinks, Metadata, Name, Tree, Xattr, push_component,
};

const READ_NAMES: usize = 32 << 10;

const READ_BYTES: u32 = 256 << 10;

/// Reads up to so many bytes of an entry at an offset.
type ReadContent = Box<dyn Fn(Ino, u64, u32) -> io::Result<Bytes> + Send + Sync>;

/// An entry at the end of a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ResolvedFile {
    /// Its type.
    pub kind: FileKind,
    /// Its number.
    pub inode: u64,
    /// The number of the directory that holds the name.
    pub parent: u64,
    /// The path without links; empty for the root.
    pub path: Vec<u8>,
}

/// The entries of a complete index.
#[expect(
    missing_debug_implementations,
    reason = "functions have no form for it"
)]
pub struct IndexTree<I = Arc<Index>> {
    index: LazyIndex<I>,
    is_sorted: bool,
    follows_links: bool,
    /// The device of the mount that shows the entries, if there is one.
    file_system: u64,
    read_content: Option<ReadContent>,
    xattr_filter: XattrFilter,
    /// The users and groups that ACLs name.
    accounts: OnceLock<Accounts>,
}

impl<I: Deref<Target = Index>> IndexTree<I> {
    /// The entry at `path`, as [`Index::resolve`] finds it.
    ///
    /// # Errors
    /// The path does not exist, leads out of the archive, or cannot be loaded.
    pub fn resolve(&self, path: &[u8], follows_last: bool) -> io::Result<ResolvedFile> {
        let found = self.read(|index| resolve(index, path, follows_last))?;
        let found = found.map_err(io::Error::other)?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The entry behind the link at `path`. `None` if the link leads to nothing in the archive.
    ///
    /// # Errors
    /// There are too many links, or it cannot be loaded.
    pub fn resolve_link(&self, path: &[u8]) -> io::Result<Option<ResolvedFile>> {
        Ok(self.read(|index| follow(index, path))??)
    }

    /// The entries of `index`, in the order of the archive, or if `is_sorted` of the names' bytes.
    pub fn new(index: LazyIndex<I>, is_sorted: bool) -> Self {
        Self {
            index,
            is_sorted,
            follows_links: false,
            file_system: 0,
            read_content: None,
            xattr_filter: XattrFilter::default(),
            accounts: OnceLock::new(),
        }
    }

    /// The same entries, with the extended attributes that `xattr_filter` selects. Modes follow from the ACLs among them.
    #[must_use]
    pub fn with_xattrs(self, xattr_filter: XattrFilter) -> Self {
        Self {
            xattr_filter,
            ..self
        }
    }

    /// The same entries for other machines, on which names in ACLs without numbers mean nothing.
    #[must_use]
    pub fn for_other_machines(self) -> Self {
        let accounts = OnceLock::from(Accounts::default());
        Self { accounts, ..self }
    }

    /// The same entries, as the mount with the device `file_system` shows them.
    #[must_use]
    pub fn with_file_system(self, file_system: u64) -> Self {
        Self {
            file_system,
            ..self
        }
    }

    /// The same entries, whose contents `read` reads. Without it they have none.
    #[must_use]
    pub fn with_contents(
        self,
        read: impl Fn(Ino, u64, u32) -> io::Result<Bytes> + Send + Sync + 'static,
    ) -> Self {
        let read_content = Some(Box::new(read) as _);
        Self {
            read_content,
            ..self
        }
    }

    /// The same entries, with those behind `links` in the places of the links if they are all.
    #[must_use]
    pub fn following(self, links: FollowedLinks) -> Self {
        Self {
            follows_links: links == FollowedLinks::All,
            ..self
        }
    }

    /// The index.
    pub fn index(&self) -> &LazyIndex<I> {
        &self.index
    }

    fn read<T>(&self, access: impl FnOnce(&Index) -> T) -> io::Result<T> {
        self.index.read(access).map_err(io::Error::other)
    }

    /// The result of `access` to entry `inode`.
    fn entry<T>(&self, inode: u64, access: impl FnOnce(Entry<'_>) -> T) -> io::Result<T> {
        let ino = u32::try_from(inode).map(Ino);
        let found = self.read(|index| Some(access(index.entry(ino.ok()?)?)))?;
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn accounts(&self) -> &Accounts {
        self.accounts.get_or_init(Accounts::load_system)
    }
}

impl<I: Deref<Target = Index> + Sync> Tree for IndexTree<I> {
    type Directory = Ino;

    fn open(&self, _: &Ino, name: Name<'_>) -> io::Result<Ino> {
        let is_directory = |entry: Entry<'_>| entry.kind() == EntryKind::Directory;
        match self.entry(name.inode, |entry| (entry.ino(), is_directory(entry)))? {
            (ino, true) => Ok(ino),
            (_, false) => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn read(&self, directory: &Ino, position: &mut u64, batch: &mut Batch) -> io::Result<()> {
        let from = u32::try_from(*position).unwrap_or(u32::MAX);
        Self::read(self, |index| {
            let names = index.names(*directory, from, self.is_sorted);
            for child in names.take(READ_NAMES) {
                *position = u64::from(child.number) + 1;
                let Some(kind) = FileKind::from_mode(child.file_type.into()) else {
                    continue;
                };
                if !self.follows_links || kind != FileKind::Symlink {
                    batch.push(child.name, kind, child.ino.0.into());
                    continue;
                }
                let mut path = index.path(*directory).unwrap_or_default();
                path.push(child.name);
                match follow(index, path.as_bytes()) {
                    Ok(Some(found)) => batch.push(child.name, found.kind, found.inode),
                    Ok(None) => batch.push(child.name, kind, child.ino.0.into()),
                    Err(error) => batch.fail(child.name, error.into()),
                }
            }
        })
    }

    fn metadata(&self, _: &Ino, name: Name<'_>) -> io::Result<Metadata> {
        Ok(Metadata {
            file_system: self.file_system,
            ..self.entry(name.inode, |entry| Metadata {
                mode: entry.shown_mode(&self.xattr_filter, || self.accounts()),
                ..metadata(&entry)
            })?
        })
    }

    fn kind(&self, directory: &Ino, name: Name<'_>, follows: bool) -> io::Result<FileKind> {
        let path = Self::read(self, |index| index.path(*directory))?;
        let mut path = path.unwrap_or_default().as_bytes().to_vec();
        push_component(&mut path, name.name);
        if !follows {
            return Ok(self.resolve(&path, false)?.kind);
        }
        let target = self.resolve_link(&path)?;
        let missing = || io::Error::new(io::ErrorKind::NotFound, "No such file or directory");
        Ok(target.ok_or_else(missing)?.kind)
    }

    fn target(&self, _: &Ino, name: Name<'_>) -> io::Result<Cow<'_, [u8]>> {
        let target = self.entry(name.inode, |entry| match entry.kind() {
            EntryKind::Symlink(target) => Some(target.to_vec()),
            _ => None,
        })?;
        let target = target.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Cow::Owned(target))
    }

    fn content(&self, _: &Ino, name: Name<'_>) -> io::Result<Box<dyn Content + '_>> {
        let read = self.read_content.as_ref();
        Ok(Box::new(EntryContent {
            read: read.ok_or(io::ErrorKind::Unsupported)?,
            tree: self,
            ino: self.entry(name.inode, |entry| entry.ino())?,
            offset: 0,
            bytes: Bytes::new(),
        }))
    }

    fn is_implied(&self, name: Name<'_>) -> io::Result<bool> {
        self.entry(name.inode, |entry| entry.is_implied())
    }

    fn xattrs(&self, _: &Ino, name: Name<'_>) -> io::Result<Vec<Xattr>> {
        self.entry(name.inode, |entry| {
            let shown = || entry.shown_xattrs(&self.xattr_filter);
            let others = shown().filter(|(name, _)| Kind::of(name).is_none());
            let others = others.map(|(name, value)| (name.to_owned(), value.to_owned()));
            let acls = Kind::ALL.into_iter().filter_map(|kind| {
                let bytes = posix_acl::find_stored(shown(), kind, self.accounts())?;
                Some((kind.attribute().into(), bytes))
            });
            others.chain(acls).collect()
        })
    }

    fn has_acl(&self, _: &Ino, name: Name<'_>) -> io::Result<bool> {
        self.entry(name.inode, |entry| {
            entry.xattrs().next().is_some()
                && Kind::ALL.into_iter().any(|kind| {
                    let shown = entry.shown_xattrs(&self.xattr_filter);
                    posix_acl::find_stored(shown, kind, self.accounts()).is_some()
                })
        })
    }

    fn access_acl(&self, _: &Ino, name: Name<'_>) -> io::Result<Option<Vec<u8>>> {
        let filter = XattrFilter::default();
        self.entry(name.inode, |entry| {
            entry.access_acl(&filter, || self.accounts())
        })
    }

    fn offset(&self, name: Name<'_>) -> io::Result<Option<u64>> {
        let first = |entry: Entry<'_>| Some(entry.pieces(0, u64::MAX).next()?.plain.start().0);
        self.entry(name.inode, first)
    }

    fn follows_links(&self) -> bool {
        self.follows_links
    }

    fn is_in_memory(&self) -> bool {
        self.read_content.is_none()
    }

    fn is_sorted(&self) -> bool {
        self.is_sorted
    }

    fn user(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        let name = self.entry(metadata.inode, |entry| entry.user().to_vec())?;
        Ok(Some(name).filter(|name| !name.is_empty()).map(Cow::Owned))
    }

    fn group(&self, metadata: &Metadata) -> io::Result<Option<Cow<'_, [u8]>>> {
        let name = self.entry(metadata.inode, |entry| entry.group().to_vec())?;
        Ok(Some(name).filter(|name| !name.is_empty()).map(Cow::Owned))
    }
}

fn resolve(
    index: &Index,
    path: &[u8],
    follows_last: bool,
) -> Result<Option<ResolvedFile>, PathError> {
    let found = index.resolve_with_path(path, follows_last)?;
    Ok(found.map(|found| ResolvedFile {
        kind: kind(found.entry.kind()),
        inode: found.entry.ino().0.into(),
        parent: found.parent.0.into(),
        path: found.path.as_bytes().to_vec(),
    }))
}

/// The entry behind the link at `path`. `None` if the link leads to nothing in the archive.
fn follow(index: &Index, path: &[u8]) -> Result<Option<ResolvedFile>, PathError> {
    match resolve(index, path, true) {
        Err(PathError::EscapesRoot | PathError::AboveRoot | PathError::NotADirectory) => Ok(None),
        found => found,
    }
}

/// The content of an entry, from front to back.
struct EntryContent<'a, I> {
    tree: &'a IndexTree<I>,
    read: &'a ReadContent,
    ino: Ino,
    /// End of `bytes` in the file.
    offset: u64,
    bytes: Bytes,
}

impl<I> Read for EntryContent<'_, I> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.bytes.is_empty() {
            self.bytes = (self.read)(self.ino, self.offset, READ_BYTES)?;
            self.offset = self.offset.saturating_add(self.bytes.len() as u64);
        }
        let len = buffer.len().min(self.bytes.len());
        let (taken, _) = buffer.split_at_mut(len);
        self.bytes.copy_to_slice(taken);
        Ok(len)
    }
}

impl<I: Deref<Target = Index>> Content for EntryContent<'_, I> {
    fn hole(&mut self) -> io::Result<u64> {
        let position = self.offset.saturating_sub(self.bytes.len() as u64);
        self.tree.entry(self.ino.0.into(), |entry| {
            let left = entry.size().saturating_sub(position);
            let mut pieces = entry.pieces(position, left);
            let next = pieces.find(|piece| !piece.plain.is_empty());
            next.map_or(left, |piece| piece.offset.saturating_sub(position))
        })
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        let buffered =
            usize::try_from(len).map_or(self.bytes.len(), |len| len.min(self.bytes.len()));
        self.bytes.advance(buffered);
        self.offset = self.offset.saturating_add(len - buffered as u64);
        Ok(())
    }
}

fn kind(kind: EntryKind<'_>) -> FileKind {
    match kind {
        EntryKind::File => FileKind::File,
        EntryKind::Directory => FileKind::Directory,
        EntryKind::Symlink(_) => FileKind::Symlink,
        EntryKind::CharDevice(_) => FileKind::CharDevice,
        EntryKind::BlockDevice(_) => FileKind::BlockDevice,
        EntryKind::Fifo => FileKind::Fifo,
    }
}

/// The attributes of `entry`, without its ACL.
pub fn metadata(entry: &Entry<'_>) -> Metadata {
    let mtime = entry.mtime();
    Metadata {
        kind: kind(entry.kind()),
        mode: entry.mode(),
        links: entry.link_count().into(),
        uid: entry.uid(),
        gid: entry.gid(),
        size: entry.size(),
        blocks: entry.stored_bytes().div_ceil(512),
        device: match entry.kind() {
            EntryKind::CharDevice(device) | EntryKind::BlockDevice(device) => {
                (device.major, device.minor)
            }
            _ => (0, 0),
        },
        inode: entry.ino().0.into(),
        file_system: 0,
        atime: mtime,
        mtime,
        ctime: mtime,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::ops::Range;
    use std::sync::Mutex;

    use super::*;
    use crate::index::MemoryLimit;
    use crate::index::format::framed::{self, PackedIndex, Packing};
    use crate::index::test_support::{file, index};

    /// The packed bytes of an index, which may go away.
    #[derive(Debug)]
    struct Stored(Arc<Mutex<Vec<u8>>>);

    impl PackedIndex for Stored {
        fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
            let at = |offset| usize::try_from(offset).expect("small");
            let bytes = self.0.lock().expect("no panic");
            let bytes = bytes.get(at(range.start)..at(range.end));
            Ok(Bytes::copy_from_slice(
                bytes.ok_or(io::ErrorKind::NotFound)?,
            ))
        }

        fn report_failure(&self, _: &io::Error) {}

        fn min_request_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn attributes_that_cannot_be_loaded_are_errors() {
        let names = (0..20_000_u32).map(|number| blake3::hash(&number.to_le_bytes()).to_hex());
        let members: Vec<_> = names.map(|name| file(&name, 0..1)).collect();
        let index = index(&members);
        let last = index.last_ino();
        let metadata = metadata(&index.entry(last).expect("a file"));
        let mut packed = Cursor::new(Vec::new());
        let locator = &index.origin().locator;
        framed::write(&index, locator, Packing::Small, &mut packed).expect("written");
        let bytes = Arc::new(Mutex::new(packed.into_inner()));
        let len = bytes.lock().expect("no panic").len() as u64;
        let stored = Box::new(Stored(Arc::clone(&bytes)));
        let opened = framed::open(stored, len, &MemoryLimit::new(u64::MAX)).expect("opened");
        bytes.lock().expect("no panic").clear();
        let tree = IndexTree::new(LazyIndex::new(Arc::new(opened)), false);
        let name = Name {
            name: b"f",
            kind: FileKind::File,
            inode: last.0.into(),
        };
        assert!(tree.user(&metadata).is_err());
        assert!(tree.group(&metadata).is_err());
        assert!(tree.offset(name).is_err());
        assert!(tree.is_implied(name).is_err());
        assert!(tree.has_acl(&Ino::ROOT, name).is_err());
    }
}
