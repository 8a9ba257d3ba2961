"""How faithful traces are in a causal model, over many texts: python docs/tools/trace_study.py FOLDER

The model writes 40 texts of 128 tokens, and the last 8 tokens of each are its answer. Of 24 blocks of the text before
it, a method's first five are deleted: how far does the loss of the answer rise? Controls: five random blocks, and the
five right before the answer, which need no method to be found.
"""

import sys

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import headwise.huggingface  # noqa: F401 - registers attn_implementation="headwise"
from headwise import trace
from headwise.study.trace import METHODS

TEXTS, LENGTH, ANSWER, DRAWS = 40, 128, 8, 8


def main() -> None:
    """Print a table of mean rises with 95 % intervals."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="headwise").eval()
    torch.manual_seed(0)
    start = torch.full((TEXTS, 1), model.config.bos_token_id)
    texts = model.generate(start, max_new_tokens=LENGTH - 1, min_new_tokens=LENGTH - 1, do_sample=True, top_k=40)
    rises: dict[str, list[float]] = {method: [] for method in (*METHODS, "the last blocks", "random")}
    for seed, text in enumerate(texts):
        found = trace(model, text, (LENGTH - ANSWER, LENGTH), draws=DRAWS, seed=seed)
        for method in METHODS:
            rises[method].append(found.tests[method] - found.loss)
        kept = torch.cat([text[: found.passages[-found.tests["passages"]][0]], text[-ANSWER:]])[None]
        with torch.no_grad():
            loss = F.cross_entropy(model(kept).logits[0, -ANSWER - 1 : -1], kept[0, -ANSWER:]).item()
        rises["the last blocks"].append(loss - found.loss)
        rises["random"].append(found.tests["random"]["mean"] - found.loss)
    print("| method | the loss of the answer rises by | better than random deletion |\n|---|---|---|")
    for method, numbers in rises.items():
        rise = torch.tensor(numbers)
        more = rise - torch.tensor(rises["random"])
        share = "" if method == "random" else f"{(more > 0).float().mean():.0%} of texts"
        print(f"| {method} | {rise.mean():.2f} ± {1.96 * rise.std() / len(rise) ** 0.5:.2f} | {share} |")


if __name__ == "__main__":
    main()
