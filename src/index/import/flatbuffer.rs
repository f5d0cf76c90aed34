//! Reads `FlatBuffers` from an untrusted writer, without a copy.
//!
//! Every offset is checked. The vectors and texts that a caller reads may add up to the length of the file only. So
//! a file that refers to the same bytes many times costs no more than an honest one.

use std::cell::Cell;

pub(super) struct Buffer<'a> {
    bytes: &'a [u8],
    /// Bytes of vectors that may still be read.
    budget: Cell<usize>,
}

#[derive(Clone, Copy)]
pub(super) struct Table<'b> {
    buffer: &'b Buffer<'b>,
    at: usize,
}

impl<'a> Buffer<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let budget = Cell::new(bytes.len());
        Self { bytes, budget }
    }

    pub(super) fn root(&'a self) -> Option<Table<'a>> {
        self.table(0)
    }

    fn array<const LEN: usize>(&self, at: usize) -> Option<[u8; LEN]> {
        self.bytes.get(at..)?.first_chunk().copied()
    }

    /// The place to which the offset at `at` refers.
    fn target(&self, at: usize) -> Option<usize> {
        let offset = u32::from_le_bytes(self.array(at)?);
        at.checked_add(usize::try_from(offset).ok()?)
    }

    fn table(&'a self, at: usize) -> Option<Table<'a>> {
        let at = self.target(at)?;
        Some(Table { buffer: self, at })
    }

    /// Place and bytes of the vector to which the offset at `at` refers.
    fn vector(&self, at: usize, element_len: usize) -> Option<(usize, &'a [u8])> {
        let start = self.target(at)?;
        let count = usize::try_from(u32::from_le_bytes(self.array(start)?)).ok()?;
        let len = count.checked_mul(element_len)?;
        let bytes = self.bytes.get(start.checked_add(4)?..)?.get(..len)?;
        self.budget.set(self.budget.get().checked_sub(len)?);
        Some((start + 4, bytes))
    }

    /// Places of the offsets in a vector of them.
    fn offsets(&self, at: usize) -> Option<impl Iterator<Item = usize> + use<>> {
        let (start, bytes) = self.vector(at, 4)?;
        Some((start..start + bytes.len()).step_by(4))
    }
}

impl<'b> Table<'b> {
    /// Place of the value of field `number`; 0 if the table does not have the field.
    fn place(&self, number: usize) -> Option<usize> {
        let distance = i32::from_le_bytes(self.buffer.array(self.at)?);
        let distance = isize::try_from(distance).ok()?.checked_neg()?;
        let fields = self.at.checked_add_signed(distance)?;
        let len = u16::from_le_bytes(self.buffer.array(fields)?);
        let slot = 4 + 2 * number;
        if slot + 2 > usize::from(len) {
            return Some(0);
        }
        match u16::from_le_bytes(self.buffer.array(fields.checked_add(slot)?)?) {
            0 => Some(0),
            within => self.at.checked_add(usize::from(within)),
        }
    }

    /// A number in little-endian bytes; zeros if the table does not have it.
    pub(super) fn number<const LEN: usize>(&self, number: usize) -> Option<[u8; LEN]> {
        match self.place(number)? {
            0 => Some([0; LEN]),
            at => self.buffer.array(at),
        }
    }

    /// A vector of bytes, or a text; empty if the table does not have it.
    pub(super) fn bytes(&self, number: usize) -> Option<&'b [u8]> {
        match self.place(number)? {
            0 => Some(&[]),
            at => Some(self.buffer.vector(at, 1)?.1),
        }
    }

    pub(super) fn table(&self, number: usize) -> Option<Table<'b>> {
        let place = self.place(number).filter(|&at| at > 0)?;
        self.buffer.table(place)
    }

    /// A vector of tables; `None` for an element that is outside the file.
    pub(super) fn tables(
        &self,
        number: usize,
    ) -> Option<impl Iterator<Item = Option<Table<'b>>> + use<'b>> {
        let (buffer, place) = (self.buffer, self.place(number)?);
        let places = match place {
            0 => None,
            at => Some(buffer.offsets(at)?),
        };
        Some(places.into_iter().flatten().map(|at| buffer.table(at)))
    }

    /// A vector of texts; `None` for an element that is outside the file.
    pub(super) fn texts(
        &self,
        number: usize,
    ) -> Option<impl Iterator<Item = Option<&'b [u8]>> + use<'b>> {
        let buffer = self.buffer;
        let place = self.place(number).filter(|&at| at > 0)?;
        let places = buffer.offsets(place)?;
        Some(places.map(|at| Some(buffer.vector(at, 1)?.1)))
    }
}
