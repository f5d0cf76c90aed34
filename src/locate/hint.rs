//! Errors of all layers as text, with advice for the user.

use std::borrow::Cow;
use std::iter::successors;
use std::sync::Arc;

use super::error::Error;
use crate::archive;
use crate::base::descriptor_limit::{HINT_RAISE_DESCRIPTOR_LIMIT, is_descriptor_limit};
use crate::base::error_chain::error_chain;
use crate::base::thread::{HINT_RAISE_THREAD_LIMIT, is_thread_limit};
use crate::fuse::{MountError, UnmountError};
use crate::image;
use crate::index::MergeError;
use crate::layers::LayeredArchiveError;
use crate::materialize;
use crate::source;

/// Returns the error that `error` only passes on or holds, or `error` itself.
pub fn unwrap_transparent<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> &'a (dyn std::error::Error + 'static) {
    match error.downcast_ref::<Error>() {
        Some(Error::Source(error)) => return error,
        Some(Error::Layers(error)) => return error,
        _ => {}
    }
    let boxed = error
        .downcast_ref::<Box<archive::Error>>()
        .map(|error| &**error);
    let shared = error
        .downcast_ref::<Arc<archive::Error>>()
        .map(|error| &**error);
    match boxed.or(shared) {
        Some(error) => error,
        None => error,
    }
}

/// Formats an error with its causes and its hint on one line.
pub fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let text = error_chain(error);
    let mut causes = successors(Some(error), |&error| error.source()).map(unwrap_transparent);
    match causes.find_map(hint) {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    }
}

/// Advice about `error` alone, without its causes.
fn hint(error: &(dyn std::error::Error + 'static)) -> Option<Cow<'static, str>> {
    if let Some(error) = error.downcast_ref::<source::Error>() {
        return error.cause.hint();
    }
    if let Some(error) = error.downcast_ref::<archive::Error>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<image::Cause>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<Box<image::Cause>>() {
        return error.hint();
    }
    if let Some(error) = error.downcast_ref::<materialize::Error>() {
        return error.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<MountError>() {
        return error.hint().map(Cow::from);
    }
    if let Some(error) = error.downcast_ref::<UnmountError>() {
        return error.hint().map(Cow::from);
    }
    if is_descriptor_limit(error) {
        return Some(Cow::from(HINT_RAISE_DESCRIPTOR_LIMIT));
    }
    if is_thread_limit(error) {
        return Some(Cow::from(HINT_RAISE_THREAD_LIMIT));
    }
    match error.downcast_ref::<LayeredArchiveError>()? {
        LayeredArchiveError::TooManyEntries { .. } => {
            Some(Cow::from(archive::HINT_RAISE_MAX_ENTRIES))
        }
        LayeredArchiveError::TooLarge { .. } => {
            Some(Cow::from(archive::HINT_RAISE_MAX_UNPACKED_SIZE))
        }
        LayeredArchiveError::Merge(MergeError::TooMuchMemory(_)) => {
            Some(Cow::from(archive::HINT_RAISE_INDEX_MEMORY))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::archive::OpenError;
    use crate::base::thread::classify_spawn_error;

    // Promises: memory-files
    #[test]
    fn limit_of_threads_is_named() {
        let number = |number| io::Error::from_raw_os_error(number);
        let spawned = || classify_spawn_error(number(11));
        assert_eq!(hint(&spawned()).as_deref(), Some(HINT_RAISE_THREAD_LIMIT));
        let text = error_chain(&OpenError::Threads(spawned()));
        assert_eq!(
            text,
            "cannot start a thread: Resource temporarily unavailable"
        );
        for other in [number(11), classify_spawn_error(number(12))] {
            assert_eq!(hint(&other), None);
        }
    }
}
