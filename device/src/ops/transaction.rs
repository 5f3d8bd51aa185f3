//! Reading several tensors at once.

use burn_backend::ops::{TransactionOps, TransactionPrimitive, TransactionPrimitiveData};
use burn_backend::{Backend, ExecutionError};

use crate::device::{Session, enter};
use crate::tensor::to_client;
use crate::{Amp, AmpTensor};

impl<B: Backend, P: Session> TransactionOps<Self> for Amp<B, P> {
    async fn tr_execute(
        transaction: TransactionPrimitive<Self>,
    ) -> Result<TransactionPrimitiveData, ExecutionError> {
        let floats: Vec<_> = {
            let _session = enter::<P>();
            let computed = |tensor: AmpTensor<B>| tensor.computed_in_fp32("tr_execute");
            transaction.read_floats.into_iter().map(computed).collect()
        };
        let declared: Vec<_> = floats.iter().map(AmpTensor::declared).collect();
        let mut data = B::tr_execute(TransactionPrimitive::new(
            floats.into_iter().map(AmpTensor::into_primitive).collect(),
            transaction.read_qfloats,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await?;
        let floats = data.read_floats.into_iter().zip(declared);
        data.read_floats = floats
            .map(|(data, declared)| to_client(data, declared))
            .collect();
        Ok(data)
    }
}
