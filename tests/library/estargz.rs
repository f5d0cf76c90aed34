//! eStargz layers, which have a TOC of their files.

#![allow(clippy::indexing_slicing, reason = "a test may panic")]

use std::io::{Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tarfs::archive::{ReadError, TreeOrigin};

use crate::registry::{Registry, blob, digest_of, nothing};
use crate::soci::Opened;
use crate::support::image::{Files, Image, MANIFEST};
use crate::support::raw::{Archive, Header};
use crate::support::sha256::sha256;

const TOC_FILE: &str = "stargz.index.json";

/// Plain bytes of the first chunks of `d/big`.
const CHUNK: usize = 6000;

fn big() -> Vec<u8> {
    let mut state = 1_u32;
    let noise = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    });
    noise.take(2 * CHUNK + 3000).collect()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(plain).expect("space");
    encoder.finish().expect("space")
}

/// A layer with `big` as its largest file, without its TOC, and the offsets of its chunks.
fn members(big: &[u8]) -> (Vec<u8>, Vec<usize>) {
    let of_joe = |name| Header::new(name, b'0').owner(7, 8).put(265, "joe");
    let archive = Archive::new()
        .directory("d/")
        .pax(&[("SCHILY.xattr.user.name", "value")])
        .add(of_joe("d/big").mode(0o4755), big)
        .symlink("link", "d/big")
        .hard_link("hard", "d/big")
        .add(Header::new("device", b'3').device(5, 6), "")
        .file("empty", "")
        .add(of_joe("small"), "small\n")
        .unfinished();
    let place = |wanted: &[u8]| {
        let mut windows = archive.windows(wanted.len());
        windows.position(|found| found == wanted).expect("there")
    };
    let first = place(&big[..64]);
    let cuts = [first, first + CHUNK, first + 2 * CHUNK, place(b"small\n")];
    let mut packed = gzip(&archive[..first]);
    let mut offsets = Vec::new();
    for (number, &start) in cuts.iter().enumerate() {
        offsets.push(packed.len());
        let end = cuts.get(number + 1).copied().unwrap_or(archive.len());
        packed.extend(gzip(&archive[start..end]));
    }
    (packed, offsets)
}

/// The TOC of the layer with `big`.
fn toc(big: &[u8], offsets: &[usize]) -> Value {
    let digest = |bytes: &[u8]| format!("sha256:{}", sha256(bytes));
    let (one, two) = (&big[..CHUNK], &big[CHUNK..2 * CHUNK]);
    let mut toc = json!({ "version": 1, "entries": [
        { "name": "d/", "type": "dir", "mode": 0o755 },
        { "name": "d/big", "type": "reg", "size": big.len(), "mode": 0o4755, "uid": 7, "gid": 8, "userName": "joe",
            "xattrs": { "user.name": "dmFsdWU=" },
            "offset": offsets[0], "chunkSize": CHUNK, "chunkDigest": digest(one) },
        { "name": "d/big", "type": "chunk", "offset": offsets[1], "chunkOffset": CHUNK, "chunkSize": CHUNK,
            "chunkDigest": digest(two) },
        { "name": "d/big", "type": "chunk", "offset": offsets[2], "chunkOffset": 2 * CHUNK,
            "chunkDigest": digest(&big[2 * CHUNK..]) },
        { "name": "link", "type": "symlink", "linkName": "d/big", "mode": 0o777 },
        { "name": "hard", "type": "hardlink", "linkName": "d/big", "mode": 0o644 },
        { "name": "device", "type": "char", "devMajor": 5, "devMinor": 6, "mode": 0o644 },
        { "name": "empty", "type": "reg", "mode": 0o644 },
        { "name": "small", "type": "reg", "size": 6, "mode": 0o644, "uid": 7, "gid": 8, "offset": offsets[3],
            "chunkDigest": digest(b"small\n") },
    ] });
    for entry in toc["entries"].as_array_mut().expect("a list") {
        entry["modtime"] = json!("2001-09-09T01:46:40Z");
    }
    toc
}

/// A registry with an image of the layer `packed` with `toc`. Returns the path of the layer, too.
fn served(mut packed: Vec<u8>, toc: &Value, has_right_digest: bool) -> (Registry, String) {
    let toc = toc.to_string();
    let offset = packed.len();
    packed.extend(gzip(&Archive::new().file(TOC_FILE, &toc).end()));
    packed.extend(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0");
    packed.extend(format!("{offset:016x}STARGZ").into_bytes());
    packed.extend(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
    let mut plain = Vec::new();
    let mut decoder = MultiGzDecoder::new(&*packed);
    decoder.read_to_end(&mut plain).expect("gzip");
    let mut files = Files::default();
    let config = Image::new("", vec![plain]).config();
    let config = files.blob("application/vnd.oci.image.config.v1+json", config);
    let mut layer = files.blob("application/vnd.oci.image.layer.v1.tar+gzip", packed);
    let listed = if has_right_digest { &*toc } else { "another" };
    layer["annotations"] = json!({
        "containerd.io/snapshot/stargz/toc.digest": format!("sha256:{}", sha256(listed.as_bytes())),
    });
    let image =
        json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer] });
    let image = files.blob(MANIFEST, image.to_string().into_bytes());
    let registry = Registry::new(nothing());
    registry.push(&files);
    registry.tag("1", &files, &image);
    (registry, blob(digest_of(&layer)))
}

/// Entries of a scan but the file with the TOC.
fn entries_without_toc(opened: &Opened) -> Vec<String> {
    let mut entries = opened.entries();
    entries.retain(|entry| !entry.contains(TOC_FILE));
    entries
}

// Promises: stargz-used, soci-refused
#[test]
fn estargz_toc_gives_the_tree_without_a_scan() {
    let (packed, offsets) = members(&big());
    let (registry, layer) = served(packed, &toc(&big(), &offsets), true);
    let listed = Opened::new(&registry, true);
    listed.assert_used(0, 1);
    assert_eq!(registry.requests(&layer), 2, "the footer and the TOC");
    let scanned = Opened::new(&registry, false);
    scanned.assert_used(1, 0);
    assert_eq!(listed.entries(), entries_without_toc(&scanned));
    assert_eq!(scanned.entries().len(), listed.entries().len() + 1);
    let mut contents = scanned.contents();
    contents.pop();
    assert!(listed.contents() == contents);
    assert_eq!(listed.read("d/big").expect("readable"), big());
    listed.assert_used(0, 1);
}

/// Its tree is not that of a scan, so an update after a materialization would write files again.
// Promises: published-not-written
#[test]
fn estargz_toc_is_not_written() {
    let (packed, offsets) = members(&big());
    let (registry, _) = served(packed, &toc(&big(), &offsets), true);
    let name = registry.name(":1");
    Opened::open(&name, TreeOrigin::SHOWN, None).assert_used(0, 1);
    Opened::open(&name, TreeOrigin::WRITTEN, None).assert_used(1, 0);
}

// Promises: stargz-used, soci-refused
#[test]
fn unusable_estargz_toc_costs_only_the_scan() {
    let (packed, offsets) = members(&big());
    let whole = toc(&big(), &offsets);
    let changed = |at: usize, field: &str, value: Value| {
        let mut toc = whole.clone();
        toc["entries"][at][field] = value;
        toc
    };
    let unusable = [
        json!({}),
        json!({ "version": 2, "entries": whole["entries"] }),
        json!({ "version": 1, "entries": null }),
        json!({ "version": 1, "entries": [null] }),
        changed(0, "name", json!("\u{fffd}/")),
        changed(0, "type", json!("other")),
        changed(0, "modtime", json!("2001")),
        changed(1, "xattrs", json!({ "user.name": "!" })),
        changed(1, "size", json!(u64::MAX)),
        changed(1, "size", json!(11_000)),
        changed(1, "chunkSize", json!(9 << 20)),
        changed(1, "chunkDigest", json!("")),
        changed(2, "chunkOffset", json!(1)),
        changed(2, "innerOffset", json!(1)),
        changed(2, "offset", json!(offsets[0])),
        changed(3, "type", json!("reg")),
        changed(8, "offset", json!(u64::MAX >> 1)),
    ];
    let unusable = unusable.iter().map(|toc| (toc, true));
    for (toc, has_right_digest) in unusable.chain([(&whole, false)]) {
        let (registry, _) = served(packed.clone(), toc, has_right_digest);
        let opened = Opened::new(&registry, true);
        opened.assert_used(1, 0);
        assert_eq!(opened.read("d/big").expect("readable"), big(), "{toc}");
    }
}

// Promises: published-checked
#[test]
fn chunk_is_compared_with_its_digest_in_an_estargz_toc() {
    let mut other = big();
    other[CHUNK] ^= 1;
    let (packed, offsets) = members(&other);
    let (registry, _) = served(packed, &toc(&big(), &offsets), true);
    let opened = Opened::new(&registry, true);
    opened.assert_used(0, 1);
    let read = opened.read("d/big");
    assert!(matches!(read, Err(ReadError::Damaged { .. })), "{read:?}");
    assert_eq!(opened.read("small").expect("readable"), b"small\n");
}
