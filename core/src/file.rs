//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces the file at `path` with the one that `write` creates at the path it is given, which has
/// the same file name. Several threads and processes may do so at once. On failure the old file
/// stays as it was, and the new one is removed.
///
/// # Errors
///
/// Those of `write`, and of creating a folder beside `path` and renaming a file.
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
    // Empty, unless the replacement failed.
    fs::remove_dir_all(&folder).ok();
    replaced
}

/// A folder that did not exist, so that nobody else writes in it, and no link leads out of it.
fn new_folder_beside(path: &Path) -> io::Result<PathBuf> {
    /// The process's, as its id is in the name.
    static FOLDERS: AtomicU64 = AtomicU64::new(0);
    loop {
        let (process, number) = (std::process::id(), FOLDERS.fetch_add(1, Ordering::Relaxed));
        let mut folder = path.as_os_str().to_owned();
        folder.push(format!(".{process}-{number}.part"));
        match fs::create_dir(&folder) {
            // A killed process of the same id left it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            created => return created.map(|()| folder.into()),
        }
    }
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
