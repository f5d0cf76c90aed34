//! Translates the regular expressions of GNU find to the syntax of the crate `regex`.

use std::fmt::Write;

use super::number::parse_digits;

/// A syntax of `-regextype`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Dialect {
    /// `+` and `?` are operators, `\|`, `\(` and `\)` too. No intervals, and no classes in brackets. `.` matches no
    /// newline.
    Emacs,
    /// The same, but `.` matches a newline.
    Findutils,
    /// `\+`, `\?`, `\|`, `\(`, `\)`, `\{` and `\}` are operators.
    Basic,
    /// The same without backslashes.
    Extended,
}

impl Dialect {
    pub(super) const NAMES: &str = "findutils-default, emacs, posix-basic, ed, sed, posix-extended, \
                                    posix-egrep, egrep";

    pub(super) fn from_name(name: &str) -> Option<Self> {
        match name {
            "emacs" => Some(Self::Emacs),
            "findutils-default" => Some(Self::Findutils),
            "posix-basic" | "ed" | "sed" => Some(Self::Basic),
            "posix-extended" | "posix-egrep" | "egrep" => Some(Self::Extended),
            _ => None,
        }
    }

    /// Translates `pattern`. The error says what is wrong.
    pub(super) fn translate(self, pattern: &str) -> Result<String, String> {
        let mut translation = Translation {
            dialect: self,
            rest: pattern,
            output: String::new(),
            groups: Vec::new(),
            atom: None,
            repetitions: 0,
            is_start: true,
        };
        while let Some(token) = translation.next_token()? {
            translation.push(token)?;
        }
        if translation.groups.is_empty() {
            Ok(translation.output)
        } else {
            Err("a parenthesis is not closed".to_owned())
        }
    }
}

/// Groups in each other, and operators behind each other.
const MAX_NESTING: usize = 200;

enum Token {
    Literal(char),
    /// One character of a class, in the output's syntax.
    Class(String),
    /// A position, likewise.
    Position(&'static str),
    /// An operator behind what it repeats, the character that stands for it otherwise, and likewise.
    Repeat(char, String),
    Open,
    Close,
    Alternate,
}

struct Translation<'a> {
    dialect: Dialect,
    rest: &'a str,
    output: String,
    /// Where the open groups start in the output.
    groups: Vec<usize>,
    /// Where the last thing that can be repeated starts.
    atom: Option<usize>,
    /// Number of operators behind it.
    repetitions: usize,
    /// Whether nothing precedes in this alternative.
    is_start: bool,
}

impl Translation<'_> {
    fn next(&mut self) -> Option<char> {
        let mut characters = self.rest.chars();
        let next = characters.next();
        self.rest = characters.as_str();
        next
    }

    fn is_posix(&self) -> (bool, bool) {
        let dialect = self.dialect;
        (dialect == Dialect::Basic, dialect == Dialect::Extended)
    }

    fn skip(&mut self, prefix: &str) -> bool {
        let rest = self.rest.strip_prefix(prefix);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn next_token(&mut self) -> Result<Option<Token>, String> {
        let (is_basic, is_extended) = self.is_posix();
        let Some(character) = self.next() else {
            return Ok(None);
        };
        Ok(Some(match character {
            '\\' => self.escape()?,
            '.' if self.dialect == Dialect::Emacs => Token::Class(r"[^\n]".to_owned()),
            '.' => Token::Class("(?s:.)".to_owned()),
            '[' => Token::Class(self.bracket()?),
            '*' => Token::Repeat('*', "*".to_owned()),
            '+' | '?' if !is_basic => Token::Repeat(character, character.to_string()),
            '(' if is_extended => Token::Open,
            ')' if is_extended && !self.groups.is_empty() => Token::Close,
            '|' if is_extended => Token::Alternate,
            '{' if is_extended => Token::Repeat('{', self.interval("}")?),
            '^' if is_extended || self.is_start => Token::Position("^"),
            '$' if is_extended || self.is_end() => Token::Position("$"),
            literal => Token::Literal(literal),
        }))
    }

    /// Whether a `$` is at the end of its alternative.
    fn is_end(&self) -> bool {
        self.rest.is_empty() || self.rest.starts_with(r"\)") || self.rest.starts_with(r"\|")
    }

    fn escape(&mut self) -> Result<Token, String> {
        let (is_basic, is_extended) = self.is_posix();
        let character = self.next().ok_or("a backslash at its end")?;
        Ok(match character {
            '1'..='9' => return Err("back-references are not supported".to_owned()),
            'w' | 'W' | 's' | 'S' => Token::Class(format!("\\{character}")),
            'b' => Token::Position(r"\b"),
            'B' => Token::Position(r"\B"),
            '<' => Token::Position(r"\b{start}"),
            '>' => Token::Position(r"\b{end}"),
            '`' => Token::Position(r"\A"),
            '\'' => Token::Position(r"\z"),
            '(' if !is_extended => Token::Open,
            ')' if !is_extended => Token::Close,
            '|' if !is_extended => Token::Alternate,
            '+' | '?' if is_basic => Token::Repeat(character, character.to_string()),
            '{' if is_basic => Token::Repeat('{', self.interval(r"\}")?),
            literal => Token::Literal(literal),
        })
    }

    /// The rest of an interval, such as `2,5}`.
    fn interval(&mut self, end: &str) -> Result<String, String> {
        const MAX_REPETITIONS: u64 = 32_767;
        let wrong = || "an interval is malformed".to_owned();
        let (range, rest) = self.rest.split_once(end).ok_or_else(wrong)?;
        self.rest = rest;
        let number = |text| {
            let number = parse_digits(text).filter(|&number| number <= MAX_REPETITIONS);
            number.ok_or_else(wrong)
        };
        let Some((low, high)) = range.split_once(',') else {
            return Ok(format!("{{{}}}", number(range)?));
        };
        let low = if low.is_empty() { 0 } else { number(low)? };
        if high.is_empty() {
            return Ok(format!("{{{low},}}"));
        }
        let high = number(high)?;
        if high < low {
            return Err(wrong());
        }
        Ok(format!("{{{low},{high}}}"))
    }

    fn push(&mut self, token: Token) -> Result<(), String> {
        let start = self.output.len();
        if let Token::Repeat(letter, operator) = &token {
            if let Some(atom) = self.atom {
                self.repetitions += 1;
                if self.repetitions > MAX_NESTING {
                    return Err("too many operators behind each other".to_owned());
                }
                // A `?` behind another operator would mean something else.
                self.output.insert_str(atom, "(?:");
                self.output.push_str(operator);
                self.output.push(')');
                return Ok(());
            }
            if *letter == '{' || self.dialect == Dialect::Extended {
                return Err("nothing precedes an operator".to_owned());
            }
        }
        self.repetitions = 0;
        self.is_start = matches!(token, Token::Open | Token::Alternate);
        self.atom = match token {
            Token::Literal(literal) | Token::Repeat(literal, _) => {
                push_literal(&mut self.output, literal);
                Some(start)
            }
            Token::Class(class) => {
                self.output.push_str(&class);
                Some(start)
            }
            Token::Position(position) => {
                self.output.push_str(position);
                None
            }
            Token::Open if self.groups.len() == MAX_NESTING => {
                return Err("too many parentheses in each other".to_owned());
            }
            Token::Open => {
                self.groups.push(start);
                self.output.push_str("(?:");
                None
            }
            Token::Close => {
                self.output.push(')');
                Some(self.groups.pop().ok_or("a parenthesis is not open")?)
            }
            Token::Alternate => {
                self.output.push('|');
                None
            }
        };
        Ok(())
    }

    /// The rest of a bracket expression.
    fn bracket(&mut self) -> Result<String, String> {
        let wrong = || "a bracket is not closed".to_owned();
        let mut class = String::from("[");
        if self.skip("^") {
            class.push('^');
        }
        let mut is_first = true;
        loop {
            if !is_first && self.skip("]") {
                class.push(']');
                return Ok(class);
            }
            is_first = false;
            let has_classes = matches!(self.dialect, Dialect::Basic | Dialect::Extended);
            if has_classes && self.skip("[:") {
                let (name, rest) = self.rest.split_once(":]").ok_or_else(wrong)?;
                self.rest = rest;
                class.push_str(named_class(name).ok_or("a class has an unknown name")?);
                continue;
            }
            let low = self.bracket_character().ok_or_else(wrong)?;
            push_literal(&mut class, low);
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            if is_range && self.skip("-") {
                let high = self.bracket_character().ok_or_else(wrong)?;
                if high < low {
                    return Err("a range ends before it starts".to_owned());
                }
                class.push('-');
                push_literal(&mut class, high);
            }
        }
    }

    /// A character of a bracket expression, or `[.x.]` or `[=x=]`.
    fn bracket_character(&mut self) -> Option<char> {
        for (open, close) in [("[.", ".]"), ("[=", "=]")] {
            if self.skip(open) {
                let character = self.next();
                return character.filter(|_| self.skip(close));
            }
        }
        self.next()
    }
}

fn push_literal(output: &mut String, literal: char) {
    if literal.is_ascii_alphanumeric() {
        output.push(literal);
    } else {
        write!(output, "\\x{{{:x}}}", u32::from(literal)).expect("a String takes everything");
    }
}

/// A class such as `alpha`, as part of a bracket expression.
fn named_class(name: &str) -> Option<&'static str> {
    Some(match name {
        "alnum" => r"\p{Alphabetic}\d",
        "alpha" => r"\p{Alphabetic}",
        "blank" => "[[:blank:]]",
        "cntrl" => "[[:cntrl:]]",
        "digit" => "0-9",
        "graph" => r"[^\s\x00-\x1f\x7f]",
        "lower" => r"\p{Lowercase}",
        "print" => r"[^\x00-\x1f\x7f]",
        "punct" => "[[:punct:]]",
        "space" => r"\s",
        "upper" => r"\p{Uppercase}",
        "xdigit" => "[[:xdigit:]]",
        _ => return None,
    })
}
