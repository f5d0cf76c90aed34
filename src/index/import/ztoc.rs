//! SOCI ztocs: tables of contents of gzipped layers with checkpoints of the decoder, made by the soci snapshotter.
//!
//! A ztoc is a `FlatBuffer` (`ztoc/fbs/ztoc.fbs` in the snapshotter), with checkpoints in the form of
//! `ztoc/compression/gzip_zinfo.c`.

use super::flatbuffer::{Buffer, Table};
use super::{ImportError, Importer, SpanDigests, member_kind};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::sha256::Sha256;
use crate::base::time::parse_rfc3339;
use crate::codec::{Compression, SeekPoint, block_seek_point, member_seek_point};
use crate::index::tree::{Index, Origin};
use crate::tar::{self, Device, Member, MemberKind, RECORD, Timestamp};

const VERSION: &[u8] = b"0.9";

/// Values of the type of compression: the default of the format, and gzip.
const GZIP: [[u8; 1]; 2] = [[0], [1]];

const WINDOW_LEN: usize = 32 << 10;

/// Bytes before the checkpoints: their number, and the length of a span.
const HEAD_LEN: usize = 4 + 8;

/// Bytes of a checkpoint: packed offset, plain offset, bits, window.
const CHECKPOINT_LEN: usize = 8 + 8 + 1 + WINDOW_LEN;

/// Prefixes of names of extended attributes. Old programs stored these names in place of pax keywords.
const XATTR_NAMESPACES: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"system."];

/// A position where decoding can start.
struct Checkpoint<'a> {
    /// The packed byte that holds its first bit.
    packed: Packed,
    /// End of the packed bytes before it.
    end_before: Packed,
    /// Bits of the byte at `packed` before it.
    bit: u8,
    plain: Plain,
    window: &'a [u8],
}

impl Checkpoint<'_> {
    fn seek_point(&self) -> SeekPoint {
        if self.plain == Plain(0) {
            // Some versions store no checkpoint there.
            return member_seek_point(Packed(0), self.plain);
        }
        block_seek_point(self.packed, self.bit, self.plain, self.window)
    }
}

/// Makes an index of `ztoc`, which must describe the archive `origin`. The plain length in `origin` is ignored.
///
/// # Errors
/// When it is damaged or exceeds a limit, or would not give the tree that a scan gives.
pub fn import_ztoc(
    ztoc: &[u8],
    mut importer: Importer,
    origin: Origin,
) -> Result<(Index, SpanDigests), ImportError> {
    let buffer = Buffer::new(ztoc);
    let malformed = || ImportError::Malformed("its tables");
    let root = buffer.root().ok_or_else(malformed)?;
    if root.bytes(0) != Some(VERSION) {
        return Err(ImportError::Unsupported("its version"));
    }
    let zinfo = root.table(5).ok_or_else(malformed)?;
    if !GZIP.contains(&zinfo.number(0).ok_or_else(malformed)?) {
        return Err(ImportError::Unsupported("its compression"));
    }
    if long(root, 2) != Some(origin.packed_bytes) {
        return Err(ImportError::Foreign);
    }
    let plain_bytes = long(root, 3).ok_or_else(malformed)?;
    let entries = root.table(4).and_then(|toc| toc.tables(0));
    let mut end = Plain(0);
    for entry in entries.ok_or_else(malformed)? {
        let mut member = member(entry.ok_or_else(malformed)?, &importer.limits)?;
        if member.header < end || member.payload.end().0 > plain_bytes {
            return Err(ImportError::Malformed("the order of its entries"));
        }
        // Extensions before the header are between it and the last payload.
        member.header = Plain(end.0.next_multiple_of(RECORD));
        end = member.payload.end();
        importer.add_member(&member)?;
    }
    let packed_end = Packed(origin.packed_bytes);
    let blob = zinfo.bytes(3).ok_or_else(malformed)?;
    let checkpoints = checkpoints(blob).ok_or(ImportError::Malformed("its checkpoints"))?;
    let digests = zinfo.texts(2).ok_or_else(malformed)?;
    let digests = span_digests(&checkpoints, digests, packed_end);
    let digests = digests.ok_or(ImportError::Malformed("its digests"))?;
    add_spans(&mut importer, &checkpoints, packed_end, Plain(plain_bytes))?;
    let index = importer.finish(Origin {
        compression: Compression::Gzip,
        plain_bytes,
        ..origin
    })?;
    Ok((index, digests))
}

/// A number that is not negative.
fn long(table: Table<'_>, field: usize) -> Option<u64> {
    u64::try_from(i64::from_le_bytes(table.number(field)?)).ok()
}

fn member(entry: Table<'_>, limits: &tar::Limits) -> Result<Member, ImportError> {
    let (Some(mut member), Some(records)) = (header(entry), records(entry)) else {
        return Err(ImportError::Malformed("one of its entries"));
    };
    let is_xattr = |key: &[u8]| {
        XATTR_NAMESPACES
            .iter()
            .any(|prefix| key.starts_with(prefix))
    };
    if records.iter().any(|(key, _)| is_xattr(key)) {
        return Err(ImportError::Unsupported(
            "an extended attribute of an old version",
        ));
    }
    tar::apply_records(&mut member, records.into_iter(), limits)
        .ok_or(ImportError::Unsupported("a sparse or unusual file"))?;
    Ok(member)
}

/// Keywords and values of the pax records.
fn records(entry: Table<'_>) -> Option<Vec<(&[u8], &[u8])>> {
    let records = entry.tables(13)?.map(|record| {
        let record = record?;
        Some((record.bytes(0)?, record.bytes(1)?))
    });
    records.collect()
}

/// The fields of `entry` but the pax records; `None` if one is invalid.
fn header(entry: Table<'_>) -> Option<Member> {
    let device = || {
        let number = |field| u32::try_from(long(entry, field)?).ok();
        let (major, minor) = (number(11)?, number(12)?);
        Some(Device { major, minor })
    };
    let name = entry.bytes(0)?.to_vec();
    let link = entry.bytes(4)?.to_vec();
    let kind = member_kind(entry.bytes(1)?, &name, link, device)?;
    let start = long(entry, 2)?;
    let size = if kind == MemberKind::File {
        long(entry, 3)?
    } else {
        0
    };
    let (seconds, nanoseconds) = parse_rfc3339(str::from_utf8(entry.bytes(10)?).ok()?)?;
    Some(Member {
        header: Plain(start.checked_sub(RECORD)?),
        payload: Extent::with_len(Plain(start), size),
        mode: u32::try_from(long(entry, 5)? & 0o7777).ok()?,
        uid: u32::from_le_bytes(entry.number(6)?),
        gid: u32::from_le_bytes(entry.number(7)?),
        user: entry.bytes(8)?.to_vec(),
        group: entry.bytes(9)?.to_vec(),
        mtime: Timestamp {
            seconds,
            nanoseconds,
        },
        size,
        ..Member::new(name, kind)
    })
}

/// The checkpoints in `blob`, the first at the start of the stream.
fn checkpoints(blob: &[u8]) -> Option<Vec<Checkpoint<'_>>> {
    let (head, rows) = blob.split_at_checked(HEAD_LEN)?;
    let count = usize::try_from(u32::from_le_bytes(*head.first_chunk()?)).ok()?;
    let (rows, rest) = rows.as_chunks::<CHECKPOINT_LEN>();
    let mut parsed = Vec::with_capacity(rows.len() + 1);
    if count == rows.len() + 1 {
        // The first version of the format stores no checkpoint behind the gzip header, which then has 10 bytes.
        parsed.push(checkpoint(10, 0, 0, &[])?);
    }
    for row in rows {
        let (packed, row) = row.split_first_chunk()?;
        let (plain, row) = row.split_first_chunk()?;
        let (&bits, window) = row.split_first()?;
        let (packed, plain) = (i64::from_le_bytes(*packed), i64::from_le_bytes(*plain));
        parsed.push(checkpoint(packed, plain, bits, window)?);
    }
    let is_whole = rest.is_empty() && parsed.len() == count;
    let is_first = parsed.first().is_some_and(|first| first.plain == Plain(0));
    let is_sorted = parsed.is_sorted_by_key(|point| point.plain)
        && parsed.is_sorted_by_key(|point| point.packed);
    (is_whole && is_first && is_sorted).then_some(parsed)
}

/// A checkpoint at the end of the byte before `packed`, of which `bits` bits come after it.
fn checkpoint(packed: i64, plain: i64, bits: u8, window: &[u8]) -> Option<Checkpoint<'_>> {
    let end_before = u64::try_from(packed).ok()?;
    Some(Checkpoint {
        packed: Packed(end_before.checked_sub(u64::from(bits > 0))?),
        end_before: Packed(end_before),
        bit: if bits > 0 { 8_u8.checked_sub(bits)? } else { 0 },
        plain: Plain(u64::try_from(plain).ok()?),
        window,
    })
}

/// The digests of the packed bytes from each checkpoint to the next; `None` if there is not one for each.
fn span_digests<'a>(
    checkpoints: &[Checkpoint<'_>],
    mut digests: impl Iterator<Item = Option<&'a [u8]>>,
    packed_end: Packed,
) -> Option<SpanDigests> {
    let mut listed = Vec::with_capacity(checkpoints.len());
    for (number, checkpoint) in checkpoints.iter().enumerate() {
        let next = checkpoints.get(number + 1);
        let end = next.map_or(packed_end, |next| next.end_before);
        let digest = str::from_utf8(digests.next()??).ok()?;
        let digest: Sha256 = digest.strip_prefix("sha256:")?.parse().ok()?;
        listed.push((Extent::new(checkpoint.packed, end)?, digest));
    }
    digests.next().is_none().then_some(SpanDigests {
        packed: listed,
        ..SpanDigests::default()
    })
}

/// Adds the spans between `checkpoints`. Those at the same plain offset, before any output, count as one.
fn add_spans(
    importer: &mut Importer,
    checkpoints: &[Checkpoint<'_>],
    packed_end: Packed,
    plain_end: Plain,
) -> Result<(), ImportError> {
    let groups = checkpoints.chunk_by(|one, next| one.plain == next.plain);
    let mut firsts = groups.filter_map(<[_]>::first).peekable();
    while let Some(first) = firsts.next() {
        let next = firsts.peek();
        let packed_end = next.map_or(packed_end, |next| next.packed);
        // Packed bytes after the end of the archive decode to bytes of no member.
        let end = next.map_or(plain_end, |next| next.plain.min(plain_end));
        importer.add_spans(&first.seek_point(), packed_end, end)?;
    }
    Ok(())
}
