//! Index files in compressed frames, which a reader loads by ranges: saved ones, and those published beside archives.
//!
//! docs/index-format.md describes the form. A zstd decoder turns it into the index file.

use std::io::{self, Seek, SeekFrom, Write};
use std::ops::RangeInclusive;
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
use zstd::bulk::Compressor;

use super::{Error, VERSION};
use crate::index::format;
use crate::index::memory_limit::{MemoryLimit, TooMuchMemory};
use crate::index::storage::{FrameMemory, OnDemand, frame_checksum};
use crate::index::tree::{Index, Locator};

pub use crate::index::storage::PackedIndex;

/// Suffix of the name of an archive's published index.
pub const SUFFIX: &str = ".tarfs";

/// Bytes of the index file in each frame but the last.
const FRAME_LEN: u32 = 128 << 10;

/// Lengths of frames that a reader accepts. Longer ones would make a first row expensive, and shorter ones the table.
const FRAME_LENS: RangeInclusive<u32> = 4 << 10..=4 << 20;

/// How well an index is packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Packing<'a> {
    /// For this machine, where every scan saves one. It has the path of a local archive.
    Fast {
        /// The absolute path; empty if the archive is not local.
        local_path: &'a [u8],
    },
    /// For servers: packed once, and fetched often.
    Small,
}

impl<'a> Packing<'a> {
    /// The level of zstd, and the path that the index shows.
    fn settings(self) -> (i32, &'a [u8]) {
        match self {
            Self::Fast { local_path } => (1, local_path),
            Self::Small => (7, b""),
        }
    }
}

/// Bytes that a reader reads first on this machine. They hold the table of most indexes.
const FRONT_BYTES: u64 = 4 << 10;

/// Bytes that a reader requests first of a server, as many as [`crate::source`] fetches when it opens a source.
const FIRST_REQUEST_BYTES: u64 = 64 << 10;

/// Magic of a skippable frame (RFC 8878, section 3.1.2), which zstd decoders ignore.
const SKIPPABLE_MAGIC: u32 = 0x184D_2A5E;
const MAGIC: [u8; 8] = *b"TARFSPUB";

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Front {
    skippable_magic: U32,
    skippable_len: U32,
    magic: [u8; 8],
    version: U32,
    frame_len: U32,
    index_bytes: U64,
}

/// A frame, in the table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct FrameRow {
    packed_len: U32,
    checksum: U32,
}

impl Front {
    /// For an index file of `index_bytes`; `None` if it is too long for the form.
    fn new(index_bytes: u64) -> Option<Self> {
        let mut front = Self {
            skippable_magic: SKIPPABLE_MAGIC.into(),
            skippable_len: 0.into(),
            magic: MAGIC,
            version: VERSION.into(),
            frame_len: FRAME_LEN.into(),
            index_bytes: index_bytes.into(),
        };
        front.skippable_len = u32::try_from(front.end() - 8).ok()?.into();
        Some(front)
    }

    fn frame_count(&self) -> u64 {
        let frame_len = u64::from(self.frame_len.get()).max(1);
        self.index_bytes.get().div_ceil(frame_len)
    }

    /// End of the table of frames.
    fn end(&self) -> u64 {
        size_of::<Self>() as u64
            + self
                .frame_count()
                .saturating_mul(size_of::<FrameRow>() as u64)
    }

    fn read(bytes: &[u8]) -> Result<Self, Error> {
        let (front, _) = Self::read_from_prefix(bytes).map_err(|_| Error::NotAnIndex)?;
        if front.skippable_magic.get() != SKIPPABLE_MAGIC || front.magic != MAGIC {
            return Err(Error::NotAnIndex);
        }
        if front.version.get() != VERSION {
            return Err(Error::Version(front.version.get()));
        }
        let frame_len = front.frame_len.get();
        if !frame_len.is_power_of_two()
            || !FRAME_LENS.contains(&frame_len)
            || front.end().checked_sub(8) != Some(front.skippable_len.get().into())
        {
            return Err(Error::Malformed("impossible frames"));
        }
        Ok(front)
    }
}

/// Writes `index` under the key `locator` in the framed form.
///
/// # Errors
/// When `out` fails, a row of `index` cannot be loaded, or it has more frames than the form allows.
pub fn write(
    index: &Index,
    locator: &Locator,
    packing: Packing<'_>,
    out: impl Write + Seek,
) -> io::Result<()> {
    let (level, local_path) = packing.settings();
    let front = Front::new(format::len(index, locator, local_path));
    let front = front.ok_or_else(|| io::Error::other("the index is too long to be published"))?;
    let mut encoder = Compressor::new(level)?;
    encoder.include_checksum(true)?;
    let mut frames = FrameWriter {
        out,
        encoder,
        frame: Vec::with_capacity(FRAME_LEN as usize),
        table: Vec::new(),
    };
    frames.out.seek(SeekFrom::Start(front.end()))?;
    format::write(index, locator, local_path, &mut frames)?;
    frames.end_frame()?;
    let FrameWriter { mut out, table, .. } = frames;
    out.seek(SeekFrom::Start(0))?;
    out.write_all(front.as_bytes())?;
    out.write_all(table.as_bytes())?;
    out.flush()
}

struct FrameWriter<W> {
    out: W,
    encoder: Compressor<'static>,
    frame: Vec<u8>,
    table: Vec<FrameRow>,
}

impl<W: Write> FrameWriter<W> {
    fn end_frame(&mut self) -> io::Result<()> {
        if self.frame.is_empty() {
            return Ok(());
        }
        let packed = self.encoder.compress(&self.frame)?;
        let len = u32::try_from(packed.len()).map_err(io::Error::other)?;
        self.table.push(FrameRow {
            packed_len: len.into(),
            checksum: frame_checksum(&packed).into(),
        });
        self.out.write_all(&packed)?;
        self.frame.clear();
        Ok(())
    }
}

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = (FRAME_LEN as usize).saturating_sub(self.frame.len());
        let taken = bytes.get(..room).unwrap_or(bytes);
        self.frame.extend_from_slice(taken);
        if self.frame.len() == FRAME_LEN as usize {
            self.end_frame()?;
        }
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens the index `packed` of `packed_len` bytes, which was found beside an archive, and loads its front only.
///
/// # Errors
/// When it cannot be read, is damaged, or too long for the limit.
pub fn open(
    packed: Box<dyn PackedIndex>,
    packed_len: u64,
    limit: &MemoryLimit,
) -> Result<Index, Error> {
    let mut index = open_saved(packed, packed_len, limit)?;
    index.is_published = true;
    Ok(index)
}

/// Opens the index `packed` of `packed_len` bytes, and loads its front only.
///
/// Its whole length counts against `limit`, although only rows that are used take memory.
pub(crate) fn open_saved(
    packed: Box<dyn PackedIndex>,
    packed_len: u64,
    limit: &MemoryLimit,
) -> Result<Index, Error> {
    let first_len = packed
        .min_request_bytes()
        .clamp(FRONT_BYTES, FIRST_REQUEST_BYTES);
    let mut bytes = packed.read(0..packed_len.min(first_len))?;
    let front = Front::read(&bytes)?;
    let (index_bytes, table_end) = (front.index_bytes.get(), front.end());
    if index_bytes > limit.bytes() {
        let limit = limit.bytes();
        return Err(TooMuchMemory { limit }.into());
    }
    if table_end > packed_len {
        return Err(Error::Malformed("the table of frames is cut"));
    }
    if table_end > bytes.len() as u64 {
        bytes = packed.read(0..table_end)?;
    }
    let table = usize::try_from(table_end).ok();
    let table = table.and_then(|end| bytes.get(size_of::<Front>()..end));
    let table = table.and_then(|table| <[FrameRow]>::ref_from_bytes(table).ok());
    let table = table.ok_or(Error::Malformed("frames"))?;
    let offsets = offsets(table, table_end);
    if offsets.last() != Some(&packed_len) {
        return Err(Error::Malformed("the frames do not fill the file"));
    }
    let no_memory = || Error::Memory(index_bytes);
    let len = usize::try_from(index_bytes).map_err(|_| no_memory())?;
    let memory = FrameMemory::new(len, front.frame_len.get() as usize).ok_or_else(no_memory)?;
    let checksums = table.iter().map(|frame| frame.checksum.get()).collect();
    let file = OnDemand::new(memory, offsets, checksums, packed);
    let file = file.ok_or(Error::Malformed("frames"))?;
    file.add_packed(0, &bytes)?;
    let mut index = format::open(&Arc::new(file), index_bytes)?;
    index.charge_to(limit)?;
    Ok(index)
}

/// Offsets of the frames, from `start` on, and their end.
fn offsets(table: &[FrameRow], start: u64) -> Vec<u64> {
    let mut end = start;
    let ends = table.iter().map(|frame| {
        end = end.saturating_add(frame.packed_len.get().into());
        end
    });
    std::iter::once(start).chain(ends).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Read};
    use std::ops::Range;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use bytes::Bytes;

    use super::*;
    use crate::base::extent::{Extent, Plain};
    use crate::index::test_support::{self, file};
    use crate::index::{Builder, Child, Ino, LazyIndex, MissingRow, Options, Origin};

    /// Enough entries for several frames, and more than one request.
    const FILES: usize = 60_000;

    #[derive(Clone, Debug)]
    struct Stored {
        bytes: Bytes,
        is_away: Arc<AtomicBool>,
        reads: Arc<AtomicUsize>,
        failures: Arc<AtomicUsize>,
    }

    impl Stored {
        fn new(bytes: Vec<u8>) -> Self {
            Self {
                bytes: bytes.into(),
                is_away: Arc::default(),
                reads: Arc::default(),
                failures: Arc::default(),
            }
        }

        fn open(&self, limit: u64) -> Result<Index, Error> {
            let len = self.bytes.len() as u64;
            open(Box::new(self.clone()), len, &MemoryLimit::new(limit))
        }
    }

    impl PackedIndex for Stored {
        fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
            self.reads.fetch_add(1, Ordering::SeqCst);
            if self.is_away.load(Ordering::SeqCst) {
                return Err(io::ErrorKind::HostUnreachable.into());
            }
            let at = |offset| usize::try_from(offset).expect("small");
            let bytes = self.bytes.get(at(range.start)..at(range.end));
            Ok(self
                .bytes
                .slice_ref(bytes.ok_or(io::ErrorKind::UnexpectedEof)?))
        }

        fn report_failure(&self, _error: &io::Error) {
            self.failures.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A name that does not compress well.
    fn name(number: usize) -> String {
        let hash = blake3::hash(&number.to_le_bytes()).to_hex();
        format!("d{}/{hash}", number % 7)
    }

    fn index() -> Index {
        let names: Vec<String> = (0..FILES).map(name).collect();
        let members: Vec<_> = names.iter().map(|name| file(name, 0..1)).collect();
        test_support::index(&members)
    }

    fn packed(index: &Index) -> Vec<u8> {
        let mut out = Cursor::new(Vec::new());
        write(index, &index.origin.locator, Packing::Small, &mut out).expect("written");
        out.into_inner()
    }

    fn names(index: &Index) -> Vec<Vec<u8>> {
        let inos = 1..=index.last_ino().0;
        let children = inos.flat_map(|ino| index.children(Ino(ino), 0));
        children
            .map(|child: Child<'_>| child.name.to_vec())
            .collect()
    }

    #[test]
    fn published_index_reads_back_as_written() {
        let (index, stored) = (index(), Stored::new(packed(&index())));
        let mut opened = stored.open(u64::MAX).expect("opened");
        assert!(opened.is_on_demand() && opened.is_published());
        assert_eq!(opened.origin(), index.origin());
        let loaded = opened.memory_bytes();
        assert!(
            loaded < index.memory_bytes() / 4,
            "only the front: {loaded}"
        );
        assert_eq!(names(&opened), names(&index));
        assert_eq!(opened.entry_count(), index.entry_count());
        opened.load_all_rows().expect("loaded");
        assert!(!opened.load_next_rows().expect("nothing left"));
        opened.is_published = false;
        assert_eq!(packed(&opened), packed(&index));
    }

    #[test]
    fn zstd_unpacks_a_published_index_to_the_index_file() {
        let index = index();
        let (mut plain, mut unpacked) = (Vec::new(), Vec::new());
        format::write(&index, &index.origin.locator, b"", &mut plain).expect("written");
        zstd::Decoder::new(&*packed(&index))
            .and_then(|mut frames| frames.read_to_end(&mut unpacked))
            .expect("frames");
        assert!(unpacked == plain);
    }

    #[test]
    fn missing_row_is_reported_to_its_user_and_loaded_later() {
        let stored = Stored::new(packed(&index()));
        let opened = stored.open(u64::MAX).expect("opened");
        let reads = stored.reads.load(Ordering::SeqCst);
        let wanted = name(FILES - 1);
        let path = crate::base::archive_path::ArchivePath::sanitize(wanted.as_bytes()).path;
        let opened = LazyIndex::new(&opened);
        let find = |index: &Index| index.find(&path).is_some();
        assert_eq!(opened.try_read(find), Err(MissingRow::NotLoaded));
        assert_eq!(stored.reads.load(Ordering::SeqCst), reads);
        stored.is_away.store(true, Ordering::SeqCst);
        assert_eq!(opened.read(find), Err(MissingRow::Unavailable));
        assert!(stored.failures.load(Ordering::SeqCst) > 0);
        stored.is_away.store(false, Ordering::SeqCst);
        assert_eq!(opened.read(find), Ok(true));
        assert_eq!(opened.try_read(find), Ok(true));
    }

    #[test]
    fn panic_in_an_access_does_not_change_later_ones() {
        let stored = Stored::new(packed(&index()));
        let opened = LazyIndex::new(Arc::new(stored.open(u64::MAX).expect("opened")));
        let panics = || opened.try_read(|_| -> bool { panic!("on purpose") });
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
        assert!(panicked.is_err());
        assert_eq!(opened.read(|index| names(index).len()), Ok(FILES + 7));
    }

    #[test]
    fn row_missing_in_an_inner_access_fails_the_outer_one() {
        let stored = Stored::new(packed(&index()));
        let opened = LazyIndex::new(Arc::new(stored.open(u64::MAX).expect("opened")));
        let reads = stored.reads.load(Ordering::SeqCst);
        let outer = opened.try_read(|_| drop(opened.read(names)));
        assert_eq!(outer, Err(MissingRow::NotLoaded));
        assert_eq!(
            stored.reads.load(Ordering::SeqCst),
            reads,
            "it may not wait"
        );
    }

    #[test]
    fn spans_and_checksums_that_cannot_be_loaded_are_errors() {
        let mut builder = Builder::new(Options::default());
        for number in 0..FILES {
            let member = file(&name(number), 0..1);
            builder.add_member(&member).expect("placed");
        }
        let plain = Extent::with_len(Plain(0), 1);
        builder.add_span(plain, Some(&[1]), None);
        let stored = Stored::new(packed(&builder.finish(Origin {
            plain_bytes: 1,
            ..Origin::default()
        })));
        let opened = stored.open(u64::MAX).expect("opened");
        stored.is_away.store(true, Ordering::SeqCst);
        let missing = MissingRow::Unavailable;
        assert_eq!(opened.is_hashed(), Err(missing));
        assert_eq!(opened.span(0), Err(missing));
        assert_eq!(opened.span_checksums(0).err(), Some(missing));
        assert_eq!(LazyIndex::new(&opened).tree().err(), Some(missing));
    }

    #[test]
    fn threads_that_miss_the_same_rows_share_one_request() {
        let stored = Stored::new(packed(&index()));
        let opened = stored.open(u64::MAX).expect("opened");
        let alone = Stored::new(stored.bytes.to_vec());
        names(&alone.open(u64::MAX).expect("opened"));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(names(&opened).len(), FILES + 7));
            }
        });
        let (shared, single) = (&stored.reads, &alone.reads);
        assert!(shared.load(Ordering::SeqCst) <= single.load(Ordering::SeqCst) + 8);
    }

    #[test]
    fn hostile_published_index_is_an_error_or_harmless() {
        let members = [file("a", 0..1), file("b", 1..2)];
        let packed = packed(&test_support::index(&members));
        for position in 0..packed.len() {
            for value in [0, 1, 0x40, 0x7f, 0xff] {
                let mut damaged = packed.clone();
                damaged[position] = value;
                if let Ok(opened) = Stored::new(damaged).open(1 << 20) {
                    drop(LazyIndex::new(&opened).read(names));
                    drop(opened.load_all_rows());
                }
            }
        }
        for len in 0..packed.len() {
            assert!(Stored::new(packed[..len].to_vec()).open(1 << 20).is_err());
        }
    }

    #[test]
    fn frames_of_other_lengths_are_refused() {
        let packed = packed(&test_support::index(&[file("a", 0..1)]));
        for len in [0, 1, 2 << 10, 8 << 20, 100_000_u32] {
            let mut other = packed.clone();
            other[20..24].copy_from_slice(&len.to_le_bytes());
            assert!(Stored::new(other).open(1 << 20).is_err(), "{len}");
        }
    }

    #[test]
    fn published_index_beyond_the_memory_limit_is_refused() {
        let stored = Stored::new(packed(&index()));
        let refused = stored.open(1000).expect_err("too long");
        assert!(matches!(refused, Error::TooMuchMemory(_)), "{refused}");
    }
}
