//! Policy for owner and mode of new files, by GNU tar's rules.

use crate::base::passwd::Accounts;
use crate::base::process::status_field;
use crate::base::xattr::filter::XattrFilter;
use crate::base::xattr::posix_acl;
use crate::materialize::options::Options;
use crate::tar::{Member, MemberKind};

const PERMISSIONS: u32 = 0o777;
const STICKY: u32 = 0o1000;
/// Owner or group that chown(2) does not change.
const UNCHANGED: u32 = u32::MAX;

#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a rule of its own")]
pub(crate) struct AttributePolicy {
    pub(crate) same_owner: bool,
    /// Files get the archive's modes with set-id and sticky bits. The umask is ignored.
    pub(crate) same_permissions: bool,
    pub(crate) numeric_owner: bool,
    /// Set-id bits and capabilities are kept only with their owner, as `cp -a` keeps them.
    ids_need_owner: bool,
    /// Groups that new files get although owners are not set.
    groups: Vec<u32>,
    pub(crate) xattrs: XattrFilter,
    pub(crate) umask: u32,
    /// The default owner of a new file.
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) accounts: Accounts,
}

impl AttributePolicy {
    pub(crate) fn new(options: &Options) -> Self {
        let keeps_groups = options.copies_directory && !options.same_owner;
        Self {
            ids_need_owner: options.copies_directory,
            groups: if keeps_groups {
                own_groups()
            } else {
                Vec::new()
            },
            same_owner: options.same_owner,
            same_permissions: options.same_permissions,
            numeric_owner: options.numeric_owner,
            xattrs: options.xattrs.clone(),
            umask: umask(),
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            accounts: Accounts::load_system(),
        }
    }

    pub(crate) fn mode(&self, member: &Member) -> u32 {
        let is_directory = member.kind == MemberKind::Directory;
        self.final_mode(
            member.mode,
            is_directory,
            (member.uid, member.gid),
            self.user,
        )
    }

    /// Final mode of an entry with this mode and these numbers in the source, which `user` owns in the destination.
    pub(crate) fn final_mode(
        &self,
        mode: u32,
        is_directory: bool,
        ids: (u32, u32),
        user: u32,
    ) -> u32 {
        if !self.same_permissions {
            mode & PERMISSIONS & !self.umask
        } else if self.keeps_ids(ids, user) {
            mode & 0o7777
        } else if is_directory {
            mode & (PERMISSIONS | STICKY)
        } else {
            mode & PERMISSIONS
        }
    }

    /// Whether an entry with these numbers in the source, which `user` owns in the destination, keeps its set-id bits
    /// and capabilities.
    pub(crate) fn keeps_ids(&self, (uid, gid): (u32, u32), user: u32) -> bool {
        let is_ours = uid == self.user && uid == user && self.groups.contains(&gid);
        !self.ids_need_owner || self.same_owner || is_ours
    }

    /// Whether a new directory that only other paths imply lacks the extended attribute `name`. Others may be inherited.
    pub(crate) fn replaces_xattr(&self, name: &[u8]) -> bool {
        let is_of_files = name.starts_with(b"user.") || name.starts_with(b"trusted.");
        (is_of_files || posix_acl::Kind::of(name).is_some()) && self.xattrs.selects(name)
    }

    /// Whether new files may need another owner or group than the kernel gives them.
    pub(crate) fn sets_owners(&self) -> bool {
        self.same_owner || !self.groups.is_empty()
    }

    /// Final owner and group of the member's entry; `None` keeps ours.
    pub(crate) fn owner(&self, member: &Member) -> Option<(u32, u32)> {
        self.final_owner((member.uid, member.gid), (&member.user, &member.group))
    }

    /// Final owner and group of an entry with these numbers and names in the archive; `None` keeps ours.
    pub(crate) fn final_owner(
        &self,
        (uid, gid): (u32, u32),
        (user, group): (&[u8], &[u8]),
    ) -> Option<(u32, u32)> {
        if !self.same_owner {
            return self.groups.contains(&gid).then_some((UNCHANGED, gid));
        }
        if self.numeric_owner {
            return Some((uid, gid));
        }
        Some((
            self.accounts.user(user).unwrap_or(uid),
            self.accounts.group(group).unwrap_or(gid),
        ))
    }

    /// Whether a file that we just made already has its final owner.
    pub(crate) fn is_process_owner(&self, owner: Option<(u32, u32)>) -> bool {
        owner.is_none_or(|owner| !changes_owner(owner, (self.user, self.group)))
    }

    /// The initial mode of a file, and whether chmod(2) must follow. Before the chown it grants no more
    /// access than the final mode, and lets the writer set xattrs.
    pub(crate) fn initial_mode(&self, mode: u32, chown: bool, has_xattrs: bool) -> (u32, bool) {
        let group_and_other_bits_match = (mode >> 3) & 0o7 == mode & 0o7;
        let is_writable = mode & 0o200 != 0 || !has_xattrs;
        let is_final = mode & !PERMISSIONS == 0
            && mode & self.umask == 0
            && is_writable
            && (!chown || group_and_other_bits_match);
        if is_final {
            (mode, false)
        } else {
            (mode & 0o700 | 0o600, true)
        }
    }
}

/// Whether chown(2) to `owner` would change the `current` one.
pub(crate) fn changes_owner(owner: (u32, u32), current: (u32, u32)) -> bool {
    let changes = |wanted, current| wanted != UNCHANGED && wanted != current;
    changes(owner.0, current.0) || changes(owner.1, current.1)
}

/// The groups of which this process is a member.
fn own_groups() -> Vec<u32> {
    let mut groups = rustix::process::getgroups().unwrap_or_default();
    groups.push(rustix::process::getegid());
    groups
        .into_iter()
        .map(rustix::process::Gid::as_raw)
        .collect()
}

/// The umask. We read it, because setting and restoring it would be visible to other threads.
pub(crate) fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Ok(umask) = u32::from_str_radix(status_field(&status, "Umask"), 8) {
        return umask;
    }
    let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::umask(umask);
    umask.as_raw_mode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::materialize::test_support::member;
    use crate::tar::MemberKind;

    fn owned(mode: u32) -> Member {
        Member {
            mode,
            uid: 4242,
            gid: 77,
            user: b"daemon".to_vec(),
            group: b"nosuch".to_vec(),
            ..member(b"f", MemberKind::File)
        }
    }

    // Promises: owner-written
    #[test]
    fn mode_is_archived_or_masked_by_umask() {
        let mut policy = AttributePolicy {
            umask: 0o027,
            ..AttributePolicy::default()
        };
        assert_eq!(policy.mode(&owned(0o6777)), 0o750);
        policy.same_permissions = true;
        assert_eq!(policy.mode(&owned(0o6777)), 0o6777);
    }

    // Promises: owner-names
    #[test]
    fn known_account_name_overrides_the_number() {
        let mut policy = AttributePolicy {
            accounts: Accounts::parse(b"daemon:x:1:1\n", b""),
            ..AttributePolicy::default()
        };
        assert_eq!(policy.owner(&owned(0o644)), None);
        policy.same_owner = true;
        assert_eq!(policy.owner(&owned(0o644)), Some((1, 77)));
        policy.numeric_owner = true;
        assert_eq!(policy.owner(&owned(0o644)), Some((4242, 77)));
    }

    // Promises: owner-early, gnu-readonly-xattr
    #[test]
    fn final_mode_is_set_at_creation_only_if_safe() {
        let policy = AttributePolicy {
            umask: 0o022,
            ..AttributePolicy::default()
        };
        let is_final = |mode, chown, xattrs| !policy.initial_mode(mode, chown, xattrs).1;
        assert!(is_final(0o644, false, false));
        assert!(is_final(0o755, true, true));
        assert!(is_final(0o640, false, false));
        assert!(
            !is_final(0o640, true, false),
            "our group could read before the chown"
        );
        assert!(!is_final(0o664, false, false), "the umask would take a bit");
        assert!(!is_final(0o4755, false, false), "chown and write clear it");
        assert!(
            !is_final(0o444, false, true),
            "user attributes need a writable file"
        );
        assert_eq!(policy.initial_mode(0o4755, true, false).0, 0o700);
    }
}
