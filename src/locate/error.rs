//! Errors of opening a SOURCE.

use crate::archive::OpenError;
use crate::base::sha256::Sha256;
use crate::image;
use crate::layers::LayeredArchiveError;
use crate::source;
use crate::source::documents::MAX_LAYERS;

/// Maximum number of parts of one joined source.
pub(super) const MAX_PARTS: usize = 1000;

/// Reason why a SOURCE cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its bytes cannot be read.
    #[error(transparent)]
    Source(#[from] source::Error),
    /// The archive cannot be opened.
    #[error(transparent)]
    Archive(#[from] OpenError),
    /// The layers cannot be opened or merged.
    #[error(transparent)]
    Layers(#[from] LayeredArchiveError),
    /// The image cannot be opened.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// An archive that contains it cannot be opened.
    #[error("the archive around SOURCE")]
    EnclosingArchive(#[source] OpenError),
    /// The system cannot start a thread.
    #[error("cannot start a thread")]
    Threads(#[source] std::io::Error),
    /// The text is empty.
    #[error("SOURCE is empty (name a path or a URL)")]
    Empty,
    /// An image has no path.
    #[error("SOURCE has no path (write {0}:PATH)")]
    NoImagePath(&'static str),
    /// A URL is given for an image in a directory.
    #[error(
        "{0}: is for directories on this machine (put the image into an archive for oci-archive:URL)"
    )]
    ImageDirectoryUrl(&'static str),
    /// An image was expected.
    #[error(
        "SOURCE names no image (write oci://REGISTRY/REPOSITORY, oci-archive:FILE, docker-archive:FILE \
         or oci:DIR)"
    )]
    NotAnImage,
    /// An image was expected, and the registry has an archive.
    #[error("{0}: it is an archive, not an image")]
    ArtifactAsImage(String),
    /// One archive was expected.
    #[error("SOURCE is an image, which consists of several archives")]
    ImageAsArchive,
    /// A part of standard input is wanted.
    #[error(
        "a part of an archive needs random access, which standard input does not offer (store it in \
         a file first)"
    )]
    PartOfStdin,
    /// An image in standard input is wanted.
    #[error(
        "an image needs random access, which standard input does not offer (store it in a file first)"
    )]
    ImageInStdin,
    /// Several layers are standard input.
    #[error("standard input can only be one of the layers")]
    StdinTwice,
    /// A range exceeds its source.
    #[error("{location}: {} bytes from {start}: it has only {all} bytes", .len.map_or_else(|| "the".to_owned(), |len| len.to_string()))]
    OutOfRange {
        /// Location of the source, without secrets.
        location: String,
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes; `None` for all up to the end.
        len: Option<u64>,
        /// Length of the source.
        all: u64,
    },
    /// A range of a source cannot be opened.
    #[error("{name}")]
    Slice {
        /// Name of the range, without secrets.
        name: String,
        /// The reason.
        #[source]
        error: source::Error,
    },
    /// Mirrors are given for a joined source.
    #[error("--mirror-url cannot be used with join:, because it names one URL (leave it out)")]
    MirrorsOfParts,
    /// Parts of a joined source are URLs, and requests are forbidden.
    #[error(
        "join: with URLs needs requests, because the versions of its parts are not saved (leave --offline out)"
    )]
    OfflineParts,
    /// The parts of a joined source exceed their limit.
    #[error("a joined source can have {MAX_PARTS} parts, and not more")]
    TooManyParts,
    /// The image has another digest.
    #[error("{location}: the image's digest is sha256:{found}, not sha256:{expected}")]
    ImageDigestMismatch {
        /// Location of the image, without secrets.
        location: String,
        /// The expected digest.
        expected: Sha256,
        /// The image's digest.
        found: Sha256,
    },
    /// An index file is given for an image.
    #[error(
        "{0} cannot be used with an image, because each layer has its own index (leave it out)"
    )]
    IndexOfImage(&'static str),
    /// An index is to be published, and there is no place for it.
    #[error(
        "--publish needs an archive at a path or at a URL without a query, or an image in a registry \
         (write the index with --output, and upload that)"
    )]
    NoPlaceForIndex,
    /// A name in a registry means another image than the one that was indexed.
    #[error("{0}: it means another image now than when it was indexed (run it again)")]
    ImageChanged(String),
    /// An index cannot be brought into the framed form.
    #[error("cannot pack the index")]
    PackIndex(#[source] std::io::Error),
    /// A compression format is given for an image.
    #[error(
        "--compression cannot be used with an image, because each layer has its own format (leave it \
         out)"
    )]
    CompressionOfImage,
    /// The layers exceed their limit.
    #[error("{0} layers are more than the {MAX_LAYERS} that one tree can have")]
    TooManyLayers(usize),
}

impl Error {
    /// Whether a flag does not fit SOURCE.
    pub fn is_usage_error(&self) -> bool {
        matches!(
            self,
            Self::MirrorsOfParts
                | Self::Source(source::Error {
                    cause: source::Cause::NotMirrored,
                    ..
                })
                | Self::OfflineParts
                | Self::IndexOfImage(_)
                | Self::NoPlaceForIndex
                | Self::CompressionOfImage
        )
    }

    /// As [`OpenError::is_out_of_memory`], also of a layer or an enclosing archive.
    #[cfg(feature = "python")]
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Archive(error)
            | Self::EnclosingArchive(error)
            | Self::Layers(LayeredArchiveError::Layer(error)) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
