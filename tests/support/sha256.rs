//! SHA-256 by sha256sum(1).

use std::io::Write;
use std::process::{Command, Stdio};

/// The SHA-256 of `bytes`, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sha256sum");
    let mut input = child.stdin.take().expect("a pipe");
    input.write_all(bytes).expect("taken");
    drop(input);
    let output = child.wait_with_output().expect("an end");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.split_whitespace().next().expect("a digest").to_owned()
}
