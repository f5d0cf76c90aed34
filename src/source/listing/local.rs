//! The archives below a local directory.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::page::{ListedArchive, Listing, MAX_DEPTH, is_archive_name};
use crate::source::SourceDirectory;

/// Maximum number of entries that one listing looks at.
const MAX_ENTRIES: usize = 1_000_000;

/// Lists all files with names of archives below `top`. It stays on the file system of the directory, and follows
/// only links to files below it.
pub(super) fn list(top: &SourceDirectory, listing: &mut Listing) -> io::Result<()> {
    let root = top.path();
    let device = fs::metadata(root)?.dev();
    let (mut pending, mut count, mut unnamed) = (vec![(String::new(), 0)], 0, 0_u32);
    while let Some((directory, depth)) = pending.pop() {
        let entries = match fs::read_dir(root.join(&directory)) {
            Ok(entries) => entries,
            Err(error) if depth == 0 => return Err(error),
            Err(error) => {
                let note = format!("{directory} is not listed: {error}");
                listing.notes.push(note);
                continue;
            }
        };
        for entry in entries {
            let entry = entry?;
            count += 1;
            if count > MAX_ENTRIES || listing.is_full() {
                listing.note_limit();
                return Ok(());
            }
            // Archives are opened by names in UTF-8.
            let name = match entry.file_name().into_string() {
                Ok(name) => name,
                Err(name) => {
                    unnamed += u32::from(is_archive_name(&name.to_string_lossy()));
                    continue;
                }
            };
            let path = format!("{directory}{name}");
            if entry.file_type()?.is_dir() {
                // A mount of the directory itself may be below it.
                let is_same = entry.metadata().is_ok_and(|found| found.dev() == device);
                if is_same && depth < MAX_DEPTH {
                    pending.push((path + "/", depth + 1));
                }
            } else if is_archive_name(&path)
                && let Some(found) = top.metadata(&path)
            {
                let modified = found.mtime();
                listing.add(ListedArchive { path, modified });
            }
        }
    }
    if unnamed > 0 {
        let note = format!("{unnamed} archives are not listed, because their names are not UTF-8");
        listing.notes.push(note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

    use super::*;

    // Promises: archives-names
    #[test]
    fn archives_below_the_directory_are_listed_without_links_out_of_it() {
        let outer = tempfile::tempdir().expect("a directory");
        let top = outer.path().join("top");
        fs::create_dir_all(top.join("deep/er")).expect("made");
        for name in [
            "top/a.tar",
            "top/deep/er/b.tgz",
            "top/notes.txt",
            "secret.tar",
        ] {
            fs::write(outer.path().join(name), "bytes").expect("written");
        }
        for (target, link) in [
            ("deep/er/b.tgz", "link.tar"),
            ("../secret.tar", "climbs.tar"),
            ("/etc/passwd", "absolute.tar"),
            ("deep", "loop"),
            ("..", "deep/up.tar"),
        ] {
            symlink(target, top.join(link)).expect("linked");
        }
        let top = SourceDirectory::open(&top, Arc::default()).expect("a directory");
        let mut listing = Listing::default();
        list(&top, &mut listing).expect("listed");
        let mut paths: Vec<_> = listing.archives.iter().map(|found| &*found.path).collect();
        paths.sort_unstable();
        assert_eq!(paths, ["a.tar", "deep/er/b.tgz", "link.tar"]);
    }

    // Promises: source-bytes
    #[test]
    fn archives_with_other_names_are_counted() {
        let top = tempfile::tempdir().expect("a directory");
        for name in [&b"a.tar"[..], b"caf\xe9.tar", b"caf\xe8.tar.gz", b"caf\xe9"] {
            fs::write(top.path().join(OsStr::from_bytes(name)), "bytes").expect("written");
        }
        let top = SourceDirectory::open(top.path(), Arc::default()).expect("a directory");
        let mut listing = Listing::default();
        list(&top, &mut listing).expect("listed");
        assert_eq!(listing.archives.len(), 1);
        assert_eq!(
            listing.notes,
            ["2 archives are not listed, because their names are not UTF-8"]
        );
    }
}
