//! Half tensors as users see them: `dtype()` is the real dtype. Tensors that the policy made half are
//! read back in FP32. The user's own half tensors, and FP64, are read back as they are.

use std::thread;

use burn::module::{AutodiffModule, Param, ParamId};
use burn::nn::LinearConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Distribution, Int, Tensor, Transaction, activation as act};
use burn_amp::{Precision, full_precision, precision_of, with_precision};

use crate::common::{computes_in, halves, roundoff};
use crate::harness::{Amp, Inference, activation, fp32, half_of, tensor, values};

/// Other dtypes that a user may compute in.
fn users() -> Vec<DType> {
    let all = [DType::F16, DType::BF16, DType::F64];
    all.into_iter().filter(computes_in).collect()
}

/// The dtype of a tensor, and of its data.
#[track_caller]
fn assert_dtypes<B: Backend, const D: usize>(
    what: &str,
    x: Tensor<B, D>,
    is: DType,
    leaves: DType,
) {
    assert_eq!(x.dtype(), is, "{what}");
    assert_eq!(x.to_data().dtype, leaves, "the data of {what}");
    assert_eq!(x.into_data().dtype, leaves, "the data of {what}");
}

/// Runs a test in both halves, for inference and for training.
macro_rules! everywhere {
    ($($(#[$doc:meta])* fn $name:ident<$b:ident>($precision:ident, $half:ident) $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            fn run<$b: Backend>($precision: Precision, $half: DType) $body
            for precision in halves() {
                with_precision(precision, || {
                    run::<Inference>(precision, half_of(precision));
                    run::<Amp>(precision, half_of(precision));
                });
            }
        }
    )*};
}

const X: [f64; 4] = [1.0, -2.5, 0.375, 4.0];

fn made_half<B: Backend>() -> Tensor<B, 1> {
    activation(fp32(&X, [4]))
}

everywhere! {
    /// What FP32 computes later keeps masks and indices. For LibTorch, views of them may change in place.
    fn what_reads_later_sees_the_masks_and_indices_of_then<B>(_precision, _half) {
        let device = Default::default();
        let x = activation(fp32::<B, 2>(&X, [2, 2]));
        let sigmoids = X.map(|x| 1.0 / (1.0 + (-x).exp()));
        let mask = Tensor::<B, 2, Bool>::from_data([[false, true], [false, false]], &device);
        let filled = act::sigmoid(x.clone()).mask_fill(mask.clone().transpose(), 0.0);
        let indices = Tensor::<B, 2, Int>::from_data([[0, 1], [0, 1]], &device);
        let gathered = act::sigmoid(x).gather(1, indices.clone().transpose());
        let changed = (mask.bool_not(), indices + 1);
        let [a, b, _, d] = sigmoids;
        for (found, exact) in [(filled, [a, b, 0.0, d]), (gathered, [a, a, d, d])] {
            for (found, exact) in values(found).into_iter().zip(exact) {
                assert!((found - exact).abs() < 1e-6, "{found} is not {exact}");
            }
        }
        drop(changed);
    }

    fn activations_are_half_and_leave_as_fp32<B>(_precision, half) {
        let x = made_half::<B>();
        assert_dtypes("an activation", x.clone(), half, DType::F32);
        assert_eq!(x.to_data().to_vec::<f32>().unwrap(), X.map(|x| x as f32));
        assert_eq!(x.clone().slice(1..2).into_scalar().to_string(), "-2.5");
        assert!(format!("{x}").contains("0.375"));
        for (what, y) in [
            ("relu", act::relu(x.clone())),
            ("reshape", x.clone().reshape([2, 2]).reshape([4])),
            ("clone", x.clone()),
            ("detach", x.clone().detach()),
            ("sum of two", x.clone() + x.clone()),
            ("cat", Tensor::cat(vec![x.clone(), x.clone()], 0)),
            ("to_device", x.clone().to_device(&x.device())),
        ] {
            assert_dtypes(what, y, half, DType::F32);
        }
        assert_dtypes("exp", x.exp(), DType::F32, DType::F32);
    }

    fn transactions_give_fp32<B>(_precision, half) {
        let x = made_half::<B>();
        let own = tensor::<B, 1>(&X, [4], half);
        let int = Tensor::<B, 1, Int>::from_data([1, 2], &Default::default());
        let [x, own, fp32, int] = Transaction::default()
            .register(x)
            .register(own)
            .register(fp32::<B, 1>(&X, [4]))
            .register(int)
            .execute()
            .try_into()
            .unwrap();
        assert_eq!(x.to_vec::<f32>().unwrap(), X.map(|x| x as f32));
        assert_eq!(own.dtype, half);
        assert_eq!(fp32.dtype, DType::F32);
        assert_eq!(int.iter::<i64>().collect::<Vec<_>>(), [1, 2]);
    }

    fn a_users_own_dtype_stays<B>(_precision, _half) {
        for dtype in users() {
            let cast = fp32::<B, 1>(&X, [4]).cast(dtype);
            for x in [cast, tensor(&X, [4], dtype)] {
                for (what, y) in [
                    ("the tensor", x.clone()),
                    ("relu", act::relu(x.clone())),
                    ("reshape", x.clone().reshape([2, 2]).reshape([4])),
                    ("neg", x.clone().neg()),
                    ("sum of two", x.clone() + x.clone()),
                    ("detach", x.clone().detach()),
                    ("slice", x.clone().slice(0..2)),
                    ("cat", Tensor::cat(vec![x.clone(), x.clone()], 0)),
                    ("to_device", x.clone().to_device(&x.device())),
                ] {
                    assert_dtypes(what, y, dtype, dtype);
                }
                assert_eq!(values(x), X);
            }
        }
    }

    fn fp64_is_left_alone<B>(_precision, half) {
        if !computes_in(&DType::F64) {
            return;
        }
        let x = tensor::<B, 2>(&X, [2, 2], DType::F64);
        for (what, y) in [
            ("matmul", x.clone().matmul(x.clone())),
            ("exp", x.clone().exp()),
            ("softmax", act::softmax(x.clone(), 1)),
            ("matmul with FP32", x.clone().matmul(fp32(&X, [2, 2]))),
            ("sum with half", x.clone() + made_half::<B>().reshape([2, 2])),
            ("sum with the user's half", x.clone() + tensor(&X, [2, 2], half)),
        ] {
            assert_dtypes(what, y, DType::F64, DType::F64);
        }
        // 1/3 in FP64, not in FP32.
        assert_eq!(values(tensor::<B, 1>(&[3.0], [1], DType::F64).recip()), [1.0 / 3.0]);
    }

    fn mixed_halves_leave_as_fp32<B>(_precision, half) {
        let other = if half == DType::F16 { DType::BF16 } else { DType::F16 };
        let x = made_half::<B>();
        let own = tensor::<B, 1>(&X, [4], half);
        assert_dtypes("own + made", own.clone() + x.clone(), half, DType::F32);
        assert_dtypes("made * own", x.clone() * own.clone(), half, DType::F32);
        assert_dtypes("cat", Tensor::cat(vec![own.clone(), x.clone()], 0), half, DType::F32);
        assert_dtypes("own + FP32", own.clone() + fp32(&X, [4]), DType::F32, DType::F32);
        if !computes_in(&other) {
            return;
        }
        // No half holds both.
        let sum = x + tensor(&X, [4], other);
        assert_dtypes("f16 + bf16", sum.clone(), DType::F32, DType::F32);
        assert_eq!(values(sum), X.map(|x| 2.0 * x));
    }

    fn casts_are_real<B>(_precision, half) {
        let x = made_half::<B>();
        let wide = x.clone().cast(DType::F32);
        assert_dtypes("to FP32", wide.clone(), DType::F32, DType::F32);
        if computes_in(&DType::F64) {
            assert_dtypes("to FP64", x.clone().cast(DType::F64), DType::F64, DType::F64);
        }
        // Programs cast to the dtype of a tensor: what was computed is the policy's.
        assert_dtypes("back", wide.cast(half), half, DType::F32);
        assert_dtypes("plain", fp32::<B, 1>(&X, [4]).cast(half), half, half);
        for dtype in users() {
            let y = fp32::<B, 1>(&[1.0 / 3.0], [1]).cast(dtype);
            let rounded = crate::harness::rounded(&[f64::from(1f32 / 3.0)], dtype);
            assert_eq!(values(y.clone()), rounded);
            assert_eq!(values(y.cast(DType::F32)), rounded);
        }
    }

    fn new_tensors_match_or_are_what_is_asked_for<B>(_precision, half) {
        let x = made_half::<B>();
        assert_eq!(x.zeros_like().dtype(), half);
        assert_eq!(x.ones_like().dtype(), half);
        assert_eq!(x.full_like(2.0).dtype(), half);
        assert_eq!(x.random_like(Distribution::Default).dtype(), half);
        let device = Default::default();
        // Another thread is in no region.
        let of_device = thread::spawn(|| precision_of::<B>(&B::Device::default()).unwrap());
        let of_device = of_device.join().unwrap().compute_dtype();
        for dtype in [users(), vec![DType::F32]].concat() {
            let options = (&device, dtype);
            // A dtype in force is that of a tensor that the policy made half.
            let is_in_force = dtype == half || of_device == Some(dtype);
            let data = if is_in_force { DType::F32 } else { dtype };
            assert_dtypes("zeros", Tensor::<B, 1>::zeros([3], options), dtype, data);
            assert_dtypes("ones", Tensor::<B, 1>::ones([3], options), dtype, data);
            assert_dtypes("full", Tensor::<B, 1>::full([3], 0.5, options), dtype, data);
            assert_dtypes("empty", Tensor::<B, 1>::empty([3], options), dtype, data);
            // Enough that some are close to the bound, which half would round them to.
            let drawn = |distribution| Tensor::<B, 1>::random([20_000], distribution, options);
            let random = drawn(Distribution::Default);
            assert_dtypes("random", random.clone(), dtype, data);
            assert!(values(random).iter().all(|x| (0.0..1.0).contains(x)));
            let random = values(drawn(Distribution::Uniform(-3.0, -1.0)));
            assert!(random.iter().all(|x| (-3.0..-1.0).contains(x)));
        }
        // A mask of the dtype of half scores: f16 does not hold it.
        let mask = x.full_like(-1e9);
        let expected = if half == DType::F16 { DType::F32 } else { half };
        assert_eq!(mask.dtype(), expected);
        let masked = act::softmax(x.clone() + mask, 0);
        assert!(values(masked).iter().all(|x| x.is_finite()));
        assert_dtypes("zeros", Tensor::<B, 1>::zeros([3], &device), DType::F32, DType::F32);
    }

    /// `full_precision` widens tensors that the policy made half, and leaves the user's own.
    fn full_precision_regions<B>(_precision, half) {
        let x = made_half::<B>();
        let own = tensor::<B, 1>(&X, [4], half);
        full_precision(|| {
            assert_dtypes("made + made", x.clone() + x.clone(), DType::F32, DType::F32);
            assert_dtypes("relu", act::relu(x.clone()), DType::F32, DType::F32);
            assert_dtypes("made + own", x.clone() + own.clone(), DType::F32, DType::F32);
            assert_dtypes("own + own", own.clone() + own.clone(), half, half);
            let zeros = x.zeros_like();
            assert_dtypes("zeros", zeros.clone(), DType::F32, DType::F32);
            let wide = x.clone() * 1.0;
            assert_eq!(values(wide.clone() + zeros.clone()), values(x.clone()));
            assert_eq!(values(zeros.max_pair(wide.neg())), values(act::relu(-x.clone())));
            assert_dtypes("a new one", made_half::<B>(), DType::F32, DType::F32);
        });
    }
}

#[test]
fn inner_and_back_carry_the_dtype_over() {
    for precision in halves() {
        with_precision(precision, || {
            let half = half_of(precision);
            let x = made_half::<Amp>();
            assert_dtypes("inner", x.clone().inner(), half, DType::F32);
            let back = Tensor::<Amp, 1>::from_inner(x.clone().inner());
            assert_dtypes("from_inner", back, half, DType::F32);
            assert_dtypes("detach", x.detach(), half, DType::F32);
            for dtype in users() {
                let x = tensor::<Amp, 1>(&X, [4], dtype);
                assert_dtypes("inner", x.clone().inner(), dtype, dtype);
                let back = Tensor::<Amp, 1>::from_inner(x.clone().inner());
                assert_dtypes("from_inner", back, dtype, dtype);
                let leaf = trained(dtype);
                assert_dtypes("require_grad", x.clone().require_grad(), leaf, leaf);
                assert_dtypes("detach", x.detach(), dtype, dtype);
            }
        });
    }
}

/// The dtype in which a tensor of this dtype is trained.
fn trained(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// Also an FP64 leaf. The user's half leaf is trained in FP32.
#[test]
fn gradients_are_in_the_dtype_of_their_leaf() {
    for precision in halves() {
        with_precision(precision, || {
            for dtype in [users(), vec![DType::F32]].concat() {
                let x = tensor::<Amp, 2>(&X, [2, 2], dtype).require_grad();
                let out = x.clone().matmul(fp32(&[1.0, 0.0, 0.0, 1.0], [2, 2]));
                // A sum's gradient is the loss scale itself, at first beyond f16.
                let grads = out.mean().backward();
                let grad = x.grad(&grads).expect("a gradient");
                assert_eq!(x.dtype(), trained(dtype));
                assert_dtypes("the gradient", grad.clone(), x.dtype(), x.dtype());
                assert_eq!(values(grad), [0.25; 4]);
            }
        });
    }
}

#[test]
fn modules_keep_their_dtypes_when_valid() {
    for precision in halves() {
        with_precision(precision, || {
            let half = half_of(precision);
            let device = Default::default();
            let layer = LinearConfig::new(4, 2).init::<Amp>(&device).valid();
            assert_dtypes("a weight", layer.weight.val(), DType::F32, DType::F32);
            let out = layer.forward(fp32::<Inference, 2>(&X, [1, 4]));
            assert_dtypes("its output", out, half, DType::F32);
            for dtype in users() {
                let param = Param::from_tensor(tensor::<Amp, 1>(&X, [4], dtype));
                let leaf = trained(dtype);
                assert_dtypes("a parameter", param.val(), leaf, leaf);
                assert_dtypes("a valid parameter", param.valid().val(), leaf, leaf);
                let frozen = Param::initialized(ParamId::new(), tensor::<Amp, 1>(&X, [4], dtype));
                assert_dtypes("a frozen parameter", frozen.val(), dtype, dtype);
                assert_dtypes("a valid frozen one", frozen.valid().val(), dtype, dtype);
            }
        });
    }
}

everywhere! {
    /// However attention is carried out: whole, or step by step with a softmax in FP32 between.
    fn attention_on_halves_of_the_user_is_the_users<B>(precision, half) {
        let x = || Tensor::<B, 4>::ones([1, 1, 2, 4], &Default::default());
        let attend = |x: Tensor<B, 4>| {
            burn::tensor::module::attention(x.clone(), x.clone(), x, None, None, Default::default())
        };
        assert_dtypes(&format!("theirs in {precision}"), attend(x().cast(half)), half, half);
        assert_dtypes(&format!("ours in {precision}"), attend(x().set_require_grad(false)), half, DType::F32);
    }
}

/// The policy's half copy of a parameter is a leaf.
#[test]
fn a_users_copy_of_a_parameter_is_no_leaf() {
    for precision in halves() {
        with_precision(precision, || {
            let half = half_of(precision);
            let weight = fp32::<Amp, 1>(&X, [4]).require_grad();
            let copy = weight.clone().cast(half);
            assert!(!copy.is_require_grad());
            assert!(!copy.clone().detach().is_require_grad());
            assert_eq!(copy.clone().inner().dtype(), half);
            let grads = copy.powi_scalar(2).sum().backward();
            let grad = weight.grad(&grads).unwrap();
            assert_eq!(values(grad), X.map(|x| 2.0 * x));
        });
    }
}

/// What a program casts to FP32 has one gradient, which is rounded once: 200 less 200.02 is not 0.
#[test]
fn the_gradients_of_a_cast_meet_in_fp32() {
    for precision in halves() {
        with_precision(precision, || {
            let leaf = fp32::<Amp, 1>(&[100.0], [1]).require_grad();
            let whole = activation(leaf.clone()).cast(DType::F32);
            let loss = whole.clone().square() - whole * 200.02;
            let grad = values(leaf.grad(&loss.sum().backward()).unwrap());
            assert!((grad[0] + 0.02).abs() < 2e-4, "{precision}: {grad:?}");
        });
    }
}

/// An integer power has a whole exponent, as in Burn.
#[test]
fn an_integer_power_ignores_a_fraction() {
    for precision in halves() {
        with_precision(precision, || {
            let x = activation(fp32::<Amp, 1>(&[4.0], [1]));
            assert_eq!(values(x.powi_scalar(2.5)), [16.0]);
        });
    }
}

/// For LibTorch, a result of `swap_dims` counts as a tensor of its own. It may then change in place.
#[test]
fn an_operation_on_a_view_leaves_what_the_tape_keeps() {
    type Activation = fn(Tensor<Amp, 2>) -> Tensor<Amp, 2>;
    type Slope = fn(f64) -> f64;
    let cases: [(&str, Activation, Slope); 3] = [
        ("relu", act::relu, |y| f64::from(y > 0.0)),
        ("tanh", act::tanh, |y| 1.0 - y.tanh().powi(2)),
        ("sigmoid", act::sigmoid, |y| 0.25 / (y / 2.0).cosh().powi(2)),
    ];
    for precision in halves() {
        with_precision(precision, || {
            for (name, function, slope) in cases {
                let x = fp32::<Amp, 2>(&X, [2, 2]).require_grad();
                let out = function(activation(x.clone())).swap_dims(0, 1) * -2.0;
                let grad = values(x.grad(&out.mean().backward()).unwrap());
                for (x, grad) in X.into_iter().zip(grad) {
                    let expected = -2.0 / 4.0 * slope(x);
                    let most = 2.0 * roundoff(precision);
                    assert!(
                        (grad - expected).abs() <= most,
                        "{name}({x}) in {precision}: {grad} is not {expected}"
                    );
                }
            }
        });
    }
}
