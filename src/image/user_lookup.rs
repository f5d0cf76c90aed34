//! Looks up an image's user in its own passwd(5) and group(5); pure.

use super::error::Cause;
use crate::base::passwd::{AccountLine, ID_FIELD, parse_lines};

/// Maximum number of groups, because a hostile file may have any number of lines.
const MAX_GROUPS: usize = 1000;

/// Maximum id, as in Docker and runc. Some runtimes interpret larger numbers differently.
const MAX_ID: u32 = i32::MAX.unsigned_abs();

/// User, groups and home of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct User {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory, if known.
    pub home: Option<String>,
}

impl User {
    /// Resolves `spec`: `user`, `uid`, `user:group`, `uid:gid` or a mixture; empty is root.
    ///
    /// Without a group, the user's groups are those in `passwd` and `group`.
    ///
    /// # Errors
    /// When a name is unknown, or a number is too large.
    pub fn find(spec: &str, passwd: &[u8], group: &[u8]) -> Result<Self, Cause> {
        let (name, group_name) = match spec.split_once(':') {
            Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
            None => (spec, None),
        };
        let name = if name.is_empty() { "0" } else { name };
        let number = name.parse::<u32>().ok();
        let account = parse_lines(passwd).find(|line| match number {
            Some(number) => line.number(ID_FIELD) == Some(number),
            None => line.name() == name.as_bytes(),
        });
        let account = account.as_ref();
        let uid = number.or_else(|| account?.number(ID_FIELD));
        let uid = uid.ok_or_else(|| unknown_user(name, "passwd"))?;
        let (gid, groups) = match group_name {
            Some(name) => (find_group(name, group)?, Vec::new()),
            None => (
                account.and_then(|account| account.number(3)).unwrap_or(0),
                account.map_or_else(Vec::new, |account| groups_of(account.name(), group)),
            ),
        };
        let mut numbers = [uid, gid].into_iter().chain(groups.iter().copied());
        if let Some(number) = numbers.find(|&number| number > MAX_ID) {
            let max = MAX_ID;
            return Err(Cause::IdTooLarge { number, max });
        }
        let home = account.and_then(|account| std::str::from_utf8(account.field(5)).ok());
        Ok(Self {
            uid,
            gid,
            groups,
            home: home.filter(|home| home.starts_with('/')).map(str::to_owned),
        })
    }
}

fn unknown_user(name: &str, file: &'static str) -> Cause {
    let name = name.to_owned();
    Cause::UnknownUser { name, file }
}

fn find_group(name: &str, group: &[u8]) -> Result<u32, Cause> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let line = parse_lines(group).find(|line| line.name() == name.as_bytes());
    line.and_then(|line| line.number(ID_FIELD))
        .ok_or_else(|| unknown_user(name, "group"))
}

fn groups_of(user: &[u8], group: &[u8]) -> Vec<u32> {
    let lists = |line: &AccountLine<'_>| {
        let mut members = line.field(3).split(|&byte| byte == b',');
        members.any(|member| member == user)
    };
    let numbers = parse_lines(group)
        .filter(lists)
        .filter_map(|line| line.number(ID_FIELD));
    let mut numbers: Vec<_> = numbers.take(MAX_GROUPS).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\nwww:x:33:34:web:/var/www:/bin/false\n\xff\n\
                            odd:x:a:b::/:\n";
    const GROUP: &[u8] =
        b"root:x:0:\nwww:x:34:\ndisk:x:6:root,www\nlog:x:7:www\nalso:x:6:www\nww:x:9:ww\n";

    fn find(spec: &str) -> (u32, u32, Vec<u32>, Option<String>) {
        let user = User::find(spec, PASSWD, GROUP).expect("known");
        (user.uid, user.gid, user.groups, user.home)
    }

    // Promises: bundle-users
    #[test]
    fn users_and_groups_are_found_by_name_and_by_number() {
        let home = |path: &str| Some(path.to_owned());
        assert_eq!(find(""), (0, 0, vec![6], home("/root")));
        assert_eq!(find("www"), (33, 34, vec![6, 7], home("/var/www")));
        assert_eq!(find("33"), find("www"));
        assert_eq!(find("33:"), find("www"));
        assert_eq!(find("www:disk"), (33, 6, vec![], home("/var/www")));
        assert_eq!(find("www:5"), (33, 5, vec![], home("/var/www")));
        assert_eq!(find("4242"), (4242, 0, vec![], None));
        assert_eq!(find("4242:log"), (4242, 7, vec![], None));
        assert_eq!(find(":7"), (0, 7, vec![], home("/root")));
    }

    // Promises: bundle-users
    #[test]
    fn unknown_user_or_group_is_an_error() {
        for spec in [
            "nobody",
            "www:nobody",
            "odd",
            "-1",
            "99999999999",
            "www:x:y",
        ] {
            let found = User::find(spec, PASSWD, GROUP);
            assert!(matches!(found, Err(Cause::UnknownUser { .. })), "{spec}");
        }
    }

    // Promises: bundle-users
    #[test]
    fn user_id_larger_than_i32_max_is_rejected() {
        let passwd = b"large:x:2147483648:1::/:\nmember:x:5:4294967295::/:\njoins:x:6:6::/:\n";
        let group = b"large:x:4294967294:joins\n";
        for spec in [
            "4294967295",
            "2147483648",
            "0:4294967295",
            "1:2147483648",
            "large",
            "member",
            "joins",
            "0:large",
        ] {
            let found = User::find(spec, passwd, group);
            assert!(
                matches!(found, Err(Cause::IdTooLarge { .. })),
                "{spec}: {found:?}"
            );
        }
        let largest = User::find("2147483647:2147483647", passwd, group).expect("it will do");
        assert_eq!((largest.uid, largest.gid), (MAX_ID, MAX_ID));
    }
}
