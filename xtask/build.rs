//! The versions that figures are noted with, and this kind of machine: one that only measures has
//! neither Rust nor Burn's sources.

use std::{env, fs};

use toml::{Table, Value};

const LOCK: &str = "../Cargo.lock";

fn main() {
    println!("cargo:rerun-if-changed={LOCK}");
    let rustc = rustc_version::version().expect("a compiler that names its version");
    println!("cargo:rustc-env=RUSTC_VERSION={rustc}");
    let host = env::var("HOST").expect("Cargo names it");
    println!("cargo:rustc-env=HOST={host}");
    let lock = fs::read_to_string(LOCK).expect("the lock file");
    let lock: Table = lock.parse().expect("a lock file of Cargo's");
    let packages = lock["package"].as_array().expect("packages");
    let of = |package: &Value| {
        (package["name"].as_str() == Some("burn")).then(|| package["version"].clone())
    };
    let versions: Vec<_> = packages.iter().filter_map(of).collect();
    let [Value::String(burn)] = &versions[..] else {
        panic!("one version of Burn, not {versions:?}");
    };
    println!("cargo:rustc-env=BURN_VERSION={burn}");
}
