//! The party that vouches for the tree of an archive.

#![allow(clippy::indexing_slicing, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use tarfs::archive::scan::{self, Digest};
use tarfs::archive::{
    Archive, FindIndex, IndexPlace, OpenOptions, PublishedIndex, ReadError, TreeOrigin, Version,
    sha256,
};
use tarfs::index::{WhiteoutFormat, store};
use tarfs::locate::{OpenContext, SourceSpec};
use tarfs::source::{
    self, Cause, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE, INDEX_LAYER_ANNOTATION, MemorySource,
    Source, Validator,
};
use tarfs::{Sha256, Stats};
use tokio::runtime::Runtime;
use xxhash_rust::xxh3::xxh3_64;

use crate::registry::{Registry, digest_of, nothing};
use crate::support::image::{Files, INDEX, Image, MANIFEST};
use crate::support::packing::Packing;
use crate::support::raw;
use crate::support::wait;

fn archive() -> Arc<dyn Source> {
    let bytes = raw::Archive::new().file("a", [7; 512]).end();
    let version = Validator::StrongEtag("\"1\"".to_owned());
    Arc::new(MemorySource::new("a.tar", bytes).with_validator(version))
}

/// Options with the index that `find` finds, of `publisher`.
fn options(cache: &Path, find: FindIndex, publisher: &str, network: &Runtime) -> OpenOptions {
    OpenOptions {
        cache_dir: Some(cache.to_owned()),
        published_index: Some(PublishedIndex {
            places: vec![(
                TreeOrigin::Publisher,
                IndexPlace::Index(find, publisher.to_owned()),
            )],
            network: network.handle().clone(),
            stats: Arc::default(),
            is_required: false,
            sha256: None,
        }),
        ..OpenOptions::default()
    }
}

#[test]
fn saved_copy_of_an_index_is_only_for_its_publisher() {
    let (network, directory) = (Runtime::new().expect("threads"), tempfile::tempdir());
    let directory = directory.expect("a directory");
    let (cache, published) = (
        directory.path().join("cache"),
        directory.path().join("index"),
    );
    let open = |options: &OpenOptions| {
        let stats = Arc::<Stats>::default();
        let opened = Archive::open(archive(), options, network.handle(), &stats);
        (opened.expect("an archive"), stats.scans.get())
    };
    let (scanned, _) = open(&OpenOptions::default());
    store::write(&published, scanned.index().tree().expect("rows")).expect("written");
    let handle = network.handle().clone();
    let text = published.display().to_string();
    let find: FindIndex =
        Arc::new(move || handle.block_on(source::open(&text, source::Options::default())));
    let none: FindIndex = Arc::new(|| Err(source::Error::new("index", Cause::NotFound)));
    let (first, scans) = open(&options(&cache, find, "one", &network));
    assert_eq!((first.tree_origin(), scans), (TreeOrigin::Publisher, 0));
    let saved = || {
        let files = fs::read_dir(cache.join("index")).into_iter().flatten();
        let names = files.map(|file| file.expect("a name").file_name());
        names
            .filter(|name| name.to_string_lossy().ends_with(".idx"))
            .count()
    };
    wait::wait_until("the copy is saved", || saved() == 1);
    let (again, scans) = open(&options(&cache, Arc::clone(&none), "one", &network));
    assert_eq!((again.tree_origin(), scans), (TreeOrigin::Publisher, 0));
    let (other, scans) = open(&options(&cache, none, "other", &network));
    assert_eq!((other.tree_origin(), scans), (TreeOrigin::Archive, 1));
}

/// A registry with an image of one layer, and an attached index that was made with `plain_sha256`.
fn registry_with_index(plain_sha256: Digest) -> (Registry, Sha256) {
    let network = Runtime::new().expect("threads");
    let plain = raw::Archive::new().file("a", [7; 512]).end();
    let image = Image::new("", vec![plain.clone()]);
    let mut files = Files::default();
    let config = files.blob("application/vnd.oci.image.config.v1+json", image.config());
    let packed = Packing::Gzip.pack(&plain.clone().into());
    let layer = files.blob(
        "application/vnd.oci.image.layer.v1.tar+gzip",
        packed.to_vec(),
    );
    let options = OpenOptions {
        layer: Some(WhiteoutFormat::Oci),
        scan: scan::Options {
            sha256: Digest::Compute,
            plain_sha256,
            ..scan::Options::default()
        },
        ..OpenOptions::default()
    };
    let source = Arc::new(MemorySource::new("layer", packed));
    let indexed = Archive::open(source, &options, network.handle(), &Arc::default());
    let path = tempfile::NamedTempFile::new().expect("a file");
    store::write(
        path.path(),
        indexed.expect("an archive").index().tree().expect("rows"),
    )
    .expect("written");
    let index = fs::read(path.path()).expect("written");
    let mut index = files.blob(INDEX_BLOB_TYPE, index);
    index["annotations"] = json!({ INDEX_LAYER_ANNOTATION: layer["digest"] });
    let empty = files.blob(INDEX_ARTIFACT_TYPE, b"{}".to_vec());
    let artifact =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": [index] });
    let mut artifact = files.blob(MANIFEST, artifact.to_string().into_bytes());
    artifact["artifactType"] = json!(INDEX_ARTIFACT_TYPE);
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    let manifest = files.blob(MANIFEST, manifest.to_string().into_bytes());
    let list = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [artifact] });
    let list = files.blob(INDEX, list.to_string().into_bytes());
    let registry = Registry::new(nothing());
    registry.push(&files);
    registry.tag("1", &files, &manifest);
    registry.tag(&format!("sha256-{}", digest_of(&manifest)), &files, &list);
    (registry, sha256(&plain))
}

/// Otherwise an image could name the diff ID of another, and a layer with other contents.
#[test]
fn attached_index_of_a_layer_must_have_its_diff_id() {
    for (computed, origin) in [
        (Digest::Ignore, TreeOrigin::Archive),
        (Digest::Compute, TreeOrigin::Publisher),
    ] {
        let (registry, diff_id) = registry_with_index(computed);
        let network = Runtime::new().expect("threads");
        let mut context = OpenContext::new(network.handle().clone());
        context.published_index.least_origin = TreeOrigin::Publisher;
        let spec = SourceSpec::from(&*registry.name(":1"));
        let volume = context.open(&spec.into()).expect("an image");
        let archives = volume.archives();
        assert_eq!(archives[0].tree_origin(), origin, "{computed:?}");
        assert_eq!(archives[0].index().origin().plain_sha256, Some(diff_id));
    }
}

/// The index file at `path` with `to` in place of `from`.
fn forge(path: &Path, from: &[u8], to: &[u8]) {
    let framed = fs::read(path).expect("written");
    let mut file = zstd::decode_all(&*framed).expect("frames");
    let place = file.windows(from.len()).position(|bytes| bytes == from);
    let place = place.expect("a place to forge");
    file[place..place + to.len()].copy_from_slice(to);
    let frame = zstd::bulk::compress(&file, 3).expect("packed");
    let len = u32::try_from(frame.len()).expect("short").to_le_bytes();
    let checksum = xxh3_64(&frame).to_le_bytes();
    let parts = [&framed[..32], &len[..], &checksum[..4], &frame[..]];
    fs::write(path, parts.concat()).expect("written");
}

/// Otherwise an index with the content ID of another archive would prove that this one is the pinned version.
#[test]
fn content_id_that_a_publisher_claims_proves_no_version() {
    let (network, directory) = (Runtime::new().expect("threads"), tempfile::tempdir());
    let published = directory
        .as_ref()
        .expect("a directory")
        .path()
        .join("index");
    let source = |byte: u8, etag: &str| -> Arc<dyn Source> {
        let bytes = raw::Archive::new().file("a", [byte; 512]).end();
        let version = Validator::StrongEtag(format!("\"{etag}\""));
        Arc::new(MemorySource::new("a.tar", bytes).with_validator(version))
    };
    let open = |source, options: &OpenOptions| {
        Archive::open(source, options, network.handle(), &Arc::default()).expect("an archive")
    };
    let pinned = open(source(1, "1"), &OpenOptions::default());
    let other = open(source(2, "2"), &OpenOptions::default());
    store::write(&published, other.index().tree().expect("rows")).expect("written");
    let content_id = |archive: &Archive| archive.index().origin().content_id;
    let [wanted, own] = [&pinned, &other].map(content_id);
    forge(&published, &own, &wanted);
    let handle = network.handle().clone();
    let text = published.display().to_string();
    let find: FindIndex =
        Arc::new(move || handle.block_on(source::open(&text, source::Options::default())));
    let cache = directory
        .as_ref()
        .expect("a directory")
        .path()
        .join("cache");
    let by_index = open(source(2, "2"), &options(&cache, find, "one", &network));
    assert_eq!(by_index.tree_origin(), TreeOrigin::Publisher);
    assert_eq!(content_id(&by_index), wanted);
    let version = Version::of(&pinned);
    assert!(matches!(
        version.check(&by_index),
        Err(ReadError::Changed(_))
    ));
    assert!(
        Version::of(&other).check(&by_index).is_ok(),
        "the same validator"
    );
}
