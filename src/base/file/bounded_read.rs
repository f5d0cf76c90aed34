//! Bounded reads of whole files, because a named file may be endless, such as `/dev/zero`.

use std::io::{self, Read};

/// Maximum length of a file with settings, credentials, headers or certificates, in bytes.
pub const MAX_SETTINGS_BYTES: u64 = 16 << 20;

/// Reads `file` to its end.
///
/// # Errors
/// If it cannot be read, or is longer than `max_bytes`.
pub fn read_at_most(file: impl Read, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let text = format!("it is longer than {max_bytes} bytes");
        return Err(io::Error::other(text));
    }
    Ok(bytes)
}

/// As [`read_at_most`], for text.
///
/// # Errors
/// As there, or if it is not UTF-8.
pub fn read_text(file: impl Read, max_bytes: u64) -> io::Result<String> {
    String::from_utf8(read_at_most(file, max_bytes)?)
        .map_err(|_| io::Error::other("it is not UTF-8"))
}
