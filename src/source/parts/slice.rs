//! A range of another source as a source.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;

use crate::base::buffer_pool::Buffer;
use crate::base::extent::{Extent, Packed};
use crate::base::random_reads::Wait;
use crate::base::sha256::Sha256;
use crate::source::{
    Access, Cause, Error, Fingerprint, ReadMode, Reading, Source, SourceInfo, Validator,
};

/// A range of another source. Errors name the other source, because they arise there.
#[derive(Debug)]
pub(crate) struct Slice {
    whole: Arc<dyn Source>,
    extent: Extent<Packed>,
    info: SourceInfo,
}

impl Slice {
    /// The bytes `extent` of `whole`, named `name`, with a canonical location and a version derived from it. `whole`
    /// must be readable more than once, have a known length, and not end before `extent` does.
    pub(crate) fn new(
        whole: Arc<dyn Source>,
        extent: Extent<Packed>,
        name: &str,
    ) -> Result<Self, Error> {
        let refused = |cause| Err(Error::new(whole.location(), cause));
        if whole.access() == Access::Stream {
            return refused(Cause::AlreadyRead);
        }
        if whole
            .fingerprint()
            .len
            .is_none_or(|len| extent.end().0 > len)
        {
            return refused(Cause::Truncated);
        }
        let start = extent.start().0;
        let place = format!(
            "part:{start}+{}:{}",
            extent.len(),
            whole.canonical_location()
        );
        Ok(Self {
            info: SourceInfo {
                location: whole.info().location.derive(name, place),
                fingerprint: Fingerprint {
                    len: Some(extent.len()),
                    validator: Validator::Part {
                        start,
                        whole: Box::new(whole.fingerprint().clone()),
                    },
                },
                access: Access::Ranges,
            },
            whole,
            extent,
        })
    }

    /// Pins the slice by the trusted digest of its bytes, which becomes its canonical location. A reader of all bytes
    /// compares the digest.
    #[must_use]
    pub(crate) fn with_digest(mut self, sha256: Sha256) -> Self {
        let location = &self.info.location;
        self.info.location = location.derive(location.as_str(), format!("sha256:{sha256}"));
        self.info.fingerprint.validator = Validator::Digest(sha256);
        self
    }

    /// Pins the decompressed bytes by the digest `sha256`, which a scan compares. A saved index is used
    /// only if the scan that created it compared this digest.
    #[must_use]
    pub(crate) fn with_plain_digest(mut self, sha256: Sha256) -> Self {
        let packed = Box::new(self.info.fingerprint.clone());
        self.info.fingerprint.validator = Validator::PlainDigest { sha256, packed };
        self
    }

    fn offset_in_whole(&self, offset: Packed, len: usize) -> Result<Packed, Error> {
        let truncated = || Error::new(self.location(), Cause::Truncated);
        let end = offset.0.checked_add(len as u64);
        end.filter(|&end| end <= self.extent.len())
            .map(|_| Packed(self.extent.start().0 + offset.0))
            .ok_or_else(truncated)
    }
}

impl Source for Slice {
    fn info(&self) -> &SourceInfo {
        &self.info
    }

    fn outage(&self) -> Option<&'static str> {
        self.whole.outage()
    }

    fn read<'a>(&'a self, offset: Packed, buffer: Buffer, mode: ReadMode<'a>) -> Reading<'a> {
        match self.offset_in_whole(offset, buffer.len()) {
            Ok(offset) => self.whole.read(offset, buffer, mode),
            Err(error) => std::future::ready(Err(error)).boxed(),
        }
    }

    fn can_read_inline(&self) -> bool {
        self.whole.can_read_inline()
    }

    fn read_inline(
        &self,
        offset: Packed,
        bytes: &mut [u8],
        wait: Wait,
    ) -> Option<Result<(), Error>> {
        match self.offset_in_whole(offset, bytes.len()) {
            Ok(offset) => self.whole.read_inline(offset, bytes, wait),
            Err(error) => Some(Err(error)),
        }
    }

    fn max_concurrent_reads(&self) -> usize {
        self.whole.max_concurrent_reads()
    }

    fn limit_to_one_read(&self) {
        self.whole.limit_to_one_read();
    }

    fn response_cost(&self) -> Option<Duration> {
        self.whole.response_cost()
    }

    fn is_remote(&self) -> bool {
        self.whole.is_remote()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream::StreamExt;

    use bytes::Bytes;

    use super::*;
    use crate::base::buffer_pool::BufferPool;
    use crate::source::{MemorySource, Pipe};

    fn whole(bytes: &'static [u8]) -> Arc<dyn Source> {
        Arc::new(MemorySource::new("whole", bytes))
    }

    fn slice(start: u64, len: u64) -> Result<Slice, Error> {
        let extent = Extent::with_len(Packed(start), len);
        Slice::new(whole(b"0123456789"), extent, "part")
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(work)
    }

    fn read(slice: &Slice, offset: u64, len: usize) -> Result<Bytes, Cause> {
        let buffer = BufferPool::new(100).acquire(len).expect("open");
        let read = block_on(slice.read_at(Packed(offset), buffer));
        read.map_err(|error| error.cause)
    }

    // Promises: image-archive
    #[test]
    fn slice_reads_stay_within_its_bounds() {
        let part = slice(3, 4).expect("inside");
        assert_eq!(part.fingerprint().len, Some(4));
        assert_eq!(read(&part, 0, 4).expect("all of it"), b"3456"[..]);
        assert_eq!(read(&part, 1, 2).expect("its middle"), b"45"[..]);
        assert_eq!(read(&part, 4, 0).expect("nothing"), b""[..]);
        for (offset, len) in [(0, 5), (4, 1), (u64::MAX, 1), (u64::MAX - 1, 9)] {
            let beyond = read(&part, offset, len);
            assert!(matches!(beyond, Err(Cause::Truncated)), "{offset}+{len}");
        }
        let pieces: Vec<_> = block_on(part.stream().collect());
        let bytes: Vec<u8> = pieces.into_iter().flat_map(Result::unwrap).collect();
        assert_eq!(bytes, b"3456");
    }

    #[test]
    fn slice_beyond_the_source_is_rejected() {
        assert!(slice(3, 7).is_ok());
        for (start, len) in [(3, 8), (11, 0), (u64::MAX, 1), (0, u64::MAX)] {
            let beyond = slice(start, len).map_err(|error| error.cause);
            assert!(matches!(beyond, Err(Cause::Truncated)), "{start}+{len}");
        }
        let once = Arc::new(Pipe::new("pipe", std::io::empty(), Arc::default()));
        let extent = Extent::with_len(Packed(0), 0);
        let part = Slice::new(once, extent, "part").map_err(|error| error.cause);
        assert!(matches!(part, Err(Cause::AlreadyRead)));
    }

    // Promises: image-index
    #[test]
    fn slice_is_identified_by_offset_and_version_or_by_digest() {
        let (one, other) = (slice(3, 4).expect("one"), slice(4, 4).expect("another"));
        assert_ne!(one.canonical_location(), other.canonical_location());
        assert_ne!(
            one.fingerprint().to_string(),
            other.fingerprint().to_string()
        );
        assert!(!one.fingerprint().is_strong(), "the whole is not");
        let digest = Sha256([7; 32]);
        let (one, other) = (one.with_digest(digest), other.with_digest(digest));
        assert_eq!(one.canonical_location(), other.canonical_location());
        assert_eq!(one.fingerprint(), other.fingerprint());
        assert!(one.fingerprint().is_strong());
    }

    // Promises: image-index
    #[test]
    fn index_is_found_only_under_its_plain_digest() {
        let named = || slice(3, 4).expect("inside").with_digest(Sha256([7; 32]));
        let text = |part: &Slice| part.fingerprint().to_string();
        let part = named().with_plain_digest(Sha256([8; 32]));
        assert_eq!(part.canonical_location(), named().canonical_location());
        assert_ne!(text(&part), text(&named()));
        assert_ne!(
            text(&part),
            text(&named().with_plain_digest(Sha256([9; 32])))
        );
        let fingerprint = part.fingerprint();
        assert_eq!(fingerprint.sha256(), Some(Sha256([7; 32])));
        assert_eq!(fingerprint.plain_sha256(), Some(Sha256([8; 32])));
        assert!(fingerprint.is_strong());
        let weak = slice(3, 4).expect("inside");
        assert_eq!(weak.fingerprint().plain_sha256(), None);
        let weak = weak.with_plain_digest(Sha256([8; 32]));
        assert_eq!(weak.fingerprint().sha256(), None);
        assert!(!weak.fingerprint().is_strong());
    }
}
