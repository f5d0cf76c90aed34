//! Receiving of a response's body, with a timeout for each piece.

use std::time::Duration;

use bytes::Buf;

use crate::base::stats::Stats;
use crate::source::Cause;
use crate::source::client::response::ResponseHead;
use crate::source::read_handle::ResponseRest;

/// Length of the part in a 206. It must start as requested, and may be shorter.
pub(super) fn part_len(
    head: &ResponseHead,
    (start, end): (u64, u64),
    encoding: Option<&str>,
) -> Result<usize, Cause> {
    head.check_encoding(encoding)?;
    let (from, to) = head.content_range()?;
    if from != start || to > end {
        return Err(Cause::Protocol(format!(
            "the server sends bytes {from}..{to} instead of {start}..{end}"
        )));
    }
    usize::try_from(to - from).map_err(|_| Cause::Truncated)
}

/// Runs `work` with the timeout `limit`; as cancel safe as `work`.
pub(super) async fn with_idle_timeout<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, Cause>>,
) -> Result<T, Cause> {
    let done = tokio::time::timeout(limit, work).await;
    done.unwrap_or_else(|_| Err(Cause::silent_server()))
}

pub(super) async fn skip_to(
    rest: &mut ResponseRest,
    start: u64,
    stats: &Stats,
    idle: Duration,
    note: impl Fn(u64),
) -> Result<(), Cause> {
    while rest.start < start {
        with_idle_timeout(idle, receive_piece(rest, stats)).await?;
        let gap = usize::try_from(start - rest.start).unwrap_or(usize::MAX);
        let len = rest.buffered.len().min(gap);
        rest.buffered.advance(len);
        rest.start += len as u64;
        note(rest.start);
    }
    Ok(())
}

pub(super) async fn receive_piece(rest: &mut ResponseRest, stats: &Stats) -> Result<(), Cause> {
    if rest.buffered.is_empty() {
        rest.buffered = rest.content.next().await?.ok_or(Cause::Truncated)?;
        stats.source_read_bytes.add(rest.buffered.len() as u64);
    }
    Ok(())
}

/// Receives `rest` until `target` is full, with the timeout `idle` for each piece. It updates `received`
/// even if it fails, and calls `note` with it.
pub(super) async fn receive(
    rest: &mut ResponseRest,
    target: &mut [u8],
    received: &mut usize,
    stats: &Stats,
    idle: Duration,
    note: impl Fn(usize),
) -> Result<(), Cause> {
    while *received < target.len() {
        with_idle_timeout(idle, receive_piece(rest, stats)).await?;
        let len = copy(
            &rest.buffered,
            target.get_mut(*received..).unwrap_or_default(),
        );
        rest.buffered.advance(len);
        rest.start += len as u64;
        *received += len;
        note(*received);
    }
    Ok(())
}

pub(super) fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let len = from.len().min(to.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
    len
}
