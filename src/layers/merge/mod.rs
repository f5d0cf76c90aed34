//! Merges the trees of layers, from the bottom, into one; pure.
//!
//! A directory over a directory has the names of both, and the attributes of the upper one, unless only
//! implied. Anything else replaces the entry below. A whiteout hides entries of lower layers, not of its own.

mod cross_links;
mod layer_stack;

use crate::index::{
    self, Builder, Charge, Index, LayerIno, MemoryLimit, MergeError, MergePlan, MergedDirectory,
    MergedIndex, MergedName, Options, Origin, WhiteoutFormat,
};
use cross_links::{MAX_SHARED_WORK, WorkBudget, link_layers, problem_at};
use layer_stack::{LayerAction, Layers, Parts, roots};

/// Merges `layers`, from the bottom; without layers the tree is empty. The memory of the merge counts against
/// `limit`, and that of the tree does while it lives.
///
/// # Errors
/// When there are too many entries for one tree, or the merge exceeds the limit.
pub fn merge(
    layers: &[&Index],
    whiteouts: WhiteoutFormat,
    limit: &MemoryLimit,
) -> Result<MergedIndex, MergeError> {
    if layers.is_empty() {
        let empty = Builder::new(Options::default()).finish(Origin::default());
        return merge(&[&empty], whiteouts, limit);
    }
    let work = &mut WorkBudget::new(MAX_SHARED_WORK);
    merge_stack(link_layers(layers, whiteouts, limit, work)?, limit)
}

fn merge_stack(stack: Layers<'_>, limit: &MemoryLimit) -> Result<MergedIndex, MergeError> {
    let mut planner = Planner {
        layers: &stack,
        plan: MergePlan {
            problem_count: stack.missing_count,
            problems: stack.missing.clone(),
            ..MergePlan::default()
        },
        pending: Vec::new(),
        charge: limit.charge(),
    };
    planner.plan_all()?;
    // Counts the memory of the plan until it is dropped.
    let Planner {
        plan,
        charge: _charge,
        ..
    } = planner;
    let (layers, whiteouts) = (stack.indexes, stack.whiteouts);
    drop(stack);
    let is_hidden_xattr = |name: &[u8]| whiteouts.hides_xattr(name);
    let origin = origin(layers, whiteouts);
    index::merge(layers, &plan, is_hidden_xattr, origin, limit)
}

/// The identity of the merged tree. It depends only on the layers and their order.
fn origin(layers: &[&Index], whiteouts: WhiteoutFormat) -> Origin {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{whiteouts:?}").as_bytes());
    let mut packed_bytes = 0_u64;
    for origin in layers.iter().map(|index| index.origin()) {
        packed_bytes = packed_bytes.saturating_add(origin.packed_bytes);
        hasher.update(&origin.content_id);
        hasher.update(origin.locator.file_name().as_bytes());
    }
    Origin {
        content_id: *hasher.finalize().as_bytes(),
        packed_bytes,
        is_truncated: layers.iter().any(|index| index.origin().is_truncated),
        has_end_marker: layers.iter().all(|index| index.origin().has_end_marker),
        ..Origin::default()
    }
}

struct Planner<'a, 'l> {
    layers: &'l Layers<'a>,
    plan: MergePlan<'a>,
    /// Parts of directories with unplanned names, from the bottom, with the directory's number in the plan.
    pending: Vec<(u32, LayerIno)>,
    charge: Charge,
}

impl<'a> Planner<'a, '_> {
    fn plan_all(&mut self) -> Result<(), MergeError> {
        let count = u32::try_from(self.layers.indexes.len()).map_err(|_| MergeError::TooLarge)?;
        self.plan_directory(&roots(0..count))?;
        while let Some(&(directory, _)) = self.pending.last() {
            let other = |&(pending, _): &(u32, LayerIno)| pending != directory;
            let last_other = self.pending.iter().rposition(other);
            let start = last_other.map_or(0, |last| last + 1);
            let parts = self.pending.drain(start..).map(|(_, part)| part);
            let parts: Parts = parts.collect();
            self.plan_names(directory, &parts)?;
        }
        Ok(())
    }

    /// Plans a directory with at least one part, and returns its lowest part.
    fn plan_directory(&mut self, parts: &[LayerIno]) -> Result<Option<LayerIno>, MergeError> {
        let Some(&layer_ino) = parts.first() else {
            return Ok(None);
        };
        let is_explicit = |part: &&LayerIno| {
            let entry = self.layers.entry(**part);
            entry.is_some_and(|entry| !entry.is_implied())
        };
        let attributes = *parts.iter().rev().find(is_explicit).unwrap_or(&layer_ino);
        let number = u32::try_from(self.plan.directories.len());
        let number = number.map_err(|_| MergeError::TooLarge)?;
        let surface = MergedDirectory {
            lowest: layer_ino,
            attributes,
        };
        self.charge.push(&mut self.plan.directories, surface)?;
        for &part in parts {
            self.charge.push(&mut self.pending, (number, part))?;
        }
        Ok(Some(layer_ino))
    }

    fn plan_name(
        &mut self,
        directory: u32,
        name: &'a [u8],
        parts: &[LayerIno],
    ) -> Result<(), MergeError> {
        let target = match parts.first() {
            Some(&first) if self.layers.is_directory(first) => self.plan_directory(parts)?,
            first => first.copied(),
        };
        if let Some(target) = target {
            let named = MergedName {
                directory,
                name,
                target,
            };
            self.charge.push(&mut self.plan.names, named)?;
        }
        Ok(())
    }

    fn plan_names(&mut self, directory: u32, parts: &[LayerIno]) -> Result<(), MergeError> {
        let layers = self.layers;
        let mut named = Parts::new();
        let parts = layers.visible(parts);
        if let &[part] = parts
            && layers.links_in(part).is_empty()
            && let Some(index) = layers.index(part.layer)
        {
            for child in index.children(part.ino, 0) {
                self.apply(&mut named, part, child.name, LayerAction::Entry(child.ino));
                self.plan_name(directory, child.name, &named)?;
                named.clear();
            }
            return Ok(());
        }
        let mut actions = layers.actions_by_name(parts).peekable();
        while let Some((name, part, action)) = actions.next() {
            self.apply(&mut named, part, name, action);
            if actions.peek().is_none_or(|&(next, ..)| next != name) {
                self.plan_name(directory, name, &named)?;
                named.clear();
            }
        }
        Ok(())
    }

    /// As [`Layers::apply`], and records a problem if `name` in directory `part` is unsupported.
    fn apply(&mut self, parts: &mut Parts, part: LayerIno, name: &[u8], action: LayerAction) {
        let Err(problem) = self.layers.apply(parts, part.layer, name, action) else {
            return;
        };
        self.plan.problem_count += 1;
        if self.plan.problems.len() < Options::default().max_problems {
            let index = self.layers.index(part.layer);
            let path = index.and_then(|index| index.path(part.ino));
            let problem = problem_at(path.unwrap_or_default(), name, problem);
            self.plan.problems.push((part.layer as usize, problem));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::archive_path::ArchivePath;
    use crate::index::test_support::{directory, file, hard_link, layer, member, symlink};
    use crate::index::{Ino, TooMuchMemory};
    use crate::tar::{self, Device, Member};
    use cross_links::{CrossLinkTarget, MISSING_TARGET, Resolver, TOO_MUCH_WORK};
    use layer_stack::{ActionsByName, MISSING_ENTRY};

    /// Few names, so that layers collide.
    const NAMES: [&str; 8] = ["a", "b", "d", "d/a", "d/b", "d/d", "d/d/a", "l/a"];

    fn a_member() -> impl Strategy<Value = Member> {
        let name = || prop::sample::select(&NAMES[..]);
        let hidden = |name: &str| match name.rsplit_once('/') {
            Some((parent, name)) => format!("{parent}/.wh.{name}"),
            None => format!(".wh.{name}"),
        };
        let none = tar::MemberKind::CharDevice(Device { major: 0, minor: 0 });
        let passed = prop::sample::select(&["d", "l"][..]);
        let directories = prop::sample::select(&["a", "d", "d/d", "d/../b", "/d/d", ".."][..]);
        prop_oneof![
            3 => name().prop_map(|name| file(name, 0..1)),
            2 => name().prop_map(|name| directory(name, 0o755)),
            1 => name().prop_map(move |name| file(&hidden(name), 0..0)),
            1 => name().prop_map(|name| file(&format!("{name}/.wh..wh..opq"), 0..0)),
            1 => name().prop_map(move |name| member(name, none.clone())),
            1 => (name(), name()).prop_map(|(name, target)| symlink(name, target)),
            2 => (passed, directories).prop_map(|(name, target)| symlink(name, target)),
            3 => (name(), name()).prop_map(|(name, target)| hard_link(name, target)),
            1 => (name(), name()).prop_map(move |(name, target)| hard_link(&hidden(name), target)),
            1 => (name(), name())
                .prop_map(|(name, target)| hard_link(&format!("{name}/.wh..wh..opq"), target)),
        ]
    }

    fn layers(members: &[&[Member]]) -> Vec<Index> {
        let layers = members.iter();
        layers
            .map(|members| layer(members, WhiteoutFormat::Oci))
            .collect()
    }

    /// Merges `layers` with `shared` work for links. Returns the tree and the work used.
    fn merged(layers: &[Index], shared: u64) -> (MergedIndex, u64) {
        let (limit, mut work) = (MemoryLimit::none(), WorkBudget::new(shared));
        let indexes: Vec<_> = layers.iter().collect();
        let layered = link_layers(&indexes, WhiteoutFormat::Oci, &limit, &mut work).expect("small");
        let merged = merge_stack(layered, &limit).expect("small");
        (merged, shared - work.shared)
    }

    fn inode(merged: &MergedIndex, path: &str) -> Option<Ino> {
        let path = ArchivePath::sanitize(path.as_bytes()).path;
        merged.index.find(&path).map(|entry| entry.ino())
    }

    fn problems(merged: &MergedIndex) -> Vec<String> {
        let problems = merged.index.problems().iter();
        problems.map(ToString::to_string).collect()
    }

    // Promises: layerlink-lost
    #[test]
    fn chain_of_links_of_any_length_finds_its_target() {
        let chain = (0..1000).map(|number| {
            let target = format!("l{}", number + 1);
            hard_link(&format!("l{number}"), &target)
        });
        let chain: Vec<_> = chain.chain([hard_link("l1000", "a")]).collect();
        let layers = layers(&[&[file("a", 0..1)], &chain]);
        let (merged, _) = merged(&layers, MAX_SHARED_WORK);
        let target = inode(&merged, "a").expect("there");
        for number in 0..=1000 {
            let found = inode(&merged, &format!("l{number}"));
            assert_eq!(found, Some(target), "l{number}");
        }
        assert_eq!(problems(&merged), [""; 0]);
    }

    // Promises: layerlink-lost
    #[test]
    fn cycle_of_links_ends_where_a_lower_layer_has_a_target() {
        let cycle = |name: &str| {
            let link =
                |from: &str, to: &str| hard_link(&format!("{name}{from}"), &format!("{name}{to}"));
            [
                link("0", "1"),
                link("1", "2"),
                link("2", "0"),
                link("3", "1"),
            ]
        };
        let members = [cycle("a"), cycle("b")].concat();
        let layers = layers(&[&[file("b2", 0..1)], &members]);
        let (merged, _) = merged(&layers, MAX_SHARED_WORK);
        let target = inode(&merged, "b1").expect("found");
        // The link replaces the file of its name.
        for name in ["b0", "b1", "b2", "b3"] {
            assert_eq!(inode(&merged, name), Some(target), "{name}");
        }
        let missing =
            ["a0", "a1", "a2", "a3"].map(|name| format!("{name}: layer 2: {MISSING_TARGET}"));
        assert_eq!(problems(&merged), missing);
    }

    fn path(depth: usize) -> String {
        vec!["d"; depth].join("/")
    }

    // Promises: layerlink-steps
    #[test]
    fn directory_of_many_targets_is_walked_to_once() {
        const LAYERS: usize = 20;
        const DEPTH: usize = 100;
        const LINKS: usize = 100;
        let path = path(DEPTH);
        let files: Vec<_> = (0..LINKS)
            .map(|number| file(&format!("{path}/{number}"), 0..1))
            .collect();
        let links: Vec<_> = (0..LINKS)
            .map(|number| hard_link(&format!("l{number}"), &format!("{path}/{number}")))
            .collect();
        let between = [file(&format!("{path}/x"), 0..1)];
        let mut members = vec![&between[..]; LAYERS - 2];
        members.insert(0, &files);
        members.push(&links);
        let (merged, work) = merged(&layers(&members), MAX_SHARED_WORK);
        for number in 0..LINKS {
            let target = inode(&merged, &format!("{path}/{number}"));
            assert_eq!(inode(&merged, &format!("l{number}")), target);
        }
        // One pass through all directories and layers.
        let walk = (DEPTH * LAYERS + DEPTH) as u64;
        assert!(work <= walk, "{work}");
    }

    // Promises: layerlink-steps
    #[test]
    fn step_that_many_targets_share_is_looked_up_once() {
        const LAYERS: usize = 20;
        const LINKS: usize = 100;
        // Twenty symbolic links, each through `d` twenty times and then through the next.
        let passes = "d/../".repeat(20);
        let mut files = vec![directory("d", 0o755)];
        files.extend((0..20).map(|number| {
            let target = format!("{passes}s{}", number + 1);
            symlink(&format!("s{number}"), &target)
        }));
        files.push(symlink("s20", "d"));
        files.extend((0..LINKS).map(|number| file(&format!("d/{number}/f"), 0..1)));
        let links: Vec<_> = (0..LINKS)
            .map(|number| hard_link(&format!("l{number}"), &format!("s0/{number}/f")))
            .collect();
        let between = [directory("d", 0o755)];
        let mut members = vec![&between[..]; LAYERS - 2];
        members.insert(0, &files);
        members.push(&links);
        let (merged, work) = merged(&layers(&members), MAX_SHARED_WORK);
        for number in 0..LINKS {
            let target = inode(&merged, &format!("d/{number}/f"));
            assert!(target.is_some());
            assert_eq!(inode(&merged, &format!("l{number}")), target);
        }
        // A symbolic link of 41 components, and twenty steps through `d`, each 1 although 20 layers have it.
        let link = (20 * (41 + 20 + 2)) as u64;
        assert!(work <= LINKS as u64 * link, "{work}");
    }

    // Promises: layerlink-steps, limit-link-steps
    #[test]
    fn link_through_too_many_directories_is_a_problem_by_name() {
        let deep = path(500);
        let below = [
            file("a", 0..1),
            file(&format!("{deep}/f"), 0..1),
            file("kept", 0..1),
        ];
        let above = [
            hard_link("far", &format!("{deep}/f")),
            hard_link("kept", &format!("{deep}/f")),
            hard_link("to-far", "far"),
            hard_link("near", "a"),
        ];
        let layers = layers(&[&below, &above]);
        let (merged, _) = merged(&layers, 100);
        assert_eq!(inode(&merged, "near"), inode(&merged, "a"));
        assert!(inode(&merged, "kept").is_some());
        for name in ["far", "to-far"] {
            assert_eq!(inode(&merged, name), None, "{name}");
        }
        let told =
            ["far", "kept", "to-far"].map(|name| format!("{name}: layer 2: {TOO_MUCH_WORK}"));
        assert_eq!(problems(&merged), told);
        assert_eq!(merged.index.problem_count(), 3);
    }

    // Promises: memory-index
    #[test]
    fn merge_counts_its_memory_and_stops_at_the_limit() {
        const LIMIT: usize = 16 << 20;
        let files: Vec<_> = (0..5000)
            .map(|number| file(&format!("d/{number}"), 0..1))
            .collect();
        let links =
            (0..5000).map(|number| hard_link(&format!("l/{number}"), &format!("d/{number}")));
        let removals = (0..5000).map(|number| file(&format!("{number}/.wh.x"), 0..0));
        let above: Vec<_> = links.chain(removals).collect();
        let layers = layers(&[&files, &above]);
        let indexes: Vec<_> = layers.iter().collect();
        let merge = |limit: &MemoryLimit| merge(&indexes, WhiteoutFormat::Oci, limit);
        let whole = merge(&MemoryLimit::none()).expect("no limit");
        let bytes = whole.index.memory_bytes() + whole.memory_bytes();
        // Each limit makes another part of the merge fail.
        for limit in (0..bytes).step_by(20_000) {
            let memory_limit = MemoryLimit::new(limit as u64);
            let refused = merge(&memory_limit).err();
            let expected = TooMuchMemory {
                limit: limit as u64,
            };
            assert_eq!(refused, Some(MergeError::TooMuchMemory(expected)));
            // The merge has released all its memory.
            assert_eq!(memory_limit.charge().add(limit), Ok(()));
        }
        let limit = MemoryLimit::new(LIMIT as u64);
        let merged = merge(&limit).expect("enough");
        assert_eq!(limit.charge().add(LIMIT - bytes), Ok(()));
        assert!(limit.charge().add(LIMIT - bytes + 1).is_err());
        drop(merged);
        assert_eq!(limit.charge().add(LIMIT), Ok(()));
    }

    #[test]
    fn entry_that_a_damaged_index_lacks_is_a_problem() {
        let layers = layers(&[&[file("a", 0..1)]]);
        let indexes: Vec<_> = layers.iter().collect();
        let (limit, mut work) = (MemoryLimit::none(), WorkBudget::new(100));
        let stack = link_layers(&indexes, WhiteoutFormat::Oci, &limit, &mut work).expect("small");
        let mut planner = Planner {
            layers: &stack,
            plan: MergePlan::default(),
            pending: Vec::new(),
            charge: limit.charge(),
        };
        let root = LayerIno {
            layer: 0,
            ino: Ino::ROOT,
        };
        let mut parts = Parts::new();
        planner.apply(&mut parts, root, b"x", LayerAction::Entry(Ino(99)));
        assert_eq!((parts.len(), planner.plan.problem_count), (0, 1));
        let (_, problem) = planner.plan.problems.first().expect("recorded");
        assert_eq!(problem.to_string(), format!("x: {MISSING_ENTRY}"));
    }

    #[test]
    fn names_of_a_damaged_index_come_once() {
        // By name, `b` is repeated, with `a` after it.
        let names: [&[u8]; 4] = [b"b", b"a", b"b", b"c"];
        let actions = names.map(|name| (name, LayerAction::Remove));
        let mut by_name = ActionsByName::default();
        let part = LayerIno {
            layer: 0,
            ino: Ino::ROOT,
        };
        by_name.add(part, actions.into_iter());
        let names: Vec<_> = by_name.map(|(name, ..)| name).collect();
        assert_eq!(names, [b"b", b"c"]);
    }

    proptest! {
        /// Resolving one link gives the entry that the merged tree has there.
        #[test]
        fn single_lookup_equals_merged_tree(
            layers in prop::collection::vec(prop::collection::vec(a_member(), 0..8), 1..5),
            whiteouts in prop::sample::select(
                &[WhiteoutFormat::Oci, WhiteoutFormat::Overlay, WhiteoutFormat::Keep][..]
            ),
        ) {
            let layers: Vec<_> = layers.iter().map(|members| layer(members, whiteouts)).collect();
            let indexes: Vec<_> = layers.iter().collect();
            let limit = MemoryLimit::none();
            let (mut work, mut whole_work) = (WorkBudget::new(u64::MAX), WorkBudget::new(u64::MAX));
            let layered = link_layers(&indexes, whiteouts, &limit, &mut work).expect("small");
            let whole = merge(&indexes, whiteouts, &limit).expect("small");
            let whole_index = [&*whole.index];
            let whole_layered = link_layers(&whole_index, WhiteoutFormat::Keep, &limit, &mut whole_work);
            let whole_layered = whole_layered.expect("small");
            let count = u32::try_from(indexes.len()).expect("few");
            let mut below = Resolver::new(&layered, count, None, &mut work, limit.charge());
            let mut in_whole =
                Resolver::new(&whole_layered, 0, Some(&[]), &mut whole_work, limit.charge());
            for name in NAMES.iter().chain(&["l", "d/d/d", "a/b", "l/b", "l/d/a"]) {
                let mut expected = in_whole.find_target(name.as_bytes()).expect("small");
                if let CrossLinkTarget::Entry(layer_ino) = &mut expected {
                    *layer_ino = whole.layer_ino(layer_ino.ino).expect("an entry of a layer");
                }
                let found = below.find_target(name.as_bytes()).expect("small");
                prop_assert_eq!(found, expected, "{}", name);
            }
        }
    }
}
