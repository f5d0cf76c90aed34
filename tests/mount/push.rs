//! Files and names that a mount pushes to the kernel ahead of readers.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tarfs::archive::Volume;
use tarfs::archive::{Archive, PrefetchOptions};
use tarfs::fuse::{Force, Mount, MountOptions, NewMount, Subtree, TarFilesystem as Mounted};
use tarfs::internal::stats::{Counter, Stats};

use crate::support::archive_env::TestEnv;
use crate::support::packing::Packing;
use crate::support::rng::Rng;
use crate::support::tree::Tree;
use crate::support::wait;

fn mount(archive: &Arc<Archive>, view: Subtree, stats: Arc<Stats>, directory: &Path) -> Mount {
    let options = MountOptions::default();
    let content = Arc::clone(archive) as Arc<dyn Volume>;
    let mounted = Mounted::new(content, view, &options, stats);
    let mount = NewMount::on(directory, "small.tar", &options)
        .expect("these tests need FUSE: /dev/fuse, and root or fusermount3");
    Mount::serve(mounted, mount, || {}).expect("served")
}

/// An archive of many small files, mounted from a server.
struct PushFixture {
    mount: Option<Mount>,
    archive: Arc<Archive>,
    directory: tempfile::TempDir,
    _env: TestEnv,
}

const SMALL_LEN: usize = 4000;

fn small_name(number: usize) -> String {
    format!("{}/{number:04}", number / 1000)
}

fn small_content(number: usize) -> Vec<u8> {
    Rng::new(number as u64).bytes(2000 + number % 5000)
}

impl PushFixture {
    fn new() -> Self {
        Self::of_subtree(None)
    }

    /// A mount of one directory, or of all.
    fn of_subtree(root: Option<&str>) -> Self {
        let files = (0..SMALL_LEN).map(|number| (small_name(number), small_content(number)));
        let tree = Tree::of(files.collect());
        let env = TestEnv::with_archive(Packing::Lz4.pack(&tree.tar));
        let archive = Arc::new(env.open_with(&env.options_without_disk_cache()));
        archive
            .start_prefetch(PrefetchOptions::default())
            .expect("threads");
        let view = root.map(|root| {
            let index = archive.index();
            let index = index.tree().expect("rows");
            Subtree::new(index, root.as_bytes(), 0).expect("a directory")
        });
        let view = view.unwrap_or(Subtree::WHOLE);
        let directory = tempfile::tempdir().expect("a directory");
        let stats = Arc::clone(archive.stats());
        let mount = mount(&archive, view, stats, directory.path());
        Self {
            mount: Some(mount),
            archive,
            directory,
            _env: env,
        }
    }

    fn path(&self, number: usize) -> PathBuf {
        self.directory.path().join(small_name(number))
    }

    /// Lists the directory of file `number`, so that the kernel knows its inodes.
    fn list(&self, number: usize) {
        let path = self.path(number);
        let directory = path.parent().expect("one");
        assert_eq!(fs::read_dir(directory).expect("readable").count(), 1000);
    }

    #[track_caller]
    fn read(&self, number: usize) {
        let content = fs::read(self.path(number)).expect("readable");
        assert!(content == small_content(number), "{number} is wrong");
    }

    fn count(&self, counter: impl Fn(&tarfs::internal::stats::Stats) -> &Counter) -> u64 {
        counter(self.archive.stats()).get()
    }

    /// Asserts that the mount got hardly more than `reads` reads. The kernel may evict pages at any
    /// time.
    #[track_caller]
    fn assert_served(&self, reads: u64) {
        let served = self.count(|stats| &stats.served_reads);
        assert!((reads..=reads + 5).contains(&served), "{served} reads");
    }

    /// Waits until file `number` must have been pushed, because files are pushed in order.
    fn wait_until_pushed(&self, files: u64) {
        wait::wait_until("files are pushed", || {
            self.count(|stats| &stats.pushed_files) >= files
        });
    }
}

impl Drop for PushFixture {
    fn drop(&mut self) {
        drop(self.mount.take());
    }
}

// Promises: ahead-small-files
#[test]
fn files_are_pushed_to_each_mount_of_an_archive_until_it_ends() {
    let first = PushFixture::new();
    let directory = tempfile::tempdir().expect("a directory");
    let stats = Arc::<Stats>::default();
    let second = mount(
        &first.archive,
        Subtree::WHOLE,
        Arc::clone(&stats),
        directory.path(),
    );
    let listed = fs::read_dir(directory.path().join("0")).expect("readable");
    assert_eq!(listed.count(), 1000);
    first.list(0);
    for number in 0..3 {
        first.read(number);
    }
    // To both, each the 80 files of the window.
    wait::wait_until("files are pushed", || {
        first.count(|stats| &stats.pushed_bytes) >= 2 * 80 * 4500
    });
    let read_second = |number| {
        let content = fs::read(directory.path().join(small_name(number))).expect("readable");
        assert!(content == small_content(number), "{number} is wrong");
    };
    (3..40).for_each(read_second);
    // The kernel may evict pages at any time.
    assert!(
        stats.served_reads.get() <= 5,
        "{}",
        stats.served_reads.get()
    );
    first.assert_served(3);
    let counts = [&first.archive.stats().served_lookups, &stats.served_lookups].map(Counter::get);
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    drop(second);
    // From now on one mount gets pushes.
    let before = first.count(|stats| &stats.pushed_bytes);
    let len: u64 = (3..1000)
        .map(|number| small_content(number).len() as u64)
        .sum();
    for number in 3..1000 {
        first.read(number);
    }
    let pushed = first.count(|stats| &stats.pushed_bytes) - before;
    assert!(pushed <= len, "{pushed} of {len}");
    assert_eq!(first.archive.stats().failed_reads.get(), 0);
}

// Promises: ahead-small-files
#[test]
fn files_after_the_marker_are_pushed_before_they_are_read() {
    let place = PushFixture::new();
    place.list(0);
    for number in 0..3 {
        place.read(number);
    }
    assert_eq!(place.count(|stats| &stats.served_reads), 3);
    // 512 KiB in files of 4.5 KiB and their headers, less those around the marker.
    place.wait_until_pushed(80);
    for number in 3..40 {
        place.read(number);
    }
    place.assert_served(3);
    // The marker is read next, and starts the next window.
    for number in 40..100 {
        place.read(number);
    }
    let reads = place.count(|stats| &stats.served_reads);
    // 63 without pushing. The number of reads before the window starts depends on the machine.
    assert!((4..50).contains(&reads), "{reads}");
    place.wait_until_pushed(150);
    for number in 100..SMALL_LEN {
        if number % 1000 == 0 {
            place.list(number);
        }
        place.read(number);
    }
    let served = place.count(|stats| &stats.served_bytes);
    let pushed = place.count(|stats| &stats.pushed_bytes);
    let total: usize = (0..SMALL_LEN).map(|number| 2000 + number % 5000).sum();
    assert!(served + pushed >= total as u64);
    assert!(pushed <= total as u64, "nothing twice");
}

/// Only root can copy a mount, and only then does the mount prime the kernel's names.
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

// Promises: ahead-small-files
#[test]
fn files_opened_by_name_are_pushed_to_page_cache() {
    let place = PushFixture::new();
    for number in 0..3 {
        place.read(number);
    }
    if !is_root() {
        wait::wait_until("it settles", || place.archive.is_prefetch_idle());
        return assert_eq!(place.count(|stats| &stats.pushed_files), 0);
    }
    place.wait_until_pushed(80);
    for number in 3..40 {
        place.read(number);
    }
    place.assert_served(3);
    for number in 40..SMALL_LEN {
        place.read(number);
    }
    let served = place.count(|stats| &stats.served_bytes);
    let pushed = place.count(|stats| &stats.pushed_bytes);
    let total: usize = (0..SMALL_LEN).map(|number| 2000 + number % 5000).sum();
    assert!(served + pushed >= total as u64);
    assert!(pushed <= total as u64, "nothing twice");
}

// Promises: ahead-small-files
#[test]
fn lookups_in_directory_order_prime_dentries_in_batches() {
    let place = PushFixture::new();
    let look = |numbers: &mut dyn Iterator<Item = usize>| {
        let before = place.count(|stats| &stats.served_lookups);
        for number in numbers {
            let found = fs::metadata(place.path(number)).expect("there");
            assert_eq!(found.len(), small_content(number).len() as u64);
            wait::wait_until("it settles", || place.archive.is_prefetch_idle());
        }
        place.count(|stats| &stats.served_lookups) - before
    };
    let asked = look(&mut (0..1000));
    if is_root() {
        // Some 20 with listings of hundreds of names. Before Linux 6.15 there are more.
        assert!(asked < 250, "{asked}");
    }
    let asked = look(&mut (1000..2000).rev());
    assert!(asked >= 1000, "earlier names were primed: {asked}");
}

// Promises: ahead-small-files
#[test]
fn only_mounted_subtree_is_primed_on_lookups() {
    let place = PushFixture::of_subtree(Some("1"));
    let read = |number: usize| {
        let name = place.path(number);
        let name = name.file_name().expect("a file");
        let content = fs::read(place.directory.path().join(name)).expect("readable");
        assert!(content == small_content(number), "{number} is wrong");
    };
    for number in 1000..1003 {
        read(number);
    }
    if is_root() {
        place.wait_until_pushed(80);
    }
    for number in 1003..2000 {
        read(number);
    }
}

// Promises: ahead-small-files
#[test]
fn mount_can_be_unmounted_during_dentry_priming() {
    for files in 3..13 {
        let place = PushFixture::new();
        for number in 0..files {
            place.read(number);
        }
        let mount = place.mount.as_ref().expect("mounted");
        mount.unmount(Force::No).expect("not in use");
    }
}
