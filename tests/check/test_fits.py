"""Linear maps that are solved for from recorded numbers."""

import torch

from headwise.check.fits import fit


def test_map_of_equal_heads_is_solved_in_the_same_way_every_time():
    heads = torch.randn(265, 31, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(1, 4)
    for _ in range(20):
        torch.randint(1, 1000, (125,), dtype=torch.int32)  # leaves other numbers where the solver finds free memory
        solved = fit(heads, heads)
        assert solved.exact
        assert torch.allclose(solved.weight, torch.eye(31, dtype=torch.float64).repeat(4, 4) / 4)
