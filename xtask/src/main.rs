//! The project's own chores: `cargo xtask --help`.

mod bench;
mod coverage;

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
    Bench(bench::Options),
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Coverage { table } => coverage::coverage(table),
        Command::Bench(options) => bench::bench(&options),
    }
}
