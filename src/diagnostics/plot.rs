//! The loss scale over a training run, as an SVG.

use std::error::Error;
use std::fs;
use std::path::Path;

use plotters::prelude::*;

use crate::{AmpError, AmpReport, StepOutcome};
use burn_amp_core::replace_file;

const SCALE: RGBColor = RGBColor(30, 110, 190);
const OVERFLOW: RGBColor = RGBColor(214, 84, 36);
const BAD_LOSS: RGBColor = RGBColor(40, 40, 40);
const FONT: &str = "sans-serif";

impl AmpReport {
    /// Draws the loss scale over the steps, with a mark for each skipped step, as an SVG of 900 by
    /// 420 pixels (feature `plot`).
    ///
    /// # Errors
    ///
    /// [`AmpError::Plot`] when there are no steps to draw, or the file cannot be written. An
    /// existing file is then unchanged.
    pub fn save_svg(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        let failed = |reason: &dyn std::fmt::Display| AmpError::Plot {
            place: path.display().to_string(),
            reason: reason.to_string(),
        };
        if self.steps() == self.history.first_step {
            return Err(failed(
                &"no step was counted yet (bf16 and FP32 need no loss scale and count no steps)",
            ));
        }
        let svg = self.drawn().map_err(|error| failed(&error))?;
        replace_file(path, |part| fs::write(part, &svg)).map_err(|error| failed(&error))
    }

    fn drawn(&self) -> Result<String, Box<dyn Error>> {
        let mut svg = String::new();
        let root = SVGBackend::with_string(&mut svg, (900, 420)).into_drawing_area();
        root.fill(&WHITE)?;

        let history = &self.history;
        let steps = history.first_step..self.steps();
        let lowest = history.scales().fold(self.loss_scale, f32::min);
        let highest = history.scales().fold(self.loss_scale, f32::max);
        let mut chart = ChartBuilder::on(&root)
            .caption(format!("Loss scale, {}", self.device), (FONT, 20))
            .margin(12)
            .x_label_area_size(38)
            .y_label_area_size(84)
            .build_cartesian_2d(
                steps.clone(),
                (lowest / 2.0..highest * 2.0).log_scale().base(2.0),
            )?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc("step, including skipped steps")
            .y_desc("loss scale")
            .y_label_formatter(&|scale| scale.to_string())
            .label_style((FONT, 14))
            .draw()?;

        // A scale holds until the next one, so each entry adds two points.
        let mut points = vec![(history.first_step, history.first_scale)];
        for entry in &history.entries {
            points.extend(points.last().map(|(_, before)| (entry.step, *before)));
            points.push((entry.step, entry.scale));
        }
        points.push((self.steps(), self.loss_scale));
        chart.draw_series(LineSeries::new(points, SCALE.stroke_width(2)))?;

        for (outcome, color, name) in [
            (StepOutcome::Overflow, OVERFLOW, "overflow, skipped"),
            (
                StepOutcome::NonFiniteLoss,
                BAD_LOSS,
                "loss not finite, skipped",
            ),
        ] {
            let of_outcome = || history.skipped().filter(|(_, s)| s.outcome == outcome);
            let count = of_outcome().count();
            if count == 0 {
                continue;
            }
            let mark = move |at| Circle::new(at, 4, color.filled());
            chart
                .draw_series(of_outcome().map(|(step, skipped)| mark((step, skipped.scale))))?
                .label(format!("{name}: {count}"))
                .legend(move |(x, y)| Circle::new((x + 11, y), 4, color.filled()));
        }
        if self.skipped_steps > 0 {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE.mix(0.9))
                .border_style(RGBColor(200, 200, 200))
                .label_font((FONT, 15))
                .margin(10)
                .draw()?;
        }
        root.present()?;
        drop(chart);
        drop(root);
        Ok(svg)
    }
}
