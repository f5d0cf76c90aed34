//! Variables of the environment by which a SOURCE is read.

use std::ffi::OsStr;

use crate::base::environment::Environment;

/// First letters of the names of variables that say by whose rights, from where and how a SOURCE is read. Programs that
/// find credentials may read others too, but then the first mount decides.
const PREFIXES: [&str; 9] = [
    "AWS_",
    "AZURE_",
    "CLOUDSDK_",
    "DOCKER_",
    "GCE_",
    "GOOGLE_",
    "IDENTITY_",
    "SSL_CERT_",
    "STORAGE_",
];

/// Other such variables, in capitals.
const NAMES: [&str; 10] = [
    "ALL_PROXY",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "PATH",
    "REGISTRY_AUTH_FILE",
    "REQUEST_METHOD",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
];

/// The part of `environment` that says how a SOURCE is read. The directory counts only if a path begins in it.
pub(super) fn source_variables(environment: &Environment) -> Environment {
    let is_relevant = |name: &OsStr| {
        let name = name.to_string_lossy().to_ascii_uppercase();
        NAMES.contains(&&*name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let variables = environment.variables();
    let variables = variables.filter(|(name, value)| is_relevant(name) && !value.is_empty());
    let variables: Vec<_> = variables
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let names_files = |name: &OsStr| {
        let name = name.to_string_lossy();
        let ends = ["FILE", "DIR", "PATH", "CONFIG", "BUNDLE", "CREDENTIALS"];
        name != "PATH" && ends.iter().any(|end| name.ends_with(end))
    };
    let mut files = variables.iter().filter(|(name, _)| names_files(name));
    let is_relative = |value: &OsStr| !value.as_encoded_bytes().starts_with(b"/");
    let has_relative = files.any(|(_, value)| is_relative(value));
    let directory = if has_relative {
        environment.directory().to_owned()
    } else {
        "/".into()
    };
    Environment::new(variables, directory)
}
