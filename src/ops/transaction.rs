//! Reading several tensors at once.

use burn_backend::Backend;
use burn_backend::backend::ExecutionError;
use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};

use crate::tensor::to_user_data;
use crate::{Amp, AmpTensor};

impl<B: Backend> TransactionOps<Self> for Amp<B> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats = transaction.read_floats;
        let demoted: Vec<bool> = floats.iter().map(AmpTensor::is_demoted).collect();
        let mut data = B::tr_execute(TransactionPrimitive::new(
            floats.into_iter().map(AmpTensor::into_primitive).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await?;
        data.read_floats = std::mem::take(&mut data.read_floats)
            .into_iter()
            .zip(demoted)
            .map(|(data, demoted)| to_user_data(data, demoted))
            .collect();
        Ok(data)
    }
}
