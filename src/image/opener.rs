//! Steps of opening an image that all kinds of images share.

use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;

use super::config::Config;
use super::error::{Cause, Error};
use super::layout::Layout;
use crate::base::extent::{Extent, Packed};
use serde::{Deserialize, Serialize};

use crate::base::sha256::Sha256;
use crate::source::documents::{Descriptor, Platform};
use crate::source::{self, Slice, Source};

/// How an image is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Transport {
    /// An OCI image layout in a directory.
    Oci,
    /// An OCI image layout in a tar archive.
    OciArchive,
    /// An archive of `docker save`.
    DockerArchive,
}

impl Transport {
    /// Returns the transport with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Oci, Self::OciArchive, Self::DockerArchive];
        all.into_iter().find(|transport| transport.name() == name)
    }

    /// The prefix before the first colon of a SOURCE.
    pub fn name(self) -> &'static str {
        match self {
            Self::Oci => "oci",
            Self::OciArchive => "oci-archive",
            Self::DockerArchive => "docker-archive",
        }
    }
}

/// An image whose documents are verified. The bytes of its layers are not yet.
#[derive(Debug)]
pub struct Image {
    /// Its location, without secrets.
    pub location: String,
    /// Its names there.
    pub names: Vec<String>,
    /// Digest of its manifest, or of its configuration if there is no manifest.
    pub digest: Sha256,
    /// Digest of its configuration.
    pub config_digest: Sha256,
    /// Its configuration.
    pub config: Config,
    /// Its layers, the lowest first.
    pub layers: Vec<Layer>,
}

/// The image or the artifact that a name in a registry means.
#[derive(Debug)]
pub(crate) enum ImageOrArtifact {
    /// An image.
    Image(Box<Image>),
    /// An artifact that consists of one archive.
    Artifact {
        /// Its location, without secrets.
        location: String,
        /// Digest of its manifest.
        digest: Sha256,
        /// The archive, pinned by its digest.
        archive: Arc<dyn Source>,
    },
}

/// A layer: an archive of changes to the layers below it.
#[derive(Debug)]
pub struct Layer {
    /// The packed bytes. If the digest is known, it identifies the source.
    pub source: Arc<dyn Source>,
    /// Digest of the packed bytes, if known.
    pub digest: Option<Sha256>,
    /// Length of the packed bytes.
    pub size: u64,
    /// Its media type, if given.
    pub media_type: Option<String>,
}

/// Expected digests of a layer, as stored and decompressed, as far as a trusted document has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digests {
    pub(super) packed: Option<Sha256>,
    pub(super) plain: Option<Sha256>,
}

pub(super) struct ImageOpener<'a> {
    pub(super) layout: &'a Layout,
    /// Options of requests for layers that a layout lacks.
    pub(super) options: Option<&'a source::Options>,
    pub(super) network: &'a Handle,
    pub(super) transport: Transport,
    /// Name or digest of the image, if given.
    pub(super) name: Option<&'a str>,
    pub(super) platform: Option<&'a Platform>,
}

impl ImageOpener<'_> {
    pub(super) fn error(&self, cause: Cause) -> Error {
        Error {
            location: self.layout.location().to_owned(),
            document: None,
            cause: Box::new(cause),
        }
    }

    /// Reads the document at `path`, which marks an image of this kind.
    pub(super) fn read_marker(&self, path: &'static str) -> Result<Bytes, Error> {
        let document = self.layout.read_document(path, self.network);
        document.map_err(|error| match *error.cause {
            Cause::Missing => {
                let (missing, kind) = (path, self.transport.name());
                self.error(Cause::NotAnImage { missing, kind })
            }
            _ => error,
        })
    }

    /// Parses the configuration `bytes` from `path`, and checks that it is for the wanted platform.
    pub(super) fn parse_config(&self, path: &str, bytes: &[u8]) -> Result<Config, Error> {
        let config = Config::parse(bytes).map_err(|cause| self.layout.error(path, cause))?;
        check_platform(&config.platform, self.platform).map_err(|cause| self.error(cause))?;
        Ok(config)
    }

    /// Checks that the configuration at `path` has digests for `count` layers.
    pub(super) fn check_layer_count(
        &self,
        path: &str,
        config: &Config,
        count: usize,
    ) -> Result<(), Error> {
        let diff_id_count = config.diff_ids.len();
        if diff_id_count == count {
            return Ok(());
        }
        let what = format!("it has digests of {diff_id_count} layers, and the image has {count}");
        Err(self.layout.error(path, Cause::Malformed(what)))
    }

    /// The bytes of `layer`, which may be on other servers if a layout lacks them.
    pub(super) fn layer_file(&self, layer: &Descriptor) -> Result<Arc<dyn Source>, Error> {
        let file = self.layout.blob(layer);
        let Some(options) = self.options.filter(|_| !layer.urls.is_empty()) else {
            return file;
        };
        file.or_else(|error| match *error.cause {
            Cause::Missing => {
                let (content, name) = ((layer.digest, layer.size), self.layout.location());
                let opened = source::open_foreign(content, &layer.urls, name, options.clone());
                opened.map_err(|error| self.layout.error(&layer.blob_path(), error))
            }
            _ => Err(error),
        })
    }

    /// Layer `number` of `count`: the file at `path`, with the known digests of its bytes.
    pub(super) fn layer(
        &self,
        (file, path): (Arc<dyn Source>, &str),
        (number, count): (usize, usize),
        digests: Digests,
        media_type: Option<String>,
    ) -> Result<Layer, Error> {
        let size = file.fingerprint().len.unwrap_or_default();
        let whole = Extent::with_len(Packed(0), size);
        let name = layer_name(self.layout.location(), number, count, digests.packed);
        let source = Slice::new(file, whole, &name);
        let mut source = source.map_err(|error| self.layout.error(path, error))?;
        if let Some(digest) = digests.packed {
            source = source.with_digest(digest);
        }
        if let Some(digest) = digests.plain {
            source = source.with_plain_digest(digest);
        }
        Ok(Layer {
            source: Arc::new(source),
            digest: digests.packed,
            size,
            media_type,
        })
    }
}

/// Checks that a configuration for `platform` fits the wanted one. Many have no variant and then fit any.
fn check_platform(platform: &Platform, wanted: Option<&Platform>) -> Result<(), Cause> {
    let Some(wanted) = wanted else {
        return Ok(());
    };
    let completed = Platform {
        variant: platform.variant.clone().or(wanted.variant.clone()),
        ..platform.clone()
    };
    let distance = completed.distance(wanted);
    distance.map(drop).ok_or_else(|| Cause::NoSuchPlatform {
        wanted: wanted.clone(),
        known: vec![platform.to_string()],
    })
}

/// The `names` of an image; its digest if it has none.
pub(super) fn display_names(names: &[String], digest: Option<Sha256>) -> Vec<String> {
    match digest {
        Some(digest) if names.is_empty() => vec![format!("sha256:{digest}")],
        _ => names.to_vec(),
    }
}

fn layer_name(location: &str, number: usize, count: usize, digest: Option<Sha256>) -> String {
    let digits = digest.map(|digest| digest.to_string());
    let digits = digits.as_deref().and_then(|digits| digits.get(..12));
    let digits = digits.map_or_else(String::new, |digits| format!(" ({digits})"));
    format!("{location}: layer {} of {count}{digits}", number + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_without_a_variant_matches_any_variant() {
        let platform = |text: &str| text.parse::<Platform>().expect("a platform");
        let fits = |wanted: &str, said: &str| {
            check_platform(&platform(said), Some(&platform(wanted))).is_ok()
        };
        assert!(fits("linux/arm/v6", "linux/arm"));
        assert!(fits("linux/arm/v6", "linux/arm/v6"));
        assert!(!fits("linux/arm/v6", "linux/arm/v7"));
        assert!(!fits("linux/arm/v6", "linux/arm64"));
    }
}
