// Operations between learned layers, independent of the release of Burn: as a program writes them, and with the casts of
// PyTorch's autocast around them. A module that includes this file has `Tensor`, `Precision`, `device`, `data` and `numbers`.

use burn::tensor::activation::{
    celu, elu, gelu, gelu_approximate, glu, hard_sigmoid, hard_swish, leaky_relu, log_sigmoid,
    log_softmax, mish, prelu, quiet_softmax, relu, selu, sigmoid, silu, softmax, softmin, softplus,
    softsign, tanh,
};
use burn::tensor::module::{conv1d, linear};
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Bool, DType, TensorData};

type T = Tensor<2>;

/// The rows and columns of a tensor.
const SIZE: usize = 16;
/// The scale of the loss: gradients in f16 are normal numbers.
const SCALE: f64 = 1024.0;

/// The casts that a program has: none, or those of PyTorch's autocast in this half dtype
/// (`aten/src/ATen/autocast_mode.h`, the lists for CUDA).
#[derive(Clone, Copy)]
pub struct Casts(pub Option<DType>);

impl Casts {
    /// An operand of an operation that runs in half.
    fn half<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self.0 {
            Some(half) => x.cast(half),
            None => x,
        }
    }

    /// An operand of an operation that runs in FP32.
    fn fp32<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self.0 {
            Some(_) => x.cast(DType::F32),
            None => x,
        }
    }

    /// A function that autocast computes in FP32.
    fn wide(self, x: T, f: impl FnOnce(T) -> T) -> T {
        f(self.fp32(x))
    }

    /// A function in the dtype of its operand. A kernel of PyTorch's computes it in FP32 and rounds once.
    fn keep(self, x: T, f: impl FnOnce(T) -> T) -> T {
        let dtype = x.dtype();
        match self.0 {
            Some(_) => f(x.cast(DType::F32)).cast(dtype),
            None => f(x),
        }
    }

    /// A function in the widest dtype of its operands, rounded once.
    fn widest(self, x: T, y: T, f: impl FnOnce(T, T) -> T) -> T {
        let Some(half) = self.0 else {
            return f(x, y);
        };
        let is_half = x.dtype() == half && y.dtype() == half;
        let result = f(x.cast(DType::F32), y.cast(DType::F32));
        if is_half { result.cast(half) } else { result }
    }

    /// Positive values of these.
    fn positive(self, x: T) -> T {
        self.keep(self.keep(x, |x| x.abs()), |x| x + 0.1)
    }

    fn matmul(self, x: T, y: T) -> T {
        self.half(x).matmul(self.half(y))
    }
}

/// An operation on two results of learned layers.
type Operation = (&'static str, fn(Casts, T, T) -> T);

pub const OPERATIONS: [Operation; 68] = [
    ("matmul", |c, x, y| c.matmul(x, y)),
    ("conv1d", |c, x, y| {
        let options = ConvOptions::new([1], [1], [1], 1);
        let weight = y.reshape([SIZE, SIZE / 4, 4]).narrow(2, 0, 3);
        let x = x.reshape([4, SIZE / 4, SIZE]);
        conv1d(c.half(x), c.half(weight), None, options).reshape([4 * SIZE, SIZE])
    }),
    ("attention", |c, x, y| {
        let scores = c.matmul(x.clone(), y.clone().transpose());
        let scores = c.keep(scores, |x| x / (SIZE as f64).sqrt());
        c.matmul(c.wide(scores, |x| softmax(x, 1)), y)
    }),
    ("relu", |c, x, _| c.keep(x, relu)),
    ("gelu", |c, x, _| c.keep(x, gelu)),
    ("sigmoid", |c, x, _| c.keep(x, sigmoid)),
    ("tanh", |c, x, _| c.keep(x, tanh)),
    ("silu", |c, x, _| c.keep(x, silu)),
    ("softplus", |c, x, _| c.wide(x, |x| softplus(x, 1.0))),
    ("leaky_relu", |c, x, _| c.keep(x, |x| leaky_relu(x, 0.01))),
    ("gelu_approximate", |c, x, _| c.keep(x, gelu_approximate)),
    ("hard_sigmoid", |c, x, _| c.keep(x, |x| hard_sigmoid(x, 0.2, 0.5))),
    ("hard_swish", |c, x, _| c.keep(x, hard_swish)),
    ("mish", |c, x, _| c.keep(x, mish)),
    ("elu", |c, x, _| c.keep(x, |x| elu(x, 1.0))),
    ("celu", |c, x, _| c.keep(x, |x| celu(x, 0.7))),
    ("selu", |c, x, _| c.keep(x, selu)),
    ("softsign", |c, x, _| {
        if c.0.is_none() {
            return softsign(x);
        }
        let divisor = c.keep(c.keep(x.clone(), |x| x.abs()), |x| x + 1.0);
        c.widest(x, divisor, |x, y| x / y)
    }),
    ("glu", |c, x, y| c.widest(x, y, |x, y| glu(Tensor::cat(vec![x, y], 1), 1))),
    ("prelu", |c, x, _| {
        let slope = c.fp32(c.half(values([SIZE], 80).require_grad()));
        c.keep(x, |x| prelu(x, slope))
    }),
    ("softmin", |c, x, _| c.wide(x, |x| softmin(x, 1))),
    ("quiet_softmax", |c, x, _| c.wide(x, |x| quiet_softmax(x, 1))),
    ("log_sigmoid", |c, x, _| c.keep(x, log_sigmoid)),
    ("exp", |c, x, _| c.wide(x, |x| x.exp())),
    ("log", |c, x, _| c.wide(c.positive(x), |x| x.log())),
    ("sqrt", |c, x, _| c.keep(c.positive(x), |x| x.sqrt())),
    ("square", |c, x, _| c.wide(x, |x| x.square())),
    ("powf", |c, x, _| c.wide(c.positive(x), |x| x.powf_scalar(1.5))),
    ("recip", |c, x, _| c.wide(c.wide(x, |x| x.exp()), |x| (x + 0.5).recip())),
    ("neg", |c, x, _| c.keep(x, |x| -x)),
    ("cos", |c, x, _| c.keep(x, |x| x.cos())),
    ("atan", |c, x, _| c.keep(x, |x| x.atan())),
    ("log1p", |c, x, _| c.wide(c.wide(x, |x| x.exp()), |x| x.log1p())),
    ("sinh", |c, x, _| c.wide(x, |x| x.sinh())),
    ("repeat_dim", |c, x, _| c.keep(x, |x| x.repeat_dim(0, 2))),
    ("sin", |c, x, _| c.keep(x, |x| x.sin())),
    ("erf", |c, x, _| c.keep(x, |x| x.erf())),
    ("softmax", |c, x, _| c.wide(x, |x| softmax(x, 1))),
    ("log_softmax", |c, x, _| c.wide(x, |x| log_softmax(x, 0))),
    ("add_scalar", |c, x, _| c.keep(x, |x| x + 0.3)),
    ("sub_scalar", |c, x, _| c.keep(x, |x| x - 0.3)),
    ("mul_scalar", |c, x, _| (0..16).fold(x, |x, _| c.keep(x, |x| x * 0.9))),
    ("div_scalar", |c, x, _| (0..16).fold(x, |x, _| c.keep(x, |x| x / 0.9))),
    ("1 - x", |c, x, _| c.keep(x, |x| -x + 1.0)),
    ("sum_dim", |c, x, _| c.wide(x, |x| x.sum_dim(1).expand([SIZE, SIZE]))),
    ("mean_dim", |c, x, _| c.keep(x, |x| x.mean_dim(0).expand([SIZE, SIZE]))),
    ("var", |c, x, _| c.keep(x, |x| x.var(1).expand([SIZE, SIZE]))),
    ("cumsum", |c, x, _| c.wide(x, |x| x.cumsum(0))),
    ("cumprod", |c, x, _| {
        let factors = c.keep(c.keep(x, sigmoid), |x| x + 0.5);
        c.wide(factors, |x| x.cumprod(0))
    }),
    ("mask_fill", |c, x, _| c.keep(x, |x| x.mask_fill(mask(), 0.1))),
    ("mask_where", |c, x, y| c.widest(x, y, |x, y| x.mask_where(mask(), y))),
    ("cat", |c, x, y| {
        let halves = |x: T, y: T| Tensor::cat(vec![x.narrow(0, 0, SIZE / 2), y.narrow(0, 0, SIZE / 2)], 0);
        c.widest(x, y, halves)
    }),
    ("add", |c, x, y| c.widest(x, y, |x, y| x + y)),
    ("sub", |c, x, y| c.widest(x, y, |x, y| x - y)),
    ("mul", |c, x, y| c.widest(x, y, |x, y| x * y)),
    ("div", |c, x, y| {
        let divisor = c.keep(c.keep(y, |y| y.abs()), |y| y + 0.5);
        c.widest(x, divisor, |x, y| x / y)
    }),
    ("FP32 data", |c, x, _| c.widest(x, values([SIZE, SIZE], 50), |x, y| x + y)),
    ("a norm by hand", |c, x, _| {
        let mean = c.keep(x.clone(), |x| x.mean_dim(1));
        let variance = c.keep(x.clone(), |x| x.var(1));
        let deviation = c.keep(c.keep(variance, |x| x + 1e-5), |x| x.sqrt());
        c.widest(c.widest(x, mean, |x, y| x - y), deviation, |x, y| x / y)
    }),
    ("cosines", |c, x, y| {
        let norm = |x: &T| c.wide(x.clone(), |x| x.square().sum_dim(1).sqrt());
        let norms = c.widest(norm(&x), norm(&y), |x, y| x * y);
        let products = c.widest(x, y, |x, y| x * y);
        let products = c.wide(products, |x| x.sum_dim(1));
        c.widest(products, norms, |x, y| x / y).expand([SIZE, SIZE])
    }),
    ("distances", |c, x, y| {
        let squares = c.wide(c.widest(x, y, |x, y| x - y), |x| x.square().sum_dim(1));
        c.wide(squares, |x| x.sqrt().expand([SIZE, SIZE]))
    }),
    ("an entropy", |c, x, _| {
        let p = c.wide(x, |x| softmax(x, 1));
        let log = c.wide(p.clone(), |p| p.log());
        c.widest(p, log, |x, y| x * y)
    }),
    ("a gate", |c, x, y| {
        let gate = c.keep(x.clone(), sigmoid);
        let rest = c.keep(gate.clone(), |gate| -gate + 1.0);
        let [x, y] = [(gate, x), (rest, y)].map(|(gate, x)| c.widest(gate, x, |x, y| x * y));
        c.widest(x, y, |x, y| x + y)
    }),
    ("a recurrence", |c, x, y| {
        // What forgets its past errors.
        let y = c.keep(y, |y| y * 0.25);
        let mut state = Tensor::zeros([1, SIZE], &device());
        let states = rows(x).map(|x| {
            let sum = c.widest(c.matmul(state.clone(), y.clone()), x, |x, y| x + y);
            state = c.keep(sum, tanh);
            state.clone()
        });
        Tensor::cat(states.collect(), 0)
    }),
    ("a decaying sum", |c, x, _| {
        let mut state = Tensor::zeros([1, SIZE], &device());
        for x in rows(x) {
            state = c.widest(c.keep(state, |x| x * 0.9), x, |x, y| x + y);
        }
        state.expand([SIZE, SIZE])
    }),
    ("a moving average", |c, x, _| {
        let mut rows = rows(x);
        let mut mean = rows.next().unwrap();
        for x in rows {
            let x = c.keep(x, |x| x * 0.1);
            mean = c.widest(c.keep(mean, |x| x * 0.9), x, |x, y| x + y);
        }
        mean.expand([SIZE, SIZE])
    }),
    ("a total", |c, x, _| {
        let total = rows(x).reduce(|x, y| c.widest(x, y, |x, y| x + y));
        total.unwrap().expand([SIZE, SIZE])
    }),
    ("residuals", |c, x, y| {
        (0..12).fold(x, |x, _| {
            let branch = c.keep(c.matmul(x.clone(), y.clone()), tanh);
            c.widest(x, c.keep(branch, |x| x * 0.3), |x, y| x + y)
        })
    }),
    ("a tensor used 40 times", |c, x, _| {
        let terms = (1..=40).map(|i| c.keep(x.clone(), |x| x * (0.01 * f64::from(i))));
        terms.reduce(|x, y| c.widest(x, y, |x, y| x + y)).unwrap()
    }),
];

fn rows(x: T) -> impl Iterator<Item = T> {
    (0..SIZE).map(move |i| x.clone().narrow(0, i, 1))
}

fn mask() -> Tensor<2, Bool> {
    values([SIZE, SIZE], 60).greater_elem(0.25)
}

/// FP32 values between -1 and 1.
fn values<const D: usize>(shape: [usize; D], seed: u64) -> Tensor<D> {
    let values = numbers(shape.iter().product(), seed);
    Tensor::from_data(TensorData::new(values, shape), &device())
}

/// The result of an operation between learned layers, and the gradients of the layers after it and before its operands.
pub fn result(casts: Casts, operation: fn(Casts, T, T) -> T, seed: u64) -> Vec<Vec<f32>> {
    let leaf = |i: u64, scale: f32| values([SIZE, SIZE], 100 * seed + i) * scale;
    let [first, second, last] = [1, 2, 3].map(|i| leaf(i, 0.6).require_grad());
    let bias = values([SIZE], 100 * seed + 4).require_grad();
    let input = casts.half(leaf(5, 1.0));
    let x = linear(input.clone(), casts.half(first.clone()), Some(casts.half(bias)));
    let y = linear(input, casts.half(second.clone()), None);
    let result = operation(casts, x, y);
    let [rows, columns] = result.dims();
    let out = casts.fp32(casts.matmul(result.clone(), last.clone()));
    let loss = (out * values([rows, columns], 70)).sum() * (SCALE / (rows * columns) as f64);
    let grads = loss.backward();
    let gradients = [last, first, second].into_iter().filter_map(|x| x.grad(&grads)).map(data);
    let result = data(casts.fp32(result));
    [result].into_iter().chain(gradients).collect()
}

/// The largest quotient of our error and that of autocast.
const BOUND: f64 = 1.25;

/// What to say if an operation is less exact than in autocast. `found`: exactly, by autocast and by the precision, for each seed.
pub fn less_exact(
    name: &str,
    precision: Precision,
    found: impl Iterator<Item = [Vec<Vec<f32>>; 3]>,
) -> Option<String> {
    let quotients = quotients(found);
    let of = format!("{name} in {precision}: {quotients:.2?} times the error of autocast");
    println!("{of}");
    let is_exact = quotients.iter().all(|quotient| *quotient < BOUND);
    (!is_exact).then_some(of)
}

/// The median of the quotients of both relative errors, of the result and of each gradient. At a kink, a rounding may choose
/// the other side, in either of them: that is not the median.
fn quotients(found: impl Iterator<Item = [Vec<Vec<f32>>; 3]>) -> Vec<f64> {
    let error = |values: &[f32], exact: &[f32]| {
        assert_eq!(values.len(), exact.len());
        let pairs = values.iter().zip(exact).map(|(x, y)| [f64::from(*x), f64::from(*y)]);
        let sums = pairs.fold([0.0; 2], |[e, n], [x, y]| [e + (x - y).powi(2), n + y * y]);
        (sums[0] / sums[1]).sqrt()
    };
    let mut quotients = Vec::new();
    for [exact, autocast, found] in found {
        quotients.resize(exact.len(), Vec::new());
        for (i, of) in quotients.iter_mut().enumerate() {
            let [found, autocast] = [&found, &autocast].map(|of| error(&of[i], &exact[i]));
            // Where nothing is rounded, FP32 sums in another order.
            of.push((found + 1e-6) / (autocast + 1e-6));
        }
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    quotients.into_iter().map(median).collect()
}
