//! Random network faults: every read gives the right bytes or an error.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tarfs::Stats;
use tarfs::archive::{Archive, OpenError, ReadError};
use tarfs::source::{self, Retry};

use super::{PATH, TestEnv, index, read};
use crate::support::http::{Fault, Resource};
use crate::support::rng::Rng;
use crate::support::rounds::{rounds, seed};
use crate::support::tree::Tree;

/// Default number of schedules of each kind.
const DEFAULT_ROUNDS: u64 = 25;

/// Number of attempts with a short timeout, because a busy machine is slow even without faults.
const MAX_ATTEMPTS: usize = 5;

/// Files of the archive, each of more than one span.
const FILES: [&str; 3] = ["a", "b", "c"];

fn tree(version: u64) -> Tree {
    let content = |number| Rng::new(version * 100 + number).bytes(1_200_000);
    let files = (0..).zip(FILES);
    Tree::of(
        files
            .map(|(number, name)| (name.to_owned(), content(number)))
            .collect(),
    )
}

/// The fault of a request: often none, and never one that takes long.
fn fault(rng: &mut Rng, other: &Resource) -> Option<Fault> {
    let place = index(rng.below(600_000));
    let millis = Duration::from_millis(rng.below(4));
    Some(match rng.below(40) {
        0 => Fault::Late(millis),
        1 => Fault::Paced(place / 4 + 1, millis),
        2 => Fault::Status(500),
        3 => Fault::Status(502),
        4 => Fault::Status(404),
        5 => Fault::Status(401),
        6 => Fault::Busy(503, "0".to_owned()),
        7 => Fault::Busy(429, "Sun, 06 Nov 1994 08:49:37 GMT".to_owned()),
        8 => Fault::Busy(429, "86400".to_owned()),
        9 => Fault::HangUp,
        10 | 11 => Fault::Reset(place),
        12 | 13 => Fault::Short(place),
        14 => Fault::Silence,
        15 => Fault::Stall(place),
        16 => Fault::OtherRange,
        17 => Fault::Whole,
        18 => Fault::Unsatisfiable,
        19 => Fault::Chunked,
        20 => Fault::Gzip,
        21 => Fault::Other(other.clone()),
        _ => return None,
    })
}

/// The seeds of all schedules of a kind. `TARFS_SEED` selects others.
fn schedules() -> Range<u64> {
    let first = seed().wrapping_mul(1 << 24);
    first..first + rounds(DEFAULT_ROUNDS)
}

/// Results of all schedules.
#[derive(Default)]
struct Tally {
    right: u64,
    failed: u64,
    /// Number of these that timed out.
    late: u64,
}

impl TestEnv {
    /// From now on, requests meet the faults of schedule `seed`.
    fn inject_faults(&self, seed: u64, resource: &Resource, other: &Resource) {
        let (other, count) = (other.clone(), AtomicU64::new(0));
        self.server
            .serve_with_faults(PATH, resource.clone(), move |_| {
                let number = count.fetch_add(1, Ordering::SeqCst);
                fault(&mut Rng::new(seed << 16 | number), &other)
            });
    }

    /// Opens the archive with a short timeout.
    fn open_with_short_timeout(&self) -> Result<Archive, OpenError> {
        let stats = Arc::<Stats>::default();
        let options = source::Options {
            stats: Arc::clone(&stats),
            timeout: Duration::from_millis(200),
            retry: Retry {
                attempts: 4,
                retries_outages: true,
                initial_pause: Duration::from_millis(1),
                max_pause: Duration::from_millis(10),
            },
            ..source::Options::default()
        };
        let url = self.server.url(PATH);
        let source = self.network.block_on(source::open(&url, options));
        let source = source.map_err(|error| OpenError::Archive {
            location: url,
            member: None,
            error: Box::new(error.into()),
        })?;
        Archive::open(
            source,
            &self.options_without_disk_cache(),
            self.network.handle(),
            &stats,
        )
    }
}

fn tally(archive: &Archive, tree: &Tree, seed: u64, tally: &mut Tally) {
    for (name, content) in &tree.files {
        match read(archive, name) {
            Ok(read) => {
                assert!(read == *content, "wrong bytes in {name}, schedule {seed}");
                tally.right += 1;
            }
            // A network fault must not make the index wrong, either.
            Err(error) => {
                let is_told = !matches!(error, ReadError::Index | ReadError::NotAFile);
                assert!(is_told, "{error:?}, schedule {seed}");
                tally.failed += 1;
                tally.late += u64::from(matches!(error, ReadError::TimedOut(_)));
            }
        }
    }
}

/// Results of reads after the faults have ended.
fn tally_without_faults(archive: &Archive, tree: &Tree, seed: u64) -> Tally {
    let tallies = (0..MAX_ATTEMPTS).map(|_| {
        let mut later = Tally::default();
        tally(archive, tree, seed, &mut later);
        assert_eq!(later.failed, later.late, "it is over, schedule {seed}");
        later
    });
    let mut well = tallies.filter(|later| later.failed == 0);
    well.next()
        .unwrap_or_else(|| panic!("it is over, schedule {seed}"))
}

fn resources(tag: &str) -> [(Tree, Resource); 2] {
    [1, 2].map(|version| {
        let tree = tree(version);
        let packed = Bytes::clone(&tree.tar);
        let resource = Resource::new(packed).etag(&format!("{tag}\"{version}\""));
        (tree, resource)
    })
}

#[test]
fn reads_return_right_bytes_or_error_under_random_faults() {
    let mut all = Tally::default();
    for tag in ["", "W/"] {
        let [(tree, resource), (_, other)] = resources(tag);
        let env = TestEnv::new();
        env.serve(resource.clone());
        drop(env.open());
        for seed in schedules() {
            env.serve(resource.clone());
            let archive = (0..MAX_ATTEMPTS).find_map(|_| env.open_with_short_timeout().ok());
            let archive = archive.expect("an archive");
            assert_eq!(archive.stats().scans.get(), 0);
            env.inject_faults(seed, &resource, &other);
            tally(&archive, &tree, seed, &mut all);
            env.serve(resource.clone());
            tally_without_faults(&archive, &tree, seed);
        }
    }
    assert!(
        all.right > all.failed && all.failed > 0,
        "{} {}",
        all.right,
        all.failed
    );
}

#[test]
fn scans_return_whole_archive_or_error_under_random_faults() {
    let [old, new] = resources("");
    let versions = [(old.0, old.1, "\"1\""), (new.0, new.1, "\"2\"")];
    let (mut all, mut refused) = (Tally::default(), 0);
    for seed in schedules() {
        let env = TestEnv::new();
        env.inject_faults(seed, &versions[0].1, &versions[1].1);
        let Ok(archive) = env.open_with_short_timeout() else {
            refused += 1;
            continue;
        };
        // The first response determines the version.
        let version = archive.source().fingerprint().to_string();
        let which = versions.iter().find(|(_, _, tag)| version.contains(tag));
        let (tree, resource, _) = which.expect("one of the two");
        env.serve(resource.clone());
        all.right += tally_without_faults(&archive, tree, seed).right;
    }
    assert!(all.right > 0 && refused > 0, "{} {refused}", all.right);
}
