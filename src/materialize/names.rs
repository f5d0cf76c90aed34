//! This host's users and groups, as /etc/passwd and /etc/group tell them. Pure.
//!
//! Other name services (LDAP, systemd-homed) are not asked: that takes the C library's plug-ins.

use std::collections::HashMap;

use crate::base::acl::Names;

/// Names and their numbers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct HostNames {
    users: HashMap<Vec<u8>, u32>,
    groups: HashMap<Vec<u8>, u32>,
}

impl HostNames {
    /// Reads the two files' texts; lines that make no sense are skipped.
    pub(super) fn new(passwd: &[u8], group: &[u8]) -> Self {
        Self {
            users: numbers(passwd),
            groups: numbers(group),
        }
    }
}

impl Names for HostNames {
    fn user(&self, name: &[u8]) -> Option<u32> {
        self.users.get(name).copied()
    }

    fn group(&self, name: &[u8]) -> Option<u32> {
        self.groups.get(name).copied()
    }
}

/// The first and third field of each line; the first line of a name wins.
fn numbers(text: &[u8]) -> HashMap<Vec<u8>, u32> {
    let mut numbers = HashMap::new();
    for line in text.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b':');
        let name = fields.next().unwrap_or_default();
        let number = fields
            .nth(1)
            .and_then(|field| std::str::from_utf8(field).ok()?.parse().ok());
        if let Some(number) = number.filter(|_| !name.is_empty()) {
            numbers.entry(name.to_vec()).or_insert(number);
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_numbers_and_nonsense_is_skipped() {
        let names = HostNames::new(
            b"root:x:0:0::/:/bin/sh\nbroken\n+::::\nlisa:x:1001:5::\nlisa:x:7:5::\n",
            b"video:*:44:lisa\n",
        );
        assert_eq!(names.user(b"root"), Some(0));
        assert_eq!(names.user(b"lisa"), Some(1001));
        assert_eq!(names.user(b"broken"), None);
        assert_eq!(names.user(b"video"), None);
        assert_eq!(names.group(b"video"), Some(44));
    }
}
