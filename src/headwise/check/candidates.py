"""Which classes and functions of a file look like multi-head attention, best first."""

import ast
import inspect
import re
from typing import Any

from torch import nn

from headwise.check.loading import Loaded
from headwise.check.names import WEIGHTS_IN, call_role, constructor_role, plain
from headwise.check.subject import METHODS

NAME = re.compile(r"attn|attention|mha|mhsa|msa|multihead|selfatt|crossatt|multi_head", re.IGNORECASE)
WEIGHTS = re.compile(r"Linear|Parameter|einsum|Conv1d|randn|MultiheadAttention")
MULTI = re.compile(r"mult|mha|mhsa|msa|heads", re.IGNORECASE)
OTHER = re.compile(
    r"block|layer$|transformer|encoder|decoder|model|gpt|config|embedding|test|dataset|feed|norm|mlp|wrapper$|trainer",
    re.IGNORECASE,
)


def candidates(loaded: Loaded) -> list[tuple[str, Any, int]]:
    """(name, class or function, score) of everything with a positive score, best first."""
    texts = _texts(loaded)
    used = {name: _uses(texts, name) for name in texts}
    found = []
    for name, thing in loaded.namespace.items():
        if name.startswith("__") or name not in texts:
            continue
        if inspect.isclass(thing):
            score = _class_score(name, thing, texts, used)
        elif inspect.isfunction(thing):
            score = _function_score(name, thing, "\n".join([texts[name], *(texts[other] for other in used[name])]))
        else:
            continue
        if score > 0:
            found.append((name, thing, score))
    if not found:  # whatever has a softmax and weights, under any name
        found = [
            (name, thing, 1)
            for name, thing in loaded.namespace.items()
            if inspect.isclass(thing) and re.search(r"softmax", text := texts.get(name, "")) and WEIGHTS.search(text)
        ]
    order = {name: i for i, name in enumerate(texts)}
    return sorted(found, key=lambda f: (-f[2], -order[f[0]]))


def _texts(loaded: Loaded) -> dict[str, str]:
    """Source of every definition at module level; of two with one name the last counts, as in Python."""
    tree = ast.parse(loaded.source)
    lines = loaded.source.splitlines()
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in loaded.namespace:
            if isinstance(node, ast.FunctionDef) and node.col_offset > 0:
                continue
            found.pop(node.name, None)
            found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def _uses(texts: dict[str, str], name: str) -> list[str]:
    """Other definitions that this one mentions."""
    return [other for other in texts if other != name and re.search(rf"\b{other}\b", texts[name])]


def _class_score(name: str, cls: type, texts: dict[str, str], used: dict[str, list[str]]) -> int:
    text = texts[name]
    if not (issubclass(cls, nn.Module) or any(callable(getattr(cls, m, None)) for m in METHODS if m != "__call__")):
        return 0
    if cls.__module__.startswith("torch."):
        return 0
    body = "\n".join([text, *(texts[other] for other in used.get(name, ()))])
    score = 0
    score += 40 if NAME.search(name) else 0
    score += 25 if MULTI.search(name) else 0
    score -= 30 if OTHER.search(name) else 0
    score -= 2 if "cross" in name.lower() else 0  # beside self-attention it is the special case
    score += 15 if re.search(r"softmax|scaled_dot_product_attention|MultiheadAttention", body) else 0
    try:
        parameters = list(inspect.signature(cls).parameters)
    except (TypeError, ValueError):
        parameters = []
    score += (
        20 if any(constructor_role(p) == "heads" for p in parameters) or re.search(r"n_?u?m?_?heads?\b", text) else 0
    )
    score += 10 if WEIGHTS.search(body) else -25
    attends = bool(re.search(r"softmax|scaled_dot_product|ttention|\bHead\b|heads", body))
    linear_only = re.search(r"FeedForward|MLP", name) is not None
    return score if attends and not linear_only and score >= 30 else 0


def _function_score(name: str, function: Any, text: str) -> int:
    words = [plain(p) for p in inspect.signature(function).parameters]
    weights = sum(word in WEIGHTS_IN for word in words)
    heads = any(constructor_role(p) == "heads" for p in inspect.signature(function).parameters)
    inputs = any(call_role(p) in ("query", "self") for p in inspect.signature(function).parameters)
    if not inputs or ("softmax" not in text and "scaled_dot_product" not in text and "attention" not in text):
        return 0
    if weights >= 2 or (heads and NAME.search(name)):
        return 30 + 5 * weights + (10 if MULTI.search(name) else 0)
    return 5 if NAME.search(name) and name.startswith(("scaled", "attention", "self", "multi")) else 0
