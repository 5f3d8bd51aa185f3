//! What the comparison of contractions with a reference costs and finds: the first steps of each model and a later one, with it and
//! without.

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn_amp::policy::Reason;
use burn_amp::{AmpAutodiff, AmpReport, exceptions};
use serde_json::{Value, json};

use super::Options;
use super::backend::Measured;
use super::casts::config_in;
use super::speed::Step;

/// The steps that are timed one by one.
const FIRST: usize = 4;
/// The steps after them, whose median is one figure.
const LATER: usize = 9;

pub fn verification<B: Measured>(options: &Options) -> Vec<Value> {
    let device = B::Device::default();
    println!(
        "\nthe first steps and a later one on {}, in ms, without and with a comparison of contractions",
        B::name(&device)
    );
    let mut rows = Vec::new();
    for model in options.models() {
        for precision in options.precisions::<B>().into_iter().skip(1) {
            // The kernels are compiled, and what is tried is tried.
            let warm = |verifies| {
                let config = config_in(precision).with_trials(!options.without_trials);
                let config = config.with_verification(verifies);
                config.apply::<B>(&device).expect("a possible precision");
                let mut step =
                    Step::<AmpAutodiff<B>>::new(model, model.dims(options.size), &device);
                let mut timed = || {
                    let start = Instant::now();
                    step.run();
                    <Autodiff<B> as Backend>::sync(&device).expect("a device that answers");
                    start.elapsed()
                };
                let first: Vec<_> = (0..FIRST).map(|_| timed()).collect();
                let mut later: Vec<_> = (0..LATER).map(|_| timed()).collect();
                later.sort();
                (first, later[LATER / 2])
            };
            warm(false);
            let (without, with) = (warm(false), warm(true));
            let report = AmpReport::of::<AmpAutodiff<B>>(&device).expect("a possible precision");
            let ms = |time: &Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
            let text = |(first, later): &(Vec<Duration>, Duration)| {
                let first: Vec<_> = first.iter().map(ms).collect();
                format!("{}, then {}", first.join(", "), ms(later))
            };
            let mut wrong = exceptions::<B>(&device).list();
            wrong.retain(|exception| exception.reason == Reason::Verified);
            let wrong: Vec<_> = wrong.iter().map(ToString::to_string).collect();
            let (name, open) = (model.name(), &report.unverified);
            println!("{name:<12} {precision:<6} without {}", text(&without));
            println!("{:<19} with    {}", "", text(&with));
            println!("{:<19} wrong {wrong:?}, not compared {open:?}", "");
            rows.push(json!({
                "model": name,
                "precision": precision,
                "without": text(&without),
                "with": text(&with),
                "wrong": wrong,
                "unverified": open,
            }));
        }
    }
    rows
}
