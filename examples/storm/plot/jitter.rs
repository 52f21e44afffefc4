//! When a hundred clients come back that have failed together.

use std::path::Path;
use std::time::Duration;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{Area, BLUE, Result, TEXT, TITLE, VERMILION, font, write};
use crate::jitter::instants;
use crate::policy::Backoff;
use crate::time::{Time, ms};

/// The width of a bar.
const STEP: Duration = ms(20);

/// The four waits of 0.2, 0.4, 0.8 and 1.6 s, and a little more.
const BARS: usize = 160;

const BASE: Duration = ms(200);
const CAP: Duration = ms(10_000);

pub(super) fn draw(seed: u64, path: &Path) -> Result<()> {
    let canvas = SVGBackend::new(path, (1000, 560)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let title = "100 clients fail together at 0, and try again up to four times";
    let panels = canvas.titled(title, font(TITLE))?;
    let (upper, lower) = panels.split_vertically(250);
    let without = instants(Backoff::exponential(BASE, CAP), seed);
    let with = instants(Backoff::full_jitter(BASE, CAP), seed);
    let most = panel(&upper, &without, VERMILION, None)?;
    name(&canvas, most, "without jitter", VERMILION)?;
    let most = panel(&lower, &with, BLUE, Some("seconds since they failed"))?;
    name(&canvas, most, "with full jitter, our default", BLUE)?;
    canvas.present()?;
    Ok(())
}

/// Returns the most requests of any bar, and where there is room to say so.
fn panel(
    area: &Area<'_>,
    instants: &[Time],
    color: RGBColor,
    axis: Option<&str>,
) -> Result<(u32, (i32, i32))> {
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .margin_right(24)
        .x_label_area_size(if axis.is_some() { 52 } else { 28 })
        .y_label_area_size(76)
        .build_cartesian_2d(0.0..BARS as f64, 0.0..105.0)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_desc(axis.unwrap_or_default())
        .y_desc("retries in 20 ms")
        .x_labels(8)
        .y_labels(6)
        .x_label_formatter(&|bar| format!("{:.1}", bar * STEP.as_secs_f64()))
        .y_label_formatter(&|count| format!("{count:.0}"))
        .label_style(font(TEXT))
        .axis_desc_style(font(TEXT))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let bars = bars(instants);
    let shown = bars.iter().enumerate().filter(|(_, count)| **count > 0);
    chart.draw_series(shown.map(|(bar, count)| {
        let (left, top) = (bar as f64, f64::from(*count));
        Rectangle::new([(left, 0.0), (left + 0.85, top)], color.filled())
    }))?;
    let most = bars.iter().max().copied().unwrap_or_default();
    Ok((most, chart.backend_coord(&(0.9 * BARS as f64, 90.0))))
}

fn name(
    canvas: &Area<'_>,
    (most, at): (u32, (i32, i32)),
    text: &str,
    color: RGBColor,
) -> Result<()> {
    let text = format!("{text}: up to {most} in 20 ms");
    write(canvas, &text, at, &color, HPos::Right)
}

fn bars(instants: &[Time]) -> Vec<u32> {
    let mut bars = vec![0; BARS];
    for instant in instants {
        let bar = instant.as_nanos() / STEP.as_nanos();
        if let Some(count) = bars.get_mut(bar as usize) {
            *count += 1;
        }
    }
    bars
}
