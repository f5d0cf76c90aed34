//! Offsets and half-open extents in packed (stored) and plain (decoded) coordinates.

use std::fmt;

/// An offset in one coordinate system.
pub trait Coordinate: Copy + Ord + fmt::Debug + fmt::Display {
    /// The coordinate at `offset` bytes from the start.
    fn at(offset: u64) -> Self;
    /// Bytes from the start.
    fn get(self) -> u64;
}

macro_rules! coordinate {
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u64);

        impl Coordinate for $name {
            fn at(offset: u64) -> Self {
                Self(offset)
            }
            fn get(self) -> u64 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

coordinate!(
    /// Bytes from the start of the source, as stored.
    Packed,
    "packed"
);
coordinate!(
    /// Bytes from the start of the decoded stream.
    Plain,
    "plain"
);

/// A half-open range `start..end` in one coordinate system; `start <= end` always.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Extent<C> {
    start: C,
    end: C,
}

impl<C: Coordinate> Extent<C> {
    /// The extent from `start` to `end`; `None` if `end` is before `start`.
    pub fn new(start: C, end: C) -> Option<Self> {
        (start <= end).then_some(Self { start, end })
    }

    /// The `len` bytes at `start`, clamped to the end of the coordinate system.
    pub fn with_len(start: C, len: u64) -> Self {
        Self {
            start,
            end: C::at(start.get().saturating_add(len)),
        }
    }

    /// First offset inside.
    pub fn start(&self) -> C {
        self.start
    }

    /// First offset past the end.
    pub fn end(&self) -> C {
        self.end
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end.get() - self.start.get()
    }

    /// Whether the extent is empty.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Whether `offset` is inside.
    pub fn contains(&self, offset: C) -> bool {
        self.start <= offset && offset < self.end
    }

    /// The common part of both; `None` if they share no byte.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end.min(other.end);
        (start < end).then_some(Self { start, end })
    }
}

impl<C: Coordinate> fmt::Debug for Extent<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extent_that_ends_before_it_starts_is_rejected() {
        assert_eq!(Extent::new(Plain(2), Plain(1)), None);
    }

    #[test]
    fn adjacent_extents_do_not_intersect() {
        let left = Extent::with_len(Plain(0), 10);
        let right = Extent::with_len(Plain(10), 10);
        assert_eq!(left.intersection(&right), None);
        assert_eq!(
            left.intersection(&Extent::with_len(Plain(9), 5)),
            Some(Extent::with_len(Plain(9), 1))
        );
    }

    #[test]
    fn overflowing_length_is_clamped() {
        let extent = Extent::with_len(Packed(u64::MAX - 1), 10);
        assert_eq!(extent.len(), 1);
    }
}
