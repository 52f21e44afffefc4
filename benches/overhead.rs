//! What the layer adds to a call, answered at once or after one failure: beside nothing, a layer that
//! does nothing, `reqwest-retry`, and the least that such a layer can cost. Below all of them a terminal that
//! answers without a socket.
//!
//! `cargo bench --manifest-path tests/cost/Cargo.toml --bench overhead`
#![allow(
    missing_docs,
    reason = "criterion's macro makes an undocumented function"
)]

mod terminal;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use reqwest::Method;
use terminal::{LAYERS, Layer, request, runtime};

fn overhead(criterion: &mut Criterion) {
    let runtime = runtime();
    let courses: [(&str, &'static [u16]); 2] = [("answered", &[200]), ("failed once", &[503, 200])];
    for (course, statuses) in courses {
        for method in [Method::GET, Method::POST] {
            let mut group = criterion.benchmark_group(format!("{method} {course}"));
            for layer in LAYERS
                .into_iter()
                .filter(|&layer| repeats(layer, &method, course))
            {
                let client = layer.over(statuses);
                group.bench_function(BenchmarkId::from_parameter(layer.name()), |bencher| {
                    bencher.iter_batched(
                        || request(&method),
                        |request| {
                            let answer = runtime.block_on(client.execute(request));
                            answer.expect("an answer")
                        },
                        BatchSize::SmallInput,
                    );
                });
            }
            group.finish();
        }
    }
}

/// Whether the comparison means anything: what does not repeat has nothing to be measured at.
fn repeats(layer: Layer, method: &Method, course: &str) -> bool {
    let is_unkeyed_post = *method == Method::POST
        && matches!(
            layer,
            Layer::Bare | Layer::BudgetAndBreaker | Layer::WithDeadline
        );
    let never = matches!(
        layer,
        Layer::None | Layer::Nothing | Layer::Floor | Layer::FloorWithAll
    );
    course == "answered" || !(never || is_unkeyed_post)
}

criterion_group!(benches, overhead);
criterion_main!(benches);
