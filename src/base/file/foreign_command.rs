//! Commands that start programs other than this one.

use std::ffi::OsStr;
use std::process::Command;

use crate::base::environment::Environment;

/// Prefix of the environment variables that are for this program alone.
const OWN_PREFIX: &[u8] = b"TARFS_";

/// Command that starts `program` in the environment of this process. See [`user_command`].
pub(crate) fn foreign_command(program: impl AsRef<OsStr>) -> Command {
    user_command(program, &Environment::current())
}

/// Command that starts `program` in `environment`, without this program's variables, because some hold secrets, such as
/// headers.
pub(crate) fn user_command(program: impl AsRef<OsStr>, environment: &Environment) -> Command {
    let is_own = |name: &OsStr| name.as_encoded_bytes().starts_with(OWN_PREFIX);
    let mut command = Command::new(program);
    command
        .env_clear()
        .envs(environment.variables().filter(|(name, _)| !is_own(name)));
    command
}
