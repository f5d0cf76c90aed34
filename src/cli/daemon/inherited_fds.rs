//! File descriptors inherited from the parent process.

#![expect(
    unsafe_code,
    reason = "operations on descriptor numbers have no safe interface"
)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use rustix::fs::{CWD, Dir, Mode, OFlags, openat};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors above 2 at the start. A background process would keep the parent's files open by them.
#[derive(Default, Debug)]
pub(crate) struct InheritedFds(Vec<RawFd>);

impl InheritedFds {
    /// Lists the open descriptors. Must run before this process opens any.
    pub(crate) fn collect() -> Self {
        Self(list_open_fds().unwrap_or_default())
    }

    /// Hides them from child processes, which may live as long as this process.
    pub(crate) fn set_cloexec(&self) {
        for &number in &self.0 {
            // SAFETY: it was open before this process opened any, and only `close` closes it, which consumes
            // `self`.
            let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
            if let Err(error) = fcntl_setfd(descriptor, FdFlags::CLOEXEC) {
                tracing::debug!(%error, number, "child processes inherit this descriptor");
            }
        }
    }

    /// Closes them. An argument such as `/dev/fd/63` must be opened before.
    pub(crate) fn close(self) {
        for number in self.0 {
            // SAFETY: it was open before this process opened any, so no value owns it. It was not closed
            // since, so its number was not reused. A name like `/dev/fd/63` opens another descriptor for the
            // same file.
            unsafe { rustix::io::close(number) };
        }
    }
}

/// Raises the limit of open files, because 1,024 are too few for an image of many layers or for a copy.
pub(crate) fn raise_open_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// Returns the open descriptors above 2. Fails without /proc.
fn list_open_fds() -> rustix::io::Result<Vec<RawFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = openat(CWD, "/proc/self/fd", flags, Mode::empty())?;
    // Closed at the end, so that its number may be reused.
    let own = directory.as_raw_fd();
    let mut numbers = Vec::new();
    for entry in Dir::new(directory)? {
        let entry = entry?;
        let number = entry.file_name().to_str().ok();
        let number = number.and_then(|name| name.parse().ok());
        numbers.extend(number.filter(|&number: &RawFd| number > 2 && number != own));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    use super::*;

    // Promises: process-inherits
    #[test]
    fn open_fds_are_listed_without_the_listing_fd() {
        let file = File::open("/dev/null").expect("there");
        let seen = list_open_fds().expect("there is /proc");
        assert!(seen.contains(&file.as_raw_fd()));
        assert!(!seen.contains(&0) && !seen.contains(&1) && !seen.contains(&2));
    }

    // Promises: process-inherits
    #[test]
    fn inherited_fds_are_not_passed_to_children() {
        let file = File::open("/dev/null").expect("there");
        fcntl_setfd(&file, FdFlags::empty()).expect("set");
        let inherited = InheritedFds(vec![file.as_raw_fd()]);
        inherited.set_cloexec();
        let flags = rustix::io::fcntl_getfd(&file).expect("open");
        assert!(flags.contains(FdFlags::CLOEXEC));
    }

    // Promises: process-inherits
    #[test]
    fn inherited_fd_is_closed() {
        let number = File::open("/dev/null").expect("there").into_raw_fd();
        let path = format!("/proc/self/fd/{number}");
        assert_eq!(
            std::fs::read_link(&path).expect("open"),
            std::path::Path::new("/dev/null")
        );
        InheritedFds(vec![number]).close();
        // Another thread may have reused the number.
        let link = std::fs::read_link(&path).ok();
        assert_ne!(link.as_deref(), Some(std::path::Path::new("/dev/null")));
    }
}
