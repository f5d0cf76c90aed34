//! Headers of the user, loaded again when the server refuses them.

use futures_util::future::{BoxFuture, FutureExt, ready};
use reqwest::StatusCode;
use reqwest::header::HeaderMap;

use crate::base::sync::Mutex;
use crate::source::Cause;
use crate::source::client::authorizer::{
    Authorizer, ErrorResponse, HeaderLoader, Request, parse_headers,
};

/// Headers that a file holds, such as a bearer token that another program renews.
#[derive(Debug)]
pub(crate) struct ReloadedHeaders {
    load: HeaderLoader,
    /// Name of their place in errors.
    origin: String,
    /// Whether only status 401, and not 403, makes it load headers for the first time.
    needs_challenge: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    headers: HeaderMap,
    /// Number of times that other headers were loaded.
    number: u64,
}

impl ReloadedHeaders {
    /// Sends `headers`, which are from `origin`, until the server refuses them, the first time with 401 if it
    /// `needs_challenge`.
    pub(crate) fn new(
        headers: HeaderMap,
        load: HeaderLoader,
        origin: String,
        needs_challenge: bool,
    ) -> Self {
        let state = Mutex::new(State { headers, number: 0 });
        Self {
            load,
            origin,
            needs_challenge,
            state,
        }
    }

    /// Whether other headers than those with `number` are there now.
    async fn reload(&self, number: u64) -> bool {
        if self.state.lock().number != number {
            return true;
        }
        let load = self.load.clone();
        let loaded = tokio::task::spawn_blocking(move || load.load()).await;
        let loaded = loaded.map_err(|_| "the read was cancelled".to_owned());
        let parsed = loaded
            .flatten()
            .and_then(|headers| parse_headers(&headers).map_err(|cause| cause.to_string()));
        match parsed {
            Ok(headers) => {
                let mut state = self.state.lock();
                let is_new = state.headers != headers;
                if is_new {
                    state.headers = headers;
                    state.number += 1;
                }
                is_new || state.number != number
            }
            Err(error) => {
                tracing::warn!("cannot load the headers again: {error}");
                false
            }
        }
    }
}

impl Authorizer for ReloadedHeaders {
    fn authorize<'a>(&'a self, request: &'a mut Request) -> BoxFuture<'a, Result<(), Cause>> {
        let state = self.state.lock();
        let others = std::mem::replace(&mut request.headers, state.headers.clone());
        // Ranges and conditions are not the user's.
        request.headers.extend(others);
        request.generation = state.number;
        ready(Ok(())).boxed()
    }

    fn should_resend(
        &self,
        request: &Request,
        response: &ErrorResponse,
    ) -> BoxFuture<'_, Result<bool, Cause>> {
        let number = request.generation;
        let is_first = self.needs_challenge && number == 0;
        let is_asked = !is_first || response.status == StatusCode::UNAUTHORIZED;
        let should_load = is_asked && response.allows_other_credentials();
        async move { Ok(should_load && self.reload(number).await) }.boxed()
    }

    fn credentials_origin(&self) -> String {
        self.origin.clone()
    }
}
