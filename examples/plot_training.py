"""Plot the log of a training run: training loss, and bits per byte on held-out text.

python examples/plot_training.py run/log.jsonl loss.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

mpl.use("agg")
mpl.rcParams["svg.hashsalt"] = "headwise"  # the same log gives the same file


def draw(log: Path, picture: Path) -> None:
    """Plot two curves over the training steps, side by side."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for axes, name, title in (
        (left, "loss", "training loss, nats per token"),
        (right, "bits_per_byte", "held-out text, bits per byte"),
    ):
        known = [(line["step"], line[name]) for line in lines if name in line and line.get("sample", True)]
        axes.plot(*zip(*known, strict=True), color="#1f5f8b", linewidth=1.2)
        axes.set(xlabel="step", title=title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    left.set_ylim(top=6)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="log.jsonl of a training run")
    parser.add_argument("picture", type=Path, help="file to write, such as loss.svg or loss.png")
    options = parser.parse_args()
    draw(options.log, options.picture)
