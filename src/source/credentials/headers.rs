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
    /// Loads them with a login, from the first status 401 on.
    load_with_login: Option<HeaderLoader>,
    /// Name of their place in errors.
    origin: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    headers: HeaderMap,
    /// Number of times that other headers were loaded.
    number: u64,
    /// Whether the server has sent status 401.
    is_challenged: bool,
}

impl ReloadedHeaders {
    /// Sends `headers`, which are from `origin`, until the server refuses them, and `load_with_login` only after 401.
    pub(crate) fn new(
        headers: HeaderMap,
        load: HeaderLoader,
        load_with_login: Option<HeaderLoader>,
        origin: String,
    ) -> Self {
        let state = State {
            headers,
            number: 0,
            is_challenged: false,
        };
        Self {
            load,
            load_with_login,
            origin,
            state: Mutex::new(state),
        }
    }

    /// Whether other headers than those with `number` are there now.
    async fn reload(&self, load: HeaderLoader, number: u64) -> bool {
        if self.state.lock().number != number {
            return true;
        }
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
        let is_challenged = {
            let mut state = self.state.lock();
            state.is_challenged |= response.status == StatusCode::UNAUTHORIZED;
            state.is_challenged
        };
        let load_with_login = self.load_with_login.as_ref().filter(|_| is_challenged);
        let load = load_with_login.unwrap_or(&self.load).clone();
        let should_load = response.allows_other_credentials();
        async move { Ok(should_load && self.reload(load, number).await) }.boxed()
    }

    fn credentials_origin(&self) -> String {
        self.origin.clone()
    }
}
