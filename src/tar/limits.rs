//! What a hostile archive may cost us.

/// Explicit limits, each with the attack it stops.
#[derive(Clone, Debug, Default)]
pub struct Limits {}
