//! The capabilities and pending signals of a calling thread, from `/proc`. FUSE requests carry no
//! capabilities. Those of a mount that can be idmapped carry no user either.

use std::fs;

use crate::base::passwd::IdMap;

/// Bit number (`linux/capability.h`).
const CAP_SYS_ADMIN: u32 = 21;

/// The bit of SIGKILL in a mask of signals. The kernel sets it for any fatal signal without a core dump.
const SIGKILL_BIT: u64 = 1 << 8;

/// Bits of signals that dump core by default: QUIT, ILL, TRAP, ABRT, BUS, FPE, SEGV, XCPU, XFSZ, SYS.
const CORE_DUMP_BITS: u64 =
    1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 23 | 1 << 24 | 1 << 30;

/// Whether thread `pid` has `CAP_SYS_ADMIN` in the initial user namespace.
pub(super) fn has_sys_admin(pid: u32) -> bool {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
    match (read("status"), read("uid_map")) {
        (Ok(status), Ok(map)) => is_sys_admin(&status, &map),
        // The caller is in another PID namespace.
        _ => false,
    }
}

fn is_sys_admin(status: &str, uid_map: &str) -> bool {
    mask_of(status, &["CapEff"]) & (1 << CAP_SYS_ADMIN) != 0 && IdMap::parse(uid_map).is_initial()
}

pub(super) fn is_killed(pid: u32) -> bool {
    // A thread that cannot be read counts as alive, because its reply ends the request anyway.
    let status = (pid != 0).then(|| fs::read_to_string(format!("/proc/{pid}/status")));
    status.is_some_and(|status| status.is_ok_and(|status| has_fatal_signal(&status)))
}

fn has_fatal_signal(status: &str) -> bool {
    let pending = mask_of(status, &["SigPnd", "ShdPnd"]);
    let survived = mask_of(status, &["SigBlk", "SigIgn", "SigCgt"]);
    pending & (SIGKILL_BIT | CORE_DUMP_BITS & !survived) != 0
}

/// The union of the masks `names` in `status`, a `/proc/PID/status` file (proc(5)).
fn mask_of(status: &str, names: &[&str]) -> u64 {
    let lines = status.lines().filter_map(|line| line.split_once(':'));
    lines
        .filter(|(name, _)| names.contains(name))
        .filter_map(|(_, mask)| u64::from_str_radix(mask.trim(), 16).ok())
        .fold(0, |all, mask| all | mask)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: xattr-trusted
    #[test]
    fn cap_sys_admin_counts_only_in_initial_user_namespace() {
        let all = "         0          0 4294967295\n";
        let status = |bits| format!("Name:\tcat\nCapPrm:\tffffffffffffffff\nCapEff:\t{bits}\n");
        assert!(is_sys_admin(&status("0000000000200000"), all));
        assert!(!is_sys_admin(&status("ffffffffffdfffff"), all));
        let mapped = "         0       1000          1\n";
        assert!(!is_sys_admin(&status("000001ffffffffff"), mapped));
        assert!(!is_sys_admin("", all));
    }

    const TERM: u64 = 1 << 14;
    const QUIT: u64 = 1 << 2;
    // Promises: caller-killed
    #[test]
    fn fatal_signals_are_found_in_proc_status() {
        let status = |thread: u64, process: u64, caught: u64| {
            format!(
                "Name:\tcat\nSigQ:\t0/1\nSigPnd:\t{thread:016x}\nShdPnd:\t{process:016x}\n\
                 SigBlk:\t0000000000000000\nSigCgt:\t{caught:016x}\n"
            )
        };
        assert!(has_fatal_signal(&status(SIGKILL_BIT, TERM, 0)));
        assert!(!has_fatal_signal(&status(0, TERM, 0)), "not yet");
        assert!(has_fatal_signal(&status(0, QUIT, 0)));
        assert!(!has_fatal_signal(&status(0, QUIT, QUIT)));
        assert!(!has_fatal_signal("Name:\tcat\nSigPnd:\tnonsense\n"));
        assert!(!is_killed(std::process::id()));
        assert!(!is_killed(0));
    }
}
