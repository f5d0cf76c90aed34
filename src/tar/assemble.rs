//! Builds a member from a header and its extensions.

use super::error::{Note, printable};
use super::header::{Header, NumberError};
use super::totals::check_depth;
use super::{Device, Limits, Member, MemberKind, RECORD, Timestamp, pax};
use crate::base::extent::{Extent, Plain};

#[derive(Debug, Default)]
pub(super) struct Extensions {
    pub(super) start: Option<Plain>,
    pub(super) long_name: Option<Vec<u8>>,
    pub(super) long_link: Option<Vec<u8>>,
    /// A pax header (`x`), applied on top of the global ones.
    pub(super) keywords: Option<Box<pax::Keywords>>,
    /// Of the pax header.
    pub(super) body: Vec<u8>,
    /// Whether a later global header makes the keywords stale, so that they must be applied again.
    pub(super) is_stale: bool,
}

/// The member that the header at `at`, its extensions and the `keywords` in force describe. Its content is
/// the `size` bytes after the header. Invalid fields add a note and get GNU tar's values.
pub(super) fn member(
    header: Header<'_>,
    at: Plain,
    size: u64,
    extensions: Extensions,
    keywords: &pax::Keywords,
    notes: &mut Vec<Note>,
) -> Member {
    let pax_name = keywords.sparse.name.as_ref().or(keywords.path.as_ref());
    let name = pax_name.cloned().or(extensions.long_name);
    let name = name.unwrap_or_else(|| header.name());
    let kind = kind(header, &name, extensions.long_link, keywords, notes);
    let size = if kind == MemberKind::File { size } else { 0 };
    Member {
        header: extensions.start.unwrap_or(at),
        payload: Extent::with_len(Plain(at.0 + RECORD), size),
        kind,
        mode: field_or_default(header.mode(), 0o7777, "mode", &name, notes),
        uid: keywords
            .uid
            .unwrap_or_else(|| field_or_default(header.uid(), u32::MAX, "owner", &name, notes)),
        gid: keywords
            .gid
            .unwrap_or_else(|| field_or_default(header.gid(), u32::MAX, "group", &name, notes)),
        user: owner_name(header.user(), keywords.uid),
        group: owner_name(header.group(), keywords.gid),
        mtime: keywords.mtime.unwrap_or_else(|| {
            field_or_default(header.mtime(), BEFORE_EPOCH, "time", &name, notes)
        }),
        size,
        sparse: None,
        xattrs: keywords.xattrs.clone(),
        has_global_keywords: false,
        name,
    }
}

/// The `name` in a header, unless a pax header has the number, which beats it. As in GNU tar, the names in pax headers do
/// not count.
fn owner_name(name: &[u8], pax_number: Option<u32>) -> Vec<u8> {
    pax_number.map_or_else(|| name.to_vec(), |_| Vec::new())
}

/// Applies the pax `records` in a table of contents to the `member` with the other fields.
///
/// `None` if the parser would report a problem, or the file is sparse, because the table has no map of it.
pub(crate) fn apply_records<'a>(
    member: &mut Member,
    records: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    limits: &Limits,
) -> Option<()> {
    let (mut keywords, mut notes) = (pax::Keywords::default(), Vec::new());
    for (key, value) in records {
        if key.starts_with(b"GNU.sparse.") || key == b"SCHILY.realsize" {
            return None;
        }
        keywords.set(key, value, limits, &mut notes).ok()?;
    }
    if let MemberKind::CharDevice(device) | MemberKind::BlockDevice(device) = &mut member.kind {
        device.major = keywords.major.unwrap_or(device.major);
        device.minor = keywords.minor.unwrap_or(device.minor);
    }
    check_depth(member, limits).ok()?;
    member.uid = keywords.uid.unwrap_or(member.uid);
    member.gid = keywords.gid.unwrap_or(member.gid);
    member.user = owner_name(&member.user, keywords.uid);
    member.group = owner_name(&member.group, keywords.gid);
    member.mtime = keywords.mtime.unwrap_or(member.mtime);
    member.xattrs = keywords.xattrs;
    notes.is_empty().then_some(())
}

/// The time that GNU tar uses for an invalid field (−1).
const BEFORE_EPOCH: Timestamp = Timestamp {
    seconds: -1,
    nanoseconds: 0,
};

fn kind(
    header: Header<'_>,
    name: &[u8],
    long_link: Option<Vec<u8>>,
    keywords: &pax::Keywords,
    notes: &mut Vec<Note>,
) -> MemberKind {
    let link = || {
        let long = keywords.link.clone().or(long_link);
        long.unwrap_or_else(|| header.link().to_vec())
    };
    match header.typeflag() {
        0 | b'0' | b'7' if name.ends_with(b"/") => MemberKind::Directory,
        0 | b'0' | b'7' | b'S' => MemberKind::File,
        b'1' => MemberKind::HardLink(link()),
        b'2' => MemberKind::Symlink(link()),
        b'3' => MemberKind::CharDevice(device(header, name, keywords, notes)),
        b'4' => MemberKind::BlockDevice(device(header, name, keywords, notes)),
        b'5' | b'D' => MemberKind::Directory,
        b'6' => MemberKind::Fifo,
        unknown => {
            let (name, flag) = (printable(name), printable(&[unknown]));
            notes.push(Note::Warning(format!(
                "{name}: unknown file type '{flag}', taken as a regular file"
            )));
            MemberKind::File
        }
    }
}

fn device(
    header: Header<'_>,
    name: &[u8],
    keywords: &pax::Keywords,
    notes: &mut Vec<Note>,
) -> Device {
    if let (Some(major), Some(minor)) = (keywords.major, keywords.minor) {
        return Device { major, minor };
    }
    let (major, minor) = (u32::MAX, u32::MAX);
    let default = Device { major, minor };
    let device = field_or_default(header.device(), default, "device number", name, notes);
    Device {
        major: keywords.major.unwrap_or(device.major),
        minor: keywords.minor.unwrap_or(device.minor),
    }
}

/// The field's value; for an invalid one, a note and GNU tar's −1.
fn field_or_default<T>(
    field: Result<T, NumberError>,
    default: T,
    what: &str,
    name: &[u8],
    notes: &mut Vec<Note>,
) -> T {
    field.unwrap_or_else(|error| {
        let fault = match error {
            NumberError::NotANumber => "is not a number",
            NumberError::OutOfRange => "is out of range",
        };
        let name = printable(name);
        notes.push(Note::Damaged(format!(
            "{name}: the {what} in its header {fault}"
        )));
        default
    })
}
