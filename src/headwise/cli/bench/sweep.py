"""A benchmark run: every candidate at every length, checked before it is timed, and dropped if wrong, slow or large."""

import dataclasses
import gc
import itertools
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.cli.bench.measurement import (
    DTYPES,
    Verdict,
    growth,
    interleaved,
    launches,
    ratio,
    rounds_of,
    summary,
    tensor_peak,
    timed,
)
from headwise.cli.bench.peers import OURS, PEERS, Peer, peer_named
from headwise.cli.bench.peers.packages import one_line, version_of
from headwise.cli.bench.workload import GRADIENT_TOKENS, Problem, Workload
from headwise.cli.console import say
from headwise.errors import HeadwiseError
from headwise.learn.cost import human

LEAST_ROUNDS = 9  # of the ladder: the fewest whose interval leaves out the slowest
ROUNDS, LEAST = 200, 3  # most and fewest rounds of every candidate
BACKWARD_MATRICES = 2  # a backward pass holds about twice the T×T tensors
PACKAGES = (*dict.fromkeys(peer.package for peer in PEERS if peer.package != "torch"), "flash_colreduce")
RUNGS = ("textbook list", "textbook class", OURS)
MODES = {"forward": False, "forward+backward": True}
SOURCE = Path(__file__).parents[2]
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product is timed
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes of the tensor that is copied: far more than caches hold
TIMES = 12  # runs, of which the fastest is the ceiling


class Trial(NamedTuple):
    """A candidate at one length: what is timed, and what judges its result."""

    run: Callable[[], object]
    judge: Callable[[], Verdict]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that can be run at any length.

    Args:
        name: its name in tables.
        trial: prepares it for a number of tokens.
        needs: the bytes it is expected to need there.
        refuses: why it cannot be measured at all, or None.
    """

    name: str
    trial: Callable[[int], Trial]
    needs: Callable[[int], int] = lambda _tokens: 0
    refuses: str | None = None


class Effort(NamedTuple):
    """How much time to spend, and whether to report progress."""

    seconds: float = 1.5  # on the rounds of one length
    limit: float = 1.5  # on one run of one candidate
    quiet: bool = False

    def tell(self, text: str) -> None:
        """Print progress to standard error."""
        if not self.quiet:
            say(text)


class SweepResult(NamedTuple):
    """The measured rows, and which candidates were dropped, from which length on and why."""

    rows: list[dict[str, Any]]
    left_out: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """The rows, the dropped candidates, and how time and memory grow."""
        return {"rows": self.rows, "left_out": self.left_out, "growth": growth(self.rows)}


def sweep(candidates: Sequence[Candidate], lengths: Sequence[int], device: str, effort: Effort) -> SweepResult:
    """Every candidate at every length, shortest first. A candidate that is dropped stays out."""
    found = SweepResult([], [{"name": c.name, "tokens": None, "why": c.refuses} for c in candidates if c.refuses])
    inside = [c for c in candidates if c.refuses is None]
    for tokens in sorted(lengths):
        effort.tell(f"T={tokens}, candidates: {len(inside)}")
        trials: dict[str, Trial] = {}
        rows: dict[str, dict[str, Any]] = {}
        for candidate in list(inside):
            ready = _admitted(candidate, tokens, device, effort)
            if isinstance(ready, str):
                effort.tell(f"  {candidate.name}: {ready}")
                found.left_out.append({"name": candidate.name, "tokens": tokens, "why": ready})
                inside.remove(candidate)
            else:
                trials[candidate.name], rows[candidate.name] = ready
        runs = {name: trial.run for name, trial in trials.items()}
        times = interleaved(runs, device, ROUNDS, effort.seconds, least=LEAST, warm=0)
        found.rows.extend({"name": name, "tokens": tokens, **times[name], **row} for name, row in rows.items())
        _clear(device)
    return found


def _admitted(candidate: Candidate, tokens: int, device: str, effort: Effort) -> tuple[Trial, dict[str, float]] | str:
    """The prepared candidate with its error and memory, or the reason why it is dropped."""
    needed, free = candidate.needs(tokens), free_bytes(device)
    if needed > free:
        return f"would take {human(needed, 'B', binary=True)}, and {human(free, 'B', binary=True)} are free"
    try:
        trial = candidate.trial(tokens)
        verdict = trial.judge()
        if verdict.wrong is not None:
            return verdict.wrong
        trial.run()
        took = timed(trial.run, device) / 1e3
        if took > effort.limit:  # try again, in case another process interfered
            took = min(took, timed(trial.run, device) / 1e3)
        if took > effort.limit:
            return f"one run takes {took:.2g} s, the limit is {effort.limit:g} s"
        return trial, {"error": verdict.error, "MiB": tensor_peak(trial.run, device)}
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # noqa: BLE001, RUF100 - one failing peer must not stop the others
        return f"fails: {one_line(error)}"
    finally:
        _clear(device)


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def candidate(peer: Peer, problem: Problem) -> Candidate:
    """A peer as a candidate: the same weights and input, forward only or forward and backward."""
    workload = problem.workload
    factor = peer.matrices * (BACKWARD_MATRICES if workload.backward else 1)
    return Candidate(
        peer.name,
        lambda tokens: _trial(peer, problem, tokens),
        lambda tokens: factor * workload.matrix_bytes(tokens),
        peer.refuses(workload),
    )


def built(peer: Peer, problem: Problem, tokens: int) -> nn.Module:
    """The peer's module with the problem's weights, in training mode if gradients are needed."""
    workload = problem.workload
    weights = problem.weights.to(workload.torch_dtype, biases=peer.biases)
    return peer.build(workload, weights, tokens).to(**workload.place).train(workload.backward)


def _trial(peer: Peer, problem: Problem, tokens: int) -> Trial:
    backward = problem.workload.backward
    module = built(peer, problem, max(tokens, GRADIENT_TOKENS) if backward else tokens)
    x = problem.x(tokens)

    def judge() -> Verdict:
        with torch.no_grad():
            verdict = problem.judge(module(x), tokens, biases=peer.biases)
        return verdict if verdict.wrong or not backward else judged_gradient(module, problem, peer.biases)

    return Trial(step(module, x, backward=backward), judge)


def judged_gradient(module: nn.Module, problem: Problem, biases: bool) -> Verdict:
    """Compare the module's gradient with respect to a short input with the reference's."""
    x = problem.gradient_input().requires_grad_()
    module(x).double().square().sum().backward()
    assert x.grad is not None  # noqa: S101
    return problem.judge_gradient(x.grad, biases=biases)


def step(module: Callable[[Tensor], Tensor], x: Tensor, *, backward: bool) -> Callable[[], object]:
    """One inference pass, or one forward and backward pass."""
    if not backward:
        return torch.no_grad()(lambda: module(x))
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)

    def run() -> None:
        x.grad = None
        module(x).backward(gradient)

    return run


def measured(workload: Workload, lengths: Sequence[int], peers: Sequence[Peer], effort: Effort) -> dict[str, Any]:
    """The layer against its peers: rows, dropped candidates, the machine's ceilings, growth."""
    torch.manual_seed(0)
    effort.tell("measuring the machine's ceilings")
    most = ceilings(workload.device, workload.dtype)
    problem = Problem(workload)
    candidates = [candidate(peer, problem) for peer in peers]
    head = about(workload.device, PACKAGES)  # before the sweep: files may change while it runs
    found = sweep(candidates, lengths, workload.device, effort)
    for row in found.rows:
        row["share"] = round(workload.ceiling_share(row["tokens"], row["ms"], most), 4)
    return {"subject": "bench", **head, "setting": dataclasses.asdict(workload), "ceilings": most, **found.to_dict()}


def ladder(
    workload: Workload, lengths: Sequence[int], effort: Effort, *, one_head: bool = True
) -> list[dict[str, Any]]:
    """Why the class is faster: time, memory and launches of the textbook's rungs and of our layer.

    One row for every rung, length and mode, with all heads and, with `one_head`, also with one. Times run from the call
    to the result, because on a GPU the list of heads pays for its launches.
    """
    rows = []
    for tokens, heads in itertools.product(lengths, sorted({1, workload.heads} if one_head else {workload.heads})):
        for mode, backward in MODES.items():
            effort.tell(f"ladder, T={tokens}, heads: {heads}, {mode}")
            here = dataclasses.replace(workload, heads=heads, causal=True, backward=backward)
            rows += [{"heads": heads, "tokens": tokens, "mode": mode, **row} for row in _rungs(here, tokens, effort)]
    return rows


def _rungs(workload: Workload, tokens: int, effort: Effort) -> list[dict[str, Any]]:
    problem, device = Problem(workload), workload.device
    modules = {name: built(peer_named(name), problem, max(tokens, GRADIENT_TOKENS)) for name in RUNGS}
    for name, module in modules.items():
        wrong = judged_gradient(module, problem, True).wrong
        if wrong is not None:
            raise HeadwiseError(f"{name}: {wrong}.")
    runs = {name: step(m, problem.x(tokens), backward=workload.backward) for name, m in modules.items()}
    times = rounds_of(runs, device, seconds=effort.seconds, least=LEAST_ROUNDS, ahead=False)
    return [
        {
            "name": name,
            **summary(times[name]),
            "ratio": ratio(times[name], times[RUNGS[0]])._asdict(),  # to the list of heads
            "MiB": tensor_peak(run, device),
            "launches": launches(run, device),
        }
        for name, run in runs.items()
    ]


def about(device: str, packages: Iterable[str] = ()) -> dict[str, object]:
    """The header of every result: device, versions and commit."""
    versions = {package.replace("_", "-"): version_of(package) for package in packages}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": {package: version for package, version in versions.items() if version is not None},
        "commit": commit(),
    }


def device_name(device: str) -> str:
    """The GPU's name, or the processor type and torch's number of threads."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def commit() -> str:
    """The commit of this source, with "-dirty" if files have changed since; "unknown" outside its repository."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may lie in another repository
        changed = "-dirty" if _git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return _git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=SOURCE, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return ran.stdout.strip()


def free_bytes(device: str) -> int:
    """The memory still available to a run."""
    if device == "cuda":
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch's cache, which it can reuse
        return int(torch.cuda.mem_get_info()[0]) + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def ceilings(device: str, dtype: str) -> dict[str, float]:
    """Operations per second in a matrix product of this dtype, and bytes per second read and written by a copy."""
    n, size = SIDE[device], COPIED[device]
    a, b = (torch.randn(n, n, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = min(timed(lambda: a @ b, device) for _ in range(TIMES)) / 1e3
    copy = min(timed(lambda: target.copy_(source), device) for _ in range(TIMES)) / 1e3
    return {"flops": 2 * n**3 / product, "bytes": 2 * size / copy}
