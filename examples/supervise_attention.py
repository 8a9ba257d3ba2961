"""Train where heads look: a loss on attention weights that are never made as a matrix.

Head 0 is told to look at the previous token, head 1 at the first. The loss is the log of a mass, so that any probe can
be asked for, at any length: its gradient is computed block by block.

    python examples/supervise_attention.py
"""

import torch

from headwise import MultiHeadAttention, Panel, previous_token, rotary, sink

WANTED = {"previous": previous_token(), "first": sink(1)}  # of heads 0 and 1


def masses(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """How much of its attention each head puts where it should, (2,). The first query has no choice."""
    _, weights = layer(x, return_weights=True)  # the fused kernel runs; nothing T×T is made
    panel: Panel = weights.panel(masses=WANTED)
    return torch.stack([panel.masses[name][:, head, 1:].mean() for head, name in enumerate(WANTED)])


def main() -> None:
    """Train for a few seconds, and show before and after."""
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
