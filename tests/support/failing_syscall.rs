//! Runs a program and its children with one failing system call.

use std::process::Command;

/// A system call by its number on `x86_64` and on `aarch64`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailingSyscall {
    numbers: (u32, u32),
    /// Argument by position, and the only value for which the call fails.
    argument: Option<(u32, u32)>,
    errno: i32,
}

pub(crate) const SYNCFS: FailingSyscall = FailingSyscall {
    numbers: (306, 267),
    argument: None,
    errno: EIO,
};
pub(crate) const FSYNC: FailingSyscall = FailingSyscall {
    numbers: (74, 82),
    argument: None,
    errno: EIO,
};
/// renameat2(2) with `RENAME_NOREPLACE` only, as on NFS.
pub(crate) const RENAME_NOREPLACE: FailingSyscall = FailingSyscall {
    numbers: (316, 276),
    argument: Some((4, 1)),
    errno: EINVAL,
};

/// unlinkat(2), as for open files on NFS.
pub(crate) const UNLINKAT: FailingSyscall = FailingSyscall {
    numbers: (263, 35),
    argument: None,
    errno: EBUSY,
};

/// fchmodat2(2), as before Linux 6.6.
pub(crate) const FCHMODAT2: FailingSyscall = FailingSyscall {
    numbers: (452, 452),
    argument: None,
    errno: ENOSYS,
};

/// setxattrat(2), as before Linux 6.13.
pub(crate) const SETXATTRAT: FailingSyscall = FailingSyscall {
    numbers: (463, 463),
    argument: None,
    errno: ENOSYS,
};

const EIO: i32 = 5;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;

/// Installs a seccomp filter (see linux/filter.h and linux/seccomp.h) and executes the program.
const SCRIPT: &str = r"
import ctypes, os, struct, sys
number, place, value, errno = map(int, sys.argv[1:5])
load, equal, answer = 0x20, 0x15, 0x06
allow, refuse = 0x7fff0000, 0x00050000 | errno
steps = [(load, 0, 0, 0), (equal, 0, 3, number),
         (load, 0, 0, 16 + 8 * place), (equal, 0, 1, value), (answer, 0, 0, refuse)]
if place < 0:
    steps = [(load, 0, 0, 0), (equal, 0, 1, number), (answer, 0, 0, refuse)]
steps.append((answer, 0, 0, allow))
code = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *step) for step in steps))
program = struct.pack('@HP', len(steps), ctypes.addressof(code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0, 'PR_SET_NO_NEW_PRIVS'
assert prctl(22, 2, program, 0, 0) == 0, 'PR_SET_SECCOMP'
os.execv(sys.argv[5], sys.argv[5:])
";

/// A command for `program` with the failing call. The caller appends arguments.
pub(crate) fn with_failing_syscall(refused: FailingSyscall, program: &str) -> Command {
    let number = if cfg!(target_arch = "x86_64") {
        refused.numbers.0
    } else {
        refused.numbers.1
    };
    let (place, value) = match refused.argument {
        Some((place, value)) => (place.to_string(), value),
        None => ("-1".to_owned(), 0),
    };
    let mut command = Command::new("python3");
    command
        .args(["-c", SCRIPT, &number.to_string(), &place])
        .args([value.to_string(), refused.errno.to_string()])
        .arg(program);
    command
}
