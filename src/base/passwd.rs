//! Users and groups of this machine: their names, and the ids that exist.

use std::collections::HashMap;
use std::fs;

/// Names and ids from passwd(5) and group(5), read once. Directory services are not queried. They need
/// plug-ins of the C library, and a mount must not wait for a network that may depend on the mount.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Accounts {
    users: IdTable,
    groups: IdTable,
    pub(crate) user_ids: IdMap,
    pub(crate) group_ids: IdMap,
}

impl Accounts {
    /// Loads `/etc/passwd`, `/etc/group` and this process's id maps. An unreadable file counts as empty.
    pub fn load_system() -> Self {
        let read = |path: &str| fs::read(path).unwrap_or_default();
        Self {
            user_ids: IdMap::of_users(),
            group_ids: IdMap::read("/proc/self/gid_map"),
            ..Self::parse(&read("/etc/passwd"), &read("/etc/group"))
        }
    }

    /// Parses the texts of the two files, and skips malformed lines.
    pub fn parse(passwd: &[u8], group: &[u8]) -> Self {
        Self {
            users: IdTable::parse(passwd),
            groups: IdTable::parse(group),
            ..Self::default()
        }
    }

    /// The id of a user.
    pub fn user(&self, name: &[u8]) -> Option<u32> {
        self.users.ids.get(name).copied()
    }

    /// The id of a group.
    pub fn group(&self, name: &[u8]) -> Option<u32> {
        self.groups.ids.get(name).copied()
    }

    /// The name of a user.
    pub fn user_name(&self, id: u32) -> Option<&[u8]> {
        self.users.names.get(&id).map(|name| &**name)
    }

    /// The name of a group.
    pub fn group_name(&self, id: u32) -> Option<&[u8]> {
        self.groups.names.get(&id).map(|name| &**name)
    }

    /// Whether the user `id` exists in this user namespace.
    pub fn has_user_id(&self, id: u32) -> bool {
        self.user_ids.has(id)
    }

    /// Whether the group `id` exists in this user namespace.
    pub fn has_group_id(&self, id: u32) -> bool {
        self.group_ids.has(id)
    }
}

/// The ids of names and the names of ids. The first line of each counts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct IdTable {
    ids: HashMap<Vec<u8>, u32>,
    names: HashMap<u32, Vec<u8>>,
}

impl IdTable {
    fn parse(text: &[u8]) -> Self {
        let mut table = Self::default();
        for line in parse_lines(text).filter(|line| !line.name().is_empty()) {
            if let Some(id) = line.number(ID_FIELD) {
                let name = line.name().to_vec();
                table.names.entry(id).or_insert_with(|| name.clone());
                table.ids.entry(name).or_insert(id);
            }
        }
        table
    }
}

/// Number of the field with the id of a user or group.
pub const ID_FIELD: usize = 2;

/// A line of passwd(5) or group(5), which both begin with `name:password:id:`.
#[derive(Clone, Debug)]
pub struct AccountLine<'a> {
    fields: Vec<&'a [u8]>,
}

/// Splits `text` into lines. A malformed line is without the fields that it lacks.
pub fn parse_lines(text: &[u8]) -> impl Iterator<Item = AccountLine<'_>> {
    let lines = text.split(|&byte| byte == b'\n');
    lines.map(|line| AccountLine {
        fields: line.trim_ascii_end().split(|&byte| byte == b':').collect(),
    })
}

impl<'a> AccountLine<'a> {
    /// Name of the user or group.
    pub fn name(&self) -> &'a [u8] {
        self.field(0)
    }

    /// Field `index`; empty if it is missing.
    pub fn field(&self, index: usize) -> &'a [u8] {
        self.fields.get(index).copied().unwrap_or_default()
    }

    /// Field `index`, if it is a number.
    pub fn number(&self, index: usize) -> Option<u32> {
        std::str::from_utf8(self.field(index)).ok()?.parse().ok()
    }
}

/// Map of the initial user namespace: all ids but -1, to themselves.
const INITIAL: [u32; 3] = [0, 0, u32::MAX];

/// User or group ids that exist in a user namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IdMap {
    /// First id inside, first id outside and count of each range.
    ranges: Vec<[u32; 3]>,
}

impl Default for IdMap {
    fn default() -> Self {
        Self {
            ranges: vec![INITIAL],
        }
    }
}

impl IdMap {
    /// Maps the user ids of this process's user namespace; the initial map without `/proc`.
    pub fn of_users() -> Self {
        Self::read("/proc/self/uid_map")
    }

    fn read(path: &str) -> Self {
        fs::read_to_string(path).map_or_else(|_| Self::default(), |text| Self::parse(&text))
    }

    /// Parses the text of a file such as `/proc/self/uid_map`.
    pub fn parse(text: &str) -> Self {
        let range = |line: &str| {
            let mut numbers = line.split_whitespace().map(str::parse);
            let mut number = || numbers.next()?.ok();
            Some([number()?, number()?, number()?])
        };
        Self {
            ranges: text.lines().filter_map(range).collect(),
        }
    }

    /// Whether it is the map of the initial user namespace.
    pub fn is_initial(&self) -> bool {
        self.ranges == [INITIAL]
    }

    /// Whether `id` exists in the namespace.
    pub fn has(&self, id: u32) -> bool {
        let is_in =
            |&[first, _, count]: &[u32; 3]| id.checked_sub(first).is_some_and(|n| n < count);
        self.ranges.iter().any(is_in)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Promises: owner-names, gnu-owner-names
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

    // Promises: acl-impossible
    #[test]
    fn ids_within_the_ranges_of_a_map_exist() {
        let map =
            IdMap::parse("         0       1000          1\n         1     100000      65536\n");
        let ids = [0, 1, 65_536, 65_537, u32::MAX];
        assert_eq!(ids.map(|id| map.has(id)), [true, true, true, false, false]);
        assert!(!map.is_initial());
        let initial = IdMap::parse("         0          0 4294967295\n");
        assert!(initial.is_initial() && initial == IdMap::default());
        assert!(initial.has(u32::MAX - 1) && !initial.has(u32::MAX));
        assert!(!IdMap::parse("").has(0) && !IdMap::parse("0 x 1\n0 0\n").has(0));
    }
}
