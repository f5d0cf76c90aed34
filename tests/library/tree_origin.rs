//! The party that vouches for the tree of an archive.

#![allow(clippy::indexing_slicing, reason = "a test may panic")]

use std::convert::Infallible;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::json;
use tarfs::archive::scan::{self, Digest, Sink};
use tarfs::archive::{
    Archive, FindIndex, IndexPlace, OpenOptions, PublishedIndex, ReadError, TreeOrigin, TreePart,
    Version, Volume,
};
use tarfs::index::{Ino, WhiteoutFormat, store};
use tarfs::layers::{Layer, LayeredArchive};
use tarfs::locate::{OpenContext, SourceSpec};
use tarfs::materialize::{EntryError, read_entries};
use tarfs::source::{
    self, Cause, INDEX_ARTIFACT_TYPE, INDEX_BLOB_TYPE, INDEX_LAYER_ANNOTATION, MemorySource,
    Source, Validator,
};
use tarfs::tar::Member;
use tarfs::{ArchivePath, Sha256, Stats};
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

// Promises: published-saved
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
    (registry, Sha256::of(&plain))
}

/// Otherwise an image could name the diff ID of another, and a layer with other contents.
// Promises: publish-verb
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
pub(crate) fn forge(path: &Path, from: &[u8], to: &[u8]) {
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

/// The layer `archive` with an index that was forged if there is a forgery.
fn foreign_layer(
    network: &Runtime,
    archive: raw::Archive,
    forgery: Option<(&[u8], &[u8])>,
) -> Layer {
    let version = Validator::StrongEtag("\"1\"".to_owned());
    let source = MemorySource::new("x.tar", archive.end()).with_validator(version);
    let source: Arc<dyn Source> = Arc::new(source);
    let as_layer = OpenOptions {
        layer: Some(WhiteoutFormat::Oci),
        ..OpenOptions::default()
    };
    let (own, stats) = (Arc::clone(&source), Arc::default());
    let scanned = Archive::open(own, &as_layer, network.handle(), &stats).expect("an archive");
    let published = tempfile::NamedTempFile::new().expect("a file");
    store::write(published.path(), scanned.index().tree().expect("rows")).expect("written");
    if let Some((from, to)) = forgery {
        forge(published.path(), from, to);
    }
    let handle = network.handle().clone();
    let find: FindIndex = Arc::new(move || {
        let text = published.path().display().to_string();
        handle.block_on(source::open(&text, source::Options::default()))
    });
    let options = options(Path::new("unused"), find, "one", network);
    Layer {
        source,
        digest: Digest::Ignore,
        published_index: options.published_index,
    }
}

fn open_layers(network: &Runtime, layers: &[Layer]) -> LayeredArchive {
    let (options, stats) = (OpenOptions::default(), Arc::default());
    let handle = network.handle();
    let opened = LayeredArchive::open(layers, &options, WhiteoutFormat::Oci, handle, &stats);
    opened.expect("layers")
}

fn ino(volume: &LayeredArchive, path: &str) -> Ino {
    let path = ArchivePath::sanitize(path.as_bytes()).path;
    let found = volume.index().read(|index| Some(index.find(&path)?.ino()));
    found.expect("rows").expect("there")
}

/// Otherwise a file of a trusted layer could be below a directory with forged attributes.
// Promises: published-checked
#[test]
fn directories_of_upper_layers_are_compared() {
    let network = Runtime::new().expect("threads");
    let lower = raw::Archive::new()
        .directory("d")
        .file("d/f", [1; 512])
        .file("other", [2; 512]);
    let lower = Layer {
        published_index: None,
        ..foreign_layer(&network, lower, None)
    };
    let upper = raw::Archive::new().add(raw::Header::new("d/", b'5').mode(0o700), []);
    let (from, to) = (0o040_700_u16.to_le_bytes(), 0o040_755_u16.to_le_bytes());
    for forgery in [None, Some((&from[..], &to[..]))] {
        let upper = foreign_layer(&network, upper.clone(), forgery);
        let volume = open_layers(&network, &[lower.clone(), upper]);
        let origins = volume.archives().into_iter().map(Archive::tree_origin);
        let origins: Vec<_> = origins.collect();
        assert_eq!(origins, [TreeOrigin::Archive, TreeOrigin::Publisher]);
        let file = ino(&volume, "d/f");
        assert!(volume.must_compare(TreePart::Entry(file)));
        assert!(volume.try_read(file, 0, 512).is_none(), "not compared");
        let (sender, answer) = std::sync::mpsc::channel();
        let done = move |read| sender.send(read).expect("a receiver");
        volume.read(file, 0, 512, Arc::new(|| true), Box::new(done));
        let reads = [
            answer.recv().expect("an answer"),
            volume.read_blocking(file, 0, 512),
        ];
        for read in reads {
            match forgery {
                None => assert_eq!(read.expect("readable"), vec![1; 512]),
                Some(_) => assert!(matches!(read, Err(ReadError::IndexMismatch)), "{read:?}"),
            }
        }
        assert_eq!(
            volume.must_compare(TreePart::Entry(file)),
            forgery.is_some()
        );
        let read = volume.read_blocking(ino(&volume, "other"), 0, 512);
        assert_eq!(read.expect("readable"), vec![2; 512]);
    }
    let volume = open_layers(&network, &[lower]);
    let file = ino(&volume, "d/f");
    assert!(
        !volume.must_compare(TreePart::Entry(file)),
        "no layer needs it"
    );
}

// Promises: published-checked
#[test]
fn hard_links_of_upper_layers_are_compared() {
    type Forgery = Option<(&'static [u8], &'static [u8])>;
    let network = Runtime::new().expect("threads");
    let lower = raw::Archive::new()
        .file("one", [1; 512])
        .file("two", [2; 512])
        .symlink("l", "./d")
        .file("d/three", [3; 512])
        .file("e/three", [4; 512]);
    let upper = raw::Archive::new()
        .hard_link("h", "one")
        .hard_link("chain", "h")
        .hard_link("through", "l/three");
    let cases: [(&str, Forgery, Forgery, &[&str], &str); 3] = [
        ("nothing", None, None, &[], "one"),
        (
            "a target",
            None,
            Some((b"one", b"two")),
            &["h", "chain"],
            "two",
        ),
        (
            "a link below",
            Some((b"./d", b"./e")),
            None,
            &["through"],
            "one",
        ),
    ];
    for (what, of_lower, of_upper, forged, target) in cases {
        let layers = [
            foreign_layer(&network, lower.clone(), of_lower),
            foreign_layer(&network, upper.clone(), of_upper),
        ];
        let volume = open_layers(&network, &layers);
        assert_eq!(ino(&volume, "h"), ino(&volume, target), "{what}");
        for name in ["h", "chain", "through"] {
            let part = TreePart::Name(Ino::ROOT, name.as_bytes());
            assert!(volume.must_compare(part), "{name} with {what} forged");
            let compared = volume.compare_blocking(part);
            if forged.contains(&name) {
                let is_mismatch = matches!(compared, Err(ReadError::IndexMismatch));
                assert!(is_mismatch, "{name} with {what} forged: {compared:?}");
            } else {
                compared.unwrap_or_else(|error| panic!("{name} with {what} forged: {error}"));
            }
            assert_eq!(volume.must_compare(part), forged.contains(&name));
        }
        for name in ["one", "two"] {
            let part = TreePart::Name(Ino::ROOT, name.as_bytes());
            assert!(!volume.must_compare(part), "{name} is the first name");
        }
        // All its names are sent.
        let index = volume.complete_index().expect("complete");
        let tree = index.tree().expect("rows");
        let sent = read_entries(&volume, tree, &[ino(&volume, target)], &mut Ignored);
        let is_mismatch = matches!(sent, Err(EntryError::Read(_, ReadError::IndexMismatch)));
        assert_eq!(is_mismatch, what == "a target", "{what}: {sent:?}");
    }
}

struct Ignored;

impl Sink for Ignored {
    type Error = Infallible;

    fn member(&mut self, _member: Member) -> Result<(), Infallible> {
        Ok(())
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn damage(&mut self, _offset: tarfs::Plain, text: &str) {
        panic!("{text}");
    }
}
