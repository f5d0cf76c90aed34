//! The first request of another process to a server.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::net::SendFlags;

use crate::serve::copy::MountCopy;
use crate::serve::failure::Failure;
use crate::serve::link::{Link, Packet, Taken};
use crate::serve::metrics_server::MetricsListener;
use crate::serve::mount_spec::MountSpec;
use crate::serve::volumes::VolumeKey;

/// Request of a monitor for a mount.
#[derive(Debug)]
pub struct MountRequest {
    /// The mount.
    pub spec: MountSpec,
    /// Its tree.
    pub(super) key: VolumeKey,
    pub(super) kind: RequestKind,
    pub(super) copy: Option<MountCopy>,
    pub(super) metrics: Option<MetricsListener>,
}

#[derive(Debug)]
pub(super) enum RequestKind {
    Open {
        shows_progress: bool,
    },
    /// With the connection, and the job list of its file system if there is one.
    TakeOver(Box<Taken>, OwnedFd, Option<OwnedFd>),
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn invalid(error: io::Error) -> Failure {
    Failure::to("invalid request for a mount", &error)
}

/// The first request on a link.
#[derive(Debug)]
pub enum FirstRequest {
    /// A mount, and the log for its server.
    Mount(Box<MountRequest>, Option<OwnedFd>),
    /// To hand all mounts over to the daemon at this socket, of this program.
    Retire(PathBuf, OwnedFd),
}

impl FirstRequest {
    /// Introduces this process, and waits for the first request on `link`. `None` if the other process is gone.
    ///
    /// # Errors
    /// If the request is invalid.
    pub fn receive(link: &Link) -> Result<Option<Self>, Failure> {
        let server = Packet::Server(std::process::id());
        // A monitor that is gone sends no request either.
        drop(link.send(&server, &[], SendFlags::empty()));
        let mut log = None;
        let (packet, descriptors) = loop {
            match link.receive().map_err(invalid)? {
                Some((Packet::Log, descriptors)) => log = descriptors.into_iter().next(),
                Some((Packet::Retire(path), descriptors)) => {
                    let program = descriptors.into_iter().next();
                    let program = program.ok_or_else(|| Failure::new("a program was expected"))?;
                    return Ok(Some(Self::Retire(path.into(), program)));
                }
                Some(received) => break received,
                None => return Ok(None),
            }
        };
        let request = MountRequest::new(packet, descriptors)?;
        Ok(Some(Self::Mount(Box::new(request), log)))
    }
}

impl MountRequest {
    fn new(packet: Packet, descriptors: Vec<OwnedFd>) -> Result<Self, Failure> {
        let mut descriptors = descriptors.into_iter();
        let memory = descriptors.next();
        let memory = memory.ok_or_else(|| Failure::new("a description of a mount was expected"))?;
        let spec = MountSpec::from_memory(memory).map_err(invalid)?;
        let key = VolumeKey::new(&spec)?;
        let (spec, kind) = match (packet, descriptors.next()) {
            (Packet::Open { shows_progress }, _) => (spec, RequestKind::Open { shows_progress }),
            (Packet::TakeOver(taken), Some(connection)) => (
                spec.continuing(&taken.state.version),
                RequestKind::TakeOver(taken, connection, descriptors.next()),
            ),
            _ => return Err(Failure::new("a mount was expected")),
        };
        Ok(Self {
            spec,
            key,
            kind,
            copy: None,
            metrics: None,
        })
    }

    /// Prepares what fails early, before the long work, and needs more rights than that.
    ///
    /// # Errors
    /// If metrics cannot be served, or the directory of a copy cannot be used.
    pub fn prepare(&mut self) -> Result<(), Failure> {
        let spec = &self.spec;
        self.metrics = spec.metrics.map(MetricsListener::bind).transpose()?;
        let copy = spec.copy_to.as_ref().map(|directory| {
            let mountpoint = Path::new(&spec.mountpoint);
            MountCopy::open(Path::new(directory), mountpoint, spec.xattrs.clone())
        });
        self.copy = copy.transpose()?;
        Ok(())
    }
}
