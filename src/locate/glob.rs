//! Patterns for the local parts of a joined source.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::error::{Error, MAX_PARTS};
use crate::base::glob::Glob;
use crate::source::{self, Cause};

/// Returns the files that match `location`, if it is a path with a pattern in its last component.
///
/// A shorter name is first, and names of one length are in the order of their bytes, so `x.10` is after
/// `x.9`. An existing path is not a pattern. It is an error if no file matches, or too many.
pub(super) fn expand(location: &OsStr) -> Result<Vec<OsString>, Error> {
    let path = Path::new(location);
    let unchanged = || Ok(vec![location.to_owned()]);
    let Some(pattern) = path.file_name().map(OsStr::as_bytes) else {
        return unchanged();
    };
    let is_pattern = pattern.iter().any(|byte| b"*?[".contains(byte));
    if !is_pattern || source::is_url(location) || path.symlink_metadata().is_ok() {
        return unchanged();
    }
    let failed = |cause| {
        let name = source::redact(&location.to_string_lossy());
        Error::Source(source::Error::new(name, cause))
    };
    let directory = path.parent().unwrap_or(Path::new(""));
    let files = std::fs::read_dir(Path::new(".").join(directory));
    let files = files.map_err(|error| failed(error.into()))?;
    let glob = Glob::new(pattern);
    let mut names = Vec::new();
    for file in files {
        let name = file.map_err(|error| failed(error.into()))?.file_name();
        let bytes = name.as_bytes();
        let is_hidden = bytes.starts_with(b".") && !pattern.starts_with(b".");
        if !is_hidden && glob.matches_name(bytes) {
            names.push(name);
        }
        if names.len() > MAX_PARTS {
            return Err(Error::TooManyParts);
        }
    }
    if names.is_empty() {
        return Err(failed(Cause::NotFound));
    }
    names.sort_unstable_by(|one, other| one.len().cmp(&other.len()).then(one.cmp(other)));
    let paths = names.iter().map(|name| directory.join(name).into());
    Ok(paths.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: nested-join
    #[test]
    fn pattern_names_its_files_in_the_order_of_their_parts() {
        let place = tempfile::tempdir().expect("a directory");
        let create = |name: &str| std::fs::write(place.path().join(name), "").expect("written");
        for name in ["x.10", "x.9", "x.1", ".x.1", "y.1", "x[1]"] {
            create(name);
        }
        let found = |pattern: &str| {
            let files = expand(place.path().join(pattern).as_os_str())?;
            let names = files.iter().map(|file| Path::new(file).file_name());
            let names = names.map(|name| name.expect("a name").to_string_lossy().into_owned());
            Ok::<_, Error>(names.collect::<Vec<_>>())
        };
        assert_eq!(found("x.*").expect("found"), ["x.1", "x.9", "x.10"]);
        assert_eq!(found("?.1").expect("found"), ["x.1", "y.1"]);
        assert_eq!(found(".x.*").expect("found"), [".x.1"]);
        assert_eq!(found("x[1]").expect("it exists"), ["x[1]"]);
        assert_eq!(found("missing").expect("no pattern"), ["missing"]);
        let missing = found("z.*").expect_err("no file");
        assert!(missing.to_string().contains("z.*"), "{missing}");
        let url = OsStr::new("http://example.com/x.*");
        assert_eq!(expand(url).expect("no path"), [url]);
    }
}
