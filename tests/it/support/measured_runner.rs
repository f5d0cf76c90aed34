//! Programs, and how much memory they took.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::json;

/// Runs what it is told to, each in time, and tells what wait4(2) says of it.
const SCRIPT: &str = r"
import json, os, subprocess, sys
for line in sys.stdin:
    directory, words, user = json.loads(line)
    null = subprocess.DEVNULL
    process = subprocess.Popen(['timeout', '-k', '1', '60', *words], cwd=directory, stdin=null,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, user=user)
    said = process.stdout.read().decode(errors='replace')
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps([code, usage.ru_maxrss, said]), flush=True)
";

/// A process that runs programs one after the other.
pub(crate) struct MeasuredRunner {
    child: Child,
    orders: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
}

/// What came of a program.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Its exit code; 124 when it did not end in a minute.
    pub(crate) code: i64,
    /// The most memory that was resident at once.
    pub(crate) peak_bytes: u64,
    /// Its output and complaints.
    pub(crate) said: String,
}

impl MeasuredRunner {
    /// It and the programs keep what they keep in `directory`.
    pub(crate) fn start(directory: &Path) -> Self {
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", SCRIPT])
            .env("TARFS_CACHE_DIR", directory.join("cache"))
            .env("XDG_RUNTIME_DIR", directory)
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is needed");
        let reports = BufReader::new(child.stdout.take().expect("piped"));
        Self {
            orders: child.stdin.take(),
            child,
            reports,
        }
    }

    /// Runs a program in `directory`.
    pub(crate) fn run(&mut self, directory: &Path, words: &[&str]) -> Run {
        self.run_as(None, directory, words)
    }

    /// Runs a program as a user, by number.
    pub(crate) fn run_as(&mut self, user: Option<u32>, directory: &Path, words: &[&str]) -> Run {
        let mut order = json!([directory, words, user]).to_string();
        order.push('\n');
        let orders = self.orders.as_mut().expect("until it is dropped");
        orders.write_all(order.as_bytes()).expect("it listens");
        let mut report = String::new();
        self.reports.read_line(&mut report).expect("it answers");
        let (code, peak_kib, said): (i64, u64, String) =
            serde_json::from_str(&report).expect("three values");
        Run {
            code,
            peak_bytes: peak_kib << 10,
            said,
        }
    }
}

impl Drop for MeasuredRunner {
    fn drop(&mut self) {
        drop(self.orders.take());
        drop(self.child.wait());
    }
}
