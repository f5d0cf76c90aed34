//! Commands that start programs other than this one.

use std::ffi::OsStr;
use std::process::Command;

/// Prefix of the environment variables that are for this program alone.
const OWN_PREFIX: &[u8] = b"TARFS_";

/// Command that starts `program` without this program's variables, because some hold secrets, such as headers.
pub(crate) fn foreign_command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(OWN_PREFIX) {
            command.env_remove(name);
        }
    }
    command
}
