//! What a contraction should give: samples of its result, summed on the host in FP64.
//!
//! The samples are a grid: a few indices along each axis of the result, the first and the last among them. Of the operands
//! are read the rows, windows and channels that these samples sum.

use half::{bf16, f16};

use crate::FloatDType;
use crate::policy::{Convolution, Op};

/// An axis of a product, by its place among the axes of the operands and of the result. One without a place in the
/// result is summed.
#[derive(Debug, Clone, Copy)]
struct Axis {
    first: Option<usize>,
    second: Option<usize>,
    out: Option<usize>,
}

/// Which tensor of a convolution is the result. At output `o` and tap `k` it multiplies the value of its input at
/// `o * stride + k * dilation - padding`: the `Wide` tensor `[batch, in, ..]`, the `Narrow` one `[batch, out, ..]` and
/// the weight `[out, in / groups, ..]` are the input, the output and the weight of a convolution, and the output, the
/// input and the weight of a transposed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Wide,
    Narrow,
    Weight,
}

#[derive(Debug)]
enum Form {
    Product(Vec<Axis>),
    Convolution(Of, Convolution),
}

/// The indices that are read along some axes of a tensor: `(axis, indices)`. All of the other axes is read.
#[doc(hidden)]
pub type Taken = Vec<(usize, Vec<usize>)>;

/// What of a contraction is compared.
#[derive(Debug)]
#[doc(hidden)]
pub struct Reference {
    form: Form,
    /// Of the two operands and of the result, as they are read.
    shapes: [Vec<usize>; 3],
    taken: [Taken; 3],
    /// The axis of the result along which a bias is added.
    channels: usize,
    /// The whole shape of the result.
    whole: Vec<usize>,
}

/// What samples of a result tell.
#[derive(Debug, Clone, Copy, PartialEq)]
#[doc(hidden)]
pub enum Verdict {
    /// Each is right.
    Right,
    /// This one is furthest off.
    Wrong {
        /// What the device gave.
        found: f32,
        /// What is right.
        right: f32,
    },
    /// They tell nothing: the operands are zero, all equal, or not finite.
    Silent,
}

/// The samples along an axis, from more to fewer.
const SAMPLES: [usize; 5] = [6, 4, 3, 2, 1];
/// At most so many values of an operand are read.
const READ: usize = 1 << 23;
/// At most so many products are summed.
const PRODUCTS: usize = 1 << 24;

/// The places of the operands that are multiplied, in the order that a [`Reference`] has them.
#[doc(hidden)]
pub fn multiplied(op: &Op) -> [usize; 2] {
    let is = |ending| op.name.ends_with(ending);
    match (
        op.name.starts_with("conv_transpose"),
        op.name.starts_with("conv"),
    ) {
        (true, _) if is("_x_backward") => [1, 0],
        (true, _) if is("_weight_backward") => [2, 0],
        (false, true) if is("_x_backward") => [2, 1],
        (false, true) if is("_weight_backward") => [0, 2],
        _ => [0, 1],
    }
}

impl Reference {
    /// The reference of an operation on operands of these shapes, in the order of [`multiplied`], with a result of this
    /// shape. `None` if it is no contraction, or too large.
    pub fn of(op: &Op, [first, second]: [&[usize]; 2], out: &[usize]) -> Option<Self> {
        let (ranks, is) = ((first.len(), second.len()), |ending| {
            op.name.ends_with(ending)
        });
        let form = match op.convolution {
            Some(options) => {
                let transposed = op.name.starts_with("conv_transpose");
                let of = match transposed {
                    _ if is("_weight_backward") => Of::Weight,
                    transposed if transposed != is("_x_backward") => Of::Wide,
                    _ => Of::Narrow,
                };
                Form::Convolution(of, options)
            }
            None => Form::Product(axes(op.name, ranks)?),
        };
        SAMPLES
            .into_iter()
            .find_map(|samples| {
                let all = [first, second, out];
                let (taken, products) = match &form {
                    Form::Product(axes) => of_product(axes, all, samples),
                    Form::Convolution(of, options) => of_convolution(*of, options, all, samples),
                };
                let shapes = [0, 1, 2].map(|tensor| {
                    let mut shape = all[tensor].to_vec();
                    for (axis, indices) in &taken[tensor] {
                        shape[*axis] = indices.len();
                    }
                    shape
                });
                let read: [usize; 3] = shapes.each_ref().map(|shape| shape.iter().product());
                let fits = read[0].max(read[1]) <= READ && read[2] * products <= PRODUCTS;
                fits.then_some((shapes, taken))
            })
            .map(|(shapes, taken)| Self {
                channels: match form {
                    Form::Product(_) => out.len() - 1,
                    Form::Convolution(..) => 1,
                },
                form,
                shapes,
                taken,
                whole: out.to_vec(),
            })
    }

    /// What is read of the two operands and of the result.
    pub fn taken(&self) -> &[Taken; 3] {
        &self.taken
    }

    /// The indices of a bias.
    pub fn of_bias(&self) -> &[usize] {
        self.out_indices(self.channels)
    }

    fn out_indices(&self, axis: usize) -> &[usize] {
        let (_, indices) = &self.taken[2][axis];
        indices
    }

    /// Compares a result in `half` with the sums of these values: each sample may be one rounding off, a second one where a
    /// bias is added, and what a sum in FP32 adds. A quarter of a rounding is allowed for each term of it: tensor cores
    /// cut off what a sum of 16 products does not hold, and sums of like terms round alike.
    pub fn compared<D: FloatDType>(
        &self,
        half: D,
        [first, second, out]: [&[f32]; 3],
        bias: Option<&[f32]>,
    ) -> Verdict {
        let [first, second] = [first, second].map(|values| rounded(half, values));
        let bias = bias.map(|values| rounded(half, values));
        let (unit, least, largest) = match half == D::F16 {
            true => (
                2f64.powi(-11),
                f16::MIN_POSITIVE.to_f64(),
                f16::MAX.to_f64(),
            ),
            false => (
                2f64.powi(-8),
                bf16::MIN_POSITIVE.to_f64(),
                bf16::MAX.to_f64(),
            ),
        };
        let mut worst: Option<(f64, f32, f32)> = None;
        let (mut told, mut samples) = (0, 0);
        self.for_each(&first, &second, least, |at, channel, sum| {
            let added = bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
            let (right, found) = (sum.value + added, f64::from(out[at]));
            let roundings = 1.25 * right.abs() + if bias.is_some() { sum.value.abs() } else { 0.0 };
            let summed =
                (0.25 * sum.terms as f64 + 8.0) * 2f64.powi(-24) * (sum.size + added.abs());
            // Devices may flush what is below the smallest normal number, of an operand as of a result.
            let allowed = roundings * unit + summed + sum.flushed + least;
            // Beside a stride, a gradient may sum nothing.
            samples += usize::from(sum.terms > 0);
            if !sum.size.is_finite() || right.abs() >= largest {
                return;
            }
            // A sum that may be this far off shows no kernel to be right.
            told += usize::from(sum.terms > 0 && allowed < right.abs() / 4.0);
            let off = (found - right).abs() / allowed;
            let off = if off.is_nan() { f64::INFINITY } else { off };
            // An infinity may be right near the largest number.
            let is_edge = found.is_infinite() && right.abs() > 0.999 * largest;
            if off > 1.0 && !is_edge && worst.is_none_or(|(worst, ..)| off > worst) {
                worst = Some((off, found as f32, right as f32));
            }
        });
        let is_uniform = |values: &[f32]| values.iter().all(|value| *value == values[0]);
        match worst {
            Some((_, found, right)) => Verdict::Wrong { found, right },
            None if told == 0
                || 4 * told < samples
                || is_uniform(&first) && is_uniform(&second) =>
            {
                Verdict::Silent
            }
            None => Verdict::Right,
        }
    }

    /// Each sample: its place in what is read of the result, that of its bias, and its sum.
    fn for_each(
        &self,
        first: &[f32],
        second: &[f32],
        least: f64,
        mut each: impl FnMut(usize, usize, Sum),
    ) {
        let shape = &self.shapes[2];
        let samples: usize = shape.iter().product();
        let strides = self.shapes.each_ref().map(|shape| strides(shape));
        let terms: Vec<Vec<Term>> = match &self.form {
            Form::Product(axes) => axes
                .iter()
                .filter_map(|axis| match (axis.out, axis.first, axis.second) {
                    (None, Some(one), Some(other)) => Some(
                        (0..self.shapes[0][one])
                            .map(|i| (i * strides[0][one], i * strides[1][other]))
                            .collect(),
                    ),
                    _ => None,
                })
                .collect(),
            Form::Convolution(..) => Vec::new(),
        };
        for sample in 0..samples {
            // The place of the sample along each axis of the grid.
            let grid: Vec<usize> = strides[2]
                .iter()
                .zip(shape)
                .map(|(stride, size)| sample / stride % size)
                .collect();
            let mut sum = Sum {
                least,
                ..Sum::default()
            };
            match &self.form {
                Form::Product(axes) => {
                    let mut from = [0; 2];
                    for axis in axes {
                        let Some(out) = axis.out else { continue };
                        for (operand, place) in [axis.first, axis.second].into_iter().enumerate() {
                            // An axis of size 1 is spread over the result's.
                            let Some(place) = place.filter(|p| self.shapes[operand][*p] > 1) else {
                                continue;
                            };
                            from[operand] += grid[out] * strides[operand][place];
                        }
                    }
                    sum.add(&terms, [first, second], from);
                }
                Form::Convolution(of, options) => {
                    let (from, terms) = self.of_sample(*of, options, &grid, &strides);
                    sum.add(&terms, [first, second], from);
                }
            }
            each(sample, grid[self.channels], sum);
        }
    }

    /// Where a sample of a convolution's result begins in the operands, and the terms along each axis that it sums.
    fn of_sample(
        &self,
        of: Of,
        options: &Convolution,
        grid: &[usize],
        strides: &[Vec<usize>; 3],
    ) -> ([usize; 2], Vec<Vec<Term>>) {
        let [first, second, _] = &self.shapes;
        let [by_first, by_second, _] = strides;
        let groups = options.groups();
        let at: Vec<usize> = (0..grid.len())
            .map(|axis| self.out_indices(axis)[grid[axis]])
            .collect();
        let term = |i: usize, j: usize| (i * by_first[1], j * by_second[1]);
        let (from, channels): (_, Vec<Term>) = match of {
            Of::Narrow => {
                let inside = second[1];
                let group = at[1] / (self.whole[1] / groups);
                let from = [grid[0] * by_first[0], grid[1] * by_second[0]];
                (
                    from,
                    (0..inside).map(|c| term(group * inside + c, c)).collect(),
                )
            }
            Of::Wide => {
                let inside = self.whole[1] / groups;
                let outside = first[1] / groups;
                let group = at[1] / inside;
                let channel = if groups == 1 { grid[1] } else { at[1] % inside };
                let from = [grid[0] * by_first[0], channel * by_second[1]];
                let of = |c| (c * by_first[1], c * by_second[0]);
                (
                    from,
                    (0..outside).map(|c| of(group * outside + c)).collect(),
                )
            }
            Of::Weight => {
                // With groups, each sample has its own channel of the input.
                let channel = match groups {
                    1 => grid[1],
                    _ => grid[0] * self.shapes[2][1] + grid[1],
                };
                let from = [channel * by_first[1], grid[0] * by_second[1]];
                (
                    from,
                    (0..first[0])
                        .map(|n| (n * by_first[0], n * by_second[0]))
                        .collect(),
                )
            }
        };
        let mut terms = vec![channels];
        for axis in 2..grid.len() {
            let of_axis = |values: &[u32; 3]| values[axis - 2] as usize;
            let stride = of_axis(&options.stride);
            let (padding, dilation) = (of_axis(&options.padding), of_axis(&options.dilation));
            let (is, at) = ([first[axis], second[axis]], at[axis]);
            let input =
                |out: usize, tap: usize| (out * stride + tap * dilation).checked_sub(padding);
            let of_axis: Vec<Term> = match of {
                Of::Narrow => (0..is[1])
                    .filter_map(|tap| Some((input(at, tap)?, tap)))
                    .filter(|(input, _)| *input < is[0])
                    .collect(),
                Of::Wide => (0..is[1])
                    .filter_map(|tap| {
                        let out = (at + padding).checked_sub(tap * dilation)?;
                        (out % stride == 0).then_some((out / stride, tap))
                    })
                    .filter(|(out, _)| *out < is[0])
                    .collect(),
                Of::Weight => (0..is[1])
                    .filter_map(|out| Some((input(out, at)?, out)))
                    .filter(|(input, _)| *input < is[0])
                    .collect(),
            };
            let strided = of_axis.into_iter();
            terms.push(
                strided
                    .map(|(i, j)| (i * by_first[axis], j * by_second[axis]))
                    .collect(),
            );
        }
        // The longest last: it is the innermost loop.
        terms.sort_by_key(Vec::len);
        (from, terms)
    }
}

/// A step in the two operands.
type Term = (usize, usize);

/// A sum of products.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    value: f64,
    /// The sum of the products' magnitudes.
    size: f64,
    /// Of this, products with an operand below `least`.
    flushed: f64,
    least: f64,
    terms: usize,
}

impl Sum {
    /// Adds the products over these axes.
    fn add(&mut self, axes: &[Vec<Term>], operands: [&[f32]; 2], from: [usize; 2]) {
        match axes {
            [] => self.multiply(operands, from, &[(0, 0)]),
            [last] => self.multiply(operands, from, last),
            [axis, rest @ ..] => {
                for (i, j) in axis {
                    self.add(rest, operands, [from[0] + i, from[1] + j]);
                }
            }
        }
    }

    fn multiply(&mut self, [first, second]: [&[f32]; 2], from: [usize; 2], terms: &[Term]) {
        for (i, j) in terms {
            let first = f64::from(first[from[0] + i]);
            let second = f64::from(second[from[1] + j]);
            let product = first * second;
            self.value += product;
            self.size += product.abs();
            if first.abs() < self.least || second.abs() < self.least {
                self.flushed += product.abs();
            }
        }
        self.terms += terms.len();
    }
}

/// The axes of a product of matrices or of a function of a linear layer.
fn axes(op: &str, (first, second): (usize, usize)) -> Option<Vec<Axis>> {
    let axis = |first, second, out| Axis { first, second, out };
    let axes: Vec<Axis> = match op {
        "float_matmul" => {
            let batch = first.checked_sub(2).filter(|_| first == second)?;
            let batched = (0..batch).map(|i| axis(Some(i), Some(i), Some(i)));
            batched
                .chain([
                    axis(Some(batch), None, Some(batch)),
                    axis(Some(batch + 1), Some(batch), None),
                    axis(None, Some(batch + 1), Some(batch + 1)),
                ])
                .collect()
        }
        "linear" => {
            let rows = first.checked_sub(1)?;
            let leading = (0..rows).map(|i| axis(Some(i), None, Some(i)));
            leading
                .chain([
                    axis(Some(rows), Some(0), None),
                    axis(None, Some(1), Some(rows)),
                ])
                .collect()
        }
        "linear_x_backward" => {
            let rows = second.checked_sub(1)?;
            let leading = (0..rows).map(|i| axis(None, Some(i), Some(i)));
            leading
                .chain([
                    axis(Some(1), Some(rows), None),
                    axis(Some(0), None, Some(rows)),
                ])
                .collect()
        }
        "linear_weight_backward" => {
            let rows = first.checked_sub(1)?;
            let leading = (0..rows).map(|i| axis(Some(i), Some(i), None));
            leading
                .chain([
                    axis(Some(rows), None, Some(0)),
                    axis(None, Some(rows), Some(1)),
                ])
                .collect()
        }
        _ => return None,
    };
    Some(axes)
}

/// What of a product is read, and how many products a sample sums.
fn of_product(axes: &[Axis], shapes: [&[usize]; 3], samples: usize) -> ([Taken; 3], usize) {
    let mut taken = [Taken::new(), Taken::new(), Taken::new()];
    let mut products = 1;
    let rank = shapes[2].len();
    for axis in axes {
        let Some(out) = axis.out else {
            products *= axis.first.map_or(1, |axis| shapes[0][axis]);
            continue;
        };
        // Fewer of the batch than of the rows and columns.
        let most = match rank - out {
            1 | 2 => samples,
            3 => 4,
            _ => 2,
        };
        let count = samples.min(most);
        let indices = positions(shapes[2][out], count);
        for (tensor, place) in [axis.first, axis.second].into_iter().enumerate() {
            if let Some(place) = place.filter(|place| shapes[tensor][*place] > 1) {
                taken[tensor].push((place, indices.clone()));
            }
        }
        taken[2].push((out, indices));
    }
    taken[2].sort_by_key(|(axis, _)| *axis);
    (taken, products)
}

/// What of a convolution is read, and how many products a sample sums at most.
fn of_convolution(
    of: Of,
    options: &Convolution,
    [_, second, out]: [&[usize]; 3],
    samples: usize,
) -> ([Taken; 3], usize) {
    let groups = options.groups();
    let spatial = |count: usize| {
        let axes = out.iter().enumerate().skip(2);
        axes.map(move |(axis, size)| (axis, positions(*size, count)))
    };
    let taps = |weight: &[usize]| weight[2..].iter().product::<usize>();
    let channels = samples.min(4);
    // Fewer along each of more axes.
    let along = samples.min(9 - out.len());
    let (batch, of_channels) = (
        positions(out[0], samples.min(2)),
        positions(out[1], channels),
    );
    match of {
        Of::Narrow | Of::Wide => {
            let of_weight = match of {
                Of::Narrow => vec![(0, of_channels.clone())],
                // With groups, the channels within their group.
                _ if groups == 1 => vec![(1, of_channels.clone())],
                _ => vec![],
            };
            let inside = if of == Of::Narrow {
                second[1]
            } else {
                second[0] / groups
            };
            let result = [(0, batch.clone()), (1, of_channels)];
            let result = result.into_iter().chain(spatial(along)).collect();
            ([vec![(0, batch)], of_weight, result], inside * taps(second))
        }
        Of::Weight => {
            let outside = positions(out[0], channels);
            let (per_group, inside) = (out[0] / groups, out[1]);
            let of_first = match groups {
                1 => of_channels.clone(),
                _ => outside
                    .iter()
                    .flat_map(|o| of_channels.iter().map(move |c| o / per_group * inside + c))
                    .collect(),
            };
            let result = [(0, outside.clone()), (1, of_channels)];
            let result = result.into_iter().chain(spatial(along.min(4))).collect();
            let products = second[0] * taps(second);
            ([vec![(1, of_first)], vec![(1, outside)], result], products)
        }
    }
}

/// Some indices below `size`, the first and the last among them, odd and even ones: at a stride of 2, every second value of
/// a gradient sums nothing.
fn positions(size: usize, count: usize) -> Vec<usize> {
    match count {
        _ if size <= count => (0..size).collect(),
        1 => vec![size / 2],
        _ => (0..count)
            .map(|i| ((i * (size - 1) / (count - 1)) | (i % 2)).min(size - 1))
            .collect(),
    }
}

fn strides(shape: &[usize]) -> Vec<usize> {
    let after = |axis: usize| shape[axis + 1..].iter().product();
    (0..shape.len()).map(after).collect()
}

fn rounded<D: FloatDType>(half: D, values: &[f32]) -> Vec<f32> {
    let round = |value: &f32| match half == D::F16 {
        true => f16::from_f32(*value).to_f32(),
        false => bf16::from_f32(*value).to_f32(),
    };
    values.iter().map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::tests::DType;
    use DType::{BF16, F16};

    const MATMUL: Op = Op::named("float_matmul");

    /// A product of matrices with these values whose sums begin at zero and add as `add` does.
    fn compared(
        half: DType,
        [rows, inner, columns]: [usize; 3],
        value: impl Fn(usize) -> f32,
        add: impl Fn(f32, f32) -> f32,
    ) -> Verdict {
        let round = |value: f32| rounded(half, &[value])[0];
        let values = |count: usize, from: usize| -> Vec<f32> {
            (0..count).map(|i| round(value(i + from))).collect()
        };
        let (first, second) = (values(rows * inner, 0), values(inner * columns, 7));
        let shapes = [&[rows, inner][..], &[inner, columns]];
        let reference = Reference::of(&MATMUL, shapes, &[rows, columns]).unwrap();
        // All is read where a grid has all indices.
        assert!(rows.max(columns) <= 6);
        let mut out = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                let product = |k: usize| first[row * inner + k] * second[k * columns + column];
                out.push(round((0..inner).map(product).fold(0.0, &add)));
            }
        }
        reference.compared(half, [&first, &second, &out], None)
    }

    fn random(i: usize) -> f32 {
        ((i * 2_654_435_761) % 1_000_003) as f32 / 1_000_003.0
    }

    /// Values without a sign, with one, and nearly equal ones, whose sums round alike.
    const VALUES: [fn(usize) -> f32; 3] =
        [random, |i| random(i) - 0.5, |i| 0.1 + 0.002 * random(i)];

    #[test]
    fn a_sum_in_fp32_is_right() {
        // Tensor cores add products of 16 terms with at least 24 bits, and cut off the rest.
        let cut = |sum: f32| f32::from_bits(sum.to_bits() & !1);
        for half in [F16, BF16] {
            for inner in [2, 9, 64, 300, 4096, 40_000] {
                for (i, value) in VALUES.iter().enumerate() {
                    let of =
                        |add: &dyn Fn(f32, f32) -> f32| compared(half, [5, inner, 6], value, add);
                    let text = format!("{half:?} {inner} {i}");
                    assert_eq!(of(&|sum, next| sum + next), Verdict::Right, "{text}");
                    if inner <= 4096 {
                        assert_eq!(of(&|sum, next| cut(sum + next)), Verdict::Right, "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_sum_in_half_is_wrong_from_nine_terms_on() {
        for half in [F16, BF16] {
            for inner in [9, 27, 64, 300, 4096] {
                for value in &VALUES[..2] {
                    let add = |sum: f32, next: f32| rounded(half, &[sum + next])[0];
                    let verdict = compared(half, [6, inner, 6], value, add);
                    assert!(matches!(verdict, Verdict::Wrong { .. }), "{half:?} {inner}");
                }
            }
        }
    }

    #[test]
    fn operands_that_show_nothing_tell_nothing() {
        let add = |sum: f32, next: f32| sum + next;
        for half in [F16, BF16] {
            let of = |value: fn(usize) -> f32| compared(half, [4, 30, 5], value, add);
            assert_eq!(of(|_| 0.0), Verdict::Silent);
            assert_eq!(of(|_| 0.7), Verdict::Silent);
            assert_eq!(of(|_| f32::NAN), Verdict::Silent);
            assert_eq!(of(|_| f32::INFINITY), Verdict::Silent);
            // What overflows half is right to be infinite, and what half does not hold may be 0.
            assert_eq!(of(|i| 1e30 * (1.0 + random(i))), Verdict::Silent);
            assert_eq!(of(|i| 1e-30 * (1.0 + random(i))), Verdict::Silent);
            // A few values are enough.
            assert_eq!(
                of(|i| if i % 3 > 0 { random(i) } else { 0.0 }),
                Verdict::Right
            );
        }
        // A wrong value is one, whatever the operands.
        let none = |_: f32, _: f32| f32::NAN;
        let verdict = compared(F16, [4, 30, 5], |_| 0.7, none);
        assert!(matches!(verdict, Verdict::Wrong { .. }), "{verdict:?}");
    }

    #[test]
    fn what_is_too_large_is_read_in_fewer_samples_or_not_at_all() {
        let of = |inner| Reference::of(&MATMUL, [&[64, inner], &[inner, 64]], &[64, 64]);
        let samples = |inner| of(inner).map(|reference| reference.of_bias().len());
        assert_eq!(samples(4096), Some(6));
        assert_eq!(samples(1 << 21), Some(2));
        assert_eq!(samples(1 << 23), Some(1));
        assert_eq!(samples(1 << 24), None);
        let softmax = Op::named("softmax");
        assert!(Reference::of(&softmax, [&[2, 2], &[2, 2]], &[2, 2]).is_none());
    }

    #[test]
    fn samples_are_at_the_edges_and_between() {
        assert_eq!(positions(3, 6), [0, 1, 2]);
        assert_eq!(positions(128, 6), [0, 25, 50, 77, 101, 127]);
        assert_eq!(positions(50, 4), [0, 17, 32, 49]);
        assert_eq!(positions(9, 1), [4]);
        assert_eq!(positions(1, 1), [0]);
    }
}
