//! The flags that select extended attributes and ACLs.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Args;

use super::heading;
use tarfs::materialize::Glob;
use tarfs::materialize::XattrFilter;

/// Selection of extended attributes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct XattrArgs {
    /// Use only extended attributes that match this pattern of GNU tar; repeatable
    ///
    /// The default is all but security.selinux, security.ima, security.evm and trusted.*.
    #[arg(long, value_name = "PATTERN", conflicts_with = "no_xattrs",
          help_heading = heading::SELECTION, hide_short_help = true)]
    xattrs_include: Vec<OsString>,

    /// Skip extended attributes that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", conflicts_with = "no_xattrs",
          help_heading = heading::SELECTION, hide_short_help = true)]
    xattrs_exclude: Vec<OsString>,

    /// Skip all extended attributes except ACLs
    #[arg(long, help_heading = heading::SELECTION, hide_short_help = true)]
    no_xattrs: bool,

    /// Skip ACLs
    #[arg(long, help_heading = heading::SELECTION, hide_short_help = true)]
    no_acls: bool,
}

impl XattrArgs {
    pub(crate) fn filter(&self) -> XattrFilter {
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
