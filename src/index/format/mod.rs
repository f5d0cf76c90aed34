#![doc = include_str!("../../../docs/index-format.md")]

pub mod framed;

use std::io::{self, Read, Write};
use std::sync::Arc;

use blake3::Hasher;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::base::extent::Packed;
use crate::base::read_overlapped;
use crate::base::sha256::Sha256;
use crate::base::trusted_dir::PermissionProblem;
use crate::codec::Compression;
use crate::index::arrays::{Arena, Arrays};
use crate::index::blocks::{MAX_BLOCK_LEN, MIN_BLOCK_LEN};
use crate::index::memory_limit::{MemoryLimit, TooMuchMemory};
use crate::index::problem;
use crate::index::storage::{MissingRow, OnDemand, Row, Rows, find_missing};
use crate::index::tree::{EntryKind, Index, Ino, Locator, Origin, Totals};

/// The format version that this program writes, and the only one it reads.
pub const VERSION: u32 = 13;

const MAGIC: [u8; 8] = *b"TARFSIDX";
const END_MAGIC: [u8; 8] = *b"XDISFRAT";
/// Number of sections of an index file.
pub const SECTIONS: u32 = 17;
const HAS_XATTRS: u32 = 1;
const IS_PUBLISHED: u32 = 2;
const HAS_GLOBAL_KEYWORDS: u32 = 4;
const HAS_SHA256: u32 = 1;
const HAS_PLAIN_SHA256: u32 = 2;
const IS_TRUNCATED: u32 = 4;
const HAS_END_MARKER: u32 = 8;

/// Maximum bytes of the texts of a locator. Real ones are much shorter.
const MAX_ORIGIN_TEXT_BYTES: u64 = 1 << 20;

const ONE_LAYER: Error = Error::Malformed("not exactly one layer");
const PARTIAL_ROWS: Error = Error::Malformed("a section is not a whole number of rows");

/// Why bytes are not a usable index. The index can always be made again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They are no index.
    #[error("not a tarfs index")]
    NotAnIndex,
    /// Another version of the program wrote them.
    #[error("index format version {0}, this program reads version {VERSION}")]
    Version(u32),
    /// The file is shorter or longer than the header says.
    #[error("the index is {actual} bytes long and says it has {expected}")]
    Length {
        /// From the header.
        expected: u64,
        /// Length of the file.
        actual: u64,
    },
    /// The bytes changed since they were written.
    #[error("the index is damaged: checksum mismatch")]
    Checksum,
    /// The rows break a rule of the format.
    #[error("the index is damaged: {0}")]
    Malformed(&'static str),
    /// Another source, another version of it, or other options.
    #[error("the index belongs to another source")]
    Mismatch,
    /// Another user could replace the file or its directory.
    #[error(transparent)]
    Untrusted(PermissionProblem),
    /// The index is larger than the memory limit for indexes.
    #[error(transparent)]
    TooMuchMemory(#[from] TooMuchMemory),
    /// The path is no regular file.
    #[error("not a regular file")]
    NotAFile,
    /// Allocation failed.
    #[error("not enough memory for an index of {0} bytes")]
    Memory(u64),
    /// Reading or writing the file failed.
    #[error("input or output failed")]
    Io(#[from] io::Error),
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: U32,
    section_count: U32,
    index_bytes: U64,
    entries: U64,
    stored_bytes: U64,
    problems: U64,
    flags: U32,
    reserved: U32,
    members: U64,
    file_bytes: U64,
    sections: [Section; SECTIONS as usize],
}

/// Offset and length; sections are adjacent.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Section {
    offset: U64,
    len: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Layer {
    content_id: [u8; 32],
    packed_bytes: U64,
    plain_bytes: U64,
    compression: U32,
    flags: U32,
    sha256: [u8; 32],
    block_len: U32,
    decoder_kib: U32,
    plain_sha256: [u8; 32],
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Footer {
    digest: [u8; 32],
    magic: [u8; 8],
}

/// Writes `index` under the key `locator`. Other machines must not see the `local_path` of its archive.
///
/// # Errors
/// When `out` fails, or a row of `index` cannot be loaded.
pub fn write(
    index: &Index,
    locator: &Locator,
    local_path: &[u8],
    out: impl Write,
) -> io::Result<()> {
    let texts = encode_texts(locator, local_path);
    find_missing(true, || write_rows(index, &texts, out)).map_err(io::Error::other)?
}

fn write_rows(index: &Index, texts: &[u8], out: impl Write) -> io::Result<()> {
    let layer = Layer::of(index);
    let problems = problem::encode(&index.problems);
    let sections = sections(index, &layer, texts, &problems);
    let mut out = HashingStream::new(out);
    out.write(Header::of(index, &sections).as_bytes())?;
    for section in sections {
        out.write(section)?;
    }
    let footer = Footer {
        digest: *out.hasher.finalize().as_bytes(),
        magic: END_MAGIC,
    };
    out.write(footer.as_bytes())?;
    out.inner.flush()
}

/// Length of the file that [`write()`] writes, in bytes.
pub fn len(index: &Index, locator: &Locator, local_path: &[u8]) -> u64 {
    let (layer, texts) = (Layer::of(index), encode_texts(locator, local_path));
    let problems = problem::encode(&index.problems);
    let sections = sections(index, &layer, &texts, &problems);
    Header::of(index, &sections).index_bytes.get()
}

fn sections<'a>(
    index: &'a Index,
    layer: &'a Layer,
    texts: &'a [u8],
    problems: &'a [u8],
) -> [&'a [u8]; SECTIONS as usize] {
    let arrays = &index.arrays;
    [
        layer.as_bytes(),
        texts,
        arrays.inodes.as_bytes(),
        arrays.dirents.as_bytes(),
        arrays.by_name.as_bytes(),
        &arrays.arena.0,
        arrays.owners.as_bytes(),
        arrays.extras.as_bytes(),
        arrays.xattrs.as_bytes(),
        arrays.pieces.as_bytes(),
        arrays.spans.as_bytes(),
        &arrays.windows.0,
        arrays.unresolved.as_bytes(),
        arrays.blocks.as_bytes(),
        arrays.checksums.as_bytes(),
        problems,
        arrays.links.as_bytes(),
    ]
}

/// Reads an index from a file of `len` bytes, without a check of each entry: accessors check rows.
///
/// # Errors
/// When the bytes are not exactly those that [`write()`] wrote.
pub fn read(input: impl Read, len: u64) -> Result<Index, Error> {
    let mut input = HashingStream::new(input);
    let header = Header::read(&mut input, len)?;
    let sections = SectionRows::read(&mut input, &header)?;
    let digest = *input.hasher.finalize().as_bytes();
    let footer = input.row::<Footer>()?;
    if footer.magic != END_MAGIC || footer.digest != digest {
        return Err(Error::Checksum);
    }
    sections.into_index(&header, None)
}

/// Opens the index file of `len` bytes in `file`, and loads only its first sections and its problems.
/// The frames are verified when they are loaded, so the digest at the end is not. An index that is not as [`write()`]
/// writes it is an error.
fn open(file: &Arc<OnDemand>, len: u64) -> Result<Index, Error> {
    file.load(&(0..size_of::<Header>().min(file.len())))?;
    let header_bytes = file.bytes(0..size_of::<Header>());
    let header_bytes = header_bytes.ok_or(Error::NotAnIndex)?;
    let header = Header::read(&mut HashingStream::new(header_bytes), len)?;
    SectionRows::read(&mut { file }, &header)?.into_index(&header, Some(file))
}

fn unavailable() -> Error {
    let missing = MissingRow::Unavailable;
    Error::Io(io::Error::new(io::ErrorKind::InvalidData, missing))
}

/// The rows of the sections of an index file.
struct SectionRows {
    layer: Layer,
    texts: Rows<u8>,
    arrays: Arrays,
    problems: Rows<u8>,
}

/// Sections, read in order.
trait SectionReader {
    /// Reads the rows of `section`, whose place in the file is checked.
    fn rows<T: Row + IntoBytes + Clone>(&mut self, section: Section) -> Result<Rows<T>, Error>;
}

impl SectionReader for &Arc<OnDemand> {
    fn rows<T: Row + IntoBytes + Clone>(&mut self, section: Section) -> Result<Rows<T>, Error> {
        let start = usize::try_from(section.offset.get()).ok();
        let len = usize::try_from(section.len.get()).ok();
        let range = start
            .zip(len)
            .and_then(|(start, len)| Some(start..start.checked_add(len)?));
        range
            .and_then(|range| Rows::on_demand(self, range))
            .ok_or(PARTIAL_ROWS)
    }
}

impl SectionRows {
    fn read(input: &mut impl SectionReader, header: &Header) -> Result<Self, Error> {
        let [layers, texts, ..] = header.sections;
        if layers.len.get() != size_of::<Layer>() as u64 {
            return Err(ONE_LAYER);
        }
        let layer = *input
            .rows::<Layer>(layers)?
            .get(0)
            .ok_or_else(unavailable)?;
        let texts = input.rows::<u8>(texts)?;
        let (arrays, problems) = read_arrays(input, &header.sections)?;
        Ok(Self {
            layer,
            texts,
            arrays,
            problems,
        })
    }

    fn into_index(self, header: &Header, file: Option<&Arc<OnDemand>>) -> Result<Index, Error> {
        let Self {
            layer,
            texts,
            arrays,
            problems,
        } = self;
        // A published file of a format with longer texts could claim any length.
        if texts.len() as u64 > MAX_ORIGIN_TEXT_BYTES {
            return Err(Error::Malformed("a locator that is too long"));
        }
        let all = |rows: &Rows<u8>| rows.range(0..rows.len()).map(<[u8]>::to_vec);
        let texts = all(&texts).ok_or_else(unavailable)?;
        let problems = all(&problems).ok_or_else(unavailable)?;
        let (locator, local_path) = decode_texts(&texts)?;
        let origin = layer.origin(locator, local_path)?;
        let block_len = layer.block_len()?;
        let index = Index {
            // The end of the stream, or 0 without blocks.
            digested: match arrays.blocks.len() as u64 {
                0 => Packed(0),
                count if count == origin.packed_bytes.div_ceil(block_len) => {
                    Packed(origin.packed_bytes)
                }
                _ => return Err(Error::Malformed("not one digest a block")),
            },
            arrays,
            names: None,
            replaced: None,
            origin,
            block_len,
            totals: Totals {
                entries: header.entries.get(),
                stored_bytes: header.stored_bytes.get(),
                members: header.members.get(),
                file_bytes: header.file_bytes.get(),
                has_xattrs: header.flags.get() & HAS_XATTRS != 0,
                has_global_keywords: header.flags.get() & HAS_GLOBAL_KEYWORDS != 0,
                problems: header.problems.get(),
            },
            problems: problem::decode(&problems).ok_or(Error::Malformed("a problem is cut"))?,
            is_published: header.flags.get() & IS_PUBLISHED != 0,
            file: file.cloned(),
            charge: MemoryLimit::none().charge(),
        };
        match index.entry(Ino::ROOT).map(|root| root.kind()) {
            Some(EntryKind::Directory) => Ok(index),
            _ => Err(Error::Malformed("no root directory")),
        }
    }
}

fn read_arrays(
    input: &mut impl SectionReader,
    sections: &[Section; SECTIONS as usize],
) -> Result<(Arrays, Rows<u8>), Error> {
    let &[
        _,
        _,
        inodes,
        dirents,
        by_name,
        arena,
        owners,
        extras,
        xattrs,
        pieces,
        spans,
        windows,
        unresolved,
        blocks,
        checksums,
        problems,
        links,
    ] = sections;
    let mut arrays = Arrays {
        inodes: input.rows(inodes)?,
        dirents: input.rows(dirents)?,
        by_name: input.rows(by_name)?,
        arena: Arena(input.rows(arena)?),
        owners: input.rows(owners)?,
        extras: input.rows(extras)?,
        xattrs: input.rows(xattrs)?,
        pieces: input.rows(pieces)?,
        spans: input.rows(spans)?,
        windows: Arena(input.rows(windows)?),
        unresolved: input.rows(unresolved)?,
        blocks: input.rows(blocks)?,
        checksums: input.rows(checksums)?,
        links: Rows::default(),
        places: None,
    };
    if problems.len.get() > problem::MAX_SECTION_BYTES {
        return Err(Error::Malformed("too many problems"));
    }
    let problems = input.rows(problems)?;
    arrays.links = input.rows(links)?;
    Ok((arrays, problems))
}

impl Header {
    fn of(index: &Index, contents: &[&[u8]; SECTIONS as usize]) -> Self {
        let mut offset = size_of::<Self>() as u64;
        let sections = contents.map(|content| {
            let section = Section {
                offset: offset.into(),
                len: (content.len() as u64).into(),
            };
            offset += content.len() as u64;
            section
        });
        let totals = &index.totals;
        Self {
            magic: MAGIC,
            version: VERSION.into(),
            section_count: SECTIONS.into(),
            index_bytes: (offset + size_of::<Footer>() as u64).into(),
            entries: totals.entries.into(),
            stored_bytes: totals.stored_bytes.into(),
            problems: totals.problems.into(),
            flags: flags([
                (totals.has_xattrs, HAS_XATTRS),
                (index.is_published, IS_PUBLISHED),
                (totals.has_global_keywords, HAS_GLOBAL_KEYWORDS),
            ]),
            reserved: 0.into(),
            members: totals.members.into(),
            file_bytes: totals.file_bytes.into(),
            sections,
        }
    }

    /// Reads and checks the header of a file of `len` bytes: its sections are inside the file.
    fn read(input: &mut HashingStream<impl Read>, len: u64) -> Result<Self, Error> {
        const GAP: Error = Error::Malformed("the sections do not adjoin");
        if len < size_of::<Self>() as u64 {
            return Err(Error::NotAnIndex);
        }
        let header = input.row::<Self>()?;
        if header.magic != MAGIC {
            return Err(Error::NotAnIndex);
        }
        if header.version.get() != VERSION {
            return Err(Error::Version(header.version.get()));
        }
        if header.index_bytes.get() != len {
            return Err(Error::Length {
                expected: header.index_bytes.get(),
                actual: len,
            });
        }
        if header.section_count.get() != SECTIONS {
            return Err(Error::Malformed("an unknown number of sections"));
        }
        let mut offset = size_of::<Self>() as u64;
        for section in &header.sections {
            if section.offset.get() != offset {
                return Err(GAP);
            }
            offset = offset.checked_add(section.len.get()).ok_or(GAP)?;
        }
        if offset.checked_add(size_of::<Footer>() as u64) != Some(len) {
            return Err(GAP);
        }
        Ok(header)
    }
}

/// The sum of the flags that are set.
fn flags<const N: usize>(flags: [(bool, u32); N]) -> U32 {
    let set = flags.into_iter().filter(|(is_set, _)| *is_set);
    set.map(|(_, flag)| flag).sum::<u32>().into()
}

impl Layer {
    fn of(index: &Index) -> Self {
        let origin = &index.origin;
        Self {
            block_len: u32::try_from(index.block_len).unwrap_or_default().into(),
            decoder_kib: u32::try_from(origin.decoder_bytes.div_ceil(1 << 10))
                .unwrap_or(u32::MAX)
                .into(),
            content_id: origin.content_id,
            packed_bytes: origin.packed_bytes.into(),
            plain_bytes: origin.plain_bytes.into(),
            compression: origin.compression.code().into(),
            flags: flags([
                (origin.sha256.is_some(), HAS_SHA256),
                (origin.plain_sha256.is_some(), HAS_PLAIN_SHA256),
                (origin.is_truncated, IS_TRUNCATED),
                (origin.has_end_marker, HAS_END_MARKER),
            ]),
            sha256: origin.sha256.map_or([0; 32], |digest| digest.0),
            plain_sha256: origin.plain_sha256.map_or([0; 32], |digest| digest.0),
        }
    }

    fn block_len(&self) -> Result<u64, Error> {
        let len = u64::from(self.block_len.get());
        let is_possible = len.is_power_of_two() && (MIN_BLOCK_LEN..=MAX_BLOCK_LEN).contains(&len);
        let wrong = Error::Malformed("blocks of an impossible length");
        is_possible.then_some(len).ok_or(wrong)
    }

    fn origin(&self, locator: Locator, local_path: Vec<u8>) -> Result<Origin, Error> {
        let compression = Compression::from_code(self.compression.get().into());
        let flagged = |flag, digest| (self.flags.get() & flag != 0).then_some(Sha256(digest));
        Ok(Origin {
            locator,
            local_path,
            content_id: self.content_id,
            sha256: flagged(HAS_SHA256, self.sha256),
            plain_sha256: flagged(HAS_PLAIN_SHA256, self.plain_sha256),
            compression: compression.ok_or(Error::Malformed("an unknown compression"))?,
            packed_bytes: self.packed_bytes.get(),
            plain_bytes: self.plain_bytes.get(),
            decoder_bytes: u64::from(self.decoder_kib.get()) << 10,
            is_truncated: self.flags.get() & IS_TRUNCATED != 0,
            has_end_marker: self.flags.get() & HAS_END_MARKER != 0,
        })
    }
}

impl Locator {
    /// File name: 64 hexadecimal digits and `.idx`. The hash separates format versions in a shared directory.
    pub fn file_name(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&VERSION.to_le_bytes());
        hasher.update(&encode_texts(self, b""));
        format!("{}.idx", hasher.finalize().to_hex())
    }
}

fn encode_texts(locator: &Locator, local_path: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in [&locator.canonical, &locator.fingerprint, &locator.options] {
        problem::push_text(&mut bytes, text.as_bytes());
    }
    problem::push_text(&mut bytes, local_path);
    bytes
}

fn decode_texts(bytes: &[u8]) -> Result<(Locator, Vec<u8>), Error> {
    let decode = || {
        let (canonical, rest) = problem::split_text(bytes)?;
        let (fingerprint, rest) = problem::split_text(rest)?;
        let (options, rest) = problem::split_text(rest)?;
        let (local_path, rest) = problem::split_text(rest)?;
        let text = |text: &[u8]| String::from_utf8(text.to_vec()).ok();
        let locator = Locator {
            canonical: text(canonical)?,
            fingerprint: text(fingerprint)?,
            options: text(options)?,
        };
        rest.is_empty().then(|| (locator, local_path.to_vec()))
    };
    decode().ok_or(Error::Malformed("the locator is cut or not UTF-8"))
}

struct HashingStream<T> {
    inner: T,
    hasher: Hasher,
}

impl<T> HashingStream<T> {
    fn new(inner: T) -> Self {
        Self {
            inner,
            hasher: Hasher::new(),
        }
    }
}

impl<W: Write> HashingStream<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.inner.write_all(bytes)
    }
}

impl<R: Read> HashingStream<R> {
    fn row<T: FromBytes + IntoBytes>(&mut self) -> Result<T, Error> {
        let mut row = T::new_zeroed();
        self.inner.read_exact(row.as_mut_bytes())?;
        self.hasher.update(row.as_mut_bytes());
        Ok(row)
    }
}

impl<R: Read> SectionReader for HashingStream<R> {
    /// Reads a section straight into its vector.
    fn rows<T: Row + IntoBytes + Clone>(&mut self, section: Section) -> Result<Rows<T>, Error> {
        let len = section.len.get();
        let row_bytes = size_of::<T>() as u64;
        if !len.is_multiple_of(row_bytes) {
            return Err(PARTIAL_ROWS);
        }
        let count = usize::try_from(len / row_bytes).map_err(|_| Error::Memory(len))?;
        let mut rows = T::new_vec_zeroed(count).map_err(|_| Error::Memory(len))?;
        let Self { inner, hasher } = self;
        read_overlapped(inner, rows.as_mut_bytes(), |piece| {
            hasher.update(piece);
        })?;
        Ok(rows.into())
    }
}

#[cfg(test)]
mod tests;
