"""Look at attention over 16,384 tokens: exact numbers, without a T×T matrix.

The example hides a needle in noise: one distant key that the last query matches. The attention map finds it, computes
statistics of every head, and gives a picture of the whole matrix.

    python examples/long_context.py
"""

import torch

from headwise import attend, causal, local, sink

T, H, D, NEEDLE = 16384, 2, 16, 4321


def main() -> None:
    """Attend, then look at the weights."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, H, T, D, generator=generator) for _ in range(3))
    key[0, 1, NEEDLE] = query[0, 1, -1] * 4  # in head 1, the last query attends to this key
    with torch.no_grad():
        _, weights = attend(query, key, value, mask=causal(), return_weights=True)
        print(f"{weights}: a dense tensor would take {weights.numel() * 4 / 2**30:.0f} GiB; nothing is computed yet")
        last = weights.select(rows=slice(-1, None)).topk(1)  # computes only one row
        for head in range(H):
            print(f"head {head}, last query: {last.weights[0, head, 0, 0]:.3f} on key {last.keys[0, head, 0, 0]}")
        panel = weights.panel(entropy=True, received=True, masses={"near": local(64), "first": sink(4)}, pooled=(8, 8))
    even = torch.arange(1, T + 1).log()  # the entropy of uniform attention
    for head in range(H):
        print(
            f"head {head}: entropy {(panel.entropy[0, head, 1:] / even[1:]).mean():.2f} of uniform attention, "
            f"{panel.masses['near'][0, head].mean():.3f} of the weight within 64 tokens, "
            f"{panel.masses['first'][0, head].mean():.3f} on the first four; "
            f"key {panel.received.mean[0, head].argmax().item()} receives the most weight per query that sees it"
        )
    print("all of head 1 in 8 × 8 cells (rows sum to 1):")
    for row in panel.pooled[0, 1].tolist():
        print(" ".join(f"{cell:.2f}" for cell in row))


if __name__ == "__main__":
    main()
