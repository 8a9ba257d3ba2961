"""transformers' models on our core give what its eager path gives: logits, attentions, generation."""

import subprocess
import sys

import pytest
import torch

import headwise
from headwise import AttentionMap, OptionError, watch
from headwise.errors import install_command

transformers = pytest.importorskip("transformers")
pytest.importorskip("headwise.huggingface")
transformers.logging.set_verbosity_error()

B, T, E, H, V = 2, 13, 48, 6, 67
PLAIN = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "vocab_size": V, "intermediate_size": 64}
PLAIN |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": 8}
DECODERS = {
    "gpt2": {"n_embd": E, "n_head": H, "n_layer": 2, "vocab_size": V},
    "gpt_neox": PLAIN,
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 5},
    "mixtral": GROUPED | {"num_local_experts": 2},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma2": GROUPED | {"sliding_window": 5},
    "gemma3_text": GROUPED | {"sliding_window": 5},
    "phi": PLAIN,
    "phi3": GROUPED,
    "opt": PLAIN | {"ffn_dim": 64, "word_embed_proj_dim": E},
    "stablelm": GROUPED,
    "cohere": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "gpt_oss": GROUPED
    | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "granite": GROUPED,
    "starcoder2": GROUPED,
    "smollm3": GROUPED,
    "nemotron": GROUPED,
}
ENCODERS = {
    "bert": PLAIN,
    "roberta": PLAIN | {"max_position_embeddings": 40},
    "distilbert": {"dim": E, "n_heads": H, "n_layers": 2, "hidden_dim": 64, "vocab_size": V},
    "electra": PLAIN | {"embedding_size": E},
    "albert": PLAIN | {"embedding_size": 16},
    "modernbert": PLAIN | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "camembert": PLAIN | {"max_position_embeddings": 40},
    "xlm-roberta": PLAIN | {"max_position_embeddings": 40},
}
IMAGE = {"image_size": 12, "patch_size": 4, "hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2}
IMAGE |= {"intermediate_size": 64}
VISION = {"vit": IMAGE, "deit": IMAGE, "dinov2": IMAGE, "clip_vision_model": IMAGE, "siglip_vision_model": IMAGE}
PAIR = {"d_model": E, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": H, "vocab_size": V}
PAIR |= {"decoder_attention_heads": H, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 40}
PAIR |= {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {"d_model": E, "num_heads": H, "d_kv": 8, "num_layers": 2, "vocab_size": V, "d_ff": 64, "pad_token_id": 0}
PAIRS = {
    "t5": T5 | {"decoder_start_token_id": 0},
    "bart": PAIR,
    "mbart": PAIR,
    "marian": PAIR,
    "pegasus": PAIR,
}
OWN = {
    "bloom": {"hidden_size": E, "n_head": H, "n_layer": 2, "vocab_size": V},
    "mpnet": PLAIN,
    "xglm": {"d_model": E, "attention_heads": H, "num_layers": 2, "ffn_dim": 64, "vocab_size": V},
    "codegen": {"n_embd": E, "n_head": 4, "n_layer": 2, "vocab_size": V, "rotary_dim": 4},
    "deberta": PLAIN,
    "deberta-v2": PLAIN,
    "xlnet": {"d_model": E, "n_head": H, "n_layer": 2, "d_inner": 64, "vocab_size": V},
}


def tiny(kind, settings, implementation, cls):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = cls.from_config(config, attn_implementation=implementation).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def both(kind, settings, cls):
    return tiny(kind, settings, "eager", cls), tiny(kind, settings, "headwise", cls)


def ids(length=T):
    return torch.randint(3, V, (B, length), generator=torch.Generator().manual_seed(0))


def padding(side):
    keep = torch.ones(B, T, dtype=torch.long)
    if side == "left":
        keep[0, :4] = 0
    if side == "right":
        keep[0, -4:] = 0
    return None if side == "none" else keep


def assert_same(found, expected, keep=None):
    """Maps against eager's tensors, in the rows that are no padding."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, AttentionMap)
        assert ours.shape == theirs.shape
        ours, theirs = ours[:].float(), theirs.float()
        if keep is not None and ours.shape[2] == keep.shape[1]:
            rows = keep.bool()[:, None].expand(ours.shape[:3])
            ours, theirs = ours[rows], theirs[rows]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_decoders_give_the_same_logits_attentions_and_texts(kind):
    eager, ours = both(kind, DECODERS[kind], transformers.AutoModelForCausalLM)
    for side in ("none", "left", "right"):
        keep = padding(side)
        expected = eager(input_ids=ids(), attention_mask=keep, output_attentions=True)
        found = ours(input_ids=ids(), attention_mask=keep, output_attentions=True)
        real = torch.ones(B, T).bool() if keep is None else keep.bool()
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-3, atol=1e-4)
        assert_same(found.attentions, expected.attentions, keep)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": padding("left")}
    assert torch.equal(ours.generate(ids(), **options), eager.generate(ids(), **options))


@pytest.mark.parametrize("kind", ENCODERS)
@torch.no_grad()
def test_encoders_give_the_same_states_and_attentions(kind):
    eager, ours = both(kind, ENCODERS[kind], transformers.AutoModel)
    for side in ("none", "right"):
        keep = padding(side)
        expected = eager(input_ids=ids(), attention_mask=keep, output_attentions=True)
        found = ours(input_ids=ids(), attention_mask=keep, output_attentions=True)
        real = torch.ones(B, T).bool() if keep is None else keep.bool()
        torch.testing.assert_close(
            found.last_hidden_state[real], expected.last_hidden_state[real], rtol=1e-3, atol=1e-4
        )
        assert_same(found.attentions, expected.attentions, keep)


@pytest.mark.parametrize("kind", VISION)
@torch.no_grad()
def test_vision_models_give_the_same_states_and_attentions(kind):
    eager, ours = both(kind, VISION[kind], transformers.AutoModel)
    pixels = torch.randn(B, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    expected, found = (model(pixel_values=pixels, output_attentions=True) for model in (eager, ours))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)
    assert_same(found.attentions, expected.attentions)


@pytest.mark.parametrize("kind", PAIRS)
@torch.no_grad()
def test_encoder_decoders_give_the_same_logits_and_all_three_attentions(kind):
    eager, ours = both(kind, PAIRS[kind], transformers.AutoModelForSeq2SeqLM)
    keep = padding("right")
    given = {"input_ids": ids(), "attention_mask": keep, "decoder_input_ids": ids(7), "output_attentions": True}
    expected, found = eager(**given), ours(**given)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-4)
    assert_same(found.decoder_attentions, expected.decoder_attentions)
    assert_same(found.cross_attentions, expected.cross_attentions)
    assert_same(found.encoder_attentions, expected.encoder_attentions, keep)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "attention_mask": keep}
    assert torch.equal(ours.generate(ids(), **options), eager.generate(ids(), **options))


@torch.no_grad()
def test_speech_models_give_the_same_states_and_attentions():
    whisper = {"num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": 20} | PAIR
    eager, ours = both("whisper", whisper, transformers.AutoModel)
    given = {"input_features": torch.randn(B, 5, 22), "decoder_input_ids": ids(7), "output_attentions": True}
    expected, found = eager(**given), ours(**given)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert_same(getattr(found, name), getattr(expected, name))
    wave = PLAIN | {
        "conv_dim": [8] * 3,
        "conv_kernel": [5, 3, 3],
        "conv_stride": [3, 2, 2],
        "num_feat_extract_layers": 3,
    }
    wave |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    eager, ours = both("wav2vec2", wave, transformers.AutoModel)
    sound = torch.randn(B, 200, generator=torch.Generator().manual_seed(0))
    expected, found = (model(sound, output_attentions=True) for model in (eager, ours))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)
    assert_same(found.attentions, expected.attentions)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss", "gemma2"])
@torch.no_grad()
def test_generation_with_every_cache_gives_the_same_texts_and_attentions(kind, cache):
    eager, ours = both(kind, DECODERS[kind], transformers.AutoModelForCausalLM)
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": padding("left")}
    options |= {"cache_implementation": cache, "output_attentions": True, "return_dict_in_generate": True}
    options |= {"disable_compile": True}
    expected, found = (model.generate(ids(), **options) for model in (eager, ours))
    assert torch.equal(found.sequences, expected.sequences)
    for ours_now, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert_same(ours_now, theirs, padding("left"))


@torch.no_grad()
def test_watch_collects_every_layer_also_while_a_text_is_generated():
    model = tiny("mistral", DECODERS["mistral"], "headwise", transformers.AutoModelForCausalLM)
    with watch(model, layers=["model.layers.1.self_attn"], heads=[1, 4]) as seen:
        model.generate(ids(), max_new_tokens=4, do_sample=False)
    calls = seen.calls["model.layers.1.self_attn"]
    assert [call.shape for call in calls] == [(B, 2, T, T)] + [(B, 2, 1, n) for n in (min(T + i, 5) for i in (1, 2, 3))]
    for call in calls:
        torch.testing.assert_close(call.sum(-1), torch.ones(call.shape[:3]), rtol=1e-4, atol=1e-5)
    assert calls[-1]._query.untyped_storage().nbytes() < 100, "the whole cache of keys is kept"
    assert not any("_attached" in module.__dict__ for module in model.modules())


def test_models_train_on_our_core():
    eager, ours = both("llama", DECODERS["llama"], transformers.AutoModelForCausalLM)
    losses = [model(input_ids=ids(), labels=ids()).loss for model in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for theirs, mine in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_masks_of_the_caller_and_packed_sequences():
    eager, ours = both("llama", DECODERS["llama"], transformers.AutoModelForCausalLM)
    visible = torch.ones(T, T).tril().bool()
    visible[7:, 2:4] = False
    added = torch.zeros(B, 1, T, T).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = eager(input_ids=ids(), attention_mask=added).logits
    torch.testing.assert_close(ours(input_ids=ids(), attention_mask=added).logits, expected, rtol=1e-3, atol=1e-4)
    bools = visible.expand(B, 1, T, T)
    torch.testing.assert_close(ours(input_ids=ids(), attention_mask=bools).logits, expected, rtol=1e-3, atol=1e-4)
    positions = torch.cat([torch.arange(5), torch.arange(8)]).expand(B, T)
    packed = {"input_ids": ids(), "position_ids": positions, "use_cache": False}
    found = ours(**packed, output_attentions=True)
    torch.testing.assert_close(found.logits, eager(**packed).logits, rtol=1e-3, atol=1e-4)
    assert "documents" in repr(found.attentions[0]._scoring.mask)
    borders = torch.tensor([0, 5, T], dtype=torch.int32)
    flat = {"input_ids": ids()[:1], "position_ids": positions[:1], "use_cache": False}
    flash = ours(**flat, cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=8, max_length_k=8)
    torch.testing.assert_close(flash.logits, eager(**flat).logits, rtol=1e-3, atol=1e-4)


def test_masks_stay_rules_and_never_become_tables():
    model = tiny("mistral", DECODERS["mistral"], "headwise", transformers.AutoModelForCausalLM)
    found = model(input_ids=ids(), output_attentions=True).attentions[0]._scoring.mask
    assert found.banded
    assert not found.tensors()


@pytest.mark.parametrize("kind", ["gptj", "gpt_neo", "falcon"])
def test_transformers_refuses_models_that_choose_a_class_by_the_name(kind):
    with pytest.raises(KeyError, match="headwise"):
        transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind), attn_implementation="headwise")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["bloom", "mpnet", "xglm", "codegen"])
@torch.no_grad()
def test_models_that_compute_with_our_mask_are_refused_at_their_first_call(kind, compiled):
    model = tiny(kind, OWN[kind], "headwise", transformers.AutoModel)
    call = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises(OptionError, match=f"{kind} computes attention .*not go through transformers' attention interf"):
        call(input_ids=ids(), attention_mask=padding("left"))


@torch.no_grad()
def test_a_model_of_which_only_one_token_is_read_from_a_static_cache_is_refused_too():
    model = tiny("bloom", OWN["bloom"], "headwise", transformers.AutoModelForCausalLM)
    with pytest.raises(OptionError, match="bloom computes attention"):
        model.generate(ids(1), max_new_tokens=2, cache_implementation="static", disable_compile=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", ["deberta-v2", "deberta", "xlnet"])
@torch.no_grad()
def test_models_that_ask_for_neither_mask_nor_attention_run_as_ever_and_cannot_be_watched(kind):
    eager, ours = both(kind, OWN[kind], transformers.AutoModel)
    given = {"input_ids": ids(), "attention_mask": padding("right")}
    torch.testing.assert_close(ours(**given).last_hidden_state, eager(**given).last_hidden_state)
    for look in (watch, lambda model: headwise.silence(model, {"": [0]})):
        with pytest.raises(OptionError, match=f"{type(ours).__name__} computes attention in its own code"):
            look(ours)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
@torch.no_grad()
def test_models_compile_in_one_graph(kind):
    torch.compiler.reset()
    settings = DECODERS.get(kind) or ENCODERS[kind]
    model = tiny(kind, settings, "headwise", transformers.AutoModel)
    expected = model(input_ids=ids()).last_hidden_state
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(input_ids=ids()).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "order", ["import headwise.huggingface, transformers", "import transformers, headwise.huggingface"]
)
def test_importing_the_module_registers_the_implementation(order):
    done = run(f"""
{order}
settings = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9, intermediate_size=8)
config = transformers.AutoConfig.for_model("llama", **settings)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="headwise")
print(model.config._attn_implementation)
""")
    assert done.stdout.strip() == "headwise", done.stderr


def test_importing_headwise_changes_nothing_outside_itself():
    done = run("""
import sys, torch
before = list(sys.meta_path), list(sys.path_hooks)
import headwise
assert (list(sys.meta_path), list(sys.path_hooks)) == before
headwise.watch(headwise.MultiHeadAttention(8, 2))
assert "transformers" not in sys.modules
import transformers
from transformers import AttentionInterface, PreTrainedModel
assert "headwise" not in AttentionInterface().valid_keys()
check = PreTrainedModel._check_and_adjust_attn_implementation
import headwise.huggingface
assert "headwise" in AttentionInterface().valid_keys()
assert PreTrainedModel._check_and_adjust_attn_implementation is check
print("clean")
""")
    assert done.stdout.strip() == "clean", done.stderr


def test_without_transformers_the_import_says_how_to_install_it():
    done = run("import sys; sys.modules['transformers'] = None; import headwise.huggingface")
    assert "MissingExtraError" in done.stderr
    assert install_command("huggingface") in done.stderr


def test_a_watch_over_a_model_on_another_path_says_what_to_do():
    model = tiny("llama", DECODERS["llama"], "eager", transformers.AutoModelForCausalLM)
    with pytest.raises(OptionError, match="set_attn_implementation"):
        watch(model)
    model.set_attn_implementation("headwise")
    with headwise.watch(model) as seen:
        model(input_ids=ids())
    assert len(seen) == 2


def test_a_model_that_attends_to_other_keys_than_its_mask_is_for_is_refused():
    from headwise.huggingface import attention, mask_of

    prepared = mask_of(B, 5, 5)
    query, key = torch.randn(B, H, 5, 8), torch.randn(B, H, 7, 8)
    with pytest.raises(headwise.MaskError, match=r"made its mask for \(T, S\) = \(5, 5\) and attends with \(5, 7\)"):
        attention(torch.nn.Module(), query, key, key, prepared)


def test_a_mask_that_hides_nothing_is_made_if_the_model_asks_for_one():
    from transformers.masking_utils import bidirectional_mask_function

    from headwise.huggingface import mask_of

    made = mask_of(1, 5, 7, mask_function=bidirectional_mask_function, allow_is_bidirectional_skip=False)
    assert made.mask.to_tensor(5, 7).all()
    assert mask_of(1, 5, 7, mask_function=bidirectional_mask_function) is None


def test_a_model_that_works_on_its_mask_as_a_tensor_is_told_so():
    from headwise.huggingface import PreparedMask

    mask = PreparedMask(headwise.causal(), 2, 5, 5)
    assert mask.shape == (2, 1, 5, 5)  # which transformers reads where a model makes the mask of another one inside it
    for touch in (
        lambda: mask.dtype,
        lambda: mask[:, :, :3],
        lambda: torch.zeros(5, 5) + mask,
        lambda: torch.where(mask, 1, 0),
        lambda: torch.cat([mask, mask], -1),
    ):
        with pytest.raises(
            headwise.MaskError, match="uses its attention mask as a tensor.*Use attn_implementation='eager'"
        ):
            touch()
    assert not hasattr(mask, "dtype")


def test_parts_that_attend_by_themselves_are_named():
    config = transformers.AutoConfig.for_model(
        "bigbird_pegasus", d_model=E, encoder_layers=1, decoder_layers=1, encoder_attention_heads=H, vocab_size=V,
        decoder_attention_heads=H, encoder_ffn_dim=32, decoder_ffn_dim=32, attention_type="original_full",
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise")
    with pytest.warns(
        UserWarning, match="BigBirdPegasusSelfAttention of BigBirdPegasusModel computes attention in its own code"
    ):
        watch(model)


# Padding and cross-attention in readings ---------------------------------------------------------------------------


def readings(weights, ids):
    return [(head.numbers, head.without_first, head.kind) for head in weights.summary(ids)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_a_padded_batch_reads_as_each_text_alone(kind, side):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model(kind, vocab_size=31, initializer_range=0.6, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise").double().eval()
    texts = [torch.randint(31, (1, n)) for n in (7, 13)]
    ids, keep = torch.zeros(2, 13, dtype=torch.int64), torch.zeros(2, 13, dtype=torch.int64)
    for sample, text in enumerate(texts):
        n = text.shape[1]
        place = slice(13 - n, 13) if side == "left" else slice(0, n)
        ids[sample, place], keep[sample, place] = text[0], 1
    positions = (keep.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), headwise.watch(model) as seen:
        model(ids, attention_mask=keep, position_ids=positions)
    for sample, text in enumerate(texts):
        with torch.no_grad(), headwise.watch(model) as alone:
            model(text)
        for name, weights in alone.items():
            found, expected = readings(seen[name].select(batch=[sample]), ids), readings(weights, text)
            for (numbers, others, word), (own, own_others, own_word) in zip(found, expected, strict=True):
                assert numbers == pytest.approx(own, rel=1e-6, abs=1e-9), name
                assert others == pytest.approx(own_others, rel=1e-6, abs=1e-9), name
                assert word == own_word


def encoder_decoder(kind):
    """A tiny model with an encoder, what to call it with, and the sizes of its cross-attention."""
    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=31, d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=3, pad_token_id=1, eos_token_id=2,
            decoder_start_token_id=2,
        )  # fmt: skip
        model = transformers.T5Model(config)
    elif kind == "bart":
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
        config = transformers.BartConfig(
            vocab_size=31, d_model=24, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
            forced_eos_token_id=None, **sizes, **special,
        )  # fmt: skip
        model = transformers.BartModel(config)
    else:
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
        config = transformers.WhisperConfig(
            vocab_size=31, num_mel_bins=5, d_model=24, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=11,
            max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **special,
        )  # fmt: skip
        model = transformers.WhisperModel(config)
    model.set_attn_implementation("headwise")
    given = {"decoder_input_ids": torch.randint(3, 31, (1, 7))}
    if kind == "whisper":
        given["input_features"] = torch.randn(1, 5, 22)
    else:
        given["input_ids"] = torch.randint(3, 31, (1, 7 if kind == "bart" else 11))
    return model.eval(), given


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_cross_attention_of_encoder_decoder_models_is_recognized(kind):
    model, given = encoder_decoder(kind)
    with torch.no_grad(), headwise.watch(model) as seen:
        model(**given)
    crossing = {name for name, weights in seen.items() if weights._scoring.cross}
    assert crossing == {name for name in seen if "encoder_attn" in name or "EncDecAttention" in name}
    assert len(crossing) == 2
    for name, weights in seen.items():
        cross = name in crossing
        options = {"query_ids": given["decoder_input_ids"]} if cross else {}
        ids = torch.arange(weights.shape[3]) if "encoder" not in name else given.get("input_ids")
        numbers = weights.summary(ids if weights.shape[3] != 11 or kind == "t5" else None, **options)[0].numbers
        assert ("monotone" in numbers) == cross
        assert ("previous" in numbers) == ("distance" in numbers) == (not cross)
    attentions = model(**given, output_attentions=True).cross_attentions
    assert all(weights._scoring.cross for weights in attentions), "without watching too"


def test_padding_of_the_source_text_is_no_key_and_generation_steps_are_passes():
    model, given = encoder_decoder("t5")
    keep = torch.ones(1, 11, dtype=torch.int64)
    keep[:, 8:] = 0
    with torch.no_grad(), headwise.watch(model) as seen:
        model(**given, attention_mask=keep)
    cross = next(weights for name, weights in seen.items() if "EncDec" in name)
    assert cross.real_tokens().keys[0].tolist() == keep[0].bool().tolist()
    assert cross.real_tokens().queries.all()
    encoder = seen["encoder.block.0.layer.0.SelfAttention"]
    assert encoder.real_tokens().queries[0].tolist() == keep[0].bool().tolist()


def test_a_step_of_generation_knows_what_is_padding():
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, intermediate_size=16, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("headwise")
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad(), headwise.watch(model) as seen:
        model.generate(
            torch.randint(1, 31, (2, 5)), attention_mask=keep, max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
    prompt, *steps = seen.calls["model.layers.0.self_attn"]
    assert prompt.real_tokens().queries.tolist() == keep.bool().tolist()
    for step in steps:
        assert step.real_tokens().keys[:, :5].tolist() == keep.bool().tolist()
        assert step.real_tokens().queries.all()
        assert step.mass(headwise.sink(1))[0].min() > 0, "the first real token"


def test_a_view_of_cross_attention_knows_the_tokens_of_both_sides():
    model, given = encoder_decoder("t5")
    result = headwise.view(model, given, layers=lambda name: "EncDec" in name)
    numbers = result.summaries[0][0].numbers
    assert {"same_token", "induction", "monotone"} <= set(numbers)
    assert "distance" not in numbers
    assert "7 tokens attending to 11" in result.sentence
    assert str(result)
    decoder = headwise.view(model, given, layers=lambda name: name.startswith("decoder") and "SelfAttention" in name)
    assert torch.equal(decoder.ids, given["decoder_input_ids"][0])
