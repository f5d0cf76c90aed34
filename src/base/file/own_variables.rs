//! Variables of the environment that are for this program alone.

use std::ffi::OsString;

/// Prefix of their names.
const PREFIX: &[u8] = b"TARFS_";

/// Names of those that are set. Some hold secrets, such as headers, so programs of others do not get them.
pub(crate) fn own_variables() -> impl Iterator<Item = OsString> {
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.as_encoded_bytes().starts_with(PREFIX))
}
