"""Train where heads attend, with a loss on attention weights that never exist as a matrix.

Head 0 is trained to attend to the previous token, head 1 to the first token. The loss is the negative log of a mass. It
works with any probe at any length, because its gradient is computed block by block.

    python examples/supervise_attention.py
"""

import torch

from headwise import MultiHeadAttention, Panel, previous_token, rotary, sink

WANTED = {"previous": previous_token(), "first": sink(1)}  # for heads 0 and 1


def masses(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """The share of attention that each head puts where it should, (2,), without the first query (it has no choice)."""
    _, weights = layer(x, return_weights=True)  # runs the fused kernel and creates no T×T tensor
    panel: Panel = weights.panel(masses=WANTED)
    return torch.stack([panel.masses[name][:, head, 1:].mean() for head, name in enumerate(WANTED)])


def main() -> None:
    """Train for a few seconds and print the progress."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 2, causal=True, position=rotary(100.0))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for step in range(41):
        start = torch.zeros(4, 1, 32)
        start[..., 0] = 6.0  # the same first token in every text
        found = masses(layer, torch.cat([start, torch.randn(4, 63, 32) + 1], 1))
        if step % 20 == 0:
            print(f"step {step:>2}: head 0 on the previous token {found[0]:.2f}, head 1 on the first {found[1]:.2f}")
        loss = -found.log().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
