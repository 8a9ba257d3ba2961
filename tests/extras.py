"""Installs the package with each extra alone into an empty environment, and tries one feature that needs the extra.

python tests/extras.py              all extras, and no extra at all; several minutes, about 3 GB of temporary files
python tests/extras.py plot serve   only these

Prints a table; the exit status is 1 if any row failed. The release checklist in CONTRIBUTING.md names this script.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NONE = "(none)"
LAYER = """
import torch, headwise
layer, x = headwise.MultiHeadAttention(12, 3, causal=True), torch.randn(2, 5, 12)
output, weights = layer(x, return_weights=True)
"""
# One feature for each extra, as Python. Every one of them fails without the packages that the extra installs.
FEATURES = {
    NONE: LAYER + "assert weights[0, 0].shape == (5, 5)",
    "bench": """
from headwise.cli import main
sizes = "--lengths 5,7 --d-model 12 --heads 3 --seconds 0.01 --limit 9 --device cpu".split()
assert main(["bench", *sizes, "--out", "bench.json", "--plot", "bench.svg"]) == 0
import json
left = json.load(open("bench.json"))["left_out"]
assert {entry["name"] for entry in left} <= {"FlexAttention by hand"}, left
""",
    "builtin": """
import headwise
model = headwise.load_builtin()
assert "".join(model.stream("It was", 3, temperature=0))
""",
    "flash": """
import os
os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from headwise.attention.backends.flash import kernel
assert kernel.installed()
with FakeTensorMode(), torch.no_grad():  # compiles for a Hopper GPU, and needs none
    heads = torch.empty(2, 6, 1031, 64, dtype=torch.bfloat16, device="cuda")
    output, lse = kernel.forward(heads, heads, heads, None, None, None, 0.1, 0.0, 127, 0, 0)
assert output.shape == heads.shape
""",
    "huggingface": """
import torch, transformers, headwise, headwise.huggingface
config = transformers.GPT2Config(n_embd=12, n_head=3, n_layer=1, vocab_size=7, attn_implementation="headwise")
model = transformers.GPT2Model(config).eval()
with torch.no_grad(), headwise.watch(model) as seen:
    model(torch.tensor([[1, 2, 3]]))
assert len(seen) == 1
""",
    "onnx": LAYER
    + """
import onnxruntime
torch.onnx.export(layer.eval(), (x,), "layer.onnx", dynamo=True)
session = onnxruntime.InferenceSession("layer.onnx", providers=["CPUExecutionProvider"])
(found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
torch.testing.assert_close(torch.tensor(found), output.detach())
""",
    "plot": LAYER + "assert weights.plot() is not None",
    "save": LAYER + 'weights.detach().save("map.safetensors"); headwise.AttentionMap.load("map.safetensors")',
    "serve": """
from headwise.cli import main
assert main("serve --port 0 --no-open --for 1 --json".split()) == 0
""",
    "survey": """
import pathlib
from headwise.cli import main
pathlib.Path("sea.txt").write_text("The captain looked at the sea, and the sea looked at the captain.")
assert main("survey sea.txt --context 16 --out survey.parquet --device cpu".split()) == 0
""",
    "terminal": """
from headwise.cli import main
assert main(["steps"]) == 0
""",
}


def extras() -> list[str]:
    """The extras in pyproject.toml, and none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [NONE, *project["optional-dependencies"]]


def ran(*command: object, cwd: Path | None = None) -> str:
    """Run a command; returns its output, and raises `CalledProcessError` with it on failure."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout


def environment(folder: Path, base: Path | None = None) -> Path:
    """The Python of a new environment, empty or with the packages of `base`."""
    ran(sys.executable, "-m", "venv", folder)
    if base is not None:
        (site,) = (base / "lib").glob("python*/site-packages")
        (own,) = (folder / "lib").glob("python*/site-packages")
        (own / "base.pth").write_text(f"{site}\n")
    return folder / "bin" / "python"


def install(python: Path, *packages: object) -> None:
    """Install packages in the versions of constraints.txt."""
    ran(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *packages)


def tried(extra: str, wheel: Path, folder: Path, base: Path) -> str | None:
    """Install one extra and run its feature; returns the last line of the error, or None."""
    try:
        python = environment(folder, base)
        install(python, wheel if extra == NONE else f"headwise[{extra}] @ {wheel.as_uri()}")
        ran(python, "-c", FEATURES[extra], cwd=folder)
    except subprocess.CalledProcessError as error:
        print(error.output, file=sys.stderr)
        return (error.output.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
    return None


def main() -> int:
    """Try every extra, or those named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", choices=[*extras(), []], help="extras to try (default: all)")
    names = parser.parse_args().extras or extras()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        print("installing torch, which every environment shares ...", file=sys.stderr)
        install(environment(base), "torch")
        ran(base / "bin" / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        for extra in names:
            begin = time.monotonic()
            error = tried(extra, wheel, folder / extra.strip("()"), base)
            failed += error is not None
            print(f"{extra:<12} {time.monotonic() - begin:5.0f} s  {error or 'works'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
