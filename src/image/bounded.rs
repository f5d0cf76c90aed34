//! Lists and objects of documents, of which no more is kept than an image may have; pure.
//!
//! What a document of a few MiB says in two bytes takes some dozens in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The first of a list: `MOST`, and one more when there are more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct List<T, const MOST: usize>(pub(super) Vec<T>);

/// The first of an object's names and values: `MOST`, and one more when there are more.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Names<T, const MOST: usize>(BTreeMap<String, T>);

impl<T, const MOST: usize> Default for List<T, MOST> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T, const MOST: usize> Default for Names<T, MOST> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// A [`List`], which is empty where there is `null`.
pub(super) fn list<'de, D, T, const MOST: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Option::<List<T, MOST>>::deserialize(deserializer)?;
    Ok(list.unwrap_or_default().0)
}

/// The first names and values of an object, as of a [`list`].
pub(super) fn names<'de, D, T, const MOST: usize>(
    deserializer: D,
) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let names = Option::<Names<T, MOST>>::deserialize(deserializer)?;
    Ok(names.unwrap_or_default().0)
}

/// As [`names`], of an object whose values say nothing.
pub(super) fn keys<'de, D, const MOST: usize>(deserializer: D) -> Result<BTreeSet<String>, D::Error>
where
    D: Deserializer<'de>,
{
    let names = names::<D, IgnoredAny, MOST>(deserializer)?;
    Ok(names.into_keys().collect())
}

struct First<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for First<List<T, MOST>, MOST> {
    type Value = List<T, MOST>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while list.len() <= MOST {
            match sequence.next_element()? {
                Some(one) => list.push(one),
                None => return Ok(List(list)),
            }
        }
        while sequence.next_element::<IgnoredAny>()?.is_some() {}
        Ok(List(list))
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for First<Names<T, MOST>, MOST> {
    type Value = Names<T, MOST>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = BTreeMap::new();
        while names.len() <= MOST {
            match map.next_entry()? {
                Some((name, value)) => drop(names.insert(name, value)),
                None => return Ok(Names(names)),
            }
        }
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Names(names))
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(First::<Self, MOST>(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Names<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(First::<Self, MOST>(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Both {
        #[serde(default, deserialize_with = "list::<_, _, 2>")]
        list: Vec<u8>,
        #[serde(default, deserialize_with = "names::<_, _, 2>")]
        names: BTreeMap<String, u8>,
    }

    fn lens(text: &str) -> (usize, usize) {
        let both: Both = serde_json::from_str(text).expect("JSON");
        (both.list.len(), both.names.len())
    }

    #[test]
    fn of_too_many_there_is_one_too_many() {
        assert_eq!(lens("{}"), (0, 0));
        assert_eq!(lens(r#"{"list":null,"names":null}"#), (0, 0));
        assert_eq!(lens(r#"{"list":[1,2],"names":{"a":1,"b":2}}"#), (2, 2));
        // What is past them is looked at by nobody.
        let text = r#"{"list":[1,2,3,"x",[4]],"names":{"a":1,"b":2,"c":3,"d":"x","e":[]}}"#;
        assert_eq!(lens(text), (3, 3));
        assert!(serde_json::from_str::<Both>(r#"{"list":[1,2,3,4}"#).is_err());
    }
}
