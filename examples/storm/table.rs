//! Tables in Markdown, with aligned columns.

pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(first: &str, heads: &[impl AsRef<str>]) -> Self {
        let mut table = Self { rows: Vec::new() };
        table.row(first, heads.iter().map(|head| head.as_ref().to_owned()));
        table
    }

    pub(crate) fn row(&mut self, name: &str, cells: impl IntoIterator<Item = String>) {
        let name = std::iter::once(name.to_owned());
        self.rows.push(name.chain(cells).collect());
    }

    pub(crate) fn print(&self) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(move |row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for (number, row) in self.rows.iter().enumerate() {
            print_row(row, &widths);
            if number == 0 {
                let rules: Vec<_> = widths.iter().map(|width| "-".repeat(*width)).collect();
                print_row(&rules, &widths);
            }
        }
        println!();
    }
}

fn print_row(cells: &[String], widths: &[usize]) {
    let padded = cells.iter().zip(widths);
    let padded: Vec<_> = padded
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    println!("| {} |", padded.join(" | "));
}
