//! The repository passes its own checks, run as `cargo xtask` runs them, and can be published.

use std::fs;
use std::path::Path;
use std::process::Command;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn xtask(args: &[&str]) {
    said(Command::new(env!("CARGO_BIN_EXE_xtask")).args(args));
}

/// What a command says, which has to succeed.
fn said(command: &mut Command) -> String {
    let output = command.output().expect("the command starts");
    let [out, err] =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    assert!(
        output.status.success(),
        "{command:?}: {}\n{out}{err}",
        output.status
    );
    out
}

#[test]
fn every_method_of_burns_traits_is_overridden_and_has_its_row() {
    xtask(&["coverage"]);
}

#[test]
fn no_module_uses_a_higher_layer() {
    xtask(&["layers"]);
}

#[test]
fn the_generated_pages_are_current() {
    xtask(&["docs", "--check"]);
}

/// What `cargo package` says.
fn package(args: &[&str]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    // Before a commit too.
    cargo.args(["package", "-p", "burn-amp", "--locked", "--allow-dirty"]);
    said(cargo.args(args).current_dir(ROOT))
}

#[test]
fn the_package_is_small_and_holds_sources_and_texts() {
    let files = package(&["--list"]);
    let known = ["rs", "md", "svg", "toml", "lock", "orig", "json"];
    for file in files.lines().filter(|file| !file.starts_with("LICENSE-")) {
        let end = Path::new(file).extension().and_then(|end| end.to_str());
        assert!(end.is_some_and(|end| known.contains(&end)), "{file}");
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    package(&["--no-verify", "--target-dir", &target.to_string_lossy()]);
    let file = format!("package/burn-amp-{}.crate", env!("CARGO_PKG_VERSION"));
    let size = fs::metadata(target.join(file)).expect("a package").len();
    assert!(size < 1_000_000, "{size} bytes");
}
