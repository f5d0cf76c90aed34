//! Formats a status in Prometheus's text format 0.0.4, with its names: base units, and `_total` for counters.
//!
//! The specification is `prometheus.io/docs/instrumenting/exposition_formats`.

use std::fmt;

use super::status::{Phase, Status};
use crate::base::stats::{CounterKind, Stats};

pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A figure of a status.
#[derive(Debug)]
pub struct Figure {
    /// Name of the metric, without the prefix `tarfs_`.
    metric: &'static str,
    /// Name in `tarfs status --verbose`, of sizes; empty if it is not shown there.
    pub line: &'static str,
    /// One sentence that says what it is.
    help: &'static str,
    /// The value, in the unit that the metric names.
    pub value: u64,
}

/// Makes figures from rows: the metric, the name in `tarfs status --verbose` if it has one, the help and the value.
macro_rules! figures {
    ($($metric:ident $($line:literal)?: $help:literal = $value:expr;)+) => {
        [$(Figure { metric: stringify!($metric), line: concat!($($line)?), help: $help, value: $value }),+]
    };
}

/// Returns the figures of `status` that are no counters.
pub fn figures(status: &Status) -> Vec<Figure> {
    let (memory, prefetch) = (&status.memory, &status.prefetch);
    let mut all = Vec::from(figures! {
        mount_timestamp_seconds: "When it was mounted, in seconds since 1970." = status.since_unix_seconds;
        tree: "Number of its tree, which other mounts of its process may have, too." = status.tree;
        entries: "Entries in the index." = status.entries;
        damaged_members: "Members that are damaged or not in the tree." = status.damaged_members;
        index_complete: "1 when all of the archive is in the index." = (status.index.phase == Phase::Complete).into();
        index_failed: "1 when the scan of the archive has failed." = (status.index.phase == Phase::Failed).into();
        resident_memory_bytes "memory, resident":
            "Memory of the process that is resident." = status.resident_bytes;
        memory_budget_bytes "memory, budget":
            "Memory that all but the index may take together." = memory.budget_bytes;
        memory_spans_bytes "memory, blocks": "Decoded blocks that are kept in memory." = memory.spans_bytes;
        memory_reads_bytes "memory, reads":
            "Memory that reads have reserved which decode at this moment." = memory.reads_bytes;
        memory_decoders_bytes "memory, decoders":
            "Memory that their decoders have borrowed besides." = memory.decoders_bytes;
        memory_index_bytes "memory, index": "Memory of the index, on top of the budget." = memory.index_bytes;
        prefetch_all_spans: "Decoded blocks that prefetch has made or found." = prefetch.done_spans;
        prefetch_all_complete:
            "1 when everything is kept and nothing is fetched any more, else 0."
            = (prefetch.state == "complete").into();
        archive_spans: "Decoded blocks of the archive." = prefetch.total_spans;
        replayed_spans: "Decoded blocks of the profile that were made or found." = prefetch.replayed_spans;
        replay_spans: "Decoded blocks of the profile." = prefetch.replay_spans;
    });
    if let Some(directory) = &status.directory {
        all.extend(figures! {
            archives: "Archives of the directory." = directory.archives;
            archives_open: "Archives of the directory that are open." = directory.open;
            archives_failed: "Archives of the directory that could not be opened." = directory.failed;
        });
    }
    if let Some(cache) = &status.disk_cache {
        all.extend(figures! {
            disk_cache_held_bytes "disk cache, archive":
                "Disk that the decoded data of this archive takes." = cache.held_bytes;
            disk_cache_all_bytes "disk cache, all":
                "Disk that the decoded data of all archives takes." = cache.all_bytes;
            disk_cache_limit_bytes "disk cache, limit":
                "Disk that the decoded data of all archives may take." = cache.limit_bytes;
        });
    }
    if let Some(copy) = &status.copy {
        all.extend(figures! {
            copy_files: "Regular files that are whole in the copy." = copy.files;
            copy_files_expected: "Regular files that the copy is to have." = copy.total_files;
            copy_bytes: "Stored bytes of files that are whole in the copy." = copy.bytes;
            copy_bytes_expected: "Stored bytes that the copy is to have." = copy.total_bytes;
            copy_failures: "Entries of the copy that could not be written, or were changed." = copy.failures;
            copy_complete: "Whether everything is in the copy." = (copy.state == "complete").into();
        });
    }
    all
}

/// Formats the figures of `statuses`, each metric once, with a value for each mount that has it. The mountpoint is a label.
pub(super) fn render(statuses: &[Status]) -> String {
    let mut families = Vec::<Family>::new();
    for status in statuses {
        let mountpoint = escape_label(&status.mountpoint);
        let mut add = |name: String, kind, help, value: u64| {
            let line = format!("tarfs_{name}{{mountpoint=\"{mountpoint}\"}} {value}\n");
            match families.iter_mut().find(|family| family.name == name) {
                Some(family) => family.values += &line,
                None => families.push(Family {
                    name,
                    kind,
                    help,
                    values: line,
                }),
            }
        };
        for figure in figures(status) {
            add(figure.metric.to_owned(), "gauge", figure.help, figure.value);
        }
        for counter in Stats::COUNTERS {
            // Another version of this program may lack a counter.
            let Some(&value) = status.counters.get(counter.name) else {
                continue;
            };
            match counter.kind {
                CounterKind::Sum => {
                    add(
                        format!("{}_total", counter.name),
                        "counter",
                        counter.help,
                        value,
                    );
                }
                CounterKind::Peak => add(counter.name.to_owned(), "gauge", counter.help, value),
            }
        }
    }
    families.iter().map(Family::to_string).collect()
}

/// A metric, with a line for each mount.
struct Family {
    name: String,
    kind: &'static str,
    /// A constant that needs no escapes.
    help: &'static str,
    values: String,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            kind,
            help,
            values,
        } = self;
        write!(
            f,
            "# HELP tarfs_{name} {help}\n# TYPE tarfs_{name} {kind}\n{values}"
        )
    }
}

fn escape_label(value: &str) -> String {
    let text = value.replace('\\', r"\\");
    text.replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::fuse::DirectoryStatus;

    use super::*;

    fn status(mountpoint: &str) -> Status {
        let mut status = Status {
            mountpoint: mountpoint.into(),
            ..Status::example()
        };
        status.counters.insert("served_bytes".into(), 12_345);
        status.counters.insert("source_peak_requests".into(), 6);
        status
    }

    // Promises: metrics-format
    #[test]
    fn each_metric_has_help_type_and_value() {
        let text = render(&[status("/mnt")]);
        let expected = [
            "# HELP tarfs_mount_timestamp_seconds When it was mounted, in seconds since 1970.\n\
             # TYPE tarfs_mount_timestamp_seconds gauge\n\
             tarfs_mount_timestamp_seconds{mountpoint=\"/mnt\"} 1000\n",
            "# TYPE tarfs_entries gauge\ntarfs_entries{mountpoint=\"/mnt\"} 2\n",
            "# TYPE tarfs_index_complete gauge\ntarfs_index_complete{mountpoint=\"/mnt\"} 1\n",
            "tarfs_resident_memory_bytes{mountpoint=\"/mnt\"} 20971520\n",
            "tarfs_prefetch_all_spans{mountpoint=\"/mnt\"} 3\n",
            "tarfs_prefetch_all_complete{mountpoint=\"/mnt\"} 0\n",
            "tarfs_replay_spans{mountpoint=\"/mnt\"} 2\n",
            "tarfs_memory_budget_bytes{mountpoint=\"/mnt\"} 134217728\n",
            "tarfs_memory_spans_bytes{mountpoint=\"/mnt\"} 41943040\n",
            "tarfs_memory_reads_bytes{mountpoint=\"/mnt\"} 5\n",
            "tarfs_memory_decoders_bytes{mountpoint=\"/mnt\"} 6\n",
            "tarfs_memory_index_bytes{mountpoint=\"/mnt\"} 12345\n",
            "# TYPE tarfs_disk_cache_held_bytes gauge\n\
             tarfs_disk_cache_held_bytes{mountpoint=\"/mnt\"} 31457280\n",
            "tarfs_disk_cache_all_bytes{mountpoint=\"/mnt\"} 52428800\n",
            "tarfs_disk_cache_limit_bytes{mountpoint=\"/mnt\"} 73400320\n",
            "# HELP tarfs_served_bytes_total Bytes returned to readers of a mount.\n\
             # TYPE tarfs_served_bytes_total counter\n\
             tarfs_served_bytes_total{mountpoint=\"/mnt\"} 12345\n",
            "# TYPE tarfs_source_peak_requests gauge\n\
             tarfs_source_peak_requests{mountpoint=\"/mnt\"} 6\n",
            "tarfs_failed_reads_total{mountpoint=\"/mnt\"} 0\n",
        ];
        for part in expected {
            assert_eq!(text.matches(part).count(), 1, "{part} in {text}");
        }
    }

    // Promises: metrics-format
    #[test]
    fn archives_and_a_failed_scan_are_metrics() {
        let mut status = status("/mnt");
        let failed = "tarfs_index_failed{mountpoint=\"/mnt\"}";
        assert!(render(&[status.clone()]).contains(&format!("{failed} 0\n")));
        assert!(!render(&[status.clone()]).contains("tarfs_archives"));
        status.index.phase = Phase::Failed;
        status.directory = Some(DirectoryStatus {
            archives: 7,
            open: 2,
            failed: 1,
            notes: Vec::new(),
        });
        let text = render(&[status.clone()]);
        assert!(text.contains(&format!("{failed} 1\n")));
        for (name, value) in [
            ("archives", 7),
            ("archives_open", 2),
            ("archives_failed", 1),
        ] {
            let line = format!("\ntarfs_{name}{{mountpoint=\"/mnt\"}} {value}\n");
            assert!(text.contains(&line), "{line} in {text}");
        }
    }

    #[test]
    fn metric_names_are_unique_and_lines_complete() {
        let text = render(&[status("/mnt")]);
        assert!(text.ends_with('\n'));
        let names = text.lines().filter_map(|line| {
            let (name, _) = line.split_once('{')?;
            Some(name)
        });
        let names: Vec<_> = names.collect();
        assert_eq!(names.len(), 20 + Stats::COUNTERS.len());
        assert_eq!(names.len(), names.iter().collect::<BTreeSet<_>>().len());
        let in_order = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
        assert!(names.iter().all(|name| name.bytes().all(in_order)));
        assert_eq!(text.lines().count(), 3 * names.len());
        assert!(!text.contains('\\'), "help that would need escapes");
    }

    // Promises: metrics-format
    #[test]
    fn metrics_of_several_mounts_are_together() {
        let text = render(&[status("/one"), status("/two")]);
        let part = "# TYPE tarfs_entries gauge\n\
             tarfs_entries{mountpoint=\"/one\"} 2\n\
             tarfs_entries{mountpoint=\"/two\"} 2\n# HELP";
        assert!(text.contains(part), "{text}");
        assert_eq!(text.matches("# HELP tarfs_entries ").count(), 1);
    }

    // Promises: metrics-dashboard
    #[test]
    fn dashboard_names_only_metrics_that_exist() {
        let text = render(&[status("/mnt")]);
        let dashboard = include_str!("../../docs/grafana-dashboard.json");
        let json: serde_json::Value = serde_json::from_str(dashboard).expect("JSON");
        assert!(json.get("panels").is_some());
        let is_name = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
        let named = dashboard.match_indices("tarfs_").map(|(start, _)| {
            let rest = &dashboard[start..];
            &rest[..rest.find(|byte| !is_name(byte)).unwrap_or(rest.len())]
        });
        let named: BTreeSet<_> = named.collect();
        assert!(named.len() > 8, "{named:?}");
        for name in named {
            assert!(text.contains(&format!("\n{name}{{")), "{name}");
        }
    }

    // Promises: metrics-format
    #[test]
    fn mountpoint_in_metric_label_is_escaped() {
        let text = render(&[status("/a\"b\\c\nd\u{fffd}")]);
        let line = text
            .lines()
            .find(|line| line.starts_with("tarfs_entries{"))
            .expect("there");
        assert_eq!(
            line,
            "tarfs_entries{mountpoint=\"/a\\\"b\\\\c\\nd\u{fffd}\"} 2"
        );
    }
}
