//! An archive inside another one.

use bytes::Bytes;

use super::packing::Packing;
use super::raw::Archive;
use super::rng::Rng;

/// Content of the file in the innermost archive.
pub(crate) fn content() -> Vec<u8> {
    Rng::new(3).text(400_000)
}

pub(crate) fn inner(packing: Packing) -> Bytes {
    let plain = Archive::new().directory("d/").file("d/f", content()).end();
    packing.pack(&plain.into())
}

/// The archive behind other files, and behind a link.
pub(crate) fn outer(packing: Packing) -> Bytes {
    let plain = Archive::new()
        .file("before", Rng::new(1).bytes(300_000))
        .file("kept/inner", inner(Packing::Gzip))
        .file("after", Rng::new(2).bytes(3_000_000))
        .symlink("latest", "kept/inner")
        .end();
    packing.pack(&plain.into())
}
