//! Container images as sources: mounted, rejected by `mount`, and run by container runtimes.
//!
//! `tests/library` has the tests that need no root.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::fixture::{TestDir, TestMount};
use crate::support::http::{Resource, Response, Server};
use crate::support::image::{self, Files, Image};
use crate::support::packing::Packing;
use crate::support::program::{self, stderr_text};
use crate::support::raw::{Archive, Header};
use crate::support::rng::Rng;
use crate::support::sample_images::{image_sources, layer, names_in, one, two};
use crate::support::sha256::sha256;
use crate::support::wait;

// Promises: image-file
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

// Promises: image-layers
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

/// A mirror of a registry that does not answer takes no time from the servers after it.
// Promises: hosts-order
#[test]
fn image_is_mounted_while_a_mirror_of_its_registry_is_silent() {
    let (registry, silent) = (Server::start(), Server::start());
    silent.route("*", |_| Response::silence());
    let mut files = Files::default();
    let manifest = files.manifest(&one());
    for (name, bytes) in &files.0 {
        let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
        for kind in ["blobs", "manifests"] {
            let path = format!("/v2/me/tool/{kind}/sha256:{digest}");
            registry.serve(&path, Resource::new(bytes.clone()));
        }
        if manifest["digest"] == format!("sha256:{digest}") {
            registry.serve("/v2/me/tool/manifests/1", Resource::new(bytes.clone()));
        }
    }
    let place = TestMount::new(&[]);
    let url = registry.url("");
    let host = url.strip_prefix("http://").expect("a host");
    let directory = place.path("hosts").join(host);
    fs::create_dir_all(&directory).expect("made");
    let hosts = format!("server = \"{url}\"\n[host.\"{}\"]\n", silent.url(""));
    fs::write(directory.join("hosts.toml"), hosts).expect("written");
    let source = format!("oci://{host}/me/tool:1");
    place.succeeds(&["mount", "--hosts-dir", "hosts", &source, "mnt"]);
    let names = names_in(&place.path("mnt"));
    place.umount();
    assert!(!names.is_empty());
    assert!(
        !silent.requests("/v2/me/tool/manifests/1").is_empty(),
        "it was asked first"
    );
}

/// A mount whose data is cached needs no token, so it starts while no token can be had.
// Promises: offline-start
#[test]
fn cached_image_is_mounted_while_its_token_server_is_down() {
    let (registry, is_down) = (Server::start(), Arc::<AtomicBool>::default());
    let mut files = Files::default();
    let manifest = files.manifest(&one());
    let realm = registry.url("/token");
    let serve = |path: &str, bytes: &[u8]| {
        let (resource, realm) = (Resource::new(bytes.to_vec()).etag("\"1\""), realm.clone());
        registry.route(path, move |request| {
            if request.header("authorization") == Some("Bearer T") {
                return resource.answer(request);
            }
            let challenge = format!("Bearer realm=\"{realm}\",service=\"s\"");
            Response::new(401).with("WWW-Authenticate", challenge)
        });
    };
    for (name, bytes) in &files.0 {
        let digest = name.strip_prefix("blobs/sha256/").expect("a blob");
        for kind in ["blobs", "manifests"] {
            serve(&format!("/v2/me/tool/{kind}/sha256:{digest}"), bytes);
        }
        if manifest["digest"] == format!("sha256:{digest}") {
            serve("/v2/me/tool/manifests/1", bytes);
        }
    }
    let switch = Arc::clone(&is_down);
    registry.route("/token", move |_| {
        if switch.load(Ordering::Relaxed) {
            return Response::new(503);
        }
        Response::new(200).with_body(r#"{"token":"T","expires_in":300}"#)
    });
    let place = TestMount::new(&[]);
    let url = registry.url("");
    let source = format!("oci://{}/me/tool:1", url.replace("http://", ""));
    let read = || {
        let noise = fs::read(place.path("mnt/d/noise")).expect("readable");
        (noise, fs::read(place.path("mnt/d/text")).expect("readable"))
    };
    place.succeeds(&["mount", &source, "mnt"]);
    let first = read();
    place.umount();
    is_down.store(true, Ordering::Relaxed);
    let tokens = registry.requests("/token").len();
    place.succeeds(&["mount", &source, "mnt"]);
    let again = read();
    place.umount();
    assert!(first == again, "other bytes");
    assert!(registry.requests("/token").len() > tokens, "it was asked");
}

// Promises: layer-scan
#[test]
fn image_with_saved_indexes_is_mounted_without_its_layers() {
    let place = TestMount::new(&["out"]);
    for source in image_sources(&place, &two()) {
        place.succeeds(&["mount", &source, "mnt"]);
        place.umount();
        place.succeeds(&["mount", &source, "mnt"]);
        let counters =
            ["scans", "decoded_bytes", "source_requests"].map(|name| place.counter(name));
        let read_bytes = place.counter("source_read_bytes");
        place.umount();
        assert_eq!(counters, [0; 3], "{source}");
        // The upper layer has 3 MiB of noise.
        assert!(read_bytes < 2 << 20, "{source}: {read_bytes}");
    }
}

// Promises: profile-mismatch
#[test]
fn profile_of_image_is_recorded_and_replayed() {
    let place = TestMount::new(&["out"]);
    let image = two().packed(Packing::Gzip);
    place.put("oci.tar", image::oci(std::slice::from_ref(&image)).tar());
    place.put("docker.tar", image::docker(&image).end());
    let source = "oci-archive:oci.tar";
    place.succeeds(&["mount", source, "mnt", "--record", "profile"]);
    for name in ["d/text", "low", "d/noise"] {
        fs::read(place.path("mnt").join(name)).expect("readable");
    }
    place.umount();
    let profile = fs::read_to_string(place.path("profile")).expect("written");
    let expected = "# tarfs profile 1\n0 9 d/text\n0 5 low\n0 3145728 d/noise\n";
    assert_eq!(profile, expected);

    // The same tree, with its layers in other files.
    let source = "docker-archive:docker.tar";
    place.put("profile", profile + "0 5 d/gone\n");
    let words = [
        "mount",
        source,
        "mnt",
        "--replay",
        "profile",
        "--cache-dir",
        "other",
    ];
    place.succeeds(&[&words[..], &["--no-disk-cache"]].concat());
    let number = |status: &Value, name: &str| {
        let number = status.pointer(&format!("/prefetch/{name}"));
        number.and_then(Value::as_u64).expect("a number")
    };
    wait::wait_until("all is replayed", || {
        let status = place.status();
        let all = number(&status, "replay_spans");
        all > 1 && number(&status, "replayed_spans") == all
    });
    let notes = place.status()["notes"].to_string();
    let note = format!("1 ranges of {} are in", place.path("profile").display());
    assert!(notes.contains(&note), "{notes}");
    place.umount();
}

// Promises: image-digests
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

// Promises: image-digests
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

// Promises: image-digests
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

// Promises: layer-state, image-layers
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

// Promises: layer-missing
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

// Promises: layer-implied
#[test]
fn implied_directories_of_image_have_no_time_of_a_layer() {
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
    let shown = times("mnt");
    place.succeeds(&["umount", "mnt"]);
    assert_eq!(shown, [0; 4]);
    // Those that are written have the time of writing, as with tar.
    let image = fs::metadata(place.path("oci.tar")).expect("there").mtime();
    for root in ["out", "box/rootfs"] {
        assert!(times(root).iter().all(|&time| time >= image), "{root}");
    }
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

// Promises: bundle-content, bundle-privileges, bundle-replaced, bundle-users
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
        let output = place.tarfs(&words);
        let complaint = stderr_text(&output);
        assert_eq!(output.status.code(), Some(64), "{complaint}");
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

// Promises: bundle-private, volume-refused
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

// Promises: bundle-devices
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

// Promises: bundle-rootless
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

// Promises: volume-content
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

// Promises: bundle-capabilities, bundle-seccomp
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
