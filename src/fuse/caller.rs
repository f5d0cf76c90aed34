//! The capabilities of a calling thread, from `/proc`.
//!
//! FUSE requests carry no capabilities. Those of a mount that can be idmapped carry no user either.

use std::fs;

use crate::base::id_map::IdMap;

/// The bit of `CAP_SYS_ADMIN` (`linux/capability.h`).
const CAP_SYS_ADMIN: u32 = 21;

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
    let mut lines = status.lines();
    let effective = lines.find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
    let has_bit = effective.is_some_and(|bits| bits & (1 << CAP_SYS_ADMIN) != 0);
    has_bit && IdMap::parse(uid_map).is_initial()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
