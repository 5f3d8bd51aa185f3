//! A scaler's state as JSON.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use super::LossScaler;
use crate::AmpError;
use crate::file::replace_file;

impl LossScaler {
    /// Writes the state as JSON.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state cannot be written. The writer may then hold part of it.
    pub fn to_writer(&self, writer: impl Write) -> Result<(), AmpError> {
        self.written(writer)
            .map_err(|error| AmpError::unwritten("the writer", error))
    }

    fn written(&self, mut writer: impl Write) -> io::Result<()> {
        serde_json::to_writer_pretty(&mut writer, self)?;
        // Dropping a buffered writer would lose its remaining bytes without an error.
        writer.flush()
    }

    /// A state that [`to_writer`](LossScaler::to_writer) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the state is damaged, truncated or from a newer version.
    pub fn from_reader(reader: impl Read) -> Result<Self, AmpError> {
        serde_json::from_reader(reader).map_err(|error| AmpError::unread("the reader", error))
    }

    /// Saves the state to a file. The file ends up complete, or stays as it was.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), AmpError> {
        let path = path.as_ref();
        replace_file(path, |file| self.written(file))
            .map_err(|error| AmpError::unwritten(path.display(), error))
    }

    /// The state in a file that [`save`](LossScaler::save) wrote.
    ///
    /// # Errors
    ///
    /// [`AmpError::State`] when the file is missing, or its state is damaged, truncated or from a
    /// newer version.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, AmpError> {
        let path = path.as_ref();
        fs::read(path)
            .and_then(|bytes| Ok(serde_json::from_slice(&bytes)?))
            .map_err(|error| AmpError::unread(path.display(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Outcome;

    #[test]
    fn a_state_comes_back_from_bytes() {
        let mut scaler = LossScaler::default();
        scaler.update(Outcome::Overflow);
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
}
