//! Runs programs and measures their memory.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::json;

/// Runs the commands of its input, each with a timeout, and prints the results of wait4(2).
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

/// Result of a program.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Exit code, or 124 after a timeout of a minute.
    pub(crate) code: i64,
    /// Peak resident memory.
    pub(crate) peak_bytes: u64,
    /// Standard output and standard error.
    pub(crate) said: String,
}

impl MeasuredRunner {
    /// Starts the process. Its programs keep their files in `directory`.
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

    /// Runs a program as a user, given by number.
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
