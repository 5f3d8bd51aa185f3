//! Which operations a device computes in half as exactly as half can be, found out by trying them.
//!
//! There are kernels that add up products in half: a sum of 4,096 ones is then 2,048. Others
//! compute a function in half throughout, and lose its last bits or its small results. What is not
//! exact computes in FP32 on that device, on operands that are rounded to half, and gives half: the
//! values of a device that is exact.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use burn_backend::ops::{ConvOptions, ConvTransposeOptions};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorData};

use crate::device::{self, DeviceKey};
use crate::policy::{self, Class, HalfSupport, same};

/// Operations among those that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpSet(u32);

impl OpSet {
    pub(crate) const NONE: Self = Self(0);

    /// The operation of a name; none if it is not tried.
    pub(crate) const fn of(name: &str) -> Self {
        let mut i = 0;
        while i < TRIED.len() {
            if same(TRIED[i], name) {
                return Self(1 << i);
            }
            i += 1;
        }
        Self::NONE
    }

    pub(crate) fn is_none(self) -> bool {
        self == Self::NONE
    }

    pub(crate) fn contains(self, op: Self) -> bool {
        self.0 & op.0 != 0
    }

    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
        TRIED
            .into_iter()
            .filter(move |op| self.contains(Self::of(op)))
    }
}

/// Makes the operands of a trial.
struct Operands<'a, B: Backend> {
    device: &'a B::Device,
    half: FloatDType,
    /// That the trial computes in: the same, or FP32.
    dtype: FloatDType,
}

impl<B: Backend> Operands<'_, B> {
    fn ones<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        self.make(vec![1.0; shape.iter().product()], shape)
    }

    /// Ones, and in their middle what f16 and bf16 cannot count on from in steps of one: for sums
    /// of few terms, in whatever order.
    fn peak<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<B> {
        let mut values = vec![1.0; shape.iter().product()];
        let middle = values.len() / 2;
        values[middle] = 2048.0;
        self.make(values, shape)
    }

    /// What is lost near zero, at a bend and at the end of the range.
    fn points(&self) -> FloatTensor<B> {
        let points = [
            6.2e-5, -1e-3, 0.02, -0.1, 0.5, -1.0, 1.7, -3.0, 3.93, -7.0, 256.0, 60_000.0,
        ];
        self.make(points.to_vec(), [12])
    }

    /// Values that half holds, also where FP32 is computed in.
    fn make<const D: usize>(&self, values: Vec<f32>, shape: [usize; D]) -> FloatTensor<B> {
        let values = B::float_from_data(TensorData::new(values, shape), self.device);
        B::float_cast(B::float_cast(values, self.half), self.dtype)
    }
}

type Trial<B> = fn(&Operands<B>) -> FloatTensor<B>;

/// The operations, each with the calls that it is tried by.
macro_rules! trials {
    ($($op:ident [$($of:ident => $call:expr),+ $(,)?];)*) => {
        const TRIED: [&str; [$(stringify!($op)),*].len()] = [$(stringify!($op)),*];

        struct Trials<B>(PhantomData<B>);

        impl<B: Backend> Trials<B> {
            const OF: [&'static [Trial<B>]; TRIED.len()] = [$(&[$(|$of| $call),+]),*];
        }
    };
}

/// Terms of a sum: beyond what f16 (2,048) and bf16 (256) can count to.
const N: usize = 4096;

// One row selects another kernel than many, as do few channels, and taps instead of channels.
#[rustfmt::skip]
trials! {
    float_matmul [
        m => B::float_matmul(m.ones([1, N]), m.ones([N, 1])),
        m => B::float_matmul(m.ones([1, N]), m.ones([N, 8])),
        m => B::float_matmul(m.ones([8, N]), m.ones([N, 8])),
        m => B::float_matmul(m.ones([2, 1, N]), m.ones([2, N, 8])),
    ];
    linear [
        m => B::linear(m.ones([1, N]), m.ones([N, 8]), None),
        m => B::linear(m.ones([8, N]), m.ones([N, 8]), None),
    ];
    linear_x_backward [
        m => B::linear_x_backward(m.ones([8, N]), m.ones([1, N])),
        m => B::linear_x_backward(m.ones([8, N]), m.ones([8, N])),
    ];
    linear_weight_backward [
        m => B::linear_weight_backward(m.ones([N, 8]), m.ones([N, 8])),
        m => B::linear_weight_backward(m.ones([N, 1]), m.ones([N, 1])),
    ];
    conv1d [
        m => B::conv1d(m.ones([1, N, 2]), m.ones([4, N, 1]), None, conv()),
        m => B::conv1d(m.ones([1, 1, 64]), m.peak([1, 1, 64]), None, conv()),
    ];
    conv1d_x_backward [
        m => B::conv1d_x_backward(m.ones([1, 4, 2]), m.ones([N, 4, 1]), m.ones([1, N, 2]), conv()),
        m => B::conv1d_x_backward(m.ones([1, 1, 127]), m.peak([1, 1, 64]), m.ones([1, 1, 64]), conv()),
    ];
    conv1d_weight_backward [
        m => B::conv1d_weight_backward(m.ones([2, 8, N / 2]), m.ones([8, 8, 1]), m.ones([2, 8, N / 2]), conv()),
        m => B::conv1d_weight_backward(m.ones([2, 1, N / 2]), m.ones([1, 1, 1]), m.ones([2, 1, N / 2]), conv()),
    ];
    conv2d [
        m => B::conv2d(m.ones([1, N, 2, 2]), m.ones([4, N, 1, 1]), None, conv()),
        m => B::conv2d(m.ones([1, 1, 8, 8]), m.peak([1, 1, 8, 8]), None, conv()),
    ];
    conv2d_x_backward [
        m => B::conv2d_x_backward(m.ones([1, 4, 2, 2]), m.ones([N, 4, 1, 1]), m.ones([1, N, 2, 2]), conv()),
        m => B::conv2d_x_backward(m.ones([1, 1, 15, 15]), m.peak([1, 1, 8, 8]), m.ones([1, 1, 8, 8]), conv()),
    ];
    conv2d_weight_backward [
        m => B::conv2d_weight_backward(m.ones([4, 8, 32, 32]), m.ones([8, 8, 1, 1]), m.ones([4, 8, 32, 32]), conv()),
        m => B::conv2d_weight_backward(m.ones([4, 1, 32, 32]), m.ones([1, 1, 1, 1]), m.ones([4, 1, 32, 32]), conv()),
    ];
    conv3d [
        m => B::conv3d(m.ones([1, N, 1, 2, 2]), m.ones([4, N, 1, 1, 1]), None, conv()),
        m => B::conv3d(m.ones([1, 1, 4, 4, 4]), m.peak([1, 1, 4, 4, 4]), None, conv()),
    ];
    conv3d_x_backward [
        m => B::conv3d_x_backward(m.ones([1, 4, 1, 2, 2]), m.ones([N, 4, 1, 1, 1]), m.ones([1, N, 1, 2, 2]), conv()),
        m => B::conv3d_x_backward(m.ones([1, 1, 7, 7, 7]), m.peak([1, 1, 4, 4, 4]), m.ones([1, 1, 4, 4, 4]), conv()),
    ];
    conv3d_weight_backward [
        m => B::conv3d_weight_backward(m.ones([1, 8, 16, 16, 16]), m.ones([8, 8, 1, 1, 1]), m.ones([1, 8, 16, 16, 16]), conv()),
        m => B::conv3d_weight_backward(m.ones([1, 1, 16, 16, 16]), m.ones([1, 1, 1, 1, 1]), m.ones([1, 1, 16, 16, 16]), conv()),
    ];
    conv_transpose1d [
        m => B::conv_transpose1d(m.ones([1, N, 2]), m.ones([N, 4, 1]), None, transpose()),
        m => B::conv_transpose1d(m.ones([1, 1, 64]), m.peak([1, 1, 64]), None, transpose()),
    ];
    conv_transpose1d_x_backward [
        m => B::conv_transpose1d_x_backward(m.ones([4, N, 1]), m.ones([1, N, 2]), transpose()),
        m => B::conv_transpose1d_x_backward(m.peak([1, 1, 64]), m.ones([1, 1, 127]), transpose()),
    ];
    conv_transpose1d_weight_backward [
        m => B::conv_transpose1d_weight_backward(m.ones([2, 8, N / 2]), m.ones([8, 8, 1]), m.ones([2, 8, N / 2]), transpose()),
        m => B::conv_transpose1d_weight_backward(m.ones([2, 1, N / 2]), m.ones([1, 1, 1]), m.ones([2, 1, N / 2]), transpose()),
    ];
    conv_transpose2d [
        m => B::conv_transpose2d(m.ones([1, N, 2, 2]), m.ones([N, 4, 1, 1]), None, transpose()),
        m => B::conv_transpose2d(m.ones([1, 1, 8, 8]), m.peak([1, 1, 8, 8]), None, transpose()),
    ];
    conv_transpose2d_x_backward [
        m => B::conv_transpose2d_x_backward(m.ones([4, N, 1, 1]), m.ones([1, N, 2, 2]), transpose()),
        m => B::conv_transpose2d_x_backward(m.peak([1, 1, 8, 8]), m.ones([1, 1, 15, 15]), transpose()),
    ];
    conv_transpose2d_weight_backward [
        m => B::conv_transpose2d_weight_backward(m.ones([4, 8, 32, 32]), m.ones([8, 8, 1, 1]), m.ones([4, 8, 32, 32]), transpose()),
        m => B::conv_transpose2d_weight_backward(m.ones([4, 1, 32, 32]), m.ones([1, 1, 1, 1]), m.ones([4, 1, 32, 32]), transpose()),
    ];
    conv_transpose3d [
        m => B::conv_transpose3d(m.ones([1, N, 1, 2, 2]), m.ones([N, 4, 1, 1, 1]), None, transpose()),
        m => B::conv_transpose3d(m.ones([1, 1, 4, 4, 4]), m.peak([1, 1, 4, 4, 4]), None, transpose()),
    ];
    conv_transpose3d_x_backward [
        m => B::conv_transpose3d_x_backward(m.ones([4, N, 1, 1, 1]), m.ones([1, N, 1, 2, 2]), transpose()),
        m => B::conv_transpose3d_x_backward(m.peak([1, 1, 4, 4, 4]), m.ones([1, 1, 7, 7, 7]), transpose()),
    ];
    conv_transpose3d_weight_backward [
        m => B::conv_transpose3d_weight_backward(m.ones([1, 8, 16, 16, 16]), m.ones([8, 8, 1, 1, 1]), m.ones([1, 8, 16, 16, 16]), transpose()),
        m => B::conv_transpose3d_weight_backward(m.ones([1, 1, 16, 16, 16]), m.ones([1, 1, 1, 1, 1]), m.ones([1, 1, 16, 16, 16]), transpose()),
    ];
    float_tanh [m => B::float_tanh(m.points())];
    gelu [m => B::gelu(m.points())];
    float_atan [m => B::float_atan(m.points())];
    float_atan2 [m => B::float_atan2(m.points(), m.make(vec![256.0; 12], [12]))];
}

fn conv<const D: usize>() -> ConvOptions<D> {
    ConvOptions::new([1; D], [0; D], [1; D], 1)
}

fn transpose<const D: usize>() -> ConvTransposeOptions<D> {
    ConvTransposeOptions::new([1; D], [0; D], [0; D], [1; D], 1)
}

/// What a device is not exact in, in a half dtype: tried once in the life of a process.
///
/// An operation that the backend does not have is exact, for nobody uses it.
pub(crate) fn of<B: Backend>(device: &B::Device, half: DType) -> OpSet {
    let key = (device::key::<B>(device), half);
    if let Some(found) = lock(&FOUND).get(&key) {
        return *found;
    }
    let mut found = OpSet::NONE;
    let arithmetic = device::current::<B>(device).support().of(half) == HalfSupport::Arithmetic;
    for (i, trials) in Trials::<B>::OF.into_iter().enumerate() {
        // A device that only contracts in half computes nothing else in it.
        if !arithmetic && policy::class(TRIED[i]) != Class::Half {
            continue;
        }
        let exact = || {
            trials
                .iter()
                .all(|trial| is_exact::<B>(*trial, device, half))
        };
        if let Ok(false) = catch_unwind(AssertUnwindSafe(exact)) {
            found.0 |= 1 << i;
        }
    }
    *lock(&FOUND).entry(key).or_insert(found)
}

/// Whether every value in half is that in FP32, rounded: within one rounding and a quarter, for
/// FP32 is not exact either.
fn is_exact<B: Backend>(trial: Trial<B>, device: &B::Device, half: DType) -> bool {
    let values = |dtype: DType| {
        let (half, dtype) = (half.into(), dtype.into());
        let result = trial(&Operands {
            device,
            half,
            dtype,
        });
        let result = B::float_cast(result, FloatDType::F32);
        let data = burn_backend::read_sync(B::float_into_data(result));
        data.map(|data| data.iter::<f32>().collect::<Vec<_>>())
    };
    let (Ok(half_values), Ok(expected)) = (values(half), values(DType::F32)) else {
        return true;
    };
    // The last: the smallest number of f16.
    let rounding = if half == DType::F16 { 11 } else { 8 };
    let relative = 1.25 * 2f32.powi(-rounding);
    let close = |(h, e): (&f32, &f32)| (h - e).abs() <= e.abs() * relative + 6e-8;
    half_values.iter().zip(&expected).all(close)
}

type Begin = fn(&dyn Any, DType);

static FOUND: LazyLock<Mutex<HashMap<(DeviceKey, DType), OpSet>>> = LazyLock::new(Mutex::default);
static BEGIN: LazyLock<Mutex<HashMap<TypeId, Begin>>> = LazyLock::new(Mutex::default);

/// What was found for a device so far.
pub(crate) fn known<B: Backend>(device: &B::Device, half: DType) -> Option<OpSet> {
    let key = (device::key::<B>(device), half);
    lock(&FOUND).get(&key).copied()
}

/// Tells how to try devices of this backend, where it is no layer above one.
pub(crate) fn register<B: Backend>(device: &B::Device) {
    if !B::ad_enabled(device) {
        let begin: Begin = |device, half| {
            if let Some(device) = device.downcast_ref() {
                device::inexact::<B>(device, half);
            }
        };
        lock(&BEGIN)
            .entry(TypeId::of::<B::Device>())
            .or_insert(begin);
    }
}

/// Tries a device now, rather than when it first computes in half.
pub(crate) fn begin<B: Backend>(device: &B::Device, half: DType) {
    let begin = lock(&BEGIN).get(&TypeId::of::<B::Device>()).copied();
    match begin {
        Some(begin) => begin(device, half),
        // The backend itself, on which no layer was used yet.
        None if !B::ad_enabled(device) => drop(device::inexact::<B>(device, half)),
        None => {}
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
