import pytest
import torch

from headwise.learn.cost import Cost
from headwise.learn.interview import answers, one_large_head, split_of

COST = Cost.of(512, 8, seq=1024)


def test_one_large_head_costs_the_same_products_and_parameters():
    one = one_large_head(COST)
    assert (one.num_heads, one.head_dim) == (1, 512)
    assert one.flops == COST.flops
    assert one.parameters.value == COST.parameters.value
    assert 8 * one.steps()[6].total == COST.steps()[6].total


def test_scores_of_a_head_have_the_rank_of_its_width_at_most():
    T, D = 11, 3
    scores = torch.randn(T, D, dtype=torch.float64) @ torch.randn(D, T, dtype=torch.float64)
    assert torch.linalg.matrix_rank(scores) == D
    assert "rank 64 at most" in answers(COST)[0].answer


def test_twice_the_length_doubles_projections_and_quadruples_scores():
    (p1, s1), (p2, s2) = split_of(COST), split_of(Cost.of(512, 8, seq=2048))
    assert (p2, s2) == (2 * p1, 4 * s1)
    assert "at 2048 2 and 4 times as many" in answers(COST)[1].answer
    assert "equal at 1024 tokens" in answers(COST)[1].answer


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_grouped_answer_names_the_saving(kv_heads):
    told = answers(COST.with_kv_heads(kv_heads))[2].answer
    assert "MHA with 8: cache 2 KiB a token and layer, parameters 100%" in told
    assert "GQA with 2: cache 512 B a token and layer (1/4), parameters 62%" in told
    assert "MQA with 1: cache 256 B a token and layer (1/8), parameters 56%" in told


def test_every_answer_is_a_question_and_a_sentence():
    for answer in answers(Cost.of(7, 1, seq=3)):
        assert answer.question.endswith("?")
        assert answer.answer.endswith(".")
