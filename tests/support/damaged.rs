//! An archive with damaged members.

use super::raw::{Archive, Header};

/// An archive of intact members and `count` damaged ones named `bad0`, `bad1` and so on.
pub(crate) fn archive(count: usize) -> Vec<u8> {
    let archive = (0..count).fold(Archive::new(), |archive, number| {
        let bad = Header::new(format!("bad{number}"), b'0').damaged();
        archive.file(&format!("good{number}"), "1").add(bad, "")
    });
    archive.end()
}

/// The description of the damaged member `number` of [`archive`].
pub(crate) fn damaged_member_line(number: usize) -> String {
    let offset = (number * 3 + 2) * 512;
    format!(
        "bad{number}: this is not a header; skipping to the next header \
         (header at byte {offset} of the tar stream)"
    )
}
