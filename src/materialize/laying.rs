//! Layers written one over the other: each is streamed once, from the bottom.
//!
//! While a layer goes by, its own tree grows in memory beside the one on disk. It says where a member
//! lies (by a way through directories alone, as links of lower layers are not this layer's), and what
//! the layer itself has made of a name. So whatever stands in a member's way on disk is from below, and
//! makes room. What the layer says to be gone is taken away when it is complete: from what lies below,
//! never from what the layer's own tree holds. Hard links to lower layers are made then, too.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, Dir, FileType};
use rustix::io::Errno;

use super::attributes::Subject;
use super::plan::Placed as Way;
use super::problem::{Cause, Error, Trouble, While};
use super::root::{Directory, Identity, Missing, name_of, parent_of, status};
use super::{CLAIM, Materializer};
use crate::base::path::ArchivePath;
use crate::base::resolve::{Refusal, ResolveError};
use crate::index::{Builder, Entry, Index, Ino, Kind, Options, Origin, Placed, Refused};
use crate::stack::{Link, Meaning, Unsettled, Whiteouts, canonical, ends, names_hidden};
use crate::tar::{self, Member};

const CLEAR: &str = "remove what a layer says to be gone";
const LINK: &str = "create the hard link";

/// What links are called that are not in their place yet, with two numbers behind it.
const ASIDE: &str = ".tarfs-link-";

/// A layer that is being written.
#[derive(Debug)]
pub(super) struct Laying {
    whiteouts: Whiteouts,
    /// Its own tree.
    builder: Builder,
    /// Nothing lies below it.
    is_bottom: bool,
    /// Directories that layers below it have made.
    below: usize,
    /// Hard links whose targets it had not held.
    forward: Forward,
    /// Whether something has become a further name of what is not shown.
    took_hidden_names: bool,
}

/// Hard links in their order, without those whose names have become something else since.
#[derive(Debug, Default)]
struct Forward {
    links: Vec<Option<Link>>,
    numbers: HashMap<ArchivePath, usize>,
}

impl Forward {
    fn add(&mut self, link: Link) {
        self.forget(&link.path);
        self.numbers.insert(link.path.clone(), self.links.len());
        self.links.push(Some(link));
    }

    /// `path` is something else now.
    fn forget(&mut self, path: &ArchivePath) {
        let number = self.numbers.remove(path);
        if let Some(link) = number.and_then(|number| self.links.get_mut(number)) {
            *link = None;
        }
    }

    fn into_links(self) -> Vec<Link> {
        self.links.into_iter().flatten().collect()
    }
}

impl Laying {
    fn index(&self) -> &Index {
        self.builder.index()
    }
}

/// What a member of a layer is to the tree on disk.
enum Fate {
    /// Nothing is to be done: it hides what cannot be there, or is there already.
    Idle,
    /// An entry is to be made.
    Made(Way),
    /// It is not made, but the directory it would be in is.
    Nothing(ArchivePath),
    /// What has its name is to be removed.
    Gone(ArchivePath),
    /// It has no place, for this reason; the directory of `way` is made all the same, if there is one.
    Refused {
        path: ArchivePath,
        cause: Cause,
        way: Option<ArchivePath>,
    },
}

impl Materializer {
    /// What comes now is a layer over all that was written before, which says by `whiteouts` what of
    /// that is gone. The destination must have been empty before the first one. To be
    /// [ended](Self::end_layer) when the layer is complete.
    pub fn begin_layer(&mut self, whiteouts: Whiteouts) {
        let is_bottom = !self.context.is_laying();
        self.context.lay();
        self.root.replace_on_the_way();
        self.laying = Some(Laying {
            whiteouts,
            builder: Builder::new(Options {
                max_entries: self.context.claims.most_numbers(),
                ..Options::default()
            }),
            is_bottom,
            below: self.directories.count(),
            forward: Forward::default(),
            took_hidden_names: false,
        });
    }

    /// All of the layer has come: takes away what it hides, and makes its links to what lies below.
    ///
    /// # Errors
    /// What stopped the run, if anything did.
    pub fn end_layer(&mut self) -> Result<(), Error> {
        self.writers.settle_all();
        self.check()?;
        let Some(laying) = self.laying.take() else {
            return Ok(());
        };
        let index = laying.builder.finish(Origin::default());
        let unsettled = Unsettled::of(&index, laying.whiteouts);
        self.make_late_links();
        let forward = laying.forward.into_links();
        self.make_forward_links(&index, laying.whiteouts, &forward, &unsettled.links);
        if !laying.is_bottom || laying.took_hidden_names {
            let mut hiding = Hiding {
                index: &index,
                whiteouts: laying.whiteouts,
                marks: &unsettled.marks,
                pruned: HashSet::new(),
            };
            self.hide(&mut hiding);
        }
        self.make_links_below(&index, laying.whiteouts, &unsettled.links, laying.is_bottom);
        self.root.clear();
        self.directories
            .forget(laying.below, &self.context.take_removed());
        self.check()
    }

    /// As [`Sink::member`](crate::archive::scan::Sink::member), of a layer.
    pub(super) fn lay(&mut self, mut member: Member) {
        let name = ArchivePath::sanitize(&member.name);
        match self.fate(&mut member, &name.path, name.stripped) {
            Fate::Made(placed) => self.begin(member, placed),
            Fate::Nothing(path) => self.make_parent(&path),
            Fate::Gone(path) => self.unmake(&path),
            Fate::Idle => {}
            Fate::Refused { path, cause, way } => {
                if matches!(cause, Cause::Unplaced(Refused::Full)) {
                    let limit = self.context.claims.most();
                    let too_many = Error::TooManyEntries { path, limit };
                    return self.context.problems.stop(too_many);
                }
                let way = way.filter(|_| !matches!(cause, Cause::Climbs));
                if let Some(way) = way {
                    self.make_parent(&way);
                }
                self.context.problems.add(&path, cause);
            }
        }
    }

    /// Puts `member` into the layer's own tree, and says what it is on disk.
    fn fate(&mut self, member: &mut Member, path: &ArchivePath, stripped: Vec<u8>) -> Fate {
        let Some(laying) = &mut self.laying else {
            return Fate::Nothing(path.clone());
        };
        let whiteouts = laying.whiteouts;
        // Only these can be something else than they were, or nothing.
        let may_change = member.kind == tar::Kind::Directory
            || member.name.ends_with(b"/")
            || whiteouts == Whiteouts::Overlay;
        // Before it is there: it may take the place of a link on its own way.
        let way = canonical(laying.index(), path);
        let before = way.as_ref().filter(|_| may_change);
        let before = before.and_then(|path| Some(laying.index().find(path)?.kind()));
        let was_other = before.is_some_and(|kind| kind != Kind::Directory);
        let was_there = before.is_some();
        let placed = laying.builder.member(member);
        let index = laying.builder.index();
        let lies = way.or_else(|| canonical(index, path));
        let has_parent = lies.is_some();
        let lies = lies.unwrap_or_else(|| path.clone());
        let placed = match placed {
            Ok(placed) => placed,
            // Who makes layers by comparing trees says of a directory that has become a file what of
            // it is gone as well.
            Err(Refused::Unreachable(Refusal::NotADirectory))
                if !has_parent && whiteouts.takes_name(name_of(path)) =>
            {
                return Fate::Idle;
            }
            Err(refused) => {
                let hidden = hidden_part(index, &lies, whiteouts);
                let is_link = matches!(member.kind, tar::Kind::HardLink(_)) && has_parent;
                if let Some(hidden) = &hidden
                    && whiteouts == Whiteouts::Oci
                    && is_link
                    && refused.is_of_the_target()
                {
                    // What it hides it hides when the layer is complete.
                    return Fate::Nothing(hidden.clone());
                }
                let cause = cause(refused, member);
                let shown = || hidden.unwrap_or_else(|| lies.clone());
                return Fate::Refused {
                    way: has_parent.then(shown),
                    path: lies,
                    cause,
                };
            }
        };
        if !matches!(placed, Placed::Forward) {
            laying.forward.forget(&lies);
        }
        if let Some(shown) = hidden_part(index, &lies, whiteouts) {
            return Fate::Nothing(shown);
        }
        let entry = match placed {
            Placed::Entry(ino) | Placed::Link(ino) => index.entry(ino),
            Placed::Forward => {
                if let tar::Kind::HardLink(target) = &member.kind {
                    laying.forward.add(Link {
                        path: lies.clone(),
                        target: ArchivePath::sanitize(target).path,
                    });
                }
                return Fate::Nothing(lies);
            }
        };
        let Some(entry) = entry else {
            return Fate::Nothing(lies);
        };
        if whiteouts.meaning(name_of(&lies), &entry) != Meaning::Entry {
            return if was_there {
                Fate::Gone(lies)
            } else {
                Fate::Nothing(lies)
            };
        }
        if whiteouts.leads_elsewhere(&entry) {
            return refused(lies, Cause::Elsewhere);
        }
        if let tar::Kind::HardLink(target) = &mut member.kind {
            if entry.kind() == Kind::Directory {
                // To itself, which is there.
                return Fate::Idle;
            }
            let named = ArchivePath::sanitize(target).path;
            if names_hidden(index, whiteouts, &entry) {
                laying.took_hidden_names = true;
                return refused(lies, Cause::NoTarget { target: named });
            }
            *target = canonical(index, &named)
                .unwrap_or(named)
                .as_bytes()
                .to_vec();
        }
        if entry.kind() == Kind::Directory {
            member.kind = tar::Kind::Directory;
            if was_other && !laying.is_bottom {
                self.context.problems.add(&lies, Cause::TwoKinds);
            }
        }
        member
            .xattrs
            .retain(|(name, _)| !whiteouts.hides_xattr(name));
        Fate::Made(Way {
            path: lies,
            stripped,
        })
    }

    /// Takes away what the layer itself had made at `path`.
    fn unmake(&mut self, path: &ArchivePath) {
        if let Some((parent, name)) = path.split_last()
            && let Some(directory) = self.there(&parent)
        {
            self.writers.settle(directory.identity(), name);
            self.take_away(&parent, &directory, name);
        }
    }

    /// Makes the directory of `path`, which the layer's own tree has.
    fn make_parent(&mut self, path: &ArchivePath) {
        let parent = parent_of(path);
        if let Err(error) = self
            .root
            .directory(parent, Missing::Make, &mut self.writers)
        {
            self.cannot_reach(path, &error, 0);
        }
    }

    /// Makes the links whose targets the layer itself turned out to hold; those of `unsettled` it does
    /// not.
    fn make_forward_links(
        &mut self,
        index: &Index,
        whiteouts: Whiteouts,
        links: &[Link],
        unsettled: &[Link],
    ) {
        let below: HashSet<_> = unsettled.iter().map(|link| &link.path).collect();
        for (link, end) in links.iter().zip(ends(links)) {
            let named = index.find(&link.path);
            let is_hidden = hidden_part(index, &link.path, whiteouts).is_some();
            if named.is_none() && !is_hidden && !below.contains(&link.path) {
                let target = link.target.clone();
                self.context
                    .problems
                    .add(&link.path, Cause::NoTarget { target });
            }
            let Some(entry) = named.filter(|entry| entry.kind() != Kind::Directory) else {
                continue;
            };
            let target = end.and_then(|end| canonical(index, &end));
            let Some(target) = target.filter(|target| {
                let target = index.find(target);
                target.is_some_and(|target| target.ino() == entry.ino())
            }) else {
                // Something else has the name by now.
                continue;
            };
            if is_hidden || whiteouts.meaning(name_of(&link.path), &entry) != Meaning::Entry {
                continue;
            }
            if names_hidden(index, whiteouts, &entry) {
                let target = link.target.clone();
                self.context
                    .problems
                    .add(&link.path, Cause::NoTarget { target });
                continue;
            }
            self.make_settled_link(&link.path, &target);
        }
    }

    /// Takes away what the layer hides of those below it.
    fn hide(&mut self, hiding: &mut Hiding<'_>) {
        let mut pending = vec![(ArchivePath::root(), Ino::ROOT)];
        while let Some((path, ino)) = pending.pop() {
            let (mut names, mut is_opaque) = (Vec::new(), false);
            if let Some(directory) = hiding.index.entry(ino) {
                is_opaque = hiding.whiteouts.is_opaque(&directory);
            }
            for &mark in hiding.marks.get(&ino).into_iter().flatten() {
                match mark {
                    Meaning::Entry => {}
                    Meaning::Hides(name) => names.push(name),
                    Meaning::Opaque => is_opaque = true,
                }
            }
            for child in hiding.index.children(ino, 0) {
                let Some(entry) = hiding.index.entry(child.ino) else {
                    continue;
                };
                match hiding.whiteouts.meaning(child.name, &entry) {
                    // What had the name before, here or below, is replaced, by nothing.
                    Meaning::Entry if names_hidden(hiding.index, hiding.whiteouts, &entry) => {
                        names.push(child.name);
                    }
                    Meaning::Entry if entry.kind() == Kind::Directory => {
                        if !hiding.whiteouts.leads_elsewhere(&entry) {
                            pending.push((below(&path, child.name), child.ino));
                        }
                    }
                    Meaning::Entry => {}
                    Meaning::Hides(name) => names.push(name),
                    Meaning::Opaque => is_opaque = true,
                }
            }
            if is_opaque {
                self.prune(hiding, path, ino);
                continue;
            }
            for name in names {
                self.hide_one(hiding, &path, ino, name);
            }
        }
    }

    /// Takes away what lower layers have at `name` in the directory at `path`.
    fn hide_one(&mut self, hiding: &mut Hiding<'_>, path: &ArchivePath, ino: Ino, name: &[u8]) {
        if matches!(name, b"" | b"." | b"..") {
            return;
        }
        let Some(directory) = self.there(path) else {
            return;
        };
        match hiding.own(ino, name) {
            None => self.take_away(path, &directory, name),
            Some(own) if own.kind() == Kind::Directory => {
                self.renew(path, &directory, name, &own);
                self.prune(hiding, below(path, name), own.ino());
            }
            // It has made room already.
            Some(_) => {}
        }
    }

    /// Takes away what of the directory at `path`, which is `ino` in the layer, is not the layer's.
    fn prune(&mut self, hiding: &mut Hiding<'_>, path: ArchivePath, ino: Ino) {
        let mut pending = vec![(path, ino)];
        while let Some((path, ino)) = pending.pop() {
            if !hiding.pruned.insert(ino) {
                continue;
            }
            let Some(directory) = self.there(&path) else {
                continue;
            };
            let names = match names(&directory) {
                Ok(names) => names,
                Err(errno) => {
                    let trouble = Trouble {
                        action: CLEAR,
                        errno,
                    };
                    self.context.fail(&path, &directory, trouble, 0);
                    continue;
                }
            };
            for name in names {
                match hiding.own(ino, &name) {
                    None => self.take_away(&path, &directory, &name),
                    Some(own) if own.kind() == Kind::Directory => {
                        self.renew(&path, &directory, &name, &own);
                        pending.push((below(&path, &name), own.ino()));
                    }
                    Some(_) => {}
                }
            }
        }
    }

    /// The directory at `path`, if it is there; one that is not had its reason told.
    fn there(&mut self, path: &ArchivePath) -> Option<Directory> {
        let directory = self
            .root
            .directory(path.as_bytes(), Missing::Fail, &mut self.writers);
        directory.ok()
    }

    fn take_away(&self, path: &ArchivePath, directory: &Directory, name: &[u8]) {
        match self.context.take_away(directory, name) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => {
                let trouble = Trouble {
                    action: CLEAR,
                    errno,
                };
                self.context.fail(&below(path, name), directory, trouble, 0);
            }
        }
    }

    /// The directory `name` of that at `path` is the layer's alone: what lower layers said of its
    /// attributes is void.
    fn renew(&self, path: &ArchivePath, directory: &Directory, name: &[u8], own: &Entry<'_>) {
        const ALL: u32 = 0o777;
        if !own.is_implied() {
            return;
        }
        if let Ok(stat) = status(directory, name)
            && FileType::from_raw_mode(stat.st_mode) == FileType::Directory
        {
            self.context.forget(Identity::of(&stat));
            let mode = ALL & !self.context.policy.umask;
            if let Err(trouble) = Subject::named(directory, name).chmod(mode) {
                self.context.problems.add(&below(path, name), trouble);
            }
        }
    }

    /// Makes the links to what lies below the layer: first each beside the tree, so that none stands
    /// in another's way, and then each in its place.
    fn make_links_below(
        &mut self,
        index: &Index,
        whiteouts: Whiteouts,
        links: &[Link],
        is_bottom: bool,
    ) {
        let aside = match self.free_number(links) {
            Ok(number) => format!("{ASIDE}{number}-"),
            Err(trouble) => {
                let top = self.root.top().clone();
                return self.context.fail(&ArchivePath::root(), &top, trouble, 0);
            }
        };
        let mut made = Vec::new();
        for (link, end) in links.iter().zip(ends(links)) {
            if hidden_part(index, &link.path, whiteouts).is_some() {
                continue;
            }
            let name = format!("{aside}{}", made.len()).into_bytes();
            let end = end.filter(|_| !is_bottom);
            match end.map(|end| self.link_aside(&end, &name)) {
                Some(Ok(true)) => made.push((&link.path, name)),
                Some(Err(trouble)) => {
                    let top = self.root.top().clone();
                    self.context.fail(&link.path, &top, trouble, 0);
                }
                Some(Ok(false)) | None => {
                    let target = link.target.clone();
                    self.context
                        .problems
                        .add(&link.path, Cause::NoTarget { target });
                }
            }
        }
        self.root.clear();
        for (path, aside) in made {
            if let Err(trouble) = self.move_link(path, &aside) {
                let top = self.root.top().clone();
                self.context.fail(path, &top, trouble, 0);
                self.context.take_away(&top, &aside).ok();
            }
        }
    }

    /// A number that begins no name of the kind of [`ASIDE`], of what is in the destination itself and of
    /// `links`.
    fn free_number(&self, links: &[Link]) -> Result<u64, Trouble> {
        if links.is_empty() {
            return Ok(0);
        }
        let there = names(self.root.top()).while_trying_to(LINK)?;
        let there = there.iter().map(Vec::as_slice);
        let to_be = links
            .iter()
            .filter_map(|link| link.path.components().next());
        let taken = there.chain(to_be).filter_map(aside_number).max();
        Ok(taken.map_or(0, |number| number.saturating_add(1)))
    }

    /// Links what lies at `target` to `name` in the destination itself; whether there is anything.
    fn link_aside(&mut self, target: &ArchivePath, name: &[u8]) -> Result<bool, Trouble> {
        let parent = parent_of(target);
        let directory = self
            .root
            .directory(parent, Missing::Fail, &mut self.writers);
        let directory = match directory {
            Ok(directory) => directory,
            Err(ResolveError::Refused(_)) => return Ok(false),
            Err(ResolveError::Tree(trouble)) if trouble.errno == Errno::NOENT => return Ok(false),
            Err(ResolveError::Tree(trouble)) => return Err(trouble),
        };
        let target = name_of(target);
        match status(&directory, target) {
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => return Err(errno).while_trying_to(LINK),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                return Ok(false);
            }
            Ok(_) => {}
        }
        self.context.claims.take().while_trying_to(CLAIM)?;
        let top = self.root.top();
        let linked = rustix::fs::linkat(&directory, target, top, name, AtFlags::empty());
        linked.while_trying_to(LINK)?;
        Ok(true)
    }

    /// Puts the link `aside` in the destination itself to `path`.
    fn move_link(&mut self, path: &ArchivePath, aside: &[u8]) -> Result<(), Trouble> {
        let parent = parent_of(path);
        let directory = self
            .root
            .directory(parent, Missing::Make, &mut self.writers);
        let directory = match directory {
            Ok(directory) => directory,
            Err(ResolveError::Tree(trouble)) => return Err(trouble),
            Err(ResolveError::Refused(_)) => return Err(Errno::NOTDIR).while_trying_to(LINK),
        };
        let name = name_of(path);
        match self.context.take_away(&directory, name) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno).while_trying_to(LINK),
        }
        let top = self.root.top();
        rustix::fs::renameat(top, aside, &directory, name).while_trying_to(LINK)?;
        self.context.stats.written_entries.increment();
        Ok(())
    }
}

/// What a layer hides.
struct Hiding<'a> {
    index: &'a Index,
    whiteouts: Whiteouts,
    /// What its hard links hide, by their directories.
    marks: &'a HashMap<Ino, HashSet<Meaning<'a>>>,
    /// Directories of the layer in which nothing of those below is left.
    pruned: HashSet<Ino>,
}

impl<'a> Hiding<'a> {
    /// What the layer itself shows at `name` in directory `parent`.
    fn own(&self, parent: Ino, name: &[u8]) -> Option<Entry<'a>> {
        let entry = self.index.lookup(parent, name)?;
        let is_entry = self.whiteouts.meaning(name, &entry) == Meaning::Entry;
        let is_shown = is_entry
            && !self.whiteouts.leads_elsewhere(&entry)
            && !names_hidden(self.index, self.whiteouts, &entry);
        is_shown.then_some(entry)
    }
}

/// How far `path`, in the layer's own tree, leads: to its first component that is no entry, if there
/// is one, or holds what is not made.
fn hidden_part(index: &Index, path: &ArchivePath, whiteouts: Whiteouts) -> Option<ArchivePath> {
    let mut way = ArchivePath::root();
    let mut directory = Some(Ino::ROOT);
    for name in path.components() {
        let is_last = way.as_bytes().len() + name.len() + 1 >= path.as_bytes().len();
        way.push(name);
        if whiteouts.takes_name(name) {
            return Some(way);
        }
        if whiteouts != Whiteouts::Overlay || is_last {
            continue;
        }
        let entry = directory.and_then(|directory| index.lookup(directory, name));
        if entry.is_some_and(|entry| whiteouts.leads_elsewhere(&entry)) {
            return Some(way);
        }
        directory = entry.map(|entry| entry.ino());
    }
    None
}

fn refused(path: ArchivePath, cause: Cause) -> Fate {
    Fate::Refused {
        way: Some(path.clone()),
        path,
        cause,
    }
}

fn below(path: &ArchivePath, name: &[u8]) -> ArchivePath {
    let mut path = path.clone();
    path.push(name);
    path
}

/// The number of a name that begins like those of links that are not in their place yet. A longer one than
/// can be counted is no such name.
fn aside_number(name: &[u8]) -> Option<u64> {
    let digits = name.strip_prefix(ASIDE.as_bytes())?;
    let digits = digits.split(|byte| !byte.is_ascii_digit()).next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn names(directory: &Directory) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory.as_fd())? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

fn cause(refused: Refused, member: &Member) -> Cause {
    match refused {
        Refused::Climbs => Cause::Climbs,
        Refused::Unreachable(refusal) => Cause::Refused(refusal),
        Refused::Root => Cause::IsTheRoot,
        Refused::MissingTarget => {
            let target = match &member.kind {
                tar::Kind::HardLink(target) => ArchivePath::sanitize(target).path,
                _ => ArchivePath::root(),
            };
            Cause::NoTarget { target }
        }
        refused => Cause::Unplaced(refused),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::index;
    use crate::materialize::Summary;
    use crate::materialize::testing::{feed, member};
    use crate::stack::merge;
    use crate::tar::Timestamp;

    /// What a path is: its kind and what tells it from others, its time unless only paths speak of it,
    /// and how many names it has.
    type Shown = BTreeMap<String, (String, Option<i64>, u64)>;

    fn in_index(index: &Index) -> Shown {
        let mut shown = Shown::new();
        let mut pending = vec![(String::new(), Ino::ROOT)];
        while let Some((path, ino)) = pending.pop() {
            for child in index.children(ino, 0) {
                let name = std::str::from_utf8(child.name).expect("ASCII");
                let path = format!("{path}/{name}");
                let entry = index.entry(child.ino).expect("there");
                let (what, links) = match entry.kind() {
                    Kind::Directory if entry.is_implied() => ("d".to_owned(), 0),
                    Kind::Directory => (format!("d {:o}", entry.mode()), 0),
                    Kind::File => (format!("f {}", entry.size()), entry.link_count()),
                    Kind::Symlink(target) => {
                        (format!("l {}", target.escape_ascii()), entry.link_count())
                    }
                    _ => ("other".to_owned(), entry.link_count()),
                };
                let mtime = (!entry.is_implied()).then(|| entry.mtime().seconds);
                if entry.kind() == Kind::Directory {
                    pending.push((path.clone(), child.ino));
                }
                shown.insert(path, (what, mtime, links.into()));
            }
        }
        shown
    }

    /// As [`in_index`], and in the same words where `like` says that nobody speaks of a directory.
    fn on_disk(root: &Path, like: &Shown) -> Shown {
        let mut shown = Shown::new();
        let mut pending = vec![(String::new(), root.to_owned())];
        while let Some((above, directory)) = pending.pop() {
            for entry in fs::read_dir(directory).expect("listed") {
                let entry = entry.expect("listed");
                let stat = entry.metadata().expect("there");
                let name = entry.file_name().into_string().expect("ASCII");
                let path = format!("{above}/{name}");
                let is_implied = like.get(&path).is_some_and(|(_, mtime, _)| mtime.is_none());
                let kind = stat.file_type();
                let (what, links) = if kind.is_dir() {
                    pending.push((path.clone(), entry.path()));
                    let what = if is_implied {
                        "d".to_owned()
                    } else {
                        format!("d {:o}", stat.mode() & 0o7777)
                    };
                    (what, 0)
                } else if kind.is_symlink() {
                    let target = fs::read_link(entry.path()).expect("a link");
                    (format!("l {}", target.display()), stat.nlink())
                } else if kind.is_char_device() {
                    ("other".to_owned(), stat.nlink())
                } else {
                    (format!("f {}", stat.len()), stat.nlink())
                };
                let mtime = (!is_implied).then(|| stat.mtime());
                shown.insert(path, (what, mtime, links));
            }
        }
        shown
    }

    fn indexed(layer: &[(Member, Vec<u8>)]) -> Index {
        let mut builder = Builder::new(index::Options::default());
        for (member, _) in layer {
            // What is refused is among the problems.
            builder.member(member).ok();
        }
        builder.finish(Origin::default())
    }

    fn written(layers: &[Vec<(Member, Vec<u8>)>], place: &Path, whiteouts: Whiteouts) -> Summary {
        let mut options = crate::materialize::Options::for_this_user();
        options.same_permissions = true;
        options.writers = Some(2);
        let mut materializer =
            Materializer::new(place, options, std::sync::Arc::default()).expect("a directory");
        for layer in layers {
            materializer.begin_layer(whiteouts);
            let members = layer.iter();
            feed(
                &mut materializer,
                members.map(|(member, content)| (member.clone(), content.as_slice())),
            );
            materializer.end_layer().expect("nothing fatal");
        }
        materializer.finish().expect("nothing fatal")
    }

    #[derive(Clone, Debug)]
    enum Step {
        File(String),
        Directory(String, u32),
        Symlink(String, String),
        Hard(String, String),
        Device(String),
        Marked(String),
    }

    /// Members whose contents and times tell them from each other.
    fn members(layers: &[Vec<Step>]) -> Vec<Vec<(Member, Vec<u8>)>> {
        let mut count = 0;
        let mut one = |step: &Step| {
            count += 1;
            let plain = |name: &str, kind| Member {
                mtime: Timestamp {
                    seconds: i64::from(count),
                    nanoseconds: 0,
                },
                ..member(name.as_bytes(), kind)
            };
            let len = usize::try_from(count).expect("few");
            match step {
                Step::File(name) => {
                    let (sized, content) = (plain(name, tar::Kind::File), vec![7; len]);
                    let payload = crate::base::extent::Extent::with_len(
                        crate::base::extent::Plain(512),
                        len as u64,
                    );
                    let size = len as u64;
                    (
                        Member {
                            payload,
                            size,
                            ..sized
                        },
                        content,
                    )
                }
                Step::Directory(name, mode) => {
                    let mode = *mode;
                    (
                        Member {
                            mode,
                            ..plain(name, tar::Kind::Directory)
                        },
                        Vec::new(),
                    )
                }
                Step::Symlink(name, target) => (
                    plain(name, tar::Kind::Symlink(target.as_bytes().to_vec())),
                    Vec::new(),
                ),
                Step::Hard(name, target) => (
                    plain(name, tar::Kind::HardLink(target.as_bytes().to_vec())),
                    Vec::new(),
                ),
                Step::Device(name) => (
                    plain(name, tar::Kind::CharDevice(tar::Device::default())),
                    Vec::new(),
                ),
                Step::Marked(name) => {
                    let directory = plain(name, tar::Kind::Directory);
                    let xattrs = vec![(b"user.overlay.opaque".to_vec(), b"y".to_vec())];
                    (
                        Member {
                            mode: 0o755,
                            xattrs,
                            ..directory
                        },
                        Vec::new(),
                    )
                }
            }
        };
        let mut one_layer = |layer: &Vec<Step>| layer.iter().map(&mut one).collect();
        layers.iter().map(&mut one_layer).collect()
    }

    /// What is not shown and has further names. Only one of each path is in a layer: in the place of a
    /// second one the first would go, and its further names would be those of something that is shown.
    const HIDDEN: &str = ".wh.z";

    /// `layer` with one of each path that is [`HIDDEN`].
    fn without_second_ones(mut layer: Vec<Step>) -> Vec<Step> {
        let mut seen = HashSet::new();
        layer.retain(|step| match step {
            Step::File(path) if path.ends_with(HIDDEN) => seen.insert(path.clone()),
            _ => true,
        });
        layer
    }

    fn layers() -> impl Strategy<Value = Vec<Vec<Step>>> {
        let path = || "[abc](/[abc]){0,2}";
        let step = prop_oneof![
            4 => path().prop_map(Step::File),
            2 => (path(), 0o700..=0o777_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
            1 => (path(), "(\\.\\./)?[abc](/[abc])?").prop_map(|(path, target)| Step::Symlink(path, target)),
            2 => (path(), path()).prop_map(|(path, target)| Step::Hard(path, target)),
            2 => "([abc]/){0,2}\\.wh\\.[abc]".prop_map(Step::File),
            1 => "([abc]/){0,2}\\.wh\\.\\.wh\\.\\.opq".prop_map(Step::File),
            1 => "([abc]/){0,2}\\.wh\\.[abc]/[abc]".prop_map(Step::File),
            2 => ("([abc]/){0,2}\\.wh\\.([abc]|\\.wh\\.(opq|aufs))", path())
                .prop_map(|(path, target)| Step::Hard(path, target)),
            1 => ("([abc]/){0,2}\\.wh\\.c/[abc]", path())
                .prop_map(|(path, target)| Step::Hard(path, target)),
            2 => "([abc]/){0,2}".prop_map(|above| Step::File(above + HIDDEN)),
            2 => (path(), "([abc]/){0,2}")
                .prop_map(|(path, above)| Step::Hard(path, above + HIDDEN)),
            2 => ("([abc]/){0,2}\\.wh\\.[abc]", path(), "[abc]").prop_map(|(path, target, name)| {
                Step::Hard(path, format!("{target}/{name}"))
            }),
            1 => path().prop_map(Step::Device),
            1 => path().prop_map(Step::Marked),
        ];
        let layer = prop::collection::vec(step, 0..10).prop_map(without_second_ones);
        prop::collection::vec(layer, 1..4)
    }

    /// Whether what is on disk is what the indexes say; a layer that holds a path as a directory and
    /// as something else is told of instead.
    fn check(steps: &[Vec<Step>], whiteouts: Whiteouts) -> Result<(), TestCaseError> {
        let layers = members(steps);
        let indexes: Vec<_> = layers.iter().map(|layer| indexed(layer)).collect();
        let indexes: Vec<_> = indexes.iter().collect();
        let merged = merge(&indexes, whiteouts).expect("few");
        let expected = in_index(&merged.index);
        let place = tempfile::tempdir().expect("a directory");
        let summary = written(&layers, place.path(), whiteouts);
        let is_told =
            |problem: &crate::materialize::Problem| matches!(problem.cause, Cause::TwoKinds);
        if !summary.problems.iter().any(is_told) {
            let found = on_disk(place.path(), &expected);
            prop_assert_eq!(found, expected, "{:#?}", summary.problems);
            let is_whole = merged.index.problem_count() == 0;
            // What is hidden below is told as it goes by, and counted only if it would be seen; and of
            // what was in a directory nobody knows where that was when it is no more.
            let is_odd = |step: &Step| match step {
                Step::Hard(path, target) => target.ends_with(HIDDEN) || path.contains(".wh.c/"),
                _ => false,
            };
            if !steps.iter().flatten().any(is_odd) {
                prop_assert_eq!(
                    summary.problems.is_empty(),
                    is_whole,
                    "{:#?}",
                    summary.problems
                );
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn what_is_written_is_what_the_indexes_make(steps in layers(), oci in any::<bool>()) {
            let whiteouts = if oci { Whiteouts::Oci } else { Whiteouts::Overlay };
            check(&steps, whiteouts)?;
        }
    }
}
