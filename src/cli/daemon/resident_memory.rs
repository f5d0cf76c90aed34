//! Resident memory of a process that sleeps most of the time.

#![expect(unsafe_code, reason = "madvise(2) has no safe interface")]

use std::fs;
use std::io;

/// The pages of the program and its libraries that are never written.
#[derive(Debug)]
pub(super) struct ProgramPages(Vec<(usize, usize)>);

impl ProgramPages {
    /// Those of this process. None without `/proc`.
    pub(super) fn find() -> Self {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self(maps.lines().filter_map(unwritten).collect())
    }

    /// Gives them up, megabytes after each use. The kernel maps them again, from its page cache, when they are used.
    pub(super) fn release(&self) {
        for &(start, len) in &self.0 {
            let start = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: nothing writes to these mappings, so their pages are those of the file.
            if unsafe { libc::madvise(start, len, libc::MADV_DONTNEED) } != 0 {
                let error = io::Error::last_os_error();
                tracing::debug!(%error, "the pages of the program stay resident");
            }
        }
    }
}

/// Start and length of the mapping that `line` of `proc_pid_maps(5)` describes, if it is code of a file, or its start, which
/// has constants without addresses: `55d0c8a00000-55d0c8b00000 r-xp 00001000 fe:00 1234 /usr/bin/tarfs`.
fn unwritten(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (rights, offset) = (fields.next()?, fields.next()?);
    let is_file = fields.nth(2)?.starts_with('/');
    let start = usize::from_str_radix(start, 16).ok()?;
    let len = usize::from_str_radix(end, 16).ok()?.checked_sub(start)?;
    let is_start = rights == "r--p" && offset.bytes().all(|digit| digit == b'0');
    (is_file && (rights == "r-xp" || is_start)).then_some((start, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unwritten_pages_of_files_are_released() {
        let line = |rest: &str| unwritten(&format!("1000-3000 {rest}"));
        for one in [
            "r-xp 00001000 fe:00 12  /usr/bin/tarfs",
            "r--p 00000000 fe:00 12  /usr/bin/tarfs",
        ] {
            assert_eq!(line(one), Some((0x1000, 0x2000)), "{one}");
        }
        for other in [
            "r--p 00001000 fe:00 12  /usr/bin/tarfs",
            "rw-p 00001000 fe:00 12  /usr/bin/tarfs",
            "r-xp 00000000 00:00 0   [vdso]",
            "rwxp 00000000 00:00 0",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
        ProgramPages::find().release();
    }
}
