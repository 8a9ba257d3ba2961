"""The assignments of public graders: our answers are right, and the truth about their mutants is found."""

import pytest
import torch
from graders import accepted, stratified, subject
from mutants.assignments import ASSIGNMENTS, answer_to
from mutants.compare import Original
from mutants.drivers import SIZES, Inputs, triangle
from mutants.mutate import Mutant
from mutants.observe import built, module_names, randomize
from mutants.truth import Truth, truth_beside

from headwise import reference
from headwise.reference import Linear

CAUSAL = ("torchcode_causal", "arena", "cs336")


pytestmark = pytest.mark.usefixtures("one_thread")


def projections(module, width):
    """Those of an answer as the reference takes them: what it does not have leaves everything as it is."""
    if hasattr(module, "W_Q"):
        rows = {
            r: Linear(getattr(module, f"W_{r}").mT.flatten(0, 1), getattr(module, f"b_{r}").flatten()) for r in "QKV"
        }
        return (*rows.values(), Linear(module.W_O.flatten(0, 1).T, module.b_O))
    layers = [getattr(module, f"W_{role}", getattr(module, role, None)) for role in "qkvo"]
    return tuple(Linear(x.weight, x.bias) if x else Linear(torch.eye(width).double()) for x in layers)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_answer_equals_the_reference(name):
    driver, size = ASSIGNMENTS[name].driver, SIZES[0]
    module = built(module_names(answer_to(name)), driver, size).double()
    randomize(module)
    call = next(iter(driver.calls(Inputs(size))))
    query, key, value = (call.inputs[0], call.inputs[-1], call.inputs[-1]) if len(call.inputs) < 3 else call.inputs
    heads = 1 if name == "torchcode_causal" else size.H
    visible = triangle(query.shape[1], key.shape[1]) if name in CAUSAL else None
    expected, _ = reference.multi_head_attention(
        query, key, value, projections(module, size.E), heads, size.Hkv if "gqa" in name else heads,
        visible=visible)  # fmt: skip
    torch.testing.assert_close(call.run(module), expected, rtol=1e-9, atol=1e-9)


def test_mutants_of_a_function_are_labeled():
    text = answer_to("torchleet_mha")
    right = Original(ASSIGNMENTS["torchleet_mha"].driver, text)
    assert truth_beside(right, text).label == "equivalent"
    assert truth_beside(right, text.replace("math.sqrt(d_head)", "d_head")).label == "wrong"


def test_sample_takes_every_operator_in_turn():
    order = stratified("torchcode_causal", 0)
    operators = {mutant.operator for mutant in order}
    assert {mutant.operator for mutant in order[: len(operators)]} == operators
    assert order == stratified("torchcode_causal", 0)
    assert order != stratified("torchcode_causal", 1)


def test_mistake_is_named_by_what_was_changed():
    mutant = Mutant("", "wrong-operator", 1, (1,), "/ math.sqrt(d_k)", "", "scores = q @ k")
    assert subject(mutant, Truth("wrong", "another result")) == "scale"
    assert subject(mutant, Truth("wrong", "another gradient of an input")) == "gradient"


def test_grader_is_asked_by_its_exit_status(tmp_path):
    (tmp_path / "run_deepml.py").write_text("import sys\nsys.exit('sqrt' not in open(sys.argv[1]).read())\n")
    options = type("Options", (), {"graders": tmp_path, "workers": 1})
    assert accepted("deepml", ["np.sqrt(2)", "2 ** 0.5"], options) == [True, False]
