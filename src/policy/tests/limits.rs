//! Limits by example: what can be meant, and what cannot.

use std::time::Duration;

use super::{ms, secs};
use crate::policy::{Limits, at_least_one, attempt_timeout};

#[test]
fn no_attempts_cannot_be_meant() {
    assert_eq!(
        at_least_one(0).expect_err("refused").field(),
        "max_attempts"
    );
    for attempts in [1, 3, u32::MAX] {
        assert_eq!(at_least_one(attempts), Ok(attempts));
    }
}

#[test]
fn a_zero_timeout_cannot_be_meant_and_the_longest_is_none() {
    let refused = attempt_timeout(Duration::ZERO).expect_err("refused");
    assert_eq!(refused.field(), "attempt_timeout");
    assert_eq!(attempt_timeout(Duration::MAX), Ok(None));
    assert_eq!(attempt_timeout(ms(1)), Ok(Some(ms(1))));
}

#[test]
fn a_deadline_must_leave_room_for_an_attempt() {
    let field = |reserve, minimum_attempt, deadline| {
        let limits = Limits {
            max_attempts: 1,
            attempt_timeout: None,
            minimum_attempt,
            reserve,
        };
        limits.validate(deadline).err().map(|error| error.field())
    };
    assert_eq!(field(ms(0), ms(0), ms(0)), Some("deadline"));
    assert_eq!(field(secs(1), ms(0), secs(1)), Some("reserve"));
    assert_eq!(field(ms(600), ms(401), secs(1)), Some("minimum_attempt"));
    assert_eq!(field(ms(600), ms(400), secs(1)), None);
    // Nothing at all is taken for the shortest attempt.
    assert_eq!(
        field(ms(0), ms(0), Duration::from_micros(999)),
        Some("minimum_attempt")
    );
    assert_eq!(field(ms(0), ms(0), ms(1)), None);
}
