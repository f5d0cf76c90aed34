//! How the allocator of the C library is to treat large allocations.

#![expect(unsafe_code, reason = "mallopt has no safe interface")]

/// Allocations from here on are mappings of their own, which go back to the system when they are
/// freed.
#[cfg(target_env = "gnu")]
const MMAP_THRESHOLD_BYTES: i32 = 256 << 10;

/// Makes freed memory leave the process. By itself glibc (mallopt(3)) takes the first large
/// allocation that is freed as a sign that its like should stay, up to 32 MiB in each of a dozen
/// arenas: a mount that had decoded spans on several threads stood at 300 MiB with a budget of 128.
/// Buffers that are needed again and again rest in pools anyway.
pub(super) fn set_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    // SAFETY: an option and a value for it; no other thread allocates yet, nor would it matter.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) };
    #[cfg(target_env = "gnu")]
    debug_assert_eq!(is_set, 1, "mallopt");
}
