//! The layer against gateways, idempotency libraries and a fault injector that nobody here wrote.
//!
//! What is counted is counted where the orders are. `.ci/counterparts-setup` installs the programs;
//! a test whose program is missing says so and passes, except under `CI=true` or
//! `COUNTERPARTS=required`. `--nocapture` prints a row for each operation.

#![allow(
    clippy::disallowed_methods,
    reason = "tests are the callers: they read the time and wait themselves"
)]

#[path = "counterparts/gateway.rs"]
mod gateway;
#[path = "counterparts/key_server.rs"]
mod key_server;
mod net;
#[path = "counterparts/operation.rs"]
mod operation;
#[path = "counterparts/programs.rs"]
mod programs;
mod support;

use std::time::Duration;

use Certainty::{Answered, NotProcessed, NotSent, Unknown};
use gateway::{Gateway, Kind};
use http::HeaderName;
use key_server::{FaultyPath, KeyServer, Library};
use net::{Act, Wire, answer, patiently};
use operation::{ATTEMPTS, Order, Told, client, keyed, layered, retry, unkeyed};
use reqwest::{Request, Response, StatusCode};
use reqwest_idempotent_retry::{Attempt, Backoff, Certainty, RetryMiddlewareBuilder};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use support::{ms, secs};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

fn address_of(origin: &Wire) -> String {
    let url = origin.url("");
    url.trim_start_matches("http://").to_owned()
}

// ---- Gateways: what becomes of an operation on its way through one ----

/// What the caller is told, and what the origin saw. An origin of these tests takes every request
/// that reaches it as an order, once per key.
#[derive(Debug, PartialEq)]
struct Passage {
    told: Told,
    arrivals: usize,
    orders: usize,
}

/// Sends an order through a gateway to an origin that does one act after the other.
async fn passes(
    kind: Kind,
    path: &str,
    origin: &[Act],
    settings: RetryMiddlewareBuilder,
    order: &Order,
    expected: Passage,
) {
    let origin = Wire::script(origin.to_vec()).await;
    let Some(gateway) = kind.before(&address_of(&origin)).await else {
        return;
    };
    let outcome = order.send(&client(settings), &gateway.url(path)).await;
    let seen = Passage {
        told: outcome.told(),
        arrivals: origin.saw(expected.arrivals).await.len(),
        orders: origin.orders(),
    };
    println!(
        "{kind:?} {path} {}: {}, {} arrivals, {} orders",
        order.name, seen.told, seen.arrivals, seen.orders
    );
    assert_eq!(seen, expected, "{kind:?} {path} {}", order.name);
}

/// The origin takes the order and then does this: once, or every time.
async fn origin_takes_the_order_and(act: Act, status: u16) {
    for kind in Kind::BOTH {
        let once = [act.clone(), answer(201).into()];
        let always = [act.clone()];
        let [order, plain] = Order::both("taken once");
        let recovers = passes(
            kind,
            "/plain/orders",
            &once,
            retry(),
            &order,
            Passage {
                told: order.is_done(&[Unknown, Answered]),
                arrivals: 2,
                orders: 1,
            },
        );
        let is_left = passes(
            kind,
            "/plain/orders",
            &once,
            retry(),
            &plain,
            Passage {
                told: plain.stays_unknown(Some(status)),
                arrivals: 1,
                orders: 1,
            },
        );
        let hopeless = keyed("taken-always");
        let gives_up = passes(
            kind,
            "/plain/orders",
            &always,
            retry(),
            &hopeless,
            Passage {
                told: hopeless.stays_unknown(Some(status)),
                arrivals: ATTEMPTS,
                orders: 1,
            },
        );
        tokio::join!(recovers, is_left, gives_up);
    }
}

#[tokio::test]
async fn a_504_of_a_gateway_says_nothing_of_the_order() {
    origin_takes_the_order_and(Act::Hang, 504).await;
}

#[tokio::test]
async fn a_502_after_a_close_says_nothing_of_the_order() {
    origin_takes_the_order_and(Act::Close, 502).await;
}

#[tokio::test]
async fn a_502_after_a_reset_says_nothing_of_the_order() {
    origin_takes_the_order_and(Act::Reset, 502).await;
}

/// That nothing has reached an origin is known to the gateway alone: its 502 and 503 look like
/// those after a commit.
#[tokio::test]
async fn a_gateway_without_a_backend_leaves_it_unknown() {
    for (kind, path, status) in [
        (Kind::Nginx, "/nobody/orders", 502),
        (Kind::Haproxy, "/nobody/orders", 503),
        (Kind::Haproxy, "/empty/orders", 503),
    ] {
        for order in Order::both("without backend") {
            let expected = Passage {
                told: order.stays_unknown(Some(status)),
                arrivals: 0,
                orders: 0,
            };
            passes(kind, path, &[Act::Close], retry(), &order, expected).await;
        }
    }
}

#[tokio::test]
async fn a_503_that_is_declared_to_come_before_any_work_is_not_processed() {
    let order = unkeyed("declared");
    let expected = Passage {
        told: order.may_be_sent_later(Some(503), &[NotProcessed; ATTEMPTS], None),
        arrivals: 0,
        orders: 0,
    };
    let settings = retry().refused_before_work([StatusCode::SERVICE_UNAVAILABLE]);
    let (kind, path) = (Kind::Haproxy, "/empty/orders");
    passes(kind, path, &[Act::Close], settings, &order, expected).await;
}

#[tokio::test]
async fn a_503_with_a_long_retry_after_is_handed_on_at_once() {
    for order in Order::both("maintenance") {
        let expected = Passage {
            told: order.is_unknown(Some(503), &[Unknown]),
            arrivals: 0,
            orders: 0,
        };
        let path = "/closed/orders";
        passes(Kind::Nginx, path, &[Act::Close], retry(), &order, expected).await;
    }
}

/// haproxy limits by count, so this needs no clock.
#[tokio::test]
async fn a_429_of_haproxy_is_waited_for() {
    let [order, plain] = Order::both("limited");
    let declared = unkeyed("declared");
    let created = |told| Passage {
        told,
        arrivals: 1,
        orders: 1,
    };
    let put_off = Passage {
        told: plain.may_be_sent_later(Some(429), &[Answered], Some(secs(1))),
        arrivals: 0,
        orders: 0,
    };
    let first = order.is_done(&[Answered, Answered]);
    let before_work = declared.is_done(&[NotProcessed, Answered]);
    let declares = || retry().refused_before_work([StatusCode::TOO_MANY_REQUESTS]);
    let through = |settings, order, expected| async move {
        let origin = [answer(201).into()];
        let path = "/limited/orders";
        passes(Kind::Haproxy, path, &origin, settings, order, expected).await;
    };
    tokio::join!(
        through(retry(), &order, created(first)),
        through(retry(), &plain, put_off),
        through(declares(), &declared, created(before_work)),
    );
}

#[tokio::test]
async fn a_429_of_nginx_is_waited_for() {
    let origin = Wire::script([answer(201)]).await;
    let Some(gateway) = Kind::Nginx.before(&address_of(&origin)).await else {
        return;
    };
    let (client, url) = (client(retry()), gateway.url("/limited/orders"));
    let spends = keyed("spends-the-allowance");
    let told = spends.send(&client, &url).await.told();
    assert_eq!(told, spends.is_done(&[Answered]));

    let plain = unkeyed("not-now");
    let told = plain.send(&client, &url).await.told();
    let put_off = plain.may_be_sent_later(Some(429), &[Answered], Some(secs(3)));
    assert_eq!(told, put_off);

    let order = keyed("waits");
    let outcome = order.send(&client, &url).await;
    assert_eq!(outcome.told(), order.is_done(&[Answered, Answered]));
    assert!(outcome.report.elapsed() >= secs(3), "{:?}", outcome.report);
    assert_eq!((origin.requests().len(), origin.orders()), (2, 2));
}

/// As nginx is by default: another backend is tried for a GET, and not for a POST.
#[tokio::test]
async fn nginx_does_not_repeat_a_post_unless_told_to() {
    let order = unkeyed("once");
    let expected = Passage {
        told: order.stays_unknown(Some(502)),
        arrivals: 1,
        orders: 1,
    };
    let origin = [Act::Close, answer(201).into()];
    let (kind, path) = (Kind::Nginx, "/pair/orders");
    passes(kind, path, &origin, retry(), &order, expected).await;
}

/// A gateway that repeats POSTs by itself breaks the rule that this crate keeps. From the client one
/// send and one 201 are seen; only a key keeps the two arrivals one order.
#[tokio::test]
async fn a_gateway_that_repeats_posts_makes_two_orders_of_one_send_without_a_key() {
    for kind in Kind::BOTH {
        for act in [Act::Close, Act::Hang] {
            let origin = [act, answer(201).into()];
            for (order, orders) in Order::both("repeated").iter().zip([1, 2]) {
                let expected = Passage {
                    told: order.is_done(&[Answered]),
                    arrivals: 2,
                    orders,
                };
                passes(kind, "/eager/orders", &origin, retry(), order, expected).await;
            }
        }
    }
}

/// The same gateways where every origin fails: each send of ours is several arrivals.
#[tokio::test]
async fn a_gateway_that_repeats_posts_multiplies_the_attempts() {
    for (kind, repeats) in [(Kind::Nginx, 2), (Kind::Haproxy, 3)] {
        for order in Order::both("multiplied") {
            let arrivals = order.most_sends() * repeats;
            let expected = Passage {
                told: order.stays_unknown(Some(502)),
                arrivals,
                orders: if order.key().is_some() { 1 } else { arrivals },
            };
            let path = "/eager/orders";
            passes(kind, path, &[Act::Close], retry(), &order, expected).await;
        }
    }
}

/// nginx hangs up, haproxy goes silent. Neither has asked the origin, yet from the client it looks
/// as if it had: the request was read.
#[tokio::test]
async fn a_gateway_that_does_not_answer_leaves_it_unknown() {
    for (kind, path) in [
        (Kind::Nginx, "/hangup/orders"),
        (Kind::Haproxy, "/silent/orders"),
    ] {
        for order in Order::both("no answer") {
            let expected = Passage {
                told: order.stays_unknown(None),
                arrivals: 0,
                orders: 0,
            };
            let settings = retry().attempt_timeout(ms(500));
            passes(kind, path, &[Act::Close], settings, &order, expected).await;
        }
    }
}

/// Starts the gateway again just before the second attempt.
struct Restart(Mutex<Gateway>);

#[async_trait::async_trait]
impl Middleware for Restart {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut http::Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let attempt: &Attempt = extensions.get().expect("below the layer");
        if attempt.number() == 2 {
            self.0.lock().await.start().await;
        }
        next.run(request, extensions).await
    }
}

#[tokio::test]
async fn a_gateway_that_is_down_is_never_sent_anything_and_gets_the_order_once_it_is_back() {
    for kind in Kind::BOTH {
        for order in Order::both("restart") {
            let origin = Wire::script([answer(201)]).await;
            let Some(mut gateway) = kind.before(&address_of(&origin)).await else {
                return;
            };
            let url = gateway.url("/plain/orders");
            gateway.stop();
            let told = order.send(&client(retry()), &url).await.told();
            let never = order.may_be_sent_later(None, &[NotSent; ATTEMPTS], None);
            assert_eq!(told, never, "{kind:?}");

            let restart = Restart(Mutex::new(gateway));
            let client = layered(retry()).with(restart).build();
            let told = order.send(&client, &url).await.told();
            assert_eq!(told, order.is_done(&[NotSent, Answered]), "{kind:?}");
            assert_eq!(origin.orders(), 1, "{kind:?}");
        }
    }
}

// ---- Envoy: it repeats by itself, and can be told not to ----

/// How often the Envoy of these tests sends what always fails.
const SENDS_OF_ENVOY: usize = 4;

/// Sends orders to an origin that always says 503, each of which arrives so often for each of our
/// sends.
async fn arrives(kind: Kind, settings: fn() -> RetryMiddlewareBuilder, times: usize) {
    for order in Order::both("sidecar") {
        let arrivals = order.most_sends() * times;
        let expected = Passage {
            told: order.stays_unknown(Some(503)),
            arrivals,
            orders: if order.key().is_some() { 1 } else { arrivals },
        };
        let origin = [answer(503).into()];
        passes(kind, "/eager/orders", &origin, settings(), &order, expected).await;
    }
}

fn alone() -> RetryMiddlewareBuilder {
    retry().sidecar_retries(false)
}

#[tokio::test]
async fn an_envoy_that_repeats_multiplies_the_attempts() {
    for kind in [Kind::Envoy, Kind::TrustfulEnvoy] {
        arrives(kind, retry, SENDS_OF_ENVOY).await;
    }
}

#[tokio::test]
async fn an_envoy_that_trusts_its_callers_can_be_told_not_to_repeat() {
    arrives(Kind::TrustfulEnvoy, alone, 1).await;
}

/// By default it trusts nobody, not on loopback either, and takes the header away.
#[tokio::test]
async fn an_envoy_that_does_not_trust_its_callers_repeats_whatever_they_say() {
    arrives(Kind::Envoy, alone, SENDS_OF_ENVOY).await;
}

/// An Envoy that is full says so in a header of its own, and has not asked the origin. Unless told
/// what that header means, the layer knocks again.
#[tokio::test]
async fn an_envoy_that_is_overloaded_is_left_alone_by_its_header() {
    let overloaded = HeaderName::from_static("x-envoy-overloaded");
    let heeds = || retry().no_retry_headers([overloaded.clone()]);
    let [order, plain] = Order::both("overloaded");
    let told = [
        (retry(), &order, order.stays_unknown(Some(503))),
        (heeds(), &order, order.is_unknown(Some(503), &[Unknown])),
        (heeds(), &plain, plain.is_unknown(Some(503), &[Unknown])),
    ];
    for (settings, order, told) in told {
        let expected = Passage {
            told,
            arrivals: 0,
            orders: 0,
        };
        let path = "/overloaded/orders";
        passes(Kind::Envoy, path, &[Act::Close], settings, order, expected).await;
    }
}

// ---- Servers with idempotency keys: orders by operation ----

/// How a library reads the contract where the draft leaves room, or where it does not keep to it.
struct Terms {
    library: Library,
    /// What it says to a used key with another body, and what is told of that.
    other_body: fn(&Order) -> Told,
    /// A 503 is stored with the key and said again for ever.
    keeps_503: bool,
    /// Orders once the caller has asked again about one whose handler stored it and failed.
    orders_after_asking_again: usize,
}

/// The limit of an attempt that is not answered meanwhile.
const LIMIT: Duration = ms(400);

struct Shop {
    library: Library,
    server: KeyServer,
    path: FaultyPath,
}

impl Shop {
    /// `None`: it is not installed.
    async fn open(library: Library) -> Option<Self> {
        let server = library.start().await?;
        let path = FaultyPath::to(&server).await?;
        Some(Self {
            library,
            server,
            path,
        })
    }

    /// With connections of its own. uvicorn closes one after an exception, though it has just answered
    /// as if it kept it: the next operation on it may get a 502 that is not in its row.
    fn customer() -> ClientWithMiddleware {
        client(retry().wait_for_conflict(true))
    }

    /// Sends through mitmproxy, and counts the orders of that name.
    async fn takes(&self, order: &Order, told: Told, orders: usize) -> Option<Response> {
        let outcome = order.send(&Self::customer(), &self.path.url()).await;
        self.server.counts(order, &outcome.told(), orders).await;
        assert_eq!(outcome.told(), told, "{:?} {}", self.library, order.name);
        outcome.result.ok()
    }
}

async fn one_order_per_key_whatever_the_fault(shop: &Shop) {
    let order = keyed("undisturbed");
    let done = order.is_done(&[Answered]);
    shop.takes(&order, done.clone(), 1).await;
    shop.takes(&order, done, 1).await;

    for fault in ["before", "after"] {
        let order = keyed(format!("reset-{fault}")).fault(fault, 1);
        let done = order.is_done(&[Unknown, Answered]);
        shop.takes(&order, done, 1).await;
        let order = keyed(format!("reset-{fault}-twice")).fault(fault, 2);
        let done = order.is_done(&[Unknown, Unknown, Answered]);
        shop.takes(&order, done, 1).await;
    }

    // The answer has begun, so its status is known; what is missing shows in the body.
    let order = keyed("reset-inside").fault("inside", 1);
    let done = order.is_done(&[Answered]);
    let answer = shop.takes(&order, done, 1).await.expect("a head");
    let error = answer.bytes().await.expect_err("a byte is missing");
    assert!(error.is_decode(), "{error:?}");
}

async fn an_unknown_order_can_be_settled_by_its_key(shop: &Shop) {
    for (fault, orders) in [("before", 0), ("after", 1)] {
        let lost = keyed(format!("never-answered-{fault}"));
        let broken = lost.clone().fault(fault, ATTEMPTS);
        shop.takes(&broken, lost.stays_unknown(None), orders).await;
        shop.takes(&lost, lost.is_done(&[Answered]), 1).await;
    }
}

async fn without_a_key_it_is_sent_once(shop: &Shop) {
    for (fault, orders) in [("before", 0), ("after", 1)] {
        let order = unkeyed(format!("unkeyed-reset-{fault}")).fault(fault, 1);
        shop.takes(&order, order.stays_unknown(None), orders).await;
    }
    for (how, status, orders) in [("refuse", 503, 0), ("lie", 503, 1), ("raise", 500, 1)] {
        let order = unkeyed(format!("unkeyed-{how}")).handler(how);
        let told = order.stays_unknown(Some(status));
        shop.takes(&order, told, orders).await;
    }
}

/// The date is two seconds later than the server's own clock says.
async fn a_date_to_come_back_at_is_kept(shop: &Shop) {
    let order = keyed("busy").fault("busy", 1);
    let outcome = order.send(&Shop::customer(), &shop.path.url()).await;
    let told = outcome.told();
    assert_eq!(told, order.is_done(&[Answered, Answered]));
    assert!(outcome.report.elapsed() >= secs(2), "{:?}", outcome.report);
    shop.server.counts(&order, &told, 1).await;

    let plain = unkeyed("unkeyed-busy").fault("busy", 1);
    let put_off = plain.may_be_sent_later(Some(429), &[Answered], Some(secs(2)));
    shop.takes(&plain, put_off, 0).await;
}

/// Lets the handler that holds an order go on once the second attempt is over, whether that has had
/// an answer or not.
struct Release {
    url: String,
}

impl Release {
    async fn call(&self) {
        let answer = support::plain_http().get(&self.url).send().await;
        let answer = answer.and_then(Response::error_for_status);
        answer.expect("the order is released");
    }
}

#[async_trait::async_trait]
impl Middleware for Release {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut http::Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        let attempt: &Attempt = extensions.get().expect("below the layer");
        let number = attempt.number();
        if number > 2 {
            self.call().await;
        }
        let result = next.run(request, extensions).await;
        if number == 2 {
            self.call().await;
        }
        result
    }
}

/// Sends an order whose handler stores it and holds the answer, until what came of it is told. How
/// many repeats are told to wait meanwhile is a matter of time.
async fn waits_for_the_first_to_end(
    server: &KeyServer,
    url: &str,
    settings: RetryMiddlewareBuilder,
) {
    let order = keyed("held").handler("hold");
    let patient = settings
        .wait_for_conflict(true)
        .max_attempts(50)
        .backoff(Backoff::fixed([ms(100)]));
    let release = Release {
        url: server.release_url(&order.name),
    };
    let client = layered(patient).with(release).build();
    let told = order.send(&client, url).await.told();
    assert_eq!(told, order.is_done(&told.attempts));
    assert!(
        told.attempts.len() > 2 && told.attempts[0] <= Unknown,
        "{told:?}"
    );
    server.counts(&order, &told, 1).await;
}

/// Without `wait_for_conflict` an "in progress" is handed on, and settles nothing. The caller then
/// does as it is told: asks with the same key, until that is no longer the answer.
async fn a_repeat_that_does_not_wait_leaves_it_unknown(server: &KeyServer) {
    let (order, url) = (keyed("hasty").handler("hold"), server.url());
    let hasty = retry().attempt_timeout(LIMIT);
    let told = order.send(&client(hasty), &url).await.told();
    assert_eq!(told, order.is_unknown(told.status, &told.attempts));
    // Asked again at once: it is still running, and no status that says so is a refusal.
    let once = client(retry().max_attempts(1).attempt_timeout(secs(2)));
    let told = order.send(&once, &url).await.told();
    assert_eq!(told, order.is_unknown(told.status, &told.attempts));
    server.release(&order.name).await;
    let (client, done) = (client(retry()), order.is_done(&[Answered]));
    patiently("the outcome", async {
        while order.send(&client, &url).await.told() != done {
            tokio::time::sleep(ms(10)).await;
        }
    })
    .await;
    server.counts(&order, &done, 1).await;
}

async fn without_a_key_it_is_not_repeated_after_a_timeout(server: &KeyServer) {
    let order = unkeyed("unkeyed-held").handler("hold");
    let hasty = retry().attempt_timeout(LIMIT);
    let told = order.send(&client(hasty), &server.url()).await.told();
    assert_eq!(told, order.stays_unknown(None));
    server.has_order(&order.name).await;
    server.counts(&order, &told, 1).await;
}

async fn another_body_under_a_used_key(shop: &Shop, terms: &Terms) {
    let order = keyed("used");
    shop.takes(&order, order.is_done(&[Answered]), 1).await;
    let other = order.quantity(2);
    shop.takes(&other, (terms.other_body)(&other), 1).await;
}

/// A handler that says 503: without having stored the order, or although it has.
async fn a_503_of_the_handler(shop: &Shop, terms: &Terms) {
    for (how, stored) in [("refuse", 0), ("lie", 1)] {
        let order = keyed(how).handler(how);
        let (told, orders) = if terms.keeps_503 {
            // Nothing more is done under this key, and no answer settles what was.
            (order.stays_unknown(Some(503)), stored)
        } else {
            // Here a lie costs a second order under one key: the library forgets the key, though the
            // draft says that a retry with it is safe. No client can know that.
            (order.is_done(&[Unknown, Answered]), stored + 1)
        };
        shop.takes(&order, told, orders).await;
    }
}

/// The 500 is not retried and told as unknown, which is the truth: what asking again comes to
/// depends on the library.
async fn an_exception_after_the_commit(shop: &Shop, terms: &Terms) {
    let order = keyed("raise").handler("raise");
    let told = order.is_unknown(Some(500), &[Unknown]);
    shop.takes(&order, told, 1).await;
    let told = order.send(&Shop::customer(), &shop.path.url()).await.told();
    shop.server
        .counts(&order, &told, terms.orders_after_asking_again)
        .await;
}

/// Faults of all kinds at the same time, and the sum over all orders.
async fn a_crowd(shop: &Shop) {
    let faults = [
        ("none", 0),
        ("before", 1),
        ("after", 1),
        ("inside", 1),
        ("before", 2),
        ("after", 2),
        ("before", ATTEMPTS),
        ("after", ATTEMPTS),
    ];
    let customer = Shop::customer();
    let mut sending = JoinSet::new();
    let mut expected = Vec::new();
    for round in 0..3 {
        for (fault, times) in faults {
            for order in Order::both(&format!("crowd {round} {fault} {times}")) {
                let order = order.fault(fault, times);
                let arrives = fault != "before" || times < order.most_sends();
                expected.push((order.name.clone(), usize::from(arrives)));
                let (client, url) = (customer.clone(), shop.path.url());
                sending.spawn(async move { (order.send(&client, &url).await.told(), order) });
            }
        }
    }
    let told = sending.join_all().await;
    let orders = shop.server.orders().await;
    let count = |name: &str| orders.get(name).copied().unwrap_or_default();
    for (name, expected) in &expected {
        assert_eq!(count(name), *expected, "{:?} {name}", shop.library);
    }
    for (told, order) in &told {
        let row = format!("{:?} {}: {told:?}", shop.library, order.name);
        assert!(told.attempts.len() <= order.most_sends(), "{row}");
        match told.certainty {
            Answered => assert_eq!(count(&order.name), 1, "{row}"),
            certainty => assert_eq!(certainty, Unknown, "{row}"),
        }
    }
    let sum: usize = expected.iter().map(|(name, _)| count(name)).sum();
    let operations = told.len();
    println!(
        "{:?} crowd: {operations} operations, {sum} orders",
        shop.library
    );
}

async fn keeps_its_terms(terms: Terms) {
    let Some(shop) = Shop::open(terms.library).await else {
        return;
    };
    tokio::join!(
        one_order_per_key_whatever_the_fault(&shop),
        an_unknown_order_can_be_settled_by_its_key(&shop),
        without_a_key_it_is_sent_once(&shop),
        a_date_to_come_back_at_is_kept(&shop),
        another_body_under_a_used_key(&shop, &terms),
        a_503_of_the_handler(&shop, &terms),
        an_exception_after_the_commit(&shop, &terms),
        a_crowd(&shop),
    );
    // These have time limits, so they have the machine and the server to themselves.
    let Shop { server, path, .. } = shop;
    let hasty = retry().attempt_timeout(LIMIT);
    waits_for_the_first_to_end(&server, &server.url(), hasty).await;
    a_repeat_that_does_not_wait_leaves_it_unknown(&server).await;
    without_a_key_it_is_not_repeated_after_a_timeout(&server).await;

    let url = path.url();
    let _closed = path.close();
    let order = unkeyed("closed");
    // Not by the same client: a request on a connection that is kept would be unknown.
    let told = order.send(&client(retry()), &url).await.told();
    let never = order.may_be_sent_later(None, &[NotSent; ATTEMPTS], None);
    assert_eq!(told, never);
    server.counts(&order, &told, 0).await;
}

#[tokio::test]
async fn idemkit() {
    keeps_its_terms(Terms {
        library: Library::Idemkit,
        other_body: |order| order.is_refused(422),
        keeps_503: false,
        orders_after_asking_again: 2,
    })
    .await;
}

/// Stripe says 409 both for "another body" and for "still running", so a 409 alone does not tell
/// whether the order was, or will be, created: unknown, by design.
#[tokio::test]
async fn idemkit_with_the_statuses_of_stripe() {
    keeps_its_terms(Terms {
        library: Library::IdemkitAsStripe,
        other_body: |order| order.is_unknown(Some(409), &[Unknown]),
        keeps_503: false,
        orders_after_asking_again: 2,
    })
    .await;
}

#[tokio::test]
async fn fastapi_idempotency() {
    keeps_its_terms(Terms {
        library: Library::FastapiIdempotency,
        other_body: |order| order.is_refused(422),
        keeps_503: false,
        orders_after_asking_again: 2,
    })
    .await;
}

/// It does not look at the body: the answer to the first order is handed out for another, which is
/// not created.
#[tokio::test]
async fn asgi_idempotency_header() {
    keeps_its_terms(Terms {
        library: Library::AsgiIdempotencyHeader,
        other_body: |order| order.is_done(&[Answered]),
        keeps_503: true,
        orders_after_asking_again: 2,
    })
    .await;
}

#[tokio::test]
async fn node_idempotency_for_nest() {
    keeps_its_terms(Terms {
        library: Library::NestIdempotency,
        other_body: |order| order.is_refused(422),
        keeps_503: true,
        orders_after_asking_again: 1,
    })
    .await;
}

/// 417 is what it says of a misused key.
#[tokio::test]
async fn express_idempotency() {
    keeps_its_terms(Terms {
        library: Library::ExpressIdempotency,
        other_body: |order| order.is_refused(417),
        keeps_503: false,
        orders_after_asking_again: 1,
    })
    .await;
}

// ---- A gateway in front of a server with keys: nothing of ours between client and order ----

#[tokio::test]
async fn a_504_of_a_gateway_while_the_library_stores_the_order() {
    for (kind, library) in [
        (Kind::Nginx, Library::Idemkit),
        (Kind::Haproxy, Library::NestIdempotency),
    ] {
        let Some(server) = library.start().await else {
            return;
        };
        let Some(gateway) = kind.before(&server.address()).await else {
            return;
        };
        let url = gateway.url("/plain/orders");
        waits_for_the_first_to_end(&server, &url, retry()).await;

        let order = unkeyed("unkeyed-held").handler("hold");
        let told = order.send(&client(retry()), &url).await.told();
        assert_eq!(told, order.stays_unknown(Some(504)), "{kind:?}");
        server.has_order(&order.name).await;
        server.counts(&order, &told, 1).await;
    }
}

// ---- HTTP/2 ----

/// A connection to this nginx takes two requests, then it is told to go away; what is in flight above
/// the last stream has not been looked at. So even an order without a key is sent until it is taken,
/// and then no more.
#[cfg(feature = "http2")]
#[tokio::test]
async fn nginx_refuses_streams_of_http2_and_no_order_is_created_twice() {
    const ORDERS: usize = 30;
    let origin = Wire::script([answer(201)]).await;
    let Some(gateway) = Kind::Nginx.before(&address_of(&origin)).await else {
        return;
    };
    let client = operation::http2_client(retry().max_attempts(50));
    let mut sending = JoinSet::new();
    for number in 0..ORDERS {
        let (client, url) = (client.clone(), gateway.http2_url("/plain/orders"));
        let order = unkeyed(format!("order-{number}"));
        sending.spawn(async move { (order.send(&client, &url).await.told(), order) });
    }
    let told = sending.join_all().await;
    let arrived = origin.requests();
    let arrived: Vec<_> = arrived
        .iter()
        .map(|seen| &seen.headers["operation"])
        .collect();
    let arrivals = |name| arrived.iter().filter(|&&arrived| arrived == name).count();
    for (told, order) in &told {
        let row = format!("{}: {told:?}", order.name);
        let (last, refused) = told.attempts.split_last().expect("an attempt");
        let is_repeatable = |&certainty| certainty <= NotProcessed;
        assert!(refused.iter().all(is_repeatable), "{row}");
        match last {
            Answered => assert_eq!(arrivals(&*order.name), 1, "{row}"),
            // The connection was closed before the client had read why.
            last => {
                assert_eq!(*last, Unknown, "{row}");
                assert!(arrivals(&*order.name) <= 1, "{row}");
            }
        }
    }
    let refused_at_first = |told: &Told| told.attempts[0] == NotProcessed;
    let repeated = told.iter().filter(|(told, _)| {
        refused_at_first(told) && *told == unkeyed("any").is_done(&told.attempts)
    });
    let repeated = repeated.count();
    println!(
        "nginx, HTTP/2: {ORDERS} operations, {repeated} refused and sent again, {} orders",
        arrived.len()
    );
    assert!(repeated > 0, "{told:?}");
}
