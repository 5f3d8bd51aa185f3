//! The project's own chores: `cargo xtask --help`.

mod bench;
mod coverage;
mod docs;
mod gpu;
mod layers;
mod libtorch;
mod measurements;
mod plot;
mod test;
mod workarounds;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Chores of burn-amp")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks that every operation of Burn's on floats has its policy row.
    Coverage {
        /// Also prints the whole policy as a table.
        #[arg(long)]
        table: bool,
    },
    /// Writes the op reference, the table of the layers, and the figures of the README and the guide.
    Docs {
        /// Only fails if a page is stale.
        #[arg(long)]
        check: bool,
    },
    /// Checks that no module of the three packages uses one of a higher layer.
    Layers,
    /// Lists what works around a fault of Burn, each with the end that its comment names.
    Workarounds,
    /// Measures what mixed precision costs and saves, against Burn without it in the same run.
    Bench(bench::Options),
    /// Runs the behaviour suite on one of Burn's backends.
    Test(test::Options),
    /// Measures on a computer with a GPU, but without Rust or a network, within a time limit.
    #[command(subcommand)]
    Gpu(gpu::Gpu),
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Coverage { table } => coverage::coverage(table),
        Command::Docs { check } => docs::docs(check),
        Command::Layers => layers::layers(),
        Command::Workarounds => workarounds::workarounds(),
        Command::Bench(options) => bench::bench(&options),
        Command::Test(options) => test::test(&options),
        Command::Gpu(gpu) => gpu::gpu(&gpu),
    }
}
