//! The file in which a device's exceptions are kept, and the machine that it belongs to.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use serde::{Deserialize, Serialize};

use super::{ALL, Exception, Exceptions, HALVES, Reason, index};
use crate::AmpError;
use crate::file::{read_json, replace_file, write_json};
use crate::policy::{Known, OPS, OpPrecision, Tried, bits, short};
use crate::verified::{Calls, MOST, State};

/// The version of the file.
const VERSION: u32 = 1;
/// The most KiB of it that are read. A call that was verified takes less than 1, and there are at most 4,096.
const LARGEST: usize = 16 * 1024;

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

/// What a file has.
#[derive(Default)]
struct Found {
    /// Each with the place of its operation.
    tried: Vec<(usize, Tried)>,
    verified: Vec<(Calls, State)>,
    /// Each with the place of its operation.
    overflowed: Vec<(usize, Option<usize>)>,
}

impl Exceptions {
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
    pub(super) fn keep(&self) {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;
    use crate::Precision;
    use crate::dtype::tests::DType::{BF16, F16};
    use crate::exceptions::tests::{SOME, add, some, texts, tried};
    use crate::policy::Op;
    use crate::policy::trials::Kind;
    use crate::reference::Verdict;
    use crate::verified::tests::WRONG;

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
}
