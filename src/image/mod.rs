//! Container images in archives and directories: their layers and their configuration.
//!
//! An image in an archive is not unpacked. Each of its files is a range of the archive, or is read through it
//! ([`Archive::file_as_source`](crate::archive::Archive::file_as_source)). A layer is itself an archive.
//! Documents are verified before parsing, and layers once all their bytes are read.

mod bounded_serde;
mod config;
mod docker;
mod error;
mod image_ref;
mod layout;
mod manifest;
mod oci;
mod platform;
mod runtime_spec;
mod seccomp;
mod user_lookup;

use std::sync::Arc;

use tokio::runtime::Handle;

use crate::base::sha256::Sha256;
use crate::source::Source;

pub use config::{Config, Execution};
pub use error::{Cause, Error};
pub use image_ref::{ImageRef, Transport};
pub use layout::Layout;
pub use manifest::{
    Descriptor, DescriptorKind, DockerImage, Manifest, parse_docker_manifest, parse_index,
    parse_manifest,
};
pub use platform::{ParsePlatformError, Platform};
pub use runtime_spec::{
    BundleOptions, DEFAULT_CAPABILITIES, VOLUMES_DIR, hides_system_directory, runtime_spec,
    volume_directory,
};
pub use seccomp::SeccompProfile;
pub use user_lookup::User;

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

/// Selects an image.
struct ImageSelector {
    /// The kind that the user named.
    kind: &'static str,
    name: Option<String>,
    platform: Option<Platform>,
}

impl ImageSelector {
    /// Checks that a configuration for `platform` fits the wanted one.
    ///
    /// Many configurations omit the variant, even if the index has one. Then any variant fits.
    fn check_platform(&self, platform: &Platform) -> Result<(), Cause> {
        let Some(wanted) = &self.platform else {
            return Ok(());
        };
        let completed = Platform {
            variant: platform.variant.clone().or(wanted.variant.clone()),
            ..platform.clone()
        };
        completed
            .distance(wanted)
            .map(drop)
            .ok_or_else(|| Cause::NoSuchPlatform {
                wanted: wanted.clone(),
                known: vec![platform.to_string()],
            })
    }
}

/// Opens the image `reference` in `layout`, for `platform` or else for this machine.
///
/// Only for threads outside the runtime.
///
/// # Errors
/// When it is missing, invalid, or does not match its digests.
pub fn open(
    reference: &ImageRef,
    layout: &Layout,
    platform: Option<&Platform>,
    network: &Handle,
) -> Result<Image, Error> {
    let selector = ImageSelector {
        kind: reference.transport.name(),
        name: reference.name.clone(),
        platform: platform.cloned(),
    };
    match reference.transport {
        Transport::Oci | Transport::OciArchive => oci::open(layout, &selector, network),
        Transport::DockerArchive => docker::open(layout, &selector, network),
    }
}

/// The `names` of an image; its digest if it has none.
fn display_names(names: &[String], digest: Option<Sha256>) -> Vec<String> {
    match digest {
        Some(digest) if names.is_empty() => vec![format!("sha256:{digest}")],
        _ => names.to_vec(),
    }
}

/// Display name of layer `number` of `count`.
fn layer_name(layout: &Layout, number: usize, count: usize, digest: Option<Sha256>) -> String {
    let location = layout.location();
    let digits = digest.map(|digest| digest.to_string());
    match digits.as_deref().and_then(|digits| digits.get(..12)) {
        Some(digits) => format!("{location}: layer {} of {count} ({digits})", number + 1),
        None => format!("{location}: layer {} of {count}", number + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_without_a_variant_matches_any_variant() {
        let platform = |text: &str| text.parse::<Platform>().expect("a platform");
        let fits = |wanted: &str, said: &str| {
            let selector = ImageSelector {
                kind: "oci",
                name: None,
                platform: Some(platform(wanted)),
            };
            selector.check_platform(&platform(said)).is_ok()
        };
        assert!(fits("linux/arm/v6", "linux/arm"));
        assert!(fits("linux/arm/v6", "linux/arm/v6"));
        assert!(!fits("linux/arm/v6", "linux/arm/v7"));
        assert!(!fits("linux/arm/v6", "linux/arm64"));
    }
}
