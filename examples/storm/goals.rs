//! What must be so.

use std::process::ExitCode;

#[derive(Default)]
pub(crate) struct Goals {
    missed: Vec<String>,
}

impl Goals {
    pub(crate) fn at_most(&mut self, what: &str, figure: Option<f64>, limit: f64) {
        let is_met = figure.is_some_and(|figure| figure <= limit);
        self.note(is_met, &says(what, figure, "at most", limit));
    }

    pub(crate) fn at_least(&mut self, what: &str, figure: Option<f64>, limit: f64) {
        let is_met = figure.is_some_and(|figure| figure >= limit);
        self.note(is_met, &says(what, figure, "at least", limit));
    }

    pub(crate) fn note(&mut self, is_met: bool, what: &str) {
        println!("{} {what}", if is_met { "OK    " } else { "MISSED" });
        if !is_met {
            self.missed.push(what.to_owned());
        }
    }

    /// The verdict.
    pub(crate) fn end(&self) -> ExitCode {
        match self.missed.as_slice() {
            [] => {
                println!("All goals are met.");
                ExitCode::SUCCESS
            }
            missed => {
                eprintln!("Goals missed:\n  {}", missed.join("\n  "));
                ExitCode::FAILURE
            }
        }
    }
}

fn says(what: &str, figure: Option<f64>, relation: &str, limit: f64) -> String {
    match figure {
        Some(figure) => format!("{what}: {figure:.4}, {relation} {limit}"),
        None => format!("{what}: nothing was measured"),
    }
}
