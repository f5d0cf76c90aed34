//! Notifications for a service manager about a mount in the foreground: `sd_notify(3)` without its library.
//!
//! A service of `Type=notify` is started when it sends a datagram to the socket in `NOTIFY_SOCKET`. A manager
//! accepts datagrams only from the process that it started, so the monitor sends them. No mount fails because of a failed
//! notification.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::SendFlags;

use crate::cli::environment;

/// Timeout for a manager that does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Prefix of a notification that the next one replaces.
const STATUS_PREFIX: &str = "STATUS=";

pub(crate) struct ServiceManager {
    socket: UnixDatagram,
    last_status: RefCell<String>,
}

impl ServiceManager {
    /// Connects to the manager that started this process, if it expects notifications.
    pub(crate) fn from_environment() -> Option<Self> {
        let name = environment::notify_socket()?;
        let manager = Self::connect(&name);
        manager
            .inspect_err(|error| tracing::warn!(%error, ?name, "cannot reach the service manager"))
            .ok()
    }

    /// Connects to the socket `name`: a path, or `@` and an abstract name.
    fn connect(name: &OsStr) -> io::Result<Self> {
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        Ok(Self {
            socket,
            last_status: RefCell::default(),
        })
    }

    fn send(&self, text: &str) -> io::Result<()> {
        // A stopped manager must not block the mount. A notification sent only once may wait.
        let may_wait = !text.starts_with(STATUS_PREFIX);
        let flags = if may_wait {
            SendFlags::NOSIGNAL
        } else {
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT
        };
        rustix::net::send(&self.socket, text.as_bytes(), flags)?;
        Ok(())
    }

    /// Sends a status if it has changed. Returns false if there was no space.
    pub(crate) fn notify_status(&self, text: &str) -> bool {
        let text = text.replace('\n', " ");
        if *self.last_status.borrow() == text {
            return true;
        }
        let is_sent = self.notify(&format!("{STATUS_PREFIX}{text}"));
        if is_sent {
            self.last_status.replace(text);
        }
        is_sent
    }

    /// Sends `text` in the format of `sd_notify(3)`. Returns false if there was no space.
    pub(crate) fn notify(&self, text: &str) -> bool {
        let sent = self.send(text);
        if let Err(error) = &sent {
            tracing::debug!(%error, text, "a notification was not sent");
        }
        // If the manager is gone for good, a retry is useless.
        !sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use tarfs::internal::thread::Thread;

    fn receive(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let timeout = Some(Duration::from_secs(20));
        socket.set_read_timeout(timeout).expect("set");
        let len = socket.recv(&mut bytes).expect("told");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    // Promises: service-notify
    #[test]
    fn notification_reaches_path_and_abstract_sockets() {
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
            let manager = ServiceManager::connect(&name).expect("it listens");
            manager.notify_status("half\nway");
            manager.notify_status("half way");
            manager.notify("READY=1");
            manager.notify("STOPPING=1");
            let sent = [receive(&socket), receive(&socket), receive(&socket)];
            assert_eq!(sent, ["STATUS=half way", "READY=1", "STOPPING=1"]);
        }
    }

    // Promises: service-notify
    #[test]
    fn status_to_a_stopped_manager_does_not_block() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let _silent = UnixDatagram::bind(&path).expect("bound");
        let (ended, end) = std::sync::mpsc::channel();
        let sender = Thread::spawn("sender", move || {
            let manager = ServiceManager::connect(path.as_os_str()).expect("bound");
            // More than the socket's buffer can hold.
            let sent =
                (0..10_000).filter(|number: &u32| manager.notify_status(&number.to_string()));
            assert!(sent.count() < 10_000, "there is no end to it");
            ended.send(()).expect("awaited");
        });
        let has_ended = end.recv_timeout(Duration::from_secs(20)).is_ok();
        if !has_ended {
            std::mem::forget(sender);
        }
        assert!(has_ended, "it waits for ever");
    }

    // Promises: service-notify
    #[test]
    fn missing_or_ended_manager_is_harmless() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        assert!(ServiceManager::connect(path.as_os_str()).is_err());
        let socket = UnixDatagram::bind(&path).expect("bound");
        let manager = ServiceManager::connect(path.as_os_str()).expect("it listens");
        drop(socket);
        manager.notify("READY=1");
    }
}
