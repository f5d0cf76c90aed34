//! Selection of extended attributes and ACLs by name, as GNU tar's options select them; pure.

use serde::{Deserialize, Serialize};

use super::posix_acl;
use crate::base::path::glob::Glob;

const SECURITY_LABELS: [&[u8]; 3] = [b"security.selinux", b"security.ima", b"security.evm"];

/// Namespace that only a pattern selects, because overlayfs and other parts of the system obey it.
const TRUSTED_NAMESPACE: &[u8] = b"trusted.";

/// Selection of extended attributes by name; by default all but `security.{selinux,ima,evm}` and `trusted.*`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct XattrFilter {
    /// When not empty, only attributes that one of these matches are selected. ACLs are not compared.
    pub include: Vec<Glob>,
    /// Attributes that one of these matches are not selected. ACLs are not compared.
    pub exclude: Vec<Glob>,
    /// Whether attributes other than ACLs are selected at all.
    pub xattrs: bool,
    /// Whether ACLs are selected.
    pub acls: bool,
}

impl Default for XattrFilter {
    fn default() -> Self {
        Self {
            include: Vec::new(),
            exclude: Vec::new(),
            xattrs: true,
            acls: true,
        }
    }
}

impl XattrFilter {
    /// Selects every attribute.
    pub fn everything() -> Self {
        Self {
            include: vec![Glob::new(b"*")],
            ..Self::default()
        }
    }

    /// Whether the attribute `name`, or the ACL with this pax keyword, is selected.
    pub fn selects(&self, name: &[u8]) -> bool {
        if posix_acl::Kind::of(name).is_some() {
            return self.acls;
        }
        let matched = |globs: &[Glob]| globs.iter().any(|glob| glob.matches_name(name));
        let is_included = if self.include.is_empty() {
            !SECURITY_LABELS.contains(&name) && !name.starts_with(TRUSTED_NAMESPACE)
        } else {
            matched(&self.include)
        };
        self.xattrs && is_included && !matched(&self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 10] = [
        "user.a",
        "user.b/c",
        "user.overlay.opaque",
        "trusted.overlay.opaque",
        "security.capability",
        "security.selinux",
        "security.ima",
        "security.evm",
        "SCHILY.acl.access",
        "system.posix_acl_default",
    ];

    fn selected(filter: &XattrFilter) -> Vec<&'static str> {
        let names = NAMES.into_iter();
        names
            .filter(|name| filter.selects(name.as_bytes()))
            .collect()
    }

    fn globs(patterns: &[&str]) -> Vec<Glob> {
        let patterns = patterns.iter();
        patterns
            .map(|pattern| Glob::new(pattern.as_bytes()))
            .collect()
    }

    // Promises: xattr-default, xattr-flags
    #[test]
    fn labels_and_trusted_attributes_are_selected_by_patterns_only() {
        assert_eq!(
            selected(&XattrFilter::default()),
            [
                "user.a",
                "user.b/c",
                "user.overlay.opaque",
                "security.capability",
                "SCHILY.acl.access",
                "system.posix_acl_default",
            ]
        );
        assert_eq!(selected(&XattrFilter::everything()), NAMES);
        let include = |patterns: &[&str]| XattrFilter {
            include: globs(patterns),
            acls: false,
            ..XattrFilter::default()
        };
        let labels = include(&["security.selinux", "trusted.overlay.*"]);
        assert_eq!(
            selected(&labels),
            ["trusted.overlay.opaque", "security.selinux"]
        );
        // A pattern must match the whole name, even one with a slash.
        assert_eq!(selected(&include(&["user.b", "overlay"])), [""; 0]);
        assert_eq!(selected(&include(&["user.b*"])), ["user.b/c"]);
    }

    // Promises: xattr-flags
    #[test]
    fn xattr_exclusion_beats_inclusion_and_acls_are_separate() {
        let filter = XattrFilter {
            include: globs(&["*"]),
            exclude: globs(&["*.overlay.*", "security.[ei]*", "SCHILY*", "system*"]),
            ..XattrFilter::default()
        };
        assert_eq!(
            selected(&filter),
            [
                "user.a",
                "user.b/c",
                "security.capability",
                "security.selinux",
                "SCHILY.acl.access",
                "system.posix_acl_default",
            ]
        );
        let filter = XattrFilter {
            xattrs: false,
            ..XattrFilter::default()
        };
        assert_eq!(
            selected(&filter),
            ["SCHILY.acl.access", "system.posix_acl_default"]
        );
        let filter = XattrFilter {
            acls: false,
            ..filter
        };
        assert_eq!(selected(&filter), [""; 0]);
    }
}
