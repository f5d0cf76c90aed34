//! Scope of a daemon: its own unit in systemd.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::cli::environment::{self, RUNTIME_DIR};

/// Directory that exists while systemd is the first process; see `sd_booted(3)`.
const BOOTED: &str = "/run/systemd/system";

/// Asks systemd for a scope of this process, so that it does not end with the unit or the session of the client that
/// started it, and its memory is not charged there. Without systemd, it stays in the client's control group.
pub(super) fn enter() {
    let comm = fs::read_to_string("/proc/1/comm");
    // In another PID namespace, systemd would take the number for another process.
    let is_booted = Path::new(BOOTED).is_dir() && comm.is_ok_and(|comm| comm.trim() == "systemd");
    let own = fs::read_link("/proc/self").unwrap_or_default();
    if !is_booted || own.as_os_str() != std::process::id().to_string().as_str() {
        return;
    }
    let user = rustix::process::geteuid();
    let pid = std::process::id().to_string();
    let mut command = Command::new("busctl");
    if !environment::is_root() {
        let directory = format!("/run/user/{}", user.as_raw());
        command.arg("--user").env(RUNTIME_DIR, directory);
    }
    command
        .args([
            "call",
            "org.freedesktop.systemd1",
            "/org/freedesktop/systemd1",
        ])
        .args(["org.freedesktop.systemd1.Manager", "StartTransientUnit"])
        .args(["ssa(sv)a(sa(sv))", &format!("tarfs-{pid}.scope"), "fail"])
        .args(["4", "PIDs", "au", "1", &pid])
        .args(["Description", "s", "tarfs, for the mounts of a user"])
        .args(["CollectMode", "s", "inactive-or-failed"])
        // At shutdown, mounts must be served until they are unmounted.
        .args(["DefaultDependencies", "b", "false", "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => tracing::debug!(%status, "systemd gives no scope"),
        Err(error) => tracing::debug!(%error, "systemd cannot be asked for a scope"),
    }
}
