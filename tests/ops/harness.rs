//! Runs one operation in half precision and in FP64, on the same inputs, and compares.

use std::any::Any;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use burn_amp::{AmpAutodiff, GradScaler, LossScaleConfig, Precision, with_precision};

use crate::common::{Inner, ON_LIBTORCH, computes_in, halves, roundoff};

/// The reference is always computed on Flex, which has FP64.
pub type Reference = Autodiff<Flex>;
pub type Plain = Autodiff<Inner>;
pub type Inference = burn_amp::Amp<Inner>;
pub type Amp = AmpAutodiff<Inner>;
pub type Balanced = AmpAutodiff<Inner, BalancedCheckpointing>;

/// A small generator of its own (splitmix64): Flex's is shared by the tests of all threads.
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn values(&mut self, n: usize, low: f64, high: f64) -> Vec<f64> {
        (0..n).map(|_| self.uniform(low, high)).collect()
    }
}

pub fn half_of(precision: Precision) -> DType {
    precision.compute_dtype().expect("a half precision")
}

/// The values as `dtype` holds them.
pub fn rounded(values: &[f64], dtype: DType) -> Vec<f64> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    data.convert_dtype(dtype).iter::<f64>().collect()
}

/// Values in a dtype, in a shape.
pub fn data(values: &[f64], shape: impl Into<Vec<usize>>, dtype: DType) -> TensorData {
    TensorData::new(values.to_vec(), shape.into()).convert_dtype(dtype)
}

pub fn tensor<B: Backend, const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
) -> Tensor<B, D> {
    Tensor::from_data(data(values, shape, dtype), (&Default::default(), dtype))
}

/// A tensor in FP32, the dtype of parameters and of a data loader's batches.
pub fn fp32<B: Backend, const D: usize>(values: &[f64], shape: [usize; D]) -> Tensor<B, D> {
    tensor(values, shape, DType::F32)
}

pub use crate::common::activation;

pub fn values<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The operands of an operation.
pub struct Args<B: Backend> {
    tensors: Vec<(Tensor<B, 1>, Vec<usize>)>,
}

impl<B: Backend> Args<B> {
    /// Operand `i`, of rank `D`.
    pub fn t<const D: usize>(&self, i: usize) -> Tensor<B, D> {
        let (tensor, shape) = &self.tensors[i];
        let shape: [usize; D] = shape[..].try_into().expect("the rank of the operand");
        tensor.clone().reshape(shape)
    }

    pub fn x(&self) -> Tensor<B, 1> {
        self.t(0)
    }

    pub fn y(&self) -> Tensor<B, 1> {
        self.t(1)
    }

    pub fn int<const D: usize>(&self, values: &[i64], shape: [usize; D]) -> Tensor<B, D, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Default::default())
    }

    /// True at every third element.
    pub fn mask<const D: usize>(&self, shape: [usize; D]) -> Tensor<B, D, Bool> {
        let n = shape.iter().product();
        let values: Vec<bool> = (0..n).map(|i| i % 3 == 0).collect();
        Tensor::from_data(TensorData::new(values, shape), &Default::default())
    }
}

pub fn flat<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    let n = x.shape().num_elements();
    x.reshape([n])
}

/// The kind of an operand for mixed precision.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Half, made from an FP32 leaf.
    Activation,
    /// An FP32 leaf.
    Parameter,
}

/// The operands of a case.
pub struct Inputs {
    operands: Vec<(Vec<usize>, Kind, Values)>,
    pointwise: bool,
    reference: DType,
    summed: bool,
    pub precisions: Vec<Precision>,
}

#[derive(Clone)]
enum Values {
    Uniform(f64, f64),
    Given(Vec<f64>),
    /// Ordinary values, and the ones that break operations in half.
    Points,
    /// One side of all pairs of such values.
    Pairs {
        second: bool,
    },
}

/// A half operand of random values from -2 to 2.
pub fn x(shape: &[usize]) -> Inputs {
    Inputs {
        operands: Vec::new(),
        pointwise: false,
        reference: DType::F64,
        summed: false,
        precisions: halves(),
    }
    .x(shape)
}

/// One half operand with everything from subnormal to the end of the range. Points where the true
/// value or derivative is not finite, or does not fit, are left out.
pub fn points() -> Inputs {
    Inputs {
        operands: vec![(vec![], Kind::Activation, Values::Points)],
        pointwise: true,
        reference: DType::F64,
        summed: false,
        precisions: halves(),
    }
}

/// Two half operands, as [`points`].
pub fn pairs() -> Inputs {
    let side = |second| (vec![], Kind::Activation, Values::Pairs { second });
    Inputs {
        operands: vec![side(false), side(true)],
        pointwise: true,
        reference: DType::F64,
        summed: false,
        precisions: halves(),
    }
}

impl Inputs {
    /// One more half operand.
    pub fn x(mut self, shape: &[usize]) -> Self {
        let values = Values::Uniform(-2.0, 2.0);
        self.operands.push((shape.into(), Kind::Activation, values));
        self
    }

    /// One more FP32 operand.
    pub fn w(self, shape: &[usize]) -> Self {
        self.x(shape).fp32()
    }

    /// The last operand is an FP32 leaf.
    pub fn fp32(mut self) -> Self {
        self.operands.last_mut().expect("an operand").1 = Kind::Parameter;
        self
    }

    /// The last operand lies between these.
    pub fn within(mut self, low: f64, high: f64) -> Self {
        self.operands.last_mut().expect("an operand").2 = Values::Uniform(low, high);
        self
    }

    /// The last operand has these values.
    pub fn given(mut self, values: &[f64]) -> Self {
        self.operands.last_mut().expect("an operand").2 = Values::Given(values.into());
        self
    }

    /// The loss is the sum of the result, and every operand is one.
    pub fn summed(mut self) -> Self {
        self.summed = true;
        for (shape, _, values) in &mut self.operands {
            *values = Values::Given(vec![1.0; shape.iter().product()]);
        }
        self
    }

    /// Only in this half precision.
    pub fn only(mut self, precision: Precision) -> Self {
        self.precisions.retain(|p| *p == precision);
        self
    }

    /// Not on this backend, by one of the constants of `common`: plain Burn panics there, too.
    pub fn not_on(mut self, there: bool) -> Self {
        self.precisions.retain(|_| !there);
        self
    }

    /// Only where the tested backend computes in this dtype.
    pub fn needs(mut self, dtype: DType) -> Self {
        self.precisions.retain(|_| computes_in(&dtype));
        self
    }

    /// Plain Burn does not run this in FP64: it makes FP32 tensors inside.
    pub fn only_fp32(mut self) -> Self {
        self.reference = DType::F32;
        self
    }

    fn operands(&self, precision: Precision) -> Vec<Operand> {
        let mut rng = Rng(7);
        let points = points_of(precision);
        let values = |values: &Values, n: usize, rng: &mut Rng| match values {
            Values::Uniform(low, high) => rng.values(n, *low, *high),
            Values::Given(values) => values.clone(),
            Values::Points => points.clone(),
            Values::Pairs { second } => points
                .iter()
                .flat_map(|a| points.iter().map(move |b| if *second { *b } else { *a }))
                .collect(),
        };
        self.operands
            .iter()
            .map(|(shape, kind, given)| {
                let values = values(given, shape.iter().product(), &mut rng);
                let shape = match self.pointwise {
                    true => vec![values.len()],
                    false => shape.clone(),
                };
                Operand {
                    values: rounded(&values, half_of(precision)),
                    shape,
                    kind: *kind,
                }
            })
            .collect()
    }
}

/// Where operations break in half: 256 and 300 (squares overflow), 2e-4 and 1e-4 (reciprocals of
/// squares), 45 (cubes), and the ends of the range.
fn points_of(precision: Precision) -> Vec<f64> {
    let ends = match precision {
        Precision::F16 => [65504.0, 6e4, 6.2e-5, 6e-8],
        _ => [3e38, 1e38, 1e-37, 1.3e-38],
    };
    let ordinary = [1.0, 1.5, 0.7, 0.1, 3.0, 12.0];
    let hard = [256.0, 300.0, 2e-4, 1e-4, 45.0, 1e4];
    let points = [&ends[..], &ordinary, &hard].concat();
    let mut rng = Rng(11);
    [
        points.clone(),
        points.iter().map(|x| -x).collect(),
        rng.values(10, -1.0, 1.0),
        rng.values(10, -9.0, 9.0),
    ]
    .concat()
}

#[derive(Clone)]
struct Operand {
    shape: Vec<usize>,
    values: Vec<f64>,
    kind: Kind,
}

/// How close an operation has to come, in roundings of the half dtype.
#[derive(Clone, Copy)]
pub struct Tolerance {
    fp32: bool,
    value: f64,
    grad: f64,
    absolute: f64,
    whole: bool,
    rounded: bool,
}

/// The value is FP32 and right to 32 roundings of FP32; the gradient to so many of half.
pub const fn full(grad: f64) -> Tolerance {
    Tolerance {
        fp32: true,
        value: 32.0,
        grad,
        absolute: 0.0,
        whole: false,
        rounded: false,
    }
}

/// The value is half; value and gradient are right to so many roundings of half.
pub const fn half(value: f64, grad: f64) -> Tolerance {
    Tolerance {
        fp32: false,
        value,
        grad,
        absolute: 0.0,
        whole: false,
        rounded: false,
    }
}

impl Tolerance {
    /// Gradients may be off by so many roundings of one besides: those computed from the half
    /// result, as in 1 - tanh².
    pub const fn absolute(mut self, roundings: f64) -> Self {
        self.absolute = roundings;
        self
    }

    /// The value is FP32, but computed from half: right to so many roundings of half.
    pub const fn rounded(mut self, roundings: f64) -> Self {
        self.value = roundings;
        self.rounded = true;
        self
    }

    /// Relative to the largest element, not to each: for sums, whose terms cancel.
    pub const fn whole(mut self) -> Self {
        self.whole = true;
        self
    }
}

pub type Op<B> = fn(&Args<B>) -> Tensor<B, 1>;

/// An operation, its operands, and how close it has to come.
pub struct Case {
    /// The rows of the policy that it exercises, and its name.
    pub rows: &'static str,
    pub inputs: Inputs,
    pub tolerance: Tolerance,
    pub reference: Op<Reference>,
    pub plain: Op<Plain>,
    pub amp: Op<Amp>,
    pub balanced: Op<Balanced>,
}

impl Case {
    /// The rows of the policy; the part after a colon only distinguishes cases.
    pub fn rows(&self) -> impl Iterator<Item = &'static str> {
        let rows = self.rows.split(':').next().unwrap_or_default();
        rows.split_whitespace()
    }
}

/// Cases, each a line: rows, operands, tolerance, operation.
macro_rules! cases {
    ($($rows:literal, $inputs:expr, $tolerance:expr => |$args:ident| $body:expr;)*) => {
        vec![$({
            fn op<B: burn::tensor::backend::Backend>(
                $args: &$crate::harness::Args<B>,
            ) -> burn::tensor::Tensor<B, 1> {
                $crate::harness::flat($body)
            }
            $crate::harness::Case {
                rows: $rows,
                inputs: $inputs,
                tolerance: $tolerance,
                reference: op,
                plain: op,
                amp: op,
                balanced: op,
            }
        }),*]
    };
}
pub(crate) use cases;

/// The results of a run: the value, and the gradient of each operand that has one.
struct Run {
    dtype: DType,
    value: Vec<f64>,
    grads: Vec<Option<Vec<f64>>>,
}

/// How a half operand comes to be.
#[derive(Clone, Copy, Debug)]
enum Route {
    /// The user casts.
    Cast(DType),
    /// The policy makes it so.
    Contraction,
    /// There is none: the run is a reference.
    None,
}

fn run<B: AutodiffBackend>(
    op: Op<B>,
    inputs: &Inputs,
    operands: &[Operand],
    dtype: DType,
    route: Route,
) -> Run {
    run_on(op, inputs, operands, dtype, route, |x| x)
}

/// As `run`, of half operands that went through `probe`.
fn run_on<B: AutodiffBackend>(
    op: Op<B>,
    inputs: &Inputs,
    operands: &[Operand],
    dtype: DType,
    route: Route,
    probe: fn(Tensor<B, 1>) -> Tensor<B, 1>,
) -> Run {
    let leaves: Vec<Tensor<B, 1>> = operands
        .iter()
        .map(|o| tensor(&o.values, [o.values.len()], dtype).require_grad())
        .collect();
    let tensors = leaves.iter().zip(operands).map(|(leaf, operand)| {
        let x = leaf.clone();
        let x = match (operand.kind, route) {
            (Kind::Activation, Route::Cast(half)) => probe(x.cast(half)),
            (Kind::Activation, Route::Contraction) => probe(activation(x)),
            _ => x,
        };
        (x, operand.shape.clone())
    });
    let out = op(&Args {
        tensors: tensors.collect(),
    });
    let value = values(out.clone());
    let upstream = match inputs.summed {
        true => vec![1.0; value.len()],
        false => upstream(value.len()),
    };
    let upstream: Tensor<B, 1> = tensor(&upstream, [value.len()], dtype);
    let grads = (out.clone().cast(dtype) * upstream).sum().backward();
    let grads = leaves.iter().map(|leaf| {
        let grad = leaf.grad(&grads)?;
        assert_eq!(grad.dtype(), dtype, "a gradient in its leaf's dtype");
        Some(values(grad))
    });
    Run {
        dtype: out.dtype(),
        grads: grads.collect(),
        value,
    }
}

/// The gradient of the result: from 0.5 to 2, of either sign, exact in every dtype.
fn upstream(n: usize) -> Vec<f64> {
    let mut rng = Rng(3);
    let sign = |bits: u64| if bits & 1 == 0 { 1.0 } else { -1.0 };
    (0..n)
        .map(|_| {
            let bits = rng.bits();
            sign(bits) * (4 + (bits >> 8) % 13) as f64 / 8.0
        })
        .collect()
}

/// Runs a case on half operands that went through a probe.
pub fn run_probed(case: &Case, precision: Precision, probe: fn(Tensor<Amp, 1>) -> Tensor<Amp, 1>) {
    let (operands, ..) = references(case, precision);
    let unscaled = GradScaler::new(LossScaleConfig::Disabled).expect("valid");
    let route = Route::Contraction;
    let run = || run_on(case.amp, &case.inputs, &operands, DType::F32, route, probe);
    with_precision(precision, || unscaled.scope(run));
}

/// Runs every case in both halves, under both checkpointing strategies, with operands made half by the
/// user and by the policy, and reports all errors.
#[track_caller]
pub fn check(cases: &[Case]) {
    let mut wrong = String::new();
    for case in cases {
        for precision in &case.inputs.precisions {
            // A backend that cannot do an operation at all must not hide the others.
            let check = || check_in(case, *precision, &mut wrong);
            let checked = catch_unwind(AssertUnwindSafe(check));
            if let Err(panic) = checked {
                let said = said(panic.as_ref());
                writeln!(wrong, "{} in {precision} panics: {said}", case.rows).unwrap();
            }
            // With `--nocapture`, a run that is stopped tells how far it came.
            let so_far = if wrong.is_empty() {
                "right"
            } else {
                wrong.as_str()
            };
            println!("{} in {precision}, so far: {so_far}", case.rows);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

fn said(panic: &dyn Any) -> &str {
    let string = panic.downcast_ref::<String>().map(String::as_str);
    string
        .or(panic.downcast_ref::<&str>().copied())
        .unwrap_or("no text")
}

/// The errors that the check finds in plain Burn, on Flex, on tensors that are f16 throughout.
pub fn check_plain_f16(case: &Case) -> String {
    let mut wrong = String::new();
    let precision = Precision::F16;
    let (operands, fp64, fp32) = references(case, precision);
    let f16 = run(
        case.reference,
        &case.inputs,
        &operands,
        DType::F32,
        Route::Cast(DType::F16),
    );
    compare(
        case,
        case.rows,
        precision,
        [&f16, &fp32, &fp64],
        &operands,
        &mut wrong,
    );
    wrong
}

/// The reference, and the result of plain Burn in FP32.
fn exact_and_plain(case: &Case, operands: &[Operand]) -> [Run; 2] {
    let inputs = &case.inputs;
    [
        run(
            case.reference,
            inputs,
            operands,
            inputs.reference,
            Route::None,
        ),
        run(case.plain, inputs, operands, DType::F32, Route::None),
    ]
}

fn references(case: &Case, precision: Precision) -> (Vec<Operand>, Run, Run) {
    let mut operands = case.inputs.operands(precision);
    if case.inputs.pointwise {
        keep_defined(case, precision, &mut operands);
    }
    let [fp64, fp32] = exact_and_plain(case, &operands);
    (operands, fp64, fp32)
}

fn check_in(case: &Case, precision: Precision, wrong: &mut String) {
    let (operands, fp64, fp32) = references(case, precision);
    let half = half_of(precision);
    // Without a scale gradients come from the tape, with one they are looked up by leaf.
    let unscaled = GradScaler::new(LossScaleConfig::Disabled).expect("valid");
    let scaled = GradScaler::new(LossScaleConfig::Fixed(1.0)).expect("valid");
    for (scaler, route) in [(unscaled, Route::Cast(half)), (scaled, Route::Contraction)] {
        let runs = with_precision(precision, || {
            scaler.scope(|| {
                [
                    (
                        "",
                        run(case.amp, &case.inputs, &operands, DType::F32, route),
                    ),
                    (
                        "balanced, ",
                        run(case.balanced, &case.inputs, &operands, DType::F32, route),
                    ),
                ]
            })
        });
        for (strategy, run) in runs {
            let what = format!("{} in {precision}, {strategy}{route:?}", case.rows);
            compare(
                case,
                &what,
                precision,
                [&run, &fp32, &fp64],
                &operands,
                wrong,
            );
        }
    }
}

fn compare(
    case: &Case,
    what: &str,
    precision: Precision,
    [run, fp32, fp64]: [&Run; 3],
    operands: &[Operand],
    wrong: &mut String,
) {
    let tolerance = case.tolerance;
    let dtype = match tolerance.fp32 {
        true => DType::F32,
        false => half_of(precision),
    };
    if run.dtype != dtype {
        writeln!(wrong, "{what}: gives {:?}, not {dtype:?}", run.dtype).unwrap();
    }
    let half = Bound::of(precision);
    let value = match tolerance.fp32 && !tolerance.rounded {
        true => Bound::of(Precision::F32),
        false => half,
    };
    let value = value.times(tolerance.value, 0.0, tolerance.whole);
    let grad = half.times(tolerance.grad, tolerance.absolute, tolerance.whole);
    let check = |wrong: &mut String, what: &str, bound: Bound, [got, fp32, fp64]: [&[f64]; 3]| {
        if let Some(i) = bound.broken(got, fp32, fp64) {
            let at: Vec<f64> = operands
                .iter()
                .filter(|o| o.values.len() == got.len())
                .map(|o| o.values[i])
                .collect();
            writeln!(
                wrong,
                "{what} [{i}] at {at:?}: {:e}, not {:e} ({:e} in FP32)",
                got[i], fp64[i], fp32[i]
            )
            .unwrap();
        }
    };
    check(
        wrong,
        &format!("{what}, value"),
        value,
        [&run.value, &fp32.value, &fp64.value],
    );
    for i in 0..run.grads.len() {
        let what = format!("{what}, gradient {i}");
        match [run, fp32, fp64].map(|run| run.grads[i].as_deref()) {
            [Some(got), Some(fp32), Some(fp64)] => check(wrong, &what, grad, [got, fp32, fp64]),
            [None, None, None] => {}
            [got, _, fp64] => writeln!(wrong, "{what}: {got:?}, not {fp64:?}").unwrap(),
        }
    }
}

/// How far a number may be off.
#[derive(Clone, Copy)]
struct Bound {
    relative: f64,
    absolute: f64,
    whole: bool,
    subnormal: f64,
}

impl Bound {
    fn of(precision: Precision) -> Self {
        Self {
            relative: roundoff(precision),
            absolute: 0.0,
            whole: false,
            // Half the distance of subnormals.
            subnormal: match precision {
                Precision::F16 => 2f64.powi(-25),
                // Its kernels may flush them to zero, as the CPU's instruction VCVTNEPS2BF16 does.
                Precision::Bf16 if ON_LIBTORCH => f64::from(f32::MIN_POSITIVE),
                Precision::Bf16 => 2f64.powi(-134),
                _ => 2f64.powi(-150),
            },
        }
    }

    fn times(self, relative: f64, absolute: f64, whole: bool) -> Self {
        Self {
            relative: self.relative * relative,
            absolute: self.relative * absolute,
            whole,
            subnormal: self.subnormal * relative,
        }
    }

    /// The first element that is further off. Where plain Burn in FP32 is off too, twice its error is
    /// allowed: that is the accuracy that mixed precision promises.
    fn broken(self, got: &[f64], fp32: &[f64], fp64: &[f64]) -> Option<usize> {
        assert_eq!(got.len(), fp64.len());
        let largest = fp64.iter().fold(0f64, |max, x| max.max(x.abs()));
        (0..got.len()).find(|i| {
            let [got, fp32, fp64] = [got, fp32, fp64].map(|all| all[*i]);
            if got == fp64 {
                return false;
            }
            let size = if self.whole { largest } else { fp64.abs() };
            let bound = self.relative * size + self.absolute + self.subnormal;
            let off = (got - fp64).abs();
            off.is_nan() || off > bound + 2.0 * (fp32 - fp64).abs()
        })
    }
}

/// Where a case of points or pairs is checked, each operand's values in a column.
pub fn checked_points(case: &Case, precision: Precision) -> Vec<Vec<f64>> {
    let (operands, ..) = references(case, precision);
    (0..operands[0].values.len())
        .map(|i| operands.iter().map(|o| o.values[i]).collect())
        .collect()
}

/// Keeps the points where value and gradients are defined in FP64 and FP32 and fit their dtypes.
fn keep_defined(case: &Case, precision: Precision, operands: &mut [Operand]) {
    let largest = half_of(precision).finfo().expect("a float dtype").max;
    let fits = |run: &Run, i: usize| {
        let limit = match case.tolerance.fp32 {
            true => f64::from(f32::MAX),
            false => largest,
        };
        run.value[i].abs() <= limit
            && run
                .grads
                .iter()
                .flatten()
                .all(|grad| grad[i].abs() <= largest / 4.0)
    };
    let [fp64, fp32] = exact_and_plain(case, operands);
    let kept: Vec<usize> = (0..fp64.value.len())
        .filter(|i| fits(&fp64, *i) && fits(&fp32, *i))
        .collect();
    assert!(
        kept.len() >= 8,
        "{}: defined at {} points",
        case.rows,
        kept.len()
    );
    for operand in operands {
        operand.values = kept.iter().map(|i| operand.values[*i]).collect();
        operand.shape = vec![kept.len()];
    }
}
