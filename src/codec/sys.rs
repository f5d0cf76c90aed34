//! Unsafe calls, fenced.
