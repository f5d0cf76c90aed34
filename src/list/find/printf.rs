//! The formats of `-printf` and `-ls`.

use std::borrow::Cow;
use std::io::{self, Write};

use super::strftime;
use crate::base::escape::{escape, owner_text, without_controls};
use crate::tar::Timestamp;
use crate::tree::{FileKind, Item, Metadata, Tree, is_link_loop, is_missing, mode_string};

/// A parsed format of `-printf`.
#[derive(Debug)]
pub(super) struct Format(Vec<Piece>);

#[derive(Debug)]
enum Piece {
    Text(Vec<u8>),
    Directive(Directive),
}

/// Largest width and precision. A directive writes no more than that for a short value.
const MAX_WIDTH: usize = 4096;

/// `%-10p`: a value of the file, and how it is laid out.
#[derive(Debug, Default)]
struct Directive {
    /// Some of `-0+ #`.
    flags: Vec<u8>,
    width: usize,
    precision: Option<usize>,
    letter: u8,
    /// The second letter of `%A`, `%C` and `%T`; [`CTIME`](strftime::CTIME) in other directives.
    time_field: u8,
}

impl Format {
    /// Parses a format. The error says what is wrong.
    pub(super) fn parse(format: &[u8]) -> Result<Self, String> {
        let (mut pieces, mut text) = (Vec::new(), Vec::new());
        let mut rest = format;
        while let Some((&byte, after)) = rest.split_first() {
            rest = after;
            match byte {
                b'\\' => {
                    let Some((byte, after)) = parse_escape(rest)? else {
                        break;
                    };
                    text.push(byte);
                    rest = after;
                }
                b'%' if rest.first() == Some(&b'%') => {
                    text.push(b'%');
                    rest = rest.get(1..).unwrap_or_default();
                }
                b'%' => {
                    pieces.push(Piece::Text(std::mem::take(&mut text)));
                    let (directive, after) = Directive::parse(rest)?;
                    pieces.push(Piece::Directive(directive));
                    rest = after;
                }
                byte => text.push(byte),
            }
        }
        pieces.push(Piece::Text(text));
        Ok(Self(pieces))
    }

    pub(super) fn needs_metadata(&self) -> bool {
        self.has_directive(|letter| !b"pfhPHdyl".contains(&letter))
    }

    /// Whether files behind links are examined.
    pub(super) fn examines_targets(&self) -> bool {
        self.has_directive(|letter| letter == b'Y')
    }

    fn has_directive(&self, is_wanted: impl Fn(u8) -> bool) -> bool {
        self.0.iter().any(|piece| match piece {
            Piece::Text(_) => false,
            Piece::Directive(directive) => is_wanted(directive.letter),
        })
    }

    /// Writes the values of a file. Returns the first reason for a `?` of `%Y`.
    pub(super) fn write(
        &self,
        item: &Item<'_, impl Tree>,
        is_terminal: bool,
        output: &mut Vec<u8>,
    ) -> io::Result<Option<io::Error>> {
        let mut unknown = None;
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => output.extend_from_slice(text),
                Piece::Directive(directive) => {
                    let value = directive.value(item, &mut unknown)?;
                    directive.write(&value, is_terminal, output);
                }
            }
        }
        Ok(unknown)
    }
}

/// Parses what follows a backslash. `None` for `\c`, which ends the format.
fn parse_escape(text: &[u8]) -> Result<Option<(u8, &[u8])>, String> {
    let (&letter, rest) = text
        .split_first()
        .ok_or("a backslash at its end".to_owned())?;
    let byte = match letter {
        b'a' => 7,
        b'b' => 8,
        b'c' => return Ok(None),
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'v' => 11,
        b'\\' => b'\\',
        b'0'..=b'7' => {
            let is_octal = |byte: &&u8| matches!(byte, b'0'..=b'7');
            let len = text.iter().take(3).take_while(is_octal).count();
            let (digits, rest) = text.split_at(len);
            let number = digits
                .iter()
                .fold(0_u32, |n, &digit| n * 8 + u32::from(digit - b'0'));
            return Ok(Some((number.to_le_bytes()[0], rest)));
        }
        _ => return Err(format!("unknown escape '\\{}'", escape(&[letter]))),
    };
    Ok(Some((byte, rest)))
}

fn parse_width(text: &[u8]) -> Result<(usize, &[u8]), String> {
    let len = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = text.split_at(len);
    let width = digits.iter().fold(0_usize, |width, digit| {
        (width * 10 + usize::from(digit - b'0')).min(MAX_WIDTH + 1)
    });
    if width > MAX_WIDTH {
        return Err(format!("a width above {MAX_WIDTH}"));
    }
    Ok((width, rest))
}

impl Directive {
    fn parse(mut text: &[u8]) -> Result<(Self, &[u8]), String> {
        let mut directive = Self::default();
        let is_flag = |byte: &&u8| b"-0+ #".contains(byte);
        let (flags, after) = text.split_at(text.iter().take_while(is_flag).count());
        directive.flags = flags.to_vec();
        text = after;
        (directive.width, text) = parse_width(text)?;
        if let Some(rest) = text.strip_prefix(b".") {
            let (precision, rest) = parse_width(rest)?;
            directive.precision = Some(precision);
            text = rest;
        }
        let (&letter, rest) = text.split_first().ok_or("% at its end")?;
        directive.letter = letter;
        match letter {
            b'A' | b'C' | b'T' => {
                let (&field, rest) = rest.split_first().ok_or("% at its end")?;
                if !field.is_ascii_graphic()
                    || strftime::format(Timestamp::default(), field).is_none()
                {
                    let letters = [letter, field];
                    return Err(format!("unknown directive '%{}'", escape(&letters)));
                }
                directive.time_field = field;
                Ok((directive, rest))
            }
            _ if b"abcdDfgGhHiklmMnpPstuUyY".contains(&letter) => Ok((directive, rest)),
            _ => Err(format!("unknown directive '%{}'", escape(&[letter]))),
        }
    }

    /// Writes the value, cut to the precision, and spaces up to the width.
    fn write(&self, value: &[u8], is_terminal: bool, output: &mut Vec<u8>) {
        let value = if is_terminal {
            without_controls(value)
        } else {
            value.into()
        };
        // The precision of a number is its least number of digits.
        let cut = self.precision.filter(|_| !b"dm".contains(&self.letter));
        let len = cut.unwrap_or(usize::MAX).min(value.len());
        let padding = self.width.saturating_sub(len);
        let before = if self.flags.contains(&b'-') {
            0
        } else {
            padding
        };
        output.resize(output.len() + before, b' ');
        output.extend_from_slice(value.get(..len).unwrap_or(&value));
        output.resize(output.len() + padding - before, b' ');
    }

    fn value<'i>(
        &self,
        item: &'i Item<'_, impl Tree>,
        unknown: &mut Option<io::Error>,
    ) -> io::Result<Cow<'i, [u8]>> {
        Ok(match self.letter {
            b'p' => item.path().into(),
            b'P' => below_start(item).into(),
            b'H' => item.start().into(),
            b'f' => split_path(item.path()).1.into(),
            b'h' => split_path(item.path()).0.into(),
            b'l' if item.kind() == FileKind::Symlink => item.target()?,
            b'l' => Cow::default(),
            b'y' => item.kind().letter().to_string().into_bytes().into(),
            b'Y' => target_letter(item, unknown).to_string().into_bytes().into(),
            b'd' => self.number(&item.depth().to_string()).into_bytes().into(),
            b'u' if let Some(name) = item.user()? => name,
            b'g' if let Some(name) = item.group()? => name,
            _ => self.attribute(&item.metadata()?).into_bytes().into(),
        })
    }

    fn attribute(&self, metadata: &Metadata) -> String {
        let time = |time| strftime::format(time, self.time_field).unwrap_or_default();
        match self.letter {
            b'm' => self.number(&format!("{:o}", metadata.mode & 0o7777)),
            b'M' => mode_string(metadata.kind, metadata.mode),
            b's' => metadata.size.to_string(),
            b'b' => metadata.blocks.to_string(),
            b'k' => metadata.blocks.div_ceil(2).to_string(),
            b'n' => metadata.links.to_string(),
            b'i' => metadata.inode.to_string(),
            b'D' => metadata.file_system.to_string(),
            b'u' | b'U' => metadata.uid.to_string(),
            b'g' | b'G' => metadata.gid.to_string(),
            b'a' | b'A' => time(metadata.atime),
            b'c' | b'C' => time(metadata.ctime),
            _ => time(metadata.mtime),
        }
    }

    /// A number as printf(3) writes it, but for the width.
    fn number(&self, digits: &str) -> String {
        let has = |flag| self.flags.contains(&flag);
        let sign = match self.letter {
            b'd' if has(b'+') => "+",
            b'd' if has(b' ') => " ",
            b'm' if has(b'#') && !digits.starts_with('0') => "0",
            _ => "",
        };
        let zeros_to = match self.precision {
            Some(len) => len,
            None if has(b'0') && !has(b'-') => self.width.saturating_sub(sign.len()),
            None => 0,
        };
        format!("{sign}{digits:0>zeros_to$}")
    }
}

/// The letter of the file behind a link, or why there is none.
fn target_letter(item: &Item<'_, impl Tree>, unknown: &mut Option<io::Error>) -> char {
    match item.target_kind() {
        Ok(kind) => kind.letter(),
        Err(error) if is_missing(&error) => 'N',
        Err(error) if is_link_loop(&error) => 'L',
        Err(error) => {
            unknown.get_or_insert(error);
            '?'
        }
    }
}

/// The path without the starting point, and without a slash at its start.
fn below_start<'i>(item: &'i Item<'_, impl Tree>) -> &'i [u8] {
    let below = item.path().get(item.start().len()..);
    let below = below.unwrap_or_default();
    below.strip_prefix(b"/").unwrap_or(below)
}

/// The directory, and the last component, which has the slashes behind it.
fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    let last = path.iter().rposition(|&byte| byte != b'/');
    let trimmed = last.map_or(&[][..], |last| path.get(..=last).unwrap_or_default());
    let start = trimmed.iter().rposition(|&byte| byte == b'/');
    let name = start.map_or(path, |slash| path.get(slash + 1..).unwrap_or_default());
    let directory = match start {
        Some(slash) => path.get(..slash).unwrap_or_default(),
        None if trimmed.is_empty() => b"",
        None => b".",
    };
    (directory, name)
}

pub(super) fn write_ls_line(
    item: &Item<'_, impl Tree>,
    now: Timestamp,
    output: &mut Vec<u8>,
) -> io::Result<()> {
    let metadata = item.metadata()?;
    let size = match metadata.device {
        (major, minor) if metadata.is_device() => format!("{major:>3}, {minor:>3}"),
        _ => metadata.size.to_string(),
    };
    write!(
        output,
        "{:>9} {:>6} {} {:>3} {:<8} {:<8} {size:>8} {} {}",
        metadata.inode,
        metadata.blocks.div_ceil(2),
        mode_string(metadata.kind, metadata.mode),
        metadata.links,
        owner_text(item.user()?, metadata.uid),
        owner_text(item.group()?, metadata.gid),
        strftime::format_ls(metadata.mtime, now),
        escape(item.path()),
    )?;
    if metadata.kind == FileKind::Symlink {
        write!(output, " -> {}", escape(&item.target()?))?;
    }
    output.push(b'\n');
    Ok(())
}
