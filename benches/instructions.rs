//! Instructions and allocations of a call, counted by valgrind: for calls that are answered at once the
//! same on every run of the same build (a retry goes through a timer, and varies), so they guard against
//! regressions where times cannot.
//!
//! `.ci/cost` installs valgrind and gungraun's runner, and runs it. What a layer *adds* is the
//! difference to the row "nothing"; docs/measurements.md has the table.
//!
//! A `rep movsb` counts as one instruction for each byte, so what is copied looks dearer than it is.
#![allow(missing_docs, reason = "gungraun's macros make undocumented items")]

mod terminal;

use gungraun::{
    Callgrind, Dhat, DhatMetric, EventKind, LibraryBenchmarkConfig, library_benchmark,
    library_benchmark_group, main,
};
use reqwest::{Method, Request, Response};
use reqwest_middleware::ClientWithMiddleware;
use std::hint::black_box;
use terminal::{Layer, request, runtime};
use tokio::runtime::Runtime;

type Ready = (Runtime, ClientWithMiddleware, Request);

/// A client that has been used before, and its next request.
fn ready(layer: Layer, method: &Method, statuses: &'static [u16]) -> Ready {
    let (runtime, client) = (runtime(), layer.over(statuses));
    let first = runtime.block_on(client.execute(request(method)));
    drop(first.expect("an answer"));
    (runtime, client, request(method))
}

fn get(layer: Layer) -> Ready {
    ready(layer, &Method::GET, &[200])
}

fn post(layer: Layer) -> Ready {
    ready(layer, &Method::POST, &[200])
}

fn get_failing_once(layer: Layer) -> Ready {
    ready(layer, &Method::GET, &[503, 200])
}

fn post_failing_once(layer: Layer) -> Ready {
    ready(layer, &Method::POST, &[503, 200])
}

/// Of an allocation whose stack is deeper than this it is not known that it is part of the call, and it
/// would not be counted; inlined functions count, too.
fn dhat() -> Dhat {
    Dhat::with_args(["--num-callers=500"])
}

/// At most so much: instructions a tenth above what was measured, since compilers differ; allocations as
/// measured.
fn at_most(instructions: u64, allocations: u64) -> LibraryBenchmarkConfig {
    LibraryBenchmarkConfig::default()
        .tool(Callgrind::default().hard_limits([(EventKind::Ir, instructions)]))
        .tool(dhat().hard_limits([(DhatMetric::TotalBlocks, allocations)]))
        .clone()
}

fn counted() -> LibraryBenchmarkConfig {
    LibraryBenchmarkConfig::default()
        .tool(Callgrind::default())
        .tool(dhat())
        .clone()
}

#[library_benchmark]
#[bench::nothing(args = (Layer::Nothing), setup = get, config = counted())]
#[bench::reqwest_retry(args = (Layer::ReqwestRetry), setup = get, config = counted())]
#[bench::floor(args = (Layer::Floor), setup = get, config = counted())]
#[bench::floor_deadline(args = (Layer::FloorWithAll), setup = get, config = counted())]
#[bench::bare(args = (Layer::Bare), setup = get, config = at_most(GET_BARE, 23))]
#[bench::budget_breaker(args = (Layer::BudgetAndBreaker), setup = get, config = at_most(GET_BREAKER, 23))]
#[bench::deadline(args = (Layer::WithDeadline), setup = get, config = at_most(GET_DEADLINE, 26))]
fn get_answered((runtime, client, request): Ready) -> (Runtime, ClientWithMiddleware, Response) {
    call(runtime, client, request)
}

#[library_benchmark]
#[bench::nothing(args = (Layer::Nothing), setup = post, config = counted())]
#[bench::reqwest_retry(args = (Layer::ReqwestRetry), setup = post, config = counted())]
#[bench::floor(args = (Layer::Floor), setup = post, config = counted())]
#[bench::floor_everything(args = (Layer::FloorWithAll), setup = post, config = counted())]
#[bench::bare(args = (Layer::Bare), setup = post, config = counted())]
#[bench::everything(args = (Layer::Everything), setup = post, config = at_most(POST_EVERYTHING, 37))]
fn post_answered((runtime, client, request): Ready) -> (Runtime, ClientWithMiddleware, Response) {
    call(runtime, client, request)
}

#[library_benchmark]
#[bench::reqwest_retry(args = (Layer::ReqwestRetry), setup = get_failing_once, config = counted())]
#[bench::bare(args = (Layer::Bare), setup = get_failing_once, config = counted())]
#[bench::budget_breaker(args = (Layer::BudgetAndBreaker), setup = get_failing_once, config = counted())]
#[bench::deadline(args = (Layer::WithDeadline), setup = get_failing_once, config = counted())]
fn get_failed_once((runtime, client, request): Ready) -> (Runtime, ClientWithMiddleware, Response) {
    call(runtime, client, request)
}

#[library_benchmark]
#[bench::reqwest_retry(args = (Layer::ReqwestRetry), setup = post_failing_once, config = counted())]
#[bench::everything(args = (Layer::Everything), setup = post_failing_once, config = counted())]
fn post_failed_once(
    (runtime, client, request): Ready,
) -> (Runtime, ClientWithMiddleware, Response) {
    call(runtime, client, request)
}

fn call(
    runtime: Runtime,
    client: ClientWithMiddleware,
    request: Request,
) -> (Runtime, ClientWithMiddleware, Response) {
    let answer = runtime.block_on(client.execute(black_box(request)));
    (runtime, client, answer.expect("an answer"))
}

const GET_BARE: u64 = 13_800;
const GET_BREAKER: u64 = 14_500;
const GET_DEADLINE: u64 = 15_900;
const POST_EVERYTHING: u64 = 20_500;

library_benchmark_group!(
    name = calls,
    benchmarks = [
        get_answered,
        post_answered,
        get_failed_once,
        post_failed_once
    ]
);

main!(library_benchmark_groups = calls);
