//! Logs and counts panics, which are bugs of this program.
//!
//! A worker thread that panics continues with its next task, and the caller gets an error. In the background,
//! stderr leads nowhere, so only the log has the reason.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Display;
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::Level;

static PANIC_COUNT: AtomicU64 = AtomicU64::new(0);

/// Logs each panic from now on. Without a log, uses the default hook.
pub(crate) fn install() {
    let default_hook = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        PANIC_COUNT.fetch_add(1, Ordering::Relaxed);
        if !tracing::enabled!(Level::ERROR) {
            return default_hook(panic);
        }
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("(unnamed)");
        let place = panic.location().map(ToString::to_string);
        let place = place.as_deref().unwrap_or("(unknown)");
        let message = payload_text(panic.payload());
        // Captured only if the environment asks for it, as for any Rust program.
        let trace = Backtrace::capture();
        let trace: &dyn Display = match trace.status() {
            BacktraceStatus::Captured => &format!("\n{trace}"),
            _ => &"",
        };
        tracing::error!("thread '{thread}' panicked at {place}: {message}{trace}");
    }));
}

pub(crate) fn count() -> u64 {
    PANIC_COUNT.load(Ordering::Relaxed)
}

fn payload_text(payload: &(dyn Any + Send)) -> &str {
    let owned = || payload.downcast_ref::<String>().map(String::as_str);
    let borrowed = payload.downcast_ref::<&str>().copied();
    borrowed.or_else(owned).unwrap_or("(no message)")
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("whole").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    // Promises: log-panic
    #[test]
    fn panic_is_logged_and_counted() {
        let log = Log::default();
        let lines = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(move || lines.clone())
            .finish();
        install();
        let before = count();
        let line = line!() + 2;
        tracing::subscriber::with_default(subscriber, || {
            panic::catch_unwind(|| panic!("on {}", "purpose")).expect_err("a panic");
        });
        assert!(count() > before);
        let text = String::from_utf8(log.0.lock().expect("whole").clone()).expect("text");
        assert!(text.contains("ERROR"), "{text}");
        let place = format!(" panicked at {}:{line}:", file!());
        assert!(text.contains(&place), "{place}: {text}");
        assert!(text.contains(": on purpose"), "{text}");
    }

    #[test]
    fn panic_payload_without_text_is_accepted() {
        assert_eq!(payload_text(&"borrowed"), "borrowed");
        assert_eq!(payload_text(&"owned".to_owned()), "owned");
        assert_eq!(payload_text(&7), "(no message)");
    }
}
