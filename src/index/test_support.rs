//! Members and trees for tests, of this layer and of those above.

use super::{Builder, Index, Options, Origin, WhiteoutFormat};
use crate::base::extent::{Extent, Plain};
use crate::tar::{Member, MemberKind};

/// A member called `name`, mode 0644, without content.
pub(crate) fn member(name: &str, kind: MemberKind) -> Member {
    Member::new(name, kind)
}

pub(crate) fn file(name: &str, payload: std::ops::Range<u64>) -> Member {
    Member {
        payload: Extent::new(Plain(payload.start), Plain(payload.end)).unwrap(),
        size: payload.end - payload.start,
        ..member(name, MemberKind::File)
    }
}

pub(crate) fn directory(name: &str, mode: u32) -> Member {
    Member {
        mode,
        ..member(name, MemberKind::Directory)
    }
}

pub(crate) fn symlink(name: &str, target: &str) -> Member {
    member(name, MemberKind::Symlink(target.as_bytes().to_vec()))
}

pub(crate) fn hard_link(name: &str, target: &str) -> Member {
    member(name, MemberKind::HardLink(target.as_bytes().to_vec()))
}

pub(crate) fn index(members: &[Member]) -> Index {
    built(members, Options::default())
}

/// The index of a layer of these members.
pub(crate) fn layer(members: &[Member], whiteouts: WhiteoutFormat) -> Index {
    let whiteouts = Some(whiteouts);
    built(
        members,
        Options {
            whiteouts,
            ..Options::default()
        },
    )
}

fn built(members: &[Member], options: Options) -> Index {
    let mut builder = Builder::new(options);
    for member in members {
        // The index lists refused members among its problems.
        builder.add_member(member).ok();
    }
    builder.finish(Origin::default())
}
