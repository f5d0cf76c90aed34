//! A SOURCE with many archives, which are opened one by one with the settings of one run.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;

use super::context::OpenContext;
use super::error::Error;
use super::spec::SourceSpec;
use crate::archive::directory::{ArchiveDirectory, DirectoryError, Listing, ScanFn, ScanTurn};
use crate::archive::scan::{self, MemoryShare};
use crate::archive::{
    Archive, FindIndex, OpenOptions, PrefetchMode, PrefetchOptions, TreeOrigin, Volume,
};
use crate::base::extent::Plain;
use crate::base::redact::has_scheme;
use crate::index::format::framed;
use crate::index::{self, Builder, Origin};
use crate::source::{self, ArchivePlace, MemorySource, Validator, location_text};
use crate::tar::{Member, MemberKind, Timestamp};

/// Maximum number of archives that are scanned at once. The scans share the memory.
const MAX_SCANS: u64 = 2;

/// Maximum number of spare scans. They leave the rest of the span cache to reads.
const MAX_SPARE_SCANS: u64 = 2;

/// Maximum number of archives, and of the directories that their paths imply.
const MAX_TREE_ENTRIES: u32 = 1 << 20;

/// Prefixes of sources that are parts of others.
const PART_PREFIXES: [&str; 3] = ["tar", "slice", "join"];

/// The archives of a place.
#[derive(Debug)]
pub struct SourceArchives {
    context: OpenContext,
    place: Arc<ArchivePlace>,
    listing: Listing,
    /// A tree with a directory for each archive. It has the memory and threads of all.
    pub root: Arc<Archive>,
    prefetch: PrefetchMode,
    max_scans: u64,
    max_spare_scans: u64,
}

impl SourceSpec {
    /// Returns the path of this machine that it names; `None` for a URL of a server, a part or an image.
    pub fn local_path(&self) -> Option<PathBuf> {
        match self {
            Self::Plain(location) => source::local_path(location),
            _ => None,
        }
    }

    /// Whether it is a path that looks like another source: it begins as a URL or with a prefix, or names a host and
    /// a port.
    pub fn resembles_other_source(&self) -> bool {
        let Self::Plain(location) = self else {
            return false;
        };
        let name = location.to_string_lossy();
        let name = source::without_blanks(&name);
        let (first, rest) = name.split_once(':').unwrap_or_default();
        PART_PREFIXES.contains(&first)
            || has_scheme(name)
            || !first.contains('/') && !rest.is_empty() && source::lacks_scheme(name)
    }

    /// Whether it names a place of archives: a local directory, or a prefix in an object store.
    pub fn is_place(&self) -> bool {
        matches!(self, Self::Plain(location) if ArchivePlace::is_place(&location_text(location)))
    }
}

impl OpenContext {
    /// Lists the archives of the place `spec`.
    ///
    /// # Errors
    /// The place is missing, unreachable, or refuses the listing.
    pub fn list_place(&self, spec: &SourceSpec) -> Result<Listing, Error> {
        Ok(self.network.block_on(self.open_place(spec)?.list())?)
    }

    /// Lists the archives of the place `spec`, which share the memory of these settings. Each archive has
    /// prefetch of mode `prefetch`.
    ///
    /// # Errors
    /// The place is missing, unreachable, or refuses the listing, or the system cannot start a thread.
    pub fn open_archives(
        &self,
        spec: &SourceSpec,
        prefetch: PrefetchMode,
    ) -> Result<SourceArchives, Error> {
        let (mut context, place) = (self.clone(), self.open_place(spec)?);
        let options = &mut context.archive;
        options.resources = Some(options.create_resources().map_err(Error::Threads)?);
        let (parts, total) = (options.budget(), options.scan.memory);
        let max_spare_scans = parts.span_bytes() / scan::MIN_MEMORY;
        let share = MemoryShare::Directory {
            max_scans: MAX_SCANS,
            total,
        };
        (options.scan.memory, options.scan.memory_share) = (share.of(total), share);
        let listing = self.network.block_on(place.list())?;
        let mut builder = Builder::new(index::Options {
            max_entries: MAX_TREE_ENTRIES,
            ..index::Options::default()
        });
        for (number, archive) in (0..).zip(&listing.archives) {
            let member = Member {
                header: Plain(number),
                mode: 0o555,
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                mtime: Timestamp {
                    seconds: archive.modified,
                    nanoseconds: 0,
                },
                ..Member::new(&*archive.path, MemberKind::Directory)
            };
            // A listed path is valid. One beyond the limit is not shown.
            builder.add_member(&member).ok();
        }
        let tree = builder.finish(Origin::default());
        let own = OpenOptions {
            resources: options.resources.clone(),
            ..OpenOptions::default()
        };
        let version = Validator::StrongEtag("\"listing\"".to_owned());
        let source = MemorySource::new(place.name(), Bytes::new()).with_validator(version);
        let (source, stats) = (Arc::new(source), Arc::default());
        let root = Archive::with_index(tree, source, &own, &self.network, &stats)?;
        Ok(SourceArchives {
            context,
            place: Arc::new(place),
            root: Arc::new(root),
            listing,
            prefetch,
            max_scans: parts.scan_count(MAX_SCANS),
            max_spare_scans: max_spare_scans.min(MAX_SPARE_SCANS),
        })
    }

    fn open_place(&self, spec: &SourceSpec) -> Result<ArchivePlace, Error> {
        let location = location_text(spec.origin());
        let opening = ArchivePlace::open(&location, self.source_options(&location));
        Ok(self.network.block_on(opening)?)
    }
}

impl SourceArchives {
    /// Memory of the indexes of all open archives.
    pub fn index_bytes(&self) -> u64 {
        self.context.archive.index_memory.used_bytes()
    }
}

impl ArchiveDirectory for SourceArchives {
    fn listing(&self) -> &Listing {
        &self.listing
    }

    fn open(&self, path: &str) -> Result<Result<Arc<Archive>, ScanFn>, DirectoryError> {
        let context = &self.context;
        let (source, published_index) = if let Some(location) = self.place.location(path) {
            // The headers are for all objects of the place.
            let context = OpenContext {
                headers_origin: location.clone(),
                ..context.clone()
            };
            let spec = SourceSpec::Plain(location.into());
            // Its first request is sent before the archive's answer arrives.
            let published_index = context.published_index(&spec, false);
            (context.open_source(&spec)?, published_index)
        } else {
            let (place, index) = (Arc::clone(&self.place), format!("{path}{}", framed::SUFFIX));
            // It is opened below the directory, too.
            let archive = path.to_owned();
            let find: FindIndex = Arc::new(move || place.open_beside(&archive, &index));
            let published_index = context.index_beside(find, false);
            (self.place.open_file(path)?, published_index)
        };
        let options = OpenOptions {
            published_index,
            ..context.archive.clone()
        };
        let prefetch = PrefetchOptions {
            mode: self.prefetch,
            ..PrefetchOptions::default()
        };
        let start = move |archive: Archive| -> Result<_, DirectoryError> {
            archive.start_prefetch(prefetch)?;
            Ok(Arc::new(archive))
        };
        let stats = &context.source.stats;
        match Archive::open_indexed(source, &options, &context.network, stats)? {
            Ok(archive) => Ok(Ok(start(archive)?)),
            Err(unscanned) => Ok(Err(Box::new(move |turn| start(unscanned.scan(turn)?)))),
        }
    }

    fn may_be_foreign(&self) -> bool {
        self.context.published_index.least_origin < TreeOrigin::Archive
    }

    fn max_scans(&self, turn: ScanTurn) -> usize {
        let scans = match turn {
            ScanTurn::Regular => self.max_scans,
            ScanTurn::Spare => self.max_spare_scans,
        };
        usize::try_from(scans).unwrap_or(1)
    }

    fn is_index_memory_low(&self) -> bool {
        self.index_bytes() > self.context.archive.index_memory.bytes() / 2
    }
}
