"""Watching a model collects its maps and leaves nothing behind."""

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from headwise import AttentionMap, MultiHeadAttention, OptionError, Panel, replace, sink, watch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(24, 3, causal=True)

    def forward(self, x):
        return x + self.attention(x)


def model(depth=3):
    return nn.Sequential(*(Block() for _ in range(depth)))


def test_maps_are_collected_by_module_name():
    net, x = model(), torch.randn(2, 7, 24)
    plain = net(x)
    with watch(net) as seen:
        assert torch.equal(net(x), plain)
    assert list(seen) == ["0.attention", "1.attention", "2.attention"]
    assert len(seen) == 3
    _, weights = net[0].attention(x, return_weights=True)
    torch.testing.assert_close(seen["0.attention"][:], weights[:])
    assert "'0.attention'" in repr(seen)


def test_every_call_is_kept_and_the_last_is_at_hand():
    net = model(1)
    with watch(net) as seen:
        net(torch.randn(1, 5, 24))
        net(torch.randn(1, 9, 24))
    assert [w.shape[2] for w in seen.calls["0.attention"]] == [5, 9]
    assert seen["0.attention"].shape[2] == 9
    assert "2 calls" in repr(seen)


def test_layers_and_heads_filter():
    net, x = model(), torch.randn(1, 5, 24)
    with watch(net, layers=["1.attention"], heads=[2, 0]) as seen:
        net(x)
    assert list(seen) == ["1.attention"]
    assert seen["1.attention"].shape == (1, 2, 5, 5)
    with watch(net, layers=lambda name: name.startswith("2")) as seen:
        net(x)
    assert list(seen) == ["2.attention"]
    with watch(net[0].attention) as seen:
        net(x)
    assert list(seen) == [""]


def test_statistics_are_taken_on_the_fly_and_nothing_else_is_kept():
    net, x = model(1), torch.randn(1, 5, 24)
    alive = []
    with (
        watch(net, statistics=lambda w: alive.append(weakref.ref(w._query))),
        watch(net, statistics={"entropy": True, "masses": {"sink": sink()}}) as seen,
    ):
        net(x)
    gc.collect()
    assert isinstance(seen["0.attention"], Panel)
    assert seen["0.attention"].entropy.shape == (1, 3, 5)
    assert not seen["0.attention"].entropy.requires_grad
    assert alive[0]() is None
    with watch(net, statistics=lambda w: w.peak().weight.mean().item()) as seen:
        net(x)
    assert isinstance(seen["0.attention"], float)


def test_nothing_is_left_after_exit_even_if_the_body_raises():
    net = model()
    with pytest.raises(ZeroDivisionError), watch(net) as seen:  # noqa: PT012
        net(torch.randn(1, 5, 24))
        raise ZeroDivisionError
    assert len(seen) == 3
    assert not any("_attached" in vars(block.attention) for block in net)
    count = len(seen.calls["0.attention"])
    net(torch.randn(1, 5, 24))
    assert len(seen.calls["0.attention"]) == count
    alive = weakref.ref(seen["0.attention"]._query)
    del seen
    gc.collect()
    assert alive() is None


def test_watches_nest():
    net = model(1)
    with watch(net) as outer:
        with watch(net) as inner:
            net(torch.randn(1, 5, 24))
        net(torch.randn(1, 5, 24))
    assert (len(outer.calls["0.attention"]), len(inner.calls["0.attention"])) == (2, 1)
    assert "_attached" not in vars(net[0].attention)


def test_a_watched_map_trains():
    net = model(1)
    with watch(net) as seen:
        net(torch.randn(1, 5, 24))
    seen["0.attention"].entropy().sum().backward()
    assert net[0].attention.qkv_proj.weight.grad.abs().sum() > 0


def test_watching_works_in_a_compiled_model():
    net, x = model(1), torch.randn(1, 5, 24)
    compiled = torch.compile(net, backend="eager")
    with watch(net) as seen:
        compiled(x)
    torch.testing.assert_close(seen["0.attention"][:], net[0].attention(x, return_weights=True)[1][:])
    assert isinstance(seen["0.attention"], AttentionMap)


def test_a_model_can_be_copied_and_saved_while_nothing_watches(tmp_path):
    net = model(1)
    with watch(net):
        net(torch.randn(1, 5, 24))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert "_attached" not in "".join(net.state_dict())


def test_bad_requests_are_refused():
    net = model(1)
    with pytest.raises(OptionError, match="no headwise attention"):
        watch(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="expected a torch.nn.Module"):
        watch(lambda x: x)
    with pytest.raises(
        OptionError, match=r"'9.attention' is not a headwise layer of this model; there are \['0.attention'\]"
    ):
        watch(net, layers=["9.attention"])
    with watch(net) as seen, pytest.raises(KeyError, match="was not seen"):
        seen["0.attention"]
    with watch(net) as seen, pytest.raises(OptionError, match="already open"), seen:
        pass


def test_layers_with_torchs_interface_are_watched_also_where_torch_would_take_its_shortcut():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    encoder.eval()
    with pytest.raises(OptionError, match=r"headwise.replace\(model\)"):
        watch(encoder)
    replace(encoder)
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        expected = encoder(x)
        with watch(encoder) as seen:
            found = encoder(x)
    assert torch.backends.mha.get_fastpath_enabled()
    torch.testing.assert_close(found, expected)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    _, weights = encoder.layers[0].self_attn(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(seen["layers.0.self_attn"][:], weights)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_layer_that_is_computed_again_for_its_gradient_is_seen_once(use_reentrant):
    net, x = model(2), torch.randn(1, 5, 24, requires_grad=True)
    with watch(net) as seen:
        y = x
        for block in net:
            y = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=use_reentrant)
        y.sum().backward()
    assert [len(calls) for calls in seen.calls.values()] == [1, 1]
    assert x.grad is not None


def test_each_thread_sees_its_own_calls_alone():
    net = model(2)
    inputs = [torch.randn(1, 5, 24) for _ in range(6)]
    start = threading.Barrier(len(inputs))

    def seen_of(x):
        start.wait()
        found = []
        for _ in range(40):
            with torch.no_grad(), watch(net) as seen:
                net(x)
            found.append([len(calls) for calls in seen.calls.values()] == [1, 1] and seen["0.attention"][:])
        return found

    with torch.no_grad(), ThreadPoolExecutor(len(inputs)) as pool:
        alone = [net[0].attention(x, return_weights=True)[1][:] for x in inputs]
        for expected, found in zip(alone, pool.map(seen_of, inputs), strict=True):
            assert all(torch.equal(weights, expected) for weights in found)
    assert not any("_attached" in vars(block.attention) for block in net)


def test_each_task_sees_its_own_calls_and_those_of_tasks_it_starts():
    net, x = model(1), torch.randn(1, 5, 24)

    async def call():
        await asyncio.sleep(0)
        net(x)

    async def watching(times):
        with watch(net) as seen:
            await asyncio.gather(*(call() for _ in range(times)))
            await asyncio.sleep(0.01)
        return len(seen.calls["0.attention"])

    async def all_at_once():
        return await asyncio.gather(*(watching(times) for times in (1, 3, 2)))

    assert asyncio.run(all_at_once()) == [1, 3, 2]


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))],  # noqa: S301 - our own
    ids=["copy", "pickle"],
)
def test_a_copy_made_while_watching_is_not_watched(copied):
    net, x = model(1), torch.randn(1, 5, 24)
    with watch(net) as seen:
        other = copied(net)
        other(x)
    other(x)
    assert len(seen) == 0


def test_overlapping_watches_leave_torchs_fast_path_as_it_was():
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(24, 4, 8, batch_first=True), 1).eval()
    replace(encoder)
    first, second = watch(encoder), watch(encoder)
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__()
    assert torch.backends.mha.get_fastpath_enabled()
