//! Parses documents of OCI and Docker images, and checks digests, media types and list lengths; pure.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::bounded_serde::{BoundedVec, bounded_vec, null_as_default};
use super::error::Cause;
use super::platform::Platform;
use crate::base::escape::escape;
use crate::base::sha256::Sha256;

/// Maximum number of layers of one image. Overlayfs supports a few hundred.
pub(super) const MAX_LAYERS: usize = 1000;

/// Maximum bytes of an image's name, because each manifest below it repeats it.
const MAX_NAME_LEN: usize = 1024;

/// Maximum number of entries of one index. An image for all platforms has about twenty.
const MAX_ENTRIES: usize = 10_000;

/// Maximum number of URLs of one content.
const MAX_URLS: usize = 16;

const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
const CONFIG_MEDIA_TYPES: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];
/// Types of configurations in manifests of Docker from before 2018. Others of such a type are artifacts.
const OLD_CONFIG_MEDIA_TYPES: [&str; 4] = [
    "",
    "application/octet-stream",
    "application/json",
    "text/html",
];

/// Prefixes of a layer's media type. A suffix may follow.
const LAYER_MEDIA_TYPES: [&str; 4] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
];
const COMPRESSION_SUFFIXES: [&str; 5] = ["", "+gzip", "+zstd", ".gzip", ".zstd"];

/// A descriptor: the reference of a document to another one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Media type of the content.
    pub media_type: String,
    /// Digest of its bytes.
    pub digest: Sha256,
    /// Its length in bytes.
    pub size: u64,
    /// The platform of the image, if given.
    pub platform: Option<Platform>,
    /// Names of the image: in this layout, and in full.
    pub names: Vec<String>,
    /// Where else the content is, as the author of the manifest says.
    pub urls: Vec<String>,
    /// Whether the document only describes another manifest.
    is_for_another: bool,
}

/// The kind of document behind a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DescriptorKind {
    /// Another index.
    Index,
    /// An image's manifest.
    Manifest,
    /// A document that cannot be mounted.
    Other,
}

impl Descriptor {
    /// Kind of the document, by media type.
    pub fn kind(&self) -> DescriptorKind {
        match self.media_type.as_str() {
            _ if self.is_for_another => DescriptorKind::Other,
            OCI_INDEX | DOCKER_MANIFEST_LIST => DescriptorKind::Index,
            OCI_MANIFEST | DOCKER_MANIFEST => DescriptorKind::Manifest,
            _ => DescriptorKind::Other,
        }
    }

    /// Path of its blob in a layout.
    pub fn blob_path(&self) -> String {
        format!("blobs/sha256/{}", self.digest)
    }
}

/// A manifest: one image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// Its configuration.
    pub config: Descriptor,
    /// Its layers, the lowest first.
    pub layers: Vec<Descriptor>,
}

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

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDescriptor {
    media_type: Option<String>,
    digest: String,
    size: u64,
    platform: Option<Platform>,
    #[serde(default, deserialize_with = "null_as_default")]
    annotations: RawAnnotations,
    urls: Option<BoundedVec<String, MAX_URLS>>,
}

#[derive(Default, Deserialize)]
struct RawAnnotations {
    /// An image's name in a layout.
    #[serde(rename = "org.opencontainers.image.ref.name")]
    ref_name: Option<String>,
    /// Its full name, as containerd writes it.
    #[serde(rename = "io.containerd.image.name")]
    full_name: Option<String>,
    /// Present on attestations, which are no images.
    #[serde(rename = "vnd.docker.reference.type")]
    attestation: Option<IgnoredAny>,
    /// Present on SOCI indexes, which have the platform of their image.
    #[serde(rename = "com.amazon.soci.image-manifest-digest")]
    soci_image: Option<IgnoredAny>,
}

/// An index or a manifest. One that is both is rejected, because programs would see different images.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: Option<u64>,
    media_type: Option<String>,
    manifests: Option<BoundedVec<RawDescriptor, MAX_ENTRIES>>,
    config: Option<RawDescriptor>,
    layers: Option<BoundedVec<RawDescriptor, MAX_LAYERS>>,
}

/// A parse error without the document's own text, which may be of any length.
pub(super) fn json_error(error: &serde_json::Error) -> Cause {
    let (line, column) = (error.line(), error.column());
    let what = match error.classify() {
        serde_json::error::Category::Data => "it is not what belongs there",
        serde_json::error::Category::Eof => "it ends too early",
        _ => "it is no JSON",
    };
    Cause::Malformed(format!("{what} (line {line}, column {column})"))
}

/// Parses a digest: `sha256:` and 64 digits.
pub(super) fn parse_digest(text: &str) -> Result<Sha256, Cause> {
    match text.split_once(':') {
        Some((algorithm @ ("sha384" | "sha512" | "blake3"), _)) => Err(Cause::Unsupported(
            format!("a digest of the kind {algorithm}"),
        )),
        _ => Sha256::from_oci(text)
            .ok_or_else(|| Cause::Malformed("a digest in it is none".to_owned())),
    }
}

impl RawDescriptor {
    fn validate(self) -> Result<Descriptor, Cause> {
        let annotations = self.annotations;
        let names = [annotations.ref_name, annotations.full_name];
        let names = names.into_iter().flatten();
        let names = names.filter(|name| name.len() <= MAX_NAME_LEN).collect();
        Ok(Descriptor {
            media_type: self.media_type.unwrap_or_default(),
            digest: parse_digest(&self.digest)?,
            size: self.size,
            platform: self.platform,
            names,
            urls: self.urls.map_or_else(Vec::new, |urls| urls.0),
            is_for_another: annotations.attestation.is_some() || annotations.soci_image.is_some(),
        })
    }
}

impl RawDocument {
    fn parse(bytes: &[u8]) -> Result<Self, Cause> {
        let document: Self = serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
        match document.schema_version {
            Some(2) => Ok(document),
            Some(1) => Err(Cause::Unsupported(
                "a manifest of Docker's schema 1".to_owned(),
            )),
            _ => Err(Cause::Malformed("its schemaVersion is not 2".to_owned())),
        }
    }

    /// Whether a configuration of this type is that of an image, in this manifest.
    fn is_image_config(&self, media_type: &str) -> bool {
        let is_docker = self.media_type.as_deref() == Some(DOCKER_MANIFEST);
        CONFIG_MEDIA_TYPES.contains(&media_type)
            || is_docker && OLD_CONFIG_MEDIA_TYPES.contains(&media_type)
    }
}

/// The descriptors in the index `bytes`.
///
/// # Errors
/// When it is no index, or one that cannot be trusted to be one.
pub fn parse_index(bytes: &[u8]) -> Result<Vec<Descriptor>, Cause> {
    let document = RawDocument::parse(bytes)?;
    let wrong = |what: &str| Err(Cause::Malformed(what.to_owned()));
    if document.config.is_some() || document.layers.is_some() {
        return wrong("it is an index and a manifest at once");
    }
    let media_type = document.media_type.as_deref().unwrap_or(OCI_INDEX);
    if ![OCI_INDEX, DOCKER_MANIFEST_LIST].contains(&media_type) {
        return wrong("its media type is not an index'");
    }
    let entries = document.manifests.map_or_else(Vec::new, |list| list.0);
    if entries.len() > MAX_ENTRIES {
        return wrong("it lists too many manifests");
    }
    // An entry with an unsupported digest is an error only if there are no others.
    let mut unsupported = None;
    let mut checked = Vec::new();
    for entry in entries {
        match entry.validate() {
            Ok(descriptor) => checked.push(descriptor),
            Err(error @ Cause::Unsupported(_)) => unsupported = Some(error),
            Err(error) => return Err(error),
        }
    }
    match unsupported {
        Some(error) if checked.is_empty() => Err(error),
        _ => Ok(checked),
    }
}

/// Describes the index or manifest in `bytes`, which have this digest.
///
/// # Errors
/// When it is neither.
pub(super) fn describe(bytes: &[u8], digest: Sha256) -> Result<Descriptor, Cause> {
    let document = RawDocument::parse(bytes)?;
    let media_type = match document.manifests {
        Some(_) => OCI_INDEX,
        None => OCI_MANIFEST,
    };
    Ok(Descriptor {
        media_type: media_type.to_owned(),
        digest,
        size: bytes.len() as u64,
        platform: None,
        names: Vec::new(),
        urls: Vec::new(),
        is_for_another: false,
    })
}

/// The only file of the artifact whose manifest is `bytes`; `None` for an image.
///
/// # Errors
/// When it is no manifest, or the artifact has several files.
pub(super) fn parse_artifact(bytes: &[u8]) -> Result<Option<Descriptor>, Cause> {
    let document = RawDocument::parse(bytes)?;
    let config = document.config.as_ref();
    let config = config.and_then(|config| config.media_type.as_deref());
    let is_image = |media_type| document.is_image_config(media_type);
    if document.manifests.is_some() || config.is_none_or(is_image) {
        return Ok(None);
    }
    let files = document.layers.map_or_else(Vec::new, |list| list.0);
    let count = files.len();
    match <[RawDescriptor; 1]>::try_from(files) {
        Ok([file]) => Ok(Some(file.validate()?)),
        Err(_) => Err(Cause::Unsupported(format!("an artifact of {count} files"))),
    }
}

/// The manifest in `bytes`.
///
/// # Errors
/// When it is none, or has parts that are no layers of a file system.
pub fn parse_manifest(bytes: &[u8]) -> Result<Manifest, Cause> {
    let document = RawDocument::parse(bytes)?;
    let wrong = |what: &str| Cause::Malformed(what.to_owned());
    if document.manifests.is_some() {
        return Err(wrong("it is an index and a manifest at once"));
    }
    let media_type = document.media_type.as_deref().unwrap_or(OCI_MANIFEST);
    if ![OCI_MANIFEST, DOCKER_MANIFEST].contains(&media_type) {
        return Err(wrong("its media type is not a manifest's"));
    }
    let config = document.config.as_ref();
    let config = config.ok_or_else(|| wrong("it names no config"))?;
    let config_type = config.media_type.as_deref().unwrap_or_default();
    if !document.is_image_config(config_type) {
        let media_type = escape(config_type.as_bytes());
        return Err(Cause::Unsupported(format!(
            "what is no image of a file system (its config is '{media_type}')"
        )));
    }
    let config = document.config.map(RawDescriptor::validate);
    let config = config.ok_or_else(|| wrong("it names no config"))??;
    let layers = document.layers.map_or_else(Vec::new, |list| list.0);
    if layers.len() > MAX_LAYERS {
        return Err(wrong("it has too many layers"));
    }
    let layers = layers.into_iter().map(|layer| {
        let layer = layer.validate()?;
        let packing = LAYER_MEDIA_TYPES
            .iter()
            .find_map(|kind| layer.media_type.strip_prefix(kind));
        if !packing.is_some_and(|packing| COMPRESSION_SUFFIXES.contains(&packing)) {
            let media_type = escape(layer.media_type.as_bytes());
            return Err(Cause::Unsupported(format!(
                "a layer of the type '{media_type}'"
            )));
        }
        Ok(layer)
    });
    Ok(Manifest {
        config,
        layers: layers.collect::<Result<_, _>>()?,
    })
}

/// The images that a Docker archive's `manifest.json` lists.
///
/// # Errors
/// When it is none.
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

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "01091119212931394149515961697179818991a9b1b9c1c9d1d9e1e9f1f90109";

    fn descriptor(media_type: &str, digest: &str) -> String {
        format!(r#"{{"mediaType":"{media_type}","digest":"{digest}","size":7}}"#)
    }

    fn good(media_type: &str) -> String {
        descriptor(media_type, &format!("sha256:{HEX}"))
    }

    fn manifest_with(config: &str, layer: &str) -> String {
        format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#)
    }

    // Promises: image-refused
    #[test]
    fn only_file_system_layer_types_are_accepted() {
        for kind in LAYER_MEDIA_TYPES {
            for packing in COMPRESSION_SUFFIXES {
                let layer = good(&format!("{kind}{packing}"));
                let text = manifest_with(&good(CONFIG_MEDIA_TYPES[0]), &layer);
                let parsed = parse_manifest(text.as_bytes()).expect("known");
                assert_eq!(parsed.layers[0].blob_path(), format!("blobs/sha256/{HEX}"));
            }
        }
        let encrypted = good(&format!("{}+gzip+encrypted", LAYER_MEDIA_TYPES[0]));
        for (config, layer) in [
            (good(CONFIG_MEDIA_TYPES[0]), encrypted),
            (
                good("application/vnd.oci.empty.v1+json"),
                good(LAYER_MEDIA_TYPES[0]),
            ),
        ] {
            let refused = parse_manifest(manifest_with(&config, &layer).as_bytes());
            assert!(matches!(refused, Err(Cause::Unsupported(_))), "{refused:?}");
        }
    }

    // Promises: image-digests
    #[test]
    fn malformed_or_unsafe_digest_is_rejected() {
        let upper = HEX.to_uppercase();
        for digest in [
            HEX.to_owned(),
            format!("sha256:{upper}"),
            format!("sha256:{}", &HEX[1..]),
            format!("sha256:{}/../../../etc/passwd", &HEX[22..]),
            "sha256:../../index.json".to_owned(),
            format!("md5:{HEX}"),
            String::new(),
        ] {
            let text = manifest_with(
                &good(CONFIG_MEDIA_TYPES[0]),
                &descriptor(LAYER_MEDIA_TYPES[0], &digest),
            );
            let refused = parse_manifest(text.as_bytes());
            assert!(matches!(refused, Err(Cause::Malformed(_))), "{digest}");
        }
        let long = format!("sha512:{HEX}{HEX}");
        let text = manifest_with(
            &good(CONFIG_MEDIA_TYPES[0]),
            &descriptor(LAYER_MEDIA_TYPES[0], &long),
        );
        let refused = parse_manifest(text.as_bytes()).expect_err("not verified here");
        assert_eq!(
            refused.to_string(),
            "a digest of the kind sha512 is not supported"
        );
    }

    // Promises: image-refused
    #[test]
    fn document_that_is_both_index_and_manifest_is_rejected() {
        let both = format!(
            r#"{{"schemaVersion":2,"manifests":[],"config":{},"layers":[]}}"#,
            good(CONFIG_MEDIA_TYPES[0])
        );
        assert!(parse_index(both.as_bytes()).is_err());
        assert!(parse_manifest(both.as_bytes()).is_err());
        let typed = format!(r#"{{"schemaVersion":2,"mediaType":"{OCI_MANIFEST}","manifests":[]}}"#);
        assert!(parse_index(typed.as_bytes()).is_err());
        assert!(parse_index(br#"{"schemaVersion":2,"manifests":null}"#).is_ok());
        let old = parse_manifest(br#"{"schemaVersion":1,"fsLayers":[]}"#);
        assert!(matches!(old, Err(Cause::Unsupported(_))));
    }

    // Promises: image-platform
    #[test]
    fn attestations_and_foreign_media_types_are_not_images() {
        let text = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{OCI_MANIFEST}","digest":"sha256:{HEX}",
                "size":1,"annotations":{{"vnd.docker.reference.type":"attestation-manifest"}}}},
                {},{}]}}"#,
            good(DOCKER_MANIFEST_LIST),
            good("application/wasm"),
        );
        let listed = parse_index(text.as_bytes()).expect("an index");
        let targets: Vec<_> = listed.iter().map(Descriptor::kind).collect();
        assert_eq!(
            targets,
            [
                DescriptorKind::Other,
                DescriptorKind::Index,
                DescriptorKind::Other
            ]
        );
    }

    // Promises: registry-artifact
    #[test]
    fn artifact_has_a_single_file_of_any_type() {
        let parse = |config: &str, layers: &str| {
            let config = good(config);
            let text = manifest_with(&config, layers);
            parse_artifact(text.as_bytes()).map(|file| file.map(|file| file.media_type))
        };
        let (empty, file) = ("application/vnd.oci.empty.v1+json", good("text/plain"));
        assert_eq!(
            parse(empty, &file).expect("an artifact").as_deref(),
            Some("text/plain")
        );
        assert!(
            parse(CONFIG_MEDIA_TYPES[0], &file)
                .expect("an image")
                .is_none()
        );
        for layers in [String::new(), format!("{file},{file}")] {
            let refused = parse(empty, &layers).expect_err("not one file");
            assert!(matches!(refused, Cause::Unsupported(_)), "{refused}");
        }
    }

    #[test]
    fn null_lists_in_docker_manifest_are_empty() {
        let text = br#"[{"Config":"a.json","RepoTags":null,"Layers":null}]"#;
        let images = parse_docker_manifest(text).expect("an image");
        assert_eq!(images[0].repo_tags, Vec::<String>::new());
    }
}
