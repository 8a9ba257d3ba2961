import json

import pytest
import torch

from headwise import load_builtin
from headwise.models import GPT, GPTConfig, LanguageModel, builtin
from survey_words import sentence


@pytest.fixture(scope="session")
def tiny():
    """Two layers of three heads, random and sharp, with the tokenizer of the built-in model."""
    torch.manual_seed(5)
    gpt = GPT(GPTConfig(8192, d_model=24, num_heads=3, num_layers=2, context_length=128)).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)
    return LanguageModel(gpt, load_builtin().tokenizer)


@pytest.fixture(scope="session")
def tiny_folder(tiny, tmp_path_factory):
    """The same on disk, as examples/train_gpt.py writes it."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny")
    sizes = {name: getattr(tiny.gpt.config, name) for name in GPTConfig.__dataclass_fields__}
    about = {"format": builtin.FORMAT, "config": json.dumps(sizes)}
    save_file(dict(tiny.gpt.state_dict()), folder / "weights.safetensors", about)
    (folder / "tokenizer.json").write_bytes((builtin.FOLDER / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture
def texts():
    """Documents of many lengths, some much longer than a window."""
    return [sentence(3 + 17 * (i % 7) + 400 * (i % 11 == 5), i) for i in range(23)]
