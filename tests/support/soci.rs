//! A layer and its SOCI ztoc, as `scripts/lib/make-ztoc` makes it with spans of 32,768 bytes.
//!
//! The layer has all types of entries, and a deflate block for each 24,000 bytes.

pub(crate) fn layer() -> Vec<u8> {
    include_bytes!("soci/layer.tar.gz").to_vec()
}

pub(crate) fn ztoc() -> Vec<u8> {
    let packed = include_bytes!("soci/ztoc.zst");
    zstd::decode_all(&packed[..]).expect("zstd")
}
