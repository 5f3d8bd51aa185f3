//! Half precision beside FP32: what a model computes in each, and where the two part.

use std::collections::{HashMap, HashSet};
use std::fmt;

use burn_amp_core::{counted, grouped};
use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_core::tensor::{ElementConversion, Tensor};
use burn_optim::GradientsParams;
use serde::{Deserialize, Serialize};

use super::gradients::{for_each_parameter, nodes};
use crate::autodiff::generic::is_amp;
use crate::diagnostics::compare::{Call, Calls, distance, recorded};
use crate::{
    AmpError, DynamicLossScale, GradScaler, LossScaleConfig, Precision, full_precision,
    precision_of,
};

/// Half precision beside FP32, by [`compare`]. Printed, it is a table; serde keeps every field.
///
/// A share is a distance of values from those in FP32, divided by the latter's norm: `‖half - FP32‖ / ‖FP32‖`. One
/// rounding to f16 makes up to 4.9e-4 of it, and one to bf16 3.9e-3. Infinite shares mean values that are finite in one of the two
/// alone, or that are all 0 in FP32.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Comparison {
    /// The half precision that was compared.
    pub precision: Precision,
    /// The loss in half precision.
    pub loss: f32,
    /// The loss in FP32.
    pub loss_in_fp32: f32,
    /// The loss scale at which the gradients in f16 were finite; 1 in bf16.
    pub loss_scale: f32,
    /// The operations of the forward pass whose values are not FP32's, in the order of their first call.
    pub operations: Vec<ComparedOperation>,
    /// The parameters that have a gradient, in module order.
    pub gradients: Vec<ComparedGradient>,
    /// The first call of the forward pass that FP32 did not make, if there is one: from there on, the program went
    /// another way.
    pub diverged_at: Option<String>,
    /// How many calls were not compared: 20,000 are.
    pub calls_left_out: usize,
}

/// The calls of an operation on operands of these shapes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ComparedOperation {
    /// The operation's name, without `float_`.
    pub op: String,
    /// The shapes of its float operands.
    pub shapes: Vec<Vec<usize>>,
    /// The path of the first parameter among the operands.
    pub parameter: Option<String>,
    /// How many calls there were.
    pub calls: usize,
    /// What half precision adds here, at most: the share by which a result differs from FP32's on the same operands.
    pub added: f64,
    /// What has come together here, at most: the share by which a result differs from the run in FP32.
    pub total: f64,
    /// Whether the total is at least 4 times that of each operation before, and more than 10 roundings: here an error
    /// grows, as where two numbers that are nearly equal are subtracted.
    pub grows: bool,
}

/// The gradient of a parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ComparedGradient {
    /// The path of the parameter.
    pub parameter: String,
    /// The share by which the gradient differs from FP32's.
    pub total: f64,
    /// The norm of the gradient in FP32.
    pub norm: f64,
}

/// Compares half precision with FP32, on one loss and its gradients: once in the half precision in force on the model's
/// device, where each operation is computed in FP32 on the same operands as well, and once in FP32 from the same `seed`.
/// `loss` gets the model. Answers why a model trains worse in half precision; PyTorch's Numeric Suite does this for
/// quantized models.
///
/// The model is afterwards what it was, with its running statistics, and so are the device's loss scale and its counts. No
/// backend of Burn tells the state of its random numbers: they go on from `seed`.
///
/// For debugging, outside of a training step: each result is read back. At most 20,000 calls are compared, with 256 values of
/// each, of the operations whose result is one float tensor, but for `cat` and a program's own operations. The gradients of
/// both runs are kept on the host. A region inside `loss` decides in both runs.
///
/// # Errors
///
/// - [`AmpError::NothingToCompare`] when the precision in force is FP32, or the backend is no `AmpAutodiff`.
/// - [`AmpError::UnsupportedPrecision`] when a region requests a precision that the device lacks.
///
/// ```
/// use burn::{backend::Flex, nn::{Linear, LinearConfig}, tensor::{Distribution, Tensor}};
/// use burn_amp::{AmpAutodiff, Precision, compare, with_precision};
///
/// type B = AmpAutodiff<Flex>;
/// let device = Default::default();
/// let model: Linear<B> = LinearConfig::new(8, 8).init(&device);
/// let report = with_precision(Precision::Bf16, || {
///     compare(&model, 42, |model| {
///         let x = Tensor::<B, 2>::random([4, 8], Distribution::Default, &device);
///         model.forward(x).tanh().mean()
///     })
/// })?;
/// println!("{report}");
/// assert_eq!(report.operations[0].op, "linear");
/// assert!(report.operations[0].added < 0.01 && report.gradients.len() == 2);
/// # Ok::<(), burn_amp::AmpError>(())
/// ```
pub fn compare<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    seed: u64,
    loss: impl Fn(&M) -> Tensor<B, 1>,
) -> Result<Comparison, AmpError> {
    let device = model.devices().into_iter().next().unwrap_or_default();
    let precision = precision_of::<B>(&device)?;
    if !precision.is_half() || !is_amp::<B>() {
        return Err(AmpError::NothingToCompare { precision });
    }
    let run = |compares, scale| {
        // A clone of a model shares its running statistics.
        let before = model.clone().into_record();
        B::seed(&device, seed);
        let (loss, calls) = recorded(compares, || loss(model));
        let value: f32 = loss.clone().inner().sum().into_scalar().elem();
        // The device's own scaler counts no step of this.
        let scaler = GradScaler::new(LossScaleConfig::Fixed(scale))?;
        let grads = scaler.scope(|| loss.backward());
        let grads = GradientsParams::from_grads(grads, model);
        // Statistics that no thread has collected yet are part of a record.
        drop(model.clone().into_record());
        let _ = model.clone().load_record(before);
        Ok::<_, AmpError>((value, calls, gradients::<B, M>(model, &grads)))
    };
    let mut loss_scale = match precision.scales_loss() {
        true => DynamicLossScale::default().init_scale,
        false => 1.0,
    };
    let (half, exact) = loop {
        let half = run(true, loss_scale)?;
        if !half.2.is_empty() || loss_scale <= 1.0 || !half.0.is_finite() {
            break (half, full_precision(|| run(false, 1.0))?);
        }
        loss_scale /= 16.0;
    };
    let paths: HashMap<_, _> = nodes::<B, M>(model).into_iter().collect();
    let (operations, diverged_at) = operations(precision, &half.1, &exact.1, &paths);
    Ok(Comparison {
        precision,
        loss: half.0,
        loss_in_fp32: exact.0,
        loss_scale,
        operations,
        gradients: compared(&half.2, &exact.2),
        diverged_at,
        calls_left_out: half.1.more,
    })
}

/// The gradients, in module order, each parameter once.
fn gradients<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    grads: &GradientsParams,
) -> Vec<(String, Vec<f64>)> {
    let mut found: Vec<(String, Vec<f64>)> = Vec::new();
    let mut seen = HashSet::new();
    for_each_parameter::<B, M>(model, |id, path, _| {
        let grad = grads
            .get::<B::InnerBackend, 1>(id)
            .filter(|_| seen.insert(id));
        found.extend(grad.map(|grad| (path.join("."), grad.into_data().iter().collect())));
    });
    found
}

fn compared(half: &[(String, Vec<f64>)], exact: &[(String, Vec<f64>)]) -> Vec<ComparedGradient> {
    let half: HashMap<_, _> = half.iter().map(|(path, grad)| (path, grad)).collect();
    let of = |(path, exact): &(String, Vec<f64>)| ComparedGradient {
        parameter: path.clone(),
        total: half
            .get(path)
            .map_or(f64::INFINITY, |half| distance(half, exact)),
        norm: exact.iter().map(|x| x.powi(2)).sum::<f64>().sqrt(),
    };
    exact.iter().map(of).collect()
}

/// The operations that differ, and the first call that FP32 did not make.
fn operations(
    precision: Precision,
    half: &Calls,
    exact: &Calls,
    paths: &HashMap<u64, String>,
) -> (Vec<ComparedOperation>, Option<String>) {
    let (mut found, mut diverged): (Vec<ComparedOperation>, _) = (Vec::new(), None);
    let mut exact = exact.calls.iter();
    let roundings = 10.0 * rounding(precision);
    let mut largest = roundings / 4.0;
    for call in &half.calls {
        let other = exact.next();
        let is_same = |other: &&Call| other.op == call.op && other.shapes == call.shapes;
        if diverged.is_none() && other.filter(is_same).is_none() {
            diverged = Some(format!("{} {:?}", call.op, call.shapes));
        }
        let total = match (&diverged, other) {
            (None, Some(other)) => distance(&call.values, &other.values),
            _ => 0.0,
        };
        // Behind what is infinite, all that follows from it is.
        let grows = largest.is_finite() && total >= 4.0 * largest;
        largest = largest.max(total);
        let parameter = call.leaf.and_then(|leaf| paths.get(&leaf).cloned());
        let is_alike = |of: &&mut ComparedOperation| {
            of.op == call.op && of.shapes == call.shapes && of.parameter == parameter
        };
        match found.iter_mut().find(is_alike) {
            Some(of) => {
                of.calls += 1;
                of.added = of.added.max(call.added);
                of.total = of.total.max(total);
                of.grows |= grows;
            }
            None => found.push(ComparedOperation {
                op: call.op.into(),
                shapes: call.shapes.clone(),
                parameter,
                calls: 1,
                added: call.added,
                total,
                grows,
            }),
        }
    }
    found.retain(|of| of.added > 0.0 || of.total > 0.0);
    (found, diverged)
}

/// The largest share of one rounding.
fn rounding(precision: Precision) -> f64 {
    match precision {
        Precision::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    }
}

/// How many rows a table prints. The fields have all of them.
const ROWS: usize = 12;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = self.precision;
        let share = distance(&[self.loss.into()], &[self.loss_in_fp32.into()]);
        writeln!(
            f,
            "loss        {} in {half} and {} in FP32, {share:.1e} of it apart",
            self.loss, self.loss_in_fp32
        )?;
        if let Some(call) = &self.diverged_at {
            writeln!(
                f,
                "diverged    the program went another way in {half}, from {call} on: totals end there"
            )?;
        }
        if let Some(more) = counted(self.calls_left_out as u64, "call", "calls") {
            writeln!(f, "left out    {more}")?;
        }
        let mut first: Vec<_> = self.operations.iter().collect();
        first.sort_by(|a, b| b.added.total_cmp(&a.added));
        table(f, "where half adds most", &first)?;
        let grown: Vec<_> = self.operations.iter().filter(|of| of.grows).collect();
        table(f, "where an error grows, in order", &grown)?;
        let mut gradients = self.of_weight();
        gradients.sort_by(|a, b| b.total.total_cmp(&a.total));
        if !gradients.is_empty() {
            writeln!(
                f,
                "gradients that differ most\n   total      norm  parameter"
            )?;
        }
        for of in gradients.iter().take(ROWS) {
            writeln!(f, "{:8.1e}  {:8.1e}  {}", of.total, of.norm, of.parameter)?;
        }
        for suggestion in self.suggestions() {
            writeln!(f, "try         {suggestion}")?;
        }
        Ok(())
    }
}

fn table(f: &mut fmt::Formatter<'_>, title: &str, rows: &[&ComparedOperation]) -> fmt::Result {
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(f, "{title}\n   added     total  calls  operation")?;
    for of in rows.iter().take(ROWS) {
        write!(
            f,
            "{:8.1e}  {:8.1e}  {:>5}  {}",
            of.added,
            of.total,
            grouped(of.calls as u64),
            of.op
        )?;
        of.shapes
            .iter()
            .try_for_each(|shape| write!(f, " {shape:?}"))?;
        match &of.parameter {
            Some(parameter) => writeln!(f, ", {parameter}")?,
            None => writeln!(f)?,
        }
    }
    match rows.len().saturating_sub(ROWS) {
        0 => Ok(()),
        more => writeln!(f, "          and {more} more (see `operations`)"),
    }
}

impl Comparison {
    /// The gradients that are no remains of zeros, such as that of a bias before a batch norm.
    fn of_weight(&self) -> Vec<&ComparedGradient> {
        let largest = self.gradients.iter().map(|of| of.norm).fold(0.0, f64::max);
        let all = self.gradients.iter();
        all.filter(|of| of.norm > 1e-4 * largest).collect()
    }

    /// What to try, the most promising first. Empty if half is as near to FP32 as its roundings.
    pub fn suggestions(&self) -> Vec<String> {
        let rounding = rounding(self.precision);
        let mut all = Vec::new();
        if let Some(of) = self.operations.iter().find(|of| of.grows) {
            all.push(format!(
                "full_precision around {} and what computes its operands: the error grows there to {:.1e}",
                of.op, of.total
            ));
        }
        let mut inexact: Vec<&ComparedOperation> = Vec::new();
        for of in &self.operations {
            let is_named = inexact.iter().any(|before| before.op == of.op);
            if of.added > 4.0 * rounding && !is_named {
                inexact.push(of);
            }
        }
        for of in inexact.into_iter().take(3) {
            all.push(format!(
                "AmpConfig::with_op({:?}, OpPrecision::F32): its kernel in {} is off by {:.1e} on {:?}",
                of.op, self.precision, of.added, of.shapes
            ));
        }
        let largest = self
            .of_weight()
            .iter()
            .map(|of| of.total)
            .fold(0.0, f64::max);
        if self.precision == Precision::Bf16 && largest > 8.0 * rounding {
            all.push("f16, which rounds an eighth as much, if the device computes in it".into());
        }
        if self.precision == Precision::F16 && (largest.is_infinite() || self.loss_scale < 256.0) {
            all.push("bf16, which has the range of FP32, if the device computes in it".into());
        }
        all
    }
}
