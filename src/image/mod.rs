//! Container images in archives, directories and registries: their layers and their configuration.
//!
//! An image's archive is not unpacked. Each of its files is a range of it, or is read through it. Documents
//! are verified before parsing, and layers once all their bytes are read.

mod config;
mod docker;
mod error;
mod layer_indexes;
mod layout;
mod oci;
mod opener;
mod runtime_spec;
mod seccomp;
mod user_lookup;

use std::sync::Arc;

use tokio::runtime::Handle;

use opener::ImageOpener;

use crate::index::store::Store;
use crate::source::{self, Repository};

pub use crate::source::documents::{Descriptor, ParsePlatformError, Platform};

pub use config::{Config, Execution};
pub use error::{Cause, Error};
pub(crate) use layer_indexes::LayerIndexes;
pub(crate) use layout::Layout;
pub(crate) use opener::ImageOrArtifact;
pub use opener::{Image, Layer, Transport};
pub use runtime_spec::{
    BundleOptions, DEFAULT_CAPABILITIES, VOLUMES_DIR, hides_system_directory, runtime_spec,
    volume_directory,
};
pub use seccomp::SeccompProfile;
pub use user_lookup::User;

// For the tests.
#[doc(hidden)]
pub use crate::source::documents::{DescriptorKind, Manifest, parse_index, parse_manifest};
#[doc(hidden)]
pub use docker::{DockerImage, parse_docker_manifest};

/// Opens the image `name` in `layout` for `platform`, or else for this machine, and verifies its digests. Without a
/// name, there must be one image only. Layers that are elsewhere are requested with `options`. Only for threads
/// outside the runtime.
pub(crate) fn open(
    transport: Transport,
    name: Option<&str>,
    layout: &Layout,
    platform: Option<&Platform>,
    (network, options): (&Handle, &source::Options),
) -> Result<Image, Error> {
    let opener = ImageOpener {
        layout,
        options: Some(options),
        network,
        transport,
        name,
        platform,
    };
    match transport {
        Transport::Oci | Transport::OciArchive => oci::open(&opener),
        Transport::DockerArchive => docker::open(&opener),
    }
}

/// Opens the image for `platform`, or else for this machine, or the artifact that `repository` names. Only for
/// threads outside the runtime. `store` has the documents of earlier runs. Digests are verified.
pub(crate) fn open_in_registry(
    repository: Arc<Repository>,
    store: Option<Store>,
    platform: Option<&Platform>,
    network: &Handle,
) -> Result<ImageOrArtifact, Error> {
    oci::open_image_or_artifact(&ImageOpener {
        layout: &Layout::Registry(repository, store),
        options: None,
        network,
        transport: Transport::Oci,
        name: None,
        platform,
    })
}
