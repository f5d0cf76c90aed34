//! Behaviour of the whole, on real files, mounts and servers.

mod materialize;
