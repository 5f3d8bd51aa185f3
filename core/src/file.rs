//! Files that are written whole or not at all.

use std::fs::File;
use std::io;
use std::path::Path;

/// Replaces the file at `path` with a new one. On failure the old file stays as it was.
///
/// # Errors
///
/// Those of `write`, and of creating, writing and renaming a file beside `path`.
pub fn replace_file(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let replaced = || {
        let file = File::create(&part)?;
        write(&file)?;
        file.sync_all()?;
        std::fs::rename(&part, path)
    };
    replaced().inspect_err(|_| {
        std::fs::remove_file(&part).ok();
    })
}
