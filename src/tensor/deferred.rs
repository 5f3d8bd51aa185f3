//! The end of a gradient's computation, left to the operations that read it. Independent of individual
//! operations.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, TensorMetadata};

use super::{Below, Shared, TensorFlags, at_least_f32};
use crate::policy::is_half;
use crate::precision::{in_kernel, want_half};

/// The most elements of a small gradient, 256 KiB in FP32. An H100 writes and reads so many bytes in 0.2 us; its
/// host takes 9 us for an operation (see the guide's measurements). A model's larger gradients stay half while
/// a loop holds them.
const SMALL: usize = 1 << 16;

/// A cast to FP32, if the values are half, and a division by a loss scale: the bits of the scale, which fit
/// beside a tensor's flags.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Deferred(NonZeroU32);

impl Deferred {
    /// For values in `dtype`. `None` if there is nothing to do. A scale is above 0.
    pub fn new(dtype: DType, scale: f32) -> Option<Self> {
        if !is_half(dtype) && scale == 1.0 {
            return None;
        }
        // From now on, each operation looks whether something is left to do.
        want_half();
        NonZeroU32::new(scale.to_bits()).map(Self)
    }

    pub fn scale(self) -> f32 {
        f32::from_bits(self.0.get())
    }

    /// What the operations on a tensor see. The clones of a small gradient compute this once: an optimizer
    /// that reads the gradient several times has fewer operations, which cost more than the bytes of the
    /// result.
    #[inline(never)]
    pub fn applied<B: Backend>(
        self,
        values: FloatTensor<B>,
        flags: TensorFlags,
        shared: Option<&Arc<Shared<B>>>,
    ) -> FloatTensor<B> {
        let is_small = || values.shape().num_elements() <= SMALL;
        let Some(shared) = shared.filter(|_| flags.contains(TensorFlags::GRADIENT) && is_small())
        else {
            return self.apply::<B>(values);
        };
        if let Some(applied) = shared.applied.get() {
            return (**applied).clone();
        }
        let applied = self.apply::<B>(values);
        if Arc::strong_count(shared) > 1 {
            shared.applied.set(applied.clone().into()).ok();
        }
        applied
    }

    fn apply<B: Backend>(self, values: FloatTensor<B>) -> FloatTensor<B> {
        let values = at_least_f32::<B, Below>(values);
        match self.scale() {
            1.0 => values,
            scale => {
                let factor = 1.0 / f64::from(scale);
                in_kernel(|| B::float_mul_scalar(values, factor.into()))
            }
        }
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in FP32, / {}", self.scale())
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
    use burn::module::{Module, ModuleMapper, Param};
    use burn::nn::conv::{Conv2d, Conv2dConfig};
    use burn::nn::{LayerNormConfig, Linear, LinearConfig};
    use burn::optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer};
    use burn::tensor::activation::softmax;
    use burn::tensor::module;
    use burn::tensor::{Int, Tensor, TensorData, Tolerance, f16};
    use burn_backend::FloatDType;
    use burn_backend::backend::AutodiffBackend;
    use burn_backend::ops::FloatTensorOps;
    use parking_lot::Mutex;

    use super::*;
    use crate::device::as_fused;
    use crate::tensor::AmpTensor;
    use crate::{Amp, AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};

    type I = Amp<Flex>;
    type B = AmpAutodiff<Flex>;

    const VALUES: [f64; 4] = [1.0, -3.0, 65504.0, 6e-8];

    fn tensor(dtype: DType) -> AmpTensor<Flex> {
        let data = TensorData::from(VALUES).convert_dtype(dtype);
        AmpTensor::plain(Flex::float_from_data(data, &Default::default()))
    }

    fn data(tensor: AmpTensor<Flex>) -> TensorData {
        burn_backend::read_sync(I::float_into_data(tensor)).unwrap()
    }

    /// Every operation sees the quotient in FP32, or in FP64 if the tensor is.
    #[test]
    fn operations_see_the_quotient() {
        for (dtype, wide) in [
            (DType::F16, DType::F32),
            (DType::BF16, DType::F32),
            (DType::F32, DType::F32),
            (DType::F64, DType::F64),
        ] {
            let given = data(tensor(dtype)).convert_dtype(DType::F64);
            let quotients: Vec<_> = given.iter::<f64>().map(|x| x / 1024.0).collect();
            let expected = TensorData::from(quotients.as_slice()).convert_dtype(wide);
            let later = tensor(dtype).divided_later(1024.0);
            assert!(later.deferred.is_some());
            assert_eq!((later.dtype(), later.shape()), (wide, [4].into()));
            assert_eq!(data(later.clone()), expected);
            assert_eq!(data(later.unshared()), expected);
            assert_eq!(
                data(later.clone().with_flags(TensorFlags::GRADIENT)),
                expected
            );
            assert_eq!(
                data(AmpTensor::plain(later.clone().into_dtype(wide))),
                expected
            );
            let device = Default::default();
            assert_eq!(data(I::float_to_device(later.clone(), &device)), expected);
            let sum = data(I::float_add(later.clone(), later.clone()));
            let twice = data(I::float_mul_scalar(
                AmpTensor::plain(later.clone().into_primitive()),
                2.into(),
            ));
            assert_eq!(sum, twice);
            let half = data(I::float_cast(later.clone(), FloatDType::BF16));
            assert_eq!(half, expected.convert_dtype(DType::BF16));
            let tracked = B::float_mul_scalar(B::from_inner(later.clone()), 2.into());
            assert_eq!(data(B::inner(tracked)), twice);
            // The values themselves are as they were.
            assert_eq!(later.primitive.dtype(), dtype);
        }
    }

    #[test]
    fn several_divisions_are_one() {
        let one = data(tensor(DType::F16).divided_later(512.0));
        let two = tensor(DType::F16)
            .cast_later()
            .divided_later(64.0)
            .divided_later(8.0);
        assert_eq!(data(two), one);
    }

    #[test]
    fn the_clones_of_a_small_gradient_are_finished_once() {
        for (elements, flags, once) in [
            (SMALL, TensorFlags::GRADIENT, true),
            (SMALL + 1, TensorFlags::GRADIENT, false),
            (4, TensorFlags::BACKWARD, false),
        ] {
            let data = TensorData::ones::<f16, _>([elements]);
            let half = AmpTensor::plain(Flex::float_from_data(data, &Default::default()));
            let one = half.divided_later(8.0).with_flags(flags);
            let other = one.clone();
            let quotients = TensorData::full([elements], 0.125f32);
            assert_eq!(self::data(one), quotients);
            let shared = other.shared.get().expect("shared by the clone").clone();
            assert_eq!(shared.applied.get().is_some(), once);
            assert_eq!(self::data(other), quotients);
        }
    }

    #[test]
    fn nothing_to_do_is_nothing() {
        assert!(tensor(DType::F32).cast_later().deferred.is_none());
        assert!(tensor(DType::F64).divided_later(1.0).deferred.is_none());
        assert!(tensor(DType::F16).cast_later().deferred.is_some());
    }

    #[derive(Module, Debug)]
    struct Net<B: burn::tensor::backend::Backend> {
        conv: Conv2d<B>,
        /// Used twice.
        shared: Linear<B>,
        last: Linear<B>,
    }

    /// The same values in each run: of random ones, a sum in another order may round otherwise in half.
    fn waves<const D: usize>(shape: [usize; D], frequency: f64) -> Tensor<B, D> {
        let elements = i64::try_from(shape.iter().product::<usize>()).expect("few");
        let at = Tensor::<B, 1, Int>::arange(0..elements, &Default::default());
        (at.float() * frequency).sin().reshape(shape)
    }

    /// Fills parameters, each with other values.
    struct Fill(f64);

    impl ModuleMapper<B> for Fill {
        fn map_float<const D: usize>(&mut self, of: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            self.0 += 0.37;
            let values = waves(of.val().dims(), self.0) * 0.3;
            Param::initialized(of.id, values.require_grad())
        }
    }

    /// Some gradients of the first step, and the parameters after three steps, the second with two batches.
    fn trained(mut net: Net<B>, input: &[Tensor<B, 4>; 4]) -> Vec<TensorData> {
        let mut optimizer = AdamConfig::new().init();
        let mut out = Vec::new();
        let backward = |net: &Net<B>, input: &Tensor<B, 4>| {
            let x = net.conv.forward(input.clone()).reshape([12, 9]);
            let x = net.shared.forward(net.shared.forward(x).tanh());
            // Small enough for the first loss scale.
            let loss = net.last.forward(x).powi_scalar(2).mean() * 1e-2;
            GradientsParams::from_grads(loss.backward(), net)
        };
        for (step, batch) in input[..3].iter().enumerate() {
            let mut grads = backward(&net, batch);
            if step == 0 {
                let weights = [net.shared.weight.id, net.last.weight.id];
                let weights = weights.map(|id| grads.get::<I, 2>(id).expect("a gradient"));
                out.extend(weights.map(Tensor::into_data));
                let kernel = grads.get::<I, 4>(net.conv.weight.id);
                out.push(kernel.expect("a gradient").into_data());
            }
            if step == 1 {
                let mut sum = GradientsAccumulator::new();
                sum.accumulate(&net, grads);
                sum.accumulate(&net, backward(&net, &input[3]));
                grads = sum.grads();
            }
            net = optimizer.step(1e-2, net, grads);
        }
        let Net { conv, shared, last } = net;
        out.push(conv.weight.val().into_data());
        out.extend([shared.weight, last.weight].map(|weight| weight.val().into_data()));
        let biases = [conv.bias, shared.bias, last.bias];
        out.extend(biases.map(|bias| bias.expect("a bias").val().into_data()));
        out
    }

    /// Held by tests with a backward pass. A pass of another thread between two uses of a parameter gives the second
    /// use a copy of its own: the two gradients then add up in FP32 and no longer in bf16.
    static PASSES: Mutex<()> = Mutex::new(());

    #[test]
    fn training_with_fusion_gives_the_same_weights() {
        let _alone = PASSES.lock();
        let device = Default::default();
        let input = [2.1, 2.3, 2.7, 2.9].map(|frequency| waves([3, 2, 5, 5], frequency));
        let net = Net {
            conv: Conv2dConfig::new([2, 4], [3, 3]).init(&device),
            shared: LinearConfig::new(9, 9).init(&device),
            last: LinearConfig::new(9, 1).init(&device),
        };
        let net = net.map(&mut Fill(1.0));
        for precision in [Precision::F16, Precision::Bf16] {
            let train = || with_precision(precision, || trained(net.clone(), &input));
            let (eager, later) = (train(), as_fused(train));
            assert_eq!(later.len(), 9);
            for (eager, later) in eager.iter().zip(&later) {
                assert_eq!(later.dtype, DType::F32);
                // Sums of rows may add up in another order.
                later.assert_approx_eq::<f32>(eager, Tolerance::rel_abs(1e-5, 1e-7));
            }
        }
    }

    /// A layer norm whose gamma is its beta as well, between permutations and linear layers of one weight.
    #[test]
    fn with_fusion_tied_parameters_behind_permutations_get_the_same_gradients() {
        fn gradients<A: AutodiffBackend<InnerBackend = I>>() -> [TensorData; 3] {
            let device = Default::default();
            let wave = |frequency: f32, shape: &[usize]| {
                let values =
                    (0..shape.iter().product()).map(|at: usize| (frequency * at as f32).sin());
                TensorData::new(values.collect::<Vec<_>>(), shape)
            };
            let vector = |frequency| Tensor::<A, 1>::from_data(wave(frequency, &[4]), &device);
            let mut linear = LinearConfig::new(4, 4).init::<A>(&device);
            linear.weight = Param::from_data(wave(0.7, &[4, 4]), &device);
            linear.bias = Some(Param::from_tensor(vector(0.9)));
            let mut norm = LayerNormConfig::new(4).init::<A>(&device);
            norm.gamma = Param::from_tensor(vector(1.1) + 1.5);
            norm.beta = Some(norm.gamma.clone());
            let x = Tensor::<A, 3>::from_data(wave(0.3, &[2, 4, 4]), &device);
            let x = linear.forward(linear.forward(x).swap_dims(1, 2));
            let x = linear.forward(norm.forward(x.swap_dims(0, 1)).swap_dims(0, 1));
            let loss = (x.permute([2, 0, 1]) * 0.1).powi_scalar(2).mean();
            let grads = loss.backward();
            let vectors = [linear.bias.as_ref().expect("a bias"), &norm.gamma];
            let [bias, gamma] =
                vectors.map(|v| v.val().grad(&grads).expect("a gradient").into_data());
            let weight = linear.weight.val().grad(&grads).expect("a gradient");
            [weight.into_data(), bias, gamma]
        }
        let _alone = PASSES.lock();
        let scaler = GradScaler::new(LossScaleConfig::Fixed(1024.0)).expect("a scale");
        type Checkpointing = AmpAutodiff<Flex, BalancedCheckpointing>;
        for run in [gradients::<B>, gradients::<Checkpointing>] {
            let exact = with_precision(Precision::F32, run);
            for (precision, rounding) in [(Precision::F16, 2e-3), (Precision::Bf16, 1.6e-2)] {
                let half = || with_precision(precision, || scaler.scope(run));
                let (eager, later) = (half(), as_fused(half));
                for (exact, half) in exact.iter().zip(eager.iter().zip(&later)) {
                    let largest = exact
                        .iter::<f32>()
                        .fold(0.0, |max, x: f32| x.abs().max(max));
                    // Sums of rows may add up in another order, and so round otherwise in half.
                    half.1
                        .assert_approx_eq::<f32>(half.0, Tolerance::absolute(rounding * largest));
                    half.1.assert_approx_eq::<f32>(
                        exact,
                        Tolerance::absolute(8.0 * rounding * largest),
                    );
                }
            }
        }
    }

    /// The sum of rows that a bias's gradient is, is divided as it is computed, if the division is exact.
    #[test]
    fn with_fusion_a_row_sum_is_divided_where_it_is_computed() {
        let _alone = PASSES.lock();
        let device = Default::default();
        let [twice, other] = [(); 2].map(|()| LinearConfig::new(3, 3).init::<B>(&device));
        let norm = LayerNormConfig::new(3).init::<B>(&device);
        let x = waves([2, 4, 3], 0.7);
        let gradients = || {
            // The other bias is used as a product alone, so that its gradient is divided later.
            let [bias, of_product] = [&twice, &other].map(|layer| layer.bias.as_ref().unwrap());
            let (weight, factor) = (other.weight.val(), of_product.val() * 3.0);
            let out = twice.forward(twice.forward(x.clone()));
            let out = norm.forward(module::linear(out, weight.clone(), Some(factor)));
            let out = module::linear(out, weight, None);
            let loss = (out * 0.1).powi_scalar(2).mean() * 0.125;
            let grads = loss.backward();
            let of = |param: &Param<Tensor<B, 1>>| {
                let leaf = param.val().into_primitive().tensor();
                B::grad(&leaf, &grads).expect("a gradient")
            };
            let beta = norm.beta.as_ref().expect("a shift");
            [bias, &norm.gamma, beta, of_product].map(of)
        };
        let next_to = f32::from_bits(65536f32.to_bits() + 1);
        for (scale, is_exact) in [
            (1024.0, true),
            (1000.0, false),
            (next_to, false),
            (0.5, false),
            (1.0, true),
        ] {
            let scaler = GradScaler::new(LossScaleConfig::Fixed(scale)).expect("a scale");
            let run = || with_precision(Precision::F16, || scaler.scope(gradients));
            let (eager, later) = (run(), as_fused(run));
            for (i, (eager, later)) in eager.into_iter().zip(later).enumerate() {
                let is_left = later.deferred.is_some();
                let leaves = scale > 1.0 && !(is_exact && i < 3);
                assert_eq!(is_left, leaves, "{i} at {scale}");
                let [eager, later] = [eager, later].map(data);
                later.assert_approx_eq::<f32>(&eager, Tolerance::rel_abs(2e-3, 1e-6));
            }
        }
    }

    /// A formula that sums in FP32 keeps its values beside the half gradient.
    #[test]
    fn the_fp32_values_of_a_half_gradient_are_not_dropped() {
        let _alone = PASSES.lock();
        let device = Default::default();
        let parameter = Tensor::<B, 2>::from_data([[0.1, 0.7, -0.3], [1.1, 0.2, 0.5]], &device);
        let parameter = parameter.require_grad();
        let factor = Tensor::<B, 2>::from_data([[0.3, 0.1, 0.9]], &device);
        let gradient = || {
            let half = parameter.clone().cast(FloatDType::F16);
            let loss = (softmax(half, 1) * factor.clone()).mean();
            parameter
                .grad(&loss.backward())
                .expect("a gradient")
                .into_data()
        };
        let run = || with_precision(Precision::F16, gradient);
        let (eager, later) = (run(), as_fused(run));
        assert_eq!(later, eager);
        let scaled = eager.iter::<f32>().map(|x| x * 65536.0);
        assert!(scaled.into_iter().any(|x| f16::from_f32(x).to_f32() != x));
    }

    #[test]
    fn with_fusion_a_gradient_is_half_until_it_is_read() {
        let _alone = PASSES.lock();
        let deferred = |precision| {
            with_precision(precision, || {
                let device = Default::default();
                let linear = LinearConfig::new(3, 2).init::<B>(&device);
                let out = linear.forward(Tensor::<B, 2>::ones([4, 3], &device));
                let mut grads = out.mean().backward();
                let weight = linear.weight.val().into_primitive().tensor();
                let grad = B::grad(&weight, &grads).unwrap();
                let removed = B::grad_remove(&weight, &mut grads).unwrap();
                assert_eq!(data(grad.clone()), data(removed.clone()));
                assert_eq!(data(removed.clone()), TensorData::from([[0.5f32; 2]; 3]));
                assert_eq!([grad.dtype(), removed.dtype()], [DType::F32; 2]);
                (removed.deferred.is_some(), removed.primitive.dtype())
            })
        };
        for (precision, half) in [(Precision::F16, DType::F16), (Precision::Bf16, DType::BF16)] {
            assert_eq!(deferred(precision), (false, DType::F32));
            assert_eq!(as_fused(|| deferred(precision)), (true, half));
        }
        assert_eq!(as_fused(|| deferred(Precision::F32)), (false, DType::F32));
    }
}
