"""Run a model that uses `nn.MultiheadAttention` on headwise, and look at its heads.

The model is torch's own encoder. Its code, weights and results stay the same, but now you can look at every head
without `need_weights`.

    python examples/swap_torch_attention.py
"""

import torch
from torch import nn

import headwise


def main() -> None:
    """Replace the attention layers, compare the outputs, and look at the weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 50, 64)
    padded = torch.arange(50) >= torch.tensor([50, 41, 17])[:, None]  # torch's convention: True masks out
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padded)
        print(headwise.replace(model))
        after = model(x, src_key_padding_mask=padded)
    real = ~padded  # outputs at padded positions do not matter
    print(f"largest difference {(before - after)[real].abs().max():.1e}")

    with torch.no_grad(), headwise.watch(model) as seen:
        model(x, src_key_padding_mask=padded)
    for name, weights in seen.items():
        hidden = weights.received().total[2, :, 17:].sum().item()
        print(f"{name}: {weights}, {hidden:.0f} attention on padding of sample 2")
        print(weights.select(batch=0).summary())


if __name__ == "__main__":
    main()
