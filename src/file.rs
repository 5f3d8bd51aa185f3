//! Files that are written whole or not at all.

use std::fs::File;
use std::io;
use std::path::Path;

/// Puts a new file in the place of what is at `path`, which stays as it was if that fails.
pub(crate) fn replace_file(
    path: &Path,
    write: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
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
