//! A scaler's state as a record of Burn 0.21. Independent of tensors and backends: every precision setting
//! saves the state unchanged.

use burn_core_0_21::record::{PrecisionSettings, Record};
use burn_core_0_21::tensor::backend::Backend;

use crate::LossScaler;

impl<B: Backend> Record<B> for LossScaler {
    type Item<S: PrecisionSettings> = Self;

    fn into_item<S: PrecisionSettings>(self) -> Self {
        self
    }

    fn from_item<S: PrecisionSettings>(item: Self, _device: &B::Device) -> Self {
        item
    }
}
