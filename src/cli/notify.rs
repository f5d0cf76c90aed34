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

use super::settings;

/// How often it is told how far something is.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

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
        Ok(Self {
            way: Box::new(move |text| socket.send(text.as_bytes()).map(drop)),
            words: RefCell::default(),
        })
    }

    /// Says that the mount answers.
    pub(super) fn ready(&self) {
        self.tell("READY=1");
    }

    /// Says in a few words how it is, if that is news.
    pub(super) fn status(&self, words: &str) {
        let words = words.replace('\n', " ");
        if self.words.replace(words.clone()) != words {
            self.tell(&format!("STATUS={words}"));
        }
    }

    /// Says that what is left to do is to end.
    pub(super) fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    /// Says `text`, which is as `sd_notify(3)` has it.
    pub(super) fn tell(&self, text: &str) {
        if let Err(error) = (self.way)(text) {
            tracing::debug!(%error, text, "the service manager was not told");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

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
