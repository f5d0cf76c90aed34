//! Objects of a listing, and which of them are archives; pure.

use std::collections::BTreeSet;

use crate::base::NAME_MAX;
use crate::base::escape::is_control;

/// Ends of the names of archives. Other objects are not listed.
const SUFFIXES: &str = ".tar .tar.gz .tgz .taz .tar.bz2 .tbz2 .tbz .tar.xz .txz .tar.zst .tzst .tar.zstd \
                        .tar.lz4 .tlz4";

/// Maximum number of archives in a listing.
const MAX_ARCHIVES: usize = 100_000;

/// Maximum bytes of all their paths.
const MAX_PATH_BYTES: usize = 32 << 20;

/// Maximum number of directories between the place and an archive.
pub(super) const MAX_DEPTH: usize = 64;

/// An archive in a listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedArchive {
    /// Path below the place, of names that a directory can have.
    pub path: String,
    /// Time of its last change, in seconds since the epoch.
    pub modified: i64,
}

/// All archives of a place.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The archives, by their paths.
    pub archives: Vec<ListedArchive>,
    /// Parts of the place that are not listed, as text for the user.
    pub notes: Vec<String>,
    /// Number of archives with paths that no directory can have, and the first of them.
    skipped: (usize, Option<String>),
    path_bytes: usize,
}

impl Listing {
    /// Adds `object` if it is an archive.
    pub(super) fn add(&mut self, object: ListedArchive) {
        if !is_archive_name(&object.path) {
        } else if is_valid_path(&object.path) {
            self.path_bytes += object.path.len();
            self.archives.push(object);
        } else {
            self.skip(object.path);
        }
    }

    fn skip(&mut self, path: String) {
        self.skipped.0 += 1;
        self.skipped.1.get_or_insert(path);
    }

    pub(super) fn is_full(&self) -> bool {
        self.archives.len() > MAX_ARCHIVES || self.path_bytes > MAX_PATH_BYTES
    }

    /// Notes that a limit ended the listing.
    pub(super) fn note_limit(&mut self) {
        self.archives.truncate(MAX_ARCHIVES);
        let count = self.archives.len();
        let note = format!("the listing is too long, so only {count} archives are shown");
        self.notes.push(note);
    }

    /// Sorts the archives. Removes duplicates, and archives below the name of another archive.
    pub(super) fn finish(&mut self) {
        self.archives
            .sort_by(|one, other| one.path.cmp(&other.path));
        let mut names = BTreeSet::new();
        let conflicts = self.archives.extract_if(.., |archive| {
            let above = archive.path.match_indices('/');
            let mut above = above.filter_map(|(at, _)| archive.path.get(..at));
            above.any(|above| names.contains(above)) || !names.insert(archive.path.clone())
        });
        let conflicts: Vec<_> = conflicts.map(|archive| archive.path).collect();
        for path in conflicts {
            self.skip(path);
        }
        if let (count, Some(first)) = &self.skipped {
            let note =
                format!("{count} names are skipped that no directory can have, such as {first:?}");
            self.notes.push(note);
        }
    }
}

pub(super) fn is_archive_name(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    let is_archive = |suffix: &str| name.len() > suffix.len() && name.ends_with(suffix);
    SUFFIXES.split(' ').any(is_archive)
}

/// Whether each part of `path` can be the name of an entry of a directory.
fn is_valid_path(path: &str) -> bool {
    let is_name = |part: &str| {
        !matches!(part, "" | "." | "..") && part.len() <= NAME_MAX && !part.contains(is_control)
    };
    path.split('/').all(is_name) && path.split('/').count() <= MAX_DEPTH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(path: &str) -> ListedArchive {
        ListedArchive {
            path: path.to_owned(),
            modified: 1,
        }
    }

    // Promises: archives-names
    #[test]
    fn only_names_of_archives_are_listed() {
        for name in ["a.tar", "b/c.tgz", "a b.tar.zst", "é.tar.lz4"] {
            assert!(is_archive_name(name) && is_valid_path(name), "{name}");
        }
        for name in ["", "a", ".tar", "x/.tgz", "a.gz", "a.tar/", "a.tar.txt"] {
            assert!(!is_archive_name(name), "{name}");
        }
    }

    // Promises: archives-names
    #[test]
    fn hostile_names_are_refused() {
        let long = format!("{}.tar", "a".repeat(252));
        let deep = format!("{}a.tar", "d/".repeat(MAX_DEPTH));
        for name in [
            "../a.tar",
            "a/../b.tar",
            "/a.tar",
            "a//b.tar",
            "./a.tar",
            "a\0.tar",
            "a\n/b.tar",
            &long,
            &deep,
        ] {
            assert!(is_archive_name(name) && !is_valid_path(name), "{name:?}");
        }
    }

    // Promises: archives-names
    #[test]
    fn archive_below_name_of_another_archive_is_skipped() {
        let mut listing = Listing::default();
        for path in [
            "b/a.tar",
            "a.tar",
            "a.tar/b/c.tar",
            "a.tar",
            "a.tar-b/c.tar",
        ] {
            listing.add(listed(path));
        }
        listing.finish();
        let paths: Vec<_> = listing.archives.iter().map(|found| &*found.path).collect();
        assert_eq!(paths, ["a.tar", "a.tar-b/c.tar", "b/a.tar"]);
        assert_eq!(listing.skipped, (2, Some("a.tar".to_owned())));
        assert_eq!(listing.notes.len(), 1);
    }
}
