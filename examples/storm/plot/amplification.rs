//! Load against failure rate.

use std::path::Path;

use plotters::prelude::*;

use super::{BLUE, GREEN, Label, ORANGE, PURPLE, Result, TEXT, TITLE, VERMILION, font, label};
use crate::amplification::{AWS, BLIND, Curve, FINAGLE, OURS, SRE};

const LINES: [(&str, &str, RGBColor, u32); 5] = [
    (BLIND, "3 retries, no budget", VERMILION, 2),
    (FINAGLE, "Finagle, Linkerd: 20 % + 10/s", ORANGE, 2),
    (AWS, "AWS SDK 2.0: 500 tokens", GREEN, 2),
    (SRE, "SRE book: 10 % of requests", PURPLE, 2),
    (OURS, "this crate: one default budget", BLUE, 4),
];

pub(super) fn draw(curves: &[Curve], path: &Path) -> Result<()> {
    let root = SVGBackend::new(path, (1000, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let title = "What retries add to the load, the more requests fail";
    let mut chart = ChartBuilder::on(&root)
        .caption(title, font(TITLE))
        .margin(12)
        .margin_right(300)
        .x_label_area_size(52)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..100.0, 1.0..4.0)?;
    chart
        .configure_mesh()
        .x_desc("requests that fail (100 clients, 10 operations a second each)")
        .y_desc("requests sent for each operation")
        .x_label_formatter(&|rate| format!("{rate:.0} %"))
        .y_label_formatter(&|load| format!("{load:.1}×"))
        .label_style(font(TEXT))
        .axis_desc_style(font(TEXT))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let mut labels = Vec::new();
    for (row, text, color, width) in LINES {
        let Some((_, curve)) = curves.iter().find(|(name, _)| *name == row) else {
            continue;
        };
        let start = std::iter::once((0.0, 1.0));
        let points = curve
            .iter()
            .map(|(rate, tally)| (f64::from(*rate), tally.amplification()));
        let points: Vec<_> = start.chain(points).collect();
        if let Some(end) = points.last() {
            let at = chart.backend_coord(end);
            labels.push(Label { text, color, at });
        }
        chart.draw_series(LineSeries::new(points, color.stroke_width(width)))?;
    }
    let (_, lowest) = chart.backend_coord(&(0.0, 1.0));
    label(&root, labels, lowest)?;
    root.present()?;
    Ok(())
}
