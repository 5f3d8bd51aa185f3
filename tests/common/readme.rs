//! Whether the Rust blocks of a README stand in tests. Independent of the release of Burn.

/// The README breaks its lines as rustfmt breaks them in the tests, except for the indentation.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Asserts that a README has `count` blocks with this fence, and that each block stands in one of the
/// tests. A block may begin with `imports`.
#[track_caller]
pub fn assert_blocks_stand_in(
    tests: &[&str],
    readme: &str,
    fence: &str,
    imports: &str,
    count: usize,
) {
    let tests: Vec<String> = tests.iter().map(|test| words(test)).collect();
    let fence = format!("```{fence}\n");
    let blocks = readme.split(&fence).skip(1);
    let blocks: Vec<&str> = blocks.filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), count);
    for block in blocks {
        let code = words(block.strip_prefix(imports).unwrap_or(block));
        let is_tested = tests.iter().any(|test| test.contains(&code));
        assert!(is_tested, "no test has this block of the README:\n{block}");
    }
}
