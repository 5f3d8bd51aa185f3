//! Files that are written whole or not at all, and their JSON.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Replaces the file at `path`. `write` gets a temporary path with the same file name, and creates the new
/// file there. Several threads and processes may replace one file at once. On failure the old file is
/// unchanged, and the new file is removed.
///
/// # Errors
///
/// The errors of `write`, of creating a folder beside `path` and of renaming a file.
pub fn replace_file<E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let folder = new_folder_beside(path)?;
    let part = folder.join(path.file_name().unwrap_or_default());
    let replace = || {
        write(&part)?;
        File::options().write(true).open(&part)?.sync_all()?;
        Ok(fs::rename(&part, path)?)
    };
    let replaced = replace();
    // The folder is empty unless the replacement failed.
    fs::remove_dir_all(&folder).ok();
    replaced
}

/// Creates a folder that did not exist: no other program writes in it, and no link leads out of it.
fn new_folder_beside(path: &Path) -> io::Result<PathBuf> {
    /// One counter for the process: the folder's name contains the process id.
    static FOLDERS: AtomicU64 = AtomicU64::new(0);
    loop {
        let (process, number) = (std::process::id(), FOLDERS.fetch_add(1, Ordering::Relaxed));
        let mut folder = path.as_os_str().to_owned();
        folder.push(format!(".{process}-{number}.part"));
        match fs::create_dir(&folder) {
            // A killed process with the same id left this folder.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => return created.map(|()| folder.into()),
        }
    }
}

/// Writes a value as JSON.
pub(crate) fn write_json(mut writer: impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut writer, value)?;
    // Dropping a buffered writer would lose its remaining bytes without an error.
    writer.flush()
}

/// Reads a value that [`write_json`] wrote, of at most so many KiB.
pub(crate) fn read_json<T: DeserializeOwned>(reader: impl Read, kib: usize) -> io::Result<T> {
    let mut bytes = Vec::new();
    let largest = kib * 1024;
    reader.take(largest as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > largest {
        let reason = format!("it exceeds {kib} KiB, the limit for a state");
        return Err(io::Error::other(reason));
    }
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    #[test]
    fn a_replacement_that_fails_leaves_the_old_file_alone() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file.tar.gz");
        replace_file(&path, |part| fs::write(part, "old")).unwrap();
        let error = replace_file(&path, |part| {
            assert_eq!(part.file_name(), path.file_name());
            fs::write(part, "half of the n")?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        replace_file(&path, |part| fs::write(part, "new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }
}
