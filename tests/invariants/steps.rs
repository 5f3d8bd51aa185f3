//! Training steps of many kinds of model: each gives a loss, its gradients and the counts of its
//! device.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig};
use burn::nn::conv::{
    Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig,
    ConvTranspose3dConfig,
};
use burn::nn::gru::GruConfig;
use burn::nn::loss::{
    BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, HuberLossConfig, MseLoss, Reduction,
};
use burn::nn::pool::{AdaptiveAvgPool2dConfig, AvgPool2dConfig, MaxPool2dConfig};
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{
    BatchNormConfig, DropoutConfig, EmbeddingConfig, GroupNormConfig, InstanceNormConfig,
    LayerNormConfig, LinearConfig, LstmConfig, PReluConfig, PaddingConfig2d, RmsNormConfig,
};
use burn::tensor::activation::{
    gelu, hard_sigmoid, leaky_relu, log_sigmoid, log_softmax, mish, relu, sigmoid, silu, softmax,
    softmin, softplus, tanh,
};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::{
    adaptive_avg_pool1d, attention as attend, avg_pool1d, deform_conv2d, interpolate, max_pool1d,
    unfold4d,
};
use burn::tensor::ops::{
    AttentionModuleOptions, DeformConvOptions, GridSampleOptions, InterpolateMode,
    InterpolateOptions, UnfoldOptions,
};
use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_amp::AmpAutodiff;
use burn_backend::Backend;

use shared::checked::{Checked, CheckedDevice, Counts};

/// Plain Burn.
pub type Plain = Autodiff<Checked>;
/// Mixed precision, every intermediate kept for the backward pass.
pub type Keeping = AmpAutodiff<Checked, NoCheckpointing>;
/// Mixed precision, cheap intermediates computed again in the backward pass.
pub type Recomputing = AmpAutodiff<Checked, BalancedCheckpointing>;

/// The results of a training step.
pub struct Step {
    pub loss: f32,
    pub grads: Vec<f32>,
    /// Without the counts of making the model, and of reading the loss and gradients above.
    pub counts: Counts,
}

/// A step on a fresh model.
pub type Steps = fn(&CheckedDevice) -> Step;

/// A kind of step, on the backends that it is tried on.
pub struct Kind {
    pub name: &'static str,
    pub plain: Steps,
    pub keeping: Steps,
    pub recomputing: Steps,
}

macro_rules! kinds {
    ($($kind:ident),* $(,)?) => {
        /// Every kind of step.
        pub const KINDS: &[Kind] = &[$(Kind {
            name: stringify!($kind),
            plain: $kind::<Plain>,
            keeping: $kind::<Keeping>,
            recomputing: $kind::<Recomputing>,
        }),*];
    };
}

kinds! {
    mlp, convolutions, transposed, cnn, norms, transformer, attention, masked_heads, rnns,
    embedding, losses, indexing, assigning, activations, reductions, prelu, pooling, sampling,
}

/// Values in [-1, 1) that depend only on `seed`.
pub fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..8).for_each(|_| {
        next();
    });
    (0..n).map(|_| next()).collect()
}

/// An FP32 tensor of such values.
pub fn input<B: Backend, const D: usize>(
    shape: [usize; D],
    seed: u64,
    device: &B::Device,
) -> Tensor<B, D> {
    let data = TensorData::new(values(shape.iter().product(), seed), shape);
    Tensor::from_data(data, (device, DType::F32))
}

/// A parameter of such values.
pub fn param<B: Backend, const D: usize>(
    shape: [usize; D],
    seed: u64,
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    Param::from_tensor(input(shape, seed, device))
}

/// A half tensor as a layer gives it.
fn half_of<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    let last = tensor.dims()[D - 1];
    let device = tensor.device();
    let rows = tensor.dims().iter().product::<usize>() / last;
    let dims = tensor.dims();
    let weight = Tensor::<B, 2>::eye(last, &device) * 0.9 + 0.05;
    tensor.reshape([rows, last]).matmul(weight).reshape(dims)
}

/// A sum in which every element counts differently.
fn weighted<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, 1> {
    let weights = input(tensor.dims(), 99, &tensor.device());
    (tensor * weights).mean()
}

/// Forward and backward.
pub fn step<B, M>(device: &CheckedDevice, model: M, loss: impl FnOnce(&M) -> Tensor<B, 1>) -> Step
where
    B: AutodiffBackend<Device = CheckedDevice>,
    M: Module<B>,
{
    model.visit(&mut Ready);
    device.reset();
    let loss = loss(&model);
    let mut gradients = Gradients::<B> {
        all: loss.backward(),
        found: Vec::new(),
    };
    model.visit(&mut gradients);
    let counts = device.counts();
    let found = gradients.found.into_iter();
    Step {
        loss: read(loss)[0],
        grads: found.flat_map(read).collect(),
        counts,
    }
}

/// The values of an FP32 tensor.
pub fn read<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().into_vec().expect("FP32")
}

/// Makes the parameters, which would otherwise be made when they are first used.
pub struct Ready;

impl<B: Backend> ModuleVisitor<B> for Ready {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        param.val();
    }
}

struct Gradients<B: AutodiffBackend> {
    all: B::Gradients,
    found: Vec<Tensor<B::InnerBackend, 1>>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Gradients<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !param.is_require_grad() {
            return;
        }
        let grad = param.val().grad(&self.all);
        let grad = grad.unwrap_or_else(|| panic!("no gradient of shape {:?}", param.shape()));
        assert_eq!(grad.dtype(), DType::F32, "of the gradient");
        self.found.push(grad.flatten(0, D - 1));
    }
}

fn classes<B: Backend>(classes: &[i32], device: &B::Device) -> Tensor<B, 1, Int> {
    Tensor::from_data(classes, device)
}

fn mask<B: Backend, const D: usize>(shape: [usize; D], device: &B::Device) -> Tensor<B, D, Bool> {
    input::<B, D>(shape, 5, device).greater_elem(0.0)
}

trait OnChecked: AutodiffBackend<Device = CheckedDevice, FloatElem = f32> {}
impl<B: AutodiffBackend<Device = CheckedDevice, FloatElem = f32>> OnChecked for B {}

fn mlp<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        LinearConfig::new(8, 16).init(device),
        LinearConfig::new(16, 16).init(device),
        LinearConfig::new(16, 4).with_bias(false).init(device),
    );
    step::<B, _>(device, model, |(a, b, c)| {
        let x = relu(a.forward(input([6, 8], 1, device)));
        let x = gelu(b.forward(x));
        MseLoss::new().forward(
            tanh(c.forward(x)),
            input([6, 4], 2, device),
            Reduction::Mean,
        )
    })
}

fn convolutions<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        Conv1dConfig::new(2, 3, 3).init(device),
        Conv2dConfig::new([2, 4], [3, 3])
            .with_groups(2)
            .with_stride([2, 2])
            .init(device),
        Conv3dConfig::new([1, 2], [2, 2, 2]).init(device),
        param([1, 1, 3, 4, 3], 4, device),
    );
    step::<B, _>(device, model, |(one, two, three, x)| {
        weighted(one.forward(input([2, 2, 8], 1, device)))
            + weighted(two.forward(input([2, 2, 7, 7], 2, device)))
            + weighted(three.forward(x.val()))
    })
}

fn transposed<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        ConvTranspose1dConfig::new([2, 3], 3).init(device),
        ConvTranspose2dConfig::new([2, 2], [3, 3])
            .with_stride([2, 2])
            .init(device),
        ConvTranspose3dConfig::new([1, 2], [2, 2, 2]).init(device),
        param([2, 2, 3, 3], 4, device),
    );
    step::<B, _>(device, model, |(one, two, three, x)| {
        weighted(one.forward(input([2, 2, 5], 1, device)))
            + weighted(two.forward(x.val()))
            + weighted(three.forward(input([1, 1, 2, 3, 2], 3, device)))
    })
}

fn cnn<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        Conv2dConfig::new([3, 8], [3, 3])
            .with_padding(PaddingConfig2d::Same)
            .init(device),
        BatchNormConfig::new(8).init(device),
        Conv2dConfig::new([8, 8], [3, 3])
            .with_padding(PaddingConfig2d::Same)
            .init(device),
        LinearConfig::new(32, 4).init(device),
    );
    step::<B, _>(device, model, |(first, norm, second, out)| {
        let x = norm.forward(first.forward(input([4, 3, 8, 8], 1, device)));
        let x = MaxPool2dConfig::new([2, 2]).init().forward(relu(x));
        let x = gelu(second.forward(x));
        let x = AvgPool2dConfig::new([2, 2]).init().forward(x);
        let x = AdaptiveAvgPool2dConfig::new([2, 2]).init().forward(x);
        let x = DropoutConfig::new(0.25).init().forward(x);
        let logits = out.forward(x.flatten::<2>(1, 3));
        let targets = classes(&[0, 3, 1, 2], device);
        CrossEntropyLossConfig::new()
            .init(device)
            .forward(logits, targets)
    })
}

fn norms<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        LayerNormConfig::new(6).init(device),
        RmsNormConfig::new(6).init(device),
        GroupNormConfig::new(2, 4).init(device),
        InstanceNormConfig::new(4).init(device),
        BatchNormConfig::new(4).init(device),
        param([3, 4, 6], 1, device),
    );
    step::<B, _>(device, model, |(layer, rms, group, instance, batch, x)| {
        let half = half_of(x.val());
        weighted(layer.forward(half.clone()))
            + weighted(rms.forward(half.clone()))
            + weighted(group.forward(half.clone()))
            + weighted(instance.forward(half.clone()))
            + weighted(batch.forward(half))
    })
}

fn transformer<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = TransformerEncoderConfig::new(16, 32, 2, 2).init(device);
    step::<B, _>(device, model, |model| {
        let padding = Tensor::<B, 2, Bool>::from_data(
            [
                [false, false, false, false, true],
                [false, false, false, true, true],
            ],
            device,
        );
        let x = TransformerEncoderInput::new(input([2, 5, 16], 1, device)).mask_pad(padding);
        weighted(model.forward(x))
    })
}

fn attention<B: OnChecked>(device: &CheckedDevice) -> Step {
    let shape = [2, 2, 4, 8];
    let model = (
        param(shape, 1, device),
        param(shape, 2, device),
        param(shape, 3, device),
        param([2, 2, 4, 4], 4, device),
    );
    step::<B, _>(device, model, |(q, k, v, bias)| {
        let qkv = || (half_of(q.val()), half_of(k.val()), v.val());
        let options = AttentionModuleOptions {
            softcap: Some(5.0),
            is_causal: true,
            ..Default::default()
        };
        let (query, key, value) = qkv();
        let masked = attend(
            query,
            key,
            value,
            Some(mask([2, 2, 4, 4], device)),
            None,
            Default::default(),
        );
        let (query, key, value) = qkv();
        let biased = attend(query, key, value, None, Some(bias.val()), options);
        weighted(masked) + weighted(biased)
    })
}

fn masked_heads<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = MultiHeadAttentionConfig::new(16, 4)
        .with_dropout(0.2)
        .init(device);
    step::<B, _>(device, model, |model| {
        let x =
            MhaInput::self_attn(input([2, 5, 16], 1, device)).mask_attn(mask([2, 5, 5], device));
        weighted(model.forward(x).context)
    })
}

fn rnns<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        LstmConfig::new(4, 8, true).init(device),
        GruConfig::new(8, 6, true).init(device),
    );
    step::<B, _>(device, model, |(lstm, gru)| {
        let (x, _) = lstm.forward(input([2, 4, 4], 1, device), None);
        weighted(gru.forward(x, None))
    })
}

fn embedding<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        EmbeddingConfig::new(11, 8).init(device),
        LayerNormConfig::new(8).init(device),
        LinearConfig::new(8, 11).init(device),
    );
    step::<B, _>(device, model, |(embedding, norm, out)| {
        let tokens = Tensor::<B, 2, Int>::from_data([[1, 2, 3, 1], [4, 1, 10, 0]], device);
        let logits = out.forward(norm.forward(embedding.forward(tokens)));
        let targets = classes(&[2, 3, 1, 4, 1, 10, 0, 5], device);
        CrossEntropyLossConfig::new()
            .with_smoothing(Some(0.1))
            .init(device)
            .forward(logits.reshape([8, 11]), targets)
    })
}

fn losses<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = LinearConfig::new(6, 4).init(device);
    step::<B, _>(device, model, |model| {
        let logits = model.forward(input([5, 6], 1, device));
        let labels = mask::<B, 2>([5, 4], device).int();
        let cross_entropy = CrossEntropyLossConfig::new()
            .with_weights(Some(vec![1.0, 0.5, 2.0, 1.5]))
            .init(device)
            .forward(logits.clone(), classes(&[0, 1, 2, 3, 0], device));
        let of_logits = BinaryCrossEntropyLossConfig::new()
            .with_logits(true)
            .init(device)
            .forward(logits.clone(), labels.clone());
        let of_probabilities = BinaryCrossEntropyLossConfig::new()
            .init(device)
            .forward(sigmoid(logits.clone()), labels);
        let targets = input([5, 4], 2, device);
        let huber = HuberLossConfig::new(0.5).init().forward(
            logits.clone(),
            targets.clone(),
            Reduction::Mean,
        );
        let squares = MseLoss::new().forward(logits, targets, Reduction::Sum);
        cross_entropy + of_logits + of_probabilities + huber + squares
    })
}

/// Reads by index, where the data is half.
fn indexing<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = param([4, 6], 1, device);
    step::<B, _>(device, model, |x| {
        let half = half_of(x.val());
        let columns = Tensor::<B, 2, Int>::from_data([[0, 5], [5, 5], [1, 2], [3, 0]], device);
        let rows = classes(&[3, 3, 0], device);
        let points = Tensor::<B, 2, Int>::from_data([[0, 1], [3, 5], [3, 5]], device);
        weighted(half.clone().gather(1, columns))
            + weighted(half.clone().select(0, rows))
            + weighted(half.clone().gather_nd::<2, 1>(points))
            + weighted(half.clone().slice([1..3, 2..5]))
            + weighted(half.clone().repeat_dim(0, 2))
            + weighted(half.clone().flip([1]).transpose())
            + weighted(half.clone().sort(1))
            + weighted(half.clone().cumsum(1))
            + weighted(half.clone().max_dim(1))
            + weighted(half.clone().unfold::<3, _>(1, 3, 1))
            + weighted(half.unsqueeze_dim::<3>(0).expand([2, 4, 6]))
    })
}

/// Writes by index, masks and concatenations, of half into FP32 and of FP32 into half.
fn assigning<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (param([4, 6], 1, device), param([4, 6], 2, device));
    step::<B, _>(device, model, |(x, y)| {
        let columns = || Tensor::<B, 2, Int>::from_data([[0, 5], [5, 5], [1, 2], [3, 0]], device);
        let rows = || classes(&[3, 0], device);
        let points = || Tensor::<B, 2, Int>::from_data([[0], [2]], device);
        let add = IndexingUpdateOp::Add;
        let both = |to: Tensor<B, 2>, from: Tensor<B, 2>| {
            let corner = from.clone().slice([0..4, 0..2]);
            let top = from.clone().slice([0..2, 0..6]);
            weighted(to.clone().slice_assign([0..4, 1..3], corner.clone()))
                + weighted(to.clone().scatter(1, columns(), corner, add))
                + weighted(to.clone().select_assign(0, rows(), top.clone(), add))
                + weighted(to.clone().scatter_nd(points(), top.clone(), add))
                + weighted(to.clone().mask_where(mask([4, 6], device), from.clone()))
                + weighted(to.clone().mask_fill(mask([4, 6], device), -1e9) * 1e-9)
                + weighted(Tensor::cat(vec![to.clone(), from.clone(), to.clone()], 1))
                + weighted(Tensor::stack::<3>(vec![to, from], 0))
        };
        both(half_of(x.val()), y.val()) + both(x.val(), half_of(y.val()))
    })
}

fn activations<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = param([4, 6], 1, device);
    step::<B, _>(device, model, |x| {
        let half = || half_of(x.val());
        weighted(relu(half()))
            + weighted(leaky_relu(half(), 0.1))
            + weighted(gelu(half()))
            + weighted(sigmoid(half()))
            + weighted(hard_sigmoid(half(), 0.2, 0.5))
            + weighted(log_sigmoid(half()))
            + weighted(tanh(half()))
            + weighted(silu(half()))
            + weighted(mish(half()))
            + weighted(softplus(half(), 1.0))
            + weighted(softmax(half(), 1))
            + weighted(log_softmax(half(), 1))
            + weighted(softmin(half(), 0))
            + weighted(half().powf_scalar(2.0) + half().exp() + half().abs().add_scalar(1.0).log())
            + weighted(half().sin() * half().cos() / (half().abs() + 1.0))
    })
}

fn reductions<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = param([4, 6], 1, device);
    step::<B, _>(device, model, |x| {
        let half = || half_of(x.val());
        let near_one = || half() * 0.25 + 1.0;
        half().sum() * 0.1
            + half().mean()
            + near_one().prod()
            + weighted(half().sum_dim(1))
            + weighted(half().mean_dim(0))
            + weighted(near_one().prod_dim(1))
            + weighted(half().cumsum(1))
            + weighted(near_one().cumprod(1))
            + weighted(near_one().log1p() + near_one().recip() + near_one().powf_scalar(1.5))
            + weighted(half().var(1))
            + half().max()
    })
}

fn prelu<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        LinearConfig::new(8, 8).init(device),
        PReluConfig::new().with_num_parameters(8).init(device),
        LinearConfig::new(8, 4).init(device),
    );
    step::<B, _>(device, model, |(first, slope, second)| {
        let x = slope.forward(first.forward(input([5, 8], 1, device)));
        weighted(second.forward(x))
    })
}

fn pooling<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (param([1, 2, 8], 1, device), param([1, 2, 6, 6], 2, device));
    step::<B, _>(device, model, |(line, plane)| {
        let (line, plane) = (half_of(line.val()), half_of(plane.val()));
        weighted(max_pool1d(line.clone(), 2, 2, 0, 1, false))
            + weighted(avg_pool1d(line.clone(), 2, 2, 0, true, false))
            + weighted(adaptive_avg_pool1d(line, 3))
            + weighted(MaxPool2dConfig::new([3, 3]).init().forward(plane.clone()))
            + weighted(AvgPool2dConfig::new([2, 2]).init().forward(plane.clone()))
            + weighted(AdaptiveAvgPool2dConfig::new([4, 4]).init().forward(plane))
    })
}

/// Interpolation, and other operations that read between pixels.
fn sampling<B: OnChecked>(device: &CheckedDevice) -> Step {
    let model = (
        param([1, 2, 5, 5], 1, device),
        param([1, 3, 3, 2], 2, device),
        param([2, 2, 3, 3], 3, device),
    );
    step::<B, _>(device, model, |(x, grid, weight)| {
        let half = || half_of(x.val());
        let offset = input::<B, 4>([1, 18, 3, 3], 4, device) * 0.3;
        let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
        weighted(interpolate(
            half(),
            [7, 8],
            InterpolateOptions::new(InterpolateMode::Nearest),
        )) + weighted(half().grid_sample_2d(grid.val() * 0.7, GridSampleOptions::default()))
            + weighted(deform_conv2d(
                half(),
                offset,
                weight.val(),
                None,
                None,
                options,
            ))
            + weighted(unfold4d(
                half(),
                [2, 2],
                UnfoldOptions::new([1, 1], [0, 0], [1, 1]),
            ))
    })
}
