//! pax headers: keywords, their values, and their meaning for a member.

use std::borrow::Cow;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use percent_encoding::percent_decode;

use super::error::{Note, printable};
use super::header::text;
use super::sparse::{SparseKeywords, decimal};
use super::{Cause, Limit, Limits, Timestamp};
use crate::base::xattr::{XATTR_NAME_MAX, XATTR_SIZE_MAX};

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

/// Collects the body of an extended header while its bytes arrive, without values that have no effect.
///
/// The limits concern the collected bytes, because neither a directory's list of names in an incremental
/// archive nor the resource fork of a file is an attack.
#[derive(Debug)]
pub(super) struct Body {
    collected: Vec<u8>,
    part: Part,
    /// Bytes at the end of `collected` that begin a record.
    prefix_len: usize,
    attribute_bytes: u64,
    notes: Vec<Note>,
}

#[derive(Clone, Copy, Debug)]
enum Part {
    /// The start of a record up to the equal sign.
    Prefix,
    /// That many more bytes of a record.
    Kept(u64),
    Skipped(u64),
}

/// Maximum bytes of a body that is collected as it is, because parsing it twice costs more than its memory.
const MAX_UNFILTERED_BYTES: u64 = 64 << 10;

/// Maximum start of a record: a length, and an attribute's name of 255 bytes in percent encoding.
const MAX_PREFIX_BYTES: usize = 4 << 10;

impl Body {
    /// Begins a body of `len` bytes. `is_pax` tells whether it has keywords.
    pub(super) fn new(len: u64, is_pax: bool, limits: &Limits) -> Self {
        let is_filtered = is_pax && len > MAX_UNFILTERED_BYTES.min(limits.pax_bytes);
        let part = if is_filtered {
            Part::Prefix
        } else {
            Part::Kept(len)
        };
        Self {
            collected: Vec::new(),
            part,
            prefix_len: 0,
            attribute_bytes: 0,
            notes: Vec::new(),
        }
    }

    /// Adds the next bytes.
    ///
    /// # Errors
    /// When more bytes than the limit have to be collected.
    pub(super) fn push(&mut self, mut bytes: &[u8], limits: &Limits) -> Result<(), Cause> {
        while let Some((&first, behind)) = bytes.split_first() {
            match self.part {
                Part::Prefix => {
                    bytes = behind;
                    self.collect(&[first], limits)?;
                    self.prefix_len += 1;
                    if first == b'=' || self.prefix_len == MAX_PREFIX_BYTES {
                        self.part = self.choose_part(limits);
                        self.prefix_len = 0;
                    }
                }
                Part::Kept(ref mut left) | Part::Skipped(ref mut left) => {
                    let len = usize::try_from(*left).unwrap_or(usize::MAX);
                    let (piece, behind) = bytes.split_at(len.min(bytes.len()));
                    bytes = behind;
                    *left -= piece.len() as u64;
                    let is_complete = *left == 0;
                    if matches!(self.part, Part::Kept(_)) {
                        self.collect(piece, limits)?;
                    }
                    if is_complete {
                        self.part = Part::Prefix;
                    }
                }
            }
        }
        Ok(())
    }

    /// The collected bytes, and notes about attributes that were left out.
    pub(super) fn finish(self) -> (Vec<u8>, Vec<Note>) {
        (self.collected, self.notes)
    }

    fn collect(&mut self, bytes: &[u8], limits: &Limits) -> Result<(), Cause> {
        Limit::PaxBytes.check(limits, (self.collected.len() + bytes.len()) as u64)?;
        self.collected.extend_from_slice(bytes);
        Ok(())
    }

    /// Decides by the keyword whether its value is collected, and removes the keyword if not. Collects nothing
    /// after malformed framing or the last record, because nothing after them is read.
    fn choose_part(&mut self, limits: &Limits) -> Part {
        let start = self.collected.len() - self.prefix_len;
        let prefix = self.collected.get(start..).unwrap_or_default();
        let Ok(Some(head)) = head(prefix) else {
            return Part::Skipped(u64::MAX);
        };
        let left = head.len.saturating_sub(prefix.len()) as u64;
        let is_kept = match Field::of(head.key) {
            // Malformed.
            _ if left == 0 => return Part::Skipped(u64::MAX),
            None => false,
            Some(Field::Attribute(attribute)) => {
                let bytes = self.attribute_bytes.saturating_add(left);
                // As text and in base64, values are longer than in an index.
                let is_kept = bytes <= limits.xattr_bytes.saturating_mul(2);
                if is_kept {
                    self.attribute_bytes = bytes;
                } else {
                    add_note(&mut self.notes, attribute.left_out());
                }
                is_kept
            }
            Some(_) => true,
        };
        if is_kept {
            return Part::Kept(left);
        }
        self.collected.truncate(start);
        Part::Skipped(left)
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
mod tests {
    use super::*;

    fn read(body: &[u8]) -> (Keywords, Vec<Note>) {
        let (mut keywords, mut notes) = (Keywords::default(), Vec::new());
        let read = keywords.read(body, &Limits::default(), &mut notes);
        assert_eq!(read, Ok(()));
        (keywords, notes)
    }

    // Promises: gnu-pax-unknown, gnu-pax-known
    #[test]
    fn unknown_keywords_are_ignored_in_silence_and_star_s_are_known() {
        let body = b"17 comment=a b c\n21 SCHILY.devmajor=8\n21 SCHILY.devminor=1\n";
        let (keywords, notes) = read(body);
        assert_eq!((keywords.major, keywords.minor), (Some(8), Some(1)));
        assert!(notes.is_empty(), "{notes:?}");
    }

    #[test]
    fn values_may_hold_equal_signs_newlines_and_nuls() {
        let (keywords, notes) = read(b"30 SCHILY.xattr.user.k=a=b\nc\0\n9 path=x\n");
        assert_eq!(
            keywords.xattrs,
            [(b"user.k".to_vec(), b"a=b\nc\0".to_vec())]
        );
        assert_eq!(keywords.path, Some(b"x".to_vec()));
        assert_eq!(notes, []);
    }

    #[test]
    fn malformed_framing_keeps_what_came_before() {
        let malformed: [&[u8]; 8] = [
            b"9 path=x\nzz",
            b"9 path=x\n6 abc\n",
            b"9 path=x\n99 path=y\n",
            b"9 path=x\n8 path=y",
            b"9 path=x\n12 path\0=xyz\n",
            b"9 path=x\n0 path=y\n",
            b"9 path=x\n99999999999999999999999 path=y\n",
            b"9 path=x\n5path\n",
        ];
        for body in malformed {
            let (keywords, notes) = read(body);
            assert_eq!(keywords.path, Some(b"x".to_vec()), "{body:?}");
            assert!(
                matches!(notes[..], [Note::Damaged(_)]),
                "{body:?} {notes:?}"
            );
        }
    }

    #[test]
    fn a_nul_ends_the_body() {
        let (keywords, notes) = read(b"9 path=x\n\0\0garbage");
        assert_eq!(keywords.path, Some(b"x".to_vec()));
        assert_eq!(notes, []);
    }

    // Promises: gnu-pax-empty
    #[test]
    fn an_empty_value_deletes_what_was_set() {
        let (keywords, notes) = read(b"9 path=x\n8 path=\n8 uid=7\n7 uid=\n");
        assert_eq!((keywords.path, keywords.uid), (None, None));
        assert_eq!(notes, []);
    }

    #[test]
    fn an_empty_extended_attribute_is_one() {
        let (keywords, _) = read(b"24 SCHILY.xattr.user.k=\n");
        assert_eq!(keywords.xattrs, [(b"user.k".to_vec(), Vec::new())]);
    }

    #[test]
    fn numbers_out_of_range_leave_the_field_alone() {
        let (keywords, notes) = read(b"18 uid=5000000000\n9 gid=-1\n28 size=9223372036854775808\n");
        assert_eq!(
            (keywords.uid, keywords.gid, keywords.size),
            (None, None, None)
        );
        assert_eq!(notes.len(), 3);
    }

    #[test]
    fn names_end_at_a_nul() {
        let (keywords, _) = read(b"16 path=foo\0bar\n");
        assert_eq!(keywords.path, Some(b"foo".to_vec()));
    }

    #[test]
    fn times_are_rounded_down_to_a_nanosecond() {
        let at = |seconds, nanoseconds| {
            Some(Timestamp {
                seconds,
                nanoseconds,
            })
        };
        assert_eq!(time(b"1"), at(1, 0));
        assert_eq!(time(b"1."), at(1, 0));
        assert_eq!(time(b"1.5"), at(1, 500_000_000));
        assert_eq!(time(b"1.1234567899"), at(1, 123_456_789));
        assert_eq!(time(b"-1.5"), at(-2, 500_000_000));
        assert_eq!(time(b"-0.25"), at(-1, 750_000_000));
        assert_eq!(time(b"-1.1234567891"), at(-2, 876_543_210));
        assert_eq!(time(b"-0.9999999999"), at(-1, 0));
        assert_eq!(time(b"1e3"), at(1, 0));
        assert_eq!(time(b"-9223372036854775808"), at(i64::MIN, 0));
        for none in [&b""[..], b".5", b"+1", b" 1", b"-", b"9223372036854775808"] {
            assert_eq!(time(none), None, "{none:?}");
        }
    }

    // Promises: gnu-pax-known
    #[test]
    fn both_xattr_keywords_set_the_same_attribute() {
        let body = b"29 SCHILY.xattr.user.a%3Db=1\n34 LIBARCHIVE.xattr.user.a%3Db=Mg\n";
        let (keywords, notes) = read(body);
        assert_eq!(notes, []);
        assert_eq!(keywords.xattrs, [(b"user.a=b".to_vec(), b"2".to_vec())]);
    }

    #[test]
    fn base64_is_read_with_and_without_padding() {
        let decoded = |text: &[u8]| BASE64.decode(text).ok();
        assert_eq!(decoded(b"aGVsbG8="), Some(b"hello".to_vec()));
        assert_eq!(decoded(b"aGVsbG8"), Some(b"hello".to_vec()));
        assert_eq!(decoded(b"aGVsbG9"), Some(b"hello".to_vec()));
        assert_eq!(decoded(b"+/9A"), Some(vec![0xfb, 0xff, 0x40]));
        assert_eq!(decoded(b""), Some(Vec::new()));
        for none in [&b"a"[..], b"a===", b"a b=", b"=aaa"] {
            assert_eq!(decoded(none), None, "{none:?}");
        }
    }

    #[test]
    fn an_selinux_context_ends_in_a_nul() {
        let (keywords, _) = read(b"28 RHT.security.selinux=ctx\n");
        let context = (b"security.selinux".to_vec(), b"ctx\0".to_vec());
        assert_eq!(keywords.xattrs, [context]);
    }

    #[test]
    fn acls_stay_text_under_their_keyword() {
        let (keywords, _) = read(b"31 SCHILY.acl.access=user::rwx\n");
        let acl = (b"SCHILY.acl.access".to_vec(), b"user::rwx".to_vec());
        assert_eq!(keywords.xattrs, [acl]);
    }

    // Promises: limit-xattrs
    #[test]
    fn extended_attributes_beyond_a_limit_are_left_out() {
        let body = b"25 SCHILY.xattr.user.a=1\n25 SCHILY.xattr.user.b=1\n9 path=x\n";
        let names = |limits: Limits| {
            let (mut keywords, mut notes) = (Keywords::default(), Vec::new());
            assert_eq!(keywords.read(body, &limits, &mut notes), Ok(()));
            assert_eq!(keywords.path, Some(b"x".to_vec()));
            let names = keywords.xattrs.into_iter().map(|(name, _)| name);
            (names.collect::<Vec<_>>().concat(), notes)
        };
        let left_out = Note::Warning(
            "leaving out the extended attribute user.b, which is too large".to_owned(),
        );
        let attributes = |xattrs| Limits {
            xattrs,
            ..Limits::default()
        };
        assert_eq!(
            names(attributes(1)),
            (b"user.a".to_vec(), vec![left_out.clone()])
        );
        assert_eq!(names(attributes(2)), (b"user.auser.b".to_vec(), vec![]));
        // Names count as well as values.
        let bytes = |xattr_bytes| Limits {
            xattr_bytes,
            ..Limits::default()
        };
        assert_eq!(names(bytes(13)), (b"user.a".to_vec(), vec![left_out]));
        assert_eq!(names(bytes(14)), (b"user.auser.b".to_vec(), vec![]));
    }

    // Promises: xattr-impossible
    #[test]
    fn value_too_long_for_linux_is_left_out() {
        let attribute = |len: usize| {
            let rest = [&b" SCHILY.xattr.user.a="[..], &vec![b'x'; len], b"\n"].concat();
            let body = [(rest.len() + 5).to_string().into_bytes(), rest].concat();
            let (keywords, notes) = read(&body);
            (keywords.xattrs.len(), notes.len())
        };
        assert_eq!(attribute(XATTR_SIZE_MAX), (1, 0));
        assert_eq!(attribute(XATTR_SIZE_MAX + 1), (0, 1));
    }

    fn record(key: &str, value: &[u8]) -> Vec<u8> {
        let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
        let mut len = rest.len();
        while len.to_string().len() + rest.len() != len {
            len += 1;
        }
        [len.to_string().into_bytes(), rest].concat()
    }

    /// The collected bytes of a filtered body, and how many notes there are.
    fn collect(body: &[u8], piece: usize) -> (Vec<u8>, usize) {
        let limits = Limits {
            pax_bytes: 8 << 10,
            xattr_bytes: 100,
            ..Limits::default()
        };
        let mut collected = Body::new(body.len() as u64, true, &limits);
        for piece in body.chunks(piece) {
            assert_eq!(collected.push(piece, &limits), Ok(()));
        }
        let (bytes, notes) = collected.finish();
        (bytes, notes.len())
    }

    #[test]
    fn long_values_without_effect_are_not_collected() {
        let first = record("path", b"x");
        let last = record("SCHILY.xattr.user.a", b"1");
        let body = [
            first.clone(),
            record("GNU.dumpdir", &[b'Y'; 5000]),
            record("SCHILY.xattr.com.apple.ResourceFork", &[b'f'; 5000]),
            last.clone(),
        ]
        .concat();
        for piece in [1, 7, 512, body.len()] {
            assert_eq!(collect(&body, piece), ([&*first, &last].concat(), 1));
        }
    }

    #[test]
    fn notes_about_one_header_are_limited() {
        let attribute = record("SCHILY.xattr.user.a", &[b'x'; 300]);
        let body = [attribute.clone(), b"10 uid=no\n".repeat(1000)].concat();
        let (_, notes) = read(&body);
        assert_eq!(notes.len(), MAX_NOTES + 1);
        assert!(matches!(notes.last(), Some(Note::Damaged(_))));
        let (collected, notes) = collect(&attribute.repeat(10_000), 4096);
        assert_eq!(collected, b"");
        assert_eq!(notes, MAX_NOTES + 1);
    }

    #[test]
    fn nothing_is_collected_after_malformed_framing() {
        let junk = vec![b'j'; 9000];
        for malformed in [
            &b"9 path=x\n5=====\n"[..],
            b"9 path=x\njunk",
            b"9 path=x\n\0",
        ] {
            let body = [malformed, &junk].concat();
            for piece in [1, 700, body.len()] {
                let (collected, notes) = collect(&body, piece);
                assert!(collected.len() <= malformed.len() + MAX_PREFIX_BYTES);
                assert_eq!(notes, 0);
                let (keywords, notes) = read(&collected);
                assert_eq!(keywords.path, Some(b"x".to_vec()));
                assert_eq!(notes.is_empty(), malformed.ends_with(b"\0"), "{notes:?}");
            }
        }
    }
}
