//! Members built in code, for the tests of this layer.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::error::Problems;
use super::options::Options;
use super::write::{Context, Destination, Directory, WriterPool};
use crate::archive::scan::{PayloadEnd, Sink};
use crate::base::extent::{Extent, Plain};
use crate::tar::{Member, MemberKind};

/// Default rules, and problems without a reporter.
pub(super) fn context() -> Arc<Context> {
    let options = Options {
        same_owner: false,
        same_permissions: false,
        ..Options::for_this_user()
    };
    Arc::new(Context::new(&options, Problems::new(None), Arc::default()))
}

/// The directory at `path`, with one writer.
pub(super) fn destination(path: &Path) -> Destination {
    let top = Directory::open_top(path).expect("a directory");
    let context = context();
    let writers = WriterPool::start(1, &context).expect("threads");
    Destination::new(top, context, writers)
}

pub(super) fn member(name: &[u8], kind: MemberKind) -> Member {
    Member::new(name, kind)
}

pub(super) fn file<'a>(name: &[u8], content: &'a [u8]) -> (Member, &'a [u8]) {
    let len = content.len() as u64;
    let member = Member {
        payload: Extent::with_len(Plain(512), len),
        size: len,
        ..member(name, MemberKind::File)
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
        sink.member_end(PayloadEnd::Complete).expect("an end");
    }
}
