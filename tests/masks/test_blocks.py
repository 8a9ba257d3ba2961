"""Chosen blocks of keys: what is visible, the fast path on the CPU, FlexAttention's block mask, caches and files."""

import functools
import pickle

import pytest
import torch

from closeness import assert_close_to_truth
from headwise import (
    AttentionMap,
    MaskError,
    MultiHeadAttention,
    Scoring,
    attend,
    blocks,
    causal,
    documents,
    explain,
    padding,
    prefix,
    reference,
    window,
)
from headwise.attention.backends import SELECTED, Call, selected
from headwise.masks import lowering
from headwise.masks.mask import Edges, of_heads

B, H, Hkv, D, Dv = 2, 6, 3, 8, 5
SIZES = {"square": 4, "tall": (7, 3), "wide": (3, 8), "one query": (1, 5), "larger than the text": (64, 128)}


def table_of(T, S, size, *, samples=1, heads=1, share=0.4, seed=0, rows=None):
    tall, wide = size if isinstance(size, tuple) else (size, size)
    shape = (samples, heads, -(-S // tall) if rows is None else rows, -(-S // wide))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def by_hand(table, size, T, S):
    """The mask entry by entry, from the definition."""
    tall, wide = size if isinstance(size, tuple) else (size, size)
    first = -(-S // tall) - table.shape[2]
    row, col = (torch.arange(T) + S - T) // tall - first, torch.arange(S) // wide
    return table[:, :, row][:, :, :, col]


@pytest.mark.parametrize(("T", "S"), [(13, 13), (6, 17), (1, 19)])
@pytest.mark.parametrize("size", SIZES)
def test_a_query_sees_the_blocks_chosen_for_its_block(size, T, S):
    size = SIZES[size]
    tall = size[0] if isinstance(size, tuple) else size
    for rows in {None, -(-S // tall) - (S - T) // tall}:  # of the whole text, or of these queries only
        table = table_of(T, S, size, samples=B, heads=H, rows=rows)
        mask = blocks(table, size)
        mask.check(B, H, T, S, torch.device("cpu"))
        assert torch.equal(mask.to_tensor(T, S), by_hand(table, size, T, S))
        assert torch.equal(mask.tile(slice(0, 1), slice(2, 9), T, S), by_hand(table, size, T, S)[:, :, :1, 2:9])
        for start in range(T):
            lo, hi = mask.key_range(start, start + 1, T, S)
            seen = by_hand(table, size, T, S)[:, :, start].flatten(0, 1).any(0).nonzero()
            assert (len(seen) == 0 and lo == hi) or lo <= int(seen.min()) <= int(seen.max()) < hi


def test_numbers_of_blocks_mean_the_same_as_a_table():
    S, size = 23, 4
    numbers = torch.tensor([[5, 0], [1, -1], [2, 2], [-1, -1], [0, 4], [3, 5]])
    table = torch.zeros(6, 6, dtype=torch.bool)
    for row, chosen in enumerate(numbers.tolist()):
        table[row, [n for n in chosen if n >= 0]] = True
    for made in (blocks(numbers, size), blocks(numbers.int(), size, key_blocks=6), blocks(numbers.tolist(), size)):
        assert torch.equal(made.to_tensor(S), blocks(table, size).to_tensor(S))
    few = blocks([[0], [1]], (8, 3))  # blocks after the last number exist, and are not chosen
    few.check(1, 1, 16, 16, torch.device("cpu"))
    assert few.to_tensor(16).sum() == 2 * 8 * 3


def test_a_choice_of_blocks_draws_itself():
    assert str(blocks([[0], [1], [0]], (1, 2))) == "■■··\n··■■\n■■··"
    assert repr(blocks([[0], [1], [0]], (1, 2))) == "blocks(selected of shape (1, 1, 3, 2), (1, 2))"


CALLS = {
    "alone": lambda T, S: {},
    "causal": lambda T, S: {"causal": True},
    "padded": lambda T, S: {"mask": causal() & padding([S - 3, S])},
    "documents": lambda T, S: {"mask": documents(torch.arange(S) // 9)},
    "biased": lambda T, S: {"attn_bias": torch.randn(1, H, T, S).double(), "scale": 0.3},
    "an alternative": lambda T, S: {"mask": causal() & (window(3, 2) | prefix(2))},
}


@pytest.mark.parametrize("by", [(1, 1), (B, 1), (1, H), (B, H)], ids=["one", "by sample", "by head", "by both"])
@pytest.mark.parametrize("size", ["square", "tall", "one query"])
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(("T", "S"), [(31, 31), (13, 29)])
def test_gathered_keys_give_output_and_gradients_of_the_whole_mask(kind, size, by, T, S, monkeypatch):
    monkeypatch.setattr(selected, "FEWEST", 1)
    monkeypatch.setattr(selected, "WORTHWHILE", 2.0)
    monkeypatch.setattr(selected, "CHUNK_BYTES", 3000)
    torch.manual_seed(0)
    inputs = [torch.randn(B, H, T, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, Dv)]
    q, k, v = inputs = [x.double().requires_grad_() for x in inputs]
    mask = blocks(table_of(T, S, SIZES[size], samples=by[0], heads=by[1]), SIZES[size])
    given = CALLS[kind](T, S)
    whole = mask & given.pop("mask") if "mask" in given else mask
    found, weights = attend(q, k, v, mask=whole, **given, return_weights=True)
    assert explain(q, k, v, mask=whole, **given).path == SELECTED.name
    joined = whole & causal() if given.pop("causal", False) else whole
    bias, scale = given.get("attn_bias"), given.get("scale")
    truth, dense = reference.attend(q, k, v, visible=joined.to_tensor(T, S), bias=bias, scale=scale)
    assert_close_to_truth(found, truth)
    assert_close_to_truth(weights[:], dense)
    assert_close_to_truth(weights.sum(2), dense.sum(2))  # `received` leaves padded queries out
    ours, theirs = (torch.autograd.grad(x.square().sum(), inputs) for x in (found, truth))
    for a, b in zip(ours, theirs, strict=True):
        assert_close_to_truth(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_query_that_sees_no_block_reads_zeros_and_has_a_finite_gradient(dtype):
    q, k, v = (torch.randn(1, 2, 600, 16, dtype=dtype).requires_grad_() for _ in range(3))
    mask = blocks([[n if n % 3 else -1] for n in range(10)], 60)
    call = Call(q, k, v, Scoring(mask), 0.0)
    assert SELECTED.refuses(call) is None
    output = SELECTED.run(call)
    output.float().square().sum().backward()
    empty = torch.arange(600) // 60 % 3 == 0
    assert (output[:, :, empty] == 0).all()
    assert (output[:, :, ~empty] != 0).any()
    assert (q.grad[:, :, empty] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_the_fast_path_is_taken_where_few_blocks_are_chosen():
    T = 1024
    q = torch.randn(1, 2, T, 16)
    few, many = (blocks(table_of(T, T, 64, share=share), 64) for share in (0.05, 0.9))
    assert explain(q, q, q, mask=few & causal()).path == "selected"
    assert explain(q.half(), q.half(), q.half(), mask=few & causal()).path == "float32"
    told = explain(q, q, q, mask=many).refused
    assert "of the keys are chosen for some block" in told["selected"]
    assert "not a choice of blocks" in explain(q, q, q, mask=causal()).refused["selected"]
    assert "score function" in explain(q, q, q, mask=few, softcap=2.0).refused["selected"]
    assert "dropout" in explain(q, q, q, mask=few, dropout=0.1).refused["selected"]


MASKS = {
    "blocks": lambda S: blocks(table_of(S, S, (6, 10), heads=3), (6, 10)),
    "last rows": lambda S: blocks(table_of(S, S, 5, rows=9), 5),
    "causal": lambda S: causal(),
    "window": lambda S: window(7, 3),
    "not": lambda S: ~blocks(table_of(S, S, 4), 4),
    "causal blocks": lambda S: causal() & blocks(table_of(S, S, (9, 5), samples=2), (9, 5)),
    "either": lambda S: window(2) | blocks(table_of(S, S, 7), 7),
    "all": lambda S: causal() & (window(4) | blocks(table_of(S, S, (5, 8), heads=3), (5, 8))) & ~window(1),
}


@pytest.mark.parametrize(("T", "S"), [(47, 47), (30, 47)])
@pytest.mark.parametrize("kind", MASKS)
def test_blocks_of_flex_attention_are_found_without_looking_at_pairs(kind, T, S, monkeypatch):
    monkeypatch.setattr(lowering, "BLOCK", 8)
    mask = MASKS[kind](S)
    some, every = lowering.occupied(mask, T, S, torch.device("cpu"))
    monkeypatch.setattr(type(mask), "coarse", lambda self, edges: None)
    true_some, true_every = lowering.occupied(mask, T, S, torch.device("cpu"))
    assert some.shape == true_some.shape
    exact = kind in ("blocks", "last rows", "causal", "window", "not")
    assert torch.equal(some, true_some) if exact else (some | ~true_some).all()
    assert torch.equal(every, true_every) if exact else (true_every | ~every).all()
    monkeypatch.undo()
    monkeypatch.setattr(type(mask), "tile", None)  # nothing asks for pairs
    monkeypatch.setattr(type(mask), "visible", None)
    assert mask.coarse(Edges.of(8, T, S)) is not None


def test_a_block_mask_of_a_long_text_needs_no_grid():
    T = 2**20
    numbers = torch.arange(T // 128)[:, None] - torch.tensor([0, 1, 7])
    mask = blocks(numbers.clamp(min=-1), 128) & causal()
    found = lowering.block_mask(mask, T, T)
    assert found.kv_num_blocks.shape == (1, 1, T // 128)
    assert int(found.kv_num_blocks.sum()) == T // 128  # the diagonal; the others are whole
    assert int(found.full_kv_num_blocks.sum()) == T // 128 - 1 + T // 128 - 7


def test_a_choice_is_copied_moved_saved_and_cut_by_head(tmp_path):
    T = 13
    q = torch.randn(B, H, T, D).double()
    mask = causal() & blocks(table_of(T, T, 3, samples=B, heads=H), 3)
    _, weights = attend(q, q, q, mask=mask, return_weights=True)
    weights.save(tmp_path / "map.safetensors")
    others = AttentionMap.load(tmp_path / "map.safetensors"), pickle.loads(pickle.dumps(weights))  # noqa: S301
    for other in (*others, weights.clone(), weights.to("cpu")):
        assert_close_to_truth(other[:], weights[:])
    assert mask.to("meta").tensors()[0].is_meta
    part = of_heads(mask, 2, 3)
    assert torch.equal(part.to_tensor(T), mask.to_tensor(T)[:, 2:5])
    assert selected.selection_in(part) is not None  # what is cut by head still takes the fast path


@pytest.mark.parametrize("storage", ["one length", "different lengths", "static"])
def test_with_a_cache_rows_count_positions_of_the_text(storage):
    torch.manual_seed(0)
    T, size, lengths = 21, (1, 4), [5, 9]
    layer = MultiHeadAttention(24, H, num_kv_heads=Hkv, causal=True).double().eval()
    x = torch.randn(B, T, 24).double()
    capacity = T if storage == "static" else None
    table = table_of(T, T, size, heads=H, share=0.7)
    with torch.no_grad():
        truth = layer(x, mask=blocks(table, size))
        cache = layer.make_cache(B, capacity=capacity, static=storage == "static")
        if storage == "different lengths":
            layer(x[:, :9], cache=cache, lengths=lengths, mask=blocks(table[:, :, :9, :3], size))
            step = torch.stack([x[b, n] for b, n in enumerate(lengths)])[:, None]
            found = layer(step, cache=cache, mask=blocks(table[:, :, :10, :3], size))
            for b, n in enumerate(lengths):
                assert_close_to_truth(found[b, 0], truth[b, n])
            return
        parts = []
        for t in range(T):
            whole = storage == "static"
            rows = slice(None) if whole else slice(t, t + 1)  # the row of this query is enough
            cols = table.shape[3] if whole else t // 4 + 1
            parts.append(layer(x[:, t : t + 1], cache=cache, mask=blocks(table[:, :, rows, :cols], size)))
        assert_close_to_truth(torch.cat(parts, 1), truth)


def test_a_choice_made_in_a_compiled_graph():
    torch.compiler.reset()
    q = torch.randn(B, H, 24, D).double()

    @functools.partial(torch.compile, fullgraph=True, backend="eager")
    def run(q, numbers):
        return attend(q, q, q, mask=blocks(numbers, 4, key_blocks=6), causal=True)

    numbers = torch.randint(-1, 6, (B, H, 6, 2))
    visible = (blocks(numbers, 4, key_blocks=6) & causal()).to_tensor(24)
    assert_close_to_truth(run(q, numbers), reference.attend(q, q, q, visible=visible)[0])
    torch.compiler.reset()


def q_of(T=16, S=16):
    return torch.randn(1, 2, T, 4), torch.randn(1, 2, S, 4), torch.randn(1, 2, S, 4)


WRONG = {
    "three axes": (lambda: blocks(torch.ones(2, 4, 4) > 0, 4), "could be samples or heads"),
    "floats": (lambda: blocks(torch.ones(4, 4), 4), r"pass selected.bool\(\)"),
    "size": (lambda: blocks(torch.ones(4, 4) > 0, 0), r"blocks\(size\)=0: expected a whole number from 1 up"),
    "sizes": (lambda: blocks(torch.ones(4, 4) > 0, (1, 2, 3)), "expected one number, or"),
    "too large": (lambda: blocks([[4]], 4, key_blocks=4), "key block 4 is selected and key_blocks=4"),
    "negative": (lambda: blocks([[-2]], 4), "−1 means none, and -2 was given"),
    "both": (lambda: blocks(torch.ones(4, 4) > 0, 4, key_blocks=4), "a bool table is given"),
    "one axis": (lambda: blocks([1, 2], 4), r"expected \(query blocks, key blocks\)"),
    "rows": (lambda: attend(*q_of(), mask=blocks(torch.ones(3, 4) > 0, 4)), "has 3 blocks of 4 queries.*expected 4"),
    "rows after a cache": (
        lambda: attend(*q_of(5, 16), mask=blocks(torch.ones(1, 4) > 0, 4)),
        "expected 2, those of these queries, up to 4, the whole text",
    ),
    "rows, with causal": (lambda: attend(*q_of(), mask=blocks(torch.ones(3, 4) > 0, 4), causal=True), "expected 4"),
    "rows, turned around": (lambda: attend(*q_of(), mask=causal() & ~blocks([[1]] * 5, 4)), "has 5 blocks of 4"),
    "rows, in a layer": (
        lambda: MultiHeadAttention(8, 2, mask=blocks([[0]] * 3, 4))(torch.randn(1, 16, 8)),
        "has 3 blocks of 4 queries",
    ),
    "columns": (lambda: attend(*q_of(), mask=blocks(torch.ones(4, 3) > 0, 4)), "16 keys are 4 blocks. Select among 4"),
    "heads": (lambda: attend(*q_of(), mask=blocks(torch.ones(1, 3, 4, 4) > 0, 4)), "is made for 3 heads"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_choices_that_do_not_fit_are_refused(kind):
    call, words = WRONG[kind]
    with pytest.raises(MaskError, match=words):
        call()
