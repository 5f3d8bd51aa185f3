//! Reading several tensors at once.

use burn_backend::Backend;
use burn_backend::backend::ExecutionError;
use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};

use super::leaving::Leaving;
use crate::call::ends_pass;
use crate::tensor::Side;
use crate::{Amp, AmpTensor};

impl<B: Backend, S: Side<B>> TransactionOps<Self> for Amp<B, S> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats = transaction.read_floats.into_iter();
        let floats: Vec<_> = floats.map(AmpTensor::computed_in_fp32).collect();
        let (ints, bools) = (
            transaction.read_ints.first(),
            transaction.read_bools.first(),
        );
        let device = floats.first().map(AmpTensor::device);
        let device = device
            .or_else(|| ints.map(B::int_device))
            .or_else(|| bools.map(B::bool_device));
        if let Some(device) = device {
            ends_pass::<B, S>(|| device);
        }
        let leaving: Vec<_> = floats.iter().map(Leaving::of).collect();
        let mut data = B::tr_execute(TransactionPrimitive::new(
            floats.into_iter().map(AmpTensor::into_primitive).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await?;
        data.read_floats = std::mem::take(&mut data.read_floats)
            .into_iter()
            .zip(leaving)
            .map(|(data, leaving)| leaving.read(data))
            .collect();
        Ok(data)
    }
}
