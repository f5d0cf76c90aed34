//! Resident memory of a process that sleeps most of the time.

#![expect(unsafe_code, reason = "madvise(2) has no safe interface")]

use std::fs;
use std::io;

/// Gives up the resident pages of the program's code, which are megabytes after the start. The kernel maps them again,
/// from its page cache, when they run.
pub(super) fn release_code() {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else {
        return;
    };
    for (start, len) in maps.lines().filter_map(code) {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: nothing writes to a mapping of code, so its pages are those of the file.
        if unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "the pages of the program stay resident");
        }
    }
}

/// Start and length of the mapping that `line` of `proc_pid_maps(5)` describes, if it is code of a file:
/// `55d0c8a00000-55d0c8b00000 r-xp 00001000 fe:00 1234 /usr/bin/tarfs`.
fn code(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_code = fields.next()? == "r-xp";
    let is_file = fields.nth(3)?.starts_with('/');
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    (is_code && is_file).then_some((start, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_files_is_released() {
        let line = |rest: &str| code(&format!("1000-3000 {rest}"));
        assert_eq!(
            line("r-xp 00001000 fe:00 12  /usr/bin/tarfs"),
            Some((0x1000, 0x2000))
        );
        for other in [
            "r--p 00001000 fe:00 12  /usr/bin/tarfs",
            "rw-p 00001000 fe:00 12  /usr/bin/tarfs",
            "r-xp 00000000 00:00 0   [vdso]",
            "rwxp 00000000 00:00 0",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
        release_code();
    }
}
