//! Headings of the help. A verb's own flags have none, and are below `Options`, which is first.

pub(crate) const SELECTION: &str = "Selection";
pub(crate) const EXISTING: &str = "Existing files";
pub(crate) const OWNERSHIP: &str = "Ownership";
pub(crate) const PROCESS: &str = "Process";
pub(crate) const PREFETCH: &str = "Prefetch";
pub(crate) const SOURCE: &str = "Source";
pub(crate) const LIMITS: &str = "Limits";
pub(crate) const NETWORK: &str = "Network and cache";

/// All headings, in the order of the help.
pub(crate) const ORDER: [&str; 8] = [
    SELECTION, EXISTING, OWNERSHIP, PROCESS, PREFETCH, SOURCE, LIMITS, NETWORK,
];
