"""Masks that only these tests know work everywhere, from their own definition."""

import copy
import dataclasses
import pickle
from typing import NamedTuple

import pytest
import torch

from headwise import (
    AttentionMap,
    CheckpointError,
    MaskError,
    MultiHeadAttention,
    OptionError,
    attend,
    causal,
    padding,
    window,
)
from headwise.masks import Causal, Composite, Extent, Grid, Mask
from headwise.masks.lowering import lower, simplify

B, H, T, S, D = 2, 3, 5, 7, 11


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Every(Mask):
    """Every n-th key, counted back from the query: the class of docs/design.md."""

    n: int
    banded = True
    sees_self = True

    def visible(self, grid: Grid) -> torch.Tensor:
        return (grid.position - grid.col) % self.n == 0

    def __repr__(self):
        return f"every({self.n})"


@dataclasses.dataclass(frozen=True, eq=False)
class Nested(Mask):
    """Tensors in a tuple, in a dict and in another mask, beside plain values."""

    inner: Mask
    tables: tuple
    by_name: dict
    limit: float = 0.5

    @property
    def extent(self):
        return Extent(batch=B)

    def visible(self, grid):
        low, high = self.tables
        keep = self.by_name["keep"][grid.batch, grid.col] > self.limit
        return self.inner.visible(grid) & (grid.col >= low) & (grid.col < high) & keep


class Plain(Mask):
    """Not a dataclass, and its constructor takes something else than it keeps."""

    def __init__(self, words):
        self.lengths = torch.tensor([len(word) for word in words.split()])

    def visible(self, grid):
        return grid.col < self.lengths.max()


class Slotted(Mask):
    __slots__ = ("table",)

    def __init__(self, table):
        self.table = table

    def visible(self, grid):
        return self.table[grid.col]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SlottedDataclass(Mask):
    table: torch.Tensor

    def visible(self, grid):
        return self.table[grid.col]


class Reversed(Causal):
    """A subclass of one of ours that means something else."""

    def visible(self, grid):
        return grid.col >= grid.position

    def key_range(self, start, stop, T, S):
        return 0, S

    def shows_all(self, *_):
        return False

    def hides_nothing(self, T, S):
        return False


KEYS = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
MASKS = {
    "every": lambda: Every(2),
    "combined": lambda: causal() & ~Every(3) | padding([3, 7]),
    "nested": lambda: Nested(Every(2), (torch.tensor(1), torch.tensor(6)), {"keep": torch.rand(B, S)}),
    "plain": lambda: Plain("a few words"),
    "slotted": lambda: Slotted(KEYS),
    "slotted dataclass": lambda: SlottedDataclass(KEYS),
    "subclass of ours": Reversed,
}


def heads():
    torch.manual_seed(0)
    return [torch.randn(B, H, n, D, dtype=torch.float64) for n in (T, S, S)]


def saved(weights, folder):
    weights.save(folder / "map.safetensors")
    return AttentionMap.load(folder / "map.safetensors")


WAYS = {
    "clone": lambda weights, _: weights.clone(),
    "to": lambda weights, _: weights.to("cpu"),
    "to dtype": lambda weights, _: weights.to(torch.float64),
    "cpu": lambda weights, _: weights.cpu(),
    "copy": lambda weights, _: copy.copy(weights),
    "deepcopy": lambda weights, _: copy.deepcopy(weights),
    "pickle": lambda weights, _: pickle.loads(pickle.dumps(weights)),  # noqa: S301
    "save": saved,
    "pytree": lambda weights, _: torch.utils._pytree.tree_map(torch.clone, weights),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MASKS)
def test_a_map_with_any_mask_is_copied_moved_and_saved(name, way, tmp_path):
    if way == "save":
        pytest.importorskip("safetensors")
    mask = MASKS[name]()
    output, weights = attend(*heads(), mask=mask, return_weights=True)
    kept = WAYS[way](weights, tmp_path)
    assert type(kept._scoring.mask) is type(mask)
    dense = weights.to_tensor()
    torch.testing.assert_close(kept.to_tensor(), dense)
    torch.testing.assert_close(kept.entropy(), weights.entropy())
    visible = mask.to_tensor(T, S)
    assert torch.equal(dense > 0, visible.expand_as(dense))
    value = heads()[2]
    torch.testing.assert_close(kept.to_tensor() @ value, output)


@pytest.mark.parametrize("name", MASKS)
def test_any_mask_is_moved_with_all_its_tensors(name):
    mask = MASKS[name]()
    moved = mask.to("meta")
    assert len(moved.tensors()) == len(mask.tensors())
    assert all(x.is_meta for x in moved.tensors())
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):  # noqa: S301
        assert torch.equal(other.to_tensor(T, S), mask.to_tensor(T, S))


@pytest.mark.parametrize("name", MASKS)
def test_any_mask_works_in_inference_mode(name):
    with torch.inference_mode():
        output, weights = attend(*heads(), mask=MASKS[name](), return_weights=True)
        entropy = weights.entropy()
    torch.testing.assert_close(weights.to_tensor() @ heads()[2], output)
    torch.testing.assert_close(weights.entropy(), entropy)


@pytest.mark.parametrize("name", ["every", "nested", "plain"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its attention
def test_any_mask_passes_through_compile_and_vmap(name):
    mask, layer, x = MASKS[name](), MultiHeadAttention(12, H).eval(), torch.randn(B, S, 12)
    output, weights = layer(x, mask=mask, return_weights=True)
    options = {"mask": mask, "return_weights": True}
    found, compiled = torch.compile(layer, fullgraph=True, backend="eager")(x, **options)
    torch.testing.assert_close(found, output)
    torch.testing.assert_close(compiled.entropy(), weights.entropy())
    if mask.extent.batch is None:
        stacked = torch.vmap(lambda y: layer(y[None], **options)[1])(x)
        torch.testing.assert_close(stacked._query[:, 0], weights._query)
        assert type(stacked._scoring.mask) is type(mask)


def test_changing_a_tensor_of_any_mask_in_place_makes_its_maps_stale():
    mask = MASKS["nested"]()
    _, weights = attend(*heads(), mask=mask, return_weights=True)
    mask.by_name["keep"].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        weights.entropy()


def test_a_mask_on_another_device_is_named_wherever_its_tensor_is():
    with pytest.raises(ValueError, match="is on meta and the query on cpu. A meta tensor has no numbers"):
        attend(*heads(), mask=MASKS["nested"]().to("meta"))


def test_a_subclass_of_our_masks_is_not_taken_for_its_parent():
    for T in (1, 5):
        assert type(simplify(Reversed(), T, T)) is Reversed
        assert lower(Reversed(), T, T).kind == "bias"
    both = simplify(Reversed() & window(9, 9), 5, 5)
    assert torch.equal(both.to_tensor(5), Reversed().to_tensor(5))


class Holder:
    def __init__(self):
        self.table = torch.zeros(3)


class Hiding(Mask):
    def __init__(self, value):
        self.value = value

    def visible(self, grid):
        return grid.col >= 0


def test_what_cannot_be_copied_is_refused_by_name():
    _, weights = attend(*heads(), mask=Hiding(Holder()), return_weights=True)
    weights.entropy()  # as long as nothing is copied
    with pytest.raises(OptionError, match=r"Hiding keeps a Holder in 'value', which cannot be copied"):
        weights.clone()


class Two(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class Setting:
    a: int


@pytest.mark.parametrize("value", [Two(1, 2), Setting(3), max, torch.float32, {(1, 2): 3}], ids=str)
def test_what_can_be_copied_and_not_saved_is_refused_by_name(value, tmp_path):
    pytest.importorskip("safetensors")
    _, weights = attend(*heads(), mask=Hiding(value), return_weights=True)
    kept = weights.clone()._scoring.mask.value
    assert (type(kept), kept) == (type(value), value)
    with pytest.raises(OptionError, match="cannot be saved"):
        weights.save(tmp_path / "map.safetensors")


def test_a_saved_map_of_an_unknown_class_says_what_to_import(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "map.safetensors"

    class Local(Every):
        pass

    Local.__qualname__ = "Elsewhere"
    attend(*heads(), mask=Local(2), return_weights=True)[1].save(path)
    with pytest.raises(CheckpointError, match=rf"class {Local.__module__}.Elsewhere, which is not defined.*Import the"):
        AttentionMap.load(path)


def test_a_saved_map_of_a_class_that_has_changed_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "map.safetensors"

    def version(*fields):
        return dataclasses.make_dataclass(
            "Changing", [(name, int, 1) for name in fields], bases=(Mask,), frozen=True, eq=False,
            namespace={"visible": lambda self, grid: grid.col >= 0, "__module__": __name__},
        )  # fmt: skip

    attend(*heads(), mask=version("a")(), return_weights=True)[1].save(path)
    version("a", "b")
    with pytest.raises(CheckpointError, match=r"has the fields \['a'\], and the class now has \['a', 'b'\]"):
        AttentionMap.load(path)


def test_probes_of_any_class_measure_mass():
    _, weights = attend(*heads(), return_weights=True)
    for name in ("every", "nested", "plain", "slotted"):
        probe = MASKS[name]()
        expected = (weights.to_tensor() * probe.to_tensor(T, S)).sum(-1)
        torch.testing.assert_close(weights.mass(probe), expected)


def test_a_composite_of_another_kind_moves_too():
    class Pair(Composite):
        def __init__(self, a, b):
            self.a, self.b = a, b

    pair = Pair(torch.zeros(2), [Every(3), torch.ones(2)])
    assert [x.device.type for x in pair.to("meta").tensors()] == ["meta", "meta"]
    assert pair.to("meta").b[0].n == 3


def test_a_mask_without_visible_is_refused_when_it_is_made():
    class Empty(Mask):
        pass

    with pytest.raises(TypeError, match="visible"):
        Empty()
    with pytest.raises(MaskError, match="both sides must be headwise masks"):
        Every(2) & torch.ones(3)
