//! `BURN_AMP_VERIFY=1` verifies on a backend that does not by itself. A process of its own: the variable is read once.

use burn::tensor::Tensor;
use burn_amp::{Amp, AmpConfig, Precision};
use shared as _; // with what it instantiates

use shared::checked::{self, Checked, CheckedDevice};

#[test]
fn the_environment_sets_the_default_and_a_configuration_decides() {
    // SAFETY: no other thread runs: this is the only test.
    unsafe { std::env::set_var("BURN_AMP_VERIFY", "1") };
    let config = checked::config().with_precision(Precision::Bf16);
    let verifies = |config: AmpConfig| {
        let device = CheckedDevice::new();
        config.apply::<Checked>(&device).unwrap();
        let ones = |shape: [usize; 2]| Tensor::<Amp<Checked>, 2>::ones(shape, &device);
        ones([8, 40]).matmul(ones([40, 24])).into_data();
        device.counts().ran("float_select") > 0
    };
    assert!(verifies(config));
    assert!(verifies(config.with_verification(true)));
    assert!(!verifies(config.with_verification(false)));
}
