//! The project's own chores: `cargo xtask --help`.

mod bench;
mod coverage;

use std::path::PathBuf;
use std::process::Command as Process;

use anyhow::ensure;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of burn-amp")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks that every method of Burn's backend traits is overridden and has its policy row.
    Coverage {
        /// Also prints the whole policy as a table.
        #[arg(long)]
        table: bool,
    },
    /// Measures what mixed precision costs and saves, against Burn without it in the same run.
    Bench {
        /// What to measure.
        kind: bench::Kind,
        /// Also writes the figures to a file.
        #[arg(long)]
        json: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Coverage { table } => coverage::coverage(table),
        Command::Bench { kind, json } if !cfg!(debug_assertions) => bench::bench(kind, json),
        Command::Bench { .. } => optimized(),
    }
}

/// Runs this command again, optimized.
fn optimized() -> anyhow::Result<()> {
    let status = Process::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "--package", "xtask", "--"])
        .args(std::env::args().skip(1))
        .status()?;
    ensure!(status.success(), "the optimized run failed: {status}");
    Ok(())
}
