"""A survey is the summary of all its documents together; a kill anywhere and a resumption change nothing."""

import copy
import json
import math
import re
import shutil

import pytest
import torch

import headwise
from headwise import AttentionMap, CheckpointError, OptionError, Scoring, causal, load_builtin, watch
from headwise.models import LanguageModel
from headwise.models.text_model import TokenCodec
from headwise.study.survey.corpus import cut
from headwise.study.survey.job import Processes, SurveyJob, journal_folder
from headwise.study.survey.journal import Journal, lock
from headwise.study.survey.measures import Measures, ReadText
from headwise.study.survey.result import Survey
from headwise.study.survey.tally import Tally
from survey_words import dense_windows

CONTEXT = 31


@pytest.fixture(scope="module")
def exact(tiny):
    """The tiny model in float64."""
    return LanguageModel(copy.deepcopy(tiny.gpt).double(), tiny.tokenizer)


@pytest.fixture
def corpus(tmp_path, texts):
    """A text file, JSONL with a broken line, and a folder."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "long.txt").write_text("\n".join(texts[:9]))
    records = [json.dumps({"text": text}) for text in texts[9:]]
    records.insert(3, "{broken")
    (folder / "short.jsonl").write_text("\n".join(records))
    return folder


def came_before(ids):
    """Queries whose token has an earlier copy: only they say something about looking at it."""
    return (ids[:, None] == ids).tril(-1).any(-1)


def apart_from_the_first(weights):
    rest = weights.clone()
    rest[..., 0] = 0
    return rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)


def test_numbers_are_those_of_the_dense_weights_of_all_windows(exact, texts):
    texts = [text for text in texts if len(text) < 300]  # one passage each
    survey = headwise.survey(exact, texts=texts, context=CONTEXT, batch=3)
    windows = dense_windows(exact, texts, CONTEXT)
    assert survey.counts["windows"] == len(windows)
    assert survey.counts["tokens"] == sum(len(ids) for ids, _ in windows)
    for layer, head in ((0, 2), (1, 0)):
        found = survey.head(layer, head)
        rows = {
            name: [] for name in ("sink", "previous", "entropy", "peak", "distance", "same", "without_first entropy")
        }
        offsets, octaves, count = [], torch.zeros(len(survey.edges) - 1, dtype=torch.float64), 0
        for ids, layers in windows:
            weights = layers[layer][head]
            T = len(ids)
            place = torch.arange(T)
            away = (place[:, None] - place).clamp(min=0)
            rows["sink"].append(weights[1:, 0])
            rows["previous"].append(weights.diagonal(-1))
            rows["entropy"].append((torch.special.entr(weights).sum(-1) / (place + 1).log())[1:])
            rows["peak"].append(weights.amax(-1)[1:])
            rows["distance"].append((weights * away).sum(-1)[1:])
            rows["same"].append((weights * ((ids[:, None] == ids) & (away > 0))).sum(-1)[came_before(ids)])
            rest = apart_from_the_first(weights)
            rows["without_first entropy"].append((torch.special.entr(rest).sum(-1) / place.log())[2:])
            peaked = weights.amax(-1) * (place + 2) >= 2  # at least twice the mean of the other keys
            offsets.append((place - weights.argmax(-1))[1:][peaked[1:]])
            for b in range(len(octaves)):
                inside = (away >= survey.edges[b]) & (away < survey.edges[b + 1])
                octaves[b] += (weights * inside).sum()
            count += T
        for name, values in rows.items():
            own = {"same": "same_token", "without_first entropy": "entropy"}.get(name, name)
            numbers = found.without_first if name.startswith("without_first") else found.numbers
            everything = torch.cat(values)
            assert numbers[own] == pytest.approx(everything.mean().item(), rel=1e-9), name
            key = name if name.startswith("without_first") else own
            assert found.std[key] == pytest.approx(everything.std(correction=0).item(), rel=1e-7, abs=1e-9), name
            means = torch.stack([value.mean() for value in values if len(value)])
            assert found.spread[key] == pytest.approx(means.std(correction=0).item(), rel=1e-7, abs=1e-9), name
        assert found.rows == len(torch.cat(rows["peak"]))
        commonest = max(torch.cat(offsets).bincount().tolist(), default=0)
        assert found.numbers["positional"] == commonest / found.rows
        torch.testing.assert_close(torch.tensor(found.histogram), (octaves / count).float(), rtol=1e-5, atol=1e-7)


def test_a_survey_of_one_window_says_what_a_summary_says():
    model = load_builtin()
    text = "The captain looked at the sea, and the sea looked at the captain, and the captain looked away."
    survey = headwise.survey(model, texts=[text])
    with torch.no_grad(), watch(model.gpt) as seen:
        tokens = model.tokens(text)
        model.gpt(tokens)
    for layer, weights in enumerate(seen.values()):
        for head in weights.summary(tokens[0]):
            found = survey.head(layer, head.head)
            assert found.reading == head.reading
            assert list(found.numbers) == list(head.numbers)
            assert found.numbers == pytest.approx(head.numbers, rel=1e-4, abs=1e-6)
            assert found.without_first == pytest.approx(head.without_first, rel=1e-4, abs=1e-6)
            assert sum(found.histogram) == pytest.approx(1, abs=1e-5)


def test_peaks_further_away_than_are_told_apart_are_of_no_common_distance():
    T = 199
    key = torch.zeros(1, 1, T, 5)
    key[..., 0, :] = 100.0
    weights = AttentionMap(torch.ones(1, 1, T, 5), key, Scoring(causal()))  # every query looks at the first key
    tally = Tally()
    tally.add_layer("layer", Measures().measured(weights, ReadText(torch.arange(T)[None]), octaves=9).fields)
    head = Survey({"model": "", "context": T}, [], tally).head(0, 0)
    assert head["positional"] == 1 / (T - 1)
    assert head.reading == "first-token sink 1.00; rest: broad 1.00"


def test_long_documents_are_cut_into_windows_of_one_length_and_counted(tiny):
    ids = list(range(100, 177))
    windows = cut(ids, TokenCodec(list, before=(1, 2), after=(3,)), 17)
    assert [window[:2] for window in windows] == [[1, 2]] * 6
    assert {len(window) for window in windows} == {15, 16}
    assert [x for window in windows for x in window[2:-1]] == ids
    survey = headwise.survey(tiny, texts=["one two three", "four five " * 40], context=CONTEXT)
    assert survey.counts | {"tokens": 0} == {
        "documents": 2, "cut": 1, "skipped": 0, "windows": 4, "windows lost": 0, "tokens": 0
    }  # fmt: skip
    assert "1 document cut into several" in survey.sentence


class Dying(Processes):
    """A process that is killed when it asks for its nth unit."""

    def __init__(self, claims):
        super().__init__()
        self.claims = claims

    def claim(self):
        self.claims -= 1
        if self.claims < 0:
            raise KeyboardInterrupt
        return super().claim()


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_a_survey_killed_anywhere_and_resumed_is_the_same_to_the_byte(tiny, corpus, tmp_path, suffix):
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    options = {"context": CONTEXT, "batch": 2}
    job = SurveyJob.of(tiny, [corpus], **options)
    assert len(job.corpus) > 20
    survey = job.run(whole)
    assert survey.documents == 15
    assert not journal_folder(whole).exists()
    for claims in (0, 1, 7, 2, len(job.corpus) - 12):
        with pytest.raises(KeyboardInterrupt):
            job.run(out, processes=Dying(claims), resume=True, every=0)
        assert not out.exists()
    SurveyJob.of(tiny, [corpus], **options).run(out, resume=True, every=0)
    assert out.read_bytes() == whole.read_bytes()


def test_units_not_yet_saved_are_read_again_and_count_once(tiny, corpus, tmp_path):
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT, batch=2)
    job.run(tmp_path / "whole.json")
    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "out.json", processes=Dying(9), every=1000)
    job.run(tmp_path / "out.json", resume=True)
    assert (tmp_path / "out.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def killed(job, out, claims=5):
    with pytest.raises(KeyboardInterrupt):
        job.run(out, processes=Dying(claims), every=0)
    return journal_folder(out)


def test_an_unfinished_survey_is_not_written_over(tiny, corpus, tmp_path):
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT)
    killed(job, tmp_path / "out.json", 2)
    with pytest.raises(OptionError, match="holds an unfinished survey. Pass --resume"):
        job.run(tmp_path / "out.json")


def test_going_on_with_another_survey_is_refused(tiny, corpus, tmp_path):
    out = tmp_path / "out.json"
    killed(SurveyJob.of(tiny, [corpus], context=CONTEXT), out, 2)
    with pytest.raises(OptionError, match="another context: 31 there, 37 now"):
        SurveyJob.of(tiny, [corpus], context=37).run(out, resume=True)
    with pytest.raises(OptionError, match="another model: 'GPT' there, 'builtin' now"):
        SurveyJob.of(load_builtin(), [corpus], context=CONTEXT).run(out, resume=True)
    other = LanguageModel(copy.deepcopy(tiny.gpt), tiny.tokenizer)
    other.gpt.norm.weight.data[0] += 1e-3
    with pytest.raises(OptionError, match="a model of the same name with other weights or another tokenizer"):
        SurveyJob.of(other, [corpus], context=CONTEXT).run(out, resume=True)


def test_going_on_with_other_files_is_refused_with_their_names(tiny, corpus, tmp_path):
    out = tmp_path / "out.json"
    killed(SurveyJob.of(tiny, [corpus], context=CONTEXT), out, 2)
    (corpus / "long.txt").write_text("another text")
    (corpus / "added.txt").write_text("a new text")
    first, *_ = sorted(path for path in corpus.iterdir() if path.name not in ("long.txt", "added.txt"))
    first.unlink()
    names = r"long\.txt has changed, \S+" + re.escape(first.name) + r" is gone, \S+added\.txt is new\. Continue"
    with pytest.raises(OptionError, match=names):
        SurveyJob.of(tiny, [corpus], context=CONTEXT).run(out, resume=True)


def test_going_on_with_the_files_in_another_order_is_refused(tiny, tmp_path):
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text("The captain looked at the sea.")
    killed(SurveyJob.of(tiny, paths, context=CONTEXT), tmp_path / "out.json", 1)
    with pytest.raises(OptionError, match="other files, or the same files in another order"):
        SurveyJob.of(tiny, paths[::-1], context=CONTEXT).run(tmp_path / "out.json", resume=True)


def test_weights_that_differ_in_a_number_are_another_model(tiny):
    other = LanguageModel(copy.deepcopy(tiny.gpt), tiny.tokenizer)
    with torch.no_grad():
        other.gpt.norm.weight[0] += 1e-3
    assert other.fingerprint() != tiny.fingerprint() == tiny.fingerprint()


def test_a_damaged_journal_and_one_that_counts_twice_are_refused(tiny, corpus, tmp_path):
    out = tmp_path / "out.json"
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT)
    folder = killed(job, out, 3)
    shutil.copy(folder / "0.json", folder / "1.json")
    with pytest.raises(CheckpointError, match="units 0 to 2 are out of range or in another journal as well"):
        job.run(out, resume=True)
    (folder / "1.json").write_bytes((folder / "0.json").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"1.json is damaged .*Delete it: its units are then read again"):
        job.run(out, resume=True)
    (folder / "1.json").unlink()
    (folder / ".0.json.77.part").write_text("{half of a journal")
    assert job.run(out, resume=True).documents == 15


def test_a_survey_in_which_a_unit_is_missing_is_not_written(tiny, corpus, tmp_path):
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT)
    (tmp_path / "journal").mkdir()
    units = len(job.corpus)
    with Journal(tmp_path / "journal", 0, job.settings, units) as journal:
        journal.add(0, job.tally_of(0))
        journal.save()
        with pytest.raises(CheckpointError, match=rf"{units - 1} of {units} units are in no journal"):
            journal.whole()


def test_two_surveys_cannot_write_one_journal(tiny, corpus, tmp_path):
    out = tmp_path / "out.json"
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT)
    folder = killed(job, out, 2)
    with lock(folder / "3.lock"), pytest.raises(OptionError, match=r"being written by another survey \(process \d+\)"):
        job.run(out, resume=True)
    assert job.run(out, resume=True).documents == 15


def test_resuming_a_finished_survey_reads_nothing(tiny, corpus, tmp_path, monkeypatch):
    job = SurveyJob.of(tiny, [corpus], context=CONTEXT)
    first = job.run(tmp_path / "out.json")
    monkeypatch.setattr("headwise.study.survey.job.SurveyJob.tally_of", None)
    again = job.run(tmp_path / "out.json", resume=True)
    assert again.to_dict() == first.to_dict()


def test_windows_whose_numbers_are_not_finite_are_lost_by_name_and_the_others_count(tiny):
    token = tiny.tokenizer.encode(" captain").ids[0]
    broken = copy.deepcopy(tiny.gpt)
    broken.embedding.weight.data[token] = math.inf
    texts = ["It was late, and", "It was a captain, and", "It was time to go."]
    survey = headwise.survey(LanguageModel(broken, tiny.tokenizer), texts=texts, context=CONTEXT)
    assert survey.counts["windows lost"] == 1
    assert survey.counts["windows"] == 2
    assert [bad.place for bad in survey.skipped] == ["texts:2"]
    assert "not finite" in survey.skipped[0].reason
    without = headwise.survey(LanguageModel(broken, tiny.tokenizer), texts=[texts[0], texts[2]], context=CONTEXT)
    assert survey.heads == without.heads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no documents are given"),
        ({"texts": "a text"}, r"expected a list of texts, such as texts=\[text\]"),
        ({"texts": ["a"], "context": 1}, "context=1: expected 2 to 128, the context of GPT"),
        ({"texts": ["a"], "context": 129}, "context=129: expected 2 to 128"),
        ({"texts": ["a"], "batch": 0}, "batch"),
        ({"texts": ["a"], "out": "survey.txt"}, r"out='survey.txt': expected a name that ends in .json or .parquet"),
        ({"texts": ["a"], "out": "nowhere/survey.json"}, "there is no folder nowhere"),
    ],
)
def test_wrong_options_are_refused(tiny, options, message):
    with pytest.raises(OptionError, match=message):
        headwise.survey(tiny, **options)


def test_a_module_needs_a_tokenizer_and_a_number_is_no_model(tiny):
    with pytest.raises(OptionError, match=r"GPT is given without a tokenizer.*tokenize="):
        headwise.survey(tiny.gpt, texts=["a"])
    with pytest.raises(OptionError, match=r"object of type int is given; expected"):
        headwise.survey(7, texts=["a"])
    assert headwise.survey(tiny.gpt, texts=["ab"], tokenize=lambda text: [ord(x) for x in text]).documents == 1


def test_tokens_that_the_model_does_not_have_are_told():
    model = load_builtin()
    with pytest.raises(
        OptionError, match="gives token 9000 and the model has 8192 tokens; they do not belong together"
    ):
        headwise.survey(model.gpt, texts=["a"], tokenize=lambda text: [9000, 1])


def test_the_model_is_left_as_it_was(tiny):
    tiny.gpt.train()
    headwise.survey(tiny, texts=["It was late."])
    assert tiny.gpt.training
    tiny.gpt.eval()
