//! Lists and objects with a maximum length, because two bytes of JSON may need dozens in memory; pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The first `MAX` elements of a list, and one more if there are more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct BoundedVec<T, const MAX: usize>(pub(crate) Vec<T>);

/// The first `MAX` names and values of an object, and one more if there are more.
#[derive(Clone, PartialEq, Eq, Debug)]
struct BoundedMap<T, const MAX: usize>(BTreeMap<String, T>);

/// Reads `null`, which Go writes for empty values, as the default.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A value, or the default for `null`.
struct OrDefault<T>(T);

impl<'de, T: Default + Deserialize<'de>> Deserialize<'de> for OrDefault<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        null_as_default(deserializer).map(Self)
    }
}

/// Reads a [`BoundedVec`]; `null` is an empty one, and an element `null` is the default.
pub(crate) fn bounded_vec<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    let list = Option::<BoundedVec<OrDefault<T>, MAX>>::deserialize(deserializer)?;
    let list = list.map_or_else(Vec::new, |list| list.0);
    Ok(list.into_iter().map(|one| one.0).collect())
}

/// Reads the first names and values of an object, as [`bounded_vec`] does.
pub(crate) fn bounded_map<'de, D, T, const MAX: usize>(
    deserializer: D,
) -> Result<BTreeMap<String, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    let names = Option::<BoundedMap<OrDefault<T>, MAX>>::deserialize(deserializer)?;
    let names = names.map_or_else(BTreeMap::new, |names| names.0);
    Ok(names.into_iter().map(|(name, one)| (name, one.0)).collect())
}

/// As [`bounded_map`], and ignores the values.
pub(crate) fn bounded_keys<'de, D, const MAX: usize>(
    deserializer: D,
) -> Result<BTreeSet<String>, D::Error>
where
    D: Deserializer<'de>,
{
    let names = bounded_map::<D, IgnoredAny, MAX>(deserializer)?;
    Ok(names.into_keys().collect())
}

struct BoundedVisitor<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de>
    for BoundedVisitor<BoundedVec<T, MAX>, MAX>
{
    type Value = BoundedVec<T, MAX>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while list.len() <= MAX {
            match sequence.next_element()? {
                Some(one) => list.push(one),
                None => return Ok(BoundedVec(list)),
            }
        }
        while sequence.next_element::<IgnoredAny>()?.is_some() {}
        Ok(BoundedVec(list))
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de>
    for BoundedVisitor<BoundedMap<T, MAX>, MAX>
{
    type Value = BoundedMap<T, MAX>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = BTreeMap::new();
        while names.len() <= MAX {
            match map.next_entry()? {
                Some((name, value)) => drop(names.insert(name, value)),
                None => return Ok(BoundedMap(names)),
            }
        }
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(BoundedMap(names))
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedVec<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(BoundedVisitor::<Self, MAX>(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for BoundedMap<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BoundedVisitor::<Self, MAX>(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Both {
        #[serde(default, deserialize_with = "bounded_vec::<_, _, 2>")]
        list: Vec<u8>,
        #[serde(default, deserialize_with = "bounded_map::<_, _, 2>")]
        names: BTreeMap<String, u8>,
    }

    fn lens(text: &str) -> (usize, usize) {
        let both: Both = serde_json::from_str(text).expect("JSON");
        (both.list.len(), both.names.len())
    }

    #[test]
    fn bounded_collections_keep_one_item_over_the_limit() {
        assert_eq!(lens("{}"), (0, 0));
        assert_eq!(lens(r#"{"list":null,"names":null}"#), (0, 0));
        assert_eq!(lens(r#"{"list":[1,2],"names":{"a":1,"b":2}}"#), (2, 2));
        // Ignores all elements past the maximum.
        let text = r#"{"list":[1,2,3,"x",[4]],"names":{"a":1,"b":2,"c":3,"d":"x","e":[]}}"#;
        assert_eq!(lens(text), (3, 3));
        assert!(serde_json::from_str::<Both>(r#"{"list":[1,2,3,4}"#).is_err());
    }
}
