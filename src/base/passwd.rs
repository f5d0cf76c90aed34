//! Users and groups of this machine by name.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::base::id_map::IdMap;
use crate::base::posix_acl::IdResolver;

/// Names and ids from passwd(5) and group(5), read once. Directory services are not queried. They need
/// plug-ins of the C library, and a mount must not wait for a network that may depend on the mount.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Accounts {
    users: HashMap<Vec<u8>, u32>,
    groups: HashMap<Vec<u8>, u32>,
    /// User ids of this process's user namespace.
    user_ids: IdMap,
    /// Group ids of this process's user namespace.
    group_ids: IdMap,
}

impl Accounts {
    /// Loads `/etc/passwd`, `/etc/group`, and the ids of this process's user namespace. An unreadable file
    /// counts as empty.
    pub fn load_system() -> Self {
        let read = |path: &str| fs::read(Path::new(path)).unwrap_or_default();
        Self {
            user_ids: IdMap::of_users(),
            group_ids: IdMap::of_groups(),
            ..Self::parse(&read("/etc/passwd"), &read("/etc/group"))
        }
    }

    /// Parses the texts of the two files, and skips malformed lines.
    pub fn parse(passwd: &[u8], group: &[u8]) -> Self {
        Self {
            users: parse_ids(passwd),
            groups: parse_ids(group),
            ..Self::default()
        }
    }

    /// Returns a name of the user id `number`.
    pub fn user_name(&self, number: u32) -> Option<&[u8]> {
        let mut users = self.users.iter();
        let found = users.find(|&(_, &user)| user == number);
        found.map(|(name, _)| &**name)
    }
}

impl IdResolver for Accounts {
    fn user(&self, name: &[u8]) -> Option<u32> {
        self.users.get(name).copied()
    }

    fn group(&self, name: &[u8]) -> Option<u32> {
        self.groups.get(name).copied()
    }

    fn has_user_id(&self, id: u32) -> bool {
        self.user_ids.has(id)
    }

    fn has_group_id(&self, id: u32) -> bool {
        self.group_ids.has(id)
    }
}

/// Parses lines of `name:password:number:…`. The first line of a name counts.
fn parse_ids(text: &[u8]) -> HashMap<Vec<u8>, u32> {
    let mut ids = HashMap::new();
    for line in text.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b':');
        let (Some(name), Some(number)) = (fields.next(), fields.nth(1)) else {
            continue;
        };
        if name.is_empty() {
            continue;
        }
        if let Some(number) = std::str::from_utf8(number)
            .ok()
            .and_then(|n| n.parse().ok())
        {
            ids.entry(name.to_vec()).or_insert(number);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_line_of_a_name_wins() {
        let accounts = Accounts::parse(
            b"root:x:0:0:root:/root:/bin/sh\nlisa:x:1001:100::/:\nlisa:x:5:5::/:\n:x:7:7\n+::::\n\n",
            b"wheel:x:10:lisa\nbroken\nodd:x:ten:\n",
        );
        assert_eq!(accounts.user(b"lisa"), Some(1001));
        assert_eq!(accounts.user(b"wheel"), None);
        assert_eq!(accounts.user(b""), None);
        assert_eq!(accounts.user_name(1001), Some(&b"lisa"[..]));
        assert_eq!(accounts.user_name(10), None);
        assert_eq!(accounts.group(b"wheel"), Some(10));
        assert_eq!(accounts.group(b"odd"), None);
    }
}
