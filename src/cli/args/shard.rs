//! The flag that selects a shard.

use std::str::FromStr;

use tarfs::index::MAX_SHARDS;

/// One of several shards, as `I/N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ShardArg {
    /// From 1.
    pub number: u32,
    pub count: u32,
}

impl FromStr for ShardArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text
            .split_once('/')
            .and_then(|(number, count)| Some((number.parse().ok()?, count.parse().ok()?)));
        match numbers {
            Some((number, count)) if (1..=count).contains(&number) && count <= MAX_SHARDS => {
                Ok(Self { number, count })
            }
            _ => Err(format!(
                "not I/N with I from 1 to N, and N at most {MAX_SHARDS}"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_is_one_of_a_positive_number() {
        let shard = |number, count| Ok(ShardArg { number, count });
        assert_eq!("1/1".parse(), shard(1, 1));
        assert_eq!("64/64".parse(), shard(64, 64));
        for text in [
            "", "1", "0/2", "3/2", "-1/2", "1/0", "a/b", "1/2/3", "1/65537",
        ] {
            assert!(text.parse::<ShardArg>().is_err(), "{text}");
        }
    }
}
