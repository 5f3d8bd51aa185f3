//! The exceptions of a device: operations that it computes in another precision than the policy's table says.
//! One table, whatever the reason. A decision reads one number of it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use crate::file::{read_json, replace_file, write_json};
use crate::policy::trials::{Kind, TriedOp};
use crate::policy::{
    Convolution, Half, Known, OPS, Op, OpPrecision, OpPrecisions, Tried, allowed, bits, half_of,
    short,
};
use crate::reference::Verdict;
use crate::verified::{Begun, Calls, MOST, State, Verification, Verified};
use crate::words::line;
use crate::{AmpError, FloatDType, Precision};

/// The version of the file.
const VERSION: u32 = 1;
/// The most KiB of it that are read. A call that was verified takes less than 1, and there are at most 4,096.
const LARGEST: usize = 16 * 1024;

/// A line for the log.
#[doc(hidden)]
#[must_use = "`publish` logs it, where no lock is held"]
#[derive(Debug, PartialEq, Eq)]
pub struct News(log::Level, String);

/// Why an operation has another precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// The configuration says so: `AmpConfig::with_op`.
    Configured,
    /// A trial showed whether the device is exact in the operation in half.
    Tried,
    /// Samples of the operation's result at these shapes were compared with sums on the host:
    /// `AmpConfig::with_verification`.
    Verified,
    /// The operation overflowed f16 at any loss scale, in a step that would have been skipped for ever:
    /// `AmpConfig::with_overflow_fallback`.
    Overflowed,
}

/// An operation that a device computes in another precision than the policy's table says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Exception {
    /// The operation's name, without `float_`.
    pub op: String,
    /// Which calls of the operation, such as convolutions in groups.
    pub calls: Kind,
    /// Which of these calls: those that sum so many products, or if the operation sums none, whose last dimension is
    /// this. The batch and the length of a sequence tell no calls apart. `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<usize>,
    /// What was verified: the shapes of the float operands of the first of these calls. Calls whose sizes a device tells apart
    /// in no other way are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<Vec<usize>>,
    /// The options of a convolution that was verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convolution: Option<Convolution>,
    /// The half precision in force; `None`: f16 and bf16.
    pub half: Option<Precision>,
    /// The precision that the operation computes in. What was tried and is FP32 returns half: operands and result
    /// are rounded, so that the values are those of a device that is exact.
    pub precision: OpPrecision,
    /// Why.
    pub reason: Reason,
}

impl Exception {
    /// What a configuration says of all calls of a kind.
    fn of(place: usize, calls: Kind, precision: OpPrecision) -> Self {
        Self {
            op: short(OPS[place].name).into(),
            calls,
            length: None,
            shapes: Vec::new(),
            convolution: None,
            half: None,
            precision,
            reason: Reason::Configured,
        }
    }

    /// What a comparison showed of calls.
    fn verified(calls: Calls, state: State) -> Self {
        let precision = match state {
            State::Wrong(_) => OpPrecision::F32,
            _ => OpPrecision::Half,
        };
        Self {
            shapes: calls.shapes,
            convolution: calls.convolution,
            half: Some(HALVES[calls.half as usize]),
            reason: Reason::Verified,
            ..Self::of(calls.place, calls.kind, precision)
        }
    }

    /// That calls of this length overflowed f16.
    fn overflowed(place: usize, length: usize) -> Self {
        Self {
            length: (length != ALL).then_some(length),
            half: Some(Precision::F16),
            reason: Reason::Overflowed,
            ..Self::of(place, Kind::Usual, OpPrecision::F32)
        }
    }
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.op, self.calls)?;
        if let Some(length) = self.length {
            write!(f, " over {length}")?;
        }
        for (i, shape) in self.shapes.iter().enumerate() {
            let word = if i == 0 { "of" } else { "and" };
            write!(f, " {word} {shape:?}")?;
        }
        if let (Some(options), [first, ..]) = (&self.convolution, &self.shapes[..]) {
            let axes = first.len().saturating_sub(2).min(3);
            for option in options.unusual(axes) {
                write!(f, ", {option}")?;
            }
        }
        Ok(())
    }
}

/// What a file has.
#[derive(Default)]
struct Found {
    /// Each with the place of its operation.
    tried: Vec<(usize, Tried)>,
    verified: Vec<(Calls, State)>,
    /// Each with the place of its operation.
    overflowed: Vec<(usize, Option<usize>)>,
}

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

/// The file of a device's exceptions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    version: u32,
    /// The device and what runs its kernels. What was tried elsewhere says nothing here.
    device: String,
    /// All that was tried, and what is configured.
    operations: Vec<Exception>,
}

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
            let class = OPS[place].class;
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
                    let is_exception = exact == TriedOp::is_widened(class);
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

    /// Whether nothing is tried any more: an operation that is not known yet computes as the policy's table says, and
    /// one that overflows does so again. A configuration still changes operations.
    pub fn freeze(&self, freeze: bool) {
        self.is_frozen.store(freeze, Ordering::Relaxed);
    }

    /// Whether the exceptions are frozen.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    /// Keeps the exceptions in a file from now on, in every precision. If the file exists, what was tried and what
    /// overflowed is read from it first, so that no operation is tried twice, and no step of a resumed run is skipped for
    /// what is known. Use one file for each device: from a file of another backend, device, processor, NVIDIA GPU, NVIDIA
    /// driver or version of burn-amp only what overflowed is read, and the file is replaced. A program cannot know other drivers, or
    /// LibTorch's and Burn's versions, nor AMD's and Intel's GPUs: delete the file after such a change. Of two processes that
    /// use one file at the same time, the last to write wins. The file also lists what is configured, which the
    /// configuration of the next process decides anew. Each new exception replaces the file, whole or not at all.
    /// Checkpoints of a trainer, and those of a `Learner` with `GradScaler::checkpoint_with`, name the file.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be read or written, is truncated, larger than 16 MiB or from a newer version,
    /// or names an operation that there is not or that has no precision to change. The exceptions are then unchanged.
    pub fn keep_in(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        let read = match File::open(path) {
            Ok(file) => self.read(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::default()),
            Err(error) => Err(error),
        };
        let unread = |error| format!("{error}. Delete the file to try the operations again");
        let read = read.map_err(|error| AmpError::unread(path.display(), unread(error)))?;
        let mut file = self.file();
        // What was found meanwhile stays.
        let added = read.tried.into_iter().filter(|(place, entry)| {
            let add = |known| Known(known).with(entry).map(|known| known.0);
            let known = &self.known[*place];
            known
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
                .is_ok()
        });
        let added: Vec<_> = added.collect();
        let before = self
            .overflowed
            .each_ref()
            .map(|calls| calls.load(Ordering::Relaxed));
        for (place, length) in read.overflowed {
            self.widen(place, length.unwrap_or(ALL));
        }
        let verified = read.verified.into_iter();
        let verified = verified
            .filter_map(|(calls, state)| self.verified.add(&OPS[calls.place], calls, state))
            .collect();
        if let Err(error) = self.write(path) {
            for (place, calls) in before.into_iter().enumerate() {
                match calls {
                    0 => self.forget_overflow(place),
                    calls => self.overflowed[place].store(calls, Ordering::Relaxed),
                }
            }
            self.verified.restore(verified);
            for (place, (calls, half, _)) in &added {
                let answer = 0b11 << bits(*calls, *half);
                self.known[*place].fetch_and(!answer, Ordering::Relaxed);
            }
            return Err(AmpError::unwritten(path.display(), error));
        }
        files().insert(path.into());
        *file = Some(path.into());
        Ok(())
    }

    /// The file in which the exceptions are kept.
    pub fn kept_in(&self) -> Option<PathBuf> {
        self.file().clone()
    }

    /// What a file knows.
    fn read(&self, file: File) -> io::Result<Found> {
        let kept: Kept = read_json(file, LARGEST)?;
        let unlike = |reason: String| io::Error::other(reason);
        if kept.version != VERSION {
            return Err(unlike(format!(
                "it has version {}, but this burn-amp reads version {VERSION}",
                kept.version
            )));
        }
        let is_here = kept.device == self.identity();
        if !is_here {
            log::info!(
                "burn-amp: the exceptions of {} are not those of {}: what was tried there is dropped",
                kept.device,
                self.identity()
            );
        }
        let mut found = Found::default();
        for entry in &kept.operations {
            let is_read = match entry.reason {
                Reason::Configured => false,
                Reason::Tried | Reason::Verified => is_here,
                Reason::Overflowed => true,
            };
            if !is_read {
                continue;
            }
            let place = OPS.iter().position(|op| short(op.name) == entry.op);
            let half = entry.half.filter(|half| HALVES.contains(half));
            let (place, half) = place
                .zip(half)
                .ok_or_else(|| unlike(format!("it names an unknown operation: {entry}")))?;
            let (half, exact) = (index(half), entry.precision == OpPrecision::Half);
            match entry.reason {
                Reason::Overflowed if !Self::may_overflow(&OPS[place]) => {
                    return Err(unlike(format!(
                        "{} is computed in its operand's precision",
                        entry.op
                    )));
                }
                Reason::Overflowed => found.overflowed.push((place, entry.length)),
                Reason::Verified => {
                    let calls = Calls {
                        place,
                        kind: entry.calls,
                        half,
                        shapes: entry.shapes.clone(),
                        convolution: entry.convolution,
                    };
                    let state = if exact {
                        State::Right
                    } else {
                        State::Wrong(None)
                    };
                    found.verified.push((calls, state));
                }
                _ => found.tried.push((place, (entry.calls, half, exact))),
            }
        }
        if found.verified.len() > MOST {
            let reason = format!("it has more than {MOST} calls that were compared");
            return Err(unlike(reason));
        }
        Ok(found)
    }

    /// Writes the file, if there is one. What was found is in force also where this fails.
    fn keep(&self) {
        let unwritten = {
            let file = self.file();
            let failed = |path: &PathBuf| Some((path.clone(), self.write(path).err()?));
            file.as_ref().and_then(failed)
        };
        if let Some((path, error)) = unwritten {
            log::warn!(
                "burn-amp: the exceptions could not be written to {}: {error}",
                path.display()
            );
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let kept = Kept {
            version: VERSION,
            device: self.identity(),
            operations: self.all().map(|(_, entry)| entry).collect(),
        };
        replace_file(path, |part| write_json(File::create_new(part)?, &kept))
    }

    fn file(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn identity(&self) -> String {
        let device = self.device.get().map_or("a device", String::as_str);
        format!("{device}, {}", machine())
    }
}

/// The files in which devices of this process keep their exceptions.
fn files() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    static FILES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The files of the exceptions of this process, as a checkpoint names them. A checkpoint cannot hold the exceptions:
/// some records hold numbers alone.
#[doc(hidden)]
pub fn files_of_exceptions() -> Vec<String> {
    files()
        .iter()
        .map(|path| path.display().to_string())
        .collect()
}

/// Logs the files that a checkpoint names and that no device of this process keeps its exceptions in.
#[doc(hidden)]
pub fn ask_for_exceptions(named: &[String]) {
    let here = files_of_exceptions();
    for file in named.iter().filter(|file| !here.contains(file)) {
        log::info!(
            "burn-amp: the checkpoint was written where the exceptions of a device were kept in {file}. To resume with \
             them, call burn_amp::exceptions::<B>(&device).keep_in({file:?}) before the first step"
        );
    }
}

/// What runs kernels here, as far as a program can know: Linux tells the processor, and NVIDIA's GPUs and driver.
fn machine() -> &'static str {
    static MACHINE: OnceLock<String> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let first = |path: &Path, field: &str| value(&std::fs::read_to_string(path).ok()?, field);
        let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
        let mut parts = vec![format!(
            "burn-amp {}, {os} {arch}",
            env!("CARGO_PKG_VERSION")
        )];
        parts.extend(first("/proc/cpuinfo".as_ref(), "model name"));
        let nvidia = Path::new("/proc/driver/nvidia");
        parts.extend(first(&nvidia.join("version"), "NVRM version"));
        let gpus = std::fs::read_dir(nvidia.join("gpus"))
            .into_iter()
            .flatten()
            .flatten();
        let gpus = gpus.filter_map(|gpu| first(&gpu.path().join("information"), "Model"));
        let mut gpus: Vec<_> = gpus.collect();
        gpus.sort();
        gpus.dedup();
        // Which of several kinds the first device is.
        if gpus.len() > 1
            && let Ok(devices) = std::env::var("CUDA_VISIBLE_DEVICES")
        {
            gpus.push(format!("CUDA_VISIBLE_DEVICES={devices}"));
        }
        parts.extend(gpus);
        parts.join(", ")
    })
}

/// What stands behind the first colon of the first line that begins with `field`.
fn value(text: &str, field: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    let (_, value) = line.split_once(':')?;
    Some(value.trim().into())
}

/// The lines of a report about the exceptions where `half` is in force, each with its newline.
#[doc(hidden)]
pub fn report_lines(half: impl fmt::Display, exceptions: &[Exception]) -> String {
    use OpPrecision::{F32, Half};
    let of = |reason, precision: OpPrecision| -> Vec<String> {
        let of = |e: &&Exception| e.reason == reason && e.precision == precision;
        let text = |e: &Exception| match reason {
            Reason::Configured => format!("{e} in {precision}"),
            Reason::Tried | Reason::Verified | Reason::Overflowed => e.to_string(),
        };
        exceptions.iter().filter(of).map(text).collect()
    };
    let configured = [of(Reason::Configured, F32), of(Reason::Configured, Half)].concat();
    let rounded = format!("computed in FP32, then rounded to {half}");
    let without_casts = format!("as exact in {half} as in FP32, so without casts");
    let lines = [
        ("operations", configured, "changed by AmpConfig::with_op"),
        ("FP32 here", of(Reason::Tried, F32), rounded.as_str()),
        ("half here", of(Reason::Tried, Half), &without_casts),
        ("wrong here", of(Reason::Verified, F32), &rounded),
        (
            "overflowed",
            of(Reason::Overflowed, F32),
            "in FP32 now: no loss scale mends it",
        ),
    ];
    let lines = lines.map(|(label, ops, why)| line(label, &ops, "exceptions", why));
    lines.concat()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;
    use crate::dtype::tests::DType;
    use crate::policy::{Class, Role};
    use crate::verified::tests::WRONG;
    use DType::{BF16, F16};

    fn tried(name: &str) -> TriedOp {
        TriedOp::named(name).unwrap()
    }

    /// Adds calls that overflowed. Returns whether they are new.
    fn add(exceptions: &Exceptions, op: &str, length: usize, pass: &str) -> bool {
        let news = exceptions.add_overflowed(op, length, pass);
        let is_new = news.is_some();
        exceptions.publish(news);
        is_new
    }

    fn texts(exceptions: &Exceptions) -> Vec<String> {
        let text = |e: Exception| {
            let half = e.half.map_or("any half".into(), |half| half.to_string());
            format!("{e}, {half}: {}, {:?}", e.precision, e.reason)
        };
        exceptions.list().into_iter().map(text).collect()
    }

    /// An exception of each reason, and an operation in which the device follows the table.
    fn some() -> Exceptions {
        let exceptions = Exceptions::default();
        let operations = OpPrecisions::default();
        let operations = operations
            .with("0.21", "softmax", OpPrecision::Half)
            .unwrap();
        let operations = operations.with("0.21", "conv2d", OpPrecision::F32).unwrap();
        assert_eq!(exceptions.configure(&operations).len(), 2);
        let grouped = tried("conv2d").of_kind(Kind::Grouped);
        assert_eq!(exceptions.tried(grouped, F16, || false), Some(false));
        assert_eq!(
            exceptions.tried(tried("float_sqrt"), BF16, || true),
            Some(true)
        );
        assert_eq!(exceptions.tried(tried("linear"), BF16, || true), Some(true));
        exceptions
    }

    const SOME: [&str; 4] = [
        "conv2d, any half: f32, Configured",
        "conv2d in groups, f16: f32, Tried",
        "softmax, any half: half, Configured",
        "sqrt, bf16: half, Tried",
    ];

    #[test]
    fn one_look_up_has_all_that_is_known_of_an_operation() {
        let exceptions = some();
        assert_eq!(texts(&exceptions), SOME);
        let conv = exceptions.of(&Op::named("conv2d"), || 9);
        assert_eq!(conv.configured(), Some(OpPrecision::F32));
        for calls in Kind::ALL {
            let found = (calls == Kind::Grouped).then_some(false);
            assert_eq!(conv.is_exact(calls, F16), found);
            assert_eq!(conv.is_exact(calls, BF16), None);
            assert_eq!(conv.without_trials().is_exact(calls, F16), None);
        }
        assert_eq!(conv.without_trials().configured(), Some(OpPrecision::F32));
        let softmax = exceptions.of(&Op::named("softmax"), || 9);
        assert_eq!(softmax.configured(), Some(OpPrecision::Half));
        let own = Op::custom("conv2d", Class::Fp32, Role::Forward);
        assert_eq!(exceptions.of(&own, || 9), Known::default());
    }

    #[test]
    fn an_answer_stays_and_a_configuration_is_replaced() {
        let exceptions = some();
        let linear = tried("linear");
        assert_eq!(exceptions.tried(linear, BF16, || false), Some(true));
        assert_eq!(exceptions.configure(&OpPrecisions::default()), []);
        assert_eq!(texts(&exceptions), [SOME[1], SOME[3]]);
        let names = |precision| exceptions.in_force(precision).len();
        assert_eq!(
            [Precision::F32, Precision::F16, Precision::Bf16].map(names),
            [0, 1, 1]
        );
    }

    #[test]
    fn what_is_frozen_tries_nothing_and_what_is_cleared_is_tried_again() {
        let exceptions = some();
        exceptions.freeze(true);
        let matmul = tried("float_matmul");
        assert_eq!(exceptions.tried(matmul, F16, || panic!("frozen")), None);
        assert!(exceptions.is_frozen());
        exceptions.freeze(false);
        assert_eq!(exceptions.tried(matmul, F16, || false), Some(false));
        exceptions.clear();
        assert_eq!(texts(&exceptions), [SOME[0], SOME[2]]);
        assert_eq!(exceptions.tried(matmul, F16, || true), Some(true));
    }

    #[test]
    fn a_file_spares_the_trials_of_the_same_device_alone() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        let exceptions = some();
        exceptions.named(|| "one".into()).keep_in(&path).unwrap();
        assert_eq!(exceptions.kept_in(), Some(path.clone()));
        // Each new one is written.
        exceptions.tried(tried("float_matmul"), F16, || false);

        let same = Exceptions::default();
        same.named(|| "one".into()).keep_in(&path).unwrap();
        // What is configured is the program's to say.
        assert_eq!(texts(&same), ["matmul, f16: f32, Tried", SOME[1], SOME[3]]);
        assert_eq!(
            same.of(&Op::named("linear"), || 9)
                .is_exact(Kind::Usual, BF16),
            Some(true)
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        let other = Exceptions::default();
        other.named(|| "other".into()).keep_in(&path).unwrap();
        assert_eq!(other.list(), []);
        // The file is the other's now.
        let third = Exceptions::default();
        third.named(|| "one".into()).keep_in(&path).unwrap();
        assert_eq!(third.list(), []);
    }

    #[test]
    fn calls_that_overflow_are_told_apart_by_a_length_and_the_second_stands_for_all() {
        let exceptions = some();
        let matmul = Op::named("float_matmul");
        let overflowed =
            |exceptions: &Exceptions, length| exceptions.of(&matmul, || length).overflowed();
        assert!(add(&exceptions, "float_matmul", 64, "forward"));
        assert!(!add(&exceptions, "float_matmul", 64, "forward"));
        let found = [64, 65].map(|length| overflowed(&exceptions, length));
        assert_eq!(found, [true, false]);
        assert!(texts(&exceptions).contains(&"matmul over 64, f16: f32, Overflowed".into()));
        assert!(add(&exceptions, "float_matmul", 65, "backward"));
        assert!(!add(&exceptions, "float_matmul", 66, "forward"));
        assert!(
            overflowed(&exceptions, 7)
                && texts(&exceptions).contains(&"matmul, f16: f32, Overflowed".into())
        );
        assert!(exceptions.of(&matmul, || 7).without_trials().overflowed());
        // What moves data, what is of the backward pass, and what is no row cannot be changed.
        for op in ["float_reshape", "relu_backward", "own"] {
            assert!(!add(&exceptions, op, 1, "forward"), "{op}");
        }
        assert_eq!(
            exceptions.in_force(Precision::Bf16).len(),
            exceptions.in_force(Precision::F16).len() - 1
        );

        exceptions.publish([exceptions.withdraw("float_matmul", 9)]);
        assert!(!overflowed(&exceptions, 64));
        assert_eq!(texts(&exceptions), SOME);
        add(&exceptions, "float_matmul", 64, "forward");
        exceptions.publish([exceptions.withdraw("float_matmul", 65)]);
        assert!(overflowed(&exceptions, 64));
        exceptions.clear();
        assert!(!overflowed(&exceptions, 64));
        exceptions.freeze(true);
        assert!(!add(&exceptions, "float_matmul", 64, "forward"));
    }

    #[test]
    fn what_overflowed_is_read_from_a_file_of_any_device() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        let exceptions = some();
        exceptions.named(|| "one".into()).keep_in(&path).unwrap();
        add(&exceptions, "float_matmul", 64, "forward");
        add(&exceptions, "float_mul", 1, "forward");
        add(&exceptions, "float_mul", 2, "forward");

        let all = [
            "matmul over 64, f16: f32, Overflowed",
            "mul, f16: f32, Overflowed",
        ];
        let other = Exceptions::default();
        add(&other, "float_mul", 5, "forward");
        other.named(|| "other".into()).keep_in(&path).unwrap();
        assert_eq!(texts(&other), all);

        let unread = Exceptions::default();
        add(&unread, "float_mul", 5, "forward");
        let nowhere = folder.path().join("exceptions.json").join("no folder");
        assert!(unread.keep_in(nowhere).is_err());
        assert_eq!(texts(&unread), ["mul over 5, f16: f32, Overflowed"]);
    }

    /// Calls of many shapes, as a program has with sequences of many lengths.
    #[test]
    fn a_file_of_many_verified_calls_is_read_again() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        let (linear, exceptions) = (Op::named("linear"), Exceptions::default());
        let shapes = |features: usize| [vec![64, features], vec![features, 7]];
        let ask = |of: &Exceptions, features| {
            let shapes = shapes(features);
            of.verified(&linear, F16, &shapes.each_ref().map(Vec::as_slice), true)
        };
        let begun = (1..=2 * MOST).filter_map(|features| ask(&exceptions, features).begun);
        let begun: Vec<_> = begun.collect();
        // No more are compared, so that the table and its file end.
        assert_eq!(begun.len(), MOST);
        let verdicts = begun.iter().enumerate().map(|(nth, _)| match nth {
            8 => WRONG,
            _ => Some(Verdict::Right),
        });
        exceptions.end_verifications(begun.iter().copied().zip(verdicts));
        exceptions.keep_in(&path).unwrap();
        let bytes = fs::metadata(&path).unwrap().len();
        assert!(
            (MOST as u64 * 100..LARGEST as u64 * 1024 / 2).contains(&bytes),
            "{bytes}"
        );

        let next = Exceptions::default();
        next.keep_in(&path).unwrap();
        assert_eq!(
            texts(&next),
            ["linear of [64, 9] and [9, 7], f16: f32, Verified"]
        );
        let known = |features| ask(&next, features);
        assert_eq!((known(10).begun, known(MOST).begun), (None, None));
        assert!(known(9).is_wrong);
    }

    #[test]
    fn a_file_that_cannot_be_written_changes_nothing_that_was_verified() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        let matmul = Op::named("float_matmul");
        let ask = |of: &Exceptions| of.verified(&matmul, F16, &[&[8, 40], &[40, 24]], true);
        let other = some();
        let begun = ask(&other).begun.unwrap();
        other.end_verifications([(begun, WRONG)]);
        other.keep_in(&path).unwrap();

        let exceptions = Exceptions::default();
        let begun = ask(&exceptions).begun.unwrap();
        exceptions.end_verifications([(begun, Some(Verdict::Silent))]);
        // Its name is longer than a file's may be with the one that is written beside it.
        let long = folder.path().join("x".repeat(250));
        fs::copy(&path, &long).unwrap();
        assert!(exceptions.keep_in(&long).is_err());
        assert_eq!(exceptions.list(), []);
        assert_eq!(exceptions.unverified(Precision::F16).len(), 1);
        assert!(ask(&exceptions).begun.is_some());
    }

    #[test]
    fn convolutions_are_told_apart_by_their_options() {
        let exceptions = Exceptions::default();
        let shapes: [&[usize]; 2] = [&[1, 8, 9, 9], &[8, 8, 3, 3]];
        for dilation in [12, 1, 6] {
            let options = Convolution::of([1; 2], [dilation; 2], [dilation; 2], 1);
            let mut conv = Op::named("conv2d");
            conv.convolution = Some(options);
            let begun = exceptions.verified(&conv, F16, &shapes, true).begun;
            exceptions.end_verifications([(begun.unwrap(), WRONG)]);
        }
        let of = "conv2d of [1, 8, 9, 9] and [8, 8, 3, 3]";
        let text = |options: &str| format!("{of}{options}, f16: f32, Verified");
        assert_eq!(
            texts(&exceptions),
            [
                text(", padding [1, 1]"),
                text(", padding [6, 6], dilation [6, 6]"),
                text(", padding [12, 12], dilation [12, 12]")
            ]
        );
    }

    #[test]
    fn a_driver_is_told_by_its_version_and_not_by_its_time() {
        let text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
                    GCC version:  gcc version 12.2.0\n";
        let driver = "NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023";
        assert_eq!(value(text, "NVRM version").as_deref(), Some(driver));
        assert_eq!(
            value("model name\t: A CPU @ 2 GHz", "model name").as_deref(),
            Some("A CPU @ 2 GHz")
        );
        assert_eq!(value(text, "Model"), None);
    }

    #[test]
    fn what_is_known_already_goes_before_a_file() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        some().keep_in(&path).unwrap();
        let exceptions = Exceptions::default();
        exceptions.tried(tried("conv2d").of_kind(Kind::Grouped), F16, || true);
        exceptions.keep_in(&path).unwrap();
        assert_eq!(texts(&exceptions), [SOME[3]]);
    }

    #[test]
    fn a_file_that_cannot_be_is_refused_and_nothing_changes() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("exceptions.json");
        some().keep_in(&path).unwrap();
        let written = fs::read_to_string(&path).unwrap();
        let sqrt = &written[written.find("\"sqrt\"").unwrap()..];
        let reshape = sqrt
            .replace("sqrt", "reshape")
            .replace("tried", "overflowed");
        for (from, to, says) in [
            ("\"version\": 1", "\"version\": 2", "it has version 2"),
            ("\"sqrt\"", "\"squirt\"", "an unknown operation: squirt"),
            ("\"bf16\"", "\"f32\"", "an unknown operation"),
            ("\"grouped\"", "\"herded\"", "herded"),
            ("\"tried\"", "\"guessed\"", "guessed"),
            (sqrt, &reshape, "reshape is computed in"),
            ("{", "", "cannot read the state from"),
        ] {
            let changed = written.replacen(from, to, 1);
            assert_ne!(changed, written);
            fs::write(&path, &changed).unwrap();
            let exceptions = Exceptions::default();
            let error = exceptions.keep_in(&path).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!((exceptions.list(), exceptions.kept_in()), (vec![], None));
            assert_eq!(fs::read_to_string(&path).unwrap(), changed);
        }
        let nowhere = folder.path().join("no folder").join("exceptions.json");
        let error = some().keep_in(nowhere).unwrap_err().to_string();
        assert!(error.contains("cannot write the state to"), "{error}");
    }

    #[test]
    fn of_many_threads_the_first_answer_is_that_of_all() {
        let exceptions = Exceptions::default();
        let trials = AtomicUsize::new(0);
        let answers: Vec<_> = std::thread::scope(|scope| {
            let ask = |i: usize| {
                let (exceptions, trials) = (&exceptions, &trials);
                scope.spawn(move || {
                    exceptions.tried(tried("linear"), F16, || {
                        trials.fetch_add(1, Ordering::Relaxed);
                        i.is_multiple_of(2)
                    })
                })
            };
            let threads: Vec<_> = (0..8).map(ask).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let known = exceptions
            .of(&Op::named("linear"), || 9)
            .is_exact(Kind::Usual, F16);
        assert!(known.is_some());
        assert!(answers.iter().all(|answer| *answer == known), "{answers:?}");
    }

    #[test]
    fn a_report_names_the_first_operations_and_the_field_with_all() {
        let lines = |exceptions: &Exceptions, half: Precision| {
            report_lines(half, &exceptions.in_force(half))
        };
        assert_eq!(lines(&Exceptions::default(), Precision::F16), "");
        assert_eq!(
            lines(&some(), Precision::F16),
            "operations  conv2d in f32, softmax in half: changed by AmpConfig::with_op\n\
             FP32 here   conv2d in groups: computed in FP32, then rounded to f16\n"
        );
        let overflowed = Exceptions::default();
        add(&overflowed, "float_matmul", 64, "forward");
        assert_eq!(
            lines(&overflowed, Precision::F16),
            "overflowed  matmul over 64: in FP32 now: no loss scale mends it\n"
        );
        assert_eq!(
            lines(&some(), Precision::Bf16),
            "operations  conv2d in f32, softmax in half: changed by AmpConfig::with_op\n\
             half here   sqrt: as exact in bf16 as in FP32, so without casts\n"
        );
        let many = Exceptions::default();
        let all = TriedOp::all().filter(|op| !TriedOp::is_widened(Op::named(op.name()).class));
        all.take(8).for_each(|op| {
            many.tried(op, F16, || false);
        });
        let many = lines(&many, Precision::F16);
        assert!(many.contains(" and 3 more (see `exceptions`): "), "{many}");
    }
}
