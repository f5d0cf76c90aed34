//! Detection of lookups in directory order; pure.
//! Each lookup takes the kernel some forty microseconds. Priming passes some hundred names at once, which is
//! worth it if more lookups will follow.

use crate::index::Ino;

/// Maximum number of runs. A new one replaces the oldest.
const MAX_DIRECTORIES: usize = 4;

/// Number of lookups in order that indicates more of them.
const MIN_RUN_LOOKUPS: u32 = 3;

/// Maximum number of names that a run may skip between two lookups.
const MAX_SKIPPED_NAMES: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct LookupRuns {
    runs: [Option<LookupRun>; MAX_DIRECTORIES],
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct LookupRun {
    directory: Ino,
    number: u32,
    count: u32,
}

impl LookupRuns {
    /// Records a lookup of child `number` of `directory`. Returns whether to prime the names after it.
    pub(super) fn step(&mut self, directory: Ino, number: u32) -> bool {
        let mut runs = self.runs.iter_mut().flatten();
        if let Some(run) = runs.find(|run| run.directory == directory) {
            return run.step(number);
        }
        if let Some(run) = self.runs.get_mut(self.next) {
            *run = Some(LookupRun {
                directory,
                number,
                count: 1,
            });
        }
        self.next = (self.next + 1) % MAX_DIRECTORIES;
        false
    }
}

impl LookupRun {
    fn step(&mut self, number: u32) -> bool {
        let skipped_names = number.checked_sub(self.number.saturating_add(1));
        let is_continued = skipped_names.is_some_and(|count| count <= MAX_SKIPPED_NAMES);
        self.number = number;
        self.count = if is_continued { self.count + 1 } else { 1 };
        let is_due = self.count == MIN_RUN_LOOKUPS;
        if is_due {
            self.count = 0;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(runs: &mut LookupRuns, directory: u32, numbers: &[u32]) -> Vec<u32> {
        let is_due = |number: &u32| runs.step(Ino(directory), *number);
        numbers.iter().copied().filter(is_due).collect()
    }

    #[test]
    fn every_third_lookup_in_order_is_due() {
        let mut runs = LookupRuns::default();
        assert_eq!(steps(&mut runs, 1, &[4, 5, 6, 7, 8, 9, 10]), [6, 9]);
        assert_eq!(steps(&mut runs, 2, &[0, 9, 18, 28, 29, 30]), [18, 30]);
    }

    #[test]
    fn lookup_out_of_order_starts_a_new_run() {
        let mut runs = LookupRuns::default();
        assert!(steps(&mut runs, 1, &[9, 8, 7, 6, 5, 4]).is_empty());
        assert!(steps(&mut runs, 2, &[0, 100, 200, 300]).is_empty());
        assert!(steps(&mut runs, 3, &[5, 5, 5, 5]).is_empty());
        assert!(steps(&mut runs, 4, &[u32::MAX, 0, 1]).is_empty());
    }

    #[test]
    fn oldest_run_is_evicted_beyond_the_maximum() {
        let mut runs = LookupRuns::default();
        let times = (0..6).map(|number| {
            let times = (1..=4).filter(|directory| runs.step(Ino(*directory), number));
            times.count()
        });
        assert_eq!(times.collect::<Vec<_>>(), [0, 0, 4, 0, 0, 4]);
        assert!(!runs.step(Ino(5), 0), "first lookup of a new run");
        assert_eq!(steps(&mut runs, 2, &[6, 7, 8]), [8]);
        assert!(steps(&mut runs, 1, &[6, 7]).is_empty(), "evicted");
    }
}
