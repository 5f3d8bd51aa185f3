#!/usr/bin/env python3
"""The models of `cargo xtask bench` in PyTorch: what a step takes, keeps and peaks at.

Run by `cargo xtask bench speed --pytorch`, or by hand: python3 xtask/pytorch/bench.py --help
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CLASSES, HEAD = 256, 10, 64
# batch, length, width, layers: as in xtask/src/bench/models.rs
DIMS = {
    "small": {
        "transformer": (8, 256, 256, 4),
        "cnn": (32, 32, 32, 3),
        "mlp": (4096, 1, 512, 6),
        "lstm": (64, 64, 128, 1),
    },
    "large": {
        "transformer": (16, 1024, 768, 12),
        "cnn": (256, 64, 128, 3),
        "mlp": (16384, 1, 4096, 8),
        "lstm": (256, 128, 1024, 1),
    },
}


class Block(nn.Module):
    """A layer of Burn's `TransformerEncoder`: pre-norm, dropout on the scores before the mask."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // HEAD
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def attention(self, x, mask):
        batch, length, width = x.shape
        split = lambda x: x.view(batch, length, self.heads, HEAD).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = self.dropout(q @ k.transpose(2, 3) / HEAD**0.5)
        weights = scores.masked_fill(mask, -1e4).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, mask):
        x = x + self.dropout(self.attention(self.norm_2(x), mask))
        hidden = self.dropout(F.gelu(self.up(self.norm_1(x))))
        return x + self.dropout(self.down(hidden))


class Transformer(nn.Module):
    def __init__(self, length, width, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).flatten(0, 1)


def cnn(width, stages):
    layers = []
    for stage in range(stages):
        to = width << stage
        first = (3, to, 1) if stage == 0 else (to // 2, to, 2)
        for a, b, stride in (first, (to, to, 1)):
            layers += [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *pool, nn.Linear(width << (stages - 1), CLASSES))


def mlp(width, count):
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Lstm(nn.Module):
    """Step by step, as Burn's. cuDNN's is one kernel, which no tape sees into."""

    def __init__(self, width):
        super().__init__()
        self.input, self.hidden = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        hidden = cell = x.new_zeros(x.shape[0], x.shape[2])
        for step in x.unbind(1):
            i, f, o, g = (self.input(step) + self.hidden(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return self.head(hidden)


def build(name, dims, device):
    """The model, its input, its targets, and what it is fed with how much of it."""
    batch, length, width, layers = dims
    labels = lambda count, classes: torch.randint(classes, (count,), device=device)
    if name == "transformer":
        tokens = batch * length
        inputs = labels(tokens, VOCABULARY).view(batch, length)
        model, targets = Transformer(length, width, layers), labels(tokens, VOCABULARY)
        return model.to(device), inputs, targets, ("tokens", tokens)
    shape, model, fed = {
        "cnn": ((batch, 3, length, length), cnn, ("images", batch)),
        "mlp": ((batch, width), mlp, ("rows", batch)),
        "lstm": ((batch, length, width), lambda width, _: Lstm(width), ("tokens", batch * length)),
    }[name]
    inputs = torch.randn(shape, device=device)
    return model(width, layers).to(device), inputs, labels(batch, CLASSES), fed


class Step:
    """A training step: forward and backward pass and a step of SGD."""

    def __init__(self, name, dims, precision, device):
        torch.manual_seed(1)
        self.device, self.precision = device, precision
        self.model, self.inputs, self.targets, self.fed = build(name, dims, device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.half = {"f16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "f16")

    def loss(self):
        # Both are read when a kernel is chosen: the steps of different precisions alternate.
        tf32 = self.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        with torch.autocast(self.device, dtype=self.half, enabled=self.half is not None):
            return F.cross_entropy(self.model(self.inputs), self.targets)

    def run(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, runs):
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(runs):
            self.run()
        synchronize(self.device)
        return (time.perf_counter() - start) / runs

    def saved_bytes(self):
        """What autograd saves for backward, but for the parameters and the batch, each once."""
        known = [*self.model.parameters(), self.inputs, self.targets]
        known, saved = {t.untyped_storage().data_ptr() for t in known}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss()
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(saved.values())

    def peak_bytes(self):
        """The most that a forward and backward pass holds above what is there before."""
        if self.device != "cuda":
            return None
        synchronize(self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.scaler.scale(self.loss()).backward()
        peak = torch.cuda.max_memory_allocated() - before
        self.optimizer.zero_grad(set_to_none=True)
        return peak


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name, dims, device, rounds):
    """All precisions in turn, so that a noisy machine disturbs them alike."""
    precisions = ["fp32", *(["tf32"] if device == "cuda" else []), "f16", "bf16"]
    steps = [Step(name, dims, precision, device) for precision in precisions]
    for step in steps:
        step.timed(2)
    runs = max(1, int(0.1 / steps[0].timed(1)))
    seconds = [[] for _ in steps]
    for first in range(rounds):
        for i in range(len(steps)):
            i = (first + i) % len(steps)
            seconds[i].append(steps[i].timed(runs))
    for step, took in zip(steps, seconds):
        unit, items = step.fed
        ratios = sorted(a / b for a, b in zip(took, seconds[0]))
        median = statistics.median(took)
        yield {
            "model": name,
            "precision": step.precision,
            "step_ms": median * 1e3,
            "step_ratio": statistics.median(ratios),
            "step_ratio_low": ratios[(rounds - 1) // 4],
            "step_ratio_high": ratios[(rounds - 1) * 3 // 4],
            "items_per_second": items / median,
            "unit": unit,
            "saved_bytes": step.saved_bytes(),
            "peak_bytes": step.peak_bytes(),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", choices=list(DIMS), default="small")
    parser.add_argument("--model", choices=list(DIMS["small"]), help="one model alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", required=True, help="the file that is written")
    args = parser.parse_args()
    dims = {name: dims for name, dims in DIMS[args.size].items() if args.model in (None, name)}
    rows = [
        row
        for name, dims in dims.items()
        for row in measure(name, dims, args.device, args.rounds)
    ]
    with open(args.json, "w") as file:
        report = {"pytorch": torch.__version__, "device": args.device, "rows": rows}
        json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
