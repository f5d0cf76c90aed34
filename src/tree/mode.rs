//! Modes as text: symbolic modes of chmod(1), and the letters of `ls -l`.

use super::interface::FileKind;

/// All permission bits.
pub(crate) const ALL_MODE_BITS: u32 = 0o7777;
/// The set-user-ID and the set-group-ID bit.
const SET_IDS: u32 = 0o6000;

/// Applies an octal or a symbolic mode, such as `u+rwX,go-w`, to the permissions `mode`. `None` if it is invalid.
/// As with chmod(1), clauses without classes leave the bits of `umask` alone, and directories keep the set-ID bits
/// that are not mentioned.
pub fn apply_mode(text: &str, mode: u32, is_directory: bool, umask: u32) -> Option<u32> {
    if text.starts_with(|first: char| first.is_ascii_digit()) {
        let is_octal = text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
        let wanted = u32::from_str_radix(text, 8).ok()?;
        // Five digits mention all bits.
        let is_kept = is_directory && text.len() < 5;
        let kept = if is_kept { mode & SET_IDS } else { 0 };
        return (is_octal && wanted <= ALL_MODE_BITS).then_some(wanted | kept);
    }
    let mut clauses = text.split(',');
    clauses.try_fold(mode & ALL_MODE_BITS, |mode, clause| {
        apply_clause(clause.as_bytes(), mode, is_directory, umask)
    })
}

/// Applies a clause such as `ug+rw-x`.
fn apply_clause(clause: &[u8], mut mode: u32, is_directory: bool, umask: u32) -> Option<u32> {
    let is_class = |byte: &&u8| matches!(byte, b'u' | b'g' | b'o' | b'a');
    let (classes, mut actions) = clause.split_at(clause.iter().take_while(is_class).count());
    let (affected, changeable) = if classes.is_empty() {
        (ALL_MODE_BITS, ALL_MODE_BITS & !umask)
    } else {
        let bits = classes.iter().fold(0, |bits, &class| bits | bits_of(class));
        (bits, bits)
    };
    if actions.is_empty() {
        return None;
    }
    while let Some((&operator, rest)) = actions.split_first() {
        let is_letter = |byte: &&u8| !matches!(byte, b'+' | b'-' | b'=');
        let (letters, rest) = rest.split_at(rest.iter().take_while(is_letter).count());
        actions = rest;
        if let Some(bits) = octal_bits(letters) {
            let is_alone = classes.is_empty() && actions.is_empty();
            return apply(operator, mode, bits, ALL_MODE_BITS).filter(|_| is_alone);
        }
        let mut value = 0;
        for &letter in letters {
            value |= match letter {
                b'r' => 0o444,
                b'w' => 0o222,
                b'x' => 0o111,
                b'X' if is_directory || mode & 0o111 != 0 => 0o111,
                b'X' => 0,
                b's' => 0o6000,
                b't' => 0o1000,
                // A copy of a class stands alone.
                b'u' | b'g' | b'o' if letters.len() == 1 => {
                    let copied = mode & bits_of(letter);
                    let spread = [0o444, 0o222, 0o111].into_iter();
                    spread.filter(|bits| copied & bits != 0).sum()
                }
                _ => return None,
            };
        }
        let kept = if is_directory {
            SET_IDS & !(value & affected)
        } else {
            0
        };
        value &= changeable & !kept;
        mode = apply(operator, mode, value, affected & !kept)?;
    }
    Some(mode)
}

/// Applies an operator. `=` replaces the bits `affected`.
fn apply(operator: u8, mode: u32, value: u32, affected: u32) -> Option<u32> {
    Some(match operator {
        b'+' => mode | value,
        b'-' => mode & !value,
        b'=' => mode & !affected | value,
        _ => return None,
    })
}

/// The bits that octal digits mean behind an operator. They are all mentioned.
fn octal_bits(digits: &[u8]) -> Option<u32> {
    let is_octal = !digits.is_empty() && digits.iter().all(|digit| matches!(digit, b'0'..=b'7'));
    let number = std::str::from_utf8(digits).ok().filter(|_| is_octal)?;
    let bits = u32::from_str_radix(number, 8).ok()?;
    (bits <= ALL_MODE_BITS).then_some(bits)
}

fn bits_of(class: u8) -> u32 {
    match class {
        b'u' => 0o4700,
        b'g' => 0o2070,
        b'o' => 0o1007,
        _ => ALL_MODE_BITS,
    }
}

/// The first letter of a line of `ls -l`.
pub(crate) fn type_letter(kind: FileKind) -> char {
    match kind {
        FileKind::File => '-',
        kind => kind.letter(),
    }
}

/// Type and permissions in ten letters, as `ls -l` writes them: `drwxrwxrwt`.
pub(crate) fn mode_string(kind: FileKind, mode: u32) -> String {
    let mut letters = String::with_capacity(10);
    letters.push(type_letter(kind));
    for (shift, special, with_execute, without) in [
        (6, 0o4000, 's', 'S'),
        (3, 0o2000, 's', 'S'),
        (0, 0o1000, 't', 'T'),
    ] {
        let bits = mode >> shift;
        letters.push(if bits & 4 != 0 { 'r' } else { '-' });
        letters.push(if bits & 2 != 0 { 'w' } else { '-' });
        letters.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => with_execute,
            (true, false) => without,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    letters
}
