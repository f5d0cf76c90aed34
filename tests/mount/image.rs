//! Container images as sources: detected in archives and directories, verified, mounted and run.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::fixture::{TestDir, TestMount};
use crate::support::http::{Resource, Server};
use crate::support::image::{self, Files, Image};
use crate::support::measured_runner::MeasuredRunner;
use crate::support::packing::Packing;
use crate::support::program::{self, stderr_text};
use crate::support::raw::{self, Archive, Header};
use crate::support::rng::Rng;
use crate::support::sha256::sha256;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tarfs");

/// A payload long enough to be skipped on any link, even when memory is full of requested chunks.
const HUGE: usize = 104 << 20;

/// A layer with a file of noise.
fn layer() -> Vec<u8> {
    files().end()
}

fn files() -> Archive {
    Archive::new()
        .directory("d/")
        .file("d/noise", Rng::new(7).bytes(3 << 20))
        .file("d/text", "some text")
        .symlink("link", "d/text")
}

fn one() -> Image {
    Image::new("one", vec![layer()]).running(json!({ "Cmd": ["true"] }))
}

/// An image of two layers. The upper layer removes a file of the lower one.
fn two() -> Image {
    let lower = Archive::new()
        .directory("d/")
        .file("d/gone", "for good")
        .file("low", "below");
    let upper = files().file("d/.wh.gone", "");
    Image::new("two", vec![lower.end(), upper.end()])
}

/// SOURCE for every way to store an image.
fn image_sources(place: &TestDir, image: &Image) -> Vec<String> {
    let oci = image::oci(std::slice::from_ref(image));
    oci.write(&place.path("layout"));
    place.put("oci.tar", oci.tar());
    place.put("oci.tgz", image::packed(Packing::Gzip, &oci.tar()));
    let docker = image::docker(image).end();
    place.put("docker.tar", &docker);
    place.put("docker.tar.zst", image::packed(Packing::Zstd, &docker));
    place.put("blobs.tar", image::docker_with_blobs(image).tar());
    let mut kept = vec![
        "oci:layout".to_owned(),
        format!("oci:layout:{}", image.name),
        format!("oci-archive:oci.tar:{}", image.name),
        "oci-archive:oci.tgz".to_owned(),
        "docker-archive:docker.tar".to_owned(),
        format!("docker-archive:docker.tar.zst:{}:latest", image.name),
        "docker-archive:blobs.tar".to_owned(),
    ];
    let absolute = place.path("oci.tar");
    kept.push(format!("oci-archive:{}", absolute.display()));
    kept
}

#[test]
fn image_is_a_source_in_every_storage_format() {
    let noise = Rng::new(7).bytes(3 << 20);
    for packing in [Packing::Gzip, Packing::Zstd, Packing::Plain] {
        let place = TestMount::new(&["out"]);
        for (number, source) in image_sources(&place, &two().packed(packing))
            .iter()
            .enumerate()
        {
            let listed = place.succeeds(&["ls", "-R", source]);
            assert_eq!(listed, "d\nd/noise\nd/text\nlink\nlow\n", "{source}");
            let out = format!("out/{number}");
            fs::create_dir(place.path(&out)).expect("made");
            place.succeeds(&["materialize", "-q", source, "-C", &out]);
            let written = fs::read(place.path(&out).join("d/noise")).expect("written");
            assert!(written == noise, "{source}");
            let names = fs::read_dir(place.path(&out).join("d")).expect("a directory");
            assert_eq!(names.count(), 2, "{source}: what is gone is gone");
            place.succeeds(&["verify", "-q", source]);
        }
    }
}

#[test]
fn image_inside_an_archive_is_a_source() {
    let place = TestMount::new(&["out"]);
    let image = image::oci(&[two()]).tar();
    let outer = Archive::new().file("i/x.tar", &image).end();
    place.put("outer", &outer);
    let start = outer.windows(512).position(|block| block == &image[..512]);
    let start = start.expect("in it");
    for source in [
        "oci-archive:tar:outer!/i/x.tar".to_owned(),
        format!("oci-archive:tar:outer!/i/x.tar:{}", two().name),
        format!(
            "oci-archive:slice:{start}+{}:outer:{}",
            image.len(),
            two().name
        ),
    ] {
        assert_eq!(
            place.succeeds(&["ls", &source]),
            "d\nlink\nlow\n",
            "{source}"
        );
        place.succeeds(&["mount", &source, "mnt"]);
        let below = fs::read(place.path("mnt/low"));
        place.succeeds(&["umount", "mnt"]);
        assert_eq!(below.expect("readable"), b"below", "{source}");
    }
}

#[test]
fn mount_of_image_serves_its_layers() {
    let place = TestMount::new(&["out"]);
    let mnt = place.path("mnt");
    for source in image_sources(&place, &two()) {
        place.succeeds(&["mount", &source, "mnt"]);
        let read = fs::read(mnt.join("d/noise"));
        let linked = fs::read(mnt.join("link"));
        let (below, gone) = (fs::read(mnt.join("low")), mnt.join("d/gone").exists());
        place.succeeds(&["umount", "mnt"]);
        assert!(
            read.expect("readable") == Rng::new(7).bytes(3 << 20),
            "{source}"
        );
        assert_eq!(linked.expect("readable"), b"some text", "{source}");
        assert_eq!(below.expect("readable"), b"below", "{source}");
        assert!(!gone, "{source}");
    }
}

/// An archive with a huge image and a small one.
fn huge_and_small() -> Files {
    let huge = Archive::new().file("huge", Rng::new(1).bytes(HUGE)).end();
    image::oci(&[
        Image::new("huge", vec![huge]).packed(Packing::Plain),
        Image::new("small", vec![layer()]),
    ])
}

#[test]
fn only_the_selected_image_is_fetched() {
    let server = Server::start();
    server.serve(
        "/i.tar",
        Resource::new(huge_and_small().tar()).etag("\"1\""),
    );
    let place = TestMount::new(&["out"]);
    let url = server.url("/i.tar");

    let small = format!("oci-archive:{url}:small");
    // The first run finds all offsets. It skips large members or reads through them, whichever is
    // faster here.
    place.succeeds(&["image", &small]);
    let sent = server.sent_bytes("/i.tar");
    place.succeeds(&["materialize", "-q", &small, "-C", "out"]);
    assert_eq!(
        fs::read(place.path("out/link")).expect("there"),
        b"some text"
    );
    // Only documents and the layer's bytes are sent.
    let more = server.sent_bytes("/i.tar") - sent;
    assert!((3 << 20..4 << 20).contains(&more), "{more}");
    let sent = sent + more;
    place.succeeds(&["ls", &small]);
    let more = server.sent_bytes("/i.tar") - sent;
    assert!((3 << 20..4 << 20).contains(&more), "{more}");
    // Nothing of the layer is sent when it has an index.
    place.succeeds(&["ls", &small]);
    let least = server.sent_bytes("/i.tar") - sent - more;
    assert!(least < 1 << 17, "{least}");
}

#[test]
fn unnamed_images_are_listed_and_selected_by_digest() {
    let place = TestMount::new(&["out"]);
    let image = |file: &str| Image::new("", vec![Archive::new().file(file, "").end()]);
    let images = [image("one"), image("two")];
    // The same in an index whose entries have no names.
    let mut files = image::oci_for_all(&images);
    files.write(&place.path("layout"));
    let complaint = place.error_of(&["ls", "oci:layout"]);
    for (image, file) in images.iter().zip(["one", "two"]) {
        let manifest = files.manifest(image);
        let digest = manifest["digest"].as_str().expect("a digest");
        assert!(complaint.contains(&format!("'{digest}'")), "{complaint}");
        let source = format!("oci:layout:{digest}");
        assert_eq!(place.succeeds(&["ls", &source]), format!("{file}\n"));
    }
    let unknown = format!("oci:layout:sha256:{}", "0".repeat(64));
    let complaint = place.error_of(&["ls", &unknown]);
    assert!(
        complaint.contains("no image there is called"),
        "{complaint}"
    );
}

#[test]
fn layer_is_cached_by_digest_for_any_location() {
    let server = Server::start();
    let (mut first, mut second) = (huge_and_small(), huge_and_small());
    first.put("note", "the first");
    second.put("other", "the second, and longer");
    for (path, files) in [("/1.tar", first), ("/2.tar", second)] {
        server.serve(path, Resource::new(files.tar()).etag("\"1\""));
    }
    let place = TestMount::new(&["out"]);
    let list = |path: &str| {
        let source = format!("oci-archive:{}:huge", server.url(path));
        assert_eq!(place.succeeds(&["ls", &source]), "huge\n");
        server.sent_bytes(path)
    };
    let sent = list("/1.tar");
    assert!(
        sent > HUGE as u64,
        "all of a layer is held against its digest"
    );
    place.succeeds(&[
        "image",
        &format!("oci-archive:{}:huge", server.url("/2.tar")),
    ]);
    let before = server.sent_bytes("/2.tar");
    let sent = list("/2.tar") - before;
    assert!(sent < 1 << 17, "{sent} of what is known already");
}

#[test]
fn layer_with_wrong_digest_is_rejected() {
    let place = TestMount::new(&["out"]);
    let image = one().packed(Packing::Plain);
    let path = format!("blobs/sha256/{}", sha256(&layer()));
    // The damaged archive still has the form of an image. Only the digest differs.
    let middle = layer().len() / 2;
    let mut oci = image::oci(std::slice::from_ref(&image));
    oci.get(&path)[middle] ^= 1;
    place.put("oci.tar", oci.tar());
    oci.write(&place.path("layout"));
    let mut docker = image::docker_with_blobs(&image);
    docker.get(&path)[middle] ^= 1;
    place.put("docker.tar", docker.tar());

    for source in [
        "oci-archive:oci.tar",
        "oci:layout",
        "docker-archive:docker.tar",
    ] {
        let words = ["materialize", "-q", source, "--atomic", "-C", "out"];
        let complaint = place.error_of(&words);
        assert!(complaint.contains("its SHA-256 is"), "{complaint}");
        assert_eq!(fs::read_dir(place.path("out")).expect("there").count(), 0);
        let complaint = place.error_of(&["mount", "--wait-index", source, "mnt"]);
        assert!(complaint.contains("its SHA-256 is"), "{complaint}");
        let complaint = place.error_of(&["ls", source]);
        assert!(complaint.contains("its SHA-256 is"), "{complaint}");
        let complaint = place.error_of(&["verify", "-q", source]);
        assert!(complaint.contains("its SHA-256 is"), "{complaint}");
    }
}

#[test]
fn docker_layer_with_wrong_plain_bytes_is_rejected() {
    let bottom = Archive::new().file("base", "good").end();
    let top = Archive::new().file("tool", "good").end();
    let evil = Archive::new().file("tool", "evil").end();
    let unnamed = |number: usize, _: &[u8]| format!("{number}/layer.tar.gz");
    let named = |_: usize, packed: &[u8]| format!("{}.tar.gz", sha256(packed));
    for packing in [Packing::Gzip, Packing::Zstd] {
        let image = Image::new("one", vec![bottom.clone(), top.clone()])
            .packed(packing)
            .running(json!({ "Cmd": ["/tool"] }));
        let expected = format!("--expect-sha256={}", sha256(&image.config()));
        let good = [bottom.clone(), top.clone()];
        let bad = [bottom.clone(), evil.clone()];
        for (kind, is_named) in [("unnamed", false), ("named", true)] {
            let archive = |contents: &[Vec<u8>]| {
                if is_named {
                    image::docker_with_packed_layers(&image, contents, named)
                } else {
                    image::docker_with_packed_layers(&image, contents, unnamed)
                }
            };
            let place = TestMount::new(&["out"]);
            place.put("good.tar", archive(&good).tar());
            place.put("bad.tar", archive(&bad).tar());

            let source = "docker-archive:good.tar";
            for _ in 0..2 {
                assert_eq!(place.succeeds(&["ls", &expected, source]), "base\ntool\n");
            }
            place.succeeds(&["verify", "-q", &expected, source]);
            place.succeeds(&["materialize", "-q", &expected, source, "-C", "out"]);
            place.succeeds(&["bundle", "-q", &expected, source, "box"]);
            fs::remove_dir_all(place.path("out")).expect("removed");
            fs::remove_dir_all(place.path("box")).expect("removed");

            let source = "docker-archive:bad.tar";
            for words in [
                &["ls", &expected, source][..],
                &["ls", source],
                &["verify", "-q", &expected, source],
                &["mount", "--wait-index", &expected, source, "mnt"],
                &["mount", &expected, source, "mnt"],
                &[
                    "materialize",
                    "-q",
                    "--atomic",
                    &expected,
                    source,
                    "-C",
                    "out",
                ],
                &["bundle", "-q", &expected, source, "box"],
            ] {
                let complaint = place.error_of(words);
                let (found, told) = (sha256(&evil), sha256(&top));
                for digest in [&found, &told] {
                    assert!(complaint.contains(digest), "{kind} {words:?}: {complaint}");
                }
            }
            assert!(!place.path("out").exists());
            assert_eq!(names_in(&place.path("box")), Vec::<String>::new());
        }
    }
}

#[test]
fn oci_layer_with_wrong_plain_bytes_is_rejected() {
    let good = Archive::new().file("tool", "good").end();
    let evil = Archive::new().file("tool", "evil").end();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let image = Image::new("one", vec![good.clone()])
            .packed(packing)
            .running(json!({ "Cmd": ["/tool"] }));
        let mut files = Files::default();
        let manifest = files.manifest_with(&image, std::slice::from_ref(&evil));
        files.index(&[manifest]);
        let place = TestMount::new(&["out"]);
        place.put("oci.tar", files.tar());
        files.write(&place.path("layout"));
        for source in ["oci:layout", "oci-archive:oci.tar"] {
            for words in [
                &["ls", source][..],
                &["verify", "-q", source],
                &["mount", source, "mnt"],
                &["materialize", "-q", "--atomic", source, "-C", "out"],
                &["bundle", "-q", source, "box"],
            ] {
                let complaint = place.error_of(words);
                for digest in [sha256(&evil), sha256(&good)] {
                    assert!(complaint.contains(&digest), "{words:?}: {complaint}");
                }
            }
            assert_eq!(names_in(&place.path("box")), Vec::<String>::new());
        }
    }
}

#[test]
fn empty_layers_and_images_without_layers_are_valid() {
    let empty = Vec::new();
    for packing in [Packing::Plain, Packing::Gzip] {
        let layers = vec![empty.clone(), two().layers[0].clone(), empty.clone()];
        let runs = json!({ "Cmd": ["true"] });
        let some = Image::new("some", layers).packed(packing);
        let none = Image::new("none", Vec::new()).packed(packing);
        for (image, expected) in [(some, "d\nd/gone\nlow\n"), (none, "")] {
            let place = TestMount::new(&["out"]);
            let image = image.running(runs.clone());
            for (number, source) in image_sources(&place, &image).iter().enumerate() {
                assert_eq!(place.succeeds(&["ls", "-R", source]), expected, "{source}");
                place.succeeds(&["verify", "-q", source]);
                place.succeeds(&["bundle", "-q", source, &format!("box-{number}")]);
                let out = format!("out/{number}");
                fs::create_dir(place.path(&out)).expect("made");
                place.succeeds(&["materialize", "-q", source, "-C", &out]);
                place.succeeds(&["mount", source, "mnt"]);
                let names = |name: &str| names_in(&place.path(name));
                let found = [
                    names("mnt"),
                    names(&out),
                    names(&format!("box-{number}/rootfs")),
                ];
                place.succeeds(&["umount", "mnt"]);
                let count = if expected.is_empty() { 0 } else { 2 };
                assert!(
                    found.iter().all(|names| names.len() == count),
                    "{source}: {found:?}"
                );
            }
        }
    }
}

#[test]
fn skipped_entries_of_image_are_named_by_every_verb() {
    let bottom = Archive::new().file("f", "below").file("f/x", "lost");
    let top = Archive::new()
        .hard_link("h", "nowhere")
        .file("../up", "lost");
    let image = Image::new("one", vec![bottom.end(), top.end()]).running(json!({ "Cmd": ["f"] }));
    let place = TestMount::new(&["out"]);
    place.put("oci.tar", image::oci(&[image]).tar());
    let source = "oci-archive:oci.tar";
    let names = |text: &str| {
        for told in [
            "f/x: layer 1: something on the way is not a directory",
            "h: layer 2: the target of the hard link is missing",
            "up: layer 2: the name contains '..'",
        ] {
            assert!(text.contains(told), "{told}: {text}");
        }
    };
    names(&place.error_of(&["ls", source]));
    names(&place.error_of(&["materialize", "-q", source, "-C", "out"]));
    names(&place.error_of(&["bundle", "-q", source, "box"]));
    let output = place.tarfs(&["mount", source, "mnt"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let status = place.succeeds(&["status", "mnt"]);
    place.succeeds(&["umount", "mnt"]);
    names(&stderr_text(&output));
    names(&status);

    let output = place.tarfs(&["verify", "-q", source]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches(": not good\n").count(), 2, "{text}");
    let complaints = stderr_text(&output);
    for what in [
        "f/x: something on the way is not a directory",
        "h: the target of the hard link is missing",
        "up: the name contains '..'",
    ] {
        assert!(complaints.contains(what), "{what}: {complaints}");
    }
    let output = place.tarfs(&["verify", "-q", "--json", source]);
    let reports: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let counts = reports.iter().map(|report| {
        let problems = report["problems"].as_array().map(Vec::len);
        (report["is_good"].clone(), problems)
    });
    let expected = [(json!(false), Some(1)), (json!(false), Some(2))];
    assert_eq!(counts.collect::<Vec<_>>(), expected);
}

#[test]
fn implied_directories_of_image_have_one_mtime() {
    let at = |name: &str, mtime| Header::new(name, b'0').mtime(mtime);
    let bottom = Archive::new()
        .add(at("a/b/c", 1_000), "")
        .add(at("a/d", 2_000), "");
    let top = Archive::new().add(at("e/f", 3_000), "");
    let image = Image::new("one", vec![bottom.end(), top.end()]).running(json!({ "Cmd": ["f"] }));
    let place = TestMount::new(&["out"]);
    place.put("oci.tar", image::oci(&[image]).tar());
    let source = "oci-archive:oci.tar";
    place.succeeds(&["materialize", "-q", source, "-C", "out"]);
    place.succeeds(&["bundle", "-q", source, "box"]);
    place.succeeds(&["mount", source, "mnt"]);
    let times = |root: &str| {
        [".", "a", "a/b", "e"].map(|name| {
            let path = place.path(root).join(name);
            fs::metadata(path).expect("there").mtime()
        })
    };
    let found = [times("mnt"), times("out"), times("box/rootfs")];
    place.succeeds(&["umount", "mnt"]);
    assert_eq!(found, [[0; 4]; 3]);
}

#[test]
fn interrupted_run_leaves_no_temporary_files() {
    let place = TestMount::new(&["out"]);
    let image = Image::new("one", vec![Archive::new().file("big", vec![7; HUGE]).end()]);
    place.put("oci.tar", image::oci(&[image.packed(Packing::Plain)]).tar());
    let mut child = Command::new(PROGRAM)
        .current_dir(place.root())
        .args(["materialize", "-q", "oci-archive:oci.tar", "-C", "out"])
        .env("TARFS_CACHE_DIR", place.path("cache"))
        .spawn()
        .expect("started");
    let out = place.path("out");
    while fs::read_dir(&out).expect("there").count() == 0 {
        assert!(child.try_wait().expect("a child").is_none(), "too fast");
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::TERM).expect("alive");
    let status = child.wait().expect("a child");
    if status.signal().is_some() {
        assert_eq!(names_in(&out), Vec::<String>::new());
    }
}

/// The name of the document that contains `what`.
fn blob_with(files: &Files, what: &str) -> String {
    let is_it = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.starts_with('{') && text.contains(what)
    };
    let mut blobs = files
        .0
        .iter()
        .filter(|(name, _)| name.starts_with("blobs/"));
    let found = blobs.find(|(_, bytes)| is_it(bytes));
    found.expect("a blob with that").0.clone()
}

#[test]
fn inconsistent_image_documents_are_rejected() {
    let place = TestMount::new(&["out"]);
    let good = image::oci(&[one()]);
    let (manifest, config) = (
        blob_with(&good, "\"layers\":"),
        blob_with(&good, "diff_ids"),
    );
    let layer = good
        .0
        .iter()
        .find(|(_, bytes)| bytes.starts_with(&[0x1f, 0x8b]));
    let layer = layer.expect("packed").0.clone();
    let refused = |files: &Files, why: &str| {
        place.put("oci.tar", files.tar());
        let complaint = place.error_of(&["ls", "oci-archive:oci.tar"]);
        assert!(complaint.contains(why), "{complaint}");
    };
    for document in [&manifest, &config] {
        let mut files = good.clone();
        let bytes = files.get(document);
        let last = bytes.len() - 1;
        bytes[last] = b' ';
        refused(&files, "its SHA-256 is");
        files.get(document).push(b' ');
        refused(&files, " bytes, not ");
        let mut files = good.clone();
        files.0.retain(|(name, _)| name != document);
        refused(&files, "it is not there");
    }
    let mut files = good.clone();
    files.get(&layer).push(0);
    refused(&files, " bytes, not ");

    let mut files = good.clone();
    let index = String::from_utf8(files.get("index.json").clone()).expect("UTF-8");
    files.put("index.json", vec![b' '; (4 << 20) + 1]);
    refused(&files, "4194304 are allowed");
    let digest = manifest.trim_start_matches("blobs/sha256/");
    for wrong in ["../../index.json", &digest.to_uppercase(), ""] {
        files.put("index.json", index.replace(digest, wrong));
        refused(&files, "a digest in it is none");
    }
    files.put("index.json", index.replace("sha256:", "sha512:"));
    refused(&files, "sha512 is not supported");
    files.put("index.json", format!(r#"{{"deep":{}"#, "[".repeat(100_000)));
    refused(&files, "it ends too early");
    files.0.retain(|(name, _)| name != "index.json");
    refused(&files, "there is no index.json");

    // An index of indexes of indexes, and so on.
    let mut files = good.clone();
    let mut inner = files.manifest(&one());
    for _ in 0..6 {
        let index = json!({ "schemaVersion": 2, "manifests": [inner] });
        inner = files.blob(image::INDEX, index.to_string().into_bytes());
    }
    files.index(&[inner]);
    refused(&files, "an index in too many others");
}

/// An archive with this configuration, and with additions to its manifest and index.
fn with_documents(config: &str, manifest_more: &str, index_more: &str) -> Vec<u8> {
    let mut files = image::oci(&[one()]);
    let path = blob_with(&files, "\"layers\":");
    let mut manifest: Value = serde_json::from_slice(files.get(&path)).expect("a manifest");
    let config = files.blob("application/vnd.oci.image.config.v1+json", config.into());
    let members = manifest.as_object_mut().expect("an object");
    members.insert("config".to_owned(), config);
    let mut manifest = manifest.to_string();
    manifest.pop();
    let manifest = files.blob(
        image::MANIFEST,
        format!("{manifest}{manifest_more}}}").into(),
    );
    files.index(&[manifest]);
    let index = files.get("index.json");
    index.pop();
    index.extend([index_more.as_bytes(), b"}"].concat());
    files.tar()
}

#[test]
fn expanding_image_documents_stay_within_memory() {
    const MOST_BYTES: u64 = (32 + 64) << 20;
    // Documents of this length are accepted.
    const LEN: usize = 4_000_000;
    let filled = |one: &str| vec![one; LEN / (one.len() + 1)].join(",");
    let numbered = |value: &str| {
        let count = LEN / (value.len() + 10);
        let all = (100_000..100_000 + count).map(|number| format!("\"{number}\":{value}"));
        all.collect::<Vec<_>>().join(",")
    };
    let deep = filled(&format!("{}1{}", r#"{"":"#.repeat(120), "}".repeat(120)));
    let (ports, labels, words) = (numbered("{}"), numbered("\"\""), filled("\"\""));
    let descriptors = filled(r#"{"digest":"","size":0,"annotations":{"":""}}"#);
    let inside = |text: &str| with_documents(&format!("{{\"config\":{{{text}}}}}"), "", "");
    let deep_config = format!("{{\"z\":[{deep}]}}");
    let diff_ids = format!("{{\"rootfs\":{{\"diff_ids\":[{words}]}}}}");
    let deep = format!(",\"z\":[{deep}]");
    let cases = [
        (0, with_documents(&deep_config, "", "")),
        (0, with_documents("{}", &deep, "")),
        (0, with_documents("{}", "", &deep)),
        (2, inside(&format!("\"ExposedPorts\":{{{ports}}}"))),
        (2, inside(&format!("\"Labels\":{{{labels}}}"))),
        (2, inside(&format!("\"Env\":[{words}]"))),
        (2, inside(&format!("\"Cmd\":[{words}]"))),
        (2, with_documents(&diff_ids, "", "")),
        (
            2,
            with_documents("{}", &format!(",\"manifests\":[{descriptors}]"), ""),
        ),
        (
            2,
            with_documents("{}", "", &format!(",\"layers\":[{descriptors}]")),
        ),
    ];
    let place = TestMount::new(&["out"]);
    let mut supervisor = MeasuredRunner::start(place.root());
    for (number, (code, archive)) in cases.into_iter().enumerate() {
        place.put("i.tar", &archive);
        for verb in [&["image"][..], &["image", "--json"], &["ls"]] {
            let memory = ["--memory=32MiB", "oci-archive:i.tar"];
            let words = [&[env!("CARGO_BIN_EXE_tarfs")], verb, &memory].concat();
            let run = supervisor.run(place.root(), &words);
            let said: String = run.said.chars().take(500).collect();
            assert_eq!(run.code, code, "{number}: {verb:?}: {said}");
            let peak = run.peak_bytes;
            assert!(peak < MOST_BYTES, "{number}: {verb:?}: {peak} bytes");
        }
    }
}

#[test]
fn names_in_image_do_not_escape_it() {
    let place = TestMount::new(&["out"]);
    place.put("secret.tar", layer());
    let image = one().packed(Packing::Plain);

    let directory = place.path("layout");
    image::oci(std::slice::from_ref(&image)).write(&directory);
    let blob = directory.join("blobs/sha256").join(sha256(&layer()));
    fs::remove_file(&blob).expect("there");
    symlink(place.path("secret.tar"), &blob).expect("linked");
    let complaint = place.error_of(&["ls", "oci:layout"]);
    assert!(
        complaint.contains("a file outside the directory is not supported"),
        "{complaint}"
    );

    let config = json!({ "rootfs": { "diff_ids": [format!("sha256:{}", sha256(&layer()))] } });
    for (path, why) in [
        ("../secret.tar", "leads out of the archive"),
        ("/secret.tar", "leads out of the archive"),
        ("up", "a link out of the archive"),
        ("round", "a link to a link"),
        ("nothing", "it is not there"),
        ("directory", "no regular file"),
    ] {
        let manifest = json!([{ "Config": "c.json", "Layers": [path] }]);
        let archive = raw::Archive::new()
            .file("c.json", config.to_string())
            .file("manifest.json", manifest.to_string())
            .directory("directory/")
            .symlink("up", "../secret.tar")
            .symlink("round", "round")
            .end();
        place.put("docker.tar", &archive);
        let complaint = place.error_of(&["ls", "docker-archive:docker.tar"]);
        assert!(complaint.contains(why), "{path}: {complaint}");
    }
}

#[test]
fn image_of_the_requested_platform_is_selected() {
    let place = TestMount::new(&["out"]);
    let layer = |name: &str| vec![Archive::new().file(name, name).end()];
    let here = Image::new("here", layer("here"));
    let files = image::oci_for_all(&[
        Image::new("s390x", layer("s390x")).on("linux", "s390x"),
        here.clone(),
        Image::new("windows", layer("windows")).on("windows", here.platform.1),
    ]);
    place.put("i.tar", files.tar());
    assert_eq!(place.succeeds(&["ls", "oci-archive:i.tar"]), "here\n");
    for (platform, listed) in [("linux/s390x", "s390x\n"), ("linux/s390x/v1", "")] {
        let words = ["ls", "oci-archive:i.tar", "--platform", platform];
        if listed.is_empty() {
            let complaint = place.error_of(&words);
            assert!(
                complaint.contains("no image there is for linux/s390x/v1"),
                "{complaint}"
            );
        } else {
            assert_eq!(place.succeeds(&words), listed);
        }
    }
    let docker = Image::new("alien", layer("alien")).on("linux", "s390x");
    place.put("d.tar", image::docker(&docker).end());
    assert_eq!(
        place.succeeds(&["ls", "docker-archive:d.tar"]),
        "alien\n",
        "the only one there is"
    );
    let words = ["ls", "docker-archive:d.tar", "--platform", "linux/riscv64"];
    let complaint = place.error_of(&words);
    assert!(complaint.contains("there is 'linux/s390x'"), "{complaint}");
}

#[test]
fn image_verb_prints_config_and_command() {
    let place = TestMount::new(&["out"]);
    let execution = json!({ "Entrypoint": ["/bin/app"], "Env": ["A=b"], "User": "www",
                            "WorkingDir": "/srv", "Volumes": { "/data": {} },
                            "Labels": { "maker": "me" } });
    let image = one().running(execution.clone());
    for source in image_sources(&place, &image) {
        let told: Value =
            serde_json::from_str(&place.succeeds(&["image", "--json", &source])).expect("JSON");
        assert_eq!(told["config"]["config"], execution, "{source}");
        assert_eq!(told["names"][0], "one", "{source}");
        assert_eq!(told["layers"].as_array().map(Vec::len), Some(1));
        let digest = told["layers"][0]["digest"].as_str().expect("a digest");
        let packed = source.starts_with("oci");
        let layer = if packed {
            image::packed(Packing::Gzip, &layer())
        } else {
            layer()
        };
        assert_eq!(digest, format!("sha256:{}", sha256(&layer)), "{source}");

        let digest = told["digest"].as_str().expect("a digest").to_owned();
        let words = place.succeeds(&["image", &source]);
        for part in [
            &digest,
            "entry point   /bin/app",
            "user          www",
            "A=b",
            "/srv",
            "volume        /data",
            "label         maker=me",
        ] {
            assert!(words.contains(part), "{words}");
        }
        place.succeeds(&["ls", &source, "--expect-sha256", &digest]);
        let other = sha256(b"other");
        let complaint = place.error_of(&["ls", &source, "--expect-sha256", &other]);
        assert!(complaint.contains("the image's digest is"), "{complaint}");
    }
    place.put("a.tar", layer());
    let words = ["materialize", "-q", "--resume", "oci:layout", "-C", "out"];
    let complaint = place.error_of(&words);
    assert!(
        complaint.contains("--resume cannot be used with an image"),
        "{complaint}"
    );
    for verb in ["image", "ls", "index", "verify", "materialize", "mount"] {
        let place_for_it: &[&str] = match verb {
            "mount" => &["mnt"],
            "materialize" => &["-C", "out"],
            _ => &[],
        };
        let with =
            |flags: &[&str]| place.error_of(&[&[verb, "oci:layout"], place_for_it, flags].concat());
        let complaint = with(&["--compression", "gzip"]);
        assert!(
            complaint.contains("--compression cannot be used with an image"),
            "{verb}: {complaint}"
        );
        if verb != "image" {
            place.succeeds(&["index", "-q", "--output", "a.idx", "a.tar"]);
            let complaint = with(&["--index", "a.idx"]);
            assert!(
                complaint.contains("--index cannot be used with an image"),
                "{verb}: {complaint}"
            );
        }
    }
    let complaint = place.error_of(&["image", "oci.tar"]);
    assert!(complaint.contains("names no image"), "{complaint}");
    let complaint = place.error_of(&["ls", "docker-archive:oci.tar"]);
    assert!(
        complaint.contains("there is no manifest.json"),
        "{complaint}"
    );
    let complaint = place.error_of(&["ls", "oci-archive:-"]);
    assert!(complaint.contains("standard input"), "{complaint}");
    let complaint = place.error_of(&["ls", "oci:layout:two"]);
    assert!(
        complaint.contains("called 'two'; there is 'one'"),
        "{complaint}"
    );
}

/// A root file system with one static program, which is a shell.
fn busybox() -> Vec<u8> {
    let program = fs::read("/bin/busybox").expect("busybox-static is installed");
    let executable = Header::new("bin/busybox", b'0').mode(0o755);
    let mut archive = Archive::new()
        .directory("bin/")
        .add(executable, program)
        .directory("etc/")
        .file(
            "etc/passwd.real",
            "root:x:0:0::/root:/bin/sh\napp:x:1234:77:app:/home/app:/bin/sh\n",
        )
        .symlink("etc/passwd", "/etc/passwd.real")
        .file("etc/group", "app:x:77:\nmore:x:88:other,app\n")
        .add(
            Header::new("home/app/", b'5').mode(0o755).owner(1234, 77),
            "",
        );
    for name in [
        "sh", "id", "cat", "touch", "hostname", "stat", "grep", "true",
    ] {
        archive = archive.symlink(&format!("bin/{name}"), "busybox");
    }
    archive.end()
}

/// Start of a command of [`USER`] with its own runtime and cache directories.
const AS_USER: &[&str] = &[
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "env",
    "-i",
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
    "XDG_RUNTIME_DIR=run",
    "TARFS_CACHE_DIR=cache",
];

/// An unprivileged user without subordinate ids.
const USER: u32 = 65534;

/// Output of the container from the bundle at `bundle`, run by `runtime`. `before` precedes the
/// command.
#[track_caller]
fn run_in_container(place: &TestDir, before: &[&str], runtime: &str, bundle: &str) -> String {
    let name = format!("tarfs-{}-{bundle}-{runtime}", std::process::id());
    // Runtimes fail where both versions of cgroups are mounted.
    let script = "umount -R /sys/fs/cgroup
                  mount -t cgroup2 cgroup2 /sys/fs/cgroup
                  exec \"$@\"";
    // crun cannot set up devices where the limit of locked memory is low.
    let groups: &[&str] = match runtime {
        "crun" => &["--cgroup-manager=disabled"],
        _ => &[],
    };
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .args(before)
        .args([runtime, "--root", "state"])
        .args(groups)
        .args(["run", "-b", bundle, &name])
        .current_dir(place.root())
        .output()
        .expect("unshare is installed");
    assert!(
        output.status.success(),
        "{runtime}: {}",
        stderr_text(&output)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn bundle_runs_in_container_runtime() {
    let place = TestMount::new(&["out"]);
    let script = "id -u; id -g; id -G; cat /proc/self/mounts >/dev/null && echo $HOME $A; \
                  echo written >file";
    let execution = json!({
        "Entrypoint": ["/bin/sh", "-c"],
        "Cmd": [script],
        "Env": ["A=b"],
        "User": "app",
        "WorkingDir": "/home/app",
    });
    let image = Image::new("one", vec![busybox()]).running(execution);
    place.put("i.tar", image::oci(&[image]).tar());
    place.succeeds(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    for flag in ["--allow-truncated", "--compression=none"] {
        let words = ["bundle", "-q", "--force", flag, "oci-archive:i.tar", "box"];
        let complaint = place.error_of(&words);
        assert!(complaint.contains("cannot be used"), "{complaint}");
        assert!(place.path("box/config.json").exists(), "{flag}");
    }
    let written = place.path("box/rootfs/home/app/file");
    for runtime in ["crun", "runc"] {
        let said = run_in_container(&place, &[], runtime, "box");
        assert_eq!(said, "1234\n77\n77 88\n/home/app b\n", "{runtime}");
        assert_eq!(fs::read_to_string(&written).expect("written"), "written\n");
        fs::remove_file(&written).expect("ours");
    }
    fs::write(&written, "old").expect("written");

    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    assert!(complaint.contains("--force"), "{complaint}");
    let words = [
        "bundle",
        "-q",
        "--force",
        "oci-archive:i.tar",
        "box",
        "--",
        "hostname; id -u",
    ];
    place.succeeds(&words);
    assert_eq!(run_in_container(&place, &[], "crun", "box"), "box\n1234\n");
    assert!(!written.exists(), "a new tree");
}

#[test]
fn bundle_directory_is_private() {
    let place = TestMount::new(&["out"]);
    let execution = json!({ "Cmd": ["/bin/sh"], "Volumes": { "/proc/x": {}, "/data": {} } });
    let image = Image::new("one", vec![busybox()]).running(execution);
    place.put("i.tar", image::oci(&[image]).tar());
    let bundle = |directory: &str| place.tarfs(&["bundle", "-q", "oci-archive:i.tar", directory]);
    let mode = |directory: &str| {
        let status = fs::metadata(place.path(directory)).expect("there");
        status.permissions().mode() & 0o7777
    };
    let output = bundle("new/box");
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert_eq!((mode("new/box"), mode("new") & 0o700), (0o700, 0o700));
    assert!(
        !stderr_text(&output).contains("other users"),
        "{}",
        stderr_text(&output)
    );
    assert!(
        stderr_text(&output).contains("'/proc/x' is left out"),
        "{}",
        stderr_text(&output)
    );

    fs::create_dir(place.path("open")).expect("fresh");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(place.path("open"), open).expect("ours");
    let output = bundle("open");
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert_eq!(mode("open"), 0o755, "the user's own");
    assert!(
        stderr_text(&output).contains("chmod 700 open"),
        "{}",
        stderr_text(&output)
    );
}

#[test]
fn volumes_at_system_directories_are_skipped() {
    let place = TestMount::new(&["out"]);
    let volumes = json!({
        "/link/sys": {}, "/link/srv/data": {}, "/relative/x": {}, "/up/proc": {}, "/chain": {},
        "/loop/x": {}, "/link": {}, "/dangling/x": {}, "/file/x": {}, "/plain": {}, "/..": {},
    });
    let tree = Archive::new()
        .directory("srv")
        .symlink("link", "/")
        .symlink("relative", "../../srv/./dev-link")
        .symlink("srv/dev-link", "../dev")
        .symlink("up", "srv/../..")
        .symlink("chain", "link/link/sys/fs")
        .symlink("loop", "loop")
        .symlink("dangling", "/nowhere/proc")
        .file("file", "")
        .end();
    let execution = json!({ "Cmd": ["x"], "Volumes": volumes });
    let image = Image::new("one", vec![tree]).running(execution);
    place.put("i.tar", image::oci(&[image]).tar());
    let output = place.tarfs(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let said = stderr_text(&output);
    for left_out in [
        "/link/sys",
        "/relative/x",
        "/up/proc",
        "/chain",
        "/loop/x",
        "/file/x",
    ] {
        let line = format!("'{left_out}' is left out");
        assert!(said.contains(&line), "{line}: {said}");
    }
    let config = fs::read_to_string(place.path("box/config.json")).expect("written");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let mounts = config["mounts"].as_array().expect("a list");
    let destinations: Vec<_> = mounts
        .iter()
        .filter(|mount| mount["type"] == "none")
        .map(|mount| mount["destination"].as_str().expect("a path"))
        .collect();
    assert_eq!(destinations, ["/nowhere/proc/x", "/plain", "/srv/data"]);
}

/// Makes a bundle `box` of `i.tar` as [`USER`] with this umask. Returns standard error.
#[track_caller]
fn bundle_as_user(place: &TestDir, umask: &str) -> String {
    program::copy_to(&place.path("tarfs"));
    fs::set_permissions(place.root(), Permissions::from_mode(0o755)).expect("ours");
    chown(place.root(), Some(USER), Some(USER)).expect("root runs the tests");
    let script = format!("umask {umask} && exec ./tarfs bundle -q oci-archive:i.tar box");
    let made = Command::new("env")
        .args(AS_USER)
        .args(["sh", "-c", &script])
        .current_dir(place.root())
        .output()
        .expect("setpriv is installed");
    assert!(made.status.success(), "{}", stderr_text(&made));
    stderr_text(&made)
}

#[test]
fn user_bundle_has_empty_files_for_devices() {
    let place = TestMount::new(&["out"]);
    let device = |name: &str, kind: u8| Header::new(name, kind).mode(0o640).device(1, 3);
    let lower = Archive::new()
        .add(device("dev/null", b'3'), "")
        .hard_link("dev/other", "dev/null");
    let upper = Archive::new().add(device("disk", b'4'), "").fifo("fifo");
    let image = Image::new("one", vec![lower.end(), upper.end()]).running(json!({ "Cmd": ["x"] }));
    place.put("i.tar", image::oci(&[image]).tar());
    let said = bundle_as_user(&place, "027");
    assert!(
        said.contains("box/rootfs: device nodes written as empty files") && said.contains(": 2\n"),
        "{said}"
    );
    let status = |name: &str| {
        let status = fs::symlink_metadata(place.path("box/rootfs").join(name));
        status.expect("written")
    };
    for name in ["dev/null", "dev/other", "disk"] {
        let file = status(name);
        assert!(file.is_file(), "{name}: {:?}", file.file_type());
        let seen = (file.len(), file.mode() & 0o7777, file.mtime());
        assert_eq!(seen, (0, 0o640, 1_000_000_000), "{name}");
    }
    assert_eq!(status("dev/null").ino(), status("dev/other").ino());
    assert!(status("fifo").file_type().is_fifo());

    // Root makes this bundle.
    place.succeeds(&["bundle", "-q", "--force", "oci-archive:i.tar", "box"]);
    assert!(status("dev/null").file_type().is_char_device());
    assert!(status("disk").file_type().is_block_device());
}

#[test]
fn user_bundle_keeps_modes_under_any_umask() {
    let place = TestMount::new(&["out"]);
    let modes = [
        ("tmp", b'5', 0o1777_u32),
        ("group", b'5', 0o2775),
        ("tool", b'0', 0o6755),
        ("open", b'0', 0o666),
        ("pipe", b'6', 0o622),
        ("shut", b'5', 0o555),
    ];
    let mut archive = Archive::new().file("implied/file", "");
    for (name, kind, mode) in modes {
        archive = archive.add(Header::new(name, kind).mode(mode.into()), "");
    }
    let root = Archive::new().add(Header::new("./", b'5').mode(0o555), "");
    for (layers, root_mode) in [
        (vec![archive.clone().end()], 0o755),
        (vec![root.end(), archive.end()], 0o555),
    ] {
        let image = Image::new("one", layers).running(json!({ "Cmd": ["x"] }));
        place.put("i.tar", image::oci(&[image]).tar());
        for umask in ["027", "077", "000"] {
            bundle_as_user(&place, umask);
            let rootfs = place.path("box/rootfs");
            let mode = |name: &str| {
                let status = fs::symlink_metadata(rootfs.join(name)).expect("written");
                status.mode() & 0o7777
            };
            for (name, _, expected) in modes {
                assert_eq!(mode(name), expected, "{name} under umask {umask}");
            }
            assert_eq!(mode("implied"), 0o755, "under umask {umask}");
            assert_eq!(mode(""), root_mode, "under umask {umask}");
            fs::remove_dir_all(place.path("box")).expect("removed");
        }
    }
}

/// Script that lists the volumes of an image with [`volume_layers`].
const LIST_VOLUMES: &str = "cd /srv; stat -c '%n %a %u:%g %F %Y' data data/* data/sub/* data/inner/* /new; \
    cat data/sub/file; data/busybox true && echo ran; grep -c ' /srv/data\\| /new' /proc/self/mounts; \
    echo written >data/made && cat data/made";

/// A root file system with a volume that has files, a volume inside it, and a missing one.
fn volume_layers() -> Vec<Vec<u8>> {
    let entry =
        |name: &str, kind: u8, mode: u64| Header::new(name, kind).mode(mode).owner(1234, 77);
    let program = fs::read("/bin/busybox").expect("busybox-static is installed");
    let volume = Archive::new()
        .add(entry("srv/data/", b'5', 0o1770), "")
        .add(entry("srv/data/sub/", b'5', 0o2775), "")
        .add(entry("srv/data/sub/file", b'0', 0o600), "seeded\n")
        .add(entry("srv/data/fifo", b'6', 0o622), "")
        .add(entry("srv/data/inner/", b'5', 0o555), "")
        .add(entry("srv/data/inner/file", b'0', 0o444), "")
        .add(entry("srv/data/busybox", b'0', 0o755), program);
    vec![busybox(), volume.end()]
}

#[test]
fn volumes_have_content_and_owner_of_image() {
    let place = TestMount::new(&["out"]);
    let execution = json!({
        "Cmd": ["/bin/sh", "-c", LIST_VOLUMES],
        "User": "app",
        "Volumes": { "/srv/data": {}, "/srv/data/inner": {}, "/new": {} },
    });
    let image = Image::new("one", volume_layers()).running(execution);
    let archive = image::oci(&[image]).tar();
    place.put("i.tar", &archive);
    let expected = |owner: &str, root: &str| {
        format!(
            "data 1770 {owner} directory 1000000000\n\
             data/busybox 755 {owner} regular file 1000000000\n\
             data/fifo 622 {owner} fifo 1000000000\n\
             data/inner 555 {owner} directory 1000000000\n\
             data/sub 2775 {owner} directory 1000000000\n\
             data/sub/file 600 {owner} regular file 1000000000\n\
             data/inner/file 444 {owner} regular empty file 1000000000\n\
             /new 755 {root} directory\nseeded\nran\n3\nwritten\n"
        )
    };
    // The image does not have this directory, so its time is the current time.
    let without_new_time = |said: &str| {
        let lines = said.lines().map(|line| match line.rsplit_once(' ') {
            Some((rest, _)) if line.starts_with("/new") => rest,
            _ => line,
        });
        [lines.collect::<Vec<_>>().join("\n"), "\n".to_owned()].concat()
    };
    for runtime in ["crun", "runc"] {
        place.succeeds(&["bundle", "-q", "--force", "oci-archive:i.tar", "box"]);
        let said = run_in_container(&place, &[], runtime, "box");
        assert_eq!(
            without_new_time(&said),
            expected("1234:77", "0:0"),
            "{runtime}"
        );
    }
    assert_eq!(names_in(&place.path("box/volumes")), ["0", "1", "2"]);
    let mount_point = place.path("box/rootfs/srv/data");
    assert_eq!(names_in(&mount_point), Vec::<String>::new());
    // An unprivileged user cannot read the files of root's runtimes.
    let place = TestMount::new(&["out"]);
    place.put("i.tar", &archive);
    for runtime in ["crun", "runc"] {
        bundle_as_user(&place, "077");
        let said = run_in_container(&place, AS_USER, runtime, "box");
        assert_eq!(without_new_time(&said), expected("0:0", "0:0"), "{runtime}");
        let made = place.path("box/volumes/1/made");
        let status = fs::metadata(made).expect("in the volume");
        assert_eq!(status.uid(), USER, "{runtime}");
        fs::remove_dir_all(place.path("box")).expect("removed");
    }
}

/// Prints the kernel's errors of system calls.
///
/// Bad pointers and lengths make each fail with an error other than EPERM (1), unless a filter refuses
/// it.
const SYSTEM_CALLS: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TRY(name, ...) printf(name " %d\n", syscall(__VA_ARGS__) < 0 ? errno : 0)
int main(void) {
    TRY("mount", SYS_mount, 1, 1, 1, 0, 1);
    TRY("unshare", SYS_unshare, 1);
    TRY("keyctl", SYS_keyctl, 0, -3, 0);
    TRY("bpf", SYS_bpf, 0, 1, 1 << 20);
    TRY("clone", SYS_clone, CLONE_NEWUSER | CLONE_SIGHAND, 0, 0, 0, 0);
    TRY("clone3", SYS_clone3, 1, 0);
    TRY("open_tree", SYS_open_tree, -1, 1, 0);
    TRY("userfaultfd", SYS_userfaultfd, -1);
    TRY("vsock", SYS_socket, 40, 0, 0);
    TRY("alg", SYS_socket, 38, 0, 0);
    TRY("personality", SYS_personality, 0x0400000);
    TRY("new", 10000);
    TRY("unix", SYS_socket, 1, 1, 0);
    TRY("netlink", SYS_socket, 16, 3, 0);
    TRY("ptrace", SYS_ptrace, -1, 0, 0, 0);
    TRY("openat2", SYS_openat2, -1, 1, 1, 24);
    TRY("chroot", SYS_chroot, "/");
}"#;

#[test]
fn bundle_denies_system_calls_as_docker_does() {
    let place = TestMount::new(&["out"]);
    place.put("calls.c", SYSTEM_CALLS.as_bytes());
    let compiled = Command::new("cc")
        .args(["-static", "-o", "calls", "calls.c"])
        .current_dir(place.root())
        .status();
    assert!(compiled.expect("gcc is installed").success());
    let program = fs::read(place.path("calls")).expect("compiled");
    let calls = Archive::new().add(Header::new("bin/calls", b'0').mode(0o755), program);
    let script = "grep -E 'Cap(Eff|Bnd)|NoNew|Seccomp:' /proc/self/status; calls";
    let execution = json!({ "Cmd": ["/bin/sh", "-c", script] });
    let image = Image::new("one", vec![busybox(), calls.end()]).running(execution);
    place.put("i.tar", image::oci(&[image]).tar());
    let runs = |flags: &[&str]| {
        let words = ["bundle", "-q", "--force", "oci-archive:i.tar", "box"];
        place.succeeds(&[&words[..], flags].concat());
        let said = ["crun", "runc"].map(|runtime| run_in_container(&place, &[], runtime, "box"));
        assert_eq!(said[0], said[1], "{flags:?}");
        let [said, _] = said;
        let words: Vec<_> = said.split_whitespace().map(str::to_owned).collect();
        words.join(" ")
    };
    let status = |capabilities: &str, seccomp: u8| {
        format!("CapEff: {capabilities} CapBnd: {capabilities} NoNewPrivs: 0 Seccomp: {seccomp}")
    };
    let allowed = "unix 0 netlink 0 ptrace 3 openat2 14 chroot";
    // EPERM, and ENOSYS for calls that programs can do without.
    let said = runs(&[]);
    let refused = "mount 1 unshare 1 keyctl 1 bpf 1 clone 38 clone3 38 open_tree 1 userfaultfd 1 vsock 1 \
                   alg 1 personality 38 new 38";
    let expected = format!("{} {refused} {allowed} 0", status("00000000a00405fb", 2));
    assert_eq!(said, expected);

    let said = runs(&["--cap-add=sys_admin,CAP_MKNOD", "--cap-drop", "SYS_CHROOT"]);
    let administers = "mount 14 unshare 22 keyctl 1 bpf 7 clone 22 clone3 22 open_tree 14 userfaultfd 1 \
                       vsock 1 alg 1 personality 38 new 38";
    let expected = format!(
        "{} {administers} {allowed} 1",
        status("00000000a82005fb", 2)
    );
    assert_eq!(said, expected);

    let own = fs::read_to_string("/proc/self/status").expect("of this process");
    let bounding = own.lines().find_map(|line| line.strip_prefix("CapBnd:\t"));
    let said = runs(&["--cap-add=ALL"]);
    let all = status(bounding.expect("a set"), 2);
    assert!(said.starts_with(&all), "{said}");

    // Refuses nothing, or what the profile refuses.
    let said = runs(&[
        "--security-opt=seccomp=unconfined",
        "--cap-drop=ALL",
        "--cap-add=CHOWN",
    ]);
    assert!(said.starts_with(&status("0000000000000001", 0)), "{said}");
    assert!(said.contains("unshare 22 keyctl 0"), "{said}");
    let profile = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "archMap": [{ "architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"] }],
        "syscalls": [
            { "names": ["keyctl"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95, "args": null },
            { "name": "unshare", "action": "SCMP_ACT_ERRNO", "errnoRet": 95,
              "excludes": { "caps": ["CAP_CHOWN"] } },
            { "names": ["bpf"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95,
              "includes": { "minKernel": "99.0" } },
        ],
    });
    place.put("own.json", profile.to_string().as_bytes());
    let said = runs(&["--security-opt", "seccomp=own.json"]);
    assert!(said.contains("unshare 22 keyctl 95 bpf 7 "), "{said}");
}

#[test]
fn invalid_capabilities_and_profiles_are_rejected() {
    let place = TestMount::new(&["out"]);
    let image = one();
    place.put("i.tar", image::oci(&[image]).tar());
    place.put("list", b"[]");
    place.put(
        "odd",
        br#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":[],"includes":{"x":1}}]}"#,
    );
    for (flag, status, complaint) in [
        ("--cap-add=CHOWN,NO_SUCH", 64, "'NO_SUCH'"),
        ("--cap-drop=all,x", 64, "'x'"),
        ("--security-opt=label=disable", 64, "seccomp=unconfined"),
        ("--security-opt=seccomp=missing", 2, "missing"),
        ("--security-opt=seccomp=list", 2, "list: "),
        ("--security-opt=seccomp=odd", 2, "odd: "),
        ("--security-opt=seccomp=/dev/zero", 2, "/dev/zero: "),
    ] {
        let output = place.tarfs(&["bundle", "-q", flag, "oci-archive:i.tar", "box"]);
        assert_eq!(
            output.status.code(),
            Some(status),
            "{flag}: {}",
            stderr_text(&output)
        );
        assert!(
            stderr_text(&output).contains(complaint),
            "{flag}: {}",
            stderr_text(&output)
        );
        assert!(!place.path("box").exists(), "{flag}");
    }
}

#[test]
fn ordinary_user_runs_bundle_without_privileges() {
    let place = TestMount::new(&["out"]);
    let script = "id -u; id -g; cat /proc/self/uid_map; echo written >/file";
    let execution = json!({ "Entrypoint": ["/bin/sh", "-c"], "Cmd": [script] });
    let image = Image::new("one", vec![busybox()]).running(execution);
    place.put("i.tar", image::oci(&[image]).tar());
    bundle_as_user(&place, "022");
    for runtime in ["crun", "runc"] {
        let said = run_in_container(&place, AS_USER, runtime, "box");
        let said: Vec<&str> = said.split_whitespace().collect();
        assert_eq!(said, ["0", "0", "0", "65534", "1"], "{runtime}");
        let written = fs::metadata(place.path("box/rootfs/file")).expect("written");
        assert_eq!(written.uid(), USER, "{runtime}");
        fs::remove_file(place.path("box/rootfs/file")).expect("there");
    }
}

#[test]
fn failed_bundle_leaves_nothing() {
    let place = TestMount::new(&["out"]);
    let image = one().packed(Packing::Plain).running(json!({}));
    let mut files = image::oci(std::slice::from_ref(&image));
    place.put("i.tar", files.tar());
    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    assert!(complaint.contains("it names no command"), "{complaint}");
    assert!(!place.path("box").exists());

    let path = format!("blobs/sha256/{}", sha256(&layer()));
    let middle = layer().len() / 2;
    files.get(&path)[middle] ^= 1;
    place.put("i.tar", files.tar());
    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "box", "--", "x"]);
    assert!(complaint.contains("its SHA-256 is"), "{complaint}");
    assert_eq!(fs::read_dir(place.path("box")).expect("made").count(), 0);

    let image = image.running(json!({ "User": "nobody", "Cmd": ["x"] }));
    place.put("i.tar", image::oci(&[image]).tar());
    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    assert!(
        complaint.contains("runs as 'nobody', who is not in"),
        "{complaint}"
    );
    assert_eq!(names_in(&place.path("box")), Vec::<String>::new());

    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "/proc"]);
    assert!(!complaint.contains("--atomic"), "{complaint}");

    let image = one().running(json!({ "User": "4294967295", "Cmd": ["x"] }));
    place.put("i.tar", image::oci(&[image]).tar());
    let complaint = place.error_of(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    assert!(complaint.contains("is larger than"), "{complaint}");
    assert_eq!(names_in(&place.path("box")), Vec::<String>::new());
}

/// Makes a bundle in `box` with `--force`, and sends SIGTERM when `should_signal` returns true.
/// Returns the signal that ended it, if any.
fn bundle_until(place: &TestDir, should_signal: impl Fn() -> bool) -> Option<i32> {
    let mut child = Command::new("env")
        .args(["--default-signal", PROGRAM, "bundle", "-q", "--force"])
        .args(["oci-archive:i.tar", "box"])
        .current_dir(place.root())
        .spawn()
        .expect("started");
    while !should_signal() {
        if let Some(status) = child.try_wait().expect("a child") {
            return status.signal();
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).expect("not waited for");
    child.wait().expect("an end").signal()
}

#[test]
fn signal_leaves_whole_bundle_or_none() {
    let place = TestMount::new(&["out"]);
    let bundle = place.path("box");
    // Looking up the user takes a long time.
    let mut accounts = "nobody:x:1:1::/:\n".repeat(200_000);
    accounts.push_str("last:x:7:7::/:\n");
    let layer = Archive::new().file("etc/passwd", accounts).end();
    let image = Image::new("", vec![layer]).packed(Packing::Plain);
    let image = image.running(json!({ "User": "last", "Cmd": ["x"] }));
    place.put("i.tar", image::oci(&[image]).tar());
    let is_new_tree = |name: &String| name.len() == ".rootfs-".len() + 16;
    // The signal may be late.
    let mut ended = 0;
    for _ in 0..50 {
        let is_made = || bundle.exists() && names_in(&bundle).iter().any(is_new_tree);
        let signal = bundle_until(&place, is_made);
        let left = names_in(&bundle);
        if left.is_empty() {
            assert_eq!(signal, Some(15));
            ended += 1;
        } else {
            assert_eq!(left, ["config.json", "rootfs"]);
        }
        fs::remove_dir_all(&bundle).expect("removed");
        if ended == 5 {
            break;
        }
    }

    // Removing the old bundle takes a long time.
    place.succeeds(&["bundle", "-q", "oci-archive:i.tar", "box"]);
    let (tree, many) = (bundle.join("rootfs"), bundle.join("rootfs/many"));
    fs::create_dir(&many).expect("made");
    for number in 0..20_000 {
        fs::write(many.join(number.to_string()), "").expect("space");
    }
    let old = fs::metadata(&tree).expect("there").ino();
    // The signal may be late.
    bundle_until(&place, || {
        fs::metadata(&tree).is_ok_and(|tree| tree.ino() != old)
    });
    assert_eq!(names_in(&bundle), ["config.json", "rootfs"]);
    assert_eq!(names_in(&tree), ["etc"]);
}

/// The names of all entries of a directory.
fn names_in(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).expect("a directory");
    let names = names.map(|entry| entry.expect("a name").file_name().into_string());
    let mut names: Vec<_> = names.map(|name| name.expect("UTF-8")).collect();
    names.sort_unstable();
    names
}

#[test]
fn old_bundle_stays_until_it_is_replaced() {
    let place = TestMount::new(&["out"]);
    let bundle = place.path("box");
    let good = one()
        .packed(Packing::Plain)
        .running(json!({ "Cmd": ["good"] }));
    place.put("good.tar", image::oci(std::slice::from_ref(&good)).tar());
    place.succeeds(&["bundle", "-q", "oci-archive:good.tar", "box"]);
    fs::write(bundle.join("rootfs/own"), "mine").expect("written");
    let config = fs::read(bundle.join("config.json")).expect("there");
    let is_as_it_was = || {
        assert_eq!(names_in(&bundle), ["config.json", "rootfs"]);
        assert_eq!(fs::read(bundle.join("config.json")).expect("there"), config);
        assert_eq!(names_in(&bundle.join("rootfs")), ["d", "link", "own"]);
    };

    let mut files = image::oci(&[good]);
    let path = format!("blobs/sha256/{}", sha256(&layer()));
    let middle = layer().len() / 2;
    files.get(&path)[middle] ^= 1;
    place.put("bad.tar", files.tar());
    let ghost = one().running(json!({ "User": "ghost", "Cmd": ["x"] }));
    place.put("ghost.tar", image::oci(&[ghost]).tar());
    for (archive, why) in [("bad", "its SHA-256 is"), ("ghost", "runs as 'ghost'")] {
        let source = format!("oci-archive:{archive}.tar");
        let complaint = place.error_of(&["bundle", "-q", "--force", &source, "box"]);
        assert!(complaint.contains(why), "{complaint}");
        assert!(!complaint.contains("--atomic"), "{complaint}");
        is_as_it_was();
        let complaint = place.error_of(&["bundle", "-q", &source, "box"]);
        assert!(complaint.contains("--force"), "{complaint}");
        is_as_it_was();
    }
    // A root file system without a configuration is in the way as well.
    fs::rename(bundle.join("config.json"), place.path("kept")).expect("moved");
    let complaint = place.error_of(&["bundle", "-q", "oci-archive:good.tar", "box"]);
    assert!(
        complaint.contains("not empty (replace it with --force)"),
        "{complaint}"
    );
    fs::rename(place.path("kept"), bundle.join("config.json")).expect("moved");
    is_as_it_was();

    let better = one().running(json!({ "Cmd": ["better"] }));
    place.put("better.tar", image::oci(&[better]).tar());
    place.succeeds(&["bundle", "-q", "--force", "oci-archive:better.tar", "box"]);
    assert_eq!(names_in(&bundle), ["config.json", "rootfs"]);
    assert_eq!(names_in(&bundle.join("rootfs")), ["d", "link"]);
    let config: Value =
        serde_json::from_slice(&fs::read(bundle.join("config.json")).expect("there"))
            .expect("JSON");
    assert_eq!(config["process"]["args"], json!(["better"]));
}
