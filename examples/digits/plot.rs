//! The curves: loss per step of each run, with the loss scale of the f16 run below.

use std::error::Error;
use std::path::Path;

use plotters::prelude::*;

use crate::Run;

const COLORS: [RGBColor; 3] = [
    RGBColor(40, 40, 40),
    RGBColor(214, 84, 36),
    RGBColor(30, 110, 190),
];
/// Steps that a curve is averaged over, so that three curves can be distinguished.
const WINDOW: usize = 10;

pub fn curves(runs: &[Run], path: &Path) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, (900, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let scaled: Vec<_> = runs.iter().filter(|run| run.scales.is_some()).collect();
    let (upper, lower) = match scaled.is_empty() {
        true => (root.clone(), None),
        false => {
            let (upper, lower) = root.split_vertically(430);
            (upper, Some(lower))
        }
    };
    losses(runs, &upper)?;
    if let Some(lower) = lower {
        scales(&scaled, &lower)?;
    }
    root.present()?;
    Ok(())
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn losses(runs: &[Run], area: &Area) -> Result<(), Box<dyn Error>> {
    let steps = runs
        .iter()
        .map(|run| run.trained.losses.len())
        .max()
        .unwrap_or(1);
    let smooth: Vec<Vec<f64>> = runs
        .iter()
        .map(|run| smoothed(&run.trained.losses))
        .collect();
    let finite = || {
        smooth
            .iter()
            .flatten()
            .copied()
            .filter(|loss| loss.is_finite())
    };
    let top = finite().fold(f64::MIN_POSITIVE, f64::max) * 1.3;
    let bottom = finite().fold(top, f64::min).max(1e-6) / 1.3;

    let mut chart = ChartBuilder::on(area)
        .caption(
            "Training loss on the UCI handwritten digits",
            ("sans-serif", 20),
        )
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(64)
        .build_cartesian_2d(0..steps, (bottom..top).log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("step")
        .y_desc(format!("cross entropy, mean of {WINDOW} steps"))
        .y_label_formatter(&|loss| format!("{loss:.3}"))
        .label_style(("sans-serif", 14))
        .draw()?;
    for (i, (run, losses)) in runs.iter().zip(&smooth).enumerate() {
        let color = COLORS[i % COLORS.len()];
        chart
            .draw_series(LineSeries::new(
                losses.iter().copied().enumerate(),
                color.stroke_width(2),
            ))?
            .label(format!(
                "{}, test accuracy {:.1} %",
                run.precision,
                100.0 * run.trained.test_accuracy
            ))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], color.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.9))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 15))
        .margin(10)
        .draw()?;
    Ok(())
}

fn scales(runs: &[&Run], area: &Area) -> Result<(), Box<dyn Error>> {
    let scales = runs.iter().flat_map(|run| run.scales.iter().flatten());
    let top = scales.clone().fold(1.0, |a: f32, b| a.max(*b)) * 2.0;
    let bottom = scales.fold(top, |a: f32, b| a.min(*b)) / 2.0;
    let steps = runs
        .iter()
        .filter_map(|run| Some(run.scales.as_ref()?.len()))
        .max();

    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(38)
        .y_label_area_size(64)
        .build_cartesian_2d(0..steps.unwrap_or(1), (bottom..top).log_scale().base(2.0))?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("step")
        .y_desc("loss scale, f16")
        .y_label_formatter(&|scale| format!("{scale:.0}"))
        .label_style(("sans-serif", 14))
        .draw()?;
    for run in runs {
        let scales = run.scales.iter().flatten().copied().enumerate();
        chart.draw_series(LineSeries::new(scales, COLORS[1].stroke_width(2)))?;
    }
    Ok(())
}

fn smoothed(losses: &[f64]) -> Vec<f64> {
    (0..losses.len())
        .map(|end| {
            let window = &losses[end.saturating_sub(WINDOW - 1)..=end];
            window.iter().sum::<f64>() / window.len() as f64
        })
        .collect()
}
