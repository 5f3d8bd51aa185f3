//! Paired timings: two things measured in turn, so that a noisy machine disturbs both alike.

use std::time::Instant;

/// Rounds that are measured.
const ROUNDS: usize = 41;
/// Runs in a round.
const RUNS: u32 = 40;

/// The middle of the ratios of all rounds, and where the middle half of them lies.
pub struct Ratio {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

/// The median microseconds of a run of each, and the ratio of the second to the first.
pub fn pairs(mut first: impl FnMut(), mut second: impl FnMut()) -> (f64, f64, Ratio) {
    let round = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        (0..RUNS).for_each(|_| f());
        start.elapsed().as_secs_f64() * 1e6 / f64::from(RUNS)
    };
    round(&mut first);
    round(&mut second);
    let rounds: Vec<_> = (0..ROUNDS)
        .map(|i| match i % 2 {
            0 => {
                let a = round(&mut first);
                (a, round(&mut second))
            }
            _ => {
                let b = round(&mut second);
                (round(&mut first), b)
            }
        })
        .collect();
    let ratios = sorted(rounds.iter().map(|(a, b)| b / a));
    let middle = |values: Vec<f64>| values[values.len() / 2];
    (
        middle(sorted(rounds.iter().map(|(a, _)| *a))),
        middle(sorted(rounds.iter().map(|(_, b)| *b))),
        Ratio {
            low: ratios[ROUNDS / 4],
            median: ratios[ROUNDS / 2],
            high: ratios[3 * ROUNDS / 4],
        },
    )
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}
