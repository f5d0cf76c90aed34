//! Ids that a user namespace maps (`user_namespaces(7)`).

use std::fs;

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
    /// Maps the user ids of this process's user namespace. Without `/proc` it returns the initial map.
    pub fn of_users() -> Self {
        Self::read("/proc/self/uid_map")
    }

    /// Maps the group ids of this process's user namespace. Without `/proc` it returns the initial map.
    pub fn of_groups() -> Self {
        Self::read("/proc/self/gid_map")
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
