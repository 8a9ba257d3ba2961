"""The kernels compile for Hopper on a machine without a GPU, and fit into its shared memory and registers.

Each case (three dtypes, five head widths, every kind of mask, with and without soft-cap) compiles some combinations of
statistics; together they compile every statistic in every direction of the walk.
"""

import pathlib
import re
import subprocess

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import kernel_calls  # noqa: E402
from headwise.weights import kernels  # noqa: E402
from headwise.weights.kernels import launch, terms, triangles  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")
# Bytes per thread that may be kept in memory. On an H200, a panel with blocks of 128 queries was 2 to 14 % faster than
# one with blocks of 64, although the latter fits into registers.
STACK = {128: 256}
SMALL_STACK = 32


def compiled(kernel, arguments, options):
    """The kernel as `launch` would run it, compiled for compute capability 9.0."""
    constants = {name: value for name, value in options.items() if name not in OPTIONS}
    names = [name for name in kernel.arg_names if name not in constants]
    given = dict(zip(names, arguments, strict=True))
    signature = {name: type_of(value) for name, value in given.items()} | dict.fromkeys(constants, "constexpr")
    places = [place for name, value in given.items() for place in aligned(value, kernel.arg_names.index(name))]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={name: options[name] for name in OPTIONS})


def type_of(value):
    if isinstance(value, tuple):
        return tuple(map(type_of, value))
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def aligned(value, *place):
    """The places of pointers and of numbers that 16 divides, which the compiler is told."""
    if isinstance(value, tuple):
        return [found for i, part in enumerate(value) for found in aligned(part, *place, i)]
    return [place] if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0) else []


# Cases, and the combinations of statistics (kernel_calls.QUESTIONS) that each compiles.
CASES = {
    "bfloat16, causal, 128 wide, long": (
        {"D": 128, "T": 32768, "S": 32768, "mask": "causal"},
        [*kernel_calls.QUESTIONS],
    ),
    "bfloat16, causal, 64 wide": ({"D": 64, "T": 8192, "S": 8192, "mask": "causal"}, ["panel", "keys", "largest"]),
    "bfloat16, causal, 256 wide": ({"D": 256, "T": 8192, "S": 8192, "mask": "causal"}, ["entropy", "panel", "keys"]),
    "bfloat16, window, 96 wide, odd": (
        {"D": 96, "T": 12345, "S": 12345, "mask": "window"},
        ["panel", "keys", "tokens"],
    ),
    "bfloat16, prefix, 16 wide": ({"D": 16, "T": 64, "S": 64, "mask": "prefix"}, ["panel", "few keys"]),
    "float16, no mask, 80 wide": ({"D": 80, "T": 513, "S": 600, "mask": "nothing", "dtype": torch.float16}, ["panel"]),
    "bfloat16, padding and soft-cap": ({"D": 64, "mask": "padding", "softcap": 20.0}, ["panel", "tokens"]),
    "float32, documents": ({"D": 64, "mask": "documents", "dtype": torch.float32}, ["panel", "keys"]),
}
compiling = pytest.mark.skipif(
    not hasattr(launch.walk_kernel, "cache_key"), reason="under Triton's interpreter nothing is compiled"
)


def calls_of(case):
    """Every launch of a case, recorded instead of run."""
    recorded = []
    options, combinations = CASES[case]
    options = {"T": 64, "S": 64, **options}
    mask = kernel_calls.MASKS[options["mask"]](1, options["T"], options["S"])
    made = kernel_calls.source(**options | {"mask": mask})
    lse = torch.zeros(made.shape[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", lambda kernel, grid, *call: recorded.append((kernel, *call)))
        for name in combinations:
            kernels.read(made, lse, kernel_calls.QUESTIONS[name](made.shape[3], "cpu"))
        kernels.log_sum_exp(made)
        kernels.weights(made, lse, range(3, 60), made.query.dtype)
    return recorded


def stack_of(result, folder):
    """The bytes of registers that did not fit, which the kernel keeps in memory."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(result.asm["cubin"])
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


def test_the_cases_cover_every_statistic_in_every_direction():
    steps = {name for name in vars(terms) if name.endswith("_step")}
    walks = [options for case in CASES for _, _, options in calls_of(case) if "TERMS" in options]
    used = {term[1].__name__ for walk in walks for term in walk["TERMS"]}
    assert used == steps
    for switch in ("BY_KEY", "SCORES", "NORMAL", "FULL", "CODES", "OPEN", "CAPPED"):
        assert {walk[switch] for walk in walks} == {True, False}, switch


@compiling
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_hopper(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # debugging information takes a tenth of the time
    for kernel, arguments, options in calls_of(case):
        result = compiled(kernel, arguments, options)
        name = f"{kernel.__name__} of {len(options.get('TERMS', ()))} terms"
        assert result.metadata.shared <= 232_448, f"{name} takes more shared memory than a Hopper SM has"
        room = STACK.get(options["BO"], SMALL_STACK)
        assert stack_of(result, tmp_path) <= room, f"{name} does not fit into registers"
        if options.get("FULL") and not options["OPEN"] and options["PRECISION"] == "tf32":
            assert "cp.async" in result.asm["ptx"], f"the loop of {name} does not load ahead"


@compiling
@pytest.mark.parametrize("D", [72, 128])
def test_turning_and_joining_chunks_compiles_for_hopper(D, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    calls = []
    monkeypatch.setattr(
        triangles, "launch", lambda kernel, grid, arguments, options: calls.append((kernel, arguments, options))
    )
    x = torch.zeros(1, 2, 256, D, dtype=torch.bfloat16)
    turned, lse = triangles.turn(x, 64, 1), torch.zeros(1, 2, 256)
    near = x.unflatten(2, (4, 64)).transpose(1, 2).flatten(0, 1)
    triangles.join((near, lse), (turned, lse), (x, lse), 64, 0)
    triangles.add(near, turned, x, 64, 0, 0)
    assert len(calls) == 3
    for call in calls:
        assert compiled(*call).asm["cubin"]
