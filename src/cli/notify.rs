//! Telling a service manager how a mount in the foreground is: `sd_notify(3)`, without its library.
//!
//! A service of `Type=notify` counts as started when it says so, in a datagram to the socket whose name
//! is in `NOTIFY_SOCKET`. Whoever does not listen misses nothing: no mount fails for it. A manager believes
//! the process that it started; where that is a mount's keeper, the mount's words go through it.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::SendFlags;

use super::settings;

/// How often it is told how far something is.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

/// How long a manager that takes no words is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What begins a word that the next one replaces.
const STATUS: &str = "STATUS=";

/// Takes a word to a service manager.
type Way = Box<dyn Fn(&str) -> io::Result<()>>;

/// A service manager that waits for word.
pub(super) struct Manager {
    way: Way,
    /// What it was told last of how this process is.
    words: RefCell<String>,
}

impl fmt::Debug for Manager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Manager")
            .field("words", &self.words)
            .finish_non_exhaustive()
    }
}

impl Manager {
    /// The one that started this process and wants to hear of it, if there is one.
    pub(super) fn find() -> Option<Self> {
        let name = settings::notify_socket()?;
        let manager = Self::connect(&name);
        manager
            .inspect_err(
                |error| tracing::warn!(%error, ?name, "the service manager does not listen"),
            )
            .ok()
    }

    /// The one that wants to hear of the process that started this one, which `way` leads to, if there is
    /// one.
    pub(super) fn behind(way: impl Fn(&str) -> io::Result<()> + 'static) -> Option<Self> {
        settings::notify_socket()?;
        Some(Self {
            way: Box::new(way),
            words: RefCell::default(),
        })
    }

    /// The one that listens at `name`: a path, or behind an `@` the name of an abstract socket.
    ///
    /// # Errors
    /// When nobody does.
    fn connect(name: &OsStr) -> io::Result<Self> {
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            way: Box::new(move |text| {
                // A manager that was stopped must not stop the mount. What is said once is worth a wait.
                let may_wait = !text.starts_with(STATUS);
                let flags = if may_wait {
                    SendFlags::NOSIGNAL
                } else {
                    SendFlags::NOSIGNAL | SendFlags::DONTWAIT
                };
                rustix::net::send(&socket, text.as_bytes(), flags)?;
                Ok(())
            }),
            words: RefCell::default(),
        })
    }

    /// Says that the mount answers.
    pub(super) fn ready(&self) {
        self.tell("READY=1");
    }

    /// Says in a few words how it is, if that is news; false when that was not to be heard.
    pub(super) fn status(&self, words: &str) -> bool {
        let words = words.replace('\n', " ");
        if *self.words.borrow() == words {
            return true;
        }
        let is_told = self.tell(&format!("{STATUS}{words}"));
        if is_told {
            self.words.replace(words);
        }
        is_told
    }

    /// Says that what is left to do is to end.
    pub(super) fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    /// Says `text`, which is as `sd_notify(3)` has it; false when there was no room for it.
    pub(super) fn tell(&self, text: &str) -> bool {
        let told = (self.way)(text);
        if let Err(error) = &told {
            tracing::debug!(%error, text, "the service manager was not told");
        }
        // Who has gone for good need not be told again.
        !told.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::thread::Thread;

    fn heard(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let patience = Some(Duration::from_secs(20));
        socket.set_read_timeout(patience).expect("set");
        let len = socket.recv(&mut bytes).expect("told");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    #[test]
    fn a_manager_listens_at_a_path_or_an_abstract_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let name = format!("tarfs-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("short");
        let sockets = [
            (UnixDatagram::bind(&path), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&address), format!("@{name}").into()),
        ];
        for (socket, name) in sockets {
            let socket = socket.expect("bound");
            let manager = Manager::connect(&name).expect("it listens");
            manager.status("half\nway");
            manager.status("half way");
            manager.ready();
            manager.stopping();
            let told = [heard(&socket), heard(&socket), heard(&socket)];
            assert_eq!(told, ["STATUS=half way", "READY=1", "STOPPING=1"]);
        }
    }

    #[test]
    fn a_manager_that_was_stopped_is_not_waited_for() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let _silent = UnixDatagram::bind(&path).expect("bound");
        let (ended, end) = std::sync::mpsc::channel();
        let telling = Thread::spawn("telling", move || {
            let manager = Manager::connect(path.as_os_str()).expect("bound");
            // More than a socket holds.
            let told = (0..10_000).filter(|number: &u32| manager.status(&number.to_string()));
            assert!(told.count() < 10_000, "there is no end to it");
            ended.send(()).expect("awaited");
        });
        let has_ended = end.recv_timeout(Duration::from_secs(20)).is_ok();
        if !has_ended {
            std::mem::forget(telling);
        }
        assert!(has_ended, "it waits for ever");
    }

    #[test]
    fn a_manager_that_does_not_listen_is_none_and_one_that_ends_does_no_harm() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        assert!(Manager::connect(path.as_os_str()).is_err());
        let socket = UnixDatagram::bind(&path).expect("bound");
        let manager = Manager::connect(path.as_os_str()).expect("it listens");
        drop(socket);
        manager.ready();
    }
}
