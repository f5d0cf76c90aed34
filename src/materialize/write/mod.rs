//! Making entries in the destination: directories, files, links and their attributes. It knows no journal.

mod attribute_policy;
mod attributes;
mod context;
mod destination;
mod directories;
mod directory;
mod encoding;
mod file;
mod file_system;
mod job;
mod nodes;
mod pool;
mod temporary;
mod unwritable;

pub(super) use self::attribute_policy::{AttributePolicy, umask};
pub(super) use self::attributes::{
    Attributes, CAPABILITIES, CHANGE_MODE, copy_attributes, default_acl_mode,
};
pub(super) use self::context::{Context, FileObserver};
pub(super) use self::destination::{Destination, IfMissing};
pub(super) use self::directories::{PendingDirectory, apply_all};
pub(super) use self::directory::{
    Directory, Identity, WeakDirectory, is_directory, is_empty, lstat_at, name_of, parent_of,
};
pub(super) use self::encoding::{FieldDecoder, FieldEncoder};
pub(super) use self::file::FileWriter;
pub(super) use self::file_system::{default_writer_count, is_on_remote, sync_file_system};
pub(crate) use self::job::member_of;
pub(super) use self::job::{DeferredLink, Job};
pub(super) use self::pool::{Watermark, WriterPool};
pub(super) use self::temporary::{ReplaceRules, is_temporary};
pub(super) use self::unwritable::Unwritable;
pub use self::unwritable::{check_empty_destination, is_empty_directory};
pub(super) use crate::base::AttributeTarget;
