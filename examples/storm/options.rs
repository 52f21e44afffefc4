//! What the command line asks for.

use std::path::PathBuf;

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) scale: Scale,
    /// Where the plots are written to, if anywhere.
    pub(crate) plots: Option<PathBuf>,
    /// The letters of the parts to run; none: all.
    pub(crate) parts: Vec<String>,
}

/// How much is simulated, and with which seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) seed: u64,
    pub(crate) is_quick: bool,
}

impl Options {
    pub(crate) const USAGE: &str =
        "storm [--quick] [--seed NUMBER] [--plots FOLDER] [a|b|c|d|e|f]…";

    /// `None`: it cannot be understood.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self {
            scale: Scale {
                seed: 1,
                is_quick: false,
            },
            plots: None,
            parts: Vec::new(),
        };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.scale.is_quick = true,
                "--seed" => options.scale.seed = arguments.next()?.parse().ok()?,
                "--plots" => options.plots = Some(arguments.next()?.into()),
                "a" | "b" | "c" | "d" | "e" | "f" => options.parts.push(argument),
                _ => return None,
            }
        }
        Some(options)
    }

    pub(crate) fn wants(&self, part: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|wanted| wanted == part)
    }
}

impl Scale {
    pub(crate) fn pick<T>(&self, whole: T, quick: T) -> T {
        if self.is_quick { quick } else { whole }
    }
}
