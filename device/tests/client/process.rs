//! An ignored test of the same program, in its own process.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// Starts an ignored test of this program.
pub fn own_test(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

/// A process that prints its progress. The process ends when this value is dropped.
pub struct Process {
    pub child: Child,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Waits for `times` lines that end with `end`.
    pub fn wait_for(&mut self, end: &str, times: usize) {
        let lines = (&mut self.output).lines().map(Result::unwrap);
        let found = lines.filter(|line| line.ends_with(end)).take(times);
        assert_eq!(found.count(), times);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
