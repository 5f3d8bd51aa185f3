//! Numbers and lists in texts.

/// A count with its noun; `None` for zero.
pub fn counted(count: u64, one: &str, many: &str) -> Option<String> {
    match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        _ => Some(format!("{} {many}", grouped(count))),
    }
}

/// A number with its digits in groups of three.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().collect();
    String::from_utf8_lossy(&groups.join(&b',')).into_owned()
}

/// How many items a line of a report lists. The report's field has all of them.
const SHOWN: usize = 5;

/// A line of a report that lists items, with its newline. Empty without items.
pub fn line(label: &str, items: &[String], field: &str, why: &str) -> String {
    let first = items[..items.len().min(SHOWN)].join(", ");
    match items.len() {
        0 => String::new(),
        1..=SHOWN => format!("{label:<12}{first}: {why}\n"),
        all => {
            let more = all - SHOWN;
            format!("{label:<12}{first} and {more} more (see `{field}`): {why}\n")
        }
    }
}

/// A number of bytes, in powers of 1,024.
pub(crate) fn bytes(number: u64) -> String {
    let mut size = number as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter().peekable();
    while size >= 1024.0 && units.len() > 1 {
        size /= 1024.0;
        units.next();
    }
    let unit = units.next().unwrap_or("B");
    let decimals = usize::from(unit != "B");
    format!("{size:.decimals$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        let sizes = [0, 1023, 1536, 3 << 20, 5 << 40, 9 << 50].map(bytes);
        let expected = [
            "0 B",
            "1023 B",
            "1.5 KiB",
            "3.0 MiB",
            "5.0 TiB",
            "9216.0 TiB",
        ];
        assert_eq!(sizes, expected);
    }
}
