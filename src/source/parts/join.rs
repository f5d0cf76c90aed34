//! Several sources as one source.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::FutureExt;

use crate::base::buffer_pool::{Buffer, BufferPool};
use crate::base::extent::Packed;
use crate::source::fingerprint::hash_texts;
use crate::source::read_handle::ReadCommand;
use crate::source::{
    Access, Cause, Error, Fingerprint, IsIntact, ReadHandle, ReadMode, Reading, Source, SourceInfo,
    Validator,
};

/// The bytes of several sources, one after the other. Errors name the part, because they arise there.
#[derive(Debug)]
pub(crate) struct Join {
    parts: Vec<Part>,
    info: SourceInfo,
}

#[derive(Debug)]
struct Part {
    source: Arc<dyn Source>,
    /// Offsets of its first byte, and of the one after its last, in the whole.
    start: u64,
    end: u64,
}

impl Join {
    /// Joins `parts` in this order. There must be at least one, each of known length and readable more than once.
    pub(crate) fn new(parts: Vec<Arc<dyn Source>>) -> Result<Self, Error> {
        let (mut len, mut joined) = (0_u64, Vec::new());
        for source in parts {
            let refused = |cause| Error::new(source.location(), cause);
            let part_len = source.fingerprint().len;
            let part_len = part_len.filter(|_| source.access() == Access::Ranges);
            let part_len = part_len.ok_or_else(|| refused(Cause::AlreadyRead))?;
            let too_long = || Cause::Damaged("the parts are too long together".to_owned());
            let end = len.checked_add(part_len);
            let end = end.ok_or_else(|| refused(too_long()))?;
            joined.push(Part {
                source,
                start: std::mem::replace(&mut len, end),
                end,
            });
        }
        let first = joined.first().ok_or_else(|| {
            let empty = Cause::Malformed("it has no parts".to_owned());
            Error::new("the joined source", empty)
        })?;
        let name = format!("join:{},…", first.source.location());
        let locators = joined.iter().map(|part| part.source.canonical_location());
        let canonical = format!("join:{}", hash_texts(locators));
        let versions = joined.iter().map(|part| part.source.fingerprint().clone());
        Ok(Self {
            info: SourceInfo {
                location: first.source.info().location.derive(&name, canonical),
                fingerprint: Fingerprint {
                    len: Some(len),
                    validator: Validator::Joined(versions.collect()),
                },
                access: Access::Ranges,
            },
            parts: joined,
        })
    }

    /// Returns the part with the byte at `at`, the offset in it, and how many of `len` bytes it has from there.
    fn part_at(&self, at: u64, len: usize) -> Result<(&dyn Source, Packed, usize), Error> {
        let number = self.parts.partition_point(|part| part.end <= at);
        // A read of no bytes is served by any part.
        let part = self.parts.get(number).or(self.parts.last());
        let in_part = part.filter(|part| at < part.end || len == 0 && at == part.end);
        let part = in_part.ok_or_else(|| Error::new(self.location(), Cause::Truncated))?;
        let left = usize::try_from(part.end - at).unwrap_or(usize::MAX);
        Ok((&*part.source, Packed(at - part.start), left.min(len)))
    }

    /// Reads into `buffer`, part by part, and stops early if the handle says so.
    async fn read_parts(
        &self,
        offset: u64,
        mut buffer: Buffer,
        read_handle: &ReadHandle,
    ) -> Result<Bytes, Error> {
        let len = buffer.len();
        let end = offset
            .checked_add(len as u64)
            .filter(|&end| Some(end) <= self.info.fingerprint.len);
        let end = end.ok_or_else(|| Error::new(self.location(), Cause::Truncated))?;
        let (source, start, here) = self.part_at(offset, len)?;
        if here == len {
            let mode = ReadMode::Controlled(read_handle);
            return source.read(start, buffer, mode).await;
        }
        let (pool, mut filled) = (BufferPool::new(len as u64), 0);
        while offset + (filled as u64) < end {
            let (source, start, here) = self.part_at(offset + filled as u64, len - filled)?;
            let piece = pool.acquire_async(here).await;
            let part_handle = read_handle.for_part();
            let bytes = tokio::select! {
                biased;
                () = wait_for_stop(read_handle) => break,
                read = source.read(start, piece, ReadMode::Controlled(&part_handle)) => read?,
            };
            let target = buffer.get_mut(filled..filled + bytes.len());
            target.unwrap_or_default().copy_from_slice(&bytes);
            filled += bytes.len();
            read_handle.set_received(filled);
            if bytes.len() < here {
                break;
            }
        }
        buffer.truncate(filled);
        Ok(buffer.freeze())
    }

    /// Reads into `buffer`, and then reads part by part past all caches until the whole is intact.
    async fn read_intact(
        &self,
        offset: u64,
        buffer: Buffer,
        is_intact: IsIntact<'_>,
    ) -> Result<Bytes, Error> {
        let len = buffer.len();
        let (source, start, here) = self.part_at(offset, len)?;
        if here == len {
            let mode = ReadMode::Uncached(is_intact);
            return source.read(start, buffer, mode).await;
        }
        let mut whole = self.read_at(Packed(offset), buffer).await?.to_vec();
        let (pool, mut place) = (BufferPool::new(len as u64), 0);
        while place < whole.len() && !is_intact(&whole) {
            let (source, start, here) = self.part_at(offset + place as u64, len - place)?;
            let piece = pool.acquire_async(here).await;
            let with_part = |part: &[u8]| {
                let (before, after) = (whole.get(..place), whole.get(place + part.len()..));
                [before.unwrap_or_default(), part, after.unwrap_or_default()].concat()
            };
            let makes_intact = |part: &[u8]| is_intact(&with_part(part));
            let mode = ReadMode::Uncached(&makes_intact);
            let part = source.read(start, piece, mode).await?;
            whole = with_part(&part);
            place += here;
        }
        Ok(whole.into())
    }
}

/// Waits until `read_handle` commands to stop. Cancel safe.
async fn wait_for_stop(read_handle: &ReadHandle) {
    // Only a request in flight can be cut, and this handle has none.
    while read_handle.next_command().await != ReadCommand::Stop {}
}

impl Source for Join {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn read<'a>(&'a self, offset: Packed, buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a> {
        async move {
            let read_handle = match mode {
                ReadMode::Uncached(is_intact) => {
                    return self.read_intact(offset.0, buffer, is_intact).await;
                }
                ReadMode::Controlled(read_handle) => read_handle,
                ReadMode::Whole => &ReadHandle::default(),
            };
            self.read_parts(offset.0, buffer, read_handle).await
        }
        .boxed()
    }

    fn max_concurrent_reads(&self) -> usize {
        let limits = self.parts.iter();
        let limits = limits.map(|part| part.source.max_concurrent_reads());
        limits.min().unwrap_or(usize::MAX)
    }

    fn limit_to_one_read(&self) {
        for part in &self.parts {
            part.source.limit_to_one_read();
        }
    }

    fn response_cost(&self) -> Option<Duration> {
        let costs = self.parts.iter();
        costs.filter_map(|part| part.source.response_cost()).max()
    }

    fn outage(&self) -> Option<&'static str> {
        self.parts.iter().find_map(|part| part.source.outage())
    }

    fn is_remote(&self) -> bool {
        self.parts.iter().any(|part| part.source.is_remote())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use futures_util::StreamExt;

    use super::*;
    use crate::source::{MemorySource, Pipe};

    fn part(bytes: &'static [u8], etag: Option<&str>) -> Arc<dyn Source> {
        let source = MemorySource::new("part", bytes);
        Arc::new(source.with_validator(Validator::from_http(etag, None)))
    }

    fn join() -> Join {
        let parts: [&'static [u8]; 5] = [b"012", b"", b"3", b"45678", b"9"];
        Join::new(parts.map(|bytes| part(bytes, None)).into()).expect("joined")
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(work)
    }

    fn buffer(len: usize) -> Buffer {
        BufferPool::new(100).acquire(len).expect("open")
    }

    // Promises: nested-join
    #[test]
    fn reads_of_joined_source_span_its_parts() {
        let (join, all) = (join(), b"0123456789");
        assert_eq!(join.fingerprint().len, Some(10));
        for start in 0..=10 {
            for end in start..=10 {
                let (offset, len) = (Packed(start as u64), end - start);
                let read = block_on(join.read_at(offset, buffer(len)));
                assert_eq!(read.expect("inside"), all[start..end], "{start}..{end}");
                let mode = ReadMode::Uncached(&|_| true);
                let read = block_on(join.read(offset, buffer(len), mode));
                assert_eq!(read.expect("inside"), all[start..end], "{start}..{end}");
            }
        }
        for (offset, len) in [(0, 11), (10, 1), (u64::MAX, 2)] {
            let beyond = block_on(join.read_at(Packed(offset), buffer(len)));
            let beyond = beyond.map_err(|error| error.cause);
            assert!(matches!(beyond, Err(Cause::Truncated)), "{offset}+{len}");
        }
        let pieces: Vec<_> = block_on(join.stream().collect());
        let bytes: Vec<u8> = pieces.into_iter().flat_map(Result::unwrap).collect();
        assert_eq!(bytes, all);
    }

    /// Several servers of one part. The first sent wrong bytes.
    #[derive(Debug)]
    struct Servers {
        first: Arc<dyn Source>,
        candidates: Vec<&'static [u8]>,
        blamed: crate::base::sync::Mutex<Vec<usize>>,
    }

    impl Source for Servers {
        fn info(&self) -> &SourceInfo {
            self.first.info()
        }

        fn read<'a>(&'a self, at: Packed, buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a> {
            let ReadMode::Uncached(is_intact) = mode else {
                return self.first.read(at, buffer, mode);
            };
            let of_len = |bytes: &'static [u8]| bytes.get(..buffer.len()).expect("long enough");
            let mut candidates = self.candidates.iter().map(|bytes| of_len(bytes));
            let intact = candidates.position(is_intact);
            self.blamed.lock().extend(0..intact.unwrap_or(0));
            let bytes = of_len(self.candidates[intact.unwrap_or(0)]);
            async move { Ok(Bytes::from_static(bytes)) }.boxed()
        }
    }

    // Promises: mirror-same
    #[test]
    fn wrong_bytes_are_blamed_on_servers_of_their_own_part() {
        let servers = |candidates: &[&'static [u8]]| {
            Arc::new(Servers {
                first: part(candidates[0], None),
                candidates: candidates.to_vec(),
                blamed: crate::base::sync::Mutex::default(),
            })
        };
        for (first, second, blamed) in [
            ([b"abc", b"abc"], [b"xef", b"def"], [vec![], vec![0]]),
            ([b"xbc", b"abc"], [b"def", b"def"], [vec![0], vec![]]),
            ([b"abc", b"abc"], [b"def", b"def"], [vec![], vec![]]),
        ] {
            let first = servers(&first.map(|bytes| &bytes[..]));
            let second = servers(&second.map(|bytes| &bytes[..]));
            let parts = vec![Arc::clone(&first) as _, Arc::clone(&second) as _];
            let join = Join::new(parts).expect("joined");
            let mode = ReadMode::Uncached(&|bytes| bytes == b"abcdef");
            let reading = join.read(Packed(0), buffer(6), mode);
            assert_eq!(block_on(reading).expect("read"), b"abcdef"[..]);
            assert_eq!(
                [&first, &second].map(|part| part.blamed.lock().clone()),
                blamed
            );
        }
    }

    #[test]
    fn stopped_read_of_joined_source_returns_a_prefix() {
        let join = join();
        let read_handle = ReadHandle::default();
        read_handle.stop();
        let mode = ReadMode::Controlled(&read_handle);
        let read = block_on(join.read(Packed(0), buffer(10), mode));
        assert_eq!(read.expect("stopped"), b""[..]);
    }

    // Promises: nested-join
    #[test]
    fn joined_source_is_identified_by_all_parts_in_order() {
        let named = |etags: [Option<&str>; 2]| {
            let parts = etags.map(|etag| part(b"same", etag));
            Join::new(parts.into()).expect("joined").info
        };
        let strong = named([Some("\"a\""), Some("\"b\"")]);
        assert!(strong.fingerprint.is_strong());
        let text = strong.fingerprint.to_string();
        let others = [
            named([Some("\"b\""), Some("\"a\"")]),
            named([Some("\"a\""), None]),
            named([None, None]),
        ];
        for other in others {
            assert_ne!(other.fingerprint.to_string(), text);
            assert_eq!(
                other.fingerprint.is_strong(),
                other.fingerprint.doubt().is_none()
            );
        }
        assert!(!named([Some("\"a\""), None]).fingerprint.is_strong());
    }

    // Promises: nested-join
    #[test]
    fn file_that_changes_is_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = ["one", "two"].map(|name| directory.path().join(name));
        let open = |path: &PathBuf| {
            std::fs::write(path, "01234").expect("written");
            let opened = crate::source::local::open(path, Arc::default());
            opened.expect("a file")
        };
        let join = Join::new(paths.iter().map(open).collect()).expect("joined");
        std::fs::write(&paths[1], "0123456789").expect("written");
        let read = block_on(join.read_at(Packed(0), buffer(10)));
        let error = read.expect_err("another version");
        assert!(matches!(error.cause, Cause::Changed), "{}", error.cause);
        assert_eq!(error.location, paths[1].display().to_string());
    }

    // Promises: nested-join
    #[test]
    fn part_that_is_read_once_cannot_be_joined() {
        let once = Arc::new(Pipe::new("pipe", std::io::empty(), Arc::default()));
        let refused = Join::new(vec![part(b"1", None), once]).expect_err("a pipe");
        assert!(matches!(refused.cause, Cause::AlreadyRead));
        assert_eq!(refused.location, "pipe");
        assert!(Join::new(Vec::new()).is_err());
    }
}
