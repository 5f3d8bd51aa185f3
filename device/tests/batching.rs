//! The number of operations that are sent at once, together with the user's own configuration of Burn. Burn
//! reads its configuration once per process, so each case has its own process.
#![cfg(all(feature = "flex", target_os = "linux"))]

include!("../src/burn.rs");

mod client;

use std::path::Path;
use std::{env, fs};

use burn_amp_device::{Precision, flex};
use burn_std::config::{BurnConfig, RuntimeConfig};
use client::process::own_test;

/// Makes the program set a configuration itself.
const SETS: &str = "BURN_AMP_TEST_SETS";

#[test]
#[ignore = "a program's process, which the other test starts"]
fn program_process() {
    if env::var(SETS).is_ok() {
        BurnConfig::set(BurnConfig::default());
    }
    flex(Precision::F32).unwrap().sync().unwrap();
    let config = burn::runtime_config();
    let remote = config.remote();
    println!(
        "found {} {}",
        remote.flush_threshold, remote.flush_bytes_threshold
    );
}

/// The thresholds of a program in this folder: of operations and of bytes.
fn found(folder: &Path, sets: bool) -> (usize, usize) {
    let mut program = own_test("program_process");
    program.current_dir(folder);
    if sets {
        program.env(SETS, "1");
    }
    let output = program.output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let line = output.lines().find_map(|line| line.split_once("found "));
    let (_, numbers) = line.unwrap_or_else(|| panic!("{output}"));
    let mut numbers = numbers.split(' ').map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[test]
fn more_operations_are_sent_at_once_unless_the_user_says_how_many() {
    let folder = env::temp_dir().join(format!("burn-amp-{}-batching", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let (_, bytes) = found(&folder, true);
    let written = |toml: &str, sets| {
        fs::write(folder.join("burn.toml"), toml).unwrap();
        found(&folder, sets)
    };
    assert_eq!(written("", false), (32, bytes));
    // The rest of the user's configuration stays.
    assert_eq!(
        written("[remote]\nflush_bytes_threshold = 5\n", false),
        (32, 5)
    );
    // The user's number stays, even Burn's default.
    for own in [4, 7] {
        let toml = format!("[remote]\nflush_threshold = {own}\n");
        assert_eq!(written(&toml, false), (own, bytes));
    }
    // A program that sets its configuration keeps it.
    assert_eq!(written("", true), (4, bytes));
    fs::remove_dir_all(folder).unwrap();
}
