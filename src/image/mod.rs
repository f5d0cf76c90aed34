//! Container images as they lie in archives and directories: which layers they have, and what they
//! run.
//!
//! An image in an archive is not unpacked: each of its files is a stretch of the archive, or is read
//! through it ([`Archive::file_as_source`](crate::archive::Archive::file_as_source)), and a layer is an
//! archive in its turn. Documents are verified before they are looked into, layers when all of their
//! bytes go by.

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

/// An image, found and verified but for the bytes of its layers.
#[derive(Debug)]
pub struct Image {
    /// Where it is, without secrets.
    pub location: String,
    /// What it is called there.
    pub names: Vec<String>,
    /// Of its manifest; of its configuration, where there is none.
    pub digest: Sha256,
    /// Of its configuration.
    pub config_digest: Sha256,
    /// What it says of itself.
    pub config: Config,
    /// The lowest first.
    pub layers: Vec<Layer>,
}

/// A layer: an archive of what it adds to those below it.
#[derive(Debug)]
pub struct Layer {
    /// Its bytes. Where its digest is known, it is known by that.
    pub source: Arc<dyn Source>,
    /// Of its packed bytes, if it is known.
    pub digest: Option<Sha256>,
    /// Its packed bytes.
    pub size: u64,
    /// What kind of an archive it is, if that is said.
    pub media_type: Option<String>,
}

/// Which image is wanted.
struct ImageSelector {
    /// As what it was named.
    kind: &'static str,
    name: Option<String>,
    platform: Option<Platform>,
}

impl ImageSelector {
    /// Whether an image whose configuration says it is for `platform` will do. Many say no variant, also
    /// where the index does that led to them: then any is right.
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

/// The image that `reference` names in `layout`: the one for `platform`, or for this machine when none
/// is given.
///
/// Only for threads outside the runtime.
///
/// # Errors
/// When it is not there, is none, or is not what its digests say.
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

/// What an image with these `names` can be asked for by: its digest, if it has none.
fn display_names(names: &[String], digest: Option<Sha256>) -> Vec<String> {
    match digest {
        Some(digest) if names.is_empty() => vec![format!("sha256:{digest}")],
        _ => names.to_vec(),
    }
}

/// What layer `number` of `count` is called.
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
