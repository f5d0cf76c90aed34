//! The flags that select extended attributes and ACLs.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Args;

use crate::base::glob::Glob;
use crate::base::xattr_filter::XattrFilter;

/// Which extended attributes of the archive count.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct XattrArgs {
    /// Take only extended attributes whose names match this pattern, as GNU tar's; may be repeated
    /// [default: all but security.selinux, security.ima, security.evm and trusted.*]
    #[arg(
        long,
        value_name = "PATTERN",
        help_heading = "Extended attributes",
        conflicts_with = "no_xattrs"
    )]
    xattrs_include: Vec<OsString>,

    /// Leave out extended attributes whose names match this pattern, as GNU tar's; may be repeated
    #[arg(
        long,
        value_name = "PATTERN",
        help_heading = "Extended attributes",
        conflicts_with = "no_xattrs"
    )]
    xattrs_exclude: Vec<OsString>,

    /// Leave out all extended attributes but ACLs
    #[arg(long, help_heading = "Extended attributes")]
    no_xattrs: bool,

    /// Leave out ACLs
    #[arg(long, help_heading = "Extended attributes")]
    no_acls: bool,
}

impl XattrArgs {
    /// The selection that the flags describe.
    pub(super) fn filter(&self) -> XattrFilter {
        let globs = |patterns: &[OsString]| {
            let patterns = patterns.iter();
            patterns
                .map(|pattern| Glob::new(pattern.as_bytes()))
                .collect()
        };
        XattrFilter {
            include: globs(&self.xattrs_include),
            exclude: globs(&self.xattrs_exclude),
            xattrs: !self.no_xattrs,
            acls: !self.no_acls,
        }
    }
}
