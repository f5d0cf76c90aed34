//! Key of a tree that mounts may share.

use crate::locate::{ArchiveSpec, ServerSpec};
use crate::serve::failure::Failure;
use crate::serve::mount_spec::MountSpec;
use crate::serve::source_variables::source_variables;
use crate::source::Revalidation;

/// Key of a tree. Two mounts of one key share it: their location, their options that change the tree, and the rights by
/// which they open it are equal. The key is a digest of these, because some are secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct VolumeKey([u8; 32]);

impl VolumeKey {
    /// The key of the tree of `mount`.
    ///
    /// # Errors
    /// If it cannot be described.
    pub fn new(mount: &MountSpec) -> Result<Self, Failure> {
        let MountSpec {
            tree,
            open,
            prefetch,
            waits_for_index,
            ..
        } = mount;
        let mut spec = open.clone();
        let is_offline = spec.server.revalidation == Revalidation::Never;
        spec.user.environment = source_variables(&spec.user.environment);
        // These change only how fast the tree is there, and the version is compared apart.
        let (server, archive) = (ServerSpec::default(), ArchiveSpec::default());
        spec.server = ServerSpec {
            connections: server.connections,
            revalidation: server.revalidation,
            chunk_len: server.chunk_len,
            ..spec.server
        };
        spec.archive = ArchiveSpec {
            allow_skipping: archive.allow_skipping,
            should_log_problems: archive.should_log_problems,
            shown_version: None,
            ..spec.archive
        };
        let described = (tree, is_offline, spec, prefetch, waits_for_index);
        let described = serde_json::to_vec(&described).map_err(|error| Failure::of(&error))?;
        Ok(Self(blake3::hash(&described).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::environment::Environment;
    use crate::locate::{OpenSpec, SourceSpec};

    fn key(
        source: &str,
        variables: &[(&str, &str)],
        change: impl FnOnce(&mut OpenSpec),
    ) -> VolumeKey {
        let variables = variables.iter();
        let variables = variables.map(|&(name, value)| (name.into(), value.into()));
        let mut spec = OpenSpec::default();
        spec.user.environment = Environment::new(variables, "/work".into());
        change(&mut spec);
        let spec = spec.for_other_process().expect("usable");
        let tree = SourceSpec::from(source).into();
        let mount = MountSpec::new(tree, spec, "/mnt".into(), "/run".into());
        VolumeKey::new(&mount).expect("valid")
    }

    fn unchanged(_: &mut OpenSpec) {}

    #[test]
    fn mounts_with_other_rights_or_trees_have_other_keys() {
        let url = "https://h/a.tar";
        let plain = key(url, &[], unchanged);
        for other in [
            key("https://h/b.tar", &[], unchanged),
            key("https://me:pw@h/a.tar", &[], unchanged),
            key(url, &[("AWS_PROFILE", "other")], unchanged),
            key(url, &[("https_proxy", "http://p")], unchanged),
            key(url, &[], |spec| {
                spec.user
                    .headers
                    .push("A: secret".parse().expect("a header"));
            }),
            key(url, &[], |spec| spec.user.netrc = Some("/netrc".into())),
            key(url, &[], |spec| spec.archive.ignore_zeros = true),
            key(url, &[], |spec| {
                spec.server.revalidation = Revalidation::Never;
            }),
            key(url, &[], |spec| {
                spec.server.mirror_urls.push("https://m".to_owned());
            }),
            key(url, &[], |spec| {
                spec.cache.index_file = Some("/a.idx".into());
            }),
        ] {
            assert_ne!(plain, other);
        }
    }

    #[test]
    fn jobs_of_one_user_have_one_key() {
        let url = "https://h/a.tar";
        let job = |id| {
            key(
                url,
                &[("HOME", "/home/a"), ("SLURM_JOB_ID", id), ("PWD", id)],
                unchanged,
            )
        };
        assert_eq!(job("1"), job("2"));
        let quick = |spec: &mut OpenSpec| {
            (spec.server.connections, spec.archive.allow_skipping) = (3, true);
        };
        assert_eq!(key(url, &[], quick), key(url, &[], unchanged));
    }

    // Promises: shared-restart
    #[test]
    fn continued_mount_has_the_key_that_it_had() {
        let spec = OpenSpec::default().for_other_process().expect("usable");
        let tree = SourceSpec::from("https://h/a.tar").into();
        let mut mount = MountSpec::new(tree, spec, "/mnt".into(), "/run".into());
        let mut keys = Vec::new();
        for waits_for_index in [false, true] {
            mount.waits_for_index = waits_for_index;
            let key = VolumeKey::new(&mount).expect("valid");
            let continued = VolumeKey::new(&mount.clone().continuing("1")).expect("valid");
            assert_eq!(key, continued, "{waits_for_index}");
            keys.push(key);
        }
        assert_ne!(keys.first(), keys.last());
    }

    #[test]
    fn relative_paths_of_two_directories_have_two_keys() {
        let place = |directory: &str| {
            key("https://h/a.tar", &[], |spec| {
                spec.user.environment = Environment::new([], directory.into());
                spec.user.headers.push("@token".parse().expect("a file"));
            })
        };
        assert_ne!(place("/one"), place("/two"));
    }

    #[test]
    fn directory_counts_if_a_file_is_relative() {
        let place = |directory: &str, file: &str| {
            key("s3://b/a.tar", &[], |spec| {
                let variables = [("AWS_CONFIG_FILE".into(), file.into())];
                spec.user.environment = Environment::new(variables, directory.into());
            })
        };
        assert_eq!(place("/one", "/etc/aws"), place("/two", "/etc/aws"));
        assert_ne!(place("/one", "aws"), place("/two", "aws"));
    }
}
