//! The exceptions of a device: operations that it computes in another precision than the policy's table says.
//! One table, whatever the reason. A decision reads one number of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::policy::trials::{Kind, TriedOp};
use crate::policy::{Half, Known, OPS, Op, OpPrecision, OpPrecisions, allowed, half_of, short};
use crate::reference::Verdict;
use crate::verified::{Begun, Calls, State, Verification, Verified};
use crate::{FloatDType, Precision};

pub use entry::{Exception, Reason, report_lines};
pub use file::{ask_for_exceptions, files_of_exceptions};

mod entry;
mod file;
#[cfg(test)]
mod tests;

/// A line for the log.
#[doc(hidden)]
#[must_use = "`publish` logs it, where no lock is held"]
#[derive(Debug, PartialEq, Eq)]
pub struct News(log::Level, String);

/// The half precisions.
const HALVES: [Precision; 2] = [Precision::F16, Precision::Bf16];

/// The place of a half precision in what is known of an operation.
fn index(half: Precision) -> Half {
    u32::from(half == Precision::Bf16)
}

/// The exceptions of a device, for all threads: what its configuration changes, what trials and comparisons found, and
/// what overflowed f16.
///
/// ```text
/// configured   AmpConfig::with_op         until the next configuration
/// tried        the first use in half      for the life of the process, or from the device's file
/// verified     the first uses at a shape  for the life of the process, or from the device's file
/// overflowed   a step that no loss        for the life of the process, or from a file of any device
///              scale mends
/// ```
#[derive(Debug)]
pub struct Exceptions {
    known: [AtomicU32; OPS.len()],
    /// The length of the calls that overflowed f16, of each operation; [`ALL`], or 0 for none.
    overflowed: [AtomicUsize; OPS.len()],
    verified: Verified,
    is_frozen: AtomicBool,
    device: OnceLock<String>,
    /// Where the exceptions are kept. Held while the file is written.
    file: Mutex<Option<PathBuf>>,
}

/// All calls of an operation, in the place of a length.
const ALL: usize = usize::MAX;

impl Default for Exceptions {
    fn default() -> Self {
        Self {
            known: [const { AtomicU32::new(0) }; OPS.len()],
            overflowed: [const { AtomicUsize::new(0) }; OPS.len()],
            verified: Verified::default(),
            is_frozen: AtomicBool::new(false),
            device: OnceLock::new(),
            file: Mutex::new(None),
        }
    }
}

impl Exceptions {
    /// The exceptions of the device with this name.
    #[doc(hidden)]
    pub fn named(&self, device: impl FnOnce() -> String) -> &Self {
        self.device.get_or_init(device);
        self
    }

    /// The one look-up of a decision. The `length` of the call is asked only where it tells.
    #[doc(hidden)]
    #[inline]
    pub fn of(&self, op: &Op, length: impl FnOnce() -> usize) -> Known {
        let Some(place) = op.place.map(usize::from) else {
            return Known::default();
        };
        let known = Known(self.known[place].load(Ordering::Relaxed));
        if !known.overflowed() {
            return known;
        }
        let calls = self.overflowed[place].load(Ordering::Relaxed);
        match calls == ALL || calls == length() {
            true => known,
            false => known.without_overflow(),
        }
    }

    /// Whether calls of the operation can be exceptions: it is no move of data, no function of the backward pass, and not
    /// the user's own.
    #[doc(hidden)]
    pub fn may_overflow(op: &Op) -> bool {
        op.place.is_some() && allowed(op).0.contains(&OpPrecision::F32)
    }

    /// Adds calls that overflowed f16 in this pass. A second length of an operation stands for all: it is that of a
    /// batch or of a sequence, which varies. `None` if they are not new.
    pub(crate) fn add_overflowed(&self, op: &str, length: usize, pass: &str) -> Option<News> {
        let place = OPS.iter().position(|row| row.name == op)?;
        if !Self::may_overflow(&OPS[place]) || self.is_frozen() {
            return None;
        }
        let text = format!(
            "burn-amp: {} overflowed f16 in the {pass} pass, and no loss scale mends it: it computes in FP32 on {} from \
             now on. burn_amp::exceptions lists it; AmpConfig::with_overflow_fallback(false) skips such steps",
            Exception::overflowed(place, self.widen(place, length)?),
            self.device_name()
        );
        Some(News(log::Level::Warn, text))
    }

    /// Adds calls of this length, if they are new. Returns the length of those that there are now.
    fn widen(&self, place: usize, length: usize) -> Option<usize> {
        let widen = |before| match before {
            0 => Some(length),
            before if before == ALL || before == length => None,
            _ => Some(ALL),
        };
        let calls = &self.overflowed[place];
        let before = calls.fetch_update(Ordering::Relaxed, Ordering::Relaxed, widen);
        self.known[place].fetch_or(Known::OVERFLOWED, Ordering::Relaxed);
        widen(before.ok()?)
    }

    /// Takes calls back: their result is not finite in FP32 either.
    pub(crate) fn withdraw(&self, op: &str, length: usize) -> News {
        let place = OPS.iter().position(|row| row.name == op);
        let is = |calls: usize| calls == ALL || calls == length;
        let place = place.filter(|place| is(self.overflowed[*place].load(Ordering::Relaxed)));
        if let Some(place) = place {
            self.forget_overflow(place);
        }
        let text = format!(
            "burn-amp: {} over {length} gives a result that is not finite in FP32 either: no precision and no loss scale \
             mends it",
            short(op)
        );
        News(log::Level::Warn, text)
    }

    fn forget_overflow(&self, place: usize) {
        self.known[place].fetch_and(!Known::OVERFLOWED, Ordering::Relaxed);
        self.overflowed[place].store(0, Ordering::Relaxed);
    }

    /// Puts the precisions of a configuration in the place of those of the configuration before.
    #[doc(hidden)]
    pub fn configure(&self, operations: &OpPrecisions) -> Vec<News> {
        let mut news = Vec::new();
        for (op, known) in OPS.iter().zip(&self.known) {
            let precision = operations.of(op);
            let change = |known| Some(Known(known).with_configured(precision).0);
            let before = known.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
            let is_new = before.is_ok_and(|before| Known(before).configured() != precision);
            if let Some(precision) = precision.filter(|_| is_new) {
                let name = short(op.name);
                let text =
                    format!("burn-amp: {name} computes in {precision}, by AmpConfig::with_op");
                news.push(News(log::Level::Info, text));
            }
        }
        news
    }

    /// Writes the file, if there is one, and logs what has changed. The caller holds no lock: the program's logger may ask
    /// for the device.
    #[doc(hidden)]
    pub fn publish(&self, news: impl IntoIterator<Item = News>) {
        self.keep();
        for News(level, text) in news {
            log::log!(level, "{text}");
        }
    }

    /// Whether the device is exact in an operation that is not known yet: `try_it` finds out. `None` if the exceptions
    /// are frozen. No lock is held meanwhile, because a thread that waits for the trial's kernels may ask again. A
    /// second trial does no harm: the first answer stays.
    #[doc(hidden)]
    pub fn tried<D: FloatDType>(
        &self,
        op: TriedOp,
        half: D,
        try_it: impl FnOnce() -> bool,
    ) -> Option<bool> {
        if self.is_frozen() {
            return None;
        }
        let half = half_of(half);
        let exact = try_it();
        let place = Op::named(op.name()).place?;
        let found = (op.kind(), half, exact);
        let answer = |known| Known(known).with(&found).map(|known| known.0);
        let known = &self.known[usize::from(place)];
        match known.fetch_update(Ordering::Relaxed, Ordering::Relaxed, answer) {
            Ok(_) => {
                self.keep();
                Some(exact)
            }
            // Another thread was first.
            Err(known) => Known(known).answer(op.kind(), half),
        }
    }

    /// What was verified of a call of a contraction in `half`, on float operands of these shapes, and whether to verify this
    /// one, if a comparison `may_begin`.
    #[doc(hidden)]
    pub fn verified<D: FloatDType>(
        &self,
        op: &Op,
        half: D,
        shapes: &[&[usize]],
        may_begin: bool,
    ) -> Verification {
        let may_begin = may_begin && !self.is_frozen();
        self.verified.ask(op, half_of(half), shapes, may_begin)
    }

    /// Ends comparisons that began. Without a verdict, the next such call begins another one.
    #[doc(hidden)]
    pub fn end_verifications(&self, ended: impl IntoIterator<Item = (Begun, Option<Verdict>)>) {
        let (mut changed, mut news) = (false, Vec::new());
        for (begun, verdict) in ended {
            let verdict = verdict.filter(|_| !self.is_frozen());
            if let Some((calls, state)) = self.verified.end(begun, verdict) {
                changed = true;
                news.extend(self.found_wrong(calls, state, verdict));
            }
        }
        if changed {
            self.publish(news);
        }
    }

    /// What the log says of a verdict.
    fn found_wrong(&self, calls: Calls, state: State, verdict: Option<Verdict>) -> Option<News> {
        let Some(Verdict::Wrong { found, right }) = verdict else {
            return None;
        };
        let (exception, device) = (Exception::verified(calls, state), self.device_name());
        let half = exception.half?;
        let (level, text) = match state {
            State::Wrong(None) => (
                log::Level::Warn,
                format!(
                    "burn-amp: {exception} in {half} is wrong on {device}: it gave {found}, and {right} is right. It \
                     computes in FP32 from now on, and its result is rounded to {half}. burn_amp::exceptions lists it"
                ),
            ),
            _ => (
                log::Level::Error,
                format!(
                    "burn-amp: {exception} is wrong on {device} in FP32, too: it gave {found}, and {right} is right. No \
                     precision mends it: report it to Burn, or use other shapes"
                ),
            ),
        };
        Some(News(level, text))
    }

    fn device_name(&self) -> &str {
        self.device.get().map_or("the device", String::as_str)
    }

    /// The calls of contractions in this precision that were not verified so far: none of their operands told anything, or
    /// too many were new.
    #[doc(hidden)]
    pub fn unverified(&self, half: Precision) -> Vec<String> {
        let all = self.verified.all().into_iter();
        let open = all.filter(|(_, state)| *state == State::Open);
        let open = open.map(|(calls, state)| Exception::verified(calls, state));
        open.filter(|calls| calls.half == Some(half))
            .map(|calls| calls.to_string())
            .collect()
    }

    /// The exceptions, in the order of the policy's table. Of what is tried, only operations that have run in half.
    pub fn list(&self) -> Vec<Exception> {
        self.all()
            .filter(|(is_exception, _)| *is_exception)
            .map(|(_, entry)| entry)
            .collect()
    }

    /// The exceptions where this precision is in force. Empty in FP32.
    #[doc(hidden)]
    pub fn in_force(&self, precision: Precision) -> Vec<Exception> {
        let mut list = self.list();
        list.retain(|e| precision.is_half() && e.half.is_none_or(|half| half == precision));
        list
    }

    /// Everything that is known, each with whether it differs from the table.
    fn all(&self) -> impl Iterator<Item = (bool, Exception)> {
        let every = self.known.iter().zip(&self.overflowed).enumerate();
        let mut verified = self.verified.all();
        verified.retain(|(_, state)| *state != State::Open);
        every.flat_map(move |(place, (known, overflowed))| {
            let known = Known(known.load(Ordering::Relaxed));
            let configured = known.configured();
            let configured =
                configured.map(|precision| (true, Exception::of(place, Kind::Usual, precision)));
            let calls = overflowed.load(Ordering::Relaxed);
            let overflowed = (calls != 0).then(|| (true, Exception::overflowed(place, calls)));
            let tried = Kind::ALL.into_iter().flat_map(move |calls| {
                HALVES.into_iter().filter_map(move |half| {
                    let exact = known.answer(calls, index(half))?;
                    let precision = if exact {
                        OpPrecision::Half
                    } else {
                        OpPrecision::F32
                    };
                    let is_exception = exact == OPS[place].is_widened();
                    let entry = Exception {
                        half: Some(half),
                        reason: Reason::Tried,
                        ..Exception::of(place, calls, precision)
                    };
                    Some((is_exception, entry))
                })
            });
            let verified = verified
                .iter()
                .filter(move |(calls, _)| calls.place == place)
                .map(|(calls, state)| {
                    let is_exception = matches!(state, State::Wrong(_));
                    (is_exception, Exception::verified(calls.clone(), *state))
                });
            let verified: Vec<_> = verified.collect();
            configured
                .into_iter()
                .chain(tried)
                .chain(verified)
                .chain(overflowed)
        })
    }

    /// Forgets what was tried, what was verified, and what overflowed: an operation is tried again when it next computes in
    /// half. What is configured stays.
    pub fn clear(&self) {
        for (known, overflowed) in self.known.iter().zip(&self.overflowed) {
            known.fetch_and(Known::CONFIGURED, Ordering::Relaxed);
            overflowed.store(0, Ordering::Relaxed);
        }
        self.verified.clear();
        self.keep();
    }

    /// `true` keeps what is known and finds nothing new: no operation is tried or compared, and one that overflows stays
    /// half. `false`, the default, goes on. A configuration still changes operations.
    pub fn freeze(&self, freeze: bool) {
        self.is_frozen.store(freeze, Ordering::Relaxed);
    }

    /// Whether the exceptions are frozen.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }
}
