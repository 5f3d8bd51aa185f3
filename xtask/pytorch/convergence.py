#!/usr/bin/env python3
"""The character model of `examples/learner` in PyTorch: its losses in FP32 and under autocast in bf16.

Run by `cargo xtask bench convergence --pytorch`, which writes a folder with the initial weights, the
batches and the settings of AdamW. Prints the losses of both runs as JSON.
"""

import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from bench import Transformer

# As in examples/learner/src/model.rs.
WIDTH, HEADS, LAYERS = 64, 4, 2
# What Burn's modules call what `bench.py` calls otherwise.
NAMES = {
    "layers.layers": "blocks",
    "mha.query": "q",
    "mha.key": "k",
    "mha.value": "v",
    "mha.output": "o",
    "pwff.linear_inner": "up",
    "pwff.linear_outer": "down",
    "gamma": "weight",
    "beta": "bias",
}


def parameters(record, path=()):
    """Each parameter in a record of Burn's, with its path."""
    if isinstance(record, dict) and "param" in record:
        data = record["param"]
        values = torch.frombuffer(bytearray(data["bytes"]), dtype=torch.float32)
        yield path, values.view(data["shape"])
    elif isinstance(record, (dict, list)):
        items = record.items() if isinstance(record, dict) else enumerate(record)
        for key, value in items:
            yield from parameters(value, (*path, str(key)))


def state_dict(record):
    """A record of Burn's as PyTorch has it."""
    state = {}
    for path, values in parameters(record):
        name = ".".join(path)
        for burn, pytorch in NAMES.items():
            name = name.replace(burn, pytorch)
        # Burn's linear layers have their weights as [in, out].
        linear = values.dim() == 2 and path[0] not in ("tokens", "positions")
        state[name] = values.T if linear else values
    return state


def train(weights, batches, adamw, half):
    """The loss of each step."""
    vocabulary, length, device = len(weights["tokens.weight"]), batches.shape[2] - 1, batches.device
    model = Transformer(length, WIDTH, LAYERS, vocabulary, head=WIDTH // HEADS, dropout=0.0)
    model.load_state_dict(weights)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    losses = []
    for windows in batches:
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            loss = F.cross_entropy(model(windows[:, :-1]), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()

    run = json.loads((args.folder / "run.json").read_text())
    weights = state_dict(json.loads((args.folder / "weights.json").read_text())["item"])
    batches = torch.tensor(run["batches"], device=args.device)
    halves = (None, torch.bfloat16)
    print(json.dumps([train(weights, batches, run["adamw"], half) for half in halves]))


if __name__ == "__main__":
    main()
