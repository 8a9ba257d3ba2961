"""The attention of known models: widths, heads and options, without weights.

`parameters` counts the whole model including embeddings. A test builds each of these models in `transformers`, on the
meta device, and counts its parameters.
"""

import dataclasses
import difflib

import torch

from headwise.errors import OptionError
from headwise.layer import MultiHeadAttention
from headwise.layer.norms import Norms
from headwise.layer.positions import (
    PositionalEncoding,
    Rotary,
    linear,
    llama3,
    multi_axis_rotary,
    rotary,
    temperature,
    yarn,
)
from headwise.masks import Mask, chunks
from headwise.masks import window as window_mask


@dataclasses.dataclass(frozen=True)
class Config:
    """One model's sizes and options.

    >>> config = find("llama-3.1-8b")
    >>> config.num_heads, config.num_kv_heads, config.attention().out_proj.weight.shape
    (32, 8, torch.Size([4096, 4096]))

    Args:
        name: the name on the command line.
        d_model: width of the model.
        num_heads: query heads of a layer.
        num_kv_heads: key/value heads of a layer.
        head_dim: head dimension; all heads together need not be as wide as the model.
        layers: number of layers, each with one attention.
        vocabulary: vocabulary size.
        feed_forward: hidden width of the feed-forward part, of one expert if there are several.
        context: the longest text it was trained for.
        parameters: of the whole model, or of its text part if it also reads images.
        position: "learned" (added to the input, outside of attention) or "rotary".
        source: where the numbers are published.
        aliases: other names.
        causal: whether a token sees only itself and earlier tokens.
        bias: whether the projections have a bias.
        qk_norm: whether queries and keys are normalized per head.
        window: keys a token sees in a windowed layer, including itself.
        full_every: every `full_every`-th layer sees all keys; None: with a `window`, all layers are windowed.
        chunked: whether windowed layers see the keys of their own chunk of `window` tokens instead of the last ones.
        scale: factor on the scores; 1 / sqrt(head_dim) by default.
        softcap: the bound of the scores, cap·tanh(score / cap).
        sinks: whether every head has a learned sink, an extra score in the softmax that has no value.
        rotary: the rotary embedding, or another encoding of positions in queries and keys.
        local_rotary: that of windowed layers, if it differs.
        local_norms: norms that only windowed layers have, without weights.
        experts: feed-forward experts per layer.
        note: anything else worth knowing.
    """

    name: str
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    feed_forward: int
    context: int
    parameters: int
    position: str
    source: str
    aliases: tuple[str, ...] = ()
    causal: bool = True
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    full_every: int | None = None
    chunked: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    rotary: PositionalEncoding | None = None
    local_rotary: PositionalEncoding | None = None
    local_norms: Norms | None = None
    experts: int = 1
    note: str = ""

    @property
    def kind(self) -> str:
        """MHA, GQA or MQA, by the number of key/value heads."""
        return kind_of(self.num_heads, self.num_kv_heads)

    def windowed(self, layer: int) -> bool:
        """Whether that `layer`, counted from 0, sees only a window."""
        return self.window is not None and (self.full_every is None or (layer + 1) % self.full_every != 0)

    @property
    def windowed_layers(self) -> int:
        """How many layers see only a window."""
        return sum(self.windowed(layer) for layer in range(self.layers))

    def attention(
        self, layer: int = 0, *, device: torch.device | str = "meta", dtype: torch.dtype | None = None
    ) -> MultiHeadAttention:
        """The attention of one `layer`, without data unless `device` is other than "meta"."""
        near, norms = self.windowed(layer), "head" if self.qk_norm else None
        return MultiHeadAttention(
            self.d_model,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            mask=self._window_mask() if near else None,
            position=self.local_rotary if near and self.local_rotary is not None else self.rotary,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            qk_norm=self.local_norms if near and self.local_norms is not None else norms,
            bias=self.bias,
            device=device,
            dtype=dtype,
        )

    def _window_mask(self) -> Mask | None:
        if self.window is None:
            return None
        return chunks(self.window) if self.chunked else window_mask(self.window - 1)

    def options(self) -> list[str]:
        """What its attention does in addition to the ten steps, in words."""
        notes = []
        if self.qk_norm:
            notes.append("queries and keys are normalized per head after step 3")
        if self.local_norms is not None:
            notes.append("queries and keys are normalized without weights in windowed layers, after their rotation")
        if isinstance(self.rotary, Rotary):
            local = (
                f", {self.local_rotary.base:.0f} in windowed layers" if isinstance(self.local_rotary, Rotary) else ""
            )
            notes.append(f"queries and keys are rotated by position (rotary, base {self.rotary.base:.0f}{local})")
        elif self.rotary is not None:
            local = "" if self.local_rotary is None else f", {self.local_rotary.describe()} in windowed layers"
            notes.append(f"queries and keys are changed by position: {self.rotary.describe()}{local}")
        elif self.position == "learned":
            notes.append("learned positions are added to the input before step 1")
        if self.window is not None:
            which = "every layer" if self.full_every is None else f"{self.windowed_layers} of {self.layers} layers"
            seen = f"their own chunk of {self.window}" if self.chunked else f"the last {self.window}"
            notes.append(f"{which} see only {seen} keys (step 5)")
        if self.scale is not None and self.scale != self.head_dim**-0.5:
            notes.append(f"scores are scaled by 1/√{round(self.scale**-2)}, not 1/√{self.head_dim} (step 6)")
        if self.softcap is not None:
            notes.append(f"scores are soft-capped to ±{self.softcap:g} (step 6)")
        if self.sinks:
            notes.append("every head has a sink, an extra score in the softmax that has no value (step 7)")
        return notes


def kind_of(num_heads: int, num_kv_heads: int) -> str:
    """The usual name for this number of key/value heads.

    >>> kind_of(8, 8), kind_of(8, 2), kind_of(8, 1)
    ('MHA', 'GQA', 'MQA')
    """
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def _bert(name: str, d_model: int, layers: int, parameters: int) -> Config:
    heads = d_model // 64
    return Config(
        name, d_model, heads, heads, 64, layers, 30522, 4 * d_model, 512, parameters, "learned",
        "Devlin et al. 2018, uncased", (f"{name}-uncased",), causal=False, bias=True,
    )  # fmt: skip


def _gpt2(name: str, d_model: int, layers: int, parameters: int, *aliases: str) -> Config:
    heads = d_model // 64
    return Config(
        name, d_model, heads, heads, 64, layers, 50257, 4 * d_model, 1024, parameters, "learned",
        "Radford et al. 2019", aliases, bias=True,
    )  # fmt: skip


def _llama(
    name: str, d_model: int, heads: int, head_dim: int, layers: int, feed_forward: int, parameters: int,
    factor: float = 8.0, aliases: tuple[str, ...] = (), note: str = "",
) -> Config:  # fmt: skip
    return Config(
        name, d_model, heads, 8, head_dim, layers, 128256, feed_forward, 131072, parameters, "rotary",
        "Llama 3 model cards, 2024", aliases, rotary=rotary(500000.0, scaling=llama3(factor)), note=note,
    )  # fmt: skip


def _qwen3(name: str, d_model: int, heads: int, layers: int, feed_forward: int, parameters: int) -> Config:
    return Config(
        name, d_model, heads, 8, 128, layers, 151936, feed_forward, 40960, parameters, "rotary",
        "Qwen 3 technical report, 2025", (name.replace("qwen-3", "qwen3"),), qk_norm=True, rotary=rotary(1e6),
    )  # fmt: skip


def _qwen3_vl(name: str, d_model: int, heads: int, layers: int, feed_forward: int, parameters: int) -> Config:
    """The text part, which has the sizes of Qwen 3."""
    turned = multi_axis_rotary((24, 20, 20), 5e6, alternating=True)
    return Config(
        name, d_model, heads, 8, 128, layers, 151936, feed_forward, 262144, parameters, "rotary",
        "Qwen3-VL technical report, 2025", (name.replace("qwen-3", "qwen3"),), qk_norm=True, rotary=turned,
        note="the text part; positions have three axes: time, height and width",
    )  # fmt: skip


def _phi3(
    name: str, d_model: int, heads: int, kv_heads: int, head_dim: int, layers: int, feed_forward: int, parameters: int
) -> Config:
    return Config(
        name, d_model, heads, kv_heads, head_dim, layers, 32064, feed_forward, 131072, parameters, "rotary",
        "Abdin et al. 2024", (name.replace("phi-3", "phi3"),), rotary=rotary(),
        note="LongRoPE slows down each pair of the rotary by a factor of its own, listed in the checkpoint",
    )  # fmt: skip


def _llama4(name: str, context: int, experts: int, parameters: int, turned: Rotary, norms: Norms | None) -> Config:
    return Config(
        name, 5120, 40, 8, 128, 48, 202048, 8192, context, parameters, "rotary", "Llama 4 model card, 2025",
        (name.replace("llama-4", "llama4"),), window=8192, full_every=4, chunked=True, rotary=temperature(0.1, 8192),
        local_rotary=turned, local_norms=norms, experts=experts,
        note="the text part; one expert and a shared one are active for every token",
    )  # fmt: skip


def _gemma3(
    name: str, d_model: int, heads: int, kv_heads: int, head_dim: int, layers: int, feed_forward: int, parameters: int,
    scalar: int = 256,
) -> Config:  # fmt: skip
    small = name.endswith("-1b")  # the smallest has no vision part, a shorter context and a shorter window
    return Config(
        name, d_model, heads, kv_heads, head_dim, layers, 262144 if small else 262208, feed_forward,
        32768 if small else 131072, parameters, "rotary", "Gemma 3 technical report, 2025",
        (name.replace("gemma-3", "gemma3"),), qk_norm=True, window=512 if small else 1024, full_every=6,
        scale=scalar**-0.5, rotary=rotary(1e6, scaling=None if small else linear(8)), local_rotary=rotary(),
        note="" if small else "the text part",
    )  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int, parameters: int) -> Config:
    return Config(
        name,
        2880,
        64,
        8,
        64,
        layers,
        201088,
        2880,
        131072,
        parameters,
        "rotary",
        "gpt-oss model card, 2025",
        (name.replace("gpt-oss", "gptoss"),),
        bias=True,
        window=128,
        full_every=2,
        sinks=True,
        experts=experts,
        rotary=rotary(150000.0, scaling=yarn(32, 4096, truncate=False)),
        note="4 experts are active for every token",
    )


def _mistral(name: str, vocabulary: int, parameters: int, base: float, window: int | None, *aliases: str) -> Config:
    return Config(
        name, 4096, 32, 8, 128, 32, vocabulary, 14336, 32768, parameters, "rotary", "Jiang et al. 2023", aliases,
        window=window, rotary=rotary(base),
    )  # fmt: skip


_ALL = [
    _bert("bert-base", 768, 12, 109_482_240),
    _bert("bert-large", 1024, 24, 335_141_888),
    _gpt2("gpt2", 768, 12, 124_439_808, "gpt2-small", "gpt-2", "gpt-2-small"),
    _gpt2("gpt2-medium", 1024, 24, 354_823_168, "gpt-2-medium"),
    _gpt2("gpt2-large", 1280, 36, 774_030_080, "gpt-2-large"),
    _gpt2("gpt2-xl", 1600, 48, 1_557_611_200, "gpt-2-xl"),
    Config(
        "gpt3", 12288, 96, 96, 128, 96, 50257, 49152, 2048, 174_604_259_328, "learned", "Brown et al. 2020",
        ("gpt-3", "gpt3-175b", "gpt-3-175b"), bias=True,
        note="every second layer is banded, of unpublished width, and counted here as a full layer",
    ),
    _llama("llama-3.2-1b", 2048, 32, 64, 16, 8192, 1_235_814_400, 32.0, ("llama3.2-1b",)),
    _llama("llama-3.2-3b", 3072, 24, 128, 28, 8192, 3_212_749_824, 32.0, ("llama3.2-3b",)),
    _llama(
        "llama-3.1-8b", 4096, 32, 128, 32, 14336, 8_030_261_248, 8.0, ("llama3.1-8b", "llama-3-8b", "llama3-8b"),
        "Llama 3 8B has the same widths, a context of 8192 and no scaling of the rotary",
    ),
    _llama(
        "llama-3.1-70b", 8192, 64, 128, 80, 28672, 70_553_706_496, 8.0,
        ("llama3.1-70b", "llama-3-70b", "llama3-70b", "llama-3.3-70b"),
        "Llama 3 70B has the same widths, a context of 8192 and no scaling of the rotary",
    ),
    _llama("llama-3.1-405b", 16384, 128, 128, 126, 53248, 405_853_388_800, 8.0, ("llama3.1-405b", "llama-3-405b")),
    _llama4(
        "llama-4-scout", 10485760, 16, 107_769_861_120,
        rotary(500000.0, interleaved=True, scaling=llama3(16.0, low_freq_factor=1.0, high_freq_factor=1.0)),
        Norms("unweighted", "unweighted", after=True),
    ),
    _llama4("llama-4-maverick", 1048576, 128, 400_711_848_960, rotary(500000.0, interleaved=True), None),
    _mistral("mistral-7b", 32000, 7_241_732_096, 10000.0, 4096, "mistral-7b-v0.1", "mistral"),
    _mistral("mistral-7b-v0.3", 32768, 7_248_023_552, 1e6, None),
    _qwen3("qwen-3-0.6b", 1024, 16, 28, 3072, 596_049_920),
    _qwen3("qwen-3-1.7b", 2048, 16, 28, 6144, 1_720_574_976),
    _qwen3("qwen-3-4b", 2560, 32, 36, 9728, 4_022_468_096),
    _qwen3("qwen-3-8b", 4096, 32, 36, 12288, 8_190_735_360),
    _qwen3("qwen-3-14b", 5120, 40, 40, 17408, 14_768_307_200),
    _qwen3("qwen-3-32b", 5120, 64, 64, 25600, 32_762_123_264),
    _qwen3_vl("qwen-3-vl-2b", 2048, 16, 28, 6144, 1_720_574_976),
    _qwen3_vl("qwen-3-vl-4b", 2560, 32, 36, 9728, 4_022_468_096),
    _qwen3_vl("qwen-3-vl-8b", 4096, 32, 36, 12288, 8_190_735_360),
    _qwen3_vl("qwen-3-vl-32b", 5120, 64, 64, 25600, 32_762_123_264),
    _phi3("phi-3-mini-128k", 3072, 32, 32, 96, 32, 8192, 3_821_079_552),
    _phi3("phi-3-medium-128k", 5120, 40, 10, 128, 40, 17920, 13_960_238_080),
    _gemma3("gemma-3-1b", 1152, 4, 1, 256, 26, 6912, 999_885_952),
    _gemma3("gemma-3-4b", 2560, 8, 4, 256, 34, 10240, 3_880_263_168),
    _gemma3("gemma-3-12b", 3840, 16, 8, 256, 48, 15360, 11_766_034_176),
    _gemma3("gemma-3-27b", 5376, 32, 16, 128, 62, 21504, 27_009_346_304, 168),
    _gpt_oss("gpt-oss-20b", 24, 32, 20_914_757_184),
    _gpt_oss("gpt-oss-120b", 36, 128, 116_829_156_672),
]  # fmt: skip

CONFIGS: dict[str, Config] = {config.name: config for config in _ALL}


def find(name: str) -> Config:
    """The configuration with this name or alias, ignoring case.

    >>> find("GPT-2-XL").d_model
    1600
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    by_name = {known: config for config in _ALL for known in (config.name, *config.aliases)}
    if wanted in by_name:
        return by_name[wanted]
    close = [by_name[known].name for known in difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.5)]
    near = list(dict.fromkeys([*close, *(known for known in CONFIGS if wanted and wanted in known)]))
    guess = f" Did you mean {' or '.join(near[:4])}?" if near else ""
    raise OptionError(f"no model is called {name!r}.{guess} All of them: headwise cost --models.")
