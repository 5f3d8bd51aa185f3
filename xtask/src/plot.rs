//! Bars side by side, as an SVG. Independent of what they show.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const COLORS: [RGBColor; 2] = [RGBColor(40, 40, 40), RGBColor(30, 110, 190)];
const FONT: &str = "sans-serif";

/// Groups of two bars, each pair as parts of its first.
pub struct Panel {
    pub title: String,
    /// The names of the first bars and of the second.
    pub names: [String; 2],
    pub groups: Vec<Group>,
}

pub struct Group {
    pub name: &'static str,
    pub bars: [f64; 2],
}

/// The panels as a picture, two in a row.
pub fn bars(panels: &[Panel]) -> anyhow::Result<String> {
    let mut svg = String::new();
    let rows = panels.len().div_ceil(2);
    let root = SVGBackend::with_string(&mut svg, (840, 280 * rows as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((rows, 2))) {
        draw(panel, &area)?;
    }
    root.present()?;
    drop(root);
    Ok(svg)
}

fn draw(panel: &Panel, area: &DrawingArea<SVGBackend, Shift>) -> anyhow::Result<()> {
    let parts = panel
        .groups
        .iter()
        .map(|Group { bars, .. }| bars[1] / bars[0]);
    let top = parts.fold(1.0, f64::max) * 1.1;
    let right = panel.groups.len() as f64;
    // Below zero are the names of the groups and of the bars.
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, (FONT, 17))
        .margin(14)
        .build_cartesian_2d(0.0..right, -0.28 * top..top)?;
    let text = |text: &str, at, horizontal, vertical| {
        let style = (FONT, 14).into_font().color(&BLACK);
        let style = style.pos(Pos::new(horizontal, vertical));
        Text::new(text.to_string(), at, style)
    };
    let rectangle = |from, to, color: RGBColor| Rectangle::new([from, to], color.filled());
    let (mut texts, mut rectangles) = (Vec::new(), Vec::new());
    for (i, group) in panel.groups.iter().enumerate() {
        let middle = i as f64 + 0.5;
        let below = (middle, -0.03 * top);
        texts.push(text(group.name, below, HPos::Center, VPos::Top));
        for (of, left) in [middle - 0.4, middle].into_iter().enumerate() {
            let value = group.bars[of];
            let high = value / group.bars[0];
            let bar = rectangle((left + 0.02, 0.0), (left + 0.38, high), COLORS[of]);
            rectangles.push(bar);
            let above = (left + 0.2, high + 0.01);
            texts.push(text(&shown(value), above, HPos::Center, VPos::Bottom));
        }
    }
    for (of, left) in [0.1 * right, 0.55 * right].into_iter().enumerate() {
        let (low, middle, high) = (-0.24 * top, -0.22 * top, -0.2 * top);
        rectangles.push(rectangle((left, low), (left + 0.1, high), COLORS[of]));
        let beside = (left + 0.15, middle);
        texts.push(text(&panel.names[of], beside, HPos::Left, VPos::Center));
    }
    chart.draw_series(rectangles)?;
    chart.draw_series(texts)?;
    chart.draw_series([PathElement::new([(0.0, 0.0), (right, 0.0)], COLORS[0])])?;
    Ok(())
}

/// Three digits.
fn shown(value: f64) -> String {
    let digits = match value {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_high_as_its_part_of_the_first() {
        let panel = Panel {
            title: "Time".into(),
            names: ["one".into(), "other".into()],
            groups: vec![Group {
                name: "CNN",
                bars: [70.25, 35.125],
            }],
        };
        let svg = bars(&[panel]).unwrap();
        let height = |rectangle: &str| -> Option<u32> {
            let rest = rectangle.split_once("height=\"")?.1;
            rest.split_once('"')?.0.parse().ok()
        };
        let heights: Vec<_> = svg.split("<rect ").skip(1).filter_map(height).collect();
        // The background, the bars and the legend.
        assert_eq!(heights.len(), 5, "{svg}");
        assert!(heights[1].abs_diff(2 * heights[2]) <= 1, "{svg}");
        for text in ["Time", "one", "other", "CNN", "70.2", "35.1"] {
            assert!(svg.contains(&format!("\n{text}\n")), "{text}: {svg}");
        }
    }
}
