//! Documents of OCI and Docker registries and layouts: their digests, media types and list lengths are checked; pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, Serializer};

use crate::base::escape::escape;
use crate::base::sha256::Sha256;

pub(crate) use super::bounded_serde::{
    BoundedVec, bounded_keys, bounded_map, bounded_vec, null_as_default,
};
pub use super::platform::{ParsePlatformError, Platform};

/// Maximum number of layers of one image. Overlayfs supports a few hundred.
pub(crate) const MAX_LAYERS: usize = 1000;

/// Maximum bytes of an image's name, because each manifest below it repeats it.
const MAX_NAME_LEN: usize = 1024;

/// Maximum number of annotations of one document or descriptor that are read. Ten are many.
const MAX_ANNOTATIONS: usize = 32;

/// Maximum number of entries of one index. An image for all platforms has about twenty.
pub(crate) const MAX_ENTRIES: usize = 10_000;

/// Maximum number of URLs of one content.
const MAX_URLS: usize = 16;

/// Media type of a list of manifests.
pub(super) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media type of a manifest.
pub(super) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_MANIFEST_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

/// Media types of manifests and indexes. Without them, old registries convert manifests to older formats.
pub(super) const ACCEPTED_TYPES: [&str; 5] = [
    OCI_INDEX,
    OCI_MANIFEST,
    DOCKER_MANIFEST_LIST,
    DOCKER_MANIFEST,
    "*/*",
];

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

/// Annotation with an image's name in a layout.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Annotation with an image's full name, as containerd writes it.
const FULL_NAME: &str = "io.containerd.image.name";

/// Annotation of an index of tarfs, with the digest of the layer: `sha256:` and its digits.
pub const INDEX_LAYER_ANNOTATION: &str = "io.tarfs.index.layer";

/// Annotation of an image's manifest with the digest of its SOCI index, of the second version.
pub(crate) const SOCI_INDEX_ANNOTATION: &str = "com.amazon.soci.index-digest";

/// Annotation of a ztoc with the digest of its layer.
pub(crate) const ZTOC_LAYER_ANNOTATION: &str = "com.amazon.soci.image-layer-digest";

/// Annotation of a layer with the digest of its eStargz TOC.
pub(crate) const TOC_DIGEST_ANNOTATION: &str = "containerd.io/snapshot/stargz/toc.digest";

/// Annotations of documents that only describe another manifest: of attestations, and of SOCI indexes, which have the
/// platform of their image.
const ANNOTATIONS_OF_ANOTHER: [&str; 2] = [
    "vnd.docker.reference.type",
    "com.amazon.soci.image-manifest-digest",
];

/// Annotations by name.
pub type Annotations = BTreeMap<String, String>;

/// The digest in the annotation `name`.
pub(crate) fn annotated_digest(annotations: &Annotations, name: &str) -> Option<Sha256> {
    annotations.get(name)?.parse().ok()
}

/// A descriptor: the reference of a document to another one, or to a blob.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// Media type of the content.
    pub media_type: String,
    /// Digest of its bytes.
    #[serde(serialize_with = "write_digest")]
    pub digest: Sha256,
    /// Its length in bytes.
    pub size: u64,
    /// Type of the artifact whose manifest it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The platform of the image, if given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Its annotations.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: Annotations,
    /// Where else the content is, as the author of the manifest says.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

fn write_digest<S: Serializer>(digest: &Sha256, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("sha256:{digest}"))
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
    /// A descriptor with nothing but what each has.
    pub fn new(media_type: &str, digest: Sha256, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            platform: None,
            annotations: Annotations::default(),
            urls: Vec::new(),
        }
    }

    /// Parses one. Its digest must be a SHA-256.
    pub(super) fn parse(text: &str) -> Result<Self, DocumentError> {
        let raw: RawDescriptor = serde_json::from_str(text).map_err(|error| json_error(&error))?;
        raw.validate()
    }

    /// Names of the image: in this layout, and in full.
    pub fn names(&self) -> Vec<String> {
        let names = [REF_NAME, FULL_NAME].into_iter();
        let names = names.filter_map(|name| self.annotations.get(name));
        names
            .filter(|name| name.len() <= MAX_NAME_LEN)
            .cloned()
            .collect()
    }

    /// Kind of the document, by media type.
    pub fn kind(&self) -> DescriptorKind {
        let mut of_another = ANNOTATIONS_OF_ANOTHER.iter();
        match self.media_type.as_str() {
            _ if of_another.any(|&name| self.annotations.contains_key(name)) => {
                DescriptorKind::Other
            }
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

/// Why a document cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DocumentError {
    /// It violates the specification.
    #[error("{0}")]
    Malformed(String),
    /// It has a feature that is not supported.
    #[error("{0} is not supported")]
    Unsupported(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDescriptor {
    media_type: Option<String>,
    digest: String,
    size: u64,
    artifact_type: Option<String>,
    platform: Option<Platform>,
    #[serde(default, deserialize_with = "bounded_map::<_, _, MAX_ANNOTATIONS>")]
    annotations: Annotations,
    urls: Option<BoundedVec<String, MAX_URLS>>,
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
    #[serde(default, deserialize_with = "bounded_map::<_, _, MAX_ANNOTATIONS>")]
    annotations: Annotations,
}

/// A parse error without the document's own text, which may be of any length.
pub(crate) fn json_error(error: &serde_json::Error) -> DocumentError {
    let (line, column) = (error.line(), error.column());
    let what = match error.classify() {
        serde_json::error::Category::Data => "it is not what belongs there",
        serde_json::error::Category::Eof => "it ends too early",
        _ => "it is no JSON",
    };
    DocumentError::Malformed(format!("{what} (line {line}, column {column})"))
}

/// Parses a digest: `sha256:` and 64 digits.
pub(crate) fn parse_digest(text: &str) -> Result<Sha256, DocumentError> {
    match text.split_once(':') {
        Some((algorithm @ ("sha384" | "sha512" | "blake3"), _)) => Err(DocumentError::Unsupported(
            format!("a digest of the kind {algorithm}"),
        )),
        _ => Sha256::from_oci(text)
            .ok_or_else(|| DocumentError::Malformed("it has a malformed digest".to_owned())),
    }
}

impl RawDescriptor {
    fn validate(self) -> Result<Descriptor, DocumentError> {
        Ok(Descriptor {
            media_type: self.media_type.unwrap_or_default(),
            digest: parse_digest(&self.digest)?,
            size: self.size,
            artifact_type: self.artifact_type,
            platform: self.platform,
            annotations: self.annotations,
            urls: self.urls.map_or_else(Vec::new, |urls| urls.0),
        })
    }
}

impl RawDocument {
    fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        let document: Self = serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
        match document.schema_version {
            Some(2) => Ok(document),
            Some(1) => Err(DocumentError::Unsupported(
                "a manifest of Docker's schema 1".to_owned(),
            )),
            _ => Err(DocumentError::Malformed(
                "its schemaVersion is not 2".to_owned(),
            )),
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
pub fn parse_index(bytes: &[u8]) -> Result<Vec<Descriptor>, DocumentError> {
    let document = RawDocument::parse(bytes)?;
    let wrong = |what: &str| Err(DocumentError::Malformed(what.to_owned()));
    if document.config.is_some() || document.layers.is_some() {
        return wrong("it is an index and a manifest at once");
    }
    let media_type = document.media_type.as_deref().unwrap_or(OCI_INDEX);
    if ![OCI_INDEX, DOCKER_MANIFEST_LIST].contains(&media_type) {
        return wrong("its media type is not that of an index");
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
            Err(error @ DocumentError::Unsupported(_)) => unsupported = Some(error),
            Err(error) => return Err(error),
        }
    }
    match unsupported {
        Some(error) if checked.is_empty() => Err(error),
        _ => Ok(checked),
    }
}

/// Describes the index or manifest in `bytes`, which have this digest. Any other document is an error.
pub(crate) fn describe(bytes: &[u8], digest: Sha256) -> Result<Descriptor, DocumentError> {
    let document = RawDocument::parse(bytes)?;
    let media_type = match document.manifests {
        Some(_) => OCI_INDEX,
        None => OCI_MANIFEST,
    };
    Ok(Descriptor::new(media_type, digest, bytes.len() as u64))
}

/// The only file of the artifact whose manifest is `bytes`; `None` for an image. An artifact of several files is an
/// error.
pub(crate) fn parse_artifact(bytes: &[u8]) -> Result<Option<Descriptor>, DocumentError> {
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
        Err(_) => Err(DocumentError::Unsupported(format!(
            "an artifact of {count} files"
        ))),
    }
}

/// The manifest in `bytes`.
///
/// # Errors
/// When it is none, or has parts that are no layers of a file system.
pub fn parse_manifest(bytes: &[u8]) -> Result<Manifest, DocumentError> {
    let document = RawDocument::parse(bytes)?;
    let wrong = |what: &str| DocumentError::Malformed(what.to_owned());
    if document.manifests.is_some() {
        return Err(wrong("it is an index and a manifest at once"));
    }
    let media_type = document.media_type.as_deref().unwrap_or(OCI_MANIFEST);
    if ![OCI_MANIFEST, DOCKER_MANIFEST].contains(&media_type) {
        return Err(wrong("its media type is not that of a manifest"));
    }
    let config = document.config.as_ref();
    let config = config.ok_or_else(|| wrong("it names no config"))?;
    let config_type = config.media_type.as_deref().unwrap_or_default();
    if !document.is_image_config(config_type) {
        let media_type = escape(config_type.as_bytes());
        return Err(DocumentError::Unsupported(format!(
            "an artifact that is no image of a file system (its config is '{media_type}')"
        )));
    }
    let config = document.config.map(RawDescriptor::validate);
    let config = config.ok_or_else(|| wrong("it names no config"))??;
    let layers = document.layers.map(validate_layers).transpose()?;
    for layer in layers.iter().flatten() {
        let packing = LAYER_MEDIA_TYPES
            .iter()
            .find_map(|kind| layer.media_type.strip_prefix(kind));
        if !packing.is_some_and(|packing| COMPRESSION_SUFFIXES.contains(&packing)) {
            let media_type = escape(layer.media_type.as_bytes());
            return Err(DocumentError::Unsupported(format!(
                "a layer of the type '{media_type}'"
            )));
        }
    }
    Ok(Manifest {
        config,
        layers: layers.unwrap_or_default(),
    })
}

fn validate_layers(
    layers: BoundedVec<RawDescriptor, MAX_LAYERS>,
) -> Result<Vec<Descriptor>, DocumentError> {
    if layers.0.len() > MAX_LAYERS {
        let wrong = "it has too many layers";
        return Err(DocumentError::Malformed(wrong.to_owned()));
    }
    let layers = layers.0.into_iter();
    layers.map(RawDescriptor::validate).collect()
}

/// The blobs and the annotations of the manifest in `bytes`, of an image or an artifact. Too many blobs are an error.
pub(crate) fn parse_blobs(bytes: &[u8]) -> Result<(Vec<Descriptor>, Annotations), DocumentError> {
    let document = RawDocument::parse(bytes)?;
    let layers = document.layers.map(validate_layers).transpose()?;
    let unlisted = || DocumentError::Malformed("it lists no layers".to_owned());
    Ok((layers.ok_or_else(unlisted)?, document.annotations))
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
            assert!(
                matches!(refused, Err(DocumentError::Unsupported(_))),
                "{refused:?}"
            );
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
            assert!(
                matches!(refused, Err(DocumentError::Malformed(_))),
                "{digest}"
            );
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
        assert!(matches!(old, Err(DocumentError::Unsupported(_))));
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
            assert!(
                matches!(refused, DocumentError::Unsupported(_)),
                "{refused}"
            );
        }
    }
}
