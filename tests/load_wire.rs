//! Load control over real sockets: measured by what the server saw, and by its clock.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

mod net;
mod support;

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use net::call::{over, retry, send};
use net::{Act, ClosedPort, Rest, Wire, answer, patiently, settle};
use reqwest_idempotent_retry::{
    Backoff, BreakerSnapshot, BreakerState, Certainty, CircuitBreaker, Failure, LoadControl,
    LoadControlBuilder, LoadSnapshot, NoRetry, RetryMiddlewareBuilder, StopReason,
};
use reqwest_middleware::ClientWithMiddleware;
use support::{lock, ms, plain_http, plain_http_builder, secs};
use tokio::sync::Notify;

fn shared(builder: LoadControlBuilder) -> Arc<LoadControl> {
    Arc::new(builder.build().expect("valid settings"))
}

fn with_load(load: &Arc<LoadControl>) -> RetryMiddlewareBuilder {
    retry().load_control(Arc::clone(load))
}

/// The one host that is known.
fn figures(load: &LoadControl) -> LoadSnapshot {
    let mut all = load.snapshots();
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn breaker(load: &LoadControl) -> BreakerSnapshot {
    *figures(load).breaker().expect("a breaker")
}

/// When the server had read each request, by its own clock.
type Arrivals = Arc<Mutex<Vec<(String, Instant)>>>;

fn arrivals_of(arrivals: &Arrivals, path: &str) -> Vec<Instant> {
    let arrivals = lock(arrivals);
    let of_path = arrivals.iter().filter(|(of, _)| of == path);
    of_path.map(|(_, at)| *at).collect()
}

#[tokio::test]
async fn a_wish_told_to_one_client_is_kept_by_another() {
    let arrivals = Arrivals::default();
    let log = Arc::clone(&arrivals);
    let server = Wire::routes(move |seen| {
        let mut log = lock(&log);
        log.push((seen.path.clone(), Instant::now()));
        let visits = log.iter().filter(|(path, _)| *path == seen.path).count();
        match (&*seen.path, visits) {
            ("/told", _) => answer(503).header("retry-after", "1").into(),
            ("/other", 1) => answer(503).into(),
            _ => answer(200).into(),
        }
    })
    .await;
    let load = shared(LoadControl::builder());
    let (one, two) = (
        over(plain_http(), with_load(&load)),
        over(plain_http(), with_load(&load)),
    );
    let told = send(one.get(server.url("/told")).with_extension(NoRetry)).await;
    assert_eq!(told.status().map(|status| status.as_u16()), Some(503));
    assert!(figures(&load).pushed_back_for() > ms(0));
    let came = send(two.get(server.url("/other"))).await;
    assert_eq!(came.told().attempts, 2);
    assert_eq!(came.status().map(|status| status.as_u16()), Some(200));
    let told_at = arrivals_of(&arrivals, "/told")[0];
    let others = arrivals_of(&arrivals, "/other");
    assert_eq!(others.len(), 2);
    // The first send passed at once; the retry came no earlier than anybody had been asked for.
    assert!(others[0].duration_since(told_at) < secs(1));
    let waited = others[1].duration_since(told_at);
    assert!((secs(1)..secs(5)).contains(&waited), "{waited:?}");
}

/// Opens after so many failures, for long.
fn with_breaker(failures: u32) -> Arc<LoadControl> {
    let breaker = CircuitBreaker::builder()
        .consecutive_failures(failures)
        .open_for(Backoff::fixed([secs(60)]))
        .build();
    shared(LoadControl::builder().breaker(breaker.expect("valid")))
}

fn from_address(address: IpAddr, load: &Arc<LoadControl>) -> ClientWithMiddleware {
    let http = plain_http_builder().local_address(address);
    over(http.build().expect("a client"), with_load(load))
}

#[tokio::test]
async fn an_address_that_is_not_ours_is_no_fault_of_the_service() {
    // TEST-NET-1 (RFC 5737): nobody has it.
    let nobodys = IpAddr::from([192, 0, 2, 1]);
    let load = with_breaker(1);
    let server = Wire::script([answer(200)]).await;
    let client = from_address(nobodys, &load);
    let came = send(client.post(server.url("/orders"))).await;
    // It is tried again, since an address may come back, and it costs the service nothing.
    let told = came.told();
    assert_eq!(
        (told.attempts, told.stop, told.certainty),
        (3, Some(StopReason::AttemptsExhausted), Certainty::NotSent)
    );
    let failures: Vec<_> = came.report.attempts().iter().map(|a| a.failure()).collect();
    assert_eq!(failures, [Some(Failure::Connect); 3]);
    assert_eq!(server.connections(), 0);
    let now = breaker(&load);
    assert_eq!(
        (now.state(), now.failures_in_a_row()),
        (BreakerState::Closed, 0)
    );
    // From an address that is ours the same service is well.
    let client = from_address(IpAddr::from([127, 0, 0, 1]), &load);
    let came = send(client.post(server.url("/orders"))).await;
    assert_eq!(came.told().stop, None);
    assert_eq!(server.saw(1).await.len(), 1);
}

#[tokio::test]
async fn a_port_that_refuses_is_a_fault_of_the_service() {
    let load = with_breaker(2);
    let port = ClosedPort::new();
    let client = over(plain_http(), with_load(&load));
    let came = send(client.get(port.url("/"))).await;
    // An operation of three attempts counts once.
    assert_eq!(came.told().attempts, 3);
    assert_eq!(
        (breaker(&load).state(), breaker(&load).failures_in_a_row()),
        (BreakerState::Closed, 1)
    );
    let came = send(client.get(port.url("/"))).await;
    assert_eq!(came.told().attempts, 3);
    assert_eq!(breaker(&load).state(), BreakerState::Open);
    let came = send(client.get(port.url("/"))).await;
    let told = came.told();
    assert_eq!(
        (told.attempts, told.stop),
        (1, Some(StopReason::BreakerOpen))
    );
}

const TASKS: usize = 64;
const LIMIT: usize = 4;

/// What the server has in hand: requests that it has read and not been told to answer.
#[derive(Default)]
struct InHand {
    now: usize,
    most: usize,
    releases: Vec<Arc<Notify>>,
}

#[tokio::test]
async fn a_server_never_has_more_in_hand_than_the_limit() {
    let in_hand = Arc::new(Mutex::new(InHand::default()));
    let taken = Arc::clone(&in_hand);
    let server = Wire::routes(move |_| {
        let mut taken = lock(&taken);
        taken.now += 1;
        taken.most = taken.most.max(taken.now);
        let rest = Rest {
            text: "HTTP/1.1 200 status\r\ncontent-length: 0\r\n\r\n",
            release: Arc::default(),
        };
        taken.releases.push(Arc::clone(&rest.release));
        Act::SayAndStall("", rest)
    })
    .await;
    let load = shared(LoadControl::builder().concurrency_limit(LIMIT));
    let client = over(plain_http(), with_load(&load));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| tokio::spawn(client.get(server.url("/")).send()))
        .collect();
    for round in 1..=TASKS / LIMIT {
        // The limit is used to the full, and then nothing more comes.
        assert_eq!(server.saw(round * LIMIT).await.len(), round * LIMIT);
        settle().await;
        let now = figures(&load);
        let waiting = TASKS - round * LIMIT;
        assert_eq!(
            (now.in_flight(), now.waiting()),
            (Some(LIMIT), Some(waiting))
        );
        let releases = {
            let mut in_hand = lock(&in_hand);
            assert_eq!((in_hand.now, in_hand.most), (LIMIT, LIMIT));
            in_hand.now = 0;
            std::mem::take(&mut in_hand.releases)
        };
        releases.iter().for_each(|release| release.notify_one());
    }
    for task in tasks {
        let answer = patiently("an answer", task).await.expect("no panic");
        assert_eq!(answer.expect("an answer").status(), 200);
    }
    assert_eq!(server.requests().len(), TASKS);
    assert_eq!(lock(&in_hand).most, LIMIT);
    let now = figures(&load);
    assert_eq!((now.in_flight(), now.waiting()), (Some(0), Some(0)));
}

/// The same with as many threads as there are, where only the most that was in hand can be known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_never_has_more_in_hand_than_the_limit_under_threads() {
    let most = Arc::new(Mutex::new((0_usize, 0_usize)));
    let taken = Arc::clone(&most);
    let load = shared(LoadControl::builder().concurrency_limit(LIMIT));
    let app = axum::Router::new().route(
        "/",
        axum::routing::get(move || {
            let taken = Arc::clone(&taken);
            async move {
                {
                    let mut taken = lock(&taken);
                    taken.0 += 1;
                    taken.1 = taken.1.max(taken.0);
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
                lock(&taken).0 -= 1;
            }
        }),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("its address"));
    let serving = tokio::spawn(async move { axum::serve(listener, app).await });
    let client = over(plain_http(), with_load(&load));
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| tokio::spawn(client.get(&url).send()))
        .collect();
    for task in tasks {
        let answer = patiently("an answer", task).await.expect("no panic");
        assert_eq!(answer.expect("an answer").status(), 200);
    }
    let (now, most) = *lock(&most);
    assert!(now == 0 && (1..=LIMIT).contains(&most), "{most} at once");
    serving.abort();
}
