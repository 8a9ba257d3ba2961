"""Find the induction heads of the built-in model, and switch off the head that they depend on.

An induction head attends to the token that followed the previous occurrence of the current token. Random tokens, read
twice, distinguish it from every other kind of head, because only the repetition is predictable.

    python examples/induction_heads.py
"""

import torch

from headwise import induction, load_builtin, previous_token, silence, watch
from headwise.models import GPT

ONCE = 64  # tokens in the passage that is read twice


def look(gpt: GPT, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The weight of every head (layers, heads) on the continuation and on the previous token, and the loss."""
    statistics = {"masses": {"induction": induction(tokens), "previous": previous_token()}}
    with torch.no_grad(), watch(gpt, statistics=statistics) as seen:
        logits = gpt(tokens[None])[0]
    again = slice(ONCE + 1, None)  # only the second reading is predictable
    panels = [panel.masses for panel in seen.values()]
    found = (torch.stack([masses[name][0, :, again].mean(-1) for masses in panels]) for name in statistics["masses"])
    loss = torch.nn.functional.cross_entropy(logits[again][:-1], tokens[again][1:])
    return *found, loss.item()


def main() -> None:
    """Print the induction heads, then measure them with one head switched off."""
    gpt = load_builtin().gpt
    once = torch.randint(1, 8192, (ONCE,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.tensor([0]), once, once])
    before, previous, loss = look(gpt, tokens)
    heads = before.shape[1]
    best = [divmod(place, heads) for place in before.flatten().topk(2).indices.tolist()]
    for layer, head in best:
        print(f"induction head {layer}.{head}: {before[layer, head]:.2f} of its weight on what came next last time")
    layer, head = divmod(previous.argmax().item(), heads)
    print(f"previous-token head {layer}.{head}: {previous[layer, head]:.2f}; loss on the repetition {loss:.4f}")

    with silence(gpt, {f"blocks.{layer}.attention": head}):  # its output becomes zero
        after, _, loss = look(gpt, tokens)
    left = ", ".join(f"{i}.{j}: {after[i, j]:.2f}" for i, j in best)
    print(f"without {layer}.{head}: {left}; loss {loss:.4f}")


if __name__ == "__main__":
    main()
