"""`open_model`: the one way to open a model, whether it is built in, on disk or in memory. Nothing is downloaded."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import CheckpointError, HeadwiseError, OptionError, need
from headwise.models.builtin import WEIGHTS, load, load_builtin, no_folder
from headwise.models.files import TENSOR_SUFFIXES, open_tensors, refuse_gguf, weights_in
from headwise.models.text_model import TextModel, TokenCodec

EXPECTED = (
    'expected "builtin", a folder that examples/train_gpt.py wrote, or the folder of a transformers model '
    "(config.json, weights, tokenizer.json). Nothing is downloaded"
)

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_model(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    encoder: bool = True,
    both: bool = False,
) -> TextModel:
    """A model with its tokenizer, ready to read texts.

    >>> open_model("builtin").tokens("The captain").shape
    torch.Size([1, 3])

    Args:
        model: "builtin"; a folder that `examples/train_gpt.py` wrote, a transformers model's folder, or the file of
            weights in one of them; or a model in memory: a `LanguageModel`, a transformers model on
            `attn_implementation="headwise"`, or any module on headwise layers.
        tokenizer: for a model in memory: its transformers tokenizer, or a function from a text to token ids.
        name: what reports call it; the folder's or the class's name by default.
        device: where to put a model that is opened from disk.
        dtype: of the weights of a model that is opened from disk; by default float32 for our own models, and as saved
            for transformers models.
        encoder: open the encoder of an encoder–decoder model; False refuses such a model.
        both: open an encoder–decoder model as a whole: its decoder reads what `TextModel.decoder_tokens` says.
    """
    part = "both" if both else "encoder" if encoder else None
    if isinstance(model, str | Path):
        found = _open_path(model, device, dtype, part)
    elif isinstance(model, TextModel):
        found = model
    elif isinstance(model, nn.Module):
        found = _open_module(model, tokenizer, part)
    else:
        raise OptionError(
            f"expected a model, and an object of type {type(model).__name__} is given; {EXPECTED}. A model in memory, "
            f"such as load_builtin(), works too."
        )
    if name is None and (tokenizer is None or isinstance(model, nn.Module)):
        return found
    found = copy.copy(found)
    found.name = name or found.name
    if tokenizer is not None:
        found.codec = TokenCodec.of(tokenizer)
    return found


def _open_module(module: nn.Module, tokenizer: Callable[[str], Sequence[int]] | None, part: str | None) -> TextModel:
    kind = type(module).__name__
    if tokenizer is None:
        raise OptionError(
            f"{kind} is given without a tokenizer. Pass its transformers tokenizer, or a function from a text to token "
            f"ids (tokenize= in headwise.survey)."
        )
    start = None
    if "decoder_input_ids" in inspect.signature(module.forward).parameters:
        module, start = _part_of(module, kind, part)
    trained = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return TextModel(kind, module, TokenCodec.of(tokenizer), trained, _limit(module, trained), start)


def _open_path(path: str | Path, device: torch.device | str, dtype: torch.dtype | None, part: str | None) -> TextModel:
    if path == "builtin":
        return load_builtin(device, dtype or torch.float32)
    folder = Path(path)
    if folder.is_file():
        folder = _folder_of(folder)
    if not folder.is_dir():
        raise no_folder(folder, EXPECTED)
    if (folder / "config.json").is_file():
        return _open_transformers(folder, device, dtype, part)
    if not (folder / WEIGHTS).is_file():
        refuse_gguf(folder)
    return load(folder, device, dtype or torch.float32)


def _folder_of(file: Path) -> Path:
    """The folder of a file of weights, if the configuration and tokenizer are there too."""
    refuse_gguf(file)
    folder = file.parent
    if file.name == WEIGHTS or ((folder / "config.json").is_file() and file.suffix in (".json", *TENSOR_SUFFIXES)):
        return folder
    raise CheckpointError(
        f"{file} is a file without a config.json and a tokenizer beside it, so it cannot read a text; {EXPECTED}. "
        f"`headwise inspect {file}` shows the attention layers in a file of weights."
    )


# Models of transformers ---------------------------------------------------------------------------------------------


def _open_transformers(
    folder: Path, device: torch.device | str, dtype: torch.dtype | None, part: str | None
) -> TextModel:
    """The model in a folder, on `attn_implementation="headwise"`."""
    transformers = need("transformers", "huggingface", "transformers models")
    from headwise import huggingface

    with _wrapped(folder, "a transformers model"), _quiet(transformers):
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    if huggingface.bypasses_interface(type(config).__module__):
        raise huggingface.bypass_error(f"{folder}: {config.model_type}")
    if config.is_encoder_decoder and part is None:
        _part_of(None, f"{folder}: {config.model_type}", part)
    codec = TokenCodec.of(_tokenizer(transformers, folder))
    weights = weights_in(folder)
    safe = ".safetensors" in weights.name
    if not safe:
        open_tensors(weights)  # refuses a torch file that holds code, and says why
    with _wrapped(folder, "a transformers model"), _quiet(transformers):
        kind = _class_of(transformers, config, part)
        module = _loaded(kind, folder, use_safetensors=safe, **({} if dtype is None else {"dtype": dtype}))
    start = None
    if config.is_encoder_decoder:
        module, start = _part_of(module, config.model_type, part)
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None and not config.is_encoder_decoder:  # a model that reads images, too, has a configuration in it
        trained = getattr(config.get_text_config(), "max_position_embeddings", None)
    module = module.to(device).eval().requires_grad_(False)
    return TextModel(name_of_folder(folder.resolve()), module, codec, trained, _limit(module, trained), start)


def name_of_folder(folder: Path) -> str:
    """The name of a folder; of one in a cache of models, or called "model", with that of what it is in.

    >>> [name_of_folder(Path(path)) for path in ("models--org--small/snapshots/0a1b", "minilm/model", "gpt2")]
    ['org/small', 'minilm/model', 'gpt2']
    """
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return f"{folder.parent.name}/model" if folder.name == "model" else folder.name


def _class_of(transformers: Any, config: Any, part: str | None) -> Any:
    """The class that saved the weights if it generates text, as those of Gemma 3 and of other models that read images
    do, too; else one without a head."""
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    saved: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(saved) and issubclass(saved, transformers.PreTrainedModel)):
        predicts = "CausalLM" in str(name) or "LMHead" in str(name)
        return transformers.AutoModelForCausalLM if predicts else transformers.AutoModel
    kind: Any = saved
    fits = kind.config_class is not None and isinstance(config, kind.config_class)
    whole = part == "both" or not config.is_encoder_decoder
    return kind if fits and whole and kind.can_generate() else transformers.AutoModel


def _loaded(kind: Any, folder: Path, **options: Any) -> Any:
    """The model from disk; refused if weights are missing, because transformers would make them up."""
    module, info = kind.from_pretrained(
        folder, attn_implementation="headwise", weights_only=True, output_loading_info=True, **LOCAL, **options
    )
    missing = [name for name in info["missing_keys"] if "pooler" not in name]  # a pooler comes after all attention
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the model's weights are not in its files, such as {sorted(missing)[0]}. They "
            f"would be random; save the whole model with model.save_pretrained(folder)."
        )
    return module


def _part_of(module: Any, kind: str, part: str | None) -> tuple[Any, int | None]:
    """The part of an encoder–decoder model to open; if it is the whole, also the first token of its decoder's text."""
    if part is None:
        raise CheckpointError(
            f"{kind} is an encoder–decoder, which reads two texts at once; expected a model that reads one. Use its "
            f"encoder: open_model(model.get_encoder(), tokenizer)."
        )
    if part == "encoder":
        return module.get_encoder(), None
    if getattr(module, "main_input_name", "input_ids") != "input_ids":
        raise CheckpointError(
            f"{kind} reads {module.main_input_name}, not text; expected a model whose encoder reads tokens."
        )
    config = module.config
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    start = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
    if start is None:
        raise CheckpointError(
            f"{kind}: its configuration has no decoder_start_token_id, with which its decoder begins."
        )
    return module, start


def _tokenizer(transformers: Any, folder: Path) -> Any:
    """As transformers opens it; from tokenizer.json alone if that is all there is."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise CheckpointError(
            f"tokenizer.json is not in {folder}, so the model cannot read text. Save the model's tokenizer there: "
            f"tokenizer.save_pretrained({str(folder)!r})."
        )
    if (folder / "tokenizer_config.json").is_file():
        with _wrapped(folder, "a tokenizer"), _quiet(transformers):
            return transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    with _wrapped(folder / "tokenizer.json", "a tokenizer"):
        return need("tokenizers", "builtin", "texts").Tokenizer.from_file(str(folder / "tokenizer.json"))


def _limit(module: nn.Module, trained: int | None) -> int | None:
    """How many positions a table of learned positions has; None if positions are computed."""
    if trained is None:
        return None
    words: Any = getattr(module, "get_input_embeddings", lambda: None)()
    for table in module.modules():
        if isinstance(table, nn.Embedding) and table is not words and 0 <= table.num_embeddings - trained <= 2:
            offset = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from after its padding
            return min(trained, table.num_embeddings - offset)
    return None


@contextmanager
def _wrapped(path: Path, what: str) -> Iterator[None]:
    """Turn the many kinds of errors that other libraries raise while reading files into ours."""
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{path} cannot be read as {what}: that would run Python code from its folder (auto_map), which "
                f"headwise never does. Use a model whose class is in transformers, or open it yourself."
            ) from error
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read as {what}: {line}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' progress bars and reports; what matters in them becomes an error of ours."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
