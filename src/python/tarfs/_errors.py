"""Exceptions, by what a caller can do about them. Their texts are those of the command line."""

from __future__ import annotations

import errno


class Error(OSError):
    """Base of all errors of tarfs."""

    errno = errno.EIO


class NotFound(Error, FileNotFoundError):
    """The archive, or a path in it, does not exist."""

    errno = errno.ENOENT


class IsADirectory(Error, IsADirectoryError):
    """A path in the archive leads to a directory instead of a file."""

    errno = errno.EISDIR


class AccessDenied(Error, PermissionError):
    """The server refuses the credentials, or asks for some."""

    errno = errno.EACCES


class Unreachable(Error, ConnectionError):
    """The server cannot be reached, or answers with an error."""

    errno = errno.EHOSTUNREACH


class TimedOut(Error, TimeoutError):
    """The server did not deliver in time."""

    errno = errno.ETIMEDOUT


class Changed(Error):
    """The archive is another version than the one that was opened. Open it again."""

    errno = errno.ESTALE


class Damaged(Error, ValueError):
    """The archive or its index is damaged, incomplete or no archive."""

    errno = errno.EBADMSG


class InvalidArgument(Error, ValueError):
    """A URL or an option is invalid."""

    errno = errno.EINVAL
