//! Trees that the mounts of one process share.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use tarfs::archive::Volume;
use tarfs::fuse::SuperblockWatch;
use tarfs::internal::environment::Environment;
use tarfs::internal::thread::Thread;
use tarfs::locate::{OpenSpec, SourceSpec};
use tarfs::serve::{
    Daemon, DaemonSocket, Failure, MountSpec, Opened, Packet, Process, Server as ServeMounts,
    Shareable, VolumeKey, VolumeTable,
};
use tarfs::source;

use crate::support::archive_env::{PATH, TestEnv};
use crate::support::http::Resource;
use crate::support::packing::Packing;
use crate::support::tree::Tree;
use crate::support::wait;

const CALLERS: usize = 20;

fn key(source: &str) -> VolumeKey {
    let tree = SourceSpec::from(source).into();
    let mount = MountSpec::new(tree, OpenSpec::default(), "/mnt".into(), "/run".into());
    VolumeKey::new(&mount).expect("no standard input")
}

/// A tree of one archive, and a counter of closed ones.
#[derive(Debug)]
struct OneVolume(Arc<dyn Volume>, Arc<AtomicU64>);

impl Shareable for OneVolume {
    fn is_usable(&self) -> bool {
        let archives = self.0.archives();
        archives.iter().all(|archive| archive.failure().is_none())
    }

    fn close(&self) {
        self.0.close();
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

type Trees = VolumeTable<OneVolume>;

/// Any version is the current one.
#[expect(clippy::unnecessary_wraps, reason = "a check may fail")]
fn current(_: &OneVolume) -> Result<bool, Failure> {
    Ok(true)
}

fn open(env: &TestEnv) -> OneVolume {
    let archive = env.open_with(&env.options_without_disk_cache());
    OneVolume(Arc::new(archive), Arc::default())
}

#[test]
fn mounts_of_one_key_open_an_archive_once_and_the_last_one_closes_it() {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(Packing::Gzip.pack(&tree.tar));
    let (table, opened) = (Trees::default(), AtomicU64::new(0));
    let closed = Arc::<AtomicU64>::default();
    let open = || OneVolume(open(&env).0, Arc::clone(&closed));
    let start = Barrier::new(CALLERS);
    let volumes: Vec<_> = thread::scope(|scope| {
        let mount = || {
            start.wait();
            let counted = || {
                opened.fetch_add(1, Ordering::SeqCst);
                Ok(open())
            };
            table.open(key("a.tar"), current, counted).expect("opened")
        };
        let threads: Vec<_> = (0..CALLERS).map(|_| scope.spawn(mount)).collect();
        let volumes = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"));
        volumes.collect()
    });
    assert_eq!(opened.load(Ordering::SeqCst), 1);
    let other = table
        .open(key("other.tar"), current, || Ok(open()))
        .expect("opened");
    assert_eq!(closed.load(Ordering::SeqCst), 0);
    drop(other);
    assert_eq!(closed.load(Ordering::SeqCst), 1);
    let (name, content) = &tree.files[0];
    let path = tarfs::ArchivePath::sanitize(name.as_bytes()).path;
    let find = |tree: &tarfs::index::Index| tree.find(&path).map(|entry| entry.ino());
    let ino = volumes[0]
        .0
        .index()
        .read(find)
        .expect("rows")
        .expect("there");
    let len = u32::try_from(content.len()).expect("short");
    for volume in volumes {
        let bytes = volume.0.read_blocking(ino, 0, len).expect("readable");
        assert!(bytes == *content);
    }
    assert_eq!(closed.load(Ordering::SeqCst), 2);
    table
        .open(key("a.tar"), current, || Ok(open()))
        .expect("opened again");
}

#[test]
fn tree_of_an_old_version_is_opened_again_for_the_next_mount() {
    let tree = Tree::mixed();
    let env = TestEnv::with_archive(Packing::Gzip.pack(&tree.tar));
    let table = Trees::default();
    let open = || Ok(open(&env));
    let old = table.open(key("a.tar"), current, open).expect("opened");
    let outage = |_: &_| Err(Failure::new("unreachable"));
    let error = table.open(key("a.tar"), outage, open).expect_err("unknown");
    assert_eq!(error, Failure::new("unreachable"));
    let new = table
        .open(key("a.tar"), |_| Ok(false), open)
        .expect("opened");
    assert!(!Arc::ptr_eq(&old, &new));
    let shared = table.open(key("a.tar"), current, open).expect("opened");
    assert!(Arc::ptr_eq(&new, &shared));
}

#[test]
fn archive_whose_scan_failed_is_opened_again() {
    let tree = Tree::mixed();
    let packed = Packing::Gzip.pack(&tree.tar);
    let env = TestEnv::new();
    let cut = packed.slice(..packed.len() / 2);
    env.serve(Resource::new(cut).etag("\"1\""));
    let table = Trees::default();
    let open_early = || {
        let (source, stats) = env.source();
        let options = env.options_without_disk_cache();
        let archive =
            tarfs::archive::Archive::open_early(source, &options, env.network.handle(), &stats);
        Ok(OneVolume(Arc::new(archive.expect("begun")), Arc::default()))
    };
    let first = table
        .open(key("a.tar"), current, open_early)
        .expect("begun");
    let (sender, ended) = std::sync::mpsc::channel();
    let done = tarfs::archive::Callback::new(move || sender.send(()).unwrap_or_default());
    first.0.on_available(tarfs::archive::WaitFor::End, done);
    ended.recv().expect("the scan ends");
    env.server.serve(PATH, Resource::new(packed).etag("\"2\""));
    let second = table
        .open(key("a.tar"), current, open_early)
        .expect("begun");
    assert!(!Arc::ptr_eq(&first, &second));
    let third = table
        .open(key("a.tar"), current, || Err(Failure::new("not shared")))
        .expect("shared");
    assert!(Arc::ptr_eq(&second, &third));
}

/// A daemon without mounts of its own.
struct NoProcess;

impl Process for NoProcess {
    fn settle(&self, _: bool) {}
    fn unmount_abandoned(&self, _: &Path, _: &Path) {}
    fn remove_scratch(&self, _: &Path, _: Option<&SuperblockWatch>, _: Option<Duration>) {}
    fn report_scan_end(&self, _: &Opened) {}
    fn socket(&self) -> Option<&Path> {
        Some(Path::new("/run/a.daemon"))
    }
    fn panic_count(&self) -> u64 {
        0
    }
}

// Promises: shared-end
#[test]
fn daemon_ends_after_its_last_client() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = DaemonSocket::in_directory(&directory.path().join("run")).expect("a place");
    let mut listener = None;
    let start = |made| {
        listener = Some(made);
        Ok(())
    };
    let client = socket.connect_or_start(start).expect("connected");
    let network = tarfs::locate::start_network().expect("threads");
    let server = ServeMounts::new(network.handle().clone(), NoProcess);
    let daemon = Daemon::new(server, socket.clone(), listener.expect("started"));
    let (ended, end) = std::sync::mpsc::channel();
    let running = Thread::spawn("daemon", move || {
        daemon.run(Some(Duration::ZERO)).expect("it can wait");
        ended.send(()).unwrap_or_default();
    });
    let running = running.expect("a thread");
    let introduced = client.receive().expect("whole").expect("there");
    assert_eq!(introduced.0, Packet::Server(std::process::id()));
    assert!(end.try_recv().is_err() && socket.file_id().is_some());
    drop(client);
    end.recv_timeout(wait::WAIT_TIMEOUT).expect("it ends");
    assert_eq!(socket.file_id(), None);
    drop(running);
}

// Promises: store-endpoint
#[test]
fn users_of_one_process_have_their_own_endpoints() {
    let location = |variables: &[(&str, &str)]| {
        let variables = variables.iter();
        let variables = variables.map(|&(name, value)| (name.into(), value.into()));
        let options = source::Options {
            environment: Arc::new(Environment::new(variables, "/".into())),
            ..source::Options::default()
        };
        source::canonical_location("s3://bucket/a.tar", &options).expect("an object")
    };
    let endpoint = |url| location(&[("AWS_ENDPOINT_URL", url)]);
    assert_ne!(
        endpoint("http://one.example"),
        endpoint("http://two.example")
    );
    assert_ne!(endpoint("http://one.example"), location(&[]));
    let ignored = [
        ("AWS_ENDPOINT_URL", "http://one.example"),
        ("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true"),
    ];
    assert_eq!(location(&ignored), location(&[]));
}
