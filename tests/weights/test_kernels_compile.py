"""Every kernel compiles for Hopper on a machine without a GPU, and fits into its shared memory.

Each kernel is compiled in every case below (three dtypes, five head widths, every kind of mask, with and without
soft-cap). Kernels with several variants of their code take one variant per case; a test checks that together the
cases compile every value of every compile-time setting.
"""

import functools
import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

import kernel_calls  # noqa: E402
from headwise.weights.kernels import launch, triangles  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


def compiled(kernel, arguments, options):
    """The kernel as `launch` would run it, compiled for compute capability 9.0."""
    constants = {name: value for name, value in options.items() if name not in OPTIONS}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: type_of(value) for name, value in zip(names, arguments, strict=True)}
    aligned = {
        (kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind[0] == "*"
    }
    source = ASTSource(
        fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={name: options[name] for name in OPTIONS})


def type_of(value):
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


CASES = {
    "bfloat16, causal, 128 wide": {"D": 128, "T": 256, "S": 256, "mask": "causal"},
    "bfloat16, window, 64 wide": {"D": 64, "T": 256, "S": 256, "mask": "window"},
    "bfloat16, prefix, 16 wide": {"D": 16, "mask": "prefix"},
    "float16, no mask, 256 wide": {"D": 256, "mask": "nothing", "dtype": torch.float16},
    "bfloat16, padding and soft-cap, 80 wide": {"D": 80, "mask": "padding", "softcap": 20.0},
    "float32, documents, 64 wide": {"D": 64, "mask": "documents", "dtype": torch.float32},
}
KERNELS = [name for name in vars(launch) if name.endswith("_kernel")]
SHARED = ("CAPPED", "KEYS", "OPEN", "DOCUMENTS")  # switches of the scores and the mask, which every kernel has
compiling = pytest.mark.skipif(
    not hasattr(launch.rows_kernel, "cache_key"), reason="under Triton's interpreter nothing is compiled"
)


@functools.cache
def calls_of(case):
    """Every launch of a case, recorded instead of run, as {kernel name: [(kernel, arguments, options)]}."""
    recorded = []
    options = {"T": 64, "S": 64, **CASES[case]}
    mask = kernel_calls.MASKS[options["mask"]](1, options["T"], options["S"])
    made = kernel_calls.source(**options | {"mask": mask})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", lambda kernel, grid, *call: recorded.append((kernel, *call)))
        kernel_calls.launches(made, torch.zeros(made.shape[:3]))
    assert len(recorded) == 16
    found = {}
    for call in recorded:
        found.setdefault(call[0].__name__, []).append(call)
    return found


def settings_of(kernel, arguments, options):
    """What the compiler sees of a call: each setting on its own, and the switches of this kernel together."""
    switches = tuple(name for name, value in options.items() if value is True and name not in SHARED)
    settings = [*options.items(), ("dtype", arguments[0].dtype), ("switches", switches)]
    return {(kernel.__name__, *setting) for setting in settings}


@functools.cache
def chosen():
    """For each case one call of every kernel, the one with most settings not seen yet; then whatever is missing."""
    found, seen = {case: [] for case in CASES}, set()

    def unseen(call):
        return len(settings_of(*call) - seen)

    def take(case, call):
        found[case].append(call)
        seen.update(settings_of(*call))

    for case, kernel in itertools.product(CASES, KERNELS):
        take(case, max(calls_of(case)[kernel], key=unseen))
    for case, kernel in itertools.product(CASES, KERNELS):
        for call in filter(unseen, calls_of(case)[kernel]):
            take(case, call)
    return found


def test_the_chosen_calls_cover_every_setting_of_every_kernel():
    every = [call for case in CASES for calls in calls_of(case).values() for call in calls]
    picked = [call for calls in chosen().values() for call in calls]
    assert set().union(*(settings_of(*call) for call in every)) == set().union(*(settings_of(*c) for c in picked))


@compiling
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_hopper(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # debugging information takes a tenth of the time
    for kernel, arguments, options in chosen()[case]:
        result = compiled(kernel, arguments, options)
        assert result.asm["cubin"]
        assert result.metadata.shared <= 232_448, f"{kernel.__name__} takes more shared memory than a Hopper SM has"


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
