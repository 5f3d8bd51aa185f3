//! Reading several tensors at once.

use burn_backend::Backend;
use burn_backend::backend::ExecutionError;
use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};

use super::leaving::Leaving;
use crate::tensor::Side;
use crate::{Amp, AmpTensor};

impl<B: Backend, S: Side<B>> TransactionOps<Self> for Amp<B, S> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats = transaction.read_floats;
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
