//! Credentials in memory until shortly before they expire.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reqsign_core::time::Timestamp;
use reqsign_core::{Context, ProvideCredentialDyn, SigningCredential};
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use super::context::{FailedExchange, ProviderContext};
use crate::base::escape::is_control;
use crate::base::sync::Mutex;
use crate::source::Cause;
use crate::source::retry::{Failure, LONG_BLOCK};

/// Remaining lifetime at which credentials are renewed in the background.
const RENEWAL_MARGIN: Duration = Duration::from_mins(2);

/// The same for credentials that live only some minutes.
const SHORT_RENEWAL_MARGIN: Duration = Duration::from_secs(15);

/// Remaining lifetime below which credentials are not used. Signing needs ten seconds.
const MIN_LIFETIME: Duration = Duration::from_secs(11);

/// Minimum time between two loads, so that refusals and failures do not ask a provider again and again.
const RELOAD_PAUSE: Duration = Duration::from_secs(1);

/// Maximum length of the description of a failure.
const MAX_DESCRIPTION_CHARS: usize = 500;

pub(super) struct Provider<C> {
    name: String,
    is_optional: bool,
    finder: Box<dyn ProvideCredentialDyn<Credential = C>>,
}

impl<C> Provider<C> {
    /// A provider that errors call `name`.
    pub(super) fn new(
        name: impl Into<String>,
        finder: impl ProvideCredentialDyn<Credential = C>,
    ) -> Self {
        Self {
            name: name.into(),
            is_optional: false,
            finder: Box::new(finder),
        }
    }

    /// Treats a failure as the absence of credentials. Outside of a cloud there is no metadata server.
    pub(super) fn optional(self) -> Self {
        Self {
            is_optional: true,
            ..self
        }
    }

    fn refusal(&self, detail: &str) -> Cause {
        Cause::Credentials(format!("{}: {detail}", self.name))
    }

    fn outage(&self, detail: &str) -> Cause {
        Cause::CredentialsUnavailable {
            detail: format!("{}: {detail}", self.name).into(),
            is_outage: true,
            retry_after: None,
        }
    }

    /// The failure for an error and the failed exchange before it; `None` if the provider is absent.
    fn cause_of(
        &self,
        error: &reqsign_core::Error,
        exchange: Option<FailedExchange>,
        had_some: bool,
    ) -> Option<Cause> {
        let may_end = may_end(error, exchange.as_ref(), had_some);
        let is_there = exchange.as_ref().is_some_and(|failed| failed.is_answered);
        if self.is_optional && !had_some && !(is_there && may_end) {
            return None;
        }
        let mut detail = describe(error);
        if let Some(exchange) = &exchange
            && !detail.contains(&exchange.detail)
        {
            detail = format!("{detail}: {}", exchange.detail);
        }
        if !may_end {
            return Some(self.refusal(&detail));
        }
        let failure = exchange.map(|failed| failed.failure);
        let is_short =
            |failure: &Failure| failure.cause.is_transient() && !failure.cause.is_outage();
        Some(Cause::CredentialsUnavailable {
            detail: format!("{}: {detail}", self.name).into(),
            is_outage: !failure.as_ref().is_some_and(is_short),
            retry_after: failure.and_then(|failure| failure.retry_after),
        })
    }
}

/// Credentials of the first provider that has some. Later loads ask only that one.
pub(super) struct CredentialCache<C>(Arc<Inner<C>>);

struct Inner<C> {
    providers: Vec<Provider<C>>,
    context: ProviderContext,
    secret_of: fn(&C) -> String,
    /// Held while credentials are loaded, so that concurrent requests load them once.
    loading: AsyncMutex<()>,
    state: Mutex<State<C>>,
}

struct State<C> {
    current: Option<Loaded<C>>,
    /// Generation of the current credentials; 0 while there are none.
    generation: u64,
    /// Time and failure of the last load.
    last_load: Option<(Instant, Option<Cause>)>,
}

/// Result of a search in all providers.
#[derive(Clone)]
struct Loaded<C> {
    /// `None` if no provider has any, so that requests are anonymous.
    credential: Option<C>,
    /// Index of the provider.
    provider: usize,
    margin: Duration,
}

impl<C> fmt::Debug for CredentialCache<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CredentialCache").finish_non_exhaustive()
    }
}

impl<C: SigningCredential> CredentialCache<C> {
    /// `secret_of` returns what differs between two credentials, apart from their expiry.
    pub(super) fn new(
        providers: Vec<Provider<C>>,
        context: ProviderContext,
        secret_of: fn(&C) -> String,
    ) -> Self {
        let state = State {
            current: None,
            generation: 0,
            last_load: None,
        };
        Self(Arc::new(Inner {
            providers,
            context,
            secret_of,
            loading: AsyncMutex::new(()),
            state: Mutex::new(state),
        }))
    }

    pub(super) fn context(&self) -> &Context {
        &self.0.context.context
    }

    pub(super) fn provider_context(&self) -> &ProviderContext {
        &self.0.context
    }

    /// Returns the credentials with their generation, or `None` if no provider has any.
    ///
    /// It renews credentials that expire soon in the background. It fails only if a configured provider fails and no
    /// earlier credentials are valid.
    pub(super) async fn get(&self) -> Result<(Option<C>, u64), Cause> {
        let (usable, is_fresh) = self.0.usable();
        match usable {
            Some(found) if is_fresh => Ok(found),
            Some(found) => {
                drop(self.spawn_load());
                Ok(found)
            }
            None => {
                self.load().await;
                let (usable, _) = self.0.usable();
                usable.ok_or_else(|| self.0.last_failure().unwrap_or(Cause::Cancelled))
            }
        }
    }

    /// Whether other credentials than those of `generation`, which a server refused, are there now. A temporary failure
    /// of their provider is an error, because it may have others.
    pub(super) async fn renew(&self, generation: u64) -> Result<bool, Cause> {
        let has_others = || self.0.state.lock().generation != generation;
        if has_others() {
            return Ok(true);
        }
        self.load().await;
        let may_end = |cause: &Cause| cause.is_transient() || cause.is_descriptor_limit();
        match self.0.last_failure().filter(may_end) {
            Some(failure) if !has_others() => Err(failure),
            _ => Ok(has_others()),
        }
    }

    async fn load(&self) {
        // Fails only if the runtime ends.
        self.spawn_load().await.ok();
    }

    /// Loads in a task of its own, which goes on when the request is cancelled that needs it.
    #[expect(
        clippy::disallowed_methods,
        reason = "each load ends by its timeouts, and one runs at a time"
    )]
    fn spawn_load(&self) -> tokio::task::JoinHandle<()> {
        let inner = Arc::clone(&self.0);
        let requested = Instant::now();
        tokio::spawn(async move { inner.load(requested).await })
    }

    /// Names the provider of the current credentials, or those that have none.
    pub(super) fn origin(&self) -> String {
        let known = self.0.known_provider();
        if let Some(provider) = known.and_then(|number| self.0.providers.get(number)) {
            return provider.name.clone();
        }
        let names = self.0.providers.iter().map(|provider| &*provider.name);
        let names = names.collect::<Vec<_>>().join(", ");
        if names.is_empty() {
            return "none".to_owned();
        }
        format!("none (none found in {names})")
    }
}

impl<C: SigningCredential> Inner<C> {
    /// Returns the credentials if they can be used now, and whether they need no renewal.
    fn usable(&self) -> (Option<(Option<C>, u64)>, bool) {
        let state = self.state.lock();
        let Some(current) = &state.current else {
            return (None, false);
        };
        let Some(credential) = &current.credential else {
            return (Some((None, 0)), true);
        };
        let now = Timestamp::now();
        let is_usable = credential.is_valid_at(now + MIN_LIFETIME);
        let found = is_usable.then(|| (Some(credential.clone()), state.generation));
        (found, credential.is_valid_at(now + current.margin))
    }

    /// Loads credentials, unless another load has ended since the caller `asked`, or the server asks for a pause.
    async fn load(&self, requested: Instant) {
        let _loading = self.loading.lock().await;
        let last = self.state.lock().last_load.as_ref().map(|(at, _)| *at);
        if let Some(last) = last {
            let pause = self.last_failure().and_then(|cause| cause.retry_after());
            if last > requested || pause.is_some_and(|pause| !pause.is_zero()) {
                return;
            }
            tokio::time::sleep(RELOAD_PAUSE.saturating_sub(last.elapsed())).await;
        }
        let loaded = self.search(self.known_provider()).await;
        // At the end of the runtime searches fail, and this task ends here.
        tokio::task::yield_now().await;
        let mut state = self.state.lock();
        let failed_before = matches!(state.last_load, Some((_, Some(_))));
        let failure = loaded.as_ref().err().cloned();
        match loaded {
            Ok(loaded) => {
                let secret = |loaded: &Loaded<C>| loaded.credential.as_ref().map(self.secret_of);
                if state.current.as_ref().and_then(secret) != secret(&loaded) {
                    state.generation += 1;
                }
                state.current = Some(loaded);
            }
            Err(cause) if !failed_before && state.current.is_some() => {
                tracing::warn!("cannot renew credentials: {cause}");
            }
            Err(_) => {}
        }
        state.last_load = Some((Instant::now(), failure));
    }

    /// Failure of the last load, with what is left of the pause that its server asks for. No pause outlasts
    /// [`LONG_BLOCK`], because one wrong answer must not disable a mount.
    fn last_failure(&self) -> Option<Cause> {
        let (at, mut failure) = self.state.lock().last_load.clone()?;
        if let Some(Cause::CredentialsUnavailable { retry_after, .. }) = &mut failure {
            let elapsed = at.elapsed();
            let pause = retry_after.filter(|_| elapsed < LONG_BLOCK);
            *retry_after = pause.map(|pause| pause.saturating_sub(elapsed));
        }
        failure
    }

    fn known_provider(&self) -> Option<usize> {
        let state = self.state.lock();
        let current = state.current.as_ref()?;
        current.credential.as_ref().map(|_| current.provider)
    }

    /// Searches in the provider `known`, which had credentials before, or in all.
    async fn search(&self, known: Option<usize>) -> Result<Loaded<C>, Cause> {
        let now = Timestamp::now();
        let had_some = known.is_some();
        let providers = self.providers.iter().enumerate();
        for (number, provider) in providers.filter(|one| known.is_none_or(|known| known == one.0)) {
            // It is that of another provider.
            self.context.take_failure();
            let context = &self.context.context;
            let found = provider.finder.provide_credential_dyn(context).await;
            let exchange = self.context.take_failure();
            let limit = exchange.as_ref().filter(|_| !matches!(found, Ok(Some(_))));
            if let Some(limit) = limit.filter(|failed| failed.failure.cause.is_descriptor_limit()) {
                // A provider may take the missing descriptor for a missing file or server.
                let detail = format!("no credentials from {}: {}", provider.name, limit.detail);
                return Err(Cause::DescriptorLimit(detail));
            }
            match found {
                Ok(None) if had_some => {
                    return Err(provider.outage("it has no credentials any more"));
                }
                Ok(None) => {}
                Ok(Some(credential)) if !credential.is_valid_at(now + MIN_LIFETIME) => {
                    let detail = "its credentials have expired";
                    return Err(if had_some {
                        provider.outage(detail)
                    } else {
                        provider.refusal(detail)
                    });
                }
                Ok(Some(credential)) => {
                    let is_long = credential.is_valid_at(now + RENEWAL_MARGIN * 2);
                    let margin = if is_long {
                        RENEWAL_MARGIN
                    } else {
                        SHORT_RENEWAL_MARGIN
                    };
                    return Ok(Loaded {
                        credential: Some(credential),
                        provider: number,
                        margin,
                    });
                }
                Err(error) => {
                    if let Some(cause) = provider.cause_of(&error, exchange, had_some) {
                        return Err(cause);
                    }
                    tracing::debug!("{}: {error}", provider.name);
                }
            }
        }
        Ok(Loaded {
            credential: None,
            provider: 0,
            margin: Duration::ZERO,
        })
    }
}

/// Whether the failure of a provider may end, so that it is no refusal. If the provider `had_some` credentials
/// before, only a server's clear refusal is one.
fn may_end(error: &reqsign_core::Error, exchange: Option<&FailedExchange>, had_some: bool) -> bool {
    match exchange {
        // The providers know transient errors of STS that have status 400.
        Some(failed) => {
            failed.failure.cause.is_transient() || failed.is_answered && error.is_retryable()
        }
        None => had_some || error.is_retryable(),
    }
}

/// Describes a failure without the values that a parser or a server quotes, apart from an OAuth error code.
fn describe(error: &reqsign_core::Error) -> String {
    let text = error.to_string();
    let quotes = |rest: &str| text.contains("pars") || rest.contains(['{', '<']);
    let text = match text.split_once(':') {
        Some((failure, rest)) if quotes(rest) => match oauth_error(rest) {
            Some(code) => format!("{failure}: {code}"),
            None => failure.to_owned(),
        },
        _ => text,
    };
    let printable = text.chars().filter(|letter| !is_control(*letter));
    printable.take(MAX_DESCRIPTION_CHARS).collect()
}

/// Returns the code in an OAuth 2.0 error response (RFC 6749, 5.2), such as `invalid_grant`.
fn oauth_error(response: &str) -> Option<&str> {
    let (_, rest) = response.split_once("\"error\"")?;
    let code = rest.trim_start().strip_prefix(':')?;
    let (code, _) = code.trim_start().strip_prefix('"')?.split_once('"')?;
    let is_code = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    (code.len() <= 64 && code.bytes().all(is_code)).then_some(code)
}

#[cfg(test)]
mod tests {
    use reqsign_core::ProvideCredential;

    use super::*;

    #[derive(Clone, PartialEq, Eq, Debug)]
    struct Key {
        number: u64,
        until: Timestamp,
    }

    impl SigningCredential for Key {
        fn is_valid(&self) -> bool {
            self.is_valid_at(Timestamp::now())
        }

        fn is_valid_at(&self, time: Timestamp) -> bool {
            self.until > time
        }
    }

    /// Gives keys with the next lifetimes in seconds, and then fails.
    #[derive(Clone, Debug)]
    struct Keys(Arc<Mutex<Vec<u64>>>);

    impl ProvideCredential for Keys {
        type Credential = Key;

        async fn provide_credential(
            &self,
            _context: &Context,
        ) -> Result<Option<Key>, reqsign_core::Error> {
            let mut left = self.0.lock();
            let missing = || reqsign_core::Error::unexpected("no more");
            let lifetime = left.pop().ok_or_else(missing)?;
            Ok((lifetime > 0).then(|| Key {
                number: left.len() as u64,
                until: Timestamp::now() + Duration::from_secs(lifetime),
            }))
        }
    }

    fn provider(name: &str, is_optional: bool, lifetimes: &[u64]) -> (Provider<Key>, Keys) {
        let keys = Keys(Arc::new(Mutex::new(
            lifetimes.iter().rev().copied().collect(),
        )));
        let provider = Provider {
            is_optional,
            ..Provider::new(name, keys.clone())
        };
        (provider, keys)
    }

    fn cache(providers: Vec<Provider<Key>>) -> CredentialCache<Key> {
        let context = ProviderContext::from(Context::new());
        CredentialCache::new(providers, context, |key| key.number.to_string())
    }

    async fn next(cache: &CredentialCache<Key>) -> Option<u64> {
        let (key, _) = cache.get().await.ok()?;
        Some(key?.number)
    }

    /// Lets the next load happen at once.
    fn forget_last_load(cache: &CredentialCache<Key>) {
        cache.0.state.lock().last_load = None;
    }

    // Promises: store-refresh, login-tokens
    #[tokio::test]
    async fn credentials_are_kept_until_shortly_before_they_expire() {
        for lifetime in [3600, 30] {
            let (provider, keys) = provider("keys", false, &[lifetime, 3600]);
            let cache = cache(vec![provider]);
            assert_eq!((next(&cache).await, next(&cache).await), (Some(1), Some(1)));
            assert_eq!(keys.0.lock().len(), 1, "one load");
        }
        // A key about to expire stays in use while another one is loaded.
        let (provider, _) = provider("keys", false, &[13, 3600]);
        let cache = cache(vec![provider]);
        assert_eq!(next(&cache).await, Some(1));
        forget_last_load(&cache);
        assert_eq!(next(&cache).await, Some(1));
        cache.load().await;
        assert_eq!(next(&cache).await, Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn long_pauses_of_a_server_are_cut() {
        let (keys, _) = provider("keys", false, &[600]);
        let asked = Duration::from_hours(24);
        let failure = Cause::CredentialsUnavailable {
            detail: "busy".into(),
            is_outage: true,
            retry_after: Some(asked),
        };
        let cache = cache(vec![keys]);
        cache.0.state.lock().last_load = Some((Instant::now(), Some(failure)));
        let pause = || cache.0.last_failure().and_then(|cause| cause.retry_after());
        assert_eq!(pause(), Some(asked));
        tokio::time::advance(LONG_BLOCK).await;
        assert_eq!(pause(), None);
        assert_eq!(next(&cache).await, Some(0));
    }

    // Promises: store-refresh
    #[tokio::test]
    async fn failing_provider_leaves_valid_credentials_in_use() {
        let (first, _) = provider("metadata", true, &[60, 0]);
        let (second, _) = provider("others", false, &[3600]);
        let cache = cache(vec![first, second]);
        assert_eq!(next(&cache).await, Some(1));
        for _ in 0..2 {
            // First it has none, and then it fails. No other provider is asked.
            forget_last_load(&cache);
            cache.load().await;
            assert_eq!(next(&cache).await, Some(1));
        }
        let state = &cache.0.state;
        let key = state
            .lock()
            .current
            .as_mut()
            .and_then(|loaded| loaded.credential.take());
        let expired = Key {
            until: Timestamp::now(),
            ..key.expect("loaded")
        };
        state.lock().current.as_mut().expect("loaded").credential = Some(expired);
        let error = cache.get().await.expect_err("no more");
        assert!(error.to_string().contains("metadata"), "{error}");
    }

    // Promises: store-refresh, s3-credentials
    #[tokio::test]
    async fn search_goes_on_only_after_providers_without_credentials() {
        let found = |providers: Vec<(Provider<Key>, Keys)>| async {
            let providers = providers.into_iter().map(|(provider, _)| provider);
            cache(providers.collect())
                .get()
                .await
                .map(|(key, generation)| (key.is_some(), generation))
        };
        let key = || provider("key", false, &[3600]);
        let none = || provider("none", false, &[0]);
        let metadata = || provider("metadata", true, &[]);
        assert!(matches!(found(vec![none(), key()]).await, Ok((true, 1))));
        assert!(matches!(
            found(vec![none(), metadata()]).await,
            Ok((false, 0))
        ));
        let failing = found(vec![provider("broken", false, &[]), key()]).await;
        assert!(failing.is_err_and(|error| error.to_string().contains("broken")));
    }

    // Promises: store-refresh, retry-credentials
    #[tokio::test]
    async fn refused_credentials_are_loaded_again_once() {
        let (provider, keys) = provider("keys", false, &[3600, 3600, 3600]);
        let cache = cache(vec![provider]);
        let (_, generation) = cache.get().await.expect("the first");
        forget_last_load(&cache);
        // Two requests were refused at the same time.
        let both = tokio::join!(cache.renew(generation), cache.renew(generation));
        assert!(matches!(both, (Ok(true), Ok(true))), "{both:?}");
        assert_eq!(keys.0.lock().len(), 1, "two loads in all");
        // The next is the last.
        let (_, generation) = cache.get().await.expect("the second");
        assert!(matches!(cache.renew(generation).await, Ok(true)));
        let (_, generation) = cache.get().await.expect("the third");
        let failure = cache.renew(generation).await.expect_err("no more");
        assert!(failure.is_outage(), "{failure}");
        assert_eq!(next(&cache).await, Some(0));
    }

    // Promises: store-refresh
    #[tokio::test]
    async fn expired_credentials_are_an_error() {
        let (provider, _) = provider("keys", false, &[10]);
        let error = cache(vec![provider]).get().await.expect_err("expired");
        let text = error.to_string();
        assert!(
            text.contains("keys: its credentials have expired"),
            "{text}"
        );
    }

    // Promises: store-errors
    #[test]
    fn descriptions_quote_no_values() {
        for (text, expected) in [
            ("no such file", "no such file"),
            ("failed to parse token: secret", "failed to parse token"),
            (
                r#"refresh failed: {"secret": 1, "error" : "invalid_grant"}"#,
                "refresh failed: invalid_grant",
            ),
            (r#"refresh failed: {"error": {"a": "b"}}"#, "refresh failed"),
            ("refresh failed: <html>secret", "refresh failed"),
            ("az: Please\nlog in", "az: Pleaselog in"),
        ] {
            let error = reqsign_core::Error::unexpected(text);
            assert_eq!(describe(&error), expected);
        }
        let long = reqsign_core::Error::unexpected("a".repeat(1 << 20));
        assert_eq!(describe(&long).len(), MAX_DESCRIPTION_CHARS);
    }
}
