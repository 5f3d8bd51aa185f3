//! A scaler's state as JSON.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use super::LossScaler;
use crate::AmpError;
use crate::file::{read_json, replace_file, write_json};

/// The most KiB of a state that are read. A state takes less than 1.
const LARGEST: usize = 64;

impl LossScaler {
    /// Writes the state as JSON.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state cannot be written. The writer may then hold part of it.
    pub fn to_writer(&self, writer: impl Write) -> Result<(), AmpError> {
        write_json(writer, self).map_err(|error| AmpError::unwritten("the writer", error))
    }

    /// A state that [`to_writer`](LossScaler::to_writer) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state is truncated, impossible or from a newer version, or when
    /// the reader has more than 64 KiB.
    pub fn from_reader(reader: impl Read) -> Result<Self, AmpError> {
        read_json(reader, LARGEST).map_err(|error| AmpError::unread("the reader", error))
    }

    /// Saves the state to a file. The file is either complete or unchanged, even while other threads or
    /// processes save or load it.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        replace_file(path, |part| write_json(File::create_new(part)?, self))
            .map_err(|error| AmpError::unwritten(path.display(), error))
    }

    /// The state in a file that [`save`](LossScaler::save) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing or larger than 64 KiB, or its state is truncated,
    /// impossible or from a newer version.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, AmpError> {
        let path = path.as_ref();
        File::open(path)
            .and_then(|file| read_json(file, LARGEST))
            .map_err(|error| AmpError::unread(path.display(), error))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::thread;
    use std::time::{Duration, Instant};

    use tempfile::tempdir;

    use super::*;
    use crate::StepOutcome;

    #[test]
    fn a_state_comes_back_from_bytes() {
        let mut scaler = LossScaler::default();
        scaler.update(StepOutcome::Overflow);
        let mut bytes = Vec::new();
        scaler.to_writer(&mut bytes).unwrap();
        assert_eq!(LossScaler::from_reader(&bytes[..]).unwrap(), scaler);
        let error = LossScaler::from_reader(&bytes[1..]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot read the state from the reader: ")
        );
    }

    /// Many threads save one path while others load it. To run longer, set BURN_AMP_SAVING_SECONDS=10.
    #[test]
    fn many_may_save_and_load_one_file() {
        let seconds = std::env::var("BURN_AMP_SAVING_SECONDS");
        let seconds = seconds.map_or(0.5, |seconds| seconds.parse().unwrap());
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let folder = tempdir().unwrap();
        let path = folder.path().join("state.json");
        LossScaler::default().save(&path).unwrap();
        let run = |act: &dyn Fn() -> Result<(), AmpError>| {
            let (mut done, mut failed) = (0, Vec::new());
            while Instant::now() < end {
                done += 1;
                failed.extend(act().err());
            }
            (done, failed.len(), failed.pop())
        };
        let [saves, loads] = thread::scope(|threads| {
            let save = || run(&|| LossScaler::default().save(&path));
            let load = || run(&|| LossScaler::load(&path).map(|_| ()));
            let savers = [(); 4].map(|()| threads.spawn(save));
            let loaders = [(); 2].map(|()| threads.spawn(load));
            [
                savers.into_iter().collect(),
                loaders.into_iter().collect::<Vec<_>>(),
            ]
            .map(|all| {
                all.into_iter()
                    .map(|one| one.join().unwrap())
                    .collect::<Vec<_>>()
            })
        });
        println!("saves {saves:?}, loads {loads:?}");
        for (done, failed, last) in saves.into_iter().chain(loads) {
            assert_eq!(failed, 0, "of {done}: {last:?}");
        }
        assert_eq!(
            fs::read_dir(&folder).unwrap().count(),
            1,
            "nothing else stays"
        );
    }

    /// A save does not follow links planted at the paths of temporary files.
    #[cfg(unix)]
    #[test]
    fn a_save_follows_no_link() {
        let folder = tempdir().unwrap();
        let (path, victim) = (
            folder.path().join("state.json"),
            folder.path().join("victim"),
        );
        fs::write(&victim, "untouched").unwrap();
        let names = (0..1000).map(|i| format!("state.json.{}-{i}.part", std::process::id()));
        for name in names.chain(["state.json.part".into()]) {
            std::os::unix::fs::symlink(&victim, folder.path().join(name)).unwrap();
        }
        LossScaler::default().save(&path).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        assert_eq!(LossScaler::load(&path).unwrap(), LossScaler::default());
    }

    #[test]
    fn what_is_too_large_is_refused_without_reading_it() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("state.json");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        let reason = "it exceeds 64 KiB, the limit for a state";
        let error = LossScaler::load(&path).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        let error = LossScaler::from_reader(std::io::repeat(b' ')).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
        // A state of exactly 64 KiB is read.
        let mut bytes = Vec::new();
        LossScaler::default().to_writer(&mut bytes).unwrap();
        bytes.resize(64 << 10, b' ');
        assert_eq!(
            LossScaler::from_reader(&bytes[..]),
            Ok(LossScaler::default())
        );
        bytes.push(b' ');
        let error = LossScaler::from_reader(&bytes[..]).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}
