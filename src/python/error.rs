//! Errors of the library as exceptions of `tarfs._errors`, by what a caller can do about them.

use std::error::Error;
use std::io;
use std::iter::successors;

use pyo3::prelude::*;
use rustix::io::Errno;

use crate::archive::{self, ReadError};
use crate::locate::{self, describe, unwrap_transparent};
use crate::materialize;
use crate::source::{self, Cause};
use crate::tar;

/// Name of a class in `tarfs._errors`.
type Class = &'static str;

pub(super) const ERROR: Class = "Error";
pub(super) const NOT_FOUND: Class = "NotFound";
pub(super) const INVALID: Class = "InvalidArgument";
pub(super) const DAMAGED: Class = "Damaged";
pub(super) const ACCESS_DENIED: Class = "AccessDenied";
const UNREACHABLE: Class = "Unreachable";
const TIMED_OUT: Class = "TimedOut";
const CHANGED: Class = "Changed";

pub(super) fn exception(py: Python<'_>, class: Class, text: &str) -> PyErr {
    let errors = py.import("tarfs._errors");
    let made = errors.and_then(|errors| errors.getattr(class)?.call1((text,)));
    made.map_or_else(|error| error, PyErr::from_value)
}

/// The exception for `error`, with the text that the command line prints.
pub(super) fn of_error(py: Python<'_>, error: &(dyn Error + 'static)) -> PyErr {
    let mut chain = successors(Some(error), |&error| error.source()).map(unwrap_transparent);
    let class = chain.find_map(class_of).unwrap_or(ERROR);
    exception(py, class, &describe(error))
}

fn class_of(error: &(dyn Error + 'static)) -> Option<Class> {
    if let Some(error) = error.downcast_ref::<source::Error>() {
        return Some(class_of_cause(&error.cause));
    }
    if let Some(error) = error.downcast_ref::<locate::Error>() {
        return error.is_usage_error().then_some(INVALID);
    }
    if let Some(error) = error.downcast_ref() {
        return Some(class_of_archive(error));
    }
    if let Some(error) = error.downcast_ref::<io::Error>() {
        return Some(class_of_io(error));
    }
    if let Some(materialize::Error::OtherVersion) = error.downcast_ref() {
        return Some(CHANGED);
    }
    if let Some(errno) = error.downcast_ref::<Errno>() {
        return Some(class_of_io(&(*errno).into()));
    }
    match error.downcast_ref::<ReadError>()? {
        ReadError::Changed(_) => Some(CHANGED),
        // Their causes say more.
        ReadError::NotFound(_)
        | ReadError::TimedOut(_)
        | ReadError::Unreachable(_)
        | ReadError::AccessDenied(_)
        | ReadError::Memory(_)
        | ReadError::Damaged { cause: Some(_), .. }
        | ReadError::NotAFile => None,
        ReadError::Unscanned | ReadError::IndexUnavailable => Some(ERROR),
        ReadError::Damaged { cause: None, .. }
        | ReadError::Truncated
        | ReadError::Index
        | ReadError::IndexMismatch => Some(DAMAGED),
    }
}

fn class_of_archive(error: &archive::Error) -> Class {
    match error {
        archive::Error::Source(error) => class_of_cause(&error.cause),
        archive::Error::Codec(error) if error.is_of_this_process() => ERROR,
        archive::Error::Tar(error) => match error.cause {
            tar::Cause::LimitExceeded { .. }
            | tar::Cause::TooManyEntries { .. }
            | tar::Cause::TooLarge { .. }
            | tar::Cause::TooLong { .. } => ERROR,
            tar::Cause::NotTar | tar::Cause::Truncated(_) => DAMAGED,
        },
        // Limits, which a caller can raise, are no damage.
        archive::Error::TooManyEntries { .. }
        | archive::Error::TooLarge { .. }
        | archive::Error::TooMuchMemory(_)
        | archive::Error::EndlessZeros
        | archive::Error::Interrupted => ERROR,
        archive::Error::Codec(_)
        | archive::Error::NotAnArchive
        | archive::Error::Empty
        | archive::Error::UnsupportedFormat(_)
        | archive::Error::Encrypted(_)
        | archive::Error::WebPage
        | archive::Error::GitLfsPointer
        | archive::Error::DigestMismatch { .. }
        | archive::Error::BlockMismatch { .. }
        | archive::Error::PlainDigestMismatch { .. } => DAMAGED,
    }
}

fn class_of_cause(cause: &Cause) -> Class {
    match cause.class() {
        source::Class::NotFound => NOT_FOUND,
        source::Class::AccessDenied => ACCESS_DENIED,
        source::Class::Changed => CHANGED,
        source::Class::Damaged => DAMAGED,
        source::Class::Outage | source::Class::Unreachable => UNREACHABLE,
        source::Class::TimedOut => TIMED_OUT,
        source::Class::Invalid => INVALID,
        source::Class::Other => ERROR,
    }
}

fn class_of_io(error: &io::Error) -> Class {
    match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        io::ErrorKind::PermissionDenied => ACCESS_DENIED,
        io::ErrorKind::TimedOut => TIMED_OUT,
        _ => ERROR,
    }
}
