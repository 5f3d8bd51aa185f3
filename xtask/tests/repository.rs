//! The repository passes its own checks, run as `cargo xtask` runs them.

use std::process::Command;

fn xtask(args: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(args)
        .output()
        .expect("xtask starts");
    let (out, err) = (&output.stdout, &output.stderr);
    assert!(
        output.status.success(),
        "cargo xtask {}: {}\n{}{}",
        args.join(" "),
        output.status,
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(err)
    );
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
