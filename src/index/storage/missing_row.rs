//! Rows that an access needed and did not get.

use std::cell::Cell;

/// How to open an archive without the index that is published for it.
pub const WITHOUT_PUBLISHED_INDEX: &str = "--no-published-index, or index=False in Python";

/// Why a row is missing although the index has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MissingRow {
    /// It is not loaded, and the caller must not wait.
    #[error("a part of the index is not loaded yet")]
    NotLoaded,
    /// It could not be loaded.
    #[error(
        "a part of the index cannot be loaded; a published one can be left out ({})",
        WITHOUT_PUBLISHED_INDEX
    )]
    Unavailable,
}

thread_local! {
    static MAY_WAIT: Cell<bool> = const { Cell::new(true) };
    static MISSING: Cell<Option<MissingRow>> = const { Cell::new(None) };
}

/// State of the access around this one. Dropped also if the access panics.
struct Outer {
    may_wait: bool,
    missing: Option<MissingRow>,
}

impl Drop for Outer {
    fn drop(&mut self) {
        MAY_WAIT.set(self.may_wait);
        // The outer access is incomplete, too.
        MISSING.set(self.missing.or(MISSING.get()));
    }
}

/// The result of `access`, or the row that it missed. It waits for rows if `may_wait`, unless an access around it may not.
pub(crate) fn find_missing<T>(may_wait: bool, access: impl FnOnce() -> T) -> Result<T, MissingRow> {
    let _outer = Outer {
        may_wait: MAY_WAIT.get(),
        missing: MISSING.take(),
    };
    MAY_WAIT.set(may_wait && MAY_WAIT.get());
    let result = access();
    MISSING.get().map_or(Ok(result), Err)
}

/// Whether the access on this thread may wait for rows.
pub(super) fn may_wait() -> bool {
    MAY_WAIT.get()
}

/// Makes the access on this thread fail.
pub(super) fn report(missing: MissingRow) {
    MISSING.set(Some(missing));
}
