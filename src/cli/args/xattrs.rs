//! The flags that select extended attributes and ACLs.

use std::os::unix::ffi::OsStrExt;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::heading;
use tarfs::materialize::Glob;
use tarfs::materialize::XattrFilter;

/// Selection of extended attributes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct XattrArgs {
    /// Use only extended attributes that match this pattern of GNU tar; repeatable
    ///
    /// The default is all but security.selinux, security.ima, security.evm and trusted.*.
    #[arg(long, value_name = "PATTERN", value_parser = glob_parser(), conflicts_with = "no_xattrs",
          help_heading = heading::SELECTION, hide_short_help = true)]
    xattrs_include: Vec<Glob>,

    /// Skip extended attributes that match this pattern of GNU tar; repeatable
    #[arg(long, value_name = "PATTERN", value_parser = glob_parser(), conflicts_with = "no_xattrs",
          help_heading = heading::SELECTION, hide_short_help = true)]
    xattrs_exclude: Vec<Glob>,

    /// Skip all extended attributes except ACLs
    #[arg(long, help_heading = heading::SELECTION, hide_short_help = true)]
    no_xattrs: bool,

    /// Skip ACLs
    #[arg(long, help_heading = heading::SELECTION, hide_short_help = true)]
    no_acls: bool,
}

impl XattrArgs {
    pub(crate) fn filter(&self) -> XattrFilter {
        XattrFilter {
            include: self.xattrs_include.clone(),
            exclude: self.xattrs_exclude.clone(),
            xattrs: !self.no_xattrs,
            acls: !self.no_acls,
        }
    }
}

/// Parses a pattern of GNU tar.
pub(crate) fn glob_parser() -> impl TypedValueParser<Value = Glob> {
    OsStringValueParser::new().map(|pattern| Glob::new(pattern.as_bytes()))
}
