//! The targets: each parses arbitrary bytes and checks what must then hold.

mod codec;
mod disk_cache;
mod estargz;
mod image;
mod index;
mod knobs;
mod private;
mod tar;
mod texts;
#[path = "../../support/walk.rs"]
mod walk;
mod ztoc;

use tarfs::codec::Compression;

use crate::seeds;

/// A function that parses input from outside the program.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Panics when a promise is broken.
    pub(crate) run: fn(&[u8]),
    /// Bytes that are well-formed, or nearly so.
    pub(crate) seeds: fn() -> Vec<Vec<u8>>,
}

impl Target {
    pub(crate) const ALL: &[Self] = &[
        Self::new("tar", tar::run, seeds::tar),
        Self::new(
            "gzip",
            |bytes| codec::run(Compression::Gzip, bytes),
            || seeds::packed(Compression::Gzip),
        ),
        Self::new(
            "lz4",
            |bytes| codec::run(Compression::Lz4, bytes),
            || seeds::packed(Compression::Lz4),
        ),
        Self::new(
            "zstd",
            |bytes| codec::run(Compression::Zstd, bytes),
            || seeds::packed(Compression::Zstd),
        ),
        Self::new(
            "xz",
            |bytes| codec::run(Compression::Xz, bytes),
            || seeds::packed(Compression::Xz),
        ),
        Self::new(
            "bzip2",
            |bytes| codec::run(Compression::Bzip2, bytes),
            || seeds::packed(Compression::Bzip2),
        ),
        Self::new("resume", codec::resume_anywhere, seeds::seek_points),
        Self::new("index", index::run, seeds::indexes),
        Self::new("ztoc", ztoc::run, || vec![crate::soci::ztoc()]),
        Self::new("estargz", estargz::run, || vec![estargz::SEED.to_vec()]),
        Self::new("disk_cache", disk_cache::run, disk_cache::seeds),
        Self::new("profile", private::profile, seeds::profiles),
        Self::new("answer", private::answer, seeds::answers),
        Self::new("packet", private::packet, seeds::packets),
        Self::new("image", image::run, seeds::images),
        Self::new("texts", texts::run, seeds::texts),
    ];

    const fn new(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self { name, run, seeds }
    }
}
