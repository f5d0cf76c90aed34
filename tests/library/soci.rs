//! Layers that have a SOCI ztoc in their registry.

#![allow(clippy::indexing_slicing, reason = "a test may panic")]

use std::io::Read;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use serde_json::json;
use tarfs::archive::{ReadError, TreeOrigin, TreePart, Volume};
use tarfs::index::{EntryKind, Ino};
use tarfs::locate::{OpenContext, SourceSpec};
use tarfs::{ArchivePath, Sha256, Stats};
use tokio::runtime::Runtime;

use crate::registry::{Registry, blob, blob_file, digest_of, nothing};
use crate::support::http::Resource;
use crate::support::image::{Files, INDEX, Image, MANIFEST};
use crate::support::soci;

const SOCI: &str = "application/vnd.amazon.soci.index";

/// How an image and its SOCI index refer to each other.
#[derive(Clone, Copy, Debug)]
enum Version {
    /// A referrer of the image.
    V1,
    /// An annotation of the image.
    V2,
}

/// A registry with an image of one layer, whose SOCI index has `ztoc`.
fn served(ztoc: Vec<u8>, version: Version) -> (Registry, String) {
    let (registry, layer, _) = served_image(ztoc, version);
    (registry, layer)
}

/// The same, with the digest of the image's manifest.
fn served_image(ztoc: Vec<u8>, version: Version) -> (Registry, String, String) {
    let mut files = Files::default();
    let mut plain = Vec::new();
    let packed = soci::layer();
    MultiGzDecoder::new(&*packed)
        .read_to_end(&mut plain)
        .expect("gzip");
    let image = Image::new("", vec![plain]);
    let (architecture, config) = (image.platform.1, image.config());
    let config = files.blob("application/vnd.oci.image.config.v1+json", config);
    let layer = files.blob("application/vnd.oci.image.layer.v1.tar+gzip", packed);
    let mut ztoc = files.blob("application/octet-stream", ztoc);
    ztoc["annotations"] = json!({ "com.amazon.soci.image-layer-digest": layer["digest"] });
    let number = if matches!(version, Version::V1) { 1 } else { 2 };
    let artifact_type = format!("{SOCI}.v{number}+json");
    let empty = files.blob(&artifact_type, b"{}".to_vec());
    let index =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": [ztoc] });
    let mut index = files.blob(MANIFEST, index.to_string().into_bytes());
    let mut image =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    if matches!(version, Version::V2) {
        image["annotations"] = json!({ "com.amazon.soci.index-digest": index["digest"] });
    }
    let image = files.blob(MANIFEST, image.to_string().into_bytes());
    index["artifactType"] = json!(artifact_type);
    let mut listed = vec![index];
    if matches!(version, Version::V2) {
        // `soci convert` gives both the same platform.
        let platform = json!({ "os": "linux", "architecture": architecture });
        listed[0]["annotations"] =
            json!({ "com.amazon.soci.image-manifest-digest": image["digest"] });
        listed.insert(0, image.clone());
        for one in &mut listed {
            one["platform"] = platform.clone();
        }
    }
    let list = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": listed });
    let list = files.blob(INDEX, list.to_string().into_bytes());
    let registry = Registry::new(nothing());
    registry.push(&files);
    match version {
        Version::V1 => {
            registry.tag("1", &files, &image);
            registry.tag(&format!("sha256-{}", digest_of(&image)), &files, &list);
        }
        Version::V2 => registry.tag("1", &files, &list),
    }
    assert!(files.get(&blob_file(&layer)).len() > 8000);
    let [layer, image] = [layer, image].map(|it| digest_of(&it).to_owned());
    (registry, layer, image)
}

/// An opened image, and its counters.
pub(crate) struct Opened {
    volume: Arc<dyn Volume>,
    pub(crate) stats: Arc<Stats>,
    _network: Runtime,
}

impl Opened {
    pub(crate) fn new(registry: &Registry, is_searched: bool) -> Self {
        let least = if is_searched {
            TreeOrigin::Publisher
        } else {
            TreeOrigin::Archive
        };
        Self::open(&registry.name(":1"), least, None)
    }

    /// Opens the image `name`, of which `expected` is the digest if it is given.
    pub(crate) fn open(name: &str, least: TreeOrigin, expected: Option<Sha256>) -> Self {
        let network = Runtime::new().expect("a runtime");
        let stats = Arc::<Stats>::default();
        let mut context = OpenContext::new(network.handle().clone());
        context.source.stats = Arc::clone(&stats);
        context.published_index.least_origin = least;
        context.expected_sha256 = expected;
        let source = SourceSpec::from(name);
        Self {
            volume: context.open(&source.into()).expect("opened"),
            stats,
            _network: network,
        }
    }

    /// Attributes of all entries.
    pub(crate) fn entries(&self) -> Vec<String> {
        let index = self.volume.index();
        let index = index.tree().expect("rows");
        let entries = (1..=index.last_ino().0).filter_map(|ino| index.entry(Ino(ino)));
        let described = entries.map(|entry| {
            format!(
                "{:?} {:?} {:o} {} {} {:?} {:?} {:?} {} {} {:?}",
                index.path(entry.ino()),
                entry.kind(),
                entry.mode(),
                entry.uid(),
                entry.gid(),
                entry.user(),
                entry.group(),
                entry.mtime(),
                entry.size(),
                entry.link_count(),
                entry.xattrs().collect::<Vec<_>>(),
            )
        });
        described.collect()
    }

    pub(crate) fn contents(&self) -> Vec<Vec<u8>> {
        let files: Vec<_> = {
            let index = self.volume.index();
            let index = index.tree().expect("rows");
            let entries = (1..=index.last_ino().0).filter_map(|ino| index.entry(Ino(ino)));
            let files = entries.filter(|entry| entry.kind() == EntryKind::File);
            files.map(|file| (file.ino(), file.size())).collect()
        };
        let read = |(ino, size): (Ino, u64)| {
            let len = u32::try_from(size).expect("small");
            let bytes = self.volume.read_blocking(ino, 0, len);
            bytes.expect("readable").to_vec()
        };
        files.into_iter().map(read).collect()
    }

    pub(crate) fn read(&self, path: &str) -> Result<Vec<u8>, ReadError> {
        let path = ArchivePath::sanitize(path.as_bytes()).path;
        let entry = self
            .volume
            .index()
            .tree()
            .expect("rows")
            .find(&path)
            .map(|entry| entry.ino());
        let bytes = self
            .volume
            .read_blocking(entry.expect("there"), 0, 1 << 20)?;
        Ok(bytes.to_vec())
    }

    /// Compares all symbolic links with their headers in the layer.
    fn assert_links_match(&self) {
        let links: Vec<_> = {
            let index = self.volume.index();
            let index = index.tree().expect("rows");
            let entries = (1..=index.last_ino().0).filter_map(|ino| index.entry(Ino(ino)));
            let links = entries.filter(|entry| matches!(entry.kind(), EntryKind::Symlink(_)));
            links.map(|link| link.ino()).collect()
        };
        for ino in links {
            let (sender, compared) = std::sync::mpsc::channel();
            let done = move |result| sender.send(result).expect("a receiver");
            self.volume.compare(TreePart::Entry(ino), Box::new(done));
            compared.recv().expect("an answer").expect("equal");
        }
    }

    fn assert_equals(&self, other: &Self) {
        assert_eq!(self.entries(), other.entries());
        assert!(self.contents() == other.contents());
    }

    #[track_caller]
    pub(crate) fn assert_used(&self, scans: u64, indexes: u64) {
        assert_eq!(self.stats.scans.get(), scans);
        assert_eq!(self.stats.published_indexes.get(), indexes);
    }
}

/// The ztoc with `new` in place of `old`, which it has once.
fn forged(old: &[u8], new: &[u8]) -> Vec<u8> {
    let mut ztoc = soci::ztoc();
    let mut places = (0..=ztoc.len() - old.len()).filter(|&at| ztoc[at..].starts_with(old));
    let at = places.next().expect("there");
    assert_eq!(places.next(), None);
    ztoc[at..at + new.len()].copy_from_slice(new);
    ztoc
}

// Promises: soci-used, soci-refused
#[test]
fn ztoc_of_a_layer_gives_the_tree_of_a_scan() {
    for version in [Version::V1, Version::V2] {
        let (registry, layer) = served(soci::ztoc(), version);
        let scanned = Opened::new(&registry, false);
        scanned.assert_used(1, 0);
        let requests = registry.requests(&blob(&layer));
        let listed = Opened::new(&registry, true);
        listed.assert_used(0, 1);
        assert_eq!(registry.requests(&blob(&layer)), requests, "{version:?}");
        listed.assert_equals(&scanned);
        listed.assert_links_match();
        listed.assert_used(0, 1);
        assert_eq!(listed.stats.index_mismatches.get(), 0);
        assert_eq!(listed.entries().len(), 13);
    }
}

/// An index that others attached to an image is not one that the image's digest covers.
// Promises: published-note, published-not-written
#[test]
fn image_with_a_digest_has_only_trees_that_it_covers() {
    for (version, is_covered) in [(Version::V1, false), (Version::V2, true)] {
        let (registry, _, image) = served_image(soci::ztoc(), version);
        let digest: Sha256 = image.parse().expect("a digest");
        let origin = |opened: &Opened| {
            let archives = opened.volume.archives();
            let notes = archives[0].foreign_tree_note();
            (archives[0].tree_origin(), notes.is_some())
        };
        let [covered, shown] = if is_covered {
            [(TreeOrigin::Manifest, false); 2]
        } else {
            [(TreeOrigin::Archive, false), (TreeOrigin::Publisher, true)]
        };
        let counts = |is_used: bool| (u64::from(!is_used), u64::from(is_used));
        let names = [format!("@sha256:{image}"), ":1".to_owned()];
        for (name, expected) in names.iter().zip([None, Some(digest)]) {
            let opened = Opened::open(&registry.name(name), TreeOrigin::Publisher, expected);
            let (scans, indexes) = counts(is_covered);
            opened.assert_used(scans, indexes);
            assert_eq!(origin(&opened), covered, "{version:?} {name}");
        }
        let written = Opened::open(&registry.name(":1"), TreeOrigin::WRITTEN, None);
        written.assert_used(1, 0);
        assert_eq!(
            origin(&written),
            (TreeOrigin::Archive, false),
            "{version:?}"
        );
        let by_tag = Opened::new(&registry, true);
        by_tag.assert_used(0, 1);
        assert_eq!(origin(&by_tag), shown, "{version:?}");
    }
}

// Promises: soci-refused
#[test]
fn unusable_ztoc_costs_only_the_scan() {
    let whole = soci::ztoc();
    let (registry, _) = served(whole.clone(), Version::V1);
    let scanned = Opened::new(&registry, false);
    let len = u64::try_from(soci::layer().len()).expect("small");
    let unusable = [
        whole[..whole.len() / 2].to_vec(),
        Vec::new(),
        forged(b"\x03\0\0\x000.9\0", b"\x03\0\0\x001.0\0"),
        forged(&len.to_le_bytes(), &(len + 1).to_le_bytes()),
        forged(b"SCHILY.xattr.user.name", b"GNU.sparse.xxxxxxxxxxx"),
        forged(b"SCHILY.xattr.user.name", b"user.xxxxxxxxxxxxxxxxx"),
        forged(b"2009-02-13", b"2009-99-13"),
    ];
    for ztoc in unusable {
        let (registry, _) = served(ztoc, Version::V1);
        let opened = Opened::new(&registry, true);
        opened.assert_used(1, 0);
        opened.assert_equals(&scanned);
    }
}

// Promises: published-checked
#[test]
fn forged_name_in_a_ztoc_is_not_read() {
    let ztoc = forged(b"\x07\0\0\0d/text2", b"\x07\0\0\0d/other");
    let (registry, _) = served(ztoc, Version::V2);
    let opened = Opened::new(&registry, true);
    opened.assert_used(0, 1);
    let read = opened.read("d/other");
    assert!(matches!(read, Err(ReadError::IndexMismatch)), "{read:?}");
    assert_eq!(opened.stats.index_mismatches.get(), 1);
    assert_eq!(opened.read("d/text1").expect("readable").len(), 35_816);
}

// Promises: published-checked
#[test]
fn packed_bytes_are_compared_with_the_digests_of_a_ztoc() {
    let (registry, layer) = served(soci::ztoc(), Version::V1);
    let opened = Opened::new(&registry, true);
    let first = opened.read("d/text0").expect("readable");
    let mut other = soci::layer();
    // In the trailer of the member, which no decoder compares from a seek point.
    let last = other.len() - 1;
    other[last] ^= 1;
    registry.serve(
        &blob(&layer),
        Resource::new(other).etag(&format!("\"{layer}\"")),
    );
    assert!(matches!(
        opened.read("d/text3"),
        Err(ReadError::Damaged { .. })
    ));
    assert_eq!(opened.read("d/text0").expect("readable"), first);
}
