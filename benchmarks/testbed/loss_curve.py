"""Draws the loss curve of a training run: `python loss_curve.py` (needs matplotlib)."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "mini_moe")
    parser.add_argument("--out", type=Path, default=HERE / "loss_curve.png")
    arguments = parser.parse_args()

    curve = [json.loads(line) for line in (arguments.model / "loss_curve.jsonl").read_text().splitlines()]
    held_out = [entry for entry in curve if "held_out_loss" in entry]
    bigram = json.loads((HERE / "evaluation.json").read_text())["mean_over_kinds"]["bigram"]

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [entry["tokens"] / 1e6 for entry in curve], [entry["loss"] for entry in curve], lw=0.7, label="one batch"
    )
    axes.plot(
        [entry["tokens"] / 1e6 for entry in held_out],
        [entry["held_out_loss"] for entry in held_out],
        label="held out, mean over kinds",
    )
    axes.axhline(bigram, color="grey", ls="--", lw=1, label="bigram, held out, mean over kinds")
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)", ylim=(1.4, 6))
    axes.legend()
    figure.savefig(arguments.out, dpi=100)


if __name__ == "__main__":
    main()
