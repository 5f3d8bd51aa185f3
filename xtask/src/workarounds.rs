//! The list of what works around a fault of Burn, and of when it can go.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use walkdir::WalkDir;

/// Prints each workaround with the end that its comment names.
pub fn workarounds() -> anyhow::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src");
    for file in WalkDir::new(&folder).sort_by_file_name() {
        let file = file?;
        let path = file.path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let source = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let is_their_layer = path
            .components()
            .any(|part| part.as_os_str() == "workarounds");
        for (function, until) in ends(&source, is_their_layer)? {
            println!("{name}::{function}: until {until}");
        }
    }
    Ok(())
}

/// The functions that have an `Until:` in their comment, each with the text behind it. With `all`, each function that other
/// modules call has to have one.
fn ends(source: &str, all: bool) -> anyhow::Result<Vec<(&str, &str)>> {
    let (mut ends, mut until) = (Vec::new(), None);
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("/// Until: ") {
            until = Some(text);
            continue;
        }
        let called = line.strip_prefix("pub(crate) ");
        if let Some(rest) = called.unwrap_or(line).strip_prefix("fn ") {
            let function = rest.split(['<', '(']).next().unwrap_or(rest);
            let needs_end = all && called.is_some();
            ensure!(
                !needs_end || until.is_some(),
                "{function}: say /// Until: .."
            );
            ends.extend(until.take().map(|until| (function, until)));
        }
    }
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_needs_an_end_of_its_own() {
        let one =
            "/// x\n///\n/// Until: Burn 0.22.\n#[cfg(a)]\npub(crate) fn f<B>() {}\nfn g() {}\n";
        assert_eq!(ends(one, true).unwrap(), [("f", "Burn 0.22.")]);
        let two = format!("{one}pub(crate) fn h() {{}}");
        assert!(
            ends(&two, true)
                .unwrap_err()
                .to_string()
                .starts_with("h: say")
        );
        assert_eq!(ends(&two, false).unwrap().len(), 1);
    }
}
