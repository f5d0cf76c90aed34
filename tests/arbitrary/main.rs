//! Fuzz targets: every parser of tarfs, run on arbitrary bytes.
//!
//! Each target accepts any bytes and panics when a promise is broken. These tests run over seeds and
//! 200 to 3,000 mutations of them. `scripts/fuzz` runs the same targets, guided by coverage, for any
//! time.

#[path = "../support/packing.rs"]
#[allow(dead_code, reason = "tests need more of it")]
mod packing;
#[path = "../support/raw.rs"]
#[allow(dead_code, reason = "tests need more of it")]
mod raw;
#[path = "../support/rng.rs"]
#[allow(dead_code, reason = "tests need more of it")]
mod rng;
#[path = "../support/rounds.rs"]
mod rounds;
#[path = "../support/soci.rs"]
#[allow(dead_code, reason = "tests need more of it")]
mod soci;

mod mutations;
mod seeds;
mod targets;

// The file of a private module names it so (`targets/private.rs`).
use tarfs::source;

use mutations::mutate;
use rng::Rng;
use targets::Target;

/// Memory limit of all tests at once. An allocation of a size that an input claims ends the tests.
const MAX_MEMORY_BYTES: u64 = 4 << 30;

/// Runs a target over its seeds, and over this many mutations of them.
fn run(name: &str, mutations: u64) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit {
        current: Some(MAX_MEMORY_BYTES),
        maximum: None,
    };
    setrlimit(Resource::As, limit).expect("less is always allowed");

    let target = Target::ALL.iter().find(|target| target.name == name);
    let target = target.expect("a target");
    let seeds = (target.seeds)();
    for seed in &seeds {
        (target.run)(seed);
    }
    for round in 0..rounds::rounds(mutations) {
        let mut noise = Rng::new(rounds::seed().wrapping_mul(1 << 32) + round);
        let mutation = mutate(&seeds, &mut noise);
        let tried = std::panic::catch_unwind(|| (target.run)(&mutation));
        if tried.is_err() {
            let path = std::env::temp_dir().join(format!("tarfs-{name}-{round}"));
            std::fs::write(&path, &mutation).expect("space");
            panic!("round {round} fails with what is now {}", path.display());
        }
    }
}

macro_rules! tests {
    ($($test:ident $target:literal $mutations:literal,)+) => {
        $(
            #[test]
            fn $test() {
                run($target, $mutations);
            }
        )+

        #[test]
        fn every_target_has_a_test() {
            let tested = [$($target),+];
            let names: Vec<_> = Target::ALL.iter().map(|target| target.name).collect();
            assert_eq!(names, tested);
        }
    };
}

tests! {
    any_bytes_as_tar "tar" 3000,
    any_bytes_as_gzip "gzip" 400,
    any_bytes_as_lz4 "lz4" 400,
    any_bytes_as_zstd "zstd" 400,
    any_bytes_as_xz "xz" 400,
    any_bytes_as_bzip2 "bzip2" 200,
    any_bytes_as_seek_points "resume" 400,
    any_bytes_as_index "index" 3000,
    any_bytes_as_ztoc "ztoc" 1000,
    any_bytes_as_estargz_toc "estargz" 3000,
    any_bytes_as_cache_file "disk_cache" 300,
    any_bytes_as_access_profile "profile" 3000,
    any_bytes_as_http_response_head "answer" 3000,
    any_bytes_as_monitor_packet "packet" 3000,
    any_bytes_as_image "image" 3000,
    any_bytes_as_texts "texts" 3000,
}
