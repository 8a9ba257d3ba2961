import pytest
import torch

from headwise import OptionError
from headwise.learn import forms


def weights_of(form, scores, hidden):
    """Softmax of scores as a form does it: its fill, its order, its answer for a row that sees nothing."""
    fill = {"−1e9": -1e9, "−inf": -torch.inf}[form.answers.fill]
    D = 7
    if form.answers.order == "scale, mask":
        scores = (scores / D**0.5).masked_fill(hidden, fill)
    else:
        scores = scores.masked_fill(hidden, fill) / D**0.5
    weights = scores.softmax(-1)
    return weights.nan_to_num() if "set to 0" in form.answers.blind_row else weights


@pytest.mark.parametrize("form", forms.FORMS.values(), ids=lambda form: form.name)
def test_forms_give_the_same_weights_where_every_row_sees_a_key(form):
    scores, future = torch.randn(5, 5), torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = (scores.masked_fill(future, -torch.inf) / 7**0.5).softmax(-1)
    torch.testing.assert_close(weights_of(form, scores, future), expected)


@pytest.mark.parametrize(
    ("name", "row"), [("course", [0.2] * 5), ("interview", [0.0] * 5), ("handbook", [torch.nan] * 5)]
)
def test_row_that_sees_nothing_is_what_the_form_says(name, row):
    form = forms.find(name)
    weights = weights_of(form, torch.randn(5, 5), torch.ones(5, 5, dtype=torch.bool))
    torch.testing.assert_close(weights[0], torch.tensor(row), equal_nan=True)
    words = {"course": "even average", "interview": "NaN, which is then set to 0", "handbook": "is NaN"}
    assert words[name] in form.differences()[7]


def test_differences_come_in_the_order_of_steps():
    for form in forms.FORMS.values():
        assert list(form.differences()) == sorted(form.differences())


def test_aliases_lead_to_their_form():
    assert forms.find("wrapper") is forms.FORMS["list"]
    assert forms.find("homework") is forms.FORMS["book"]


def test_unknown_form_is_refused_with_the_list():
    with pytest.raises(OptionError, match=r"no form is called 'essay'. All of them: headwise steps --forms"):
        forms.find("essay")
