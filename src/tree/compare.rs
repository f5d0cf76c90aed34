//! Compares two trees: walks over the first one, and looks each name up in the second one.
//!
//! A directory of the second tree is opened and its names are read when the walk first visits the directory of the
//! first tree. So memory holds the names of the directories that are open.

use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::interface::{Batch, Content, FileKind, Metadata, Name, Tree};
use super::item::Item;
use super::walk::{Level, OpenLevels, Start, Visit, Visitor, walk_parallel};

/// Trees of which a comparison keeps directories open.
const OPEN_TREES: usize = 2;

/// Bytes of a file that are compared at once.
const PIECE_BYTES: u64 = 128 << 10;

/// A property in which two files of the same path differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Property {
    /// The type. The other properties are not compared then.
    Type,
    /// The size of a regular file.
    Size,
    /// The content of a regular file, if contents are compared and the sizes are equal.
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
    Nlink,
    /// Extended attributes, which only the receiver compares.
    Xattrs,
}

/// A result of the comparison.
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
pub enum Difference<'a, A: Tree, B: Tree> {
    /// Only the first tree has the file.
    OnlyFirst(&'a Item<'a, A>),
    /// Only the second tree has the file.
    OnlySecond(&'a Item<'a, B>),
    /// These properties differ. Of sockets, and of files with several names in one of the trees, also if none does.
    Both(&'a [Property], &'a Item<'a, A>, &'a Item<'a, B>),
}

/// Receives the results of a comparison, in several threads.
pub trait Differences<A: Tree, B: Tree>: Send + Sync + 'static {
    /// Changes attributes before they are compared, to those that are meant to be equal. `is_implied` says that only other
    /// paths imply the first file. Returns whether attributes are compared, which implied directories need not have.
    ///
    /// # Errors
    /// Their owners' names cannot be loaded.
    fn prepare(
        &self,
        _: (&Item<'_, A>, &Item<'_, B>),
        _: &mut Metadata,
        _: &mut Metadata,
        is_implied: bool,
    ) -> io::Result<bool> {
        Ok(!is_implied)
    }

    /// Whether the second file has extended attributes that make a difference, if only other paths imply the first one.
    ///
    /// # Errors
    /// They cannot be read.
    fn has_other_xattrs(&self, _: &Item<'_, B>) -> io::Result<bool> {
        Ok(false)
    }

    /// Receives the result for a file. A break ends the comparison.
    ///
    /// # Errors
    /// Attributes of the file cannot be read.
    fn receive(&self, difference: Difference<'_, A, B>) -> io::Result<ControlFlow<()>>;

    /// Whether it wants the files below a directory that is none in the second tree.
    fn wants_all(&self) -> bool;

    /// Reports that the file at `path` cannot be examined.
    fn report(&self, path: &[u8], error: io::Error);
}

/// Two trees that are compared.
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
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
#[expect(missing_debug_implementations, reason = "trees have no form for it")]
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

/// A directory with all its names.
struct Names<B: Tree> {
    level: Arc<Level<B, ()>>,
    batch: Batch,
    /// The names' numbers in `batch`, in the order of their bytes.
    order: Vec<usize>,
    /// Whether the first tree has the name, too; in `order`.
    is_common: Vec<AtomicBool>,
}

impl<B: Tree> Names<B> {
    fn read(tree: &B, level: Arc<Level<B, ()>>) -> io::Result<Self> {
        let directory = level.open(tree)?;
        let (mut batch, mut position) = (Batch::default(), 0);
        loop {
            let len = batch.len();
            tree.read(&directory, &mut position, &mut batch)?;
            if let Some((_, error)) = batch.take_failed().pop() {
                return Err(error);
            }
            if batch.len() == len {
                break;
            }
        }
        let mut order: Vec<_> = (0..batch.len()).collect();
        order.sort_unstable_by_key(|&number| batch.get(number).map(|found| found.name));
        Ok(Self {
            level,
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
    D: Differences<A, B>,
{
    /// Compares the directory `first` in `bases.0` with `second` in `bases.1`, and what is below them. Paths begin
    /// with `path`.
    ///
    /// # Errors
    /// One of the two cannot be opened. Everything else is reported.
    pub fn run(
        self,
        bases: (&A::Directory, &B::Directory),
        (first, second): (Name<'_>, Name<'_>),
        path: &[u8],
        jobs: Option<NonZeroUsize>,
    ) -> io::Result<()> {
        let level = Level::at_start(
            Start {
                path: path.to_owned(),
                inode: second.inode,
                directory: self.second.open(bases.1, second)?,
                state: (),
            },
            &OpenLevels::new(&*self.second, OPEN_TREES),
        );
        let names = Names::read(&*self.second, level)?;
        let start = Start {
            path: path.to_owned(),
            inode: first.inode,
            directory: self.first.open(bases.0, first)?,
            state: Pair {
                inode: Some(second.inode),
                place: OnceLock::from(Counterpart::Open(names)),
            },
        };
        let mut items = (
            Item::at_start(&*self.first, bases.0, first).called(path),
            Item::at_start(&*self.second, bases.1, second).called(path),
        );
        let compared = self.compare(&mut items.0, &mut items.1);
        if self.or_report(path, compared).is_break() {
            return Ok(());
        }
        let tree = Arc::clone(&self.first);
        let _never_broken = walk_parallel(&tree, &Arc::new(self), vec![start], jobs);
        Ok(())
    }

    fn counterpart<'a>(&self, level: &'a Level<A, Pair<B>>) -> &'a Counterpart<B> {
        level.state.place.get_or_init(|| {
            let above = level.parent.as_ref().map(|parent| self.counterpart(parent));
            let (Some(Counterpart::Open(above)), Some(inode)) = (above, level.state.inode) else {
                return Counterpart::Missing;
            };
            let name = Name::directory(&level.name, inode);
            let opened = above.level.open_child(&self.second, name, ());
            match opened.and_then(|level| Names::read(&*self.second, level)) {
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
        first: &mut Item<'_, A>,
        second: &mut Item<'_, B>,
    ) -> io::Result<ControlFlow<()>> {
        let (mut one, mut other) = (first.metadata()?, second.metadata()?);
        let is_first_implied = first.is_implied()?;
        let is_implied = is_first_implied || second.is_implied()?;
        // The top has the attributes that its user gave it.
        let is_below_top = !first.path().is_empty();
        let differences = &*self.differences;
        let has_attributes = (is_below_top || !is_implied)
            && differences.prepare((first, second), &mut one, &mut other, is_implied)?;
        first.set_metadata(one);
        second.set_metadata(other);
        let mut properties = self.properties(first, second, has_attributes)?;
        let is_directory = first.kind() == second.kind();
        if has_attributes
            && is_directory
            && is_first_implied
            && differences.has_other_xattrs(second)?
        {
            properties.push(Property::Xattrs);
        }
        let is_reported = one.is_shared() || other.is_shared() || one.kind == FileKind::Socket;
        if properties.is_empty() && !is_reported {
            return Ok(ControlFlow::Continue(()));
        }
        self.differences
            .receive(Difference::Both(&properties, first, second))
    }

    fn properties(
        &self,
        first: &Item<'_, A>,
        second: &Item<'_, B>,
        has_attributes: bool,
    ) -> io::Result<Vec<Property>> {
        let (one, other) = (first.metadata()?, second.metadata()?);
        let kind = one.kind;
        if kind != other.kind {
            return Ok(vec![Property::Type]);
        }
        let is_file = kind == FileKind::File;
        let same_size = !is_file || one.size == other.size;
        let needs_content = self.contents && is_file && same_size;
        let content = needs_content && !has_equal_contents(first, second)?;
        let target = kind == FileKind::Symlink && first.target()? != second.target()?;
        let mode = has_attributes && kind != FileKind::Symlink;
        let found = [
            (Property::Size, !same_size),
            (Property::Content, content),
            (Property::Target, target),
            (
                Property::Device,
                one.is_device() && one.device != other.device,
            ),
            (Property::Mode, mode && one.mode != other.mode),
            (Property::Uid, has_attributes && one.uid != other.uid),
            (Property::Gid, has_attributes && one.gid != other.gid),
            (
                Property::Mtime,
                has_attributes && !one.mtime.is_same_as(other.mtime),
            ),
            (
                Property::Nlink,
                kind != FileKind::Directory && one.links != other.links,
            ),
        ];
        let found = found.into_iter().filter(|(_, differs)| *differs);
        Ok(found.map(|(property, _)| property).collect())
    }

    fn or_report(&self, path: &[u8], received: io::Result<ControlFlow<()>>) -> ControlFlow<()> {
        received.unwrap_or_else(|error| {
            self.differences.report(path, error);
            ControlFlow::Continue(())
        })
    }
}

fn has_equal_contents<A: Tree, B: Tree>(
    first: &Item<'_, A>,
    second: &Item<'_, B>,
) -> io::Result<bool> {
    let (mut first, mut second) = (first.content()?, second.content()?);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    loop {
        let holes = (first.hole()?, second.hole()?);
        let common = holes.0.min(holes.1);
        first.skip(common)?;
        second.skip(common)?;
        let is_equal = match (holes.0 - common, holes.1 - common) {
            (0, 0) if common > 0 => true,
            (0, 0) => {
                ours.clear();
                theirs.clear();
                first.by_ref().take(PIECE_BYTES).read_to_end(&mut ours)?;
                second.by_ref().take(PIECE_BYTES).read_to_end(&mut theirs)?;
                if ours.is_empty() {
                    return Ok(theirs.is_empty());
                }
                ours == theirs
            }
            (hole, 0) => has_zeros(&mut *first, &mut *second, hole, &mut theirs)?,
            (_, hole) => has_zeros(&mut *second, &mut *first, hole, &mut ours)?,
        };
        if !is_equal {
            return Ok(false);
        }
    }
}

/// Whether `stored` continues with zeros in place of the `hole` of `sparse`. Both are passed, at most a piece at once.
fn has_zeros(
    sparse: &mut dyn Content,
    stored: &mut dyn Content,
    hole: u64,
    bytes: &mut Vec<u8>,
) -> io::Result<bool> {
    let len = hole.min(PIECE_BYTES);
    bytes.clear();
    stored.take(len).read_to_end(bytes)?;
    sparse.skip(len)?;
    Ok(bytes.len() as u64 == len && bytes.iter().all(|&byte| byte == 0))
}

impl<A, B, D> Visitor<A> for Comparison<A, B, D>
where
    A: Tree + Send + 'static,
    B: Tree + Send + 'static,
    D: Differences<A, B>,
{
    type State = Pair<B>;

    fn open_trees(&self) -> usize {
        OPEN_TREES
    }

    fn visit(
        &self,
        names: &Visit<'_, A, Pair<B>>,
        descend: &mut Vec<(usize, Pair<B>)>,
    ) -> ControlFlow<()> {
        let path = names.place.path;
        let opened = match self.counterpart(names.level) {
            Counterpart::Open(others) => match others.level.open(&self.second) {
                Ok(directory) => Some((others, directory)),
                Err(error) => {
                    self.report(path, error);
                    return ControlFlow::Continue(());
                }
            },
            Counterpart::Missing => None,
            Counterpart::Unreadable => return ControlFlow::Continue(()),
        };
        let others = opened.as_ref();
        let others =
            others.map(|(others, directory)| (others, others.level.place(directory, path)));
        for (number, mut item) in names.items() {
            let others = others.as_ref();
            let found = others.and_then(|(others, place)| Some((others.find(item.name())?, place)));
            let mut below = None;
            if let Some((found, place)) = found {
                let mut other = Item::in_directory(&*self.second, place, found);
                match self.compare(&mut item, &mut other) {
                    Ok(flow) => flow?,
                    Err(error) => {
                        self.report(item.path(), error);
                        continue;
                    }
                }
                below = (found.kind == FileKind::Directory).then_some(found.inode);
            } else {
                let received = self.differences.receive(Difference::OnlyFirst(&item));
                self.or_report(item.path(), received)?;
            }
            let is_directory = item.kind() == FileKind::Directory;
            if is_directory && (below.is_some() || self.differences.wants_all()) {
                let pair = Pair {
                    inode: below,
                    place: OnceLock::new(),
                };
                descend.push((number, pair));
            }
        }
        ControlFlow::Continue(())
    }

    fn leave(&self, level: &Arc<Level<A, Pair<B>>>) -> ControlFlow<()> {
        let Counterpart::Open(names) = self.counterpart(level) else {
            return ControlFlow::Continue(());
        };
        let mut others = names.others().peekable();
        if others.peek().is_none() {
            return ControlFlow::Continue(());
        }
        let path = level.path();
        let directory = match names.level.open(&self.second) {
            Ok(directory) => directory,
            Err(error) => {
                self.report(&path, error);
                return ControlFlow::Continue(());
            }
        };
        let place = names.level.place(&directory, &path);
        for name in others {
            let item = Item::in_directory(&*self.second, &place, name);
            let received = self.differences.receive(Difference::OnlySecond(&item));
            self.or_report(item.path(), received)?;
        }
        ControlFlow::Continue(())
    }

    fn skip(&self, level: &Arc<Level<A, Pair<B>>>, error: io::Error) -> ControlFlow<()> {
        self.report(&level.path(), error);
        ControlFlow::Continue(())
    }

    fn report(&self, path: &[u8], error: io::Error) {
        self.differences.report(path, error);
    }
}
