//! Load and answers over time, before, during and after ten bad seconds.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{
    Area, BLUE, GREEN, INK, Label, ORANGE, Result, SHADE, TEXT, TITLE, VERMILION, font, label,
    write,
};
use crate::course::{Course, Seconds, TRIGGER};
use crate::metastable::{AWS, BLIND, DRAWN, FINAGLE, NONE, OURS};
use crate::server::Server;

/// What is shown, in seconds.
const SHOWN: std::ops::Range<usize> = 15..115;

/// The server's capacity.
const USUAL: f64 = Server::PER_SECOND as f64;
const SLOW: f64 = Server::PER_SECOND_IN_TRIGGER as f64;

/// No retries last, on top of the line that it hides else.
const LINES: [(&str, &str, RGBColor, Look); 5] = [
    (BLIND, "3 retries, full jitter", VERMILION, Look::Thin),
    (FINAGLE, "Finagle, Linkerd: 20 % + 10/s", ORANGE, Look::Thin),
    (AWS, "AWS SDK 2.0: 500 tokens", GREEN, Look::Thin),
    (OURS, "this crate: one default budget", BLUE, Look::Thick),
    (NONE, "no retries (dashed)", INK, Look::Dashed),
];

#[derive(Clone, Copy)]
enum Look {
    Thin,
    Thick,
    Dashed,
}

type Courses = [(&'static str, Course)];

pub(super) fn draw(courses: &Courses, path: &Path) -> Result<()> {
    let canvas = SVGBackend::new(path, (1000, 760)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let title = format!("{DRAWN} operations a second, and a server that is slow for ten seconds");
    let panels = canvas.titled(&title, font(TITLE))?;
    let (upper, lower) = panels.split_vertically(370);
    let load = Panel {
        courses,
        what: |course| &course.sent,
        name: "requests to the server, a second",
        most: 4000.0,
        axis: None,
    };
    load.draw(&canvas, &upper)?;
    let answers = Panel {
        courses,
        what: |course| &course.served,
        name: "answered in time, a second",
        most: 1200.0,
        axis: Some("seconds"),
    };
    answers.draw(&canvas, &lower)?;
    canvas.present()?;
    Ok(())
}

struct Panel<'a> {
    courses: &'a Courses,
    what: fn(&Course) -> &Seconds,
    name: &'a str,
    most: f64,
    axis: Option<&'a str>,
}

impl Panel<'_> {
    fn draw(&self, canvas: &Area<'_>, area: &Area<'_>) -> Result<()> {
        let range = SHOWN.start as f64..(SHOWN.end - 1) as f64;
        let mut chart = ChartBuilder::on(area)
            .margin(12)
            .margin_right(300)
            .x_label_area_size(if self.axis.is_some() { 52 } else { 28 })
            .y_label_area_size(76)
            .build_cartesian_2d(range.clone(), 0.0..self.most)?;
        let trigger = TRIGGER.start.as_secs_f64()..TRIGGER.end.as_secs_f64();
        let corners = [(trigger.start, 0.0), (trigger.end, self.most)];
        chart.draw_series([Rectangle::new(corners, SHADE.filled())])?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_desc(self.axis.unwrap_or_default())
            .y_desc(self.name)
            .y_labels(6)
            .x_label_formatter(&|second| format!("{second:.0}"))
            .y_label_formatter(&|count| format!("{count:.0}"))
            .label_style(font(TEXT))
            .axis_desc_style(font(TEXT))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let capacity = [
            (range.start, USUAL),
            (trigger.start, USUAL),
            (trigger.start, SLOW),
            (trigger.end, SLOW),
            (trigger.end, USUAL),
            (range.end, USUAL),
        ];
        chart.draw_series(DashedLineSeries::new(capacity, 2, 4, INK.stroke_width(1)))?;
        let mut labels = Vec::new();
        for (row, text, color, look) in LINES {
            let Some((_, course)) = self.courses.iter().find(|(name, _)| *name == row) else {
                continue;
            };
            let seconds = (self.what)(course);
            let point = |second| (second as f64, f64::from(seconds.at(second)));
            let points: Vec<_> = SHOWN.map(point).collect();
            if let Some(end) = points.last() {
                let at = chart.backend_coord(end);
                labels.push(Label { text, color, at });
            }
            match look {
                Look::Thin => chart.draw_series(LineSeries::new(points, color.stroke_width(2)))?,
                Look::Thick => chart.draw_series(LineSeries::new(points, color.stroke_width(5)))?,
                Look::Dashed => {
                    let dashes = DashedLineSeries::new(points, 6, 5, color.stroke_width(2));
                    chart.draw_series(dashes)?
                }
            };
        }
        let (_, lowest) = chart.backend_coord(&(0.0, 0.0));
        label(canvas, labels, lowest)?;
        let above = self.most / 20.0;
        let usual = chart.backend_coord(&(range.start + 0.5, USUAL + above));
        write(canvas, "capacity", usual, &INK, HPos::Left)?;
        let slow = chart.backend_coord(&(trigger.start + 5.0, self.most - above));
        write(canvas, "slow", slow, &INK, HPos::Center)
    }
}
