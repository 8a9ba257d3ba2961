"""Every kernel compiles for Hopper on a machine without a GPU, and keeps its numbers in registers."""

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
    "bfloat16, causal, 64 wide": {"D": 64, "T": 256, "S": 256, "mask": "causal"},
    "float16, no mask, 256 wide": {"D": 256, "mask": "nothing", "dtype": torch.float16},
    "bfloat16, window, 16 wide": {"D": 16, "mask": "window"},
    "bfloat16, padding and soft-cap, 80 wide": {"D": 80, "mask": "padding", "softcap": 20.0},
    "float32, documents, 64 wide": {"D": 64, "mask": "documents", "dtype": torch.float32},
    "bfloat16, prefix, 128 wide": {"D": 128, "mask": "prefix"},
}


@pytest.mark.skipif(
    not hasattr(launch.rows_kernel, "cache_key"), reason="under Triton's interpreter nothing is compiled"
)
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_hopper(case, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls = []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda kernel, programs, source, arguments, options: calls.append((kernel, arguments, options)),
    )
    options = {"T": 64, "S": 64, **CASES[case]}
    made = kernel_calls.source(**options | {"mask": kernel_calls.MASKS[options["mask"]](1, options["T"], options["S"])})
    kernel_calls.launches(made, torch.zeros(made.shape[:3]))
    assert len(calls) == 16
    for kernel, arguments, settings in calls:
        result = compiled(kernel, arguments, settings)
        assert result.asm["cubin"]
        assert result.metadata.shared <= 232_448, f"{kernel.__name__} takes more shared memory than a Hopper SM has"


@pytest.mark.skipif(
    not hasattr(launch.rows_kernel, "cache_key"), reason="under Triton's interpreter nothing is compiled"
)
@pytest.mark.parametrize("D", [72, 128])
def test_turning_and_joining_chunks_compiles_for_hopper(D, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
