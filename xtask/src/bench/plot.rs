//! Lines over an axis, as an SVG.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;

const COLORS: [RGBColor; 2] = [RGBColor(40, 40, 40), RGBColor(30, 110, 190)];
const FONT: &str = "sans-serif";

/// A name and its points.
pub type Line<'a> = (&'a str, &'a [(f64, f64)]);

pub fn lines(path: &Path, title: &str, x: &str, y: &str, lines: &[Line]) -> anyhow::Result<()> {
    draw(path, title, x, y, lines).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw(
    path: &Path,
    title: &str,
    x: &str,
    y: &str,
    lines: &[Line],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, (720, 460)).into_drawing_area();
    root.fill(&WHITE)?;
    let points = || lines.iter().flat_map(|(_, points)| points.iter());
    let right = points().map(|p| p.0).fold(0.0, f64::max);
    let top = points().map(|p| p.1).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(68)
        .build_cartesian_2d(0.0..right * 1.05, 0.0..top * 1.1)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(x)
        .y_desc(y)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .label_style((FONT, 14))
        .draw()?;
    for (color, (name, points)) in COLORS.iter().zip(lines) {
        let style = color.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
        let dot = |point: &(f64, f64)| Circle::new(*point, 4, color.filled());
        chart.draw_series(points.iter().map(dot))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .border_style(RGBColor(200, 200, 200))
        .label_font((FONT, 15))
        .margin(10)
        .draw()?;
    root.present()?;
    Ok(())
}
