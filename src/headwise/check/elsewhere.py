"""Whether the output projection of a class lies in another class of its file, which uses it: as BERT and its kin do."""

import ast
import re
from pathlib import Path

from headwise.check.bound import Bound

# A layer named for what comes out, and as wide as what goes in: not the one that predicts words or classes.
LINEAR = re.compile(
    r"self\.(\w*proj\w*|\w*out\w*|w_?o|dense|fc_?o\w*|o|linear)\s*=\s*[\w.]*Linear\(\s*([\w.]+)\s*,\s*(\2)\s*[,)]",
    re.IGNORECASE,
)
OUTPUT = re.compile(r"\w*(Self|Attention|Attn)\w*Output\b")


def projecting_class(bound: Bound) -> str | None:
    """The name of a class that calls this one and has a layer for what comes out."""
    name = getattr(bound.target, "__name__", "")
    if bound.filename is None or not name or not Path(bound.filename).is_file():
        return None
    try:
        source = Path(bound.filename).read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != name:
            text = ast.get_source_segment(source, node) or ""
            if re.search(rf"\b{name}\(", text) and (LINEAR.search(text) or OUTPUT.search(text)):
                return node.name
    return None
