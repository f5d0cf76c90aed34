//! Settings of the C library's allocator, glibc's mallopt(3).

#![expect(unsafe_code, reason = "mallopt has no safe interface")]

/// Makes freed memory leave the process. By default, glibc raises the size from which an allocation is a mapping of its
/// own after the first large one is freed. Then it keeps up to 32 MiB in each of a dozen arenas. A mount that decoded
/// on several threads used 300 MiB with a budget of 128. Buffers that are reused often are in pools anyway.
pub(crate) fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    set(libc::M_MMAP_THRESHOLD, 256 << 10);
}

/// Keeps some freed memory for the next allocations. By default, glibc returns it each time a thread has freed 128
/// KiB. A listing frees that much in a millisecond, so a third of its time went into page faults.
pub(crate) fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    for option in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        set(option, 8 << 20);
    }
}

#[cfg(target_env = "gnu")]
fn set(option: libc::c_int, bytes: libc::c_int) {
    // SAFETY: an option and its value. No other thread allocates yet, and that would be harmless.
    let is_set = unsafe { libc::mallopt(option, bytes) };
    debug_assert_eq!(is_set, 1, "mallopt");
}
