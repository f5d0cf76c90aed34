//! The rows of one array of an index: in memory, or loaded on demand.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::on_demand::OnDemand;

/// The rows of an array.
///
/// [`get`](Self::get) and [`range`](Self::range) load what they return. Use as a slice loads all rows.
#[derive(Clone, Debug)]
pub(crate) enum Rows<T> {
    /// Under construction, or loaded as a whole.
    InMemory(Vec<T>),
    /// A part of an index file.
    OnDemand(Section<T>),
}

/// Whole rows of an index file, which is at least so long.
#[derive(Clone, Debug)]
pub(crate) struct Section<T> {
    file: Arc<OnDemand>,
    bytes: Range<usize>,
    rows: PhantomData<T>,
}

/// Types that an index file holds as they are.
pub(crate) trait Row: FromBytes + Immutable + KnownLayout + Unaligned {}

impl<T: FromBytes + Immutable + KnownLayout + Unaligned> Row for T {}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self::InMemory(Vec::new())
    }
}

impl<T> From<Vec<T>> for Rows<T> {
    fn from(rows: Vec<T>) -> Self {
        Self::InMemory(rows)
    }
}

impl<T: Row> Rows<T> {
    /// The rows in `bytes` of `file`; `None` if they are not whole rows.
    pub(crate) fn on_demand(file: &Arc<OnDemand>, bytes: Range<usize>) -> Option<Self> {
        bytes.len().is_multiple_of(size_of::<T>()).then(|| {
            Self::OnDemand(Section {
                file: Arc::clone(file),
                bytes,
                rows: PhantomData,
            })
        })
    }

    /// The bytes of the index file that hold them, if they are loaded on demand.
    pub(crate) fn file_range(&self) -> Option<Range<usize>> {
        match self {
            Self::InMemory(_) => None,
            Self::OnDemand(section) => Some(section.bytes.clone()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::InMemory(rows) => rows.len(),
            Self::OnDemand(section) => section.bytes.len() / size_of::<T>(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Row `number`; `None` past the last.
    pub(crate) fn get(&self, number: usize) -> Option<&T> {
        match self {
            Self::InMemory(rows) => rows.get(number),
            Self::OnDemand(_) => self.range(number..number.checked_add(1)?)?.first(),
        }
    }

    /// Adjacent rows; `None` past the last.
    pub(crate) fn range(&self, numbers: Range<usize>) -> Option<&[T]> {
        match self {
            Self::InMemory(rows) => rows.get(numbers),
            Self::OnDemand(section) => {
                let at = |number: usize| {
                    let offset = number.checked_mul(size_of::<T>())?;
                    section.bytes.start.checked_add(offset)
                };
                let bytes = at(numbers.start)?..at(numbers.end)?;
                let bytes = (bytes.end <= section.bytes.end).then_some(bytes)?;
                <[T]>::ref_from_bytes(section.file.bytes(bytes)?).ok()
            }
        }
    }

    /// Loads all rows, if they are loaded on demand.
    pub(crate) fn load(&self) {
        if let Self::OnDemand(_) = self {
            self.range(0..self.len());
        }
    }

    /// The rows as a vector, to change them.
    pub(crate) fn vec_mut(&mut self) -> &mut Vec<T> {
        if let Self::OnDemand(_) = self {
            // Only a builder changes rows, and its rows are in memory.
            *self = Self::default();
        }
        match self {
            Self::InMemory(rows) => rows,
            Self::OnDemand(_) => unreachable!("replaced above"),
        }
    }

    /// Bytes of the vector, with its spare capacity. Rows on demand are counted with their file.
    pub(crate) fn capacity_bytes(&self) -> usize {
        match self {
            Self::InMemory(rows) => rows.capacity() * size_of::<T>(),
            Self::OnDemand(_) => 0,
        }
    }
}

impl<T: Row> Deref for Rows<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.range(0..self.len()).unwrap_or_default()
    }
}

impl<T: Row> DerefMut for Rows<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.vec_mut()
    }
}

impl<'a, T: Row> IntoIterator for &'a Rows<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
