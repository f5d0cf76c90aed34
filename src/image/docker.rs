//! Reads images from archives of `docker save`: `manifest.json`, config and layers.
//!
//! Nothing verifies `manifest.json`, which chooses the names of layers. The configuration's name is its
//! digest. Its `rootfs.diff_ids` verify the plain bytes of the layers, packed ones after decompression.

use std::path::Path;

use serde::Deserialize;

use super::error::{Cause, Error};
use super::opener::{self, Digests, Image, ImageOpener};
use crate::archive::detect_compression;
use crate::base::sha256::Sha256;
use crate::codec::Compression;
use crate::source::documents::{BoundedVec, MAX_ENTRIES, MAX_LAYERS, bounded_vec, json_error};

const MANIFEST: &str = "manifest.json";

/// Default registries, the longest first, which short names omit.
const DEFAULT_REGISTRIES: [&str; 2] = ["docker.io/library/", "docker.io/"];
const DEFAULT_TAG: &str = ":latest";

/// An image in a Docker archive.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct DockerImage {
    /// Path of its configuration.
    pub config: String,
    /// Its names.
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_ENTRIES>")]
    pub repo_tags: Vec<String>,
    /// Paths of its layers, the lowest first.
    #[serde(default, deserialize_with = "bounded_vec::<_, _, MAX_LAYERS>")]
    pub layers: Vec<String>,
}

pub(super) fn open(opener: &ImageOpener<'_>) -> Result<Image, Error> {
    let (layout, network) = (opener.layout, opener.network);
    let bytes = opener.read_marker(MANIFEST)?;
    let images = parse_docker_manifest(&bytes).map_err(|cause| layout.error(MANIFEST, cause))?;
    let image = choose_image(images, opener.name).map_err(|cause| opener.error(cause))?;
    let bytes = layout.read_document(&image.config, network)?;
    let found = Sha256::of(&bytes);
    if let Some(expected) = digest_from_path(&image.config).filter(|&expected| expected != found) {
        let cause = Cause::DigestMismatch { expected, found };
        return Err(layout.error(&image.config, cause));
    }
    let config = opener.parse_config(&image.config, &bytes)?;
    let count = image.layers.len();
    opener.check_layer_count(&image.config, &config, count)?;
    let files = image.layers.iter().zip(&config.diff_ids).enumerate();
    let layers = files.map(|(number, (path, diff_id))| {
        let file = layout.file(path)?;
        let compression = detect_compression(network, &file);
        let compression = compression.map_err(|error| layout.error(path, error))?;
        let (packed, plain) = if compression == Some(Compression::None) {
            (Some(*diff_id), None)
        } else {
            (digest_from_path(path), Some(*diff_id))
        };
        opener.layer(
            (file, path),
            (number, count),
            Digests { packed, plain },
            None,
        )
    });
    Ok(Image {
        location: layout.location().to_owned(),
        digest: found,
        config_digest: found,
        layers: layers.collect::<Result<_, _>>()?,
        names: image.repo_tags,
        config,
    })
}

/// The images that a Docker archive's `manifest.json` lists.
///
/// # Errors
/// When it is no such list.
pub fn parse_docker_manifest(bytes: &[u8]) -> Result<Vec<DockerImage>, Cause> {
    let images: BoundedVec<DockerImage, MAX_ENTRIES> =
        serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
    let images = images.0;
    let is_long = |image: &DockerImage| image.repo_tags.len() > MAX_ENTRIES;
    if images.len() > MAX_ENTRIES || images.iter().any(is_long) {
        let what = "it has too many images or names";
        return Err(Cause::Malformed(what.to_owned()));
    }
    if images.iter().any(|image| image.layers.len() > MAX_LAYERS) {
        return Err(Cause::Malformed("an image has too many layers".to_owned()));
    }
    Ok(images)
}

/// The digest in a file name: `HEX.json` by docker, `HEX.tar.gz` or `sha256:HEX` by other programs.
fn digest_from_path(path: &str) -> Option<Sha256> {
    let name = Path::new(path).file_name()?.to_str()?;
    let name = name.strip_prefix("sha256:").unwrap_or(name);
    Sha256::from_oci(&format!("sha256:{}", name.split('.').next()?))
}

/// The one of `images` with the name or configuration digest `wanted`, or else the only image.
fn choose_image(mut images: Vec<DockerImage>, wanted: Option<&str>) -> Result<DockerImage, Cause> {
    let names_of = |image: &DockerImage| {
        opener::display_names(&image.repo_tags, digest_from_path(&image.config))
    };
    if let Some(wanted) = wanted {
        let digest = Sha256::from_oci(wanted);
        let is_wanted = |image: &DockerImage| {
            let mut tags = image.repo_tags.iter();
            tags.any(|tag| normalize_name(tag) == normalize_name(wanted))
                || digest.is_some() && digest_from_path(&image.config) == digest
        };
        if let Some(at) = images.iter().position(is_wanted) {
            return Ok(images.swap_remove(at));
        }
        return Err(Cause::NoSuchName {
            wanted: wanted.to_owned(),
            known: images.iter().flat_map(names_of).collect(),
        });
    }
    match images.len() {
        0 => Err(Cause::Malformed("it lists no image".to_owned())),
        1 => Ok(images.swap_remove(0)),
        _ => {
            let known = images.iter().flat_map(names_of);
            Err(Cause::AmbiguousImage(known.collect()))
        }
    }
}

/// The name without the default registry, and with the default tag.
fn normalize_name(name: &str) -> String {
    let mut registries = DEFAULT_REGISTRIES.iter();
    let short = registries.find_map(|registry| name.strip_prefix(registry));
    let short = short.unwrap_or(name);
    let last = short.rsplit('/').next().unwrap_or_default();
    let tag = if last.contains(':') { "" } else { DEFAULT_TAG };
    format!("{short}{tag}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_lists_in_docker_manifest_are_empty() {
        let text = br#"[{"Config":"a.json","RepoTags":null,"Layers":null}]"#;
        let images = parse_docker_manifest(text).expect("an image");
        assert_eq!(images[0].repo_tags, Vec::<String>::new());
    }

    fn image(config: &str, tags: &[&str]) -> DockerImage {
        DockerImage {
            config: config.to_owned(),
            repo_tags: tags.iter().map(ToString::to_string).collect(),
            layers: Vec::new(),
        }
    }

    // Promises: image-selected
    #[test]
    fn image_is_found_by_every_form_of_its_name() {
        let images = vec![
            image("a", &["busybox:latest", "example.com:5000/busybox:1"]),
            image("b", &["docker.io/me/tool:latest"]),
        ];
        let chosen =
            |wanted: &str| choose_image(images.clone(), Some(wanted)).map(|image| image.config);
        for wanted in [
            "busybox",
            "busybox:latest",
            "docker.io/library/busybox",
            "example.com:5000/busybox:1",
        ] {
            assert_eq!(chosen(wanted).expect("there"), "a", "{wanted}");
        }
        assert_eq!(chosen("me/tool").expect("there"), "b");
        for wanted in ["busybox:1", "tool", "example.com:5000/busybox"] {
            assert!(
                matches!(chosen(wanted), Err(Cause::NoSuchName { .. })),
                "{wanted}"
            );
        }
        assert!(matches!(
            choose_image(images, None),
            Err(Cause::AmbiguousImage(_))
        ));
    }

    // Promises: image-selected
    #[test]
    fn unnamed_image_is_found_by_its_digest() {
        let hex = "ab".repeat(32);
        let images = vec![image("a", &["a:1"]), image(&format!("{hex}.json"), &[])];
        let told = choose_image(images.clone(), None)
            .expect_err("which?")
            .to_string();
        assert!(
            told.ends_with(&format!(": 'a:1', 'sha256:{hex}'")),
            "{told}"
        );
        let chosen = |wanted: String| choose_image(images.clone(), Some(&wanted));
        let found = chosen(format!("sha256:{hex}")).expect("there");
        assert_eq!(found.repo_tags, [""; 0]);
        assert!(matches!(
            chosen(format!("sha256:{}", "cd".repeat(32))),
            Err(Cause::NoSuchName { .. })
        ));
    }

    // Promises: image-digests
    #[test]
    fn digest_is_read_from_file_names() {
        let hex = "ab".repeat(32);
        let digest = Some(Sha256([0xab; 32]));
        for name in [
            hex.clone(),
            format!("{hex}.json"),
            format!("{hex}.tar.gz"),
            format!("sha256:{hex}"),
            format!("blobs/sha256/{hex}"),
        ] {
            assert_eq!(digest_from_path(&name), digest, "{name}");
        }
        for name in [
            "layer.tar".to_owned(),
            format!("{hex}/layer.tar"),
            format!("{hex}0.json"),
            format!("sha512:{hex}"),
            String::new(),
        ] {
            assert_eq!(digest_from_path(&name), None, "{name}");
        }
    }
}
