//! `tarfs mount --copy-to`: a copy on disk beside a real mount, and where reads are served from.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

use crate::support::fixture::TestMount;
use crate::support::http::{Resource, Response, Server};
use crate::support::mounts::is_mounted;
use crate::support::program::stderr_text;
use crate::support::tree::Tree;
use crate::support::wait;

/// Where the archive is served.
const ARCHIVE: &str = "/archive.tar";

/// Offset up to which the server answers requests. Requests beyond it wait.
#[derive(Default)]
struct Gate {
    open_bytes: Mutex<u64>,
    opened: Condvar,
}

impl Gate {
    fn open(&self, bytes: u64) {
        *self.open_bytes.lock().expect("no panic") = bytes;
        self.opened.notify_all();
    }

    fn pass(&self, start: u64) {
        let open = self.open_bytes.lock().expect("no panic");
        drop(
            self.opened
                .wait_while(open, |open| start >= *open)
                .expect("no panic"),
        );
    }
}

/// A server with an archive, a mountpoint, and a destination for the copy.
struct GatedServer {
    server: Option<Server>,
    url: String,
    gate: Arc<Gate>,
}

type Place = TestMount<GatedServer>;

impl Place {
    /// Creates a fixture whose server answers every request at once.
    fn serve(tar: impl Into<bytes::Bytes>) -> Self {
        let (server, gate) = (Server::start(), Arc::<Gate>::default());
        gate.open(u64::MAX);
        let resource = Resource::new(tar).etag("\"1\"");
        let doorman = Arc::clone(&gate);
        server.route(ARCHIVE, move |request| -> Response {
            doorman.pass(request.range().map_or(0, |(start, _)| start));
            resource.answer(request)
        });
        let opened = Arc::clone(&gate);
        let state = GatedServer {
            url: server.url(ARCHIVE),
            server: Some(server),
            gate,
        };
        TestMount::with(&[], state).before_unmount(move || opened.open(u64::MAX))
    }

    /// Saves an index, so that a mount needs no scan.
    fn index(&self) {
        self.succeeds(&["index", &self.url]);
    }

    fn mount(&self) {
        self.mount_with("copy", &[]);
    }

    fn mount_with(&self, copy: &str, more: &[&str]) {
        let words = ["mount", &self.url, "mnt", "--copy-to", copy];
        self.succeeds(&[&words, more].concat());
    }

    /// The first status that satisfies `should`.
    #[track_caller]
    fn status_when(&self, should: impl Fn(&Value) -> bool) -> Value {
        wait::wait_for("such a status", || Some(self.status()).filter(&should))
    }

    #[track_caller]
    fn wait_for_state(&self, state: &str) -> Value {
        self.status_when(|status| text(status, "/copy/state") == state)
    }

    /// Stops the server, so that no further byte can arrive.
    fn stop_server(&mut self) {
        self.server = None;
    }

    fn sent_bytes(&self) -> u64 {
        let server = self.server.as_ref();
        server.map_or(0, |server| server.sent_bytes(ARCHIVE))
    }

    /// As [`Self::sent_bytes`], after the requests of a dead client are answered.
    fn idle_sent_bytes(&self) -> u64 {
        let server = self.server.as_ref().expect("running");
        wait::wait_until("all requests are answered", || {
            let mut seen = server.requests(ARCHIVE).into_iter();
            seen.all(|seen| seen.status != 0)
        });
        self.sent_bytes()
    }

    /// The process that serves the mount, and a handle to wait for its end.
    fn process(&self) -> (Pid, OwnedFd) {
        let pid = i32::try_from(number(&self.status(), "/pid")).expect("a number");
        let pid = Pid::from_raw(pid).expect("a process");
        (pid, pidfd_open(pid, PidfdFlags::empty()).expect("running"))
    }

    #[track_caller]
    fn assert_reads_as(&self, tree: &Tree) {
        for (name, content) in &tree.files {
            let read = fs::read(self.mounted(name)).expect("readable");
            assert!(read == *content, "{name}");
        }
    }
}

/// Whether the kernel reads the copy itself here. If not, the status must give the reason.
#[track_caller]
fn has_passthrough(status: &Value) -> bool {
    let notes = status.get("notes").and_then(Value::as_array);
    let is_refused = notes.expect("notes").iter().any(|note| {
        note.as_str()
            .is_some_and(|note| note.starts_with("no passthrough, "))
    });
    let opens = number(status, "/counters/passthrough_opens");
    assert!(is_refused == (opens == 0), "{status}");
    !is_refused
}

#[track_caller]
fn number(status: &Value, pointer: &str) -> u64 {
    let value = status.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("{pointer} of {status}"))
}

#[track_caller]
fn text<'a>(status: &'a Value, pointer: &str) -> &'a str {
    let value = status.pointer(pointer).and_then(Value::as_str);
    value.unwrap_or_else(|| panic!("{pointer} of {status}"))
}

/// Notes of a status, one line each.
fn notes(status: &Value) -> String {
    let notes = status.get("notes").and_then(Value::as_array);
    let notes = notes.expect("notes").iter();
    let notes: Vec<_> = notes.filter_map(Value::as_str).collect();
    notes.join("\n")
}

#[track_caller]
fn runs(program: &str, words: &[&str], directory: &Path) {
    let output = Command::new(program)
        .args(words)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{program} is needed: {error}"));
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

#[track_caller]
fn assert_same_trees(one: &Path, other: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/compare-trees");
    let words = [&script, one, other].map(|path| path.to_str().expect("UTF-8"));
    runs("python3", &words, Path::new("/"));
}

/// An archive of a directory with every kind of entry.
fn everything() -> Vec<u8> {
    let base = tempfile::tempdir().expect("a directory");
    let script = r"
        mkdir -p tree/a/b tree/closed tree/z && cd tree
        echo one > a/one; ln a/one z/one; ln a/one another
        head -c 3000000 /dev/urandom > a/b/large
        truncate -s 5M a/sparse; echo data | dd of=a/sparse bs=1 seek=2000000 conv=notrunc status=none
        : > empty; ln -s a/one link; ln -s ../nowhere z/dangling
        mkfifo fifo; mknod null c 1 3
        echo secret > closed/file; chmod 0640 closed/file; chmod 4755 another; chown 12:34 empty z
        setfattr -n user.comment -v hello a/one; setfacl -m u:7:r closed/file
        setfacl -d -m u:7:rx z
        chmod 0555 closed; chmod 1777 z; chmod 0751 .
        find . -depth -exec touch -h -d '2001-02-03 04:05:06.123456789' {} +";
    runs("sh", &["-ec", script], base.path());
    let words = ["--format=pax", "--sparse", "--xattrs", "--acls"];
    let words = [
        &words[..],
        &["--numeric-owner", "-cf", "a.tar", "-C", "tree", "."],
    ];
    runs("tar", &words.concat(), base.path());
    fs::read(base.path().join("a.tar")).expect("made")
}

// Promises: copy-tree
#[test]
fn finished_copy_equals_materialized_tree() {
    let mut place = Place::serve(everything());
    place.mount();
    let status = place.wait_for_state("complete");
    let files = number(&status, "/copy/files");
    assert_eq!(files, 5, "hard links are one");
    assert_eq!(number(&status, "/copy/total_files"), files);
    assert_eq!(
        number(&status, "/copy/bytes"),
        number(&status, "/copy/total_bytes")
    );
    assert_eq!(
        text(&status, "/copy/directory"),
        place.path("copy").to_string_lossy()
    );
    let mount = fs::metadata(place.mounted("z/one")).expect("there");
    assert_eq!((mount.nlink(), mount.size()), (3, 4));
    assert_eq!(fs::read(place.mounted("z/one")).expect("there"), b"one\n");

    fs::create_dir(place.path("written")).expect("made");
    place.succeeds(&["materialize", &place.url, "-C", "written"]);
    assert_same_trees(&place.path("written"), &place.path("copy"));
    place.umount();
    place.stop_server();
    assert_same_trees(&place.path("written"), &place.path("copy"));
}

// Promises: copy-order, copy-passthrough
#[test]
fn kernel_reads_complete_copy_without_fetches() {
    let tree = Tree::mixed();
    let mut place = Place::serve(tree.tar.clone());
    place.mount();
    place.wait_for_state("complete");
    let fetched = place.counter("source_read_bytes");
    // A busy machine may look like a slow server, and then a request is sent twice.
    let again = [
        "source_hedges",
        "source_straggler_retries",
        "source_retries",
    ];
    let is_sent_again = again.iter().any(|name| place.counter(name) > 0);
    let sent = place.sent_bytes();
    assert!(fetched == sent || (fetched < sent && is_sent_again));
    place.stop_server();
    place.assert_reads_as(&tree);
    place.assert_reads_as(&tree);
    let status = place.status();
    let opens = 2 * tree.files.len() as u64;
    let bytes: usize = tree.files.iter().map(|(_, content)| content.len()).sum();
    assert_eq!(number(&status, "/counters/source_read_bytes"), fetched);
    assert_eq!(number(&status, "/counters/failed_reads"), 0);
    if has_passthrough(&status) {
        assert_eq!(number(&status, "/counters/passthrough_opens"), opens);
        assert_eq!(number(&status, "/counters/served_opens"), 0);
        assert_eq!(number(&status, "/counters/served_bytes"), 0);
    } else {
        assert_eq!(number(&status, "/counters/served_opens"), opens);
        assert!(number(&status, "/counters/copied_bytes") >= bytes as u64);
    }
    let words = place.succeeds(&["status", "mnt"]);
    let far = format!("complete, {0} of {0} files, ", tree.files.len());
    assert!(words.contains(&far), "{words}");
    // The copy has the mount's holes.
    let sparse = fs::metadata(place.path("copy/first/sparse")).expect("there");
    assert!(sparse.blocks() * 512 < sparse.size() / 4);
}

#[test]
fn metrics_report_copy_progress() {
    let tree = Tree::mixed();
    let place = Place::serve(tree.tar.clone());
    place.mount_with("copy", &["--metrics", "127.0.0.1:0"]);
    let status = place.wait_for_state("complete");
    let address = text(&status, "/metrics").strip_prefix("http://");
    let address = address.and_then(|url| url.strip_suffix("/metrics"));
    let mut stream = std::net::TcpStream::connect(address.expect("a URL")).expect("listening");
    std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.1\r\n\r\n").expect("taken");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("answered");
    for (name, value) in [
        ("copy_files", tree.files.len() as u64),
        ("copy_files_expected", tree.files.len() as u64),
        ("copy_bytes", number(&status, "/copy/bytes")),
        ("copy_complete", 1),
        ("copy_failures", 0),
    ] {
        let line = page.lines().find_map(|line| {
            let rest = line.strip_prefix(&format!("tarfs_{name}{{"))?;
            rest.split_once("} ").map(|(_, value)| value)
        });
        assert_eq!(line, Some(value.to_string().as_str()), "{name}");
    }
}

// Promises: copy-changed
#[test]
fn open_file_reads_the_same_before_and_after_its_copy() {
    let tree = Tree::large();
    let place = Place::serve(tree.tar.clone());
    place.index();
    // Only the first part is available, so the copy has nothing of the rest.
    place.gate.open(2 << 20);
    place.mount();
    let (name, content) = tree.files.last().expect("files");
    assert_eq!(content.len(), 4096);
    let (large, expected) = tree
        .files
        .iter()
        .rfind(|(_, content)| content.len() > 4096)
        .expect("files");
    let early = File::open(place.mounted(large)).expect("there");
    let early_small = File::open(place.mounted(name)).expect("there");
    let read = |file: &File, offset: usize| {
        let mut bytes = vec![0; 4096];
        file.read_exact_at(&mut bytes, offset as u64)
            .expect("inside");
        assert!(bytes == expected[offset..offset + 4096], "at {offset}");
    };
    assert_eq!(place.counter("served_opens"), 2);
    place.gate.open(u64::MAX);
    let mut offset = 0;
    while text(&place.status(), "/copy/state") != "complete" {
        read(&early, offset % expected.len());
        offset += 4096;
    }
    let served = place.counter("copied_bytes");
    // The kernel accepts only handles that are opened in the same mode, so both are.
    let late = File::open(place.mounted(large)).expect("there");
    for offset in (0..expected.len()).step_by(4096) {
        read(&early, offset);
        read(&late, offset);
    }
    let mut small = Vec::new();
    (&early_small).read_to_end(&mut small).expect("readable");
    assert!(small == *content);
    let status = place.status();
    assert_eq!(number(&status, "/counters/served_opens"), 3);
    assert_eq!(number(&status, "/counters/passthrough_opens"), 0);
    let copied = number(&status, "/counters/copied_bytes");
    assert!(copied > served, "the copy is read for them");
    drop(early);
    read(&late, 0);
    drop(late);
    // The process behind the mount gets the close a little later.
    place.status_when(|_| {
        let again = File::open(place.mounted(large)).expect("there");
        read(&again, 8192);
        let second = File::open(place.mounted(large)).expect("there");
        read(&second, 12288);
        let status = place.status();
        number(&status, "/counters/passthrough_opens") > 0
            || notes(&status).contains("no passthrough")
    });
    let status = place.status();
    has_passthrough(&status);
    assert_eq!(number(&status, "/counters/failed_reads"), 0);
}

// Promises: copy-continues
#[test]
fn killed_mount_resumes_copy_and_distrusts_touched_files() {
    let tree = Tree::large();
    let place = Place::serve(tree.tar.clone());
    place.index();
    place.gate.open(tree.tar.len() as u64 / 2);
    place.mount();
    let whole = |status: &Value| number(status, "/copy/bytes");
    place.status_when(|status| whole(status) > 20 << 20);
    let (pid, process) = place.process();
    kill_process(pid, Signal::KILL).expect("running");
    assert!(wait::process_exits(&process));
    wait::wait_until("its mount is unmounted", || !is_mounted(&place.path("mnt")));

    // The first two files are complete. The test writes to one and truncates the other.
    let [(one, _), (two, _)] = &tree.files[..2] else {
        panic!("files");
    };
    let file = File::options()
        .write(true)
        .open(place.path("copy").join(one));
    file.expect("whole")
        .write_all_at(b"wrong", 7)
        .expect("written");
    let file = File::options()
        .write(true)
        .open(place.path("copy").join(two));
    file.expect("whole").set_len(5).expect("cut");

    place.gate.open(u64::MAX);
    let before = place.idle_sent_bytes();
    place.mount();
    let status = place.wait_for_state("complete");
    assert_eq!(number(&status, "/copy/files"), tree.files.len() as u64);
    assert_eq!(number(&status, "/copy/failures"), 0);
    let fetched = place.sent_bytes() - before;
    // The incomplete files, and the rest of the spans at their boundaries.
    assert!(
        fetched < tree.tar.len() as u64 - (8 << 20),
        "{fetched} bytes"
    );
    place.assert_reads_as(&tree);
    for (name, content) in &tree.files {
        assert!(fs::read(place.path("copy").join(name)).expect("there") == *content);
    }
    place.umount();
    // Another mount sends only the request that determines the version.
    let before = place.sent_bytes();
    place.mount();
    place.assert_reads_as(&tree);
    place.wait_for_state("complete");
    assert!(place.sent_bytes() - before <= 64 << 10);
    assert_eq!(place.counter("decoded_spans"), 0);
}

// Promises: copy-changed
#[test]
fn copy_changed_under_the_mount_is_not_served() {
    let tree = Tree::mixed();
    let place = Place::serve(tree.tar.clone());
    place.mount();
    place.wait_for_state("complete");
    let (name, _) = &tree.files[40];
    let copy = place.path("copy").join(name);
    fs::write(&copy, "something else").expect("written");
    let (other, _) = &tree.files[43];
    let copy = place.path("copy").join(other);
    fs::remove_file(&copy).expect("there");
    symlink("/etc/passwd", &copy).expect("made");
    place.assert_reads_as(&tree);
    let status = place.status();
    assert_eq!(text(&status, "/copy/state"), "incomplete");
    assert_eq!(number(&status, "/copy/failures"), 2);
    assert!(
        notes(&status).contains("was changed in the copy"),
        "{status}"
    );
    assert_eq!(number(&status, "/counters/failed_reads"), 0);
}

// Promises: copy-unmount
#[test]
fn unmount_during_copy_is_prompt_and_leaves_whole_files() {
    let tree = Tree::large();
    let place = Place::serve(tree.tar.clone());
    place.index();
    place.gate.open(tree.tar.len() as u64 / 2);
    place.mount();
    place.status_when(|status| number(status, "/copy/bytes") > 20 << 20);
    let (_, process) = place.process();
    place.umount();
    assert_eq!(
        poll(
            &mut [PollFd::new(&process, PollFlags::IN)],
            Some(&Timespec::default())
        ),
        Ok(1),
        "umount waits for the process"
    );
    let mut found = 0;
    for (name, content) in &tree.files {
        if let Ok(read) = fs::read(place.path("copy").join(name)) {
            assert!(read == *content, "{name}");
            found += 1;
        }
    }
    assert!(found > 20 && found < tree.files.len(), "{found}");
}

// Promises: copy-owner, copy-lock, sync-locked
#[test]
fn foreign_copy_directory_is_rejected_and_untouched() {
    let tree = Tree::mixed();
    let place = Place::serve(tree.tar.clone());
    let error_of = |copy: &str| {
        let told = place.error_of(&["mount", &place.url, "mnt", "--copy-to", copy]);
        assert!(!is_mounted(&place.path("mnt")));
        told
    };
    fs::create_dir(place.path("full")).expect("made");
    fs::write(place.path("full/file"), "mine").expect("written");
    let told = error_of("full");
    let expected = format!(
        "tarfs: {}: is not empty, and is no copy that a mount of this archive keeps (name an empty \
         directory; what is there is left alone)\n",
        place.path("full").display()
    );
    assert_eq!(told, expected);
    assert_eq!(fs::read(place.path("full/file")).expect("there"), b"mine");
    assert!(!place.path(".full.tarfs-state").exists());
    for nested in ["mnt/copy", "mnt", ".", "./full/../mnt/copy"] {
        let told = error_of(nested);
        assert!(told.contains("would hide each other"), "{told}");
    }
    assert!(!place.path("mnt/copy").exists(), "nothing was made");
    assert!(error_of("no/such/place").contains("No such file"));

    place.mount();
    place.wait_for_state("complete");
    fs::create_dir(place.path("mnt2")).expect("made");
    let told = place.error_of(&["mount", &place.url, "mnt2", "--copy-to", "copy"]);
    assert!(
        told.contains("/copy: process ") && told.contains(" has locked it"),
        "{told}"
    );
    // The copy has the same lock as updates and resumable runs.
    let resumed = ["materialize", "--resume", &place.url, "-C", "copy"];
    for words in [&["sync", &place.url, "copy"][..], &resumed] {
        let told = place.error_of(words);
        assert!(told.contains(" has locked it"), "{words:?}: {told}");
    }
    place.umount();
    // Another version of the same length and with the same names.
    let other = Tree::other();
    let server = place.server.as_ref().expect("running");
    server.serve(ARCHIVE, Resource::new(other.tar.clone()).etag("\"2\""));
    let words = ["mount", &place.url, "mnt", "--copy-to", "copy"];
    let foreign = "no copy that a mount of this archive keeps";
    let told = place.error_of(&[&words[..], &["--wait-index"]].concat());
    assert!(told.contains(foreign), "{told}");
    assert!(!is_mounted(&place.path("mnt")));
    // With the index saved meanwhile, the difference is known at once.
    assert!(error_of("copy").contains(foreign));
    // Without an index it is known only after the mount is there.
    fs::remove_dir_all(place.path("cache")).expect("there");
    place.mount();
    let status = place.wait_for_state("stopped");
    assert!(notes(&status).contains(foreign), "{status}");
    place.assert_reads_as(&other);
    let (name, content) = &tree.files[40];
    assert!(fs::read(place.path("copy").join(name)).expect("there") == *content);
}

/// A file system in its own directory. Dropping it unmounts.
struct FileSystem(PathBuf);

impl FileSystem {
    fn new(place: PathBuf, kind: &str, options: &str) -> Self {
        fs::create_dir(&place).expect("made");
        let options = std::ffi::CString::new(options).expect("no zero");
        mount(kind, &place, kind, MountFlags::empty(), options.as_c_str())
            .expect("these tests run as root");
        Self(place)
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).ok();
    }
}

// Promises: copy-failure
#[test]
fn full_disk_is_logged_as_an_error_and_shown_in_status() {
    let place = Place::serve(Tree::large().tar.clone());
    // A disk that becomes full after some files, and one that is full from the start.
    for (number, size) in ["size=8M", "size=16K"].into_iter().enumerate() {
        let small = place.path(format!("small{number}"));
        let _small = FileSystem::new(small.clone(), "tmpfs", size);
        if number == 1 {
            fs::write(small.join("file"), [7; 12 << 10]).expect("space");
        }
        let copy = format!("small{number}/copy");
        let log = format!("log{number}");
        let url = place.url.clone();
        let words = ["mount", "--copy-to", &copy, "--log-file", &log, &url, "mnt"];
        let output = place.tarfs(&words);
        if output.status.success() {
            let status = place.wait_for_state("stopped");
            assert!(notes(&status).contains("no space left"), "{status}");
            // Until the command returns, errors are printed on the terminal, in the style of messages for users.
            let told = stderr_text(&output);
            let read_log = || fs::read_to_string(place.path(&log)).expect("a log") + &told;
            let is_error = |line: &&str| {
                (line.contains("ERROR ") || line.starts_with("tarfs: "))
                    && !line.starts_with("tarfs: warning: ")
                    && line.contains("no space left")
            };
            // A separate thread writes the log.
            wait::wait_until("an error in the log", || {
                read_log().lines().any(|line| is_error(&line))
            });
            let log = read_log();
            let line = log.lines().find(is_error).expect("an error");
            assert!(line.contains(&copy), "{log}");
        } else {
            assert_eq!(number, 1, "{}", stderr_text(&output));
            let error = stderr_text(&output).to_lowercase();
            assert!(error.contains("no space left"), "{error}");
        }
        let unmounted = place.tarfs(&["umount", "mnt"]);
        assert_eq!(unmounted.status.success(), output.status.success());
    }
}

// Promises: copy-failure
#[test]
fn full_disk_stops_copy_but_not_mount() {
    let tree = Tree::large();
    let place = Place::serve(tree.tar.clone());
    let _small = FileSystem::new(place.path("small"), "tmpfs", "size=8M");
    place.mount_with("small/copy", &[]);
    let status = place.wait_for_state("stopped");
    assert_eq!(
        notes(&status)
            .to_lowercase()
            .matches("no space left")
            .count(),
        1
    );
    assert!(number(&status, "/copy/bytes") > 1 << 20);
    place.assert_reads_as(&tree);
    let status = place.status();
    assert_eq!(number(&status, "/counters/failed_reads"), 0);
    assert_eq!(text(&status, "/copy/state"), "stopped");
    for (name, content) in &tree.files {
        if let Ok(read) = fs::read(place.path("small/copy").join(name)) {
            assert!(read == *content, "{name}");
        }
    }
}

// Promises: copy-passthrough
#[test]
fn daemon_reads_copy_without_kernel_passthrough() {
    let tree = Tree::mixed();
    let mut place = Place::serve(tree.tar.clone());
    // On overlayfs, which is itself stacked. Its layers are on tmpfs, because the disk may be an
    // overlay.
    let layers = FileSystem::new(place.path("layers"), "tmpfs", "");
    for layer in ["lower", "upper", "work"] {
        fs::create_dir(layers.0.join(layer)).expect("made");
    }
    let layer = |name: &str| layers.0.join(name).display().to_string();
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        layer("lower"),
        layer("upper"),
        layer("work")
    );
    let overlay = FileSystem::new(place.path("overlay"), "overlay", &options);
    place.mount_with("overlay/copy", &[]);
    place.wait_for_state("complete");
    let fetched = place.counter("source_read_bytes");
    place.stop_server();
    place.assert_reads_as(&tree);
    let status = place.status();
    assert!(!has_passthrough(&status));
    let bytes: usize = tree.files.iter().map(|(_, content)| content.len()).sum();
    // Bytes in memory may have been stored in the page cache before a read asked for them.
    let copied = number(&status, "/counters/copied_bytes");
    let pushed = number(&status, "/counters/pushed_bytes");
    assert!(copied > 0 && copied + pushed >= bytes as u64);
    assert_eq!(number(&status, "/counters/source_read_bytes"), fetched);
    assert_eq!(number(&status, "/counters/served_bytes"), copied);
    place.umount();
    drop(overlay);
}

// Promises: copy-tree
#[test]
fn subtree_mount_copies_only_that_subtree() {
    let tree = Tree::mixed();
    let mut place = Place::serve(tree.tar.clone());
    place.mount_with("copy", &["--root", "many/of"]);
    let status = place.wait_for_state("complete");
    assert_eq!(number(&status, "/copy/files"), 120);
    place.stop_server();
    let names = fs::read_dir(place.path("copy")).expect("there");
    let names: Vec<_> = names
        .map(|name| name.expect("readable").file_name())
        .collect();
    assert_eq!(names, ["them"]);
    for (name, content) in &tree.files {
        if let Some(name) = name.strip_prefix("many/of/") {
            assert!(fs::read(place.mounted(name)).expect("readable") == *content);
            assert!(fs::read(place.path("copy").join(name)).expect("there") == *content);
        }
    }
}

// Promises: copy-failure
#[test]
fn copy_continues_when_source_is_back() {
    let tree = Tree::mixed();
    let place = Place::serve(tree.tar.clone());
    place.index();
    let server = place.server.as_ref().expect("running");
    let resource = Resource::new(tree.tar.clone()).etag("\"1\"");
    let good = resource.clone();
    server.route(ARCHIVE, move |request| match request.range() {
        Some((0, _)) | None => good.answer(request),
        Some(_) => Response::new(503),
    });
    place.mount_with("copy", &["--timeout", "2"]);
    let status = place.wait_for_state("retrying");
    assert!(notes(&status).contains("cannot be reached"), "{status}");
    server.serve(ARCHIVE, resource);
    place.wait_for_state("complete");
    place.assert_reads_as(&tree);
}
