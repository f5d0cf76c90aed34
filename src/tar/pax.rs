//! pax headers: keywords, their values, and their meaning for a member.

use super::error::{Note, printable};
use super::header::text;
use super::sparse::{SparseKeywords, decimal};
use super::{Cause, Limit, Limits, Timestamp};

/// Values from pax headers. `None` leaves the header's own field in force.
#[derive(Clone, Debug, Default)]
pub(super) struct Keywords {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) user: Option<Vec<u8>>,
    pub(super) group: Option<Vec<u8>>,
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
                    notes.push(Note::Damaged(text));
                    return Ok(());
                }
            }
        }
    }

    /// Bytes of names and values.
    pub(super) fn bytes(&self) -> u64 {
        let texts = [&self.path, &self.link, &self.user, &self.group];
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
        let mut report = |note: Option<Note>| notes.extend(note);
        match key {
            b"path" => self.path = name(value, limits)?,
            b"linkpath" => self.link = name(value, limits)?,
            b"uname" => self.user = Some(name(value, limits)?.unwrap_or_default()),
            b"gname" => self.group = Some(name(value, limits)?.unwrap_or_default()),
            b"size" => report(assign(&mut self.size, key, value, decimal)),
            b"uid" => report(assign(&mut self.uid, key, value, decimal_u32)),
            b"gid" => report(assign(&mut self.gid, key, value, decimal_u32)),
            b"mtime" => report(assign(&mut self.mtime, key, value, time)),
            b"SCHILY.devmajor" => report(assign(&mut self.major, key, value, decimal_u32)),
            b"SCHILY.devminor" => report(assign(&mut self.minor, key, value, decimal_u32)),
            b"SCHILY.realsize" => report(assign(&mut self.sparse.size, key, value, decimal)),
            b"SCHILY.acl.access" | b"SCHILY.acl.default" => self.acl(key, value, limits)?,
            b"RHT.security.selinux" => {
                // The kernel stores the context as a C string.
                let context = [text(value), b"\0"].concat();
                self.xattr(b"security.selinux".to_vec(), context, limits)?;
            }
            _ => {
                if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    report(self.sparse(key, value, limits)?);
                } else if let Some(key) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattr(percent_decoded(key), value.to_vec(), limits)?;
                } else if let Some(key) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    match base64(value) {
                        Some(value) => self.xattr(percent_decoded(key), value, limits)?,
                        None => report(Some(invalid(key, value))),
                    }
                }
            }
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

    fn acl(&mut self, key: &[u8], value: &[u8], limits: &Limits) -> Result<(), Cause> {
        if value.is_empty() {
            self.xattrs.retain(|(other, _)| other != key);
            return Ok(());
        }
        self.xattr(key.to_vec(), value.to_vec(), limits)
    }

    /// Sets an extended attribute, possibly an empty one; a later value replaces an earlier one.
    fn xattr(&mut self, key: Vec<u8>, value: Vec<u8>, limits: &Limits) -> Result<(), Cause> {
        self.xattrs.retain(|(other, _)| *other != key);
        self.xattrs.push((key, value));
        Limit::Xattrs.check(limits, self.xattrs.len() as u64)?;
        Limit::XattrBytes.check(limits, xattr_bytes(&self.xattrs))
    }
}

pub(super) fn xattr_bytes(xattrs: &[(Vec<u8>, Vec<u8>)]) -> u64 {
    let lens = xattrs.iter().map(|(key, value)| key.len() + value.len());
    lens.sum::<usize>() as u64
}

type Keyword<'a> = (&'a [u8], &'a [u8], &'a [u8]);

/// Splits off the first `length key=value\n`, whose length includes itself. `None` at the end or a NUL.
fn keyword(body: &[u8]) -> Result<Option<Keyword<'_>>, &'static str> {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = body.iter().position(|byte| !blank(byte));
    let line = start
        .and_then(|start| body.get(start..))
        .unwrap_or_default();
    if matches!(line.first(), None | Some(0)) {
        return Ok(None);
    }
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, line) = line.split_at(digits);
    if digits.is_empty() {
        return Err("missing length");
    }
    let len = decimal(digits).and_then(|len| usize::try_from(len).ok());
    let (record, behind) = len
        .and_then(|len| body.split_at_checked(len))
        .ok_or("length out of range")?;
    let head = body.len() - line.len();
    if !line.first().is_some_and(blank) {
        return Err("missing blank after the length");
    }
    let line = record.get(head..).ok_or("missing equal sign")?;
    let line = line.strip_suffix(b"\n").ok_or("missing newline")?;
    let key_start = line.iter().position(|byte| !blank(byte));
    let line = key_start
        .and_then(|start| line.get(start..))
        .unwrap_or_default();
    let equals = line.iter().position(|&byte| byte == b'=');
    let (key, value) = equals
        .and_then(|equals| line.split_at_checked(equals))
        .filter(|(key, _)| !key.contains(&0))
        .ok_or("missing equal sign")?;
    let value = value.get(1..).unwrap_or_default();
    Ok(Some((key, value, behind)))
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

/// Decodes `%3D` and so on. A `%` without two hexadecimal digits stays.
fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let hex = |byte: Option<&u8>| byte.and_then(|&byte| char::from(byte).to_digit(16));
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, behind)) = rest.split_first() {
        let code = match (byte, hex(behind.first()), hex(behind.get(1))) {
            (b'%', Some(high), Some(low)) => u8::try_from(high << 4 | low).ok(),
            _ => None,
        };
        decoded.push(code.unwrap_or(byte));
        let taken = if code.is_some() { 2 } else { 0 };
        rest = behind.get(taken..).unwrap_or_default();
    }
    decoded
}

/// With or without padding.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let padding = text.iter().rev().take_while(|&&byte| byte == b'=').count();
    let digits = text.get(..text.len() - padding)?;
    if padding > 2 || digits.len() % 4 == 1 {
        return None;
    }
    let mut decoded = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let bits = group.iter().try_fold(0_u32, |bits, &byte| {
            let digit = match byte {
                b'A'..=b'Z' => byte - b'A',
                b'a'..=b'z' => byte - b'a' + 26,
                b'0'..=b'9' => byte - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            Some(bits << 6 | u32::from(digit))
        })?;
        let bits = bits << (6 * (4 - group.len()));
        let [_, bytes @ ..] = bits.to_be_bytes();
        decoded.extend_from_slice(bytes.get(..group.len() - 1)?);
    }
    Some(decoded)
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

    #[test]
    fn both_xattr_keywords_set_the_same_attribute() {
        let body = b"29 SCHILY.xattr.user.a%3Db=1\n34 LIBARCHIVE.xattr.user.a%3Db=Mg\n";
        let (keywords, notes) = read(body);
        assert_eq!(notes, []);
        assert_eq!(keywords.xattrs, [(b"user.a=b".to_vec(), b"2".to_vec())]);
    }

    #[test]
    fn base64_is_read_with_and_without_padding() {
        assert_eq!(base64(b"aGVsbG8="), Some(b"hello".to_vec()));
        assert_eq!(base64(b"aGVsbG8"), Some(b"hello".to_vec()));
        assert_eq!(base64(b"+/9A"), Some(vec![0xfb, 0xff, 0x40]));
        assert_eq!(base64(b""), Some(Vec::new()));
        for none in [&b"a"[..], b"a===", b"a b=", b"=aaa"] {
            assert_eq!(base64(none), None, "{none:?}");
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

    #[test]
    fn extended_attributes_have_a_limit() {
        let body = b"25 SCHILY.xattr.user.a=1\n25 SCHILY.xattr.user.b=1\n";
        let exceeded = |limits| {
            let read = Keywords::default().read(body, &limits, &mut Vec::new());
            read.err().map(|cause| match cause {
                Cause::LimitExceeded { which, .. } => which,
                other => panic!("{other}"),
            })
        };
        let attributes = |xattrs| Limits {
            xattrs,
            ..Limits::default()
        };
        assert_eq!(exceeded(attributes(1)), Some(Limit::Xattrs));
        assert_eq!(exceeded(attributes(2)), None);
        // Keys count as well as values.
        let bytes = |xattr_bytes| Limits {
            xattr_bytes,
            ..Limits::default()
        };
        assert_eq!(exceeded(bytes(13)), Some(Limit::XattrBytes));
        assert_eq!(exceeded(bytes(14)), None);
    }
}
