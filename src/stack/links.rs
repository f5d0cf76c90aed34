//! Hard links of a layer whose targets it does not hold; pure.
//!
//! Such a link means what lies below its layer. Its target may be another such link of the same
//! layer, which comes first then, whatever lies below under that name. One that is called like what
//! hides something hides it, whatever its target is: AUFS makes all of them links to one file.

use std::collections::{HashMap, HashSet};

use super::whiteouts::{Meaning, Whiteouts};
use crate::base::path::ArchivePath;
use crate::index::{Index, Ino};

/// The hard links of a layer whose targets it does not hold, by what their names say of them.
#[derive(Debug)]
pub struct Unsettled<'a> {
    /// Those that wait for what they are to be other names of.
    pub links: Vec<Link>,
    /// In which directory of the layer each of `links` lies, and by which name.
    pub names: Vec<(Ino, &'a [u8])>,
    /// What the others hide, and members that the layer itself refuses, by their directories.
    pub marks: HashMap<Ino, HashSet<Meaning<'a>>>,
    /// How many others there are, and members that the layer itself refuses: they are no entries and
    /// lack nothing.
    pub others: u64,
}

impl<'a> Unsettled<'a> {
    /// Those of `index`.
    pub fn of(index: &'a Index, whiteouts: Whiteouts) -> Self {
        let mut unsettled = Self {
            links: Vec::new(),
            names: Vec::new(),
            marks: HashMap::new(),
            others: 0,
        };
        for link in index.unresolved_links() {
            let mut path = index.path(link.parent).unwrap_or_default();
            path.push(link.name);
            if !path.components().any(|name| whiteouts.takes_name(name)) {
                let target = ArchivePath::sanitize(link.target).path;
                unsettled.links.push(Link { path, target });
                unsettled.names.push((link.parent, link.name));
                continue;
            }
            unsettled.others += 1;
            let meaning = whiteouts.meaning_of_name(link.name);
            if meaning != Meaning::Entry {
                let marks = unsettled.marks.entry(link.parent).or_default();
                marks.insert(meaning);
            }
        }
        for refused in index.refused_names() {
            let is_ours = match refused.parent {
                Some(parent) => {
                    let path = index.path(parent).unwrap_or_default();
                    let mut names = path.components().chain([refused.name]);
                    names.any(|name| whiteouts.takes_name(name))
                }
                // Who makes layers by comparing trees says of a directory that has become a file what
                // of it is gone as well.
                None => whiteouts.takes_name(refused.name),
            };
            unsettled.others += u64::from(is_ours);
            let meaning = whiteouts.meaning_of_name(refused.name);
            if let Some(parent) = refused.parent
                && meaning != Meaning::Entry
            {
                unsettled.marks.entry(parent).or_default().insert(meaning);
            }
        }
        unsettled
    }
}

/// A hard link that waits for what it is to be another name of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Where it is to lie.
    pub path: ArchivePath,
    /// What it names.
    pub target: ArchivePath,
}

/// For each of `links`, none of whose paths occurs twice, where the chain of links that begins with
/// it ends: the path of something else than another one of them. `None` when it ends nowhere. A link
/// to its own name means what lies there below.
pub fn ends(links: &[Link]) -> Vec<Option<ArchivePath>> {
    let by_path: HashMap<&ArchivePath, usize> =
        (links.iter().map(|link| &link.path)).zip(0..).collect();
    // Where each leads at last, once that is known.
    let mut known: Vec<Option<Option<usize>>> = vec![None; links.len()];
    for start in 0..links.len() {
        let mut way = vec![start];
        let end = loop {
            let here = way.last().copied().unwrap_or(start);
            if let Some(&Some(end)) = known.get(here) {
                break end;
            }
            let target = links.get(here).and_then(|link| by_path.get(&link.target));
            match target {
                None => break Some(here),
                Some(&next) if next == here => break Some(here),
                Some(next) if way.contains(next) || way.len() > MOST => break None,
                Some(&next) => way.push(next),
            }
        };
        for link in way {
            if let Some(known) = known.get_mut(link) {
                *known = Some(end);
            }
        }
    }
    let targets = known.iter().map(|end| {
        let last = links.get((*end)??)?;
        Some(last.target.clone())
    });
    targets.collect()
}

/// Links in a chain; in a longer one those in front end nowhere.
const MOST: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> ArchivePath {
        ArchivePath::sanitize(name.as_bytes()).path
    }

    fn ends_of(links: &[(&str, &str)]) -> Vec<Option<String>> {
        let links: Vec<_> = links
            .iter()
            .map(|(name, target)| Link {
                path: path(name),
                target: path(target),
            })
            .collect();
        let ends = ends(&links).into_iter();
        ends.map(|end| Some(end?.to_string())).collect()
    }

    #[test]
    fn a_chain_leads_to_its_end_in_any_order() {
        let found = |name: &str| Some(name.to_owned());
        assert_eq!(
            ends_of(&[("a", "b"), ("b", "c"), ("d", "a"), ("e", "x/y")]),
            [found("c"), found("c"), found("c"), found("x/y")]
        );
    }

    #[test]
    fn a_link_to_its_own_name_means_what_is_below_and_a_circle_nothing() {
        let found = |name: &str| Some(name.to_owned());
        assert_eq!(ends_of(&[("a", "a"), ("b", "a")]), [found("a"), found("a")]);
        assert_eq!(
            ends_of(&[("a", "b"), ("b", "a"), ("c", "a")]),
            [None, None, None]
        );
    }
}
