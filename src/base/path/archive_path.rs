//! Archive paths: relative to the archive's root, normalised, bytes and not UTF-8.

use std::fmt;

use crate::base::escape::escape;

/// Components from the root, joined by single slashes, without `.` and `..`. The root is empty.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ArchivePath(Vec<u8>);

/// A member's name made relative to the root, and the stripped prefix.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sanitized {
    /// The member's path.
    pub path: ArchivePath,
    /// Whether the name has a `..`. GNU tar skips such members, and strips it only from hard links' targets.
    pub has_parent_component: bool,
    /// Leading bytes that were stripped, up to the last `..` and the slashes after it; usually empty.
    pub stripped: Vec<u8>,
}

impl ArchivePath {
    /// The root.
    pub fn root() -> Self {
        Self::default()
    }

    /// Makes a member's name relative to the root by GNU tar's rules without `-P`. It strips everything up to
    /// the last `..` and then leading slashes, and drops `.` and repeated slashes.
    pub fn sanitize(name: &[u8]) -> Sanitized {
        let mut keep_from = 0;
        let mut start = 0;
        for component in name.split(|&byte| byte == b'/') {
            let end = start + component.len();
            if component == b".." {
                keep_from = end;
            }
            start = end + 1;
        }
        while name.get(keep_from) == Some(&b'/') {
            keep_from += 1;
        }
        let (stripped, rest) = name.split_at(keep_from.min(name.len()));
        Sanitized {
            path: Self::from_components(rest.split(|&byte| byte == b'/')),
            has_parent_component: keep_from > 0
                && name.split(|&byte| byte == b'/').any(|part| part == b".."),
            stripped: stripped.to_vec(),
        }
    }

    fn from_components<'a>(components: impl Iterator<Item = &'a [u8]>) -> Self {
        let mut path = Self::root();
        for component in components.filter(|component| !matches!(*component, b"" | b".")) {
            path.push(component);
        }
        path
    }

    /// Appends one component; it must be neither empty, `.` nor `..`, and hold no slash.
    pub fn push(&mut self, name: &[u8]) {
        debug_assert!(!matches!(name, b"" | b"." | b"..") && !name.contains(&b'/'));
        if !self.0.is_empty() {
            self.0.push(b'/');
        }
        self.0.extend_from_slice(name);
    }

    /// Whether this is the root.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Components from the root down.
    pub fn components(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.0
            .split(|&byte| byte == b'/')
            .filter(|component| !component.is_empty())
    }

    /// Splits off the last component; `None` for the root.
    pub fn split_last(&self) -> Option<(Self, &[u8])> {
        if self.is_root() {
            return None;
        }
        Some(match self.0.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => {
                let (parent, name) = self.0.split_at(slash);
                (Self(parent.to_vec()), name.get(1..).unwrap_or_default())
            }
            None => (Self::root(), &self.0),
        })
    }

    /// Removes the first `count` components; `None` if none is left.
    pub fn strip_components(&self, count: usize) -> Option<Self> {
        if count == 0 {
            return Some(self.clone());
        }
        let mut rest = self.components().skip(count).peekable();
        rest.peek()?;
        Some(Self::from_components(rest))
    }

    /// Whether `self` is `ancestor` or below it.
    pub fn starts_with(&self, ancestor: &Self) -> bool {
        match self.0.strip_prefix(ancestor.0.as_slice()) {
            Some(rest) => ancestor.is_root() || rest.is_empty() || rest.first() == Some(&b'/'),
            None => false,
        }
    }

    /// The joined components.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for ArchivePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_root() {
            return f.write_str(".");
        }
        f.write_str(&escape(&self.0))
    }
}

impl fmt::Debug for ArchivePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sanitized(name: &str) -> (String, String) {
        let sanitized = ArchivePath::sanitize(name.as_bytes());
        (
            sanitized.path.to_string(),
            String::from_utf8_lossy(&sanitized.stripped).into_owned(),
        )
    }

    fn pair(path: &str, stripped: &str) -> (String, String) {
        (path.to_owned(), stripped.to_owned())
    }

    // Promises: names-cut
    #[test]
    fn sanitize_strips_leading_slashes_and_parent_components() {
        assert_eq!(sanitized("a/b"), pair("a/b", ""));
        assert_eq!(sanitized("/a"), pair("a", "/"));
        assert_eq!(sanitized("///a//b"), pair("a/b", "///"));
        assert_eq!(sanitized("../a"), pair("a", "../"));
        assert_eq!(sanitized("a/../../b/c"), pair("b/c", "a/../../"));
        assert_eq!(sanitized("a/.."), pair(".", "a/.."));
        assert_eq!(sanitized("a/..b"), pair("a/..b", ""));
    }

    // Promises: names-cut
    #[test]
    fn sanitize_drops_dots_and_repeated_slashes() {
        assert_eq!(sanitized("./a/./b//c/"), pair("a/b/c", ""));
        assert_eq!(sanitized("./"), pair(".", ""));
        assert_eq!(sanitized(""), pair(".", ""));
    }

    // Promises: names-parent
    #[test]
    fn only_a_whole_dot_dot_component_is_a_parent() {
        let has_parent_component = |name: &[u8]| ArchivePath::sanitize(name).has_parent_component;
        assert!(
            has_parent_component(b"../a")
                && has_parent_component(b"a/../b")
                && has_parent_component(b"a/..")
        );
        assert!(
            !has_parent_component(b"/a")
                && !has_parent_component(b"a/..b")
                && !has_parent_component(b"...")
                && !has_parent_component(b"")
        );
    }

    // Promises: names-bytes, error-line
    #[test]
    fn names_need_not_be_utf8() {
        let path = ArchivePath::sanitize(b"caf\xe9/\n").path;
        assert_eq!(path.as_bytes(), b"caf\xe9/\n");
        assert_eq!(path.to_string(), "caf\\351/\\n");
    }

    #[test]
    fn components_are_stripped_from_the_front() {
        let path = ArchivePath::sanitize(b"a/b/c").path;
        assert_eq!(
            path.strip_components(2).map(|p| p.to_string()),
            Some("c".to_owned())
        );
        assert_eq!(path.strip_components(3), None);
        assert_eq!(path.strip_components(0), Some(path.clone()));
    }

    #[test]
    fn ancestor_ends_at_a_slash() {
        let path = |name: &str| ArchivePath::sanitize(name.as_bytes()).path;
        assert!(path("a/b").starts_with(&path("a")));
        assert!(path("a").starts_with(&path("a")));
        assert!(path("a").starts_with(&ArchivePath::root()));
        assert!(!path("ab").starts_with(&path("a")));
    }

    #[test]
    fn split_last_returns_parent_and_name() {
        let path = ArchivePath::sanitize(b"a/b/c").path;
        let (parent, name) = path.split_last().expect("not the root");
        assert_eq!((parent.to_string().as_str(), name), ("a/b", &b"c"[..]));
        assert_eq!(ArchivePath::root().split_last(), None);
    }
}
