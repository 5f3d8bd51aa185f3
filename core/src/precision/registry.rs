//! Values that live as long as the process, looked up by key.

use std::sync::OnceLock;

/// Values by key, for a `static`. Values are neither moved nor removed, so a lookup walks the short list
/// without a lock.
#[derive(Debug)]
pub struct Registry<K, V>(OnceLock<Box<Entry<K, V>>>);

#[derive(Debug)]
struct Entry<K, V> {
    key: K,
    value: V,
    rest: Registry<K, V>,
}

impl<K, V> Default for Registry<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> Registry<K, V> {
    /// An empty registry.
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }
}

impl<K: PartialEq, V> Registry<K, V> {
    /// The value of a key.
    #[inline]
    pub fn get(&self, key: &K) -> Option<&V> {
        let mut list = self;
        loop {
            let entry = list.0.get()?;
            if entry.key == *key {
                return Some(&entry.value);
            }
            list = &entry.rest;
        }
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let entries = std::iter::successors(self.0.get(), |entry| entry.rest.0.get());
        entries.map(|entry| (&entry.key, &entry.value))
    }

    /// The value of a key. If the key has none, adds the result of `make`.
    #[inline]
    pub fn get_or_add(&self, key: K, make: impl FnOnce() -> V) -> &V {
        match self.get(&key) {
            Some(value) => value,
            None => self.add(key, make()),
        }
    }

    /// Adds a value at the end, unless another thread has added the key first.
    #[cold]
    fn add(&self, key: K, value: V) -> &V {
        let rest = Self::new();
        let mut new = Box::new(Entry { key, value, rest });
        let mut list = self;
        loop {
            let added = list.0.set(new);
            let entry = list.0.get().expect("set here, or before");
            match added {
                Err(other) if other.key != entry.key => {
                    new = other;
                    list = &entry.rest;
                }
                _ => return &entry.value,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::thread;

    use super::*;

    #[test]
    fn a_value_is_added_once_and_stays() {
        let registry = Registry::new();
        assert_eq!(registry.get(&1), None);
        assert_eq!(registry.get_or_add(1, || "one"), &"one");
        assert_eq!(registry.get_or_add(2, || "two"), &"two");
        assert_eq!(registry.get_or_add(1, || unreachable!()), &"one");
        assert_eq!((registry.get(&2), registry.get(&3)), (Some(&"two"), None));
    }

    #[test]
    fn threads_that_add_a_key_at_once_get_the_same_value() {
        let registry = &Registry::new();
        let added = |thread: usize| {
            let value = |key: usize| *registry.get_or_add(key, || (key, thread));
            (0..200).map(value).collect::<Vec<_>>()
        };
        let seen: BTreeSet<_> = thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|i| scope.spawn(move || added(i))).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(seen.len(), 1, "{seen:?}");
        assert!(seen.iter().flatten().map(|(key, _)| *key).eq(0..200));
    }
}
