//! What LibTorch has and `burn-tch` does not use, or uses wrongly.

use std::any::type_name;

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Shape, TensorMetadata};

/// `burn-tch` is a dependency only with this feature.
#[cfg(feature = "tch")]
pub(crate) mod kernels;

/// Whether `B` computes on LibTorch's tensors.
fn computes<B: Backend>() -> bool {
    is_of_libtorch::<FloatTensor<B>>()
}

fn is_of_libtorch<T>() -> bool {
    type_name::<T>() == "burn_tch::tensor::TchTensor"
}

/// A view with its dimensions in another order, by `permute`. `reorder` gets 0, 1, 2 ..
///
/// `burn-tch` 0.21 counts the result of `swap_dims` and `permute` as the only tensor in its memory (burn#5375). The
/// next operation may then write into this memory, and change a tensor that the tape keeps.
///
/// Until: Burn 0.22.
pub(crate) fn permuted<B: Backend>(
    tensor: FloatTensor<B>,
    reorder: impl FnOnce(&mut [usize]),
    permute: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if !computes::<B>() {
        return permute(tensor);
    }
    let mut axes: Vec<_> = (0..tensor.rank()).collect();
    reorder(&mut axes);
    #[cfg(feature = "tch")]
    if let Some(view) = kernels::permuted::<B>(&tensor, &axes) {
        return view;
    }
    windows::<B>(tensor, &axes)
}

/// Whether the program may change a mask or indices in place that it has handed over, as [`permuted`] says of float tensors.
///
/// Until: Burn 0.22.
pub(crate) fn changes_in_place<B: Backend>() -> bool {
    // Autodiff has the masks of the backend below.
    is_of_libtorch::<BoolTensor<B>>()
}

/// A mask that is kept, where [`changes_in_place`].
///
/// Until: Burn 0.22.
pub(crate) fn kept<B: Backend>(mask: &BoolTensor<B>) -> BoolTensor<B> {
    match changes_in_place::<B>() {
        true => B::bool_cat(vec![mask.clone()], 0),
        false => mask.clone(),
    }
}

/// The view without `burn-tch`. Windows are counted correctly, and a window of a whole dimension moves this dimension
/// to the end.
fn windows<B: Backend>(tensor: FloatTensor<B>, axes: &[usize]) -> FloatTensor<B> {
    let shape = tensor.shape();
    let windows = axes.iter().fold(tensor, |tensor, &axis| {
        B::float_unfold(tensor, axis, shape[axis], 1)
    });
    let permuted: Vec<_> = axes.iter().map(|&axis| shape[axis]).collect();
    B::float_reshape(windows, Shape::from(permuted))
}

#[cfg(all(test, feature = "tch"))]
mod tests {
    use burn::backend::Flex;
    use burn_backend::ops::FloatTensorOps;
    use burn_backend::{FloatDType, TensorData};
    use burn_tch::LibTorch;

    use super::*;

    #[test]
    fn a_permuted_view_is_counted() {
        assert!(computes::<LibTorch>() && !computes::<Flex>());
        let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
        for (shape, axes) in [
            (vec![2, 3, 4], vec![1, 0, 2]),
            (vec![2, 3, 4], vec![2, 0, 1]),
            (vec![1, 4, 6], vec![0, 1, 2]),
            (vec![4, 6], vec![1, 0]),
            (vec![24], vec![0]),
        ] {
            let data = TensorData::new(values.clone(), shape);
            let tensor = LibTorch::<f32>::float_from_data(data, &Default::default());
            let read = |x| burn_backend::read_sync(LibTorch::<f32>::float_into_data(x)).unwrap();
            let expected = read(LibTorch::<f32>::float_permute(tensor.clone(), &axes));
            let reorder = |order: &mut [usize]| order.copy_from_slice(&axes);
            let views = [
                permuted::<LibTorch>(tensor.clone(), reorder, |_| unreachable!()),
                windows::<LibTorch>(tensor.clone(), &axes),
            ];
            for view in views {
                assert!(!view.can_mut());
                let scaled = LibTorch::<f32>::float_mul_scalar(view.clone(), 2.0.into());
                drop(scaled);
                assert_eq!(read(view), expected);
            }
            assert_eq!(read(tensor).to_vec::<f32>().unwrap(), values);
        }
        let empty =
            LibTorch::<f32>::float_zeros([0, 3].into(), &Default::default(), FloatDType::F32);
        let swapped = permuted::<LibTorch>(empty, |axes| axes.swap(0, 1), |_| unreachable!());
        assert_eq!(swapped.shape(), [3, 0].into());
    }
}
