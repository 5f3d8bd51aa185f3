"""How far bf16 is from FP32 where a linear layer adds its bias after its product.

Burn's backends compose a linear layer: in bf16 the product is rounded, and then its sum with the bias. PyTorch's
kernel adds the bias before it rounds. This trains the model of `cargo xtask bench convergence` with either, from the
weights and batches that its last run wrote, and prints the mean difference of the last 50 losses from FP32's.

    cargo xtask bench convergence --backend tch --seed 1
    python xtask/pytorch/linear_bias.py target/bench/convergence
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from convergence import state_dict, train
from torch import nn

LAST = 50


def bias_after(self, x):
    y = F.linear(x, self.weight)
    return y + self.bias.to(y.dtype)


def distance(losses, fp32):
    pairs = list(zip(losses, fp32))[-LAST:]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    run = json.loads((folder / "run.json").read_text())
    weights = state_dict(json.loads((folder / "weights.json").read_text())["item"])
    batches = torch.tensor(run["batches"])

    fp32 = train(weights, batches, run["adamw"], None)
    before = distance(train(weights, batches, run["adamw"], torch.bfloat16), fp32)
    nn.Linear.forward = bias_after
    after = distance(train(weights, batches, run["adamw"], torch.bfloat16), fp32)
    print(f"bias before rounding {before:.6f}, after it {after:.6f}: {after / before:.3f}")


if __name__ == "__main__":
    main()
