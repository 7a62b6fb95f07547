"""Draws the kept width of every expert of a pruned checkpoint, layer by expert (needs matplotlib).

python benchmarks/widths.py out/demo/p_q4 benchmarks/widths.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from moe_coverage_plugin import Manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()

    manifest = Manifest.from_checkpoint(args.checkpoint)
    if manifest is None:
        parser.error(f"{args.checkpoint} is no pruned checkpoint")
    widths = list(manifest.widths.values())
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(widths) + 1), layout="constrained")
    image = axes.imshow(widths, vmin=0, vmax=manifest.intermediate_size, cmap="viridis", aspect="auto")
    for layer, row in enumerate(widths):
        for expert, width in enumerate(row):
            light = width < manifest.intermediate_size / 2
            axes.text(expert, layer, str(width), ha="center", va="center", fontsize=7, color="w" if light else "k")
    axes.set(xlabel="expert", ylabel="layer", yticks=range(len(widths)), xticks=range(len(widths[0])))
    figure.colorbar(image, label=f"channels kept of {manifest.intermediate_size}")
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
