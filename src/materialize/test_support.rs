//! Members built in code, for the tests of this layer.

use std::sync::Arc;

use bytes::Bytes;

use super::Existing;
use super::error::Problems;
use super::write::attribute_policy::AttributePolicy;
use super::write::context::{Context, EntryQuota, FailedFiles, ReservedNames};
use crate::archive::scan::Sink;
use crate::base::extent::{Extent, Plain};
use crate::tar::{Kind, Member};

/// Default rules, and problems without a reporter.
pub(super) fn context() -> Context {
    Context {
        journal: std::sync::OnceLock::new(),
        unwritable: std::sync::OnceLock::new(),
        policy: AttributePolicy::default(),
        existing: Existing::default(),
        device_placeholders: false,
        stats: Arc::default(),
        problems: Problems::new(None),
        replacements: Arc::default(),
        entry_quota: EntryQuota::new(u64::MAX),
        reserved_names: ReservedNames::default(),
        failed_files: FailedFiles::default(),
    }
}

/// A member with plain attributes.
pub(super) fn member(name: &[u8], kind: Kind) -> Member {
    Member::new(name, kind)
}

/// A regular file.
pub(super) fn file<'a>(name: &[u8], content: &'a [u8]) -> (Member, &'a [u8]) {
    let len = content.len() as u64;
    let member = Member {
        payload: Extent::with_len(Plain(512), len),
        size: len,
        ..member(name, Kind::File)
    };
    (member, content)
}

/// Passes members and payloads to a sink.
pub(super) fn feed<'a, S: Sink>(
    sink: &mut S,
    members: impl IntoIterator<Item = (Member, &'a [u8])>,
) {
    for (member, payload) in members {
        sink.member(member).expect("a member");
        if !payload.is_empty() {
            sink.payload(Bytes::copy_from_slice(payload))
                .expect("a payload");
        }
        sink.member_end(false).expect("an end");
    }
}
