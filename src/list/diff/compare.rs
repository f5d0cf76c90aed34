//! Compares two trees: walks over the first one, and looks each name up in the second one.
//!
//! A directory of the second tree is opened and its names are read when the walk first visits the directory of the
//! first tree. So memory holds the names of the directories that are open.

use std::fmt;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::super::parallel_walk::{Jobs, Level, Start, Visitor, walk_parallel};
use super::super::tree::{Batch, FileKind, Metadata, Name, Tree, push_component};

/// Bytes of a file that are compared at once.
const PIECE_BYTES: u64 = 128 << 10;

/// A property in which two files of the same path differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Property {
    /// The type. The other properties are not compared then.
    Kind,
    /// The size of a regular file.
    Size,
    /// The content of a regular file, if contents are compared.
    Content,
    /// The target of a symbolic link.
    Target,
    /// The number of a device.
    Device,
    /// Permission bits, except those of symbolic links.
    Mode,
    /// The number of the owner.
    Uid,
    /// The number of the group.
    Gid,
    /// Time of last modification.
    Mtime,
    /// Number of names, except that of directories.
    Links,
}

/// A file of one tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Side {
    /// Its attributes.
    pub metadata: Metadata,
    /// The target of a symbolic link.
    pub target: Vec<u8>,
}

/// A result of the comparison.
#[derive(Clone, Copy, Debug)]
pub enum Difference<'a> {
    /// Only the first tree has the file.
    OnlyFirst(&'a Side),
    /// Only the second tree has a file of this type.
    OnlySecond(FileKind),
    /// Both have the file. Nothing differs in some of these, which have several names in one of the trees.
    Both {
        /// What differs.
        properties: &'a [Property],
        /// The file of the first tree.
        first: &'a Side,
        /// The file of the second tree.
        second: &'a Side,
    },
}

/// Receives the results of a comparison, in several threads.
pub trait Differences<A: Tree>: Send + Sync + 'static {
    /// Changes attributes before they are compared, to those that are meant to be equal.
    fn prepare(&self, tree: &A, first: &mut Metadata, second: &mut Metadata);

    /// Receives the result for the file at `path`. A break ends the comparison.
    fn receive(&self, path: &[u8], difference: Difference<'_>) -> ControlFlow<()>;

    /// Whether it wants the files below a directory that is none in the second tree.
    fn wants_all(&self) -> bool;

    /// Reports that the file at `path` cannot be examined.
    fn report(&self, path: &[u8], error: io::Error);
}

/// Two trees that are compared.
pub struct Comparison<A, B, D> {
    /// The first tree.
    pub first: Arc<A>,
    /// The second one.
    pub second: Arc<B>,
    /// Receives the results.
    pub differences: Arc<D>,
    /// Whether contents of files are compared, too.
    pub contents: bool,
}

/// A directory of the first tree, and what the second one has in its place.
pub struct Pair<B: Tree> {
    /// The number of the directory in the second tree, if it has one there.
    inode: Option<u64>,
    place: OnceLock<Counterpart<B>>,
}

enum Counterpart<B: Tree> {
    Missing,
    /// It cannot be read, so that nothing is known about what is below it.
    Unreadable,
    Open(Names<B>),
}

/// An open directory with all its names.
struct Names<B: Tree> {
    directory: B::Directory,
    batch: Batch,
    /// The names' numbers in `batch`, in the order of their bytes.
    order: Vec<usize>,
    /// Whether the first tree has the name, too; in `order`.
    is_common: Vec<AtomicBool>,
}

impl<B: Tree> Names<B> {
    fn read(tree: &B, directory: B::Directory) -> io::Result<Self> {
        let (mut batch, mut position) = (Batch::default(), 0);
        loop {
            let len = batch.len();
            tree.read(&directory, &mut position, &mut batch)?;
            if batch.len() == len {
                break;
            }
        }
        let mut order: Vec<_> = (0..batch.len()).collect();
        order.sort_unstable_by_key(|&number| batch.get(number).map(|found| found.name));
        Ok(Self {
            directory,
            is_common: order.iter().map(|_| AtomicBool::new(false)).collect(),
            batch,
            order,
        })
    }

    /// Looks up a name of the first tree.
    fn find(&self, name: &[u8]) -> Option<Name<'_>> {
        let name_at = |number: &usize| self.batch.get(*number).map(|found| found.name);
        let found = self.order.binary_search_by_key(&Some(name), name_at).ok()?;
        self.is_common.get(found)?.store(true, Ordering::Relaxed);
        self.batch.get(*self.order.get(found)?)
    }

    fn others(&self) -> impl Iterator<Item = Name<'_>> {
        let names = self.order.iter().zip(&self.is_common);
        let others = names.filter(|(_, is_common)| !is_common.load(Ordering::Relaxed));
        others.filter_map(|(number, _)| self.batch.get(*number))
    }
}

impl<A, B, D> Comparison<A, B, D>
where
    A: Tree + Send + 'static,
    B: Tree + Send + 'static,
    D: Differences<A>,
{
    /// Compares the directory `first` in `bases.0` with `second` in `bases.1`, and what is below them. Paths begin
    /// with `path`.
    ///
    /// # Errors
    /// One of the two cannot be opened, or the system has no thread. Everything else is reported.
    pub fn run(
        self,
        bases: (&A::Directory, &B::Directory),
        (first, second): (Name<'_>, Name<'_>),
        path: &[u8],
        jobs: Jobs,
    ) -> io::Result<()> {
        let names = Names::read(&*self.second, self.second.open(bases.1, second)?)?;
        let start = Start {
            path: path.to_owned(),
            inode: first.inode,
            directory: self.first.open(bases.0, first)?,
            state: Pair {
                inode: Some(second.inode),
                place: OnceLock::from(Counterpart::Open(names)),
            },
        };
        if self
            .compare(path, (bases.0, first), (bases.1, second))
            .is_break()
        {
            return Ok(());
        }
        let tree = Arc::clone(&self.first);
        walk_parallel(&tree, &Arc::new(self), vec![start], jobs).map(drop)
    }

    fn counterpart<'a>(&self, level: &'a Level<A, Pair<B>>) -> &'a Counterpart<B> {
        level.state.place.get_or_init(|| {
            let above = level.parent().map(|parent| self.counterpart(parent));
            let (Some(Counterpart::Open(above)), Some(inode)) = (above, level.state.inode) else {
                return Counterpart::Missing;
            };
            let name = Name {
                name: level.name(),
                kind: FileKind::Directory,
                inode,
            };
            let opened = self.second.open(&above.directory, name);
            match opened.and_then(|directory| Names::read(&*self.second, directory)) {
                Ok(names) => Counterpart::Open(names),
                Err(error) => {
                    self.differences.report(&level.path(), error);
                    Counterpart::Unreadable
                }
            }
        })
    }

    /// Compares two files of the same path.
    fn compare(
        &self,
        path: &[u8],
        first: (&A::Directory, Name<'_>),
        second: (&B::Directory, Name<'_>),
    ) -> ControlFlow<()> {
        let sides = side(&*self.first, first.0, first.1)
            .and_then(|ours| Ok((ours, side(&*self.second, second.0, second.1)?)));
        let (mut ours, mut theirs) = match sides {
            Ok(sides) => sides,
            Err(error) => {
                self.differences.report(path, error);
                return ControlFlow::Continue(());
            }
        };
        let is_implied = self.first.is_implied(first.1) || self.second.is_implied(second.1);
        let (one, other) = (&mut ours.metadata, &mut theirs.metadata);
        self.differences.prepare(&*self.first, one, other);
        let mut properties = properties(&ours, &theirs, is_implied);
        let is_comparable = ours.metadata.kind == FileKind::File
            && !properties.contains(&Property::Kind)
            && !properties.contains(&Property::Size);
        if self.contents && is_comparable {
            match self.has_equal_contents(first, second) {
                Ok(true) => {}
                Ok(false) => properties.insert(0, Property::Content),
                Err(error) => {
                    self.differences.report(path, error);
                    return ControlFlow::Continue(());
                }
            }
        }
        let has_names =
            |side: &Side| side.metadata.kind != FileKind::Directory && side.metadata.links > 1;
        if properties.is_empty() && !has_names(&ours) && !has_names(&theirs) {
            return ControlFlow::Continue(());
        }
        let difference = Difference::Both {
            properties: &properties,
            first: &ours,
            second: &theirs,
        };
        self.differences.receive(path, difference)
    }

    fn has_equal_contents(
        &self,
        first: (&A::Directory, Name<'_>),
        second: (&B::Directory, Name<'_>),
    ) -> io::Result<bool> {
        let mut first = self.first.content(first.0, first.1)?;
        let mut second = self.second.content(second.0, second.1)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        loop {
            ours.clear();
            theirs.clear();
            first.by_ref().take(PIECE_BYTES).read_to_end(&mut ours)?;
            second.by_ref().take(PIECE_BYTES).read_to_end(&mut theirs)?;
            if ours != theirs {
                return Ok(false);
            }
            if ours.is_empty() {
                return Ok(true);
            }
        }
    }

    fn receive_missing(
        &self,
        path: &[u8],
        directory: &A::Directory,
        name: Name<'_>,
    ) -> ControlFlow<()> {
        match side(&*self.first, directory, name) {
            Ok(side) => self.differences.receive(path, Difference::OnlyFirst(&side)),
            Err(error) => {
                self.differences.report(path, error);
                ControlFlow::Continue(())
            }
        }
    }
}

impl<A, B, D> Visitor<A> for Comparison<A, B, D>
where
    A: Tree + Send + 'static,
    B: Tree + Send + 'static,
    D: Differences<A>,
{
    type State = Pair<B>;

    fn makes_calls(&self) -> bool {
        true
    }

    fn visit(
        &self,
        level: &Arc<Level<A, Pair<B>>>,
        directory: &A::Directory,
        batch: &Batch,
        descend: &mut Vec<(usize, Pair<B>)>,
    ) -> ControlFlow<()> {
        let names = match self.counterpart(level) {
            Counterpart::Open(names) => Some(names),
            Counterpart::Missing => None,
            Counterpart::Unreadable => return ControlFlow::Continue(()),
        };
        let path = level.path();
        for (number, name) in batch.iter().enumerate() {
            let mut full = path.clone();
            push_component(&mut full, name.name);
            let found = names.and_then(|names| Some((&names.directory, names.find(name.name)?)));
            match found {
                Some(found) => self.compare(&full, (directory, name), found)?,
                None => self.receive_missing(&full, directory, name)?,
            }
            let is_directory = |kind| kind == FileKind::Directory;
            let below = found.filter(|(_, found)| is_directory(found.kind));
            if is_directory(name.kind) && (below.is_some() || self.differences.wants_all()) {
                let pair = Pair {
                    inode: below.map(|(_, found)| found.inode),
                    place: OnceLock::new(),
                };
                descend.push((number, pair));
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<A, Pair<B>>>) -> ControlFlow<()> {
        if let Counterpart::Open(names) = self.counterpart(level) {
            let path = level.path();
            for name in names.others() {
                let mut full = path.clone();
                push_component(&mut full, name.name);
                let difference = Difference::OnlySecond(name.kind);
                self.differences.receive(&full, difference)?;
            }
        }
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.differences.report(path, error);
    }
}

fn side<T: Tree>(tree: &T, directory: &T::Directory, name: Name<'_>) -> io::Result<Side> {
    let metadata = tree.metadata(directory, name)?;
    let target = match metadata.kind {
        FileKind::Symlink => tree.target(directory, name)?.into_owned(),
        _ => Vec::new(),
    };
    Ok(Side { metadata, target })
}

/// What differs between two files, except for their contents.
fn properties(first: &Side, second: &Side, is_implied: bool) -> Vec<Property> {
    let (one, other) = (&first.metadata, &second.metadata);
    if one.kind != other.kind {
        return vec![Property::Kind];
    }
    let kind = one.kind;
    let is_device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
    let has_mode = kind != FileKind::Symlink;
    let found = [
        (
            Property::Size,
            kind == FileKind::File && one.size != other.size,
        ),
        (Property::Target, first.target != second.target),
        (Property::Device, is_device && one.device != other.device),
        (
            Property::Mode,
            has_mode && !is_implied && one.mode != other.mode,
        ),
        (Property::Uid, !is_implied && one.uid != other.uid),
        (Property::Gid, !is_implied && one.gid != other.gid),
        (Property::Mtime, !is_implied && one.mtime != other.mtime),
        (
            Property::Links,
            kind != FileKind::Directory && one.links != other.links,
        ),
    ];
    let differs = found.into_iter().filter(|(_, differs)| *differs);
    differs.map(|(property, _)| property).collect()
}

impl<A, B, D> fmt::Debug for Comparison<A, B, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Comparison")
            .field("contents", &self.contents)
            .finish_non_exhaustive()
    }
}

impl<B: Tree> fmt::Debug for Pair<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair")
            .field("inode", &self.inode)
            .finish_non_exhaustive()
    }
}
