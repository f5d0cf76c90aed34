//! `tarfs ls`: list an archive's entries.
