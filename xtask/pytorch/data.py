#!/usr/bin/env python3
"""What PyTorch's autocast makes of data that nothing learns, and of bounds and dtypes that a program asks for.

The programs and the numbers of burn-amp's `tests/data_programs.rs`, in FP32 and inside `torch.autocast` in f16 and bf16.
Prints a table in Markdown. A program of data is right if its values are those of FP32 bit for bit; a program of bounds
if each value is within four roundings of the exact one. A row shows the value that is furthest off.

    python xtask/pytorch/data.py
"""

import argparse
import math

import torch
import torch.nn.functional as F

HALVES = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tensor(shape, value):
    """A tensor with a value for each index."""
    values = [float(value(i)) for i in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).float().reshape(shape)


def one_hot(classes, n):
    return F.one_hot(torch.tensor(list(classes)), n).float()


def learned(rows):
    """These rows through a learned layer that changes no value: half, inside of autocast."""
    out = F.linear(rows, torch.eye(rows.shape[1], requires_grad=True))
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    assert out.dtype == dtype
    return out


# Data.


def odometer():
    """Positions times one."""
    return tensor([24, 1], lambda i: 250_007 + 13 * i) @ torch.ones(1, 1)


def rotary_angles():
    """The angles of a rotary encoding."""
    frequencies = tensor([1, 8], lambda i: 10_000 ** (-i / 8))
    return (tensor([16, 1], lambda i: 5_021 + i) @ frequencies).cos()


def shuffled_ids():
    """Ids in another order, by a permutation matrix."""
    order = one_hot(((5 * i + 3) % 24 for i in range(24)), 24)
    return order @ tensor([24, 1], lambda i: 40_009 + 7 * i)


def row_totals():
    """A sum by a product with ones."""
    return tensor([6, 50], lambda i: i * 7_919 % 100_003 * 0.01) @ torch.ones(50, 1)


def counted():
    """A count by a product with ones."""
    chosen = tensor([4, 5_000], lambda i: i * 37 % 101) > 19.5
    return chosen.float() @ torch.ones(5_000, 1)


def covariance():
    """Air pressures of three places."""
    return torch.cov(tensor([40, 3], lambda i: 1_013 + i * 29 % 61 * 0.13).T)


def mel_bank():
    """A triangular filter bank in a batcher, before a learned layer."""
    power = tensor([10, 65], lambda i: 4e4 * (1 + math.sin(0.7 * i)))
    bank = tensor([65, 8], lambda i: max(0, 1 - abs(i // 8 - 7 * (i % 8 + 1)) / 7))
    energies = power @ bank
    learned(energies.log())
    return energies


def prefix_sums():
    """Prefix sums by a triangular matrix."""
    return torch.ones(64, 64).tril() @ tensor([64, 1], lambda i: 900 + i * 37 % 101)


def confusion():
    """A confusion matrix, of the predictions of a learned layer."""
    labels = [i // 7 % 3 for i in range(12_000)]
    scores = one_hot(((c + (i % 11 == 0)) % 3 for i, c in enumerate(labels)), 3)
    predictions = learned(scores).argmax(1)
    return one_hot(labels, 3).T @ one_hot(predictions.tolist(), 3)


def smoothed_times():
    """A moving average of time stamps."""
    times = tensor([1, 1, 40], lambda i: 300_000 + 17 * i + i % 3)
    return F.conv1d(times, torch.full([1, 1, 5], 0.2))


def gaussian(size, sigma):
    weights = [math.exp(-((i - size // 2) ** 2) / (2 * sigma**2)) for i in range(size)]
    return [w / sum(weights) for w in weights]


def window_variances():
    """The variances of the windows of an image: a mean of squares less the square of a mean."""
    weights = gaussian(7, 1.5)
    window = tensor([1, 1, 7, 7], lambda i: weights[i // 7] * weights[i % 7])
    image = tensor([1, 1, 16, 16], lambda i: 20 + i * 73 % 211)
    mean = F.conv2d(image, window)
    return F.conv2d(image * image, window) - mean * mean


def structural_similarity():
    """SSIM as burn-train computes it: two convolutions for each mean."""
    weights = gaussian(11, 1.5)
    x = tensor([1, 3, 16, 16], lambda i: 20 + i * 73 % 211)
    y = x + tensor([1, 3, 16, 16], lambda i: i * 31 % 17 - 8)

    def mean(image):
        rows = tensor([3, 1, 1, 11], lambda i: weights[i % 11])
        image = F.conv2d(image, rows, padding=(0, 5), groups=3)
        return F.conv2d(image, rows.reshape(3, 1, 11, 1), padding=(5, 0), groups=3)

    mean_x, mean_y = mean(x), mean(y)
    both, square_x, square_y = mean_x * mean_y, mean_x * mean_x, mean_y * mean_y
    var_x = (mean(x * x) - square_x).clamp(min=0)
    var_y = (mean(y * y) - square_y).clamp(min=0)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    numerator = (both * 2 + c1) * ((mean(x * y) - both) * 2 + c2)
    return (numerator / ((square_x + square_y + c1) * (var_x + var_y + c2))).mean()


def moved_boxes():
    """The corners of boxes in an image of 3,840 pixels, by an affine matrix, before a learned layer."""

    def corner(i):
        return [i // 3 * 331 % 3_840 + 0.5, i // 3 * 197 % 2_160 + 0.25, 1][i % 3]

    sin, cos = math.sin(0.1), math.cos(0.1)
    affine = [cos, sin, 0, -sin, cos, 0, 120.25, 64.75, 1]
    moved = tensor([24, 3], corner) @ tensor([3, 3], lambda i: affine[i])
    learned(moved / 3_840)
    return moved


def normal_equations():
    """The normal equations of a parabola through 30 points."""
    design = tensor([30, 3], lambda i: (i // 3) ** (i % 3))
    heights = tensor([30, 1], lambda t: 3 + 0.5 * t - 0.01 * t * t)
    return torch.cat([design.T @ design, design.T @ heights], 1)


def spectrum():
    """A discrete Fourier transform by a matrix: beside a tone of 1,000, around one of 0.25."""

    def wave(frequency, i, shift=0):
        return math.sin(2 * math.pi * ((frequency * i + shift) % 256) / 256)

    signal = tensor([256, 1], lambda i: 1_000 * wave(9, i) + 0.25 * wave(40, i))
    sin = tensor([17, 256], lambda i: wave(32 + i // 256, i % 256)) @ signal
    cos = tensor([17, 256], lambda i: wave(32 + i // 256, i % 256, 64)) @ signal
    return (sin * sin + cos * cos).sqrt()


def map_distances():
    """Distances of places on a map in metres, by a² + b² - 2 a·b."""
    a = tensor([6, 2], lambda i: 712.25 + 3.5 * i)
    b = tensor([5, 2], lambda i: 740.5 - 2.75 * i)
    squares = (a * a).sum(1, keepdim=True) + (b * b).sum(1, keepdim=True).T
    return (squares - 2 * (a @ b.T)).clamp(min=0).sqrt()


def paths():
    """The paths of eight steps in a graph."""

    def edge(i):
        a, b = i // 12, i % 12
        return (5 * a + 3 * b) % 4 == 0 or b == (a + 1) % 12

    one = tensor([12, 12], edge)
    two = one @ one
    four = two @ two
    return four @ four


def invoice():
    """Quantities times prices."""
    prices = tensor([8, 2], lambda i: i * 53 % 97 + 0.99)
    return tensor([5, 8], lambda i: i * 17 % 41) @ prices


def net_worth():
    """A matrix times a vector."""
    return tensor([4, 6], lambda i: i * 19 % 113) @ tensor([6], lambda i: 101.37 + 12.11 * i)


def luma():
    """The brightness of pixels, by a convolution of one pixel."""
    weights = [0.299, 0.587, 0.114]
    image = tensor([1, 3, 8, 8], lambda i: i * 89 % 256)
    return F.conv2d(image, tensor([1, 3, 1, 1], lambda i: weights[i]))


def interpolated():
    """Altitudes at twice as many places, by a transposed convolution."""
    altitudes = tensor([1, 1, 12], lambda i: 4_013.25 + 37 * i)
    return F.conv_transpose1d(altitudes, tensor([1, 1, 3], lambda i: [0.5, 1, 0.5][i]), stride=2)


def calibrated():
    """The counts of three sensors, by a linear function with an offset."""
    counts = tensor([8, 3], lambda i: 12_345 + i * 631 % 1_009)
    gains = tensor([3, 3], lambda i: 1.0625 if i % 4 == 0 else 0.01 * (i + 1))
    return F.linear(counts, gains.T, tensor([3], lambda i: 7.5 - i))


def neighbours():
    """The sums of the neighbours in a volume."""
    volume = tensor([1, 1, 5, 5, 5], lambda i: 900 + i * 41 % 127)
    return F.conv3d(volume, torch.ones(1, 1, 3, 3, 3))


def histogram():
    """The weights in each of six bins."""
    bins = one_hot((i * i % 6 for i in range(600)), 6)
    return bins.T @ tensor([600, 1], lambda i: 61.3 + i * 7 % 13)


# Bounds, thresholds and dtypes. Each returns its values and the exact ones.


def guarded_log():
    """clamp(eps, 1 - eps) of a sigmoid before a logarithm."""
    logits, eps = [12.0, -12.0, 0.5, -2.0], 1e-4
    p = torch.sigmoid(learned(torch.tensor([logits]))).clamp(eps, 1 - eps)
    exact = [1 / (1 + math.exp(-x)) for x in logits]
    return (1 - p).log(), [math.log(1 - min(max(p, eps), 1 - eps)) for p in exact]


def confident():
    """A threshold that half rounds to 1."""
    chosen = learned(torch.tensor([[1.0, 0.99609375, 0.5, -1.0]])) > 1 - 2e-4
    return chosen.float(), [1, 0, 0, 0]


def masked_places():
    """A mask of -12,345, found again by comparison."""
    scores = learned(torch.tensor([[1.5, -2.0, 0.25, 8.0]]))
    filled = scores.masked_fill(torch.tensor([[False, True, False, True]]), -12_345.0)
    found = torch.cat([filled > -12_345.0, filled == -12_345.0], 1).float()
    return found, [1, 0, 1, 0, 0, 1, 0, 1]


def masked_softmax():
    """A mask of -1e9."""
    scores = learned(torch.tensor([[2.0, 1.0, 0.5, -1.0]]))
    filled = scores.masked_fill(torch.tensor([[False, True, False, False]]), -1e9)
    exact = [math.exp(2), 0, math.exp(0.5), math.exp(-1)]
    return filled.softmax(1), [x / sum(exact) for x in exact]


def padded_places():
    """A border of -12,345, found again by comparison."""
    padded = F.pad(learned(torch.tensor([[1.5, -2.0]])), (1, 1), value=-12_345.0)
    return (padded == -12_345.0).float(), [1, 0, 0, 1]


def peaks():
    """The places where a mean over channels is the largest of its neighbourhood."""
    channels = learned(torch.tensor([[1.0, 3.0, 2.0, 6.0, 1.25, 3.5, 2.25, 7.0]]))
    heat = channels.reshape(1, 2, 1, 4).mean(1, keepdim=True) / 3
    largest = F.max_pool2d(heat, (1, 3), stride=1, padding=(0, 1))
    return (largest == heat).float(), [0, 1, 0, 1]


def survival():
    """What is left after 12 steps that each keep an eighth, in a product that begins with ones."""
    kept = learned(torch.tensor([[0.125]]))
    left = torch.ones(1, 1)
    for _ in range(12):
        left = left * kept
    return left.log(), [12 * math.log(0.125)]


def ones_like():
    """A count, and prefix sums, in the dtype of a half tensor."""
    half = learned(torch.tensor([[1.0, 2.0]]))[:, :1].repeat(1, 5_003)
    sums = torch.full_like(half, 0.25).cumsum(1)[0, -1]
    return torch.stack([torch.ones_like(half).sum(), sums]), [5_003, 1_250.75]


def running_total():
    """A total that begins as FP32 zeros."""
    half, total = learned(torch.tensor([[3.0, 0.5]])), torch.zeros(1, 2)
    for _ in range(700):
        total = total + half
    return total, [2_100, 350]


def running_total_like():
    """A total that begins as zeros_like of a half tensor, where autocast is off."""
    half = learned(torch.tensor([[3.0, 0.5]]))
    with torch.autocast("cpu", enabled=False):
        total = torch.zeros_like(half)
        for _ in range(700):
            total = total + half
    return total, [2_100, 350]


def normalized():
    """An epsilon of 1e-8 in a quotient."""
    half = learned(torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, -4.0, 0.5, 1.0]]))
    return half / (half.abs().amax(1, keepdim=True) + 1e-8), [0] * 4 + [0.75, -1, 0.125, 0.25]


def floored_log():
    """A floor of 1e-12 before a logarithm."""
    half = learned(torch.tensor([[0.0, 0.5, 2.0, 12.0]]))
    return half.clamp(min=1e-12).log(), [math.log(x) for x in [1e-12, 0.5, 2, 12]]


def wide_range():
    """Bounds of 1e-7 and 1e7."""
    half = learned(torch.tensor([[0.0, 0.25, 3.0, 4_992.0]]))
    return half.clamp(1e-7, 1e7).log(), [math.log(x) for x in [1e-7, 0.25, 3, 4_992]]


def fisher_z():
    """A correlation bounded by 1 - 2e-4 before an inverse hyperbolic tangent."""
    half, bound = learned(torch.tensor([[1.0, 0.5, -0.25, -1.0]])), 1 - 2e-4
    return half.clamp(-bound, bound).atanh(), [math.atanh(x) for x in [bound, 0.5, -0.25, -bound]]


def row(i):
    """Values that both half dtypes hold."""
    return 100 + i * i % 7 * 0.5


def centred():
    """A mean in FP32, cast to the dtype of the tensor that it is subtracted from."""
    half = learned(tensor([1, 32], row))
    mean = half.float().mean(1, keepdim=True)
    exact = sum(row(i) for i in range(32)) / 32
    return half - mean.to(half.dtype), [row(i) - exact for i in range(32)]


def root_mean_square(half, epsilon):
    root = (half.float().square().mean(1, keepdim=True) + epsilon).sqrt()
    exact = math.sqrt(sum(row(i) ** 2 for i in range(32)) / 32 + epsilon)
    return half / root.to(half.dtype), [row(i) / exact for i in range(32)]


def norm_by_hand():
    """A root mean square in FP32, cast to the dtype of the tensor."""
    return root_mean_square(learned(tensor([1, 32], row)), 1e-6)


def norm_in_full_precision():
    """Burn's RMS norm where autocast is off."""
    half = learned(tensor([1, 32], row))
    with torch.autocast("cpu", enabled=False):
        found, exact = root_mean_square(half, 1e-5)
        return found * torch.ones(32), exact


def ordinal():
    """The probabilities of the classes of an ordinal regression: differences of sigmoids."""
    thresholds = [0.5, 1.0, 1.5, 2.0]
    scores = learned(tensor([128, 1], lambda i: 4 + 0.5 * (i % 4)))
    below = torch.sigmoid(scores - torch.nn.Parameter(torch.tensor([thresholds])))
    exact = [[1 / (1 + math.exp(t - 4 - 0.5 * (i % 4))) for t in thresholds] for i in range(128)]
    return below[:, :3] - below[:, 1:], [row[k] - row[k + 1] for row in exact for k in range(3)]


def divergence():
    """The divergence of a normal distribution from the standard one."""
    means, logs = [0.0625, -0.03125, 0.125], [0.0078125, -0.03125, 0.01171875]
    mean, log = learned(torch.tensor([means])), learned(torch.tensor([logs]))
    exact = [1 + log - mean**2 - math.exp(log) for mean, log in zip(means, logs, strict=True)]
    return log + 1 - mean.square() - log.exp(), exact


def unbroken():
    """What is left of 1 after 64 breaks of a small part, and what a break takes in the mean."""
    part = 0.0009765625
    rest = 1 - learned(torch.tensor([[part]])).repeat(1, 64)
    found = [rest.cumprod(1)[0, 63].float(), (rest.mean() - 1).float()]
    return torch.stack(found), [(1 - part) ** 64, -part]


def logarithms():
    """Logarithms of one plus and one minus a small number, and of a shift by two scalars."""
    x = learned(torch.tensor([[0.001953125]]))
    found = torch.cat([shifted.log() for shifted in [x + 1, -x + 1, x - 1 + 2]])
    return found, [math.log(1 + sign * 0.001953125) for sign in [1, -1, 1]]


def cross_entropy():
    """A binary cross entropy of probabilities; PyTorch's own is an error on a GPU."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, -9.0, 9.0, -2.0]]))).reshape(4)
    target = torch.tensor([0.0, 1.0, 1.0, 0.0])
    loss = -(target * p.log().clamp(min=-100) + (1 - target) * (-p).log1p().clamp(min=-100))
    exact = [math.log1p(math.exp(x)) for x in [9, 9, -9, -2]]
    return loss.mean(), [sum(exact) / 4]


def likelihoods():
    """The logarithms of probabilities, and of what they leave, of two of four columns."""
    p = torch.sigmoid(learned(torch.tensor([[-20.0, -3.0, 10.0, 0.5]])))
    found = torch.cat([p[:, :2].log(), (1 - p)[:, 2:].log()], 1)
    return found, [-math.log1p(math.exp(x)) for x in [20, 3, 10, 0.5]]


def squashed():
    """The logarithm of the slope of a hyperbolic tangent, as for the density of a bounded action."""
    x = [3.0, -5.0, 0.25, 1.0]
    action = learned(torch.tensor([x])).tanh()
    slope = (1 - action.square() + 1e-6).log()
    return slope, [math.log(1 / math.cosh(x) ** 2 + 1e-6) for x in x]


def entropy():
    """The entropies of confident decisions."""
    logits = [9.0, -9.0, 10.0, -3.0]
    p = torch.sigmoid(learned(torch.tensor([logits])))
    both = [[1 / (1 + math.exp(-x)), 1 / (1 + math.exp(x))] for x in logits]
    exact = [-(p * math.log(p) + rest * math.log(rest)) for p, rest in both]
    return -(p * p.log() + (1 - p) * (1 - p).log()), exact


def straight_through():
    """A decision that has the gradient of its probability."""
    p = torch.sigmoid(learned(torch.tensor([[1.0, 0.25, -0.5, -3.0]])))
    decision = (p > 0.5).float() - p.detach() + p
    found = torch.cat([decision.round(), p.log() - p.detach().log()], 1)
    return found, [1, 1, 0, 0, 0, 0, 0, 0]


def cumulative():
    """The probabilities of three classes in order, with the bounds 1 and 0."""
    scores = learned(torch.full((64, 1), 6.0))
    above = torch.sigmoid(scores - torch.nn.Parameter(torch.tensor([[0.0, 0.5]])))
    upper = torch.cat([torch.ones(64, 1), above], 1)
    first, second = [1 / (1 + math.exp(-x)) for x in [6, 5.5]]
    classes = upper - torch.cat([above, torch.zeros(64, 1)], 1)
    return classes, [1 - first, first - second, second] * 64


def leaving_a_region():
    """Probabilities whose logarithms are taken where autocast is off."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, -2.0]])))
    with torch.autocast("cpu", enabled=False):
        return (1 - p.reshape(2)).log(), [-math.log1p(math.exp(x)) for x in [9, -2]]


def shifted_scores():
    """A softmax, and a softmin, of scores that are all far from zero."""
    scores = [0.296875, 0.703125]
    exact = [math.exp(x) for x in scores]
    shifted = learned(torch.tensor([scores])) + 100
    found = torch.cat([shifted.softmax(1).float(), F.softmin(shifted, 1).float()], 1)
    return found, [x / sum(exact) for x in exact + exact[::-1]]


def ranked():
    """The order of confident probabilities, and whether one is above another."""
    p = torch.sigmoid(learned(torch.tensor([[8.5, 11.0, 9.0, 10.0]])))
    above = (p[0, 1] > p[0, 0]).reshape(1)
    values, places = p.topk(2, 1)
    same = (values == p.gather(1, places))[0]
    found = [p.argsort(1, descending=True)[0], p.argmax(1), above, places[0], same]
    return torch.cat([part.float() for part in found]), [1, 3, 2, 0, 1, 1, 1, 3, 1, 1]


def roots():
    """The roots of what confident probabilities leave, and the logarithms of those of small ones."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, 1.0]])))
    small = torch.sigmoid(learned(torch.tensor([[-18.0, -3.0]])))
    exact = [math.sqrt(1 / (1 + math.exp(x))) for x in [9, 1, 18, 3]]
    found = torch.cat([(1 - p).sqrt().float(), small.sqrt().log().float()], 1)
    return found, exact[:2] + [math.log(x) for x in exact[2:]]


def corners():
    """The widths of small boxes, from their corners."""
    boxes = torch.sigmoid(learned(torch.tensor([[1.0, -0.5, -4.546875, -5.25]])))
    centres, widths = boxes[:, :2], boxes[:, 2:]
    found = (centres + widths / 2) - (centres - widths * 0.5)
    return found, [1 / (1 + math.exp(x)) for x in [4.546875, 5.25]]


def inverse_sigmoid():
    """The logits of confident probabilities, which are first bounded by 0 and 1."""
    logits = [9.0, -9.0, 8.25, -2.0]
    p = torch.sigmoid(learned(torch.tensor([logits]))).clamp(0, 1)
    return (p.clamp(min=1e-5) / (1 - p).clamp(min=1e-5)).log(), logits


def moved():
    """What confident probabilities leave, of those that are selected."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, -9.0, 10.0, -2.0]])))
    rows = p.T.flip(0).index_select(0, torch.tensor([1, 3])).repeat(1, 2)
    gathered = p.gather(1, torch.tensor([[2, 0]])).expand(2, 2)
    of_10, of_9 = [-math.log1p(math.exp(x)) for x in [10, 9]]
    exact = [of_10, of_10, of_9, of_9, of_10, of_9, of_10, of_9]
    return torch.cat([(1 - part).log() for part in [rows, gathered]]), exact


def filled():
    """A masked mean of values that were compared with the scalar that fills the masked places."""
    x = learned(torch.tensor([[1.0, -1.0, -2.0, 0.5]])).tanh()
    above = (x > 0).float().sum()
    mean = x.masked_fill(torch.tensor([[False, False, True, False]]), 0.0).mean()
    return (above * 100 + mean).reshape(1), [200 + sum(map(math.tanh, [1, -1, 0.5])) / 4]


def ignored():
    """Logarithms of probabilities, of which one is ignored. They were compared with the probability that it gets."""
    logits = [0.5, -1.0, 3.0, -9.0]
    p = torch.sigmoid(learned(torch.tensor([logits])))
    above = (p > 0.5).float()
    logs = p.masked_fill(torch.tensor([[False, False, True, False]]), 0.5).log()
    exact = [-math.log1p(math.exp(-x)) for x in [0.5, -1.0, 0.0, -9.0]]
    return torch.cat([above, logs.float()], 1), [1, 0, 1, 0, *exact]


def odds():
    """Logarithms of odds, and of the slope of a sigmoid, as in the determinant of a flow."""
    logits = [9.0, 7.0, -8.25, 0.5]
    p = torch.sigmoid(learned(torch.tensor([logits])))
    slopes = [-math.log1p(math.exp(x)) - math.log1p(math.exp(-x)) for x in logits]
    return torch.cat([(p / (1 - p)).log(), (p * (1 - p)).log()]), logits + slopes


def halves():
    """Decisions about logits that are all but zero."""
    p = torch.sigmoid(learned(torch.tensor([[0.0009765625, -0.0009765625, 0.0001220703125, -4.0]])))
    return torch.cat([p > 0.5, p < 0.5]).float(), [1, 0, 1, 0, 0, 1, 0, 1]


def bins():
    """The bins of probabilities, of ten."""
    bins = torch.sigmoid(learned(torch.tensor([[9.0, 10.0, -9.0, 0.5]]))) * 10
    return torch.cat([bins.int().float(), bins.floor().float()]), [9, 9, 0, 6] * 2


def kept_largest():
    """Whether the largest value is below the largest of all."""
    rest = 1 - torch.sigmoid(learned(torch.tensor([[9.0, 8.0, 10.0, 9.5]])))
    capped = (learned(torch.tensor([[3.0, 2.0, 1.0, 0.5]])) / 30).tanh() * 30
    below = [x < x.topk(1, 1).values for x in [rest, capped]]
    return torch.cat([below[0][:, 1], below[1][:, 0]]).float(), [0, 0]


def floored_twice():
    """A floor of 1e-8 of values of which some were filled with a tenth."""
    values = learned(torch.tensor([[-1.0, 2.0, 0.5, 4.0]]))
    values = values.masked_fill(torch.tensor([[False, True, False, False]]), 0.1)
    return values.clamp(min=1e-8).log(), [math.log(x) for x in [1e-8, 0.1, 0.5, 4.0]]


def capped():
    """A cross entropy of scores that a hyperbolic tangent keeps below 30."""
    scores = [59.5, 60.5, 58.5, 12.0]
    capped = (learned(torch.tensor([scores])) / 30).tanh() * 30
    loss = capped.exp().sum(1).log() - capped[:, 1]
    exact = [math.tanh(x / 30) * 30 for x in scores]
    return loss, [math.log(sum(map(math.exp, exact))) - exact[1]]


def guarded():
    """What confident probabilities leave, where 0 is replaced by 1, and where some are replaced by the probability."""
    logits = [9.0, 1.0, -9.0, 2.0]
    p = torch.sigmoid(learned(torch.tensor([logits])))
    rest = 1 - p
    found = [rest.masked_fill(rest <= 0, 1.0), rest.where(torch.tensor([[True, False, False, True]]), p)]
    exact = [-math.log1p(math.exp(x)) for x in logits + [9.0, -1.0, 9.0, 2.0]]
    return torch.cat([part.log() for part in found]), exact


def quotients():
    """Integers as quotients."""
    values = [(learned(torch.tensor([[x, -1.0]])) + 1) / d for x, d in [(40.0, 41), (20.0, 7)]]
    found = [f(x).float() for x in values for f in [torch.floor, torch.ceil]]
    return torch.cat(found), [1, 0, 1, 0, 3, 0, 3, 0]


def thresholds():
    """The values that are not below the largest, which the program reads."""
    p = torch.sigmoid(learned(torch.tensor([[3.0, 1.0, 2.5, -1.0]])))
    largest = p.max().item()
    return torch.cat([p >= largest, p == largest]).float(), [1, 0, 0, 0] * 2


def box_areas():
    """The scored areas of boxes in an image of 640 pixels."""
    corners = torch.sigmoid(learned(torch.tensor([[-4.0, -4.0, 4.0, 4.0]]))) * 640
    width, height = (corners[:, 2:] - corners[:, :2]).chunk(2, 1)
    score = learned(torch.tensor([[0.25]]))
    areas = [width * height * score, width.relu() * height.relu()]
    side = 640 * math.tanh(2)
    return torch.cat(areas).float(), [side * side / 4, side * side]


def ordinal_likelihood():
    """Logarithms of the probabilities of classes in order, which a mask selects."""
    scores = learned(torch.tensor([[-17.0, -3.0]])).reshape(2, 1)
    first, second = [torch.sigmoid(scores - threshold) for threshold in [0.5, 1.0]]
    found = ((first - second) * torch.ones(2, 1)).sum(1).log()
    classes = [1 / (1 + math.exp(0.5 - x)) - 1 / (1 + math.exp(1 - x)) for x in [-17, -3]]
    return found, [math.log(p) for p in classes]


def parts():
    """Probabilities as positions in a table: an integer, and a fraction."""
    logits = [i * 0.375 - 1.25 for i in range(8)]
    x = torch.sigmoid(learned(torch.tensor([logits]))) * 64
    return x.floor() + x % 1, [64 / (1 + math.exp(-x)) for x in logits]


def guarded_quotients():
    """Quotients by what confident probabilities leave, which may be 0."""
    logits, values = [9.0, 1.0, -2.0, 8.0], [0.0009765625, 2.0, -3.0, 0.001953125]
    rest = 1 - torch.sigmoid(learned(torch.tensor([logits])))
    dividend = learned(torch.tensor([values]))
    found = [dividend / rest.masked_fill(rest == 0, 1.0), (dividend / rest).masked_fill(rest == 0, 0.0)]
    return torch.cat(found), [v * (1 + math.exp(x)) for v, x in zip(values, logits, strict=True)] * 2


def peaks_of_data():
    """The places of the largest of their neighbourhood, of the data that the program reads."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, 8.5, 3.0, 4.0]]))).reshape(1, 1, 1, 4)
    largest = torch.nn.functional.max_pool2d(p, (1, 3), 1, (0, 1))
    read = [float(a == b) for a, b in zip(p.flatten().tolist(), largest.flatten().tolist(), strict=True)]
    return torch.cat([(largest == p).float().flatten(), torch.tensor(read)]), [1, 0, 0, 1] * 2


def joined():
    """Logarithms of what confident probabilities leave that were joined with another, written to a row of zeros, written
    to places of one, and padded."""
    p = torch.sigmoid(learned(torch.tensor([[9.0, -2.0]])))
    row = torch.zeros(1, 4, dtype=p.dtype).slice_scatter(p, 1, 1, 3)
    places = torch.zeros(3, dtype=p.dtype)
    places = places.index_put((torch.tensor([2, 0]),), p[0])
    found = [torch.cat([learned(torch.tensor([[0.5]])), p], 1), row, places, F.pad(p, (1, 0))]
    of_9, of_2 = [-math.log1p(math.exp(x)) for x in [9, -2]]
    exact = [math.log(0.5), of_9, of_2, 0, of_9, of_2, 0, of_2, 0, of_9, 0, of_9, of_2]
    return torch.cat([(1 - x).log().float().flatten() for x in found]), exact


def gated_twice():
    """A tensor times the product of two gates, and the logarithm of this product."""
    logits = [[-9.0, 1.0], [-8.0, 3.0]]
    first, second = [torch.sigmoid(learned(torch.tensor([of]))) for of in logits]
    gate = first * second
    gated = learned(torch.tensor([[1.5, -2.0]])) * gate
    exact = [-sum(math.log1p(math.exp(-of[i])) for of in logits) for i in [0, 1]]
    found = torch.cat([gated.float(), gate.log().float()], 1)
    return found, [x * math.exp(log) for x, log in zip([1.5, -2.0], exact, strict=True)] + exact


def remembered():
    """The states of a recurrence with a long memory: a sum that forgets, and a mean. Each step multiplies by a gate near 1."""
    steps, logits, values = 200, [5.0, 4.5], [1.0, -0.75]
    total, mean = torch.zeros(1, 2), torch.zeros(1, 2)
    for _ in range(steps):
        gate = torch.sigmoid(learned(torch.tensor([logits])))
        value = learned(torch.tensor([values]))
        total = gate * total + value
        mean = gate * mean + (1 - gate) * value
    gates = [1 / (1 + math.exp(-x)) for x in logits]
    means = [x * (1 - gate**steps) for x, gate in zip(values, gates, strict=True)]
    totals = [x * (1 + math.exp(logit)) for x, logit in zip(means, logits, strict=True)]
    return torch.cat([total.float(), mean.float()], 1), totals + means


def by_hand():
    """A binary cross entropy as a program writes it, with `ones_like` in the place of the number 1."""
    p, t = torch.sigmoid(learned(torch.tensor([[9.0, -2.0, 9.0]]))), torch.tensor([[1.0, 0.0, 0.0]])
    rests = [(ones - p).log() for ones in [torch.ones_like(p), torch.full_like(p, 1)]]
    found = [-(t * p.log() + (torch.ones_like(t) - t) * rest) for rest in rests]
    return torch.cat(found, 1), [math.log1p(math.exp(x)) for x in [-9, -2, 9]] * 2


def masked():
    """Logarithms of the probability that nothing happens, where a mask says that something may."""
    valid = torch.tensor([[True, True, True, False]]).float()
    p = torch.sigmoid(learned(torch.tensor([[9.0, 1.0, -9.0, 10.0]]))) * valid
    slope = torch.tanh(learned(torch.tensor([[5.0, -1.0, 4.5, 3.0]]))) * valid
    rests = [-math.log1p(math.exp(x)) for x in [9, 1, -9]]
    slopes = [-2 * math.log(math.cosh(x)) for x in [5, -1, 4.5]]
    return torch.cat([(1 - p).log(), (1 - slope.square()).log()], 1), rests + [0] + slopes + [0]


def perturbed():
    """The largest of 50,000 draws from Gumbel's distribution, of uniform numbers in the dtype of half scores."""
    torch.manual_seed(0)
    scores = learned(torch.tensor([[0.0]])).repeat(1, 50_000)
    uniform = torch.empty_like(scores).uniform_(1e-9, 1)
    return ((-(-uniform.log()).log()).max() / 8.3).clamp(0, 1).reshape(1), [1]


def denormalized():
    """Prices from what a model was trained to give: less their mean, and in units of their deviation."""
    prices = learned(torch.tensor([[2.0, 3.5, -1.0, 0.0]])) * 40_000 + 180_000
    known = torch.where(torch.tensor([[True, True, False, True]]), prices, learned(torch.tensor([[0.5] * 4])))
    return known.relu(), [260_000, 320_000, 0.5, 180_000]


def nearly_one():
    """A factor that keeps correlations from 1."""
    correlations = [1.0, 0.5, -0.25, -1.0]
    inside = learned(torch.tensor([correlations])) * (1 - 1e-4)
    exact = [math.log(1 - (x * (1 - 1e-4)) ** 2) for x in correlations]
    return (1 - inside.square()).log(), exact


DATA = [
    odometer, rotary_angles, shuffled_ids, row_totals, counted, covariance, mel_bank, prefix_sums,
    confusion, smoothed_times, window_variances, structural_similarity, moved_boxes,
    normal_equations, spectrum, map_distances, paths, invoice, net_worth, luma, interpolated,
    calibrated, neighbours, histogram,
]  # fmt: skip
BOUNDS = [
    guarded_log, confident, masked_places, masked_softmax, padded_places, peaks, survival,
    ones_like, running_total, running_total_like, normalized, floored_log, wide_range, fisher_z, centred, norm_by_hand,
    norm_in_full_precision, ordinal, divergence, unbroken, logarithms, cross_entropy, likelihoods,
    squashed, entropy, straight_through, cumulative, leaving_a_region, shifted_scores, ranked, corners, roots,
    inverse_sigmoid, moved, filled, ignored, odds, halves, bins, kept_largest, floored_twice, capped,
    guarded, quotients, thresholds, box_areas, ordinal_likelihood, parts, guarded_quotients,
    peaks_of_data, joined, gated_twice, remembered, by_hand, masked, perturbed, denormalized,
    nearly_one,
]  # fmt: skip


def values(out):
    return out.detach().float().double().flatten().tolist()


def run(program, half):
    """The values of a program, or its error, and the exact values of a program of bounds."""
    with torch.autocast("cpu", dtype=half, enabled=half is not None):
        try:
            out = program()
        except RuntimeError as error:
            return str(error).splitlines()[0], None
    return (values(out[0]), out[1]) if isinstance(out, tuple) else (values(out), None)


def is_right(found, plain, exact, roundoff):
    if isinstance(found, str):
        return False
    if exact is None:
        return found == plain
    tolerance = 4 * max(roundoff, 2.0**-13)
    return all(abs(f - e) <= tolerance * abs(e) for f, e in zip(found, exact, strict=True))


def furthest(found, expected):
    """The place of the largest error, in which small numbers count for a little more than zeros."""
    size = max(map(abs, expected)) / 100 or 1.0

    def error(i):
        difference = abs(found[i] - expected[i])
        return difference / (abs(expected[i]) + size) if math.isfinite(difference) else math.inf

    return max(range(len(expected)), key=error)


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"PyTorch {torch.__version__}, `torch.autocast` on the CPU.\n")
    print("| program | what | FP32 | f16 | bf16 | in f16 | in bf16 |\n|---|---|---|---|---|---|---|")
    errors = set()
    for kind, programs in [("data", DATA), ("bounds", BOUNDS)]:
        counts = [0, 0]
        for program in programs:
            plain, exact = run(program, None)
            assert is_right(plain, plain, exact, 0.0), (program.__name__, plain, exact)
            found = {half: run(program, half)[0] for half in HALVES}
            right = [is_right(found[half], plain, exact, u) for half, u in HALVES.items()]
            counts = [count + r for count, r in zip(counts, right)]
            errors |= {f for f in found.values() if isinstance(f, str)}
            # The number that is furthest off: in bf16 if it is wrong there, else in f16.
            shown = found[torch.bfloat16]
            if right[1] and not right[0] and not isinstance(found[torch.float16], str):
                shown = found[torch.float16]
            at = furthest(shown, exact or plain)
            cells = ["error" if isinstance(f, str) else f"{f[at]:.9g}" for f in found.values()]
            cells += ["right" if r else "wrong" for r in right]
            what = " ".join(program.__doc__.split()).removesuffix(".")
            print(f"| `{program.__name__}` | {what} | {plain[at]:.9g} | {' | '.join(cells)} |")
        print(f"| **{kind}** | {len(programs)} programs, right in | | | | {counts[0]} | {counts[1]} |")
    for error in sorted(errors):
        print(f"\nThe error: {error}")


if __name__ == "__main__":
    main()
