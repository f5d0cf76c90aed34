//! The primaries of expressions, and their arguments.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::dialect::Dialect;
use super::evaluate::{ACCESS, Action, CHANGE, MODIFICATION, Node, Owner, Test, TimeField};
use super::number::{DAY, MINUTE, NumericTest, Size, TimeRange, nanoseconds, parse_digits};
use super::parse::{Error, Parser, invalid, text, unknown};
use super::pattern::{Pattern, Regex, to_text};
use super::permissions::Permissions;
use super::printf::Format;
use crate::base::error_chain::error_chain;
use crate::base::escape::escape;
use crate::base::time::parse_rfc3339;
use crate::tar::Timestamp;
use crate::tree::{FileKind, FollowedLinks, Metadata};

type Parsed = Result<Option<Node>, Error>;

/// Why a primary of GNU find is refused.
fn refusal(primary: &str) -> Option<&'static str> {
    Some(match primary {
        "-exec" | "-execdir" | "-ok" | "-okdir" => {
            "tarfs find runs no programs; write -print0 into `xargs -0`"
        }
        "-delete" => "tarfs find changes nothing",
        "-fprint" | "-fprint0" | "-fprintf" | "-fls" => {
            "tarfs find writes only to its standard output"
        }
        "-H" | "-L" => "it comes before SOURCE",
        "-readable" | "-writable" | "-executable" => {
            "access depends on the mount and its caller; test the bits with -perm"
        }
        "-fstype" => "an archive has no file system type",
        "-context" => "labels of SELinux are not examined",
        "-files0-from" => "starting points are arguments before the expression",
        _ => return None,
    })
}

impl Parser<'_> {
    /// Parses a primary behind its name.
    pub(super) fn primary(&mut self, name: &str) -> Result<Node, Error> {
        let groups = [
            Self::option,
            Self::name_test,
            Self::attribute_test,
            Self::time_test,
            Self::action,
        ];
        for group in groups {
            if let Some(node) = group(self, name)? {
                return Ok(node);
            }
        }
        Err(match refusal(name) {
            Some(reason) => unsupported(name, reason),
            None => unknown(name),
        })
    }

    fn option(&mut self, name: &str) -> Parsed {
        let depth = |parser: &mut Self| {
            let parse = |text: &str| usize::try_from(parse_digits(text)?).ok();
            parser.parsed(name, "expected a number without a sign", parse)
        };
        match name {
            "-maxdepth" => self.options.max_depth = Some(depth(self)?),
            "-mindepth" => self.options.min_depth = depth(self)?,
            "-depth" | "-d" => self.options.is_depth_first = true,
            "-xdev" | "-mount" => self.options.is_one_file_system = true,
            "-follow" => self.options.links = FollowedLinks::All,
            "-daystart" => {
                // Ages count from the end of today.
                let now = nanoseconds(self.context.now);
                self.day_start = now - now.rem_euclid(DAY);
            }
            "-regextype" => {
                let expected = format!("expected one of {}", Dialect::NAMES);
                self.dialect = self.parsed(name, &expected, Dialect::from_name)?;
            }
            "-true" | "-noleaf" | "-warn" | "-nowarn" | "-ignore_readdir_race" => {}
            "-false" => return Ok(Some(Node::Constant(false))),
            _ => return Ok(None),
        }
        Ok(Some(Node::Constant(true)))
    }

    fn name_test(&mut self, name: &str) -> Parsed {
        let pattern = |parser: &mut Self, ignores_case| {
            let pattern = parser.argument(name)?;
            Ok(Pattern::new(pattern.as_bytes(), ignores_case))
        };
        Ok(Some(Node::Test(match name {
            "-name" => Test::Name(pattern(self, false)?),
            "-iname" => Test::Name(pattern(self, true)?),
            "-path" | "-wholename" => Test::Path(pattern(self, false)?),
            "-ipath" | "-iwholename" => Test::Path(pattern(self, true)?),
            "-lname" => Test::Target(pattern(self, false)?),
            "-ilname" => Test::Target(pattern(self, true)?),
            "-regex" | "-iregex" => {
                let pattern = self.argument(name)?;
                let compiled = self.dialect.translate(&to_text(pattern.as_bytes()));
                let compiled = compiled.and_then(|regex| Regex::new(&regex, name == "-iregex"));
                Test::Regex(compiled.map_err(|reason| invalid(name, pattern, &reason))?)
            }
            "-type" => Test::Kind(self.kinds(name)?),
            "-xtype" => {
                self.options.examines_targets = true;
                Test::OtherKind(self.kinds(name)?)
            }
            _ => return Ok(None),
        })))
    }

    fn kinds(&mut self, name: &str) -> Result<Vec<FileKind>, Error> {
        let expected = "expected different letters of b, c, d, f, l, p, s with commas between them";
        self.parsed(name, expected, parse_kinds)
    }

    fn attribute_test(&mut self, name: &str) -> Parsed {
        let number = |parser: &mut Self, field: fn(&Metadata) -> u64| -> Result<Test, Error> {
            let wanted = parser.parsed(name, "expected N, +N or -N", NumericTest::parse)?;
            Ok(Test::Number(field, wanted))
        };
        Ok(Some(Node::Test(match name {
            "-size" => {
                let expected = "expected N, +N or -N and perhaps a unit: c, w, b, k, M or G";
                Test::Size(self.parsed(name, expected, Size::parse)?)
            }
            "-perm" => {
                let expected = "expected an octal or a symbolic mode, perhaps after - or /";
                Test::Permissions(self.parsed(name, expected, Permissions::parse)?)
            }
            "-user" => {
                let user = self.argument(name)?.as_bytes();
                let owner = owner(user, self.context.accounts.user(user));
                self.note_unknown(&owner, user, "a known user");
                Test::User(owner)
            }
            "-group" => {
                let group = self.argument(name)?.as_bytes();
                let owner = owner(group, self.context.accounts.group(group));
                self.note_unknown(&owner, group, "an existing group");
                Test::Group(owner)
            }
            "-uid" => number(self, |file| file.uid.into())?,
            "-gid" => number(self, |file| file.gid.into())?,
            "-nouser" => Test::NoUser,
            "-nogroup" => Test::NoGroup,
            "-links" => number(self, |file| file.links)?,
            "-inum" => number(self, |file| file.inode)?,
            "-used" => {
                let wanted = self.parsed(name, "expected N, +N or -N", NumericTest::parse)?;
                Test::Used(wanted)
            }
            "-empty" => Test::Empty,
            "-samefile" => Test::SameFile(self.reference(name)?.id()),
            _ => return Ok(None),
        })))
    }

    fn note_unknown(&mut self, owner: &Owner, name: &[u8], what: &str) {
        if owner.id.is_none() {
            let name = escape(name);
            let text = format!("'{name}' is not the name of {what}");
            self.unknown_owner.get_or_insert(text);
        }
    }

    fn time_test(&mut self, name: &str) -> Parsed {
        let (field, unit) = match name {
            "-atime" => (ACCESS, DAY),
            "-ctime" => (CHANGE, DAY),
            "-mtime" => (MODIFICATION, DAY),
            "-amin" => (ACCESS, MINUTE),
            "-cmin" => (CHANGE, MINUTE),
            "-mmin" => (MODIFICATION, MINUTE),
            _ => return self.newer(name),
        };
        let day_start = self.day_start;
        let parse = |text: &str| TimeRange::parse_age(text, unit, day_start);
        let range = self.parsed(name, "expected N, +N or -N", parse)?;
        Ok(Some(Node::Test(Test::Time(field, range))))
    }

    /// `-newer`, `-anewer`, `-cnewer` and `-newerXY`.
    fn newer(&mut self, name: &str) -> Parsed {
        let letters = match name {
            "-newer" => "mm",
            "-anewer" => "am",
            "-cnewer" => "cm",
            _ => name.strip_prefix("-newer").unwrap_or_default(),
        };
        let mut letters = letters.chars();
        let (Some(field), Some(reference), None) = (letters.next(), letters.next(), letters.next())
        else {
            return Ok(None);
        };
        if field == 'B' || reference == 'B' {
            return Err(unsupported(name, "times of birth are not examined"));
        }
        let Some(field) = time_field(field) else {
            return Ok(None);
        };
        let time = match time_field(reference) {
            Some(field) => field(&self.reference(name)?),
            None if reference == 't' => {
                let expected = "expected a time such as 2026-05-20, 2026-05-20T16:27:29Z or @0";
                self.parsed(name, expected, parse_time)?
            }
            None => return Ok(None),
        };
        let range = TimeRange::After(nanoseconds(time));
        Ok(Some(Node::Test(Test::Time(field, range))))
    }

    fn reference(&mut self, name: &str) -> Result<Metadata, Error> {
        let path = self.argument(name)?;
        let follows = self.options.links != FollowedLinks::None;
        (self.context.metadata)(Path::new(path), follows).map_err(|error| {
            let (path, reason) = (text(path), error_chain(&error));
            Error(format!("cannot examine '{path}': {reason}"))
        })
    }

    fn action(&mut self, name: &str) -> Parsed {
        let action = match name {
            "-print" => Action::Print(b'\n'),
            "-print0" => Action::Print(0),
            "-printf" => {
                let format = self.argument(name)?;
                let parsed = Format::parse(format.as_bytes());
                let parsed = parsed.map_err(|reason| invalid(name, format, &reason))?;
                self.options.examines_targets |= parsed.examines_targets();
                Action::Format(parsed)
            }
            "-ls" => Action::Ls(self.context.now),
            "-prune" => Action::Prune,
            "-quit" => Action::Quit,
            _ => return Ok(None),
        };
        self.has_action |= !matches!(action, Action::Prune | Action::Quit);
        Ok(Some(Node::Action(action)))
    }
}

fn unsupported(primary: &str, reason: &str) -> Error {
    Error(format!("'{primary}' is not supported: {reason}"))
}

fn parse_kinds(text: &str) -> Option<Vec<FileKind>> {
    let kind = |text: &str| {
        let letter: char = text.parse().ok()?;
        let has_letter = |kind: &FileKind| kind.letter() == letter;
        FileKind::ALL.into_iter().find(has_letter)
    };
    let kinds: Vec<_> = text.split(',').map(kind).collect::<Option<_>>()?;
    let is_new =
        |(number, kind): (usize, &FileKind)| !kinds.iter().take(number).any(|other| other == kind);
    kinds.iter().enumerate().all(is_new).then_some(kinds)
}

fn time_field(letter: char) -> Option<TimeField> {
    match letter {
        'a' => Some(ACCESS),
        'c' => Some(CHANGE),
        'm' => Some(MODIFICATION),
        _ => None,
    }
}

/// An owner by name or by number. A name that this machine does not know may be one of the archive's.
fn owner(word: &[u8], id: Option<u32>) -> Owner {
    let number = || std::str::from_utf8(word).ok().and_then(parse_digits);
    let number = id.is_none().then(number).flatten();
    let number = number.and_then(|number| u32::try_from(number).ok());
    Owner {
        name: number.is_none().then(|| word.to_vec()),
        id: id.or(number),
    }
}

/// Parses a time of RFC 3339, perhaps without its zone, which is UTC then, or its clock; or `@` and seconds.
fn parse_time(text: &str) -> Option<Timestamp> {
    if let Some(seconds) = text.strip_prefix('@') {
        return Some(Timestamp {
            seconds: seconds.parse().ok()?,
            nanoseconds: 0,
        });
    }
    let text = text.replacen(' ', "T", 1);
    let (seconds, nanoseconds) = ["", "Z", ":00Z", "T00:00:00Z"]
        .iter()
        .find_map(|end| parse_rfc3339(&format!("{text}{end}")))?;
    Some(Timestamp {
        seconds,
        nanoseconds,
    })
}
