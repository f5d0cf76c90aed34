//! Tar archives built record by record, also invalid ones.

/// Magic bytes of the dialects.
pub(crate) const USTAR: [u8; 8] = *b"ustar\x0000";
pub(crate) const GNU: [u8; 8] = *b"ustar  \0";
pub(crate) const V7: [u8; 8] = [0; 8];

/// An archive under construction.
#[derive(Clone, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
}

impl Archive {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// A member with this payload; its size is written into the header unless one was set.
    pub(crate) fn add(mut self, header: Header, payload: impl AsRef<[u8]>) -> Self {
        let payload = payload.as_ref();
        self.bytes.extend(header.finish(payload.len() as u64));
        self.bytes.extend_from_slice(payload);
        self.pad();
        self
    }

    /// A file with this content.
    pub(crate) fn file(self, name: &str, content: impl AsRef<[u8]>) -> Self {
        self.add(Header::new(name, b'0'), content)
    }

    pub(crate) fn directory(self, name: &str) -> Self {
        self.add(Header::new(name, b'5').mode(0o755), "")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.add(Header::new(name, b'2').mode(0o777).link(target), "")
    }

    pub(crate) fn hard_link(self, name: &str, target: &str) -> Self {
        self.add(Header::new(name, b'1').link(target), "")
    }

    pub(crate) fn fifo(self, name: &str) -> Self {
        self.add(Header::new(name, b'6'), "")
    }

    /// A pax header for the next member.
    pub(crate) fn pax<K: AsRef<[u8]>, V: AsRef<[u8]>>(self, records: &[(K, V)]) -> Self {
        self.add(Header::new("pax", b'x'), pax_records(records))
    }

    /// A pax header for all members that follow.
    pub(crate) fn global<K: AsRef<[u8]>, V: AsRef<[u8]>>(self, records: &[(K, V)]) -> Self {
        self.add(Header::new("global", b'g'), pax_records(records))
    }

    /// GNU's long name (`L`) or long link (`K`) for the next member.
    pub(crate) fn long(self, kind: u8, text: impl AsRef<[u8]>) -> Self {
        let text = [text.as_ref(), b"\0"].concat();
        self.add(Header::new("././@LongLink", kind).magic(GNU), text)
    }

    /// Bytes without a header, padded to a record.
    pub(crate) fn raw(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.bytes.extend_from_slice(bytes.as_ref());
        self.pad();
        self
    }

    /// The archive with its two zero records.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 1024, 0);
        self.bytes
    }

    /// The archive without an end.
    pub(crate) fn unfinished(self) -> Vec<u8> {
        self.bytes
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
    }
}

/// The records of a pax header, lengths included.
pub(crate) fn pax_records<K: AsRef<[u8]>, V: AsRef<[u8]>>(records: &[(K, V)]) -> Vec<u8> {
    let mut text = Vec::new();
    for (key, value) in records {
        let body = [b" ", key.as_ref(), b"=", value.as_ref(), b"\n"].concat();
        let mut len = body.len();
        while len != body.len() + len.to_string().len() {
            len = body.len() + len.to_string().len();
        }
        text.extend(len.to_string().into_bytes());
        text.extend(body);
    }
    text
}

/// A header record. The default is a ustar file of mode 0644 and owner 0:0.
#[derive(Clone)]
pub(crate) struct Header {
    record: [u8; 512],
    has_size: bool,
    checksum: bool,
}

impl Header {
    pub(crate) fn new(name: impl AsRef<[u8]>, kind: u8) -> Self {
        let header = Self {
            record: [0; 512],
            has_size: false,
            checksum: true,
        };
        header
            .put(0, name)
            .mode(0o644)
            .owner(0, 0)
            .mtime(1_000_000_000)
            .put(156, [kind])
            .magic(USTAR)
    }

    pub(crate) fn mode(self, mode: u64) -> Self {
        self.octal(100, 8, mode)
    }

    pub(crate) fn owner(self, uid: u64, gid: u64) -> Self {
        self.octal(108, 8, uid).octal(116, 8, gid)
    }

    pub(crate) fn size(mut self, size: u64) -> Self {
        self.has_size = true;
        self.octal(124, 12, size)
    }

    pub(crate) fn mtime(self, seconds: u64) -> Self {
        self.octal(136, 12, seconds)
    }

    pub(crate) fn link(self, target: impl AsRef<[u8]>) -> Self {
        self.put(157, target)
    }

    pub(crate) fn magic(self, magic: [u8; 8]) -> Self {
        self.put(257, magic)
    }

    pub(crate) fn device(self, major: u64, minor: u64) -> Self {
        self.octal(329, 8, major).octal(337, 8, minor)
    }

    pub(crate) fn octal(self, at: usize, width: usize, value: u64) -> Self {
        self.put(at, format!("{value:0digits$o}\0", digits = width - 1))
    }

    /// A number in base 256.
    pub(crate) fn binary(mut self, at: usize, width: usize, value: i64) -> Self {
        let fill = if value < 0 { 0xff } else { 0 };
        self.has_size |= at == 124;
        let mut field = vec![fill; width.saturating_sub(8)];
        field.extend(value.to_be_bytes());
        if let Some(first) = field.first_mut() {
            *first |= 0x80;
        }
        self.put(at, field)
    }

    /// Writes bytes at an offset of the header.
    pub(crate) fn put(mut self, at: usize, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        let field = self.record.iter_mut().skip(at);
        assert!(at + bytes.len() <= 512, "it does not fit");
        field.zip(bytes).for_each(|(to, from)| *to = *from);
        self
    }

    /// Makes the checksum wrong.
    pub(crate) fn damaged(mut self) -> Self {
        self.checksum = false;
        self
    }

    fn finish(self, len: u64) -> [u8; 512] {
        let mut header = if self.has_size { self } else { self.size(len) };
        header.record[148..156].fill(b' ');
        let sum: u64 = header.record.iter().copied().map(u64::from).sum();
        let sum = if header.checksum { sum } else { sum + 1 };
        header.put(148, format!("{sum:06o}\0 ")).record
    }
}

/// Incompressible bytes.
pub(crate) fn random_bytes(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    std::iter::repeat_with(next).take(len).collect()
}
