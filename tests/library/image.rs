//! Container images as sources: detected in archives and directories, verified, listed and written.
//!
//! `tests/mount` has the tests that mount images and run containers.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::fixture::{PROGRAM, TestDir};
use crate::support::http::{Resource, Server};
use crate::support::image::{self, Files, Image};
use crate::support::measured_runner::MeasuredRunner;
use crate::support::packing::Packing;
use crate::support::program::stderr_text;
use crate::support::raw::{self, Archive};
use crate::support::rng::Rng;
use crate::support::sample_images::{image_sources, layer, names_in, one, two};
use crate::support::sha256::sha256;
use crate::support::wait;

// Promises: image-layers
#[test]
fn image_is_a_source_in_every_storage_format() {
    let noise = Rng::new(7).bytes(3 << 20);
    for packing in [Packing::Gzip, Packing::Zstd, Packing::Plain] {
        let place = TestDir::new(&["out"]);
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

/// A payload long enough to be skipped on any link, even when memory is full of requested chunks.
const HUGE: usize = 104 << 20;

/// An archive with a huge image and a small one.
fn huge_and_small() -> Files {
    let huge = Archive::new().file("huge", Rng::new(1).bytes(HUGE)).end();
    image::oci(&[
        Image::new("huge", vec![huge]).packed(Packing::Plain),
        Image::new("small", vec![layer()]),
    ])
}

// Promises: image-archive
#[test]
fn only_the_selected_image_is_fetched() {
    let server = Server::start();
    server.serve(
        "/i.tar",
        Resource::new(huge_and_small().tar()).etag("\"1\""),
    );
    let place = TestDir::new(&["out"]);
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

// Promises: image-selected
#[test]
fn unnamed_images_are_listed_and_selected_by_digest() {
    let place = TestDir::new(&["out"]);
    let image = |file: &str| Image::new("", vec![Archive::new().file(file, "").end()]);
    let images = [image("one"), image("two")];
    // The entries of the layout have no names.
    let mut files = Files::default();
    let manifests: Vec<_> = images.iter().map(|image| files.manifest(image)).collect();
    files.index(&manifests);
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
        complaint.contains("there is no image called"),
        "{complaint}"
    );
}

// Promises: image-index
#[test]
fn layer_is_cached_by_digest_for_any_location() {
    let server = Server::start();
    let (mut first, mut second) = (huge_and_small(), huge_and_small());
    first.put("note", "the first");
    second.put("other", "the second, and longer");
    for (path, files) in [("/1.tar", first), ("/2.tar", second)] {
        server.serve(path, Resource::new(files.tar()).etag("\"1\""));
    }
    let place = TestDir::new(&["out"]);
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

// Promises: layer-written
#[test]
fn interrupted_run_leaves_no_temporary_files() {
    let place = TestDir::new(&["out"]);
    let image = Image::new("one", vec![Archive::new().file("big", vec![7; HUGE]).end()]);
    place.put("oci.tar", image::oci(&[image.packed(Packing::Plain)]).tar());
    let out = place.path("out");
    // A run may end before the signal.
    wait::wait_until("a run is interrupted", || {
        let mut child = Command::new("env")
            .args(["--default-signal", PROGRAM, "materialize", "-q"])
            .args(["oci-archive:oci.tar", "-C", "out"])
            .current_dir(place.root())
            .env("TARFS_CACHE_DIR", place.path("cache"))
            .spawn()
            .expect("started");
        wait::wait_until("something is written", || !names_in(&out).is_empty());
        kill_process(Pid::from_child(&child), Signal::TERM).expect("not waited for");
        let is_interrupted = child.wait().expect("an end").signal().is_some();
        assert!(!is_interrupted || names_in(&out).is_empty());
        fs::remove_dir_all(&out)
            .and_then(|()| fs::create_dir(&out))
            .expect("ours");
        is_interrupted
    });
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

// Promises: image-digests, image-limits
#[test]
fn inconsistent_image_documents_are_rejected() {
    let place = TestDir::new(&["out"]);
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
        refused(&files, "it is missing");
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
        refused(&files, "it has a malformed digest");
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

// Promises: image-limits
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
    let place = TestDir::new(&["out"]);
    let mut supervisor = MeasuredRunner::start(place.root());
    for (number, (code, archive)) in cases.into_iter().enumerate() {
        place.put("i.tar", &archive);
        for verb in [&["image"][..], &["image", "--json"], &["ls"]] {
            let memory = ["--memory=32MiB", "oci-archive:i.tar"];
            let words = [&[PROGRAM], verb, &memory].concat();
            let run = supervisor.run(place.root(), &words);
            let said: String = run.said.chars().take(500).collect();
            assert_eq!(run.code, code, "{number}: {verb:?}: {said}");
            let peak = run.peak_bytes;
            assert!(peak < MOST_BYTES, "{number}: {verb:?}: {peak} bytes");
        }
    }
}

// Promises: image-archive
#[test]
fn names_in_image_do_not_escape_it() {
    let place = TestDir::new(&["out"]);
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
        ("up", "leads outside the root"),
        ("round", "too many levels of symbolic links"),
        ("nothing", "it is missing"),
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

// Promises: image-platform
#[test]
fn image_of_the_requested_platform_is_selected() {
    let place = TestDir::new(&["out"]);
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
                complaint.contains("there is no image for linux/s390x/v1"),
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
    assert!(complaint.contains("only for 'linux/s390x'"), "{complaint}");
}

// Promises: layer-refused, image-archive, image-verb, image-selected, image-expect
#[test]
fn image_verb_prints_config_and_command() {
    let place = TestDir::new(&["mnt", "out"]);
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
    let complaint = place.failure_of(64, &words);
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
        let with = |flags: &[&str]| {
            place.failure_of(64, &[&[verb, "oci:layout"], place_for_it, flags].concat())
        };
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
    let complaint = place.failure_of(64, &["ls", "--shard=1/2", "oci:layout"]);
    assert!(complaint.contains("has layers"), "{complaint}");
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
        complaint.contains("called 'two', only 'one'"),
        "{complaint}"
    );
}

// Promises: volume-refused
#[test]
fn volumes_at_system_directories_are_skipped() {
    let place = TestDir::new(&["out"]);
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
        .filter(|mount| {
            let source = mount["source"].as_str();
            source.is_some_and(|source| source.starts_with("volumes/"))
        })
        .map(|mount| mount["destination"].as_str().expect("a path"))
        .collect();
    assert_eq!(destinations, ["/nowhere/proc/x", "/plain", "/srv/data"]);
}

// Promises: bundle-capabilities, bundle-seccomp
#[test]
fn invalid_capabilities_and_profiles_are_rejected() {
    let place = TestDir::new(&["out"]);
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

// Promises: bundle-replaced
#[test]
fn failed_bundle_leaves_nothing() {
    let place = TestDir::new(&["out"]);
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

// Promises: bundle-replaced
#[test]
fn signal_leaves_whole_bundle_or_none() {
    let place = TestDir::new(&["out"]);
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

// Promises: bundle-replaced
#[test]
fn old_bundle_stays_until_it_is_replaced() {
    let place = TestDir::new(&["out"]);
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
