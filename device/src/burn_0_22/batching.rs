//! Sets how many operations Burn's client sends to a device at once. Burn's default is 4: on a device of the
//! same process, sending then costs more than the operations themselves.

use std::sync::Once;

/// Eight times Burn's default.
const OPERATIONS: usize = 32;

/// Makes Burn's clients send more operations at once, unless the user's configuration sets the number, or the
/// program has already set or read the configuration.
pub(crate) fn enlarge() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        #[cfg(any(
            target_os = "windows",
            target_os = "linux",
            target_os = "macos",
            target_os = "android"
        ))]
        file::enlarge(OPERATIONS);
    });
}

/// For platforms on which Burn reads its configuration from a file.
#[cfg(any(
    target_os = "windows",
    target_os = "linux",
    target_os = "macos",
    target_os = "android"
))]
mod file {
    use burn_std::config::{BurnConfig, RuntimeConfig};
    use burn_std::sync::{Arc, Mutex};
    use serde::{Deserialize, Serialize};
    use serde_json::Value;

    /// The user's file, without Burn's defaults for the rest.
    #[derive(Default, Clone, Serialize, Deserialize)]
    #[serde(transparent)]
    struct Written(Value);

    impl RuntimeConfig for Written {
        fn storage() -> &'static Mutex<Option<Arc<Self>>> {
            static UNUSED: Mutex<Option<Arc<Written>>> = Mutex::new(None);
            &UNUSED
        }

        fn file_names() -> &'static [&'static str] {
            BurnConfig::file_names()
        }
    }

    pub(crate) fn enlarge(operations: usize) {
        let Written(written) = Written::from_current_dir();
        if written.pointer("/remote/flush_threshold").is_some() {
            return;
        }
        // The configuration that Burn itself would load.
        let config = BurnConfig::from_current_dir().override_from_env();
        if let Some(config) = with_threshold(&config, operations) {
            BurnConfig::try_set(config);
        }
    }

    /// The same configuration with another threshold. Burn's type has no way to change it.
    fn with_threshold(config: &BurnConfig, operations: usize) -> Option<BurnConfig> {
        let mut config = serde_json::to_value(config).ok()?;
        *config.pointer_mut("/remote/flush_threshold")? = operations.into();
        serde_json::from_value(config).ok()
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_threshold_is_all_that_changes() {
            let config = BurnConfig::default();
            let changed = with_threshold(&config, 32).unwrap();
            assert_eq!(changed.remote().flush_threshold, 32);
            let back = with_threshold(&changed, config.remote().flush_threshold).unwrap();
            let value = |config: &BurnConfig| serde_json::to_value(config).unwrap();
            assert_eq!(value(&back), value(&config));
        }
    }
}
