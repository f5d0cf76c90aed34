//! Opening of mirrors, and their comparison with SOURCE.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join;
use tokio::task::JoinSet;

use super::{Mirror, MirrorList, Mirrors, first_success};
use crate::base::buffer_pool::BufferPool;
use crate::base::extent::Packed;
use crate::base::stats::Stats;
use crate::base::sync::Mutex;
use crate::source::retry::FailureBlock;
use crate::source::{
    Access, Cause, Error, Http, Options, Source, SourceInfo, Target, Transport, Validator,
};

/// Time for SOURCE, and then for each mirror, to answer before the next one may identify the bytes.
const OPEN_HEAD_START: Duration = Duration::from_secs(5);

/// Length of a sample that is compared.
const SAMPLE_LEN: u64 = 16 << 10;

/// Samples of a source: one at its start, one at its end, and others between.
const SAMPLES: u64 = 5;

/// A mirror that is not open.
#[derive(Debug)]
pub struct UnopenedMirror {
    /// Where it is.
    pub target: Target,
    /// Options for its requests.
    pub options: Options,
    /// Transport of the requests, instead of the options' connections.
    pub transport: Option<Box<dyn Transport>>,
}

impl UnopenedMirror {
    async fn open(&self) -> Result<Http, Error> {
        let (target, options) = (self.target.clone(), self.options.clone());
        let Some(transport) = &self.transport else {
            return Http::open(target, options).await;
        };
        let transport = transport.reconnect(&target.url, &options);
        let transport = transport.map_err(|cause| Error::new(target.location.as_str(), cause))?;
        Http::open_through(transport, target, options).await
    }
}

/// Opens SOURCE, which is the first place, with its mirrors. If it cannot be opened, or does not answer soon, a
/// mirror identifies the bytes.
///
/// # Errors
/// If none can be opened.
pub async fn open(mut places: Vec<UnopenedMirror>) -> Result<Arc<dyn Source>, Error> {
    let (http, number) = Box::pin(open_first(&places)).await?;
    let location = places.first().map(|place| place.target.location.clone());
    let location = location.unwrap_or_else(|| http.info().location.clone());
    if http.access() == Access::Stream {
        tracing::warn!("{location}: no mirrors are used, because the server has no ranges");
        return Ok(Arc::new(http));
    }
    let stats = places.remove(number).options.stats;
    let info = SourceInfo {
        location,
        ..http.info().clone()
    };
    let first = Mirror::new(http);
    let list = MirrorList::new(Mutex::new(vec![Arc::clone(&first)]));
    let mut opening = JoinSet::new();
    for place in places {
        let (first, list) = (Arc::clone(&first), Arc::clone(&list));
        opening.spawn(add_mirror(place, first, list, Arc::clone(&stats)));
    }
    Ok(Mirrors::new(info, first, list, false, opening))
}

/// `first` and `others`, which have the same bytes, in the order in which they are asked.
pub fn in_order(first: Http, others: Vec<Http>) -> Arc<dyn Source> {
    if others.is_empty() {
        return Arc::new(first);
    }
    let (info, first) = (first.info().clone(), Mirror::new(first));
    let others = others.into_iter().map(Mirror::new);
    let list = std::iter::once(Arc::clone(&first)).chain(others).collect();
    let list = MirrorList::new(Mutex::new(list));
    Mirrors::new(info, first, list, true, JoinSet::new())
}

/// Opens SOURCE, or the first mirror that answers with a range if SOURCE fails or is late. Also returns its number.
async fn open_first(places: &[UnopenedMirror]) -> Result<(Http, usize), Error> {
    let mut opened = Vec::new();
    for (number, place) in places.iter().enumerate() {
        opened.push(async move {
            let opened = place.open().await?;
            if number > 0 && opened.access() != Access::Ranges {
                let no_ranges = Cause::Protocol("a mirror must answer with ranges".to_owned());
                return Err(Error::new(opened.location(), no_ranges));
            }
            Ok(opened)
        });
    }
    match first_success(opened, OPEN_HEAD_START).await {
        Ok((number, http)) => {
            if number > 0 {
                tracing::warn!("using {} instead of SOURCE", http.location());
            }
            Ok((http, number))
        }
        Err(errors) => {
            let no_place =
                || Error::new("the source", Cause::Malformed("no URL is given".to_owned()));
            Err(errors.into_iter().next().unwrap_or_else(no_place))
        }
    }
}

/// Opens the mirror at `place`, and adds it to `list` unless its bytes differ from those of `first`.
async fn add_mirror(
    place: UnopenedMirror,
    first: Arc<Mirror>,
    list: MirrorList,
    stats: Arc<Stats>,
) {
    let (place, first) = (&place, &first);
    let name = &place.target.location;
    let compared = || async move {
        let mirror = place.open().await?;
        let is_same = has_same_bytes(&first.http, &mirror).await?;
        Ok::<_, Error>(is_same.then_some(mirror))
    };
    let Some(mirror) = FailureBlock::default().repeat(compared).await else {
        stats.source_rejected_mirrors.increment();
        return tracing::warn!(
            "{name} has other bytes than SOURCE, or no ranges, so it is not used"
        );
    };
    list.lock().push(Mirror::new(mirror));
}

/// Compares lengths, and samples unless the servers give both the same strong entity tag.
async fn has_same_bytes(first: &Http, mirror: &Http) -> Result<bool, Error> {
    let (ours, theirs) = (first.fingerprint(), mirror.fingerprint());
    let len = ours.len.filter(|_| mirror.access() == Access::Ranges);
    let Some(len) = len.filter(|_| ours.len == theirs.len) else {
        return Ok(false);
    };
    if matches!(ours.validator, Validator::StrongEtag(_)) && ours.validator == theirs.validator {
        return Ok(true);
    }
    let sample_len = SAMPLE_LEN.min(len);
    let pool = BufferPool::new(2 * sample_len);
    for number in 0..SAMPLES {
        let offset = Packed((len - sample_len) / (SAMPLES - 1) * number);
        let sample = async |source: &Http| {
            let len = usize::try_from(sample_len).unwrap_or(usize::MAX);
            let buffer = pool.acquire_async(len).await;
            source.read_at(offset, buffer).await
        };
        let (one, other) = try_join(sample(first), sample(mirror)).await?;
        if one != other {
            return Ok(false);
        }
    }
    Ok(true)
}
