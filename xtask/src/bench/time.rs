//! Timings of several things in turn, so that a noisy machine disturbs all of them alike.

use std::time::{Duration, Instant};

/// One of the things: runs itself so many times and returns how long that took.
pub type Contender<'a> = Box<dyn FnMut(u32) -> Duration + 'a>;

/// The seconds of a run, by contender and round.
#[derive(Debug, PartialEq)]
pub struct Rounds(Vec<Vec<f64>>);

/// The middle of all rounds, and where the middle half of them lies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

/// A contender that is the same each time; `sync` waits for all that it left running.
pub fn timed<'a>(mut run: impl FnMut() + 'a, sync: impl Fn() + 'a) -> Contender<'a> {
    Box::new(move |runs| {
        let start = Instant::now();
        (0..runs).for_each(|_| run());
        sync();
        start.elapsed()
    })
}

/// A contender with an untimed run before the timed ones, which find caches and memory as a row of runs
/// leaves them, and not as the contender before did.
pub fn warmed(mut contender: Contender<'_>) -> Contender<'_> {
    Box::new(move |runs| {
        contender(1);
        contender(runs)
    })
}

/// Times all of them, in rounds of at least `round` for the first.
pub fn in_turn(rounds: usize, round: Duration, contenders: Vec<Contender>) -> Rounds {
    watched(rounds, round, contenders, |_, _| {}, |_| {})
}

/// The same. `begun` gets each contender's place and the time of its first runs; `so_far` gets what is
/// known after each of these, one run of each, and after each round.
pub fn watched(
    rounds: usize,
    round: Duration,
    mut contenders: Vec<Contender>,
    mut begun: impl FnMut(usize, Duration),
    mut so_far: impl FnMut(&Rounds),
) -> Rounds {
    let mut first = Rounds(vec![Vec::new(); contenders.len()]);
    for (i, contender) in contenders.iter_mut().enumerate() {
        let start = Instant::now();
        let last = contender(1);
        begun(i, start.elapsed());
        first.0[i].push(last.as_secs_f64());
        so_far(&first);
    }
    let once = contenders[0](1).as_secs_f64().max(1e-9);
    let runs = (round.as_secs_f64() / once).ceil().max(1.0) as u32;
    let mut timed = Rounds(vec![Vec::new(); contenders.len()]);
    let mut order: Vec<_> = (0..contenders.len()).collect();
    for _ in 0..rounds {
        // In changing order, so that no contender always comes after the same one.
        order.rotate_left(1);
        order.reverse();
        for &i in &order {
            timed.0[i].push(contenders[i](runs).as_secs_f64() / f64::from(runs));
        }
        so_far(&timed);
    }
    timed
}

impl Rounds {
    /// Whether a contender has run.
    pub fn has(&self, of: usize) -> bool {
        !self.0[of].is_empty()
    }

    pub fn seconds(&self, of: usize) -> Spread {
        spread(self.0[of].iter().copied())
    }

    /// The time of one as a multiple of another's in the same round.
    pub fn ratio(&self, of: usize, to: usize) -> Spread {
        spread(self.pairs(of, to).map(|(a, b)| a / b))
    }

    /// How much longer one takes than another in the same round.
    pub fn difference(&self, of: usize, to: usize) -> Spread {
        spread(self.pairs(of, to).map(|(a, b)| a - b))
    }

    fn pairs(&self, a: usize, b: usize) -> impl Iterator<Item = (f64, f64)> {
        self.0[a].iter().copied().zip(self.0[b].iter().copied())
    }
}

impl Spread {
    /// One figure that does not spread.
    pub fn of(median: f64) -> Self {
        spread([median].into_iter())
    }

    pub fn times(self, factor: f64) -> Self {
        let [low, median, high] = [self.low, self.median, self.high].map(|value| value * factor);
        Self { low, median, high }
    }
}

fn spread(values: impl Iterator<Item = f64>) -> Spread {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    let [low, median, high] = [1, 2, 3].map(|quarters| values[(values.len() - 1) * quarters / 4]);
    Spread { low, median, high }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_compared_pair_by_pair() {
        let rounds = Rounds(vec![
            vec![1.0, 2.0, 3.0, 4.0, 5.0],
            vec![2.0, 2.0, 9.0, 4.0, 5.0],
        ]);
        let ratio = rounds.ratio(1, 0);
        assert_eq!((ratio.low, ratio.median, ratio.high), (1.0, 1.0, 2.0));
        let longer = rounds.difference(1, 0);
        assert_eq!((longer.low, longer.median, longer.high), (0.0, 0.0, 1.0));
        assert_eq!(rounds.seconds(0).times(10.0).median, 30.0);
    }

    #[test]
    fn the_run_that_warms_up_is_not_timed() {
        let mut ran = Vec::new();
        let contender: Contender = Box::new(|runs| {
            ran.push(runs);
            Duration::from_secs(ran.len() as u64)
        });
        assert_eq!(warmed(contender)(7), Duration::from_secs(2));
        assert_eq!(ran, [1, 7]);
    }

    #[test]
    fn every_contender_runs_as_often_in_each_round() {
        let mut ran = [0, 0];
        let [a, b] = &mut ran;
        let count = |counter: &mut u32, runs: u32| {
            *counter += runs;
            Duration::from_millis(u64::from(runs))
        };
        let contenders: Vec<Contender> = vec![
            Box::new(|runs| count(a, runs)),
            Box::new(|runs| count(b, runs)),
        ];
        let rounds = in_turn(3, Duration::from_millis(5), contenders);
        assert_eq!(rounds.seconds(1).median, 1e-3);
        // Once to warm up, the first once more to see how long it takes, then 5 in each round.
        assert_eq!(ran, [17, 16]);
    }

    #[test]
    fn what_is_known_is_told_at_once() {
        let contenders: Vec<Contender> = vec![
            Box::new(|runs| Duration::from_secs(u64::from(runs))),
            Box::new(|runs| Duration::from_secs(u64::from(2 * runs))),
        ];
        let (mut begun, mut known) = (Vec::new(), Vec::new());
        let rounds = watched(
            2,
            Duration::ZERO,
            contenders,
            |i, _| begun.push(i),
            |so_far| known.push(so_far.0.clone()),
        );
        assert_eq!(begun, [0, 1]);
        assert_eq!(known[0], [vec![1.0], vec![]]);
        assert_eq!(known[1], [vec![1.0], vec![2.0]]);
        assert_eq!(known[2], [vec![1.0], vec![2.0]]);
        assert_eq!(rounds, Rounds(known.pop().unwrap()));
        assert_eq!(known.len(), 3);
        assert!(rounds.has(1) && !Rounds(vec![vec![]]).has(0));
    }
}
