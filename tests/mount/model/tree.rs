//! Model of a tree to which members are applied in order, with the semantics of GNU tar.
//!
//! It knows no headers, no index and no files.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::member::{Attributes, Member, MemberKind, joined};
use super::observe::{ObservedKind, ObservedTree, Sum, sum};

/// The content of a file.
pub(super) struct Content {
    pub(super) size: u64,
    /// Data between holes, ascending and not adjacent.
    pub(super) pieces: Vec<(u64, Vec<u8>)>,
    pub(super) is_sparse: bool,
}

impl Content {
    /// All pieces, one after the other.
    pub(super) fn stored(&self) -> Vec<u8> {
        self.pieces
            .iter()
            .flat_map(|(_, bytes)| bytes.iter().copied())
            .collect()
    }

    /// Checksum of the bytes that a reader gets.
    fn sum(&self) -> Sum {
        let mut all = Vec::new();
        for (offset, bytes) in &self.pieces {
            all.resize(usize::try_from(*offset).expect("small"), 0);
            all.extend_from_slice(bytes);
        }
        all.resize(usize::try_from(self.size).expect("small"), 0);
        sum(&all)
    }
}

/// Maximum number of symbolic links on a path.
const MAX_LINKS: usize = 40;

const ROOT: usize = 0;

/// The tree after the members so far.
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// Number of members that could not be placed.
    pub(super) lost: u64,
}

struct Node {
    kind: Kind,
    attributes: Attributes,
    /// Whether only paths imply the directory, and no member.
    is_implied: bool,
}

enum Kind {
    File(Rc<Content>),
    Directory(BTreeMap<Vec<u8>, usize>),
    Symlink(Vec<u8>),
    Fifo,
    /// A hard link to a path that does not exist yet.
    Promise(Vec<Vec<u8>>),
}

/// Error of a member that cannot be placed.
struct Unplaceable;

/// A directory that is only implied by paths.
fn implied() -> Node {
    let attributes = Attributes {
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: (0, 0),
        xattrs: BTreeMap::new(),
    };
    Node {
        kind: Kind::Directory(BTreeMap::new()),
        attributes,
        is_implied: true,
    }
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            nodes: vec![implied()],
            lost: 0,
        }
    }
}

impl Tree {
    /// The tree of `members`.
    pub(super) fn of(members: &[Member]) -> Self {
        let mut tree = Self::default();
        for member in members {
            tree.apply(member);
        }
        tree.resolve_late_links();
        tree
    }

    /// Resolves hard links to later members after the last member, or counts them as lost.
    fn resolve_late_links(&mut self) {
        for (path, number) in self.walked() {
            if !self.is_promise(number) {
                continue;
            }
            let (name, way) = path.split_last().expect("the root is a directory");
            let parent = self.existing(way).expect("walked");
            let found = self.resolve_promise(number);
            if let Kind::Directory(children) = &mut self.node_mut(parent).kind {
                match found {
                    Some(found) => children.insert(name.clone(), found),
                    None => children.remove(name),
                };
            }
            self.lost += u64::from(found.is_none());
        }
    }

    /// The node that a hard link refers to, if any.
    fn resolve_promise(&self, mut number: usize) -> Option<usize> {
        // More steps than nodes are a cycle.
        for _ in 0..self.nodes.len() {
            match &self.node(number).kind {
                Kind::Promise(target) => number = self.existing(target)?,
                Kind::Directory(_) => return None,
                _ => return Some(number),
            }
        }
        None
    }

    /// Applies a member, or counts it as lost.
    pub(super) fn apply(&mut self, member: &Member) {
        if self.place(member).is_err() {
            self.lost += 1;
        }
    }

    fn place(&mut self, member: &Member) -> Result<(), Unplaceable> {
        let Some((name, way)) = member.path.split_last() else {
            self.update(ROOT, member);
            return Ok(());
        };
        let parent = self.walk(way)?;
        let old = self.children(parent)?.get(name).copied();
        let new = match &member.what {
            MemberKind::Directory => {
                if let Some(old) = old
                    && self.is_directory(old)
                {
                    self.update(old, member);
                    return Ok(());
                }
                Kind::Directory(BTreeMap::new())
            }
            MemberKind::HardLink(target) => {
                let found = self
                    .existing(target)
                    .filter(|&found| !self.is_promise(found));
                let Some(target) = found else {
                    if old.is_some() {
                        return Err(Unplaceable);
                    }
                    let promise = Kind::Promise(target.clone());
                    return self.put_new(parent, name, promise, member);
                };
                if old == Some(target) {
                    return Ok(());
                }
                if self.is_directory(target) {
                    return Err(Unplaceable);
                }
                return self.put(parent, name, target);
            }
            MemberKind::File(content) => Kind::File(Rc::clone(content)),
            MemberKind::Symlink(target) => Kind::Symlink(target.clone()),
            MemberKind::Fifo => Kind::Fifo,
        };
        self.check_removable(old)?;
        self.put_new(parent, name, new, member)
    }

    fn put_new(
        &mut self,
        parent: usize,
        name: &[u8],
        kind: Kind,
        member: &Member,
    ) -> Result<(), Unplaceable> {
        self.nodes.push(Node {
            kind,
            attributes: member.attributes.clone(),
            is_implied: false,
        });
        self.put(parent, name, self.nodes.len() - 1)
    }

    /// Updates a directory's attributes from another member.
    fn update(&mut self, number: usize, member: &Member) {
        let node = self.node_mut(number);
        node.attributes = member.attributes.clone();
        node.is_implied = false;
    }

    /// Links `name` in `parent` to a node, and replaces the old one.
    fn put(&mut self, parent: usize, name: &[u8], node: usize) -> Result<(), Unplaceable> {
        self.check_removable(self.children(parent)?.get(name).copied())?;
        if let Kind::Directory(children) = &mut self.node_mut(parent).kind {
            children.insert(name.to_vec(), node);
        }
        Ok(())
    }

    /// Fails for a directory that is not empty.
    fn check_removable(&self, old: Option<usize>) -> Result<(), Unplaceable> {
        match old.map(|old| &self.node(old).kind) {
            Some(Kind::Directory(children)) if !children.is_empty() => Err(Unplaceable),
            _ => Ok(()),
        }
    }

    /// The directory at a path. Follows symbolic links that stay below the root, and creates missing
    /// directories.
    fn walk(&mut self, way: &[Vec<u8>]) -> Result<usize, Unplaceable> {
        let mut stack = vec![ROOT];
        let mut links = 0;
        for name in way {
            let mut left = vec![name.clone()];
            while let Some(name) = left.pop() {
                let here = *stack.last().expect("the root stays");
                match &name[..] {
                    b"" | b"." => continue,
                    b".." if stack.len() == 1 => return Err(Unplaceable),
                    b".." => {
                        stack.pop();
                        continue;
                    }
                    _ => {}
                }
                let Some(&next) = self.children(here)?.get(&name) else {
                    self.nodes.push(implied());
                    let made = self.nodes.len() - 1;
                    self.put(here, &name, made)?;
                    stack.push(made);
                    continue;
                };
                match &self.node(next).kind {
                    Kind::Directory(_) => stack.push(next),
                    Kind::Symlink(target) => {
                        links += 1;
                        if links > MAX_LINKS || target.starts_with(b"/") {
                            return Err(Unplaceable);
                        }
                        let names = target.split(|&byte| byte == b'/').rev();
                        left.extend(names.map(<[u8]>::to_vec));
                    }
                    Kind::File(_) | Kind::Fifo | Kind::Promise(_) => return Err(Unplaceable),
                }
            }
        }
        Ok(*stack.last().expect("the root stays"))
    }

    /// The node at a path without symbolic links.
    fn existing(&self, path: &[Vec<u8>]) -> Option<usize> {
        path.iter().try_fold(ROOT, |here, name| {
            self.children(here).ok()?.get(name).copied()
        })
    }

    fn children(&self, number: usize) -> Result<&BTreeMap<Vec<u8>, usize>, Unplaceable> {
        match &self.node(number).kind {
            Kind::Directory(children) => Ok(children),
            _ => Err(Unplaceable),
        }
    }

    fn is_promise(&self, number: usize) -> bool {
        matches!(self.node(number).kind, Kind::Promise(_))
    }

    fn is_directory(&self, number: usize) -> bool {
        matches!(self.node(number).kind, Kind::Directory(_))
    }

    fn node(&self, number: usize) -> &Node {
        self.nodes.get(number).expect("made before")
    }

    fn node_mut(&mut self, number: usize) -> &mut Node {
        self.nodes.get_mut(number).expect("made before")
    }

    /// All paths and their nodes, directories before their entries.
    fn walked(&self) -> Vec<(Vec<Vec<u8>>, usize)> {
        let mut found = vec![(Vec::new(), ROOT)];
        let mut next = 0;
        while let Some((path, number)) = found.get(next).cloned() {
            next += 1;
            if let Kind::Directory(children) = &self.node(number).kind {
                found.extend(children.iter().map(|(name, &child)| {
                    let mut path = path.clone();
                    path.push(name.clone());
                    (path, child)
                }));
            }
        }
        found
    }

    /// The paths of everything.
    pub(super) fn paths(&self) -> Vec<Vec<Vec<u8>>> {
        let walked = self.walked().into_iter();
        walked.map(|(path, _)| path).collect()
    }

    /// The paths of directories.
    pub(super) fn directories(&self) -> Vec<Vec<Vec<u8>>> {
        let walked = self.walked().into_iter();
        let directories = walked.filter(|&(_, number)| self.is_directory(number));
        directories.map(|(path, _)| path).collect()
    }

    /// Looks up a path that contains only directories.
    pub(super) fn look(&self, path: &[Vec<u8>]) -> Lookup {
        let mut here = ROOT;
        for name in path {
            let Ok(children) = self.children(here) else {
                return Lookup::Other;
            };
            match children.get(name) {
                Some(&next) => here = next,
                None => return Lookup::Missing,
            }
        }
        match &self.node(here).kind {
            Kind::File(content) => Lookup::File(content.sum()),
            _ => Lookup::Other,
        }
    }

    /// The complete tree as an observer sees it.
    pub(super) fn observed(&self) -> ObservedTree {
        let walked = self.walked();
        let mut numbers: BTreeMap<usize, Vec<Vec<u8>>> = BTreeMap::new();
        for (path, number) in &walked {
            numbers.entry(*number).or_default().push(joined(path));
        }
        let seen = walked.iter().map(|(path, number)| {
            let Node {
                kind, attributes, ..
            } = self.node(*number);
            let mut attributes = attributes.clone();
            let thing = match kind {
                Kind::File(content) => ObservedKind::File(content.size, content.sum()),
                Kind::Directory(_) => ObservedKind::Directory,
                Kind::Symlink(target) => ObservedKind::Symlink(target.clone()),
                Kind::Fifo => ObservedKind::Fifo,
                Kind::Promise(_) => unreachable!("all are settled"),
            };
            if matches!(thing, ObservedKind::Symlink(_)) {
                attributes.mode = 0o777;
            }
            let mut names = numbers.get(number).cloned().unwrap_or_default();
            names.sort();
            (joined(path), (thing, attributes, names))
        });
        let mut sight: ObservedTree = seen.collect();
        if !self.has_root() {
            sight.remove(&b""[..]);
        }
        sight
    }

    /// Whether a member specifies the root.
    pub(super) fn has_root(&self) -> bool {
        !self.node(ROOT).is_implied
    }

    /// The paths of directories without a member.
    pub(super) fn implied(&self) -> Vec<Vec<u8>> {
        let walked = self.walked().into_iter();
        let implied = walked.filter(|&(_, number)| self.node(number).is_implied);
        implied.map(|(path, _)| joined(&path)).collect()
    }
}

/// Result of a lookup.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum Lookup {
    Missing,
    File(Sum),
    /// Another kind, or a path with another kind in it.
    Other,
}
