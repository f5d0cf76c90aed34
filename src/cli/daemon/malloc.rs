//! Setting of the C library's allocator for large allocations.

#![expect(unsafe_code, reason = "mallopt has no safe interface")]

/// Size from which an allocation is a separate mapping, which returns to the system when freed.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: i32 = 256 << 10;

/// Makes freed memory leave the process. By default, glibc (mallopt(3)) raises this threshold after the first
/// large allocation is freed. Then it keeps up to 32 MiB in each of a dozen arenas. A mount that decoded on
/// several threads used 300 MiB with a budget of 128. Buffers that are reused often are in pools anyway.
pub(crate) fn set_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: an option and its value. No other thread allocates yet, and that would be harmless.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) };
    #[cfg(target_env = "gnu")]
    debug_assert_eq!(is_set, 1, "mallopt");
}
