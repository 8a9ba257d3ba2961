"""Write the page of another attention viewer; run by page.py in the environment that has that viewer.

    python benchmarks/peer_page.py VIEWER WEIGHTS.pt PAGE.html

WEIGHTS.pt holds the dense weights (layers, H, T, T) and the words.
"""

import sys
from pathlib import Path
from typing import Any

import torch


def bertviz(weights: Any, words: list[str]) -> str:
    """The head view of BertViz."""
    import bertviz

    return str(bertviz.head_view([layer[None] for layer in weights], words, html_action="return").data)


def circuitsvis(weights: Any, words: list[str]) -> str:
    """The attention patterns of CircuitsVis, with its own script in the page."""
    import circuitsvis

    return str(circuitsvis.attention.attention_patterns(words, weights.flatten(0, 1)).local_src)


def inspectus(weights: Any, words: list[str]) -> str:
    """The attention view of Inspectus, which displays its output and returns nothing."""
    import inspectus
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    with capture_output() as shown:
        inspectus.attention(weights.numpy(), words, words)
    return "".join(each.data.get("text/html", "") for each in shown.outputs)


def main() -> None:
    """Write one page."""
    viewer, weights, page = sys.argv[1:]
    given = torch.load(weights, weights_only=True)
    make = {"bertviz": bertviz, "circuitsvis": circuitsvis, "inspectus": inspectus}[viewer]
    html = make(given["weights"], given["words"])
    Path(page).write_text(f"<!doctype html><meta charset=utf-8><body>{html}</body>", encoding="utf-8")


if __name__ == "__main__":
    main()
