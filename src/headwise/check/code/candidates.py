"""What in a file looks like multi-head attention, best first."""

import ast
import inspect
import re
from typing import Any

from torch import nn

from headwise.check.arguments import parameters_of
from headwise.check.code.loader import Loaded
from headwise.check.code.source import MULTI, projects
from headwise.check.code.stubs import Stub
from headwise.check.objects import METHODS
from headwise.check.vocabulary import WEIGHTS_IN, call_role, constructor_role, plain

NAME = re.compile(r"attn|attention|mha|mhsa|msa|multihead|selfatt|crossatt|multi_head", re.IGNORECASE)
WEIGHTS = re.compile(r"Linear|Parameter|einsum|Conv\dd|randn|MultiheadAttention")
PRODUCT = re.compile(r"[\w\])][ \t]*@|matmul|einsum|bmm|scaled_dot_product_attention|MultiheadAttention")
ATTENDS = re.compile(r"softmax|scaled_dot_product_attention|MultiheadAttention")
FOREIGN = re.compile(r"\b(np|numpy|jnp|jax|tf|keras|mx|mlx|flax|haiku|hk|paddle|tinygrad|cupy|cp)\.")
NATIVE = re.compile(r"\btorch\b|\bnn\.|\bF\.|\bTensor\b")
UNFINISHED = re.compile(r"(?s:(?=.*quer)(?=.*key)(?=.*value))", re.IGNORECASE)  # it has no softmax yet
OTHER = re.compile(
    r"block|layer$|transformer|encoder|decoder|model|gpt|config|embedding|test|dataset|feed|norm|mlp|wrapper$|trainer|(?-i:For[A-Z])",
    re.IGNORECASE,
)
FUSED = re.compile(r"flash|sdpa|xformers|fused|flex|paged", re.IGNORECASE)  # beside a plain class, the faster one
LAYER = re.compile(r"\bnn\.(Linear|Parameter)\(")  # in the constructor of a class that has no forward yet


def candidates(loaded: Loaded) -> list[tuple[str, Any]]:
    """Names and objects of everything that looks like attention, best first."""
    texts = _definitions(loaded)
    scores, bodies = {}, {}
    for name, thing in loaded.namespace.items():
        if name.startswith("__") or name not in texts:
            continue
        used = [text for other, text in texts.items() if other != name and re.search(rf"\b{other}\b", texts[name])]
        body = bodies[name] = "\n".join([texts[name], *used])  # with the definitions it mentions
        if inspect.isclass(thing):
            scores[name] = _class_score(name, thing, texts[name], body)
        elif inspect.isfunction(thing):
            scores[name] = _function_score(name, thing, body)
    native = {name: score for name, score in scores.items() if not _is_foreign(loaded.namespace[name], bodies[name])}
    found = {name: score for name, score in native.items() if score > 0}
    if not any(found[name] > 0 for name in found if inspect.isclass(loaded.namespace[name])):
        # any class that attends itself, whatever its name
        classes = [name for name in native if inspect.isclass(loaded.namespace[name]) and WEIGHTS.search(texts[name])]
        found |= {name: 8 for name in classes if ATTENDS.search(texts[name]) and PRODUCT.search(texts[name])}
        found = found or {name: 1 for name in classes if UNFINISHED.search(texts[name]) or projects(texts[name])}
    order = {name: i for i, name in enumerate(texts)}
    return [(name, loaded.namespace[name]) for name in sorted(found, key=lambda name: (-found[name], -order[name]))]


def _definitions(loaded: Loaded) -> dict[str, str]:
    """The source of every definition at module level; of two with the same name the last counts, as in Python."""
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


def _is_foreign(thing: Any, text: str) -> bool:
    """Whether a class or function is written for another library than PyTorch."""
    bases = thing.__mro__ if inspect.isclass(thing) else ()
    if nn.Module in bases and not any(isinstance(base, Stub) for base in getattr(thing, "__orig_bases__", ())):
        return False
    return FOREIGN.search(text) is not None and NATIVE.search(text) is None


def _class_score(name: str, cls: type, text: str, body: str) -> int:
    called = any(callable(getattr(cls, m, None)) for m in METHODS if m != "__call__")
    if not (issubclass(cls, nn.Module) or called or (NAME.search(name) and LAYER.search(text))):
        return 0
    if cls.__module__.startswith("torch.") or re.search(r"FeedForward|MLP", name):
        return 0
    heads = any(constructor_role(p.name) == "heads" for p in parameters_of(cls))
    score = 40 if NAME.search(name) else 0
    score += 25 if MULTI.search(name) else 0
    score -= 30 if OTHER.search(name) and not re.search(r"(att(entio)?n(_?layer)?|MHA)$", name, re.IGNORECASE) else 0
    score -= 2 if "cross" in name.lower() else 0  # self-attention in the same file comes first
    score -= 6 if FUSED.search(name) else 0
    score += 15 if re.search(r"softmax|scaled_dot_product_attention|MultiheadAttention", body) else 0
    score += 20 if heads or re.search(r"n_?u?m?_?heads?\b", text) else 0
    score += 10 if WEIGHTS.search(body) else -25
    attends = re.search(r"softmax|scaled_dot_product|ttention|\bHead\b|heads", body + name) is not None
    attends = attends or NAME.search(name) is not None
    return score if attends and score >= 30 else 0


def _function_score(name: str, function: Any, body: str) -> int:
    names = list(inspect.signature(function).parameters)
    weights = sum(plain(p) in WEIGHTS_IN for p in names)
    heads = any(constructor_role(p) == "heads" for p in names)
    inputs = any(call_role(p) in ("query", "self") for p in names)
    if not inputs or not re.search(r"softmax|scaled_dot_product|attention", body):
        return 0
    if weights >= 2 or (heads and NAME.search(name)):
        return 30 + 5 * weights + (10 if MULTI.search(name) else 0)
    core = {"query", "key", "value"} <= {call_role(p) for p in names}
    if core and re.search(r"softmax|scaled_dot_product", body):
        return 5
    return 5 if (NAME.search(name) and core) or name.startswith(("scaled", "attention", "self", "multi")) else 0
