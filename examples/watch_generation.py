"""Watch a Hugging Face model while it generates, and see where every new token attends.

The model is tiny and random, built from a configuration, so nothing is downloaded. For a real model, call
`AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headwise")`. This needs headwise[huggingface].

    python examples/watch_generation.py
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headwise
import headwise.huggingface  # registers attn_implementation="headwise"

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LAYER = "model.layers.1.self_attn"


def main() -> None:
    """Generate text, then print where every new token attends."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, **HEADS, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="headwise").eval()
    prompt = torch.randint(1, 512, (1, 24))
    with torch.no_grad(), headwise.watch(model, layers=[LAYER]) as seen:
        text = model.generate(prompt, max_new_tokens=6, do_sample=False)[0]

    first, *rest = seen.calls[LAYER]
    print(f"prompt: {first}")
    print(first.summary(prompt[0]))
    for weights in rest:  # one row each, stored as numbers, so the key cache can be freed
        position = weights.shape[3] - 1
        weight, key = weights.peak()
        looks = ", ".join(f"{k} ({w:.2f})" for w, k in zip(weight.flatten(), key.flatten().tolist(), strict=True))
        print(f"token {text[position]} at {position}: its heads attend most to {looks}")


if __name__ == "__main__":
    main()
