//! Parallel writer: a scan's members become a tree on disk.
