//! The repository passes its own checks, run as `cargo xtask` runs them, and can be published.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use spdx::{Expression, LicenseReq, Licensee, ParseMode};
use toml::{Table, Value};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn xtask(args: &[&str]) {
    said(Command::new(env!("CARGO_BIN_EXE_xtask")).args(args));
}

/// The output of a command, which has to succeed.
fn said(command: &mut Command) -> String {
    let output = command.output().expect("the command starts");
    let said = [output.stdout, output.stderr];
    let [out, err] = said.map(|said| String::from_utf8_lossy(&said).into_owned());
    let status = output.status;
    assert!(status.success(), "{command:?}: {status}\n{out}{err}");
    out
}

#[test]
fn every_operation_of_burn_has_its_row() {
    xtask(&["coverage"]);
}

#[test]
fn no_module_uses_a_higher_layer() {
    xtask(&["layers"]);
}

#[test]
fn every_workaround_names_its_end() {
    xtask(&["workarounds"]);
}

#[test]
fn the_generated_pages_are_current() {
    xtask(&["docs", "--check"]);
}

/// The published packages, and the size that each stays below. The second one depends on the first,
/// which no registry has before: they are packaged together.
const PACKAGES: [(&str, u64); 2] = [("burn-amp-core", 160_000), ("burn-amp", 1_000_000)];

/// The output of `cargo package` for these packages.
fn package(names: &[&str], args: &[&str]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    // Also before a commit.
    cargo.args(["package", "--quiet", "--locked", "--allow-dirty"]);
    cargo.args(names.iter().flat_map(|name| ["-p", name]));
    said(cargo.args(args).current_dir(ROOT))
}

#[test]
fn the_packages_are_small_and_hold_sources_and_texts() {
    let names = PACKAGES.map(|(name, _)| name);
    let files = package(&names, &["--list"]);
    let known = ["rs", "md", "svg", "toml", "lock", "orig", "json"];
    for file in files.lines().filter(|file| !file.starts_with("LICENSE-")) {
        let end = Path::new(file).extension().and_then(|end| end.to_str());
        assert!(end.is_some_and(|end| known.contains(&end)), "{file}");
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = target.to_string_lossy();
    package(&names, &["--no-verify", "--target-dir", &folder]);
    for (name, limit) in PACKAGES {
        let file = format!("package/{name}-{}.crate", env!("CARGO_PKG_VERSION"));
        let size = fs::metadata(target.join(file)).expect("a package").len();
        assert!(size < limit, "{name}: {size} bytes");
    }
}

#[test]
fn both_packages_have_the_same_licenses() {
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        let [own, core] = ["", "core"].map(|folder| {
            fs::read_to_string(Path::new(ROOT).join(folder).join(name)).expect("a license")
        });
        assert_eq!(own, core, "{name}");
    }
}

#[test]
fn the_links_of_the_readme_lead_to_the_web_or_into_the_package() {
    let readme = fs::read_to_string(Path::new(ROOT).join("README.md")).expect("a README");
    let files = package(&["burn-amp"], &["--list"]);
    let links = readme.split("](").skip(1);
    for link in links.filter_map(|rest| Some(rest.split_once(')')?.0)) {
        let packaged = files.lines().any(|file| file == link);
        assert!(link.starts_with("https://") || packaged, "{link}");
    }
}

/// As `cargo deny check licenses bans` does, for this platform.
#[test]
fn dependencies_have_allowed_licenses_and_burn_is_there_once() {
    let deny = fs::read_to_string(Path::new(ROOT).join("deny.toml")).expect("deny.toml");
    let deny: Table = toml::from_str(&deny).expect("deny.toml is valid");
    let listed = |of: &str, what: &str| deny[of][what].as_array().expect("a list").clone();
    // Only compiled packages: cargo's metadata lists more.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--workspace", "--all-features", "--locked"]);
    cargo.args(["--prefix", "none", "--format", "{p};{l};"]);
    let tree = said(cargo.current_dir(ROOT));
    let columns = tree.lines().filter_map(|line| line.split_once(';'));
    let packages: BTreeSet<_> = columns
        .map(|(package, rest)| (package, rest.split(';').next().unwrap_or_default()))
        .collect();

    let allow = listed("licenses", "allow").into_iter();
    let allow = allow.map(|license| Licensee::parse(license.as_str().expect("a text")));
    let allowed: Vec<_> = allow.collect::<Result<_, _>>().expect("licenses");
    for (package, license) in &packages {
        let allows = |term: &LicenseReq| allowed.iter().any(|allowed| allowed.satisfies(term));
        let terms = Expression::parse_mode(license, ParseMode::LAX);
        let is_allowed = terms.is_ok_and(|terms| terms.evaluate(allows));
        assert!(is_allowed, "{package}: {license}");
    }
    // Versions that do not count, as `name@version`.
    let skipped = listed("bans", "skip").into_iter();
    let skipped: Vec<_> = skipped.map(|skip| skip["crate"].clone()).collect();
    for ban in listed("bans", "deny") {
        let name = ban["crate"].as_str().expect("a name");
        let twice = format!("crate = \"{name}\"\ndeny-multiple-versions = true\n");
        assert_eq!(ban, Value::Table(toml::from_str(&twice).expect("a ban")));
        let counts = |(package, _): &&(&str, &str)| {
            let mut words = package.split(' ');
            let (of, version) = (words.next(), words.next().unwrap_or_default());
            let version = format!("{name}@{}", version.trim_start_matches('v'));
            of == Some(name) && skipped.iter().all(|skip| skip.as_str() != Some(&version))
        };
        let versions = packages.iter().filter(counts).count();
        assert_eq!(versions, 1, "{versions} of {name}");
    }
}
