//! Container images: OCI layouts, and the format of docker save.

use std::fs;
use std::path::Path;

use bytes::Bytes;
use serde_json::{Value, json};

use super::packing::Packing;
use super::raw;
use super::sha256::sha256;

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// One image.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) name: String,
    /// The plain archives of its layers, the lowest first.
    pub(crate) layers: Vec<Vec<u8>>,
    /// Packing of the layers.
    pub(crate) packing: Packing,
    /// Execution parameters of its configuration.
    pub(crate) execution: Value,
    pub(crate) platform: (&'static str, &'static str),
}

impl Image {
    /// An image for this machine that runs nothing.
    pub(crate) fn new(name: &str, layers: Vec<Vec<u8>>) -> Self {
        let architecture = if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        };
        Self {
            name: name.to_owned(),
            layers,
            packing: Packing::Gzip,
            execution: json!({}),
            platform: ("linux", architecture),
        }
    }

    pub(crate) fn packed(mut self, packing: Packing) -> Self {
        self.packing = packing;
        self
    }

    pub(crate) fn running(mut self, execution: Value) -> Self {
        self.execution = execution;
        self
    }

    pub(crate) fn on(mut self, os: &'static str, architecture: &'static str) -> Self {
        self.platform = (os, architecture);
        self
    }

    /// Its configuration, a JSON document.
    pub(crate) fn config(&self) -> Vec<u8> {
        let diff_ids = self
            .layers
            .iter()
            .map(|layer| format!("sha256:{}", sha256(layer)));
        let config = json!({
            "os": self.platform.0,
            "architecture": self.platform.1,
            "config": self.execution,
            "rootfs": { "type": "layers", "diff_ids": diff_ids.collect::<Vec<_>>() },
        });
        config.to_string().into_bytes()
    }
}

/// Packs `plain`.
pub(crate) fn packed(packing: Packing, plain: &[u8]) -> Vec<u8> {
    packing.pack(&Bytes::copy_from_slice(plain)).to_vec()
}

/// Files of a layout by name.
#[derive(Clone, Default)]
pub(crate) struct Files(pub(crate) Vec<(String, Vec<u8>)>);

impl Files {
    pub(crate) fn put(&mut self, name: &str, bytes: impl Into<Vec<u8>>) {
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.to_owned(), bytes.into()));
    }

    /// Adds a blob and returns its descriptor.
    pub(crate) fn blob(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let (digest, size) = (sha256(&bytes), bytes.len());
        self.put(&format!("blobs/sha256/{digest}"), bytes);
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
    }

    #[track_caller]
    pub(crate) fn get(&mut self, name: &str) -> &mut Vec<u8> {
        let found = self.0.iter_mut().find(|(known, _)| known == name);
        &mut found.expect("a file of that name").1
    }

    /// A tar archive of the files.
    pub(crate) fn tar(&self) -> Vec<u8> {
        let archive = raw::Archive::new();
        let add =
            |archive: raw::Archive, (name, bytes): &(String, Vec<u8>)| archive.file(name, bytes);
        self.0.iter().fold(archive, add).end()
    }

    /// Writes the files below `directory`.
    pub(crate) fn write(&self, directory: &Path) {
        for (name, bytes) in &self.0 {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().expect("below")).expect("made");
            fs::write(path, bytes).expect("space");
        }
    }

    /// Adds the manifest of `image` and all its blobs. Returns the manifest's descriptor.
    pub(crate) fn manifest(&mut self, image: &Image) -> Value {
        self.manifest_with(image, &image.layers)
    }

    /// As [`Self::manifest`], with `contents` as the plain archives of the layers, whatever the
    /// configuration says.
    pub(crate) fn manifest_with(&mut self, image: &Image, contents: &[Vec<u8>]) -> Value {
        let suffix = match image.packing {
            Packing::Plain => "",
            Packing::Zstd => "+zstd",
            _ => "+gzip",
        };
        let layers: Vec<_> = contents
            .iter()
            .map(|layer| self.blob(&format!("{LAYER}{suffix}"), packed(image.packing, layer)))
            .collect();
        let config = self.blob(CONFIG, image.config());
        let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config,
                               "layers": layers });
        self.blob(MANIFEST, manifest.to_string().into_bytes())
    }

    /// Adds the entry point of the layout, with these manifests.
    pub(crate) fn index(&mut self, manifests: &[Value]) {
        let index = json!({ "schemaVersion": 2, "manifests": manifests });
        self.put("index.json", index.to_string());
        self.put("oci-layout", r#"{"imageLayoutVersion":"1.0.0"}"#);
    }
}

/// An object with one more field.
fn with(mut object: Value, name: &str, value: Value) -> Value {
    let members = object.as_object_mut().expect("an object");
    members.insert(name.to_owned(), value);
    object
}

/// An OCI layout of `images`, each with its name.
pub(crate) fn oci(images: &[Image]) -> Files {
    let mut files = Files::default();
    let manifests: Vec<_> = images
        .iter()
        .map(|image| {
            let name = json!({ "org.opencontainers.image.ref.name": image.name });
            with(files.manifest(image), "annotations", name)
        })
        .collect();
    files.index(&manifests);
    files
}

/// One name for images on several platforms.
pub(crate) fn oci_for_all(images: &[Image]) -> Files {
    let mut files = Files::default();
    let manifests: Vec<_> = images
        .iter()
        .map(|image| {
            let (os, architecture) = image.platform;
            let platform = json!({ "os": os, "architecture": architecture });
            with(files.manifest(image), "platform", platform)
        })
        .collect();
    let inner = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
    let inner = files.blob(INDEX, inner.to_string().into_bytes());
    files.index(&[inner]);
    files
}

/// The format of docker save up to version 24: a directory for each layer, and links between equal
/// ones.
pub(crate) fn docker(image: &Image) -> raw::Archive {
    let mut archive = raw::Archive::new();
    let mut layers = Vec::new();
    for (number, layer) in image.layers.iter().enumerate() {
        let id = sha256(format!("{number}").as_bytes());
        let name = format!("{id}/layer.tar");
        archive = archive
            .directory(&format!("{id}/"))
            .file(&format!("{id}/VERSION"), "1.0")
            .file(&format!("{id}/json"), "{}")
            .file(&format!("{number}.tar"), layer)
            .symlink(&name, &format!("../{number}.tar"));
        layers.push(name);
    }
    let config = image.config();
    let config_name = format!("{}.json", sha256(&config));
    let manifest = json!([{ "Config": config_name, "RepoTags": [image.name], "Layers": layers }]);
    archive
        .file(&config_name, config)
        .file("manifest.json", manifest.to_string())
}

/// An image in Docker's format with packed layers, as programs other than docker write it.
///
/// `contents` are the plain archives of the layers, whatever the configuration says. `name` makes a
/// layer's name from its number and its packed bytes.
pub(crate) fn docker_with_packed_layers(
    image: &Image,
    contents: &[Vec<u8>],
    name: impl Fn(usize, &[u8]) -> String,
) -> Files {
    let mut files = Files::default();
    let mut layers = Vec::new();
    for (number, content) in contents.iter().enumerate() {
        let bytes = packed(image.packing, content);
        let name = name(number, &bytes);
        files.put(&name, bytes);
        layers.push(name);
    }
    let config = image.config();
    let config_name = format!("{}.json", sha256(&config));
    let manifest = json!([{ "Config": config_name, "RepoTags": [image.name], "Layers": layers }]);
    files.put(&config_name, config);
    files.put("manifest.json", manifest.to_string());
    files
}

/// The format of docker save since version 25: an OCI layout with a manifest beside it.
pub(crate) fn docker_with_blobs(image: &Image) -> Files {
    let plain = image.clone().packed(Packing::Plain);
    let mut files = oci(std::slice::from_ref(&plain));
    let name = |bytes: &[u8]| format!("blobs/sha256/{}", sha256(bytes));
    let layers: Vec<_> = image.layers.iter().map(|layer| name(layer)).collect();
    let manifest = json!([{ "Config": name(&image.config()), "RepoTags": [image.name],
                            "Layers": layers }]);
    files.put("manifest.json", manifest.to_string());
    files
}
