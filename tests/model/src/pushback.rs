use loom::sync::Arc;
use loom::thread;

use crate::policy::{FirstSends, Pushback};
use crate::{now, secs};

pub(crate) fn the_latest_counts() {
    let pushback = Arc::new(Pushback::new(FirstSends::Pass));
    let other = pushback.clone();
    let longer = thread::spawn(move || other.note(now(), secs(5)));
    pushback.note(now(), secs(2));
    longer.join().expect("it ends");
    assert_eq!(pushback.remaining(now()), secs(5));
}
