//! TOCs of eStargz layers, whose files are gzip members of their own (`estargz/types.go` in the stargz snapshotter).
//!
//! A TOC has no places in the tar stream, so the plain stream of the index is the chunks of all files, in their order.
//! Each chunk is a span with a digest. The other bytes of its gzip member are no part of the stream.

use std::collections::{BTreeMap, HashMap};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{ImportError, Importer, SpanDigests, member_kind};
use crate::base::extent::{Extent, Packed, Plain};
use crate::base::sha256::Sha256;
use crate::base::time::parse_rfc3339;
use crate::codec::seek_point::MAX_SPAN_LEN;
use crate::codec::{Compression, SeekPoint, member_seek_point};
use crate::index::builder::inode_rows::MAX_OWNER_NAME_BYTES;
use crate::index::tree::{Index, Origin};
use crate::tar::{self, Device, Member, MemberKind, Timestamp};

/// Maximum bytes of the JSON of an entry's extended attributes. Their values take 64 KiB each in Linux.
const MAX_XATTRS_BYTES: usize = 1 << 20;

#[derive(Deserialize)]
struct Toc<'a> {
    version: u64,
    /// A list, of which one entry at a time is in memory.
    #[serde(borrow)]
    entries: &'a RawValue,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Entry<'a> {
    name: String,
    r#type: String,
    size: u64,
    modtime: String,
    link_name: String,
    mode: u64,
    uid: u32,
    gid: u32,
    user_name: String,
    group_name: String,
    dev_major: u32,
    dev_minor: u32,
    #[serde(borrow)]
    xattrs: Option<&'a RawValue>,
    offset: u64,
    inner_offset: u64,
    chunk_offset: u64,
    chunk_size: u64,
    chunk_digest: String,
}

/// Chunks and names of the entries so far.
#[derive(Default)]
struct Layer {
    /// Start of each chunk.
    chunks: Vec<SeekPoint>,
    digests: Vec<Sha256>,
    /// End of the last chunk.
    end: u64,
    /// Size of the last file, and how many of its bytes are in no chunk yet.
    file: (u64, u64),
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

/// Makes an index of the JSON `toc`. The packed length in `origin` is that of the layer without its TOC. The plain
/// length is ignored.
///
/// # Errors
/// When it is damaged or exceeds a limit, or leaves out something of the layer's files.
pub fn import_estargz(
    toc: &[u8],
    mut importer: Importer,
    origin: Origin,
) -> Result<(Index, SpanDigests), ImportError> {
    let malformed = || ImportError::Malformed("its JSON");
    let toc: Toc<'_> = serde_json::from_slice(toc).map_err(|_| malformed())?;
    if toc.version != 1 {
        return Err(ImportError::Unsupported("its version"));
    }
    let mut layer = Layer::default();
    let mut rest = toc.entries.get().strip_prefix('[').ok_or_else(malformed)?;
    while !rest.trim_start().starts_with(']') {
        let mut entries = serde_json::Deserializer::from_str(rest).into_iter::<Entry<'_>>();
        let entry = entries.next().and_then(Result::ok).ok_or_else(malformed)?;
        rest = rest.get(entries.byte_offset()..).unwrap_or_default();
        rest = rest.trim_start().trim_start_matches(',');
        layer.add(&entry, &mut importer)?;
    }
    layer.check_whole_file()?;
    let packed_end = Packed(origin.packed_bytes);
    let mut chunks = layer.chunks.iter().peekable();
    while let Some(chunk) = chunks.next() {
        let next = chunks.peek();
        let end = next.map_or(Plain(layer.end), |next| next.plain);
        importer.add_spans(chunk, next.map_or(packed_end, |next| next.packed), end)?;
    }
    let index = importer.finish(Origin {
        compression: Compression::Gzip,
        plain_bytes: layer.end,
        ..origin
    })?;
    let digests = SpanDigests {
        plain: layer.digests,
        ..SpanDigests::default()
    };
    Ok((index, digests))
}

impl Layer {
    fn add(&mut self, entry: &Entry<'_>, importer: &mut Importer) -> Result<(), ImportError> {
        if entry.r#type != "chunk" {
            self.check_whole_file()?;
            let member = self.member(entry, &importer.limits)?;
            self.file = (member.size, member.size);
            importer.add_member(&member)?;
            if member.size == 0 {
                return Ok(());
            }
        }
        self.add_chunk(entry)
    }

    fn check_whole_file(&self) -> Result<(), ImportError> {
        match self.file {
            (_, 0) => Ok(()),
            _ => Err(ImportError::Malformed("the size of a file")),
        }
    }

    fn member(&mut self, entry: &Entry<'_>, limits: &tar::Limits) -> Result<Member, ImportError> {
        let texts = [
            &entry.name,
            &entry.link_name,
            &entry.user_name,
            &entry.group_name,
        ];
        // The program replaces bytes that are not UTF-8.
        if texts
            .iter()
            .any(|text| text.contains(char::REPLACEMENT_CHARACTER))
        {
            return Err(ImportError::Unsupported("a name that is not UTF-8"));
        }
        let header = self.header(entry);
        let mut member = header.ok_or(ImportError::Malformed("one of its entries"))?;
        let xattrs = entry.xattrs.map_or(Some(Vec::new()), xattr_records);
        let xattrs = xattrs.ok_or(ImportError::Unsupported("an extended attribute"))?;
        let records = xattrs.iter().map(|(key, value)| (&**key, &**value));
        tar::apply_records(&mut member, records, limits)
            .ok_or(ImportError::Unsupported("an unusual file"))?;
        Ok(member)
    }

    /// The member without its extended attributes; `None` if a field is invalid.
    fn header(&mut self, entry: &Entry<'_>) -> Option<Member> {
        let device = Device {
            major: entry.dev_major,
            minor: entry.dev_minor,
        };
        let (name, link) = (entry.name.as_bytes(), entry.link_name.as_bytes());
        let kind = member_kind(entry.r#type.as_bytes(), name, link.to_vec(), || {
            Some(device)
        })?;
        let size = if kind == MemberKind::File {
            entry.size
        } else {
            0
        };
        let (seconds, nanoseconds) = match &*entry.modtime {
            "" => (0, 0),
            modtime => parse_rfc3339(modtime)?,
        };
        let start = Plain(self.end);
        Some(Member {
            header: start,
            payload: Extent::new(start, Plain(self.end.checked_add(size)?))?,
            mode: u32::try_from(entry.mode & 0o7777).ok()?,
            uid: entry.uid,
            gid: entry.gid,
            user: owner_name(&mut self.users, entry.uid, &entry.user_name),
            group: owner_name(&mut self.groups, entry.gid, &entry.group_name),
            mtime: Timestamp {
                seconds,
                nanoseconds,
            },
            size,
            ..Member::new(name, kind)
        })
    }

    /// Adds the next chunk of the last file.
    fn add_chunk(&mut self, entry: &Entry<'_>) -> Result<(), ImportError> {
        let (size, missing) = self.file;
        let len = match entry.chunk_size {
            0 => missing,
            len => len,
        };
        if len == 0 || len > missing || entry.chunk_offset != size - missing {
            return Err(ImportError::Malformed("the chunks of a file"));
        }
        if len > MAX_SPAN_LEN {
            return Err(ImportError::Unsupported("a chunk of that length"));
        }
        let packed = Packed(entry.offset);
        let is_next = self.chunks.last().is_none_or(|last| last.packed < packed);
        if entry.inner_offset != 0 || !is_next {
            return Err(ImportError::Unsupported("the order of its chunks"));
        }
        let digest = entry.chunk_digest.strip_prefix("sha256:");
        let digest = digest.and_then(|digest| digest.parse().ok());
        let digest = digest.ok_or(ImportError::Unsupported("a chunk without a digest"))?;
        self.chunks.push(member_seek_point(packed, Plain(self.end)));
        self.digests.push(digest);
        self.end += len;
        self.file = (size, missing - len);
        Ok(())
    }
}

/// The name of the owner `id`. Only the first entry with that owner has it.
fn owner_name(names: &mut HashMap<u32, String>, id: u32, name: &str) -> Vec<u8> {
    if name.is_empty() {
        return names
            .get(&id)
            .map_or_else(Vec::new, |name| name.clone().into());
    }
    // The builder drops a longer one, so no entry needs a copy of it.
    if name.len() <= MAX_OWNER_NAME_BYTES {
        names.insert(id, name.to_owned());
    }
    name.into()
}

/// The attributes in `xattrs` as pax records; `None` if one is invalid.
fn xattr_records(xattrs: &RawValue) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let text = Some(xattrs.get()).filter(|text| text.len() <= MAX_XATTRS_BYTES)?;
    let xattrs: BTreeMap<String, Option<String>> = serde_json::from_str(text).ok()?;
    let records = xattrs.into_iter().map(|(name, value)| {
        let is_whole = !name.contains(char::REPLACEMENT_CHARACTER);
        let value = BASE64_STANDARD.decode(value.unwrap_or_default()).ok()?;
        is_whole.then(|| (format!("SCHILY.xattr.{name}").into_bytes(), value))
    });
    records.collect()
}
