//! The indexes that may replace the scan of an archive, by who vouches for them.

use std::sync::Arc;
use std::time::Duration;

use super::context::OpenContext;
use super::spec::SourceSpec;
use crate::archive::{FindIndex, IndexPlace, PublishedIndex, TreeOrigin};
use crate::base::sync::Mutex;
use crate::image::LayerIndexes;
use crate::index::format::framed;
use crate::source::{self, Source};

/// Timeout of a published index for which the user did not ask.
const PUBLISHED_INDEX_TIMEOUT: Duration = Duration::from_secs(5);

/// Publisher of an index in the file beside the archive.
const BESIDE: &str = "beside";

impl OpenContext {
    /// The `places` that this run accepts, of an archive that the user may have pinned by a digest.
    fn accepted(
        &self,
        mut places: Vec<(TreeOrigin, IndexPlace)>,
        is_pinned: bool,
    ) -> Option<PublishedIndex> {
        let choice = &self.published_index;
        let least = if is_pinned {
            choice.least_origin.max(TreeOrigin::Manifest)
        } else {
            choice.least_origin
        };
        places.retain(|&(origin, _)| origin >= least);
        (!places.is_empty()).then(|| PublishedIndex {
            places,
            network: self.network.clone(),
            stats: Arc::clone(&self.source.stats),
            is_required: choice.is_required,
            sha256: choice.sha256,
        })
    }

    /// The indexes of the layer `layer` of an image or artifact, which a digest pins if `is_pinned`.
    pub(super) fn index_of_layer(
        &self,
        indexes: &Arc<LayerIndexes>,
        layer: &dyn Source,
        is_pinned: bool,
    ) -> Option<PublishedIndex> {
        let digest = layer.fingerprint().sha256()?;
        let [own, named, attached, toc] = [(); 4].map(|()| Arc::clone(indexes));
        let publisher = own.publisher();
        let places = vec![
            (
                TreeOrigin::Publisher,
                IndexPlace::Index(Arc::new(move || own.open(digest)), publisher),
            ),
            (
                TreeOrigin::Manifest,
                IndexPlace::Ztoc(Arc::new(move || named.open_named_ztoc(digest))),
            ),
            (
                TreeOrigin::Publisher,
                IndexPlace::Ztoc(Arc::new(move || attached.open_attached_ztoc(digest))),
            ),
            (
                TreeOrigin::Manifest,
                IndexPlace::EstargzToc(Arc::new(move || toc.toc_digest(digest))),
            ),
        ];
        self.accepted(places, is_pinned || indexes.is_pinned())
    }

    /// The index that `find` finds beside an archive.
    pub(super) fn index_beside(&self, find: FindIndex, is_pinned: bool) -> Option<PublishedIndex> {
        let choice = &self.published_index;
        let (origin, publisher) = match (&choice.location, choice.sha256) {
            (None, None) => (TreeOrigin::Publisher, BESIDE.to_owned()),
            (location, sha256) => {
                let location = location.as_deref().unwrap_or(BESIDE);
                let sha256 = sha256.map(|sha256| sha256.to_string());
                let publisher = format!("{location} {}", sha256.unwrap_or_default());
                (TreeOrigin::User, publisher)
            }
        };
        let places = vec![(origin, IndexPlace::Index(find, publisher))];
        self.accepted(places, is_pinned)
    }

    /// Returns where the index of `spec` is published, if this run accepts it, and starts to open it if none is saved.
    /// The user may have pinned the archive by a digest.
    pub(super) fn published_index(
        &self,
        spec: &SourceSpec,
        is_pinned: bool,
    ) -> Option<PublishedIndex> {
        let choice = &self.published_index;
        let (location, mut options) = match &choice.location {
            Some(named) => (named.clone(), self.source_options(named)),
            None => self.place_beside(spec)?,
        };
        options.stats = Arc::default();
        if !choice.is_required {
            options.timeout = options.timeout.min(PUBLISHED_INDEX_TIMEOUT);
            options.retry.attempts = 1;
        }
        let archive: Option<String> = match spec {
            SourceSpec::Plain(archive) => Some(source::location_text(archive)),
            _ => None,
        };
        let is_saved = archive
            .as_ref()
            .is_some_and(|archive| !self.saved_indexes(archive).is_empty());
        // The owner of an index that the user names or pins does not matter.
        let beside = archive.filter(|_| choice.location.is_none() && choice.sha256.is_none());
        let network = self.network.clone();
        let open = move || {
            let (beside, location, options) = (beside.clone(), location.clone(), options.clone());
            async move {
                match beside {
                    Some(archive) => source::open_beside(&archive, &location, options).await,
                    None => source::open(&location, options).await,
                }
            }
        };
        let early = Arc::new(Mutex::new(None));
        let first = Arc::clone(&early);
        let find = {
            let (network, open) = (network.clone(), open.clone());
            move || {
                let started: Option<tokio::task::JoinHandle<_>> = first.lock().take();
                match started {
                    // The task fails only if the runtime ends.
                    Some(task) => network.block_on(task).unwrap_or_else(|_| {
                        let cause = source::Cause::Cancelled;
                        Err(source::Error::new("the published index", cause))
                    }),
                    None => network.block_on(open()),
                }
            }
        };
        let published = self.index_beside(Arc::new(find), is_pinned)?;
        if choice.is_searched_early && !is_saved {
            *early.lock() = Some(network.spawn(open()));
        }
        Some(published)
    }

    /// Returns the location at which the index of an archive is published, and the options for it, which are those
    /// of the archive; `None` if there is no such place.
    ///
    /// A URL with a query is often signed for one object only, and a fragment can be a generation, so nothing is
    /// expected beside them.
    pub(super) fn place_beside(&self, spec: &SourceSpec) -> Option<(String, source::Options)> {
        let SourceSpec::Plain(archive) = spec else {
            return None;
        };
        let archive = &*source::location_text(archive);
        let beside = |url: &str| {
            let is_versioned = source::is_url(url) && url.contains(['?', '#']);
            (url != "-" && !is_versioned).then(|| format!("{url}{}", framed::SUFFIX))
        };
        let mut options = self.source_options(archive);
        let mirrors = options.mirror_urls.iter();
        options.mirror_urls = mirrors.filter_map(|url| beside(url)).collect();
        Some((beside(archive)?, options))
    }
}
