#!/usr/bin/env python3
"""The models of `cargo xtask bench` in PyTorch: what a step takes, keeps and peaks at.

Run by `cargo xtask bench --pytorch`. Requests come by standard input, and each has one answer on
standard output, both a line of JSON: {"ask": "time", "model": "mlp", "precision": "bf16", "runs": 3}
"""

import argparse
import functools
import json
import sys
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
        "transformer": (8, 1024, 768, 12),
        "cnn": (256, 64, 128, 3),
        "mlp": (16384, 1, 4096, 8),
        "lstm": (256, 128, 1024, 1),
    },
    "tiny": {
        "transformer": (2, 8, 64, 4),
        "cnn": (2, 8, 4, 3),
        "mlp": (16, 1, 16, 6),
        "lstm": (2, 64, 16, 1),
    },
}


class Block(nn.Module):
    """A layer of Burn's `TransformerEncoder`: pre-norm, dropout on the scores before the mask."""

    def __init__(self, width, head=HEAD, dropout=0.1):
        super().__init__()
        self.head, self.heads = head, width // head
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x, mask):
        batch, length, width = x.shape
        split = lambda x: x.view(batch, length, self.heads, self.head).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = self.dropout(q @ k.transpose(2, 3) / self.head**0.5)
        weights = scores.masked_fill(mask, -1e4).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, mask):
        x = x + self.dropout(self.attention(self.norm_2(x), mask))
        hidden = self.dropout(F.gelu(self.up(self.norm_1(x))))
        return x + self.dropout(self.down(hidden))


class Transformer(nn.Module):
    def __init__(self, length, width, layers, vocabulary=VOCABULARY, **block):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

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
    """The model, its input and its targets."""
    batch, length, width, layers = dims
    labels = lambda count, classes: torch.randint(classes, (count,), device=device)
    if name == "transformer":
        tokens = batch * length
        inputs = labels(tokens, VOCABULARY).view(batch, length)
        return Transformer(length, width, layers).to(device), inputs, labels(tokens, VOCABULARY)
    shape, model = {
        "cnn": ((batch, 3, length, length), cnn),
        "mlp": ((batch, width), mlp),
        "lstm": ((batch, length, width), lambda width, _: Lstm(width)),
    }[name]
    inputs = torch.randn(shape, device=device)
    return model(width, layers).to(device), inputs, labels(batch, CLASSES)


class Step:
    """A training step: forward and backward pass and a step of SGD."""

    def __init__(self, name, dims, precision, device):
        torch.manual_seed(1)
        self.device, self.precision = device, precision
        self.model, self.inputs, self.targets = build(name, dims, device)
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
        return time.perf_counter() - start

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
        """What a forward and backward pass makes the device reserve above what is there before."""
        if self.device != "cuda":
            return None
        synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.scaler.scale(self.loss()).backward()
        peak = torch.cuda.max_memory_reserved() - before
        self.optimizer.zero_grad(set_to_none=True)
        return peak


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def precisions(device):
    """Those worth measuring, FP32 first. A CPU emulates f16, 50 to 100 times slower."""
    return ["fp32", "tf32", "f16", "bf16"] if device == "cuda" else ["fp32", "bf16"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", choices=list(DIMS), default="small")
    args = parser.parse_args()

    @functools.cache
    def step(name, precision):
        return Step(name, DIMS[args.size][name], precision, args.device)

    def answer(request):
        if request["ask"] == "versions":
            return {"pytorch": torch.__version__, "precisions": precisions(args.device)}
        name, precision = request["model"], request["precision"]
        asked = step(name, precision)
        if request["ask"] == "time":
            return {"seconds": asked.timed(request["runs"])}
        saved, peak = asked.saved_bytes(), asked.peak_bytes()
        return {"model": name, "precision": precision, "saved_bytes": saved, "peak_bytes": peak}

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
