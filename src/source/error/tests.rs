//! Tests of errors.

use std::error::Error as _;
use std::io;

use super::*;
use crate::base::descriptor_limit::HINT_RAISE_DESCRIPTOR_LIMIT;

// Promises: error-line
#[test]
fn error_text_has_location_and_attempts_but_no_cause() {
    let mut error = Error::new("http://host/a", Cause::Http(500));
    assert_eq!(error.to_string(), "cannot read http://host/a");
    error.attempts = 3;
    error.elapsed = Duration::from_millis(2_140);
    assert_eq!(
        error.to_string(),
        "cannot read http://host/a (3 attempts in 2.1 s)"
    );
    let upload = error.clone().of_upload().to_string();
    assert!(upload.starts_with("cannot upload to http://host/a ("));
    let cause = error.source().map(ToString::to_string);
    assert_eq!(cause.as_deref(), Some("the server answers with status 500"));
}

// Promises: retry-which
#[test]
fn errors_of_tls_are_final_only_at_open() {
    let met = |obstacle| Cause::Unreachable {
        obstacle,
        detail: String::new(),
    };
    for obstacle in [
        Obstacle::Tls,
        Obstacle::Certificate,
        Obstacle::CertificateDates,
        Obstacle::CertificateUse,
    ] {
        assert!(!met(obstacle).is_transient() && !met(obstacle).is_outage());
    }
    assert!(met(Obstacle::Tls).after_open().is_transient());
    assert!(met(Obstacle::Tls).after_open().is_outage());
    assert!(!met(Obstacle::Certificate).after_open().is_transient());
    let refused = Cause::Credentials("the profile".to_owned());
    assert!(!refused.is_transient() && !refused.is_outage());
    let outage = |is_outage| Cause::CredentialsUnavailable {
        detail: Box::default(),
        is_outage,
        retry_after: None,
    };
    assert!(outage(true).is_transient() && outage(true).is_outage());
    assert!(outage(false).is_transient() && !outage(false).is_outage());
    assert!(!Cause::NotFound.after_open().is_transient());
}

// Promises: retry-how-long
#[test]
fn statuses_of_gateways_and_rate_limits_are_outages() {
    for status in [
        429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530,
    ] {
        let cause = Cause::from_status(status, None);
        assert!(cause.is_transient() && cause.is_outage(), "{status}");
    }
    let pause = Some(Duration::ZERO);
    assert!(Cause::from_status(403, pause).is_outage());
    assert!(matches!(
        Cause::from_status(403, None),
        Cause::DeniedStatus(403)
    ));
    assert!(matches!(
        Cause::from_status(401, pause),
        Cause::DeniedStatus(401)
    ));
    for status in [400, 404, 409, 418] {
        let cause = Cause::from_status(status, pause);
        assert!(!cause.is_transient() && !cause.is_outage(), "{status}");
    }
}

// Promises: store-errors
#[test]
fn described_errors_keep_class_and_code() {
    let described = |status, retry_after, code: &str| {
        let code = (!code.is_empty()).then(|| code.to_owned());
        Cause::from_status(status, retry_after).with_error(status, code, None)
    };
    let pause = Some(Duration::from_secs(1));
    for (status, code, class) in [
        (404, "NoSuchBucket", Class::NotFound),
        (404, "ContainerNotFound", Class::NotFound),
        (404, "NoSuchKey", Class::NotFound),
        (403, "InvalidObjectState", Class::AccessDenied),
        (409, "BlobArchived", Class::AccessDenied),
        (403, "AccessDenied", Class::AccessDenied),
        (400, "KMS.DisabledException", Class::Unreachable),
        (412, "PreconditionFailed", Class::Changed),
    ] {
        let cause = described(status, None, code);
        assert_eq!(cause.class(), class, "{code}");
        assert!(!cause.is_transient() && !cause.is_outage(), "{code}");
        let is_told = code == "NoSuchKey" || code == "PreconditionFailed";
        assert!(is_told || cause.to_string().contains(code), "{cause}");
    }
    for status in [400, 401, 403, 404, 409, 503] {
        for (code, is_outage) in [("SlowDown", true), ("RequestTimeout", status == 503)] {
            let cause = described(status, None, code);
            let class = if is_outage {
                Class::Outage
            } else {
                Class::Unreachable
            };
            assert!(cause.is_transient(), "{status} {code}");
            assert_eq!(cause.is_outage(), is_outage, "{status} {code}");
            assert_eq!(cause.class(), class, "{status} {code}");
        }
    }
    assert!(described(403, pause, "RateLimited").is_outage());
}

// Promises: request-rejected
#[test]
fn throttling_is_known_by_status_or_code() {
    let described = |status, code: &str| {
        Cause::from_status(status, None).with_error(status, Some(code.to_owned()), None)
    };
    for (status, code) in [
        (400, "SlowDown"),
        (403, "TooManyRequests"),
        (409, "ServerBusy"),
        (500, "Throttling"),
        (429, "Other"),
        (503, "InternalError"),
    ] {
        assert!(described(status, code).is_throttling(), "{status} {code}");
    }
    assert!(Cause::from_status(403, Some(Duration::ZERO)).is_throttling());
    for (status, code) in [
        (500, "InternalError"),
        (403, "AccessDenied"),
        (403, "RequestTimeout"),
    ] {
        assert!(!described(status, code).is_throttling(), "{status} {code}");
    }
}

#[test]
fn every_outage_but_a_long_pause_has_one_class() {
    let unreachable = Cause::Unreachable {
        obstacle: Obstacle::Refused,
        detail: String::new(),
    };
    for cause in [unreachable, Cause::Http(503), Cause::Http(429)] {
        assert_eq!(cause.class(), Class::Outage, "{cause}");
    }
    assert_eq!(Cause::Busy(Duration::ZERO).class(), Class::TimedOut);
    assert_eq!(Cause::Http(501).class(), Class::Unreachable);
    let limit = Cause::from(io::Error::from_raw_os_error(24));
    assert!(limit.is_descriptor_limit() && !limit.is_transient());
    assert_eq!(limit.hint().as_deref(), Some(HINT_RAISE_DESCRIPTOR_LIMIT));
}

// Promises: retry-which
#[test]
fn transient_and_permanent_causes_are_distinguished() {
    for status in [408, 421, 425, 501, 505] {
        let cause = Cause::from_status(status, None);
        assert!(cause.is_transient() && !cause.is_outage(), "{status}");
    }
    for cause in [
        Cause::Http(400),
        Cause::NotFound,
        Cause::Changed,
        Cause::DeniedStatus(403),
    ] {
        assert!(!cause.is_transient(), "{cause}");
    }
}
