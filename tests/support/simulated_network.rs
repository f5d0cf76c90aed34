//! A network without sockets on tokio's clock. With a paused clock, hours pass in a moment.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, StatusCode};
use tarfs::source::{Cause, Content, Obstacle, Options, RawResponse, Transport};
use url::Url;

use super::http::{End, Request, Response};

/// Passes each request to a closure, and its response back.
#[derive(Clone)]
pub(crate) struct SimulatedNetwork {
    handler: Arc<dyn Fn(&Request) -> Response + Send + Sync>,
}

impl SimulatedNetwork {
    pub(crate) fn new(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        Self {
            handler: Arc::new(handler),
        }
    }
}

impl fmt::Debug for SimulatedNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a simulated network")
    }
}

impl Transport for SimulatedNetwork {
    fn send(
        &self,
        method: Method,
        url: Url,
        headers: HeaderMap,
        body: Option<Content>,
    ) -> BoxFuture<'_, Result<RawResponse, Cause>> {
        assert!(method == Method::GET && body.is_none(), "only reads");
        let headers = headers.iter().map(|(name, value)| {
            let value = value.to_str().expect("text");
            (name.as_str().to_owned(), value.to_owned())
        });
        let response = (self.handler)(&Request::get(url.path(), headers.collect()));
        Box::pin(answer(response))
    }

    fn reconnect(&self, _url: &Url, _options: &Options) -> Result<Box<dyn Transport>, Cause> {
        Ok(Box::new(self.clone()))
    }
}

fn obstacle(obstacle: Obstacle) -> Cause {
    Cause::Unreachable {
        obstacle,
        detail: String::new(),
    }
}

async fn answer(response: Response) -> Result<RawResponse, Cause> {
    tokio::time::sleep(response.delay).await;
    match response.end {
        End::HangUp => return Err(obstacle(Obstacle::Connection)),
        End::Silence => std::future::pending().await,
        End::Normal | End::Stall | End::Reset => {}
    }
    let mut headers: HeaderMap = response
        .headers
        .iter()
        .map(|(name, value)| {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
            (name, HeaderValue::from_str(value).expect("a value"))
        })
        .collect();
    if !response.is_chunked {
        headers.insert("content-length", response.body.len().into());
    }
    Ok(RawResponse {
        status: StatusCode::from_u16(response.status).expect("a status"),
        headers,
        content: content(&response),
    })
}

/// The sent part of the body, and the behaviour after it.
fn content(response: &Response) -> Content {
    let sent = response.sent_body();
    let is_cut = sent.len() < response.body.len();
    let (piece_len, pause) = response.pace.unwrap_or((16 << 10, Duration::ZERO));
    let end = response.end;
    Content::new(stream::unfold(Some(sent), move |rest| async move {
        let mut rest: Bytes = rest?;
        if rest.is_empty() {
            let cause = match end {
                End::Stall => std::future::pending().await,
                End::Reset => obstacle(Obstacle::Connection),
                _ if is_cut => Cause::Truncated,
                _ => return None,
            };
            return Some((Err(cause), None));
        }
        tokio::time::sleep(pause).await;
        let piece = rest.split_to(piece_len.min(rest.len()));
        Some((Ok(piece), Some(rest)))
    }))
}
