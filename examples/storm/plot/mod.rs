//! The plots: what is in the tables, for the eye.

mod amplification;
mod jitter;
mod recovery;

use std::error::Error;
use std::path::Path;

use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::amplification::Curve;
use crate::course::Course;
use crate::options::Scale;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// For the eyes of everybody (Okabe and Ito).
const BLUE: RGBColor = RGBColor(0, 114, 178);
const VERMILION: RGBColor = RGBColor(213, 94, 0);
const ORANGE: RGBColor = RGBColor(230, 159, 0);
const GREEN: RGBColor = RGBColor(0, 158, 115);
const PURPLE: RGBColor = RGBColor(204, 121, 167);
const INK: RGBColor = RGBColor(60, 60, 60);
const SHADE: RGBColor = RGBColor(236, 236, 236);

const TITLE: u32 = 25;
const TEXT: u32 = 19;

/// From one label to the next, in pixels.
const LINE: i32 = 21;

/// What was simulated for the plots. What was not is not drawn.
pub(crate) struct Plots<'a> {
    pub(crate) curves: &'a [Curve],
    pub(crate) courses: &'a [(&'static str, Course)],
    pub(crate) scale: Scale,
}

impl Plots<'_> {
    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)?;
        jitter::draw(self.scale.seed, &folder.join("jitter.svg"))?;
        if !self.curves.is_empty() {
            amplification::draw(self.curves, &folder.join("amplification.svg"))?;
        }
        if !self.courses.is_empty() {
            recovery::draw(self.courses, &folder.join("recovery.svg"))?;
        }
        Ok(())
    }
}

/// The name of a line, where it ends.
struct Label {
    text: &'static str,
    color: RGBColor,
    at: (i32, i32),
}

/// Writes the names beside the ends of their lines, none on another and none below `lowest`.
fn label(canvas: &Area<'_>, mut labels: Vec<Label>, lowest: i32) -> Result<()> {
    labels.sort_by_key(|label| label.at.1);
    let mut highest = i32::MIN;
    for label in &mut labels {
        label.at.1 = label.at.1.max(highest);
        highest = label.at.1 + LINE;
    }
    let mut lowest = lowest;
    for Label { text, color, at } in labels.into_iter().rev() {
        let y = at.1.min(lowest);
        lowest = y - LINE;
        write(canvas, text, (at.0 + 8, y), &color, HPos::Left)?;
    }
    Ok(())
}

fn write(
    canvas: &Area<'_>,
    text: &str,
    at: (i32, i32),
    color: &RGBColor,
    side: HPos,
) -> Result<()> {
    let style = font(TEXT).color(color).pos(Pos::new(side, VPos::Center));
    canvas.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

fn font(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}
