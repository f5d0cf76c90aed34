//! Exit statuses of the program. Man pages are made from the table, and the README has the same.

/// A file could not be examined, printed or changed, or an expression is invalid, as of the namesakes.
pub(crate) const PARTIAL: u8 = 1;

/// Two trees differ, as of diff(1).
pub(crate) const DIFFERENT: u8 = 1;

/// A failed run, as of tar.
pub(crate) const FAILURE: u8 = 2;

/// An invalid command line: `EX_USAGE` of sysexits(3).
pub(crate) const USAGE: u8 = 64;

/// Meaning of a status, and its verbs, or none for all.
type Meaning = (&'static [&'static str], &'static str);

const TABLE: [(&str, &[Meaning]); 5] = [
    ("0", &[(&[], "success"), (&["diff"], "the trees are equal")]),
    (
        "1",
        &[
            (
                &["ls", "find", "du", "cat", "chmod", "chown", "rm"],
                "a file could not be examined or changed",
            ),
            (&["diff"], "the trees differ"),
        ],
    ),
    ("2", &[(&[], "a failure, or damaged members")]),
    ("64", &[(&[], "an invalid command line")]),
    ("130, 143", &[(&[], "SIGINT or SIGTERM ended the run")]),
];

/// Statuses and meanings of `verb`, or of all verbs with their names.
pub(crate) fn rows(verb: Option<&str>) -> Vec<(&'static str, String)> {
    let text = |(verbs, meaning): &Meaning| match (verb, verbs.split_last()) {
        (_, None) => Some((*meaning).to_owned()),
        (Some(verb), _) => verbs.contains(&verb).then(|| (*meaning).to_owned()),
        (None, Some((last, []))) => Some(format!("of {last}: {meaning}")),
        (None, Some((last, others))) => {
            Some(format!("of {} and {last}: {meaning}", others.join(", ")))
        }
    };
    let row = |(status, meanings): &(&'static str, &[Meaning])| {
        let texts: Vec<_> = meanings.iter().filter_map(text).collect();
        (!texts.is_empty()).then(|| (*status, texts.join("; ")))
    };
    TABLE.iter().filter_map(row).collect()
}
