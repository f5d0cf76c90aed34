//! pax headers: keywords, their values, and their meaning for a member.

mod body;

pub(super) use body::Body;

use std::borrow::Cow;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use percent_encoding::percent_decode;

use crate::base::xattr::{XATTR_NAME_MAX, XATTR_SIZE_MAX};
use crate::tar::error::{Note, printable};
use crate::tar::header::text;
use crate::tar::sparse::{SparseKeywords, decimal};
use crate::tar::{Cause, Limit, Limits, Timestamp};

/// base64 as libarchive reads it: with or without padding, and with any trailing bits.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Values from pax headers. `None` leaves the header's own field in force.
#[derive(Clone, Debug, Default)]
pub(super) struct Keywords {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<Timestamp>,
    pub(super) major: Option<u32>,
    pub(super) minor: Option<u32>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) sparse: SparseKeywords,
}

impl Keywords {
    /// Applies a header's body. Faults add to `notes`; malformed framing loses the rest of the body.
    pub(super) fn read(
        &mut self,
        body: &[u8],
        limits: &Limits,
        notes: &mut Vec<Note>,
    ) -> Result<(), Cause> {
        let mut rest = body;
        loop {
            match keyword(rest) {
                Ok(Some((key, value, behind))) => {
                    self.set(key, value, limits, notes)?;
                    rest = behind;
                }
                Ok(None) => return Ok(()),
                Err(malformed) => {
                    let text = format!("malformed extended header: {malformed}");
                    add_note(notes, Note::Damaged(text));
                    return Ok(());
                }
            }
        }
    }

    /// Whether any keyword but those of sparse maps is set.
    pub(super) fn sets_attributes(&self) -> bool {
        let numbers = [self.uid, self.gid, self.major, self.minor];
        self.path.is_some()
            || self.link.is_some()
            || self.size.is_some()
            || self.mtime.is_some()
            || !self.xattrs.is_empty()
            || numbers.iter().any(Option::is_some)
    }

    /// Bytes of names and values.
    pub(super) fn bytes(&self) -> u64 {
        let texts = [&self.path, &self.link];
        let texts = texts.into_iter().flatten().map(Vec::len);
        texts.sum::<usize>() as u64 + xattr_bytes(&self.xattrs)
    }

    /// Applies the value of one keyword. A fault that keeps the field adds to `notes`.
    pub(super) fn set(
        &mut self,
        key: &[u8],
        value: &[u8],
        limits: &Limits,
        notes: &mut Vec<Note>,
    ) -> Result<(), Cause> {
        let note = match Field::of(key) {
            Some(Field::Path) => {
                self.path = name(value, limits)?;
                None
            }
            Some(Field::Link) => {
                self.link = name(value, limits)?;
                None
            }
            Some(Field::Size) => assign(&mut self.size, key, value, decimal),
            Some(Field::Uid) => assign(&mut self.uid, key, value, decimal_u32),
            Some(Field::Gid) => assign(&mut self.gid, key, value, decimal_u32),
            Some(Field::Mtime) => assign(&mut self.mtime, key, value, time),
            Some(Field::Major) => assign(&mut self.major, key, value, decimal_u32),
            Some(Field::Minor) => assign(&mut self.minor, key, value, decimal_u32),
            Some(Field::RealSize) => assign(&mut self.sparse.size, key, value, decimal),
            Some(Field::Sparse(key)) => self.sparse(key, value, limits)?,
            Some(Field::Attribute(attribute)) => match attribute.value(value) {
                Some(value) => self.attribute(attribute, value.into_owned(), limits),
                None => Some(invalid(key, value)),
            },
            None => None,
        };
        if let Some(note) = note {
            add_note(notes, note);
        }
        Ok(())
    }

    fn sparse(&mut self, key: &[u8], value: &[u8], limits: &Limits) -> Result<Option<Note>, Cause> {
        let sparse = &mut self.sparse;
        match key {
            b"size" | b"realsize" => {
                let note = assign(&mut sparse.size, key, value, decimal);
                sparse.gnu_size = sparse.size;
                return Ok(note);
            }
            b"major" => return Ok(assign(&mut sparse.major, key, value, decimal)),
            b"name" => sparse.name = name(value, limits)?,
            // `numblocks` is redundant, because the pieces are known.
            b"offset" => sparse.offset = decimal(text(value)),
            b"numbytes" => sparse.add_len(decimal(text(value)), limits)?,
            // GNU tar also treats this as a file without holes.
            b"map" if text(value).is_empty() => return Ok(Some(invalid(key, value))),
            b"map" => sparse.set_map(text(value), limits)?,
            _ => {}
        }
        Ok(None)
    }

    /// Sets an extended attribute. A later value replaces an earlier one, and an empty ACL removes it.
    fn attribute(
        &mut self,
        attribute: Attribute<'_>,
        value: Vec<u8>,
        limits: &Limits,
    ) -> Option<Note> {
        let name = attribute.name();
        self.xattrs.retain(|(other, _)| name != *other);
        if matches!(attribute, Attribute::Acl(_)) && value.is_empty() {
            return None;
        }
        let bytes = xattr_bytes(&self.xattrs) + (name.len() + value.len()) as u64;
        let is_full = self.xattrs.len() as u64 >= limits.xattrs || bytes > limits.xattr_bytes;
        if is_full || name.len() > XATTR_NAME_MAX || attribute.is_too_long(value.len()) {
            return Some(attribute.left_out());
        }
        self.xattrs.push((name.into_owned(), value));
        None
    }
}

pub(super) fn xattr_bytes(xattrs: &[(Vec<u8>, Vec<u8>)]) -> u64 {
    let lens = xattrs.iter().map(|(key, value)| key.len() + value.len());
    lens.sum::<usize>() as u64
}

/// A field of a member that a keyword sets.
#[derive(Clone, Copy, Debug)]
enum Field<'a> {
    Path,
    Link,
    Size,
    Uid,
    Gid,
    Mtime,
    Major,
    Minor,
    RealSize,
    /// A keyword of GNU's sparse formats, without their prefix.
    Sparse(&'a [u8]),
    Attribute(Attribute<'a>),
}

impl<'a> Field<'a> {
    /// `None` for a keyword without effect.
    fn of(key: &'a [u8]) -> Option<Self> {
        Some(match key {
            b"path" => Self::Path,
            b"linkpath" => Self::Link,
            b"size" => Self::Size,
            b"uid" => Self::Uid,
            b"gid" => Self::Gid,
            b"mtime" => Self::Mtime,
            b"SCHILY.devmajor" => Self::Major,
            b"SCHILY.devminor" => Self::Minor,
            b"SCHILY.realsize" => Self::RealSize,
            _ => match key.strip_prefix(b"GNU.sparse.") {
                Some(key) => Self::Sparse(key),
                None => Self::Attribute(Attribute::of(key)?),
            },
        })
    }
}

/// An extended attribute, by the keyword that gives it.
#[derive(Clone, Copy, Debug)]
enum Attribute<'a> {
    /// An ACL as text, by its whole keyword.
    Acl(&'a [u8]),
    Selinux,
    /// By its encoded name.
    Schily(&'a [u8]),
    /// By its encoded name, with a value in base64.
    Libarchive(&'a [u8]),
}

impl<'a> Attribute<'a> {
    fn of(key: &'a [u8]) -> Option<Self> {
        match key {
            b"SCHILY.acl.access" | b"SCHILY.acl.default" => Some(Self::Acl(key)),
            b"RHT.security.selinux" => Some(Self::Selinux),
            _ => {
                let schily = key.strip_prefix(b"SCHILY.xattr.").map(Self::Schily);
                schily.or_else(|| key.strip_prefix(b"LIBARCHIVE.xattr.").map(Self::Libarchive))
            }
        }
    }

    fn name(self) -> Cow<'a, [u8]> {
        match self {
            Self::Acl(key) => Cow::Borrowed(key),
            Self::Selinux => Cow::Borrowed(b"security.selinux"),
            // A `%` without two hexadecimal digits stays.
            Self::Schily(name) | Self::Libarchive(name) => percent_decode(name).into(),
        }
    }

    /// The attribute's value. `None` if the keyword's value is invalid.
    fn value(self, value: &[u8]) -> Option<Cow<'_, [u8]>> {
        match self {
            Self::Acl(_) | Self::Schily(_) => Some(Cow::Borrowed(value)),
            // The kernel stores the context as a C string.
            Self::Selinux => Some(Cow::Owned([text(value), b"\0"].concat())),
            Self::Libarchive(_) => BASE64.decode(value).ok().map(Cow::Owned),
        }
    }

    /// Whether Linux holds no value of `len` bytes. ACLs are shorter in its form than as text.
    fn is_too_long(self, len: usize) -> bool {
        !matches!(self, Self::Acl(_)) && len > XATTR_SIZE_MAX
    }

    fn left_out(self) -> Note {
        let name = printable(&self.name());
        Note::Warning(format!(
            "leaving out the extended attribute {name}, which is too large"
        ))
    }
}

/// Maximum notes about one header, of which a hostile one could have millions.
const MAX_NOTES: usize = 64;

/// Adds a note. All beyond the maximum become one, as severe as the most severe of them.
fn add_note(notes: &mut Vec<Note>, note: Note) {
    let text = || "further oddities of this header are not listed".to_owned();
    match (notes.len(), &note) {
        (..MAX_NOTES, _) => notes.push(note),
        (MAX_NOTES, Note::Warning(_)) => notes.push(Note::Warning(text())),
        (_, Note::Warning(_)) => {}
        (_, Note::Damaged(_)) => {
            notes.truncate(MAX_NOTES);
            notes.push(Note::Damaged(text()));
        }
    }
}

type Keyword<'a> = (&'a [u8], &'a [u8], &'a [u8]);

/// Splits off the first `length key=value\n`. `None` at the end or a NUL.
fn keyword(body: &[u8]) -> Result<Option<Keyword<'_>>, &'static str> {
    let Some(head) = head(body)? else {
        return Ok(None);
    };
    let (record, behind) = body
        .split_at_checked(head.len)
        .ok_or("length out of range")?;
    let line = record.strip_suffix(b"\n").ok_or("missing newline")?;
    let value = line.get(head.value..).ok_or("missing equal sign")?;
    Ok(Some((head.key, value, behind)))
}

/// The start of a record.
#[derive(Debug)]
struct Head<'a> {
    /// Bytes of the record, which include its length.
    len: usize,
    key: &'a [u8],
    /// Where its value begins.
    value: usize,
}

/// The start of the first record in `body`. `None` at the end or a NUL.
fn head(body: &[u8]) -> Result<Option<Head<'_>>, &'static str> {
    let blank = |byte: &&u8| matches!(byte, b' ' | b'\t');
    let blanks = body.iter().take_while(blank).count();
    let line = body.get(blanks..).unwrap_or_default();
    if matches!(line.first(), None | Some(0)) {
        return Ok(None);
    }
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, line) = line.split_at(digits);
    if digits.is_empty() {
        return Err("missing length");
    }
    let len = decimal(digits).and_then(|len| usize::try_from(len).ok());
    let len = len.ok_or("length out of range")?;
    let blanks = line.iter().take_while(blank).count();
    if blanks == 0 {
        return Err("missing blank after the length");
    }
    let line = line.get(blanks..).unwrap_or_default();
    let key = line.split(|&byte| byte == b'=').next().unwrap_or_default();
    let value = body.len() - line.len() + key.len() + 1;
    if key.len() == line.len() || key.contains(&0) || value >= len {
        return Err("missing equal sign");
    }
    Ok(Some(Head { len, key, value }))
}

/// Sets `field` from a value up to its first NUL. An empty one clears it, an invalid one returns why.
fn assign<T>(
    field: &mut Option<T>,
    key: &[u8],
    value: &[u8],
    parse: impl FnOnce(&[u8]) -> Option<T>,
) -> Option<Note> {
    if value.is_empty() {
        *field = None;
        return None;
    }
    match parse(text(value)) {
        None => return Some(invalid(key, value)),
        parsed => *field = parsed,
    }
    None
}

fn invalid(key: &[u8], value: &[u8]) -> Note {
    let (key, value) = (printable(key), printable(value));
    Note::Damaged(format!(
        "ignoring invalid {key}={value} in an extended header"
    ))
}

/// A text up to its first NUL; an empty one is `None`, which clears the field.
fn name(value: &[u8], limits: &Limits) -> Result<Option<Vec<u8>>, Cause> {
    let name = text(value);
    Limit::NameBytes.check(limits, name.len() as u64)?;
    Ok((!name.is_empty()).then(|| name.to_vec()))
}

fn decimal_u32(value: &[u8]) -> Option<u32> {
    decimal(value).and_then(|number| u32::try_from(number).ok())
}

/// Seconds with optional sign and fraction, down to a nanosecond. Ignores text after them, as GNU tar does.
fn time(value: &[u8]) -> Option<Timestamp> {
    let negative = value.starts_with(b"-");
    let value = value.strip_prefix(b"-").unwrap_or(value);
    let is_digit = |byte: &&u8| byte.is_ascii_digit();
    let digits = value.iter().take_while(is_digit).count();
    let (whole, rest) = value.split_at(digits);
    if whole.is_empty() {
        return None;
    }
    let whole = whole.iter().try_fold(0_i128, |seconds, &digit| {
        let seconds = seconds * 10 + i128::from(digit - b'0');
        (seconds <= 1 << 64).then_some(seconds)
    })?;
    let fraction = rest.strip_prefix(b".").unwrap_or_default();
    let digits = fraction.iter().take_while(is_digit);
    let (mut nanoseconds, mut unit, mut more) = (0_u32, 100_000_000, false);
    for &digit in digits {
        let digit = u32::from(digit - b'0');
        nanoseconds += digit * unit;
        more |= unit == 0 && digit > 0;
        unit /= 10;
    }
    let total = whole * 1_000_000_000 + i128::from(nanoseconds);
    let total = if negative {
        -total - i128::from(more)
    } else {
        total
    };
    Some(Timestamp {
        seconds: i64::try_from(total.div_euclid(1_000_000_000)).ok()?,
        nanoseconds: u32::try_from(total.rem_euclid(1_000_000_000)).ok()?,
    })
}

#[cfg(test)]
mod tests;
