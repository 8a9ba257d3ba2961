"""Every peer computes our function with our weights, and says why where it cannot."""

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from headwise.cli.bench import sweep
from headwise.cli.bench.peers import OURS, PEERS, Peer, matching
from headwise.cli.bench.peers.packages import INSTALL, version_of, why_not
from headwise.cli.bench.workload import Problem, Workload
from headwise.errors import OptionError

B, H, T, D = 2, 3, 37, 10  # Llama turns pairs of numbers: its heads are even
HERE = [peer for peer in PEERS if peer.cuda_only is None]


def workload(**options):
    return Workload(H * D, H, batch=B, **options)


@pytest.fixture
def peer(request):
    if importlib.util.find_spec(request.param.package) is None:
        pytest.skip(f"needs {request.param.package}")
    return request.param


@pytest.mark.parametrize("peer", HERE, indirect=True, ids=lambda peer: peer.name)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_a_peer_gives_the_numbers_of_the_reference_with_our_weights(peer, causal):
    problem = Problem(workload(causal=causal))
    if peer.causal_only and not causal:
        assert peer.refuses(problem.workload) == "it supports only causal attention"
        return
    assert peer.refuses(problem.workload) is None
    output = sweep.built(peer, problem, T)(problem.x(T))
    assert output.shape == (B, T, H * D)
    assert problem.judge(output, T, biases=peer.biases).wrong is None


@pytest.mark.parametrize("peer", HERE, indirect=True, ids=lambda peer: peer.name)
def test_a_peer_gives_the_gradient_of_the_reference(peer):
    problem = Problem(workload(backward=True))
    trial = sweep.candidate(peer, problem).trial(T)
    assert trial.judge().wrong is None
    trial.run()


@pytest.mark.parametrize("peer", HERE, indirect=True, ids=lambda peer: peer.name)
def test_a_peer_runs_in_bfloat16(peer):
    problem = Problem(workload(dtype="bfloat16"))
    output = sweep.built(peer, problem, T)(problem.x(T))
    assert output.dtype == torch.bfloat16
    assert problem.judge(output, T, biases=peer.biases).wrong is None


@pytest.mark.parametrize("at", range(4), ids=["query", "key", "value", "out"])
def test_another_weight_in_any_projection_is_judged_wrong(at):
    problem = Problem(workload())
    module = sweep.built(PEERS[0], problem, T)
    problem.weights[at].weight[1, 2] += 0.5
    assert "wrong: error" in problem.judge(module(problem.x(T)), T, biases=True).wrong


def test_a_mask_forgotten_is_judged_wrong():
    seen = sweep.built(PEERS[0], Problem(workload(causal=False)), T)
    problem = Problem(workload())
    assert "wrong: error" in problem.judge(seen(problem.x(T)), T, biases=True).wrong


def test_nan_is_judged_wrong():
    problem = Problem(workload())
    assert "error nan" in problem.judge(torch.full((B, T, H * D), torch.nan), T, biases=True).wrong


def test_the_weights_of_a_gradient_are_judged():
    problem = Problem(workload(backward=True))
    module = sweep.built(PEERS[0], problem, 128)
    assert sweep.judged_gradient(module, problem, True).wrong is None
    problem.weights.value.weight[1, 2] += 0.5
    assert "wrong: error" in sweep.judged_gradient(module, problem, True).wrong


def test_a_package_that_is_absent_comes_with_the_command_that_installs_it():
    peer = Peer("absent", PEERS[0].build, "no_such_package_of_anybody")
    assert peer.refuses(workload()) == INSTALL == "not installed: pip install 'headwise[bench]'"
    assert version_of(peer.package) is None


def test_a_package_that_breaks_at_import_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_package_of_somebody.py").write_text("raise OSError('libnothing.so: cannot open\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not("broken_package_of_somebody") == "cannot be imported: OSError: libnothing.so: cannot open more"


def test_a_package_may_warn_at_import(tmp_path, monkeypatch):
    (tmp_path / "warning_package_of_somebody.py").write_text("import warnings; warnings.warn('old', stacklevel=1)")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not("warning_package_of_somebody") is None


def test_keras_leaves_the_home_folder_and_its_settings_alone(tmp_path):
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    code = "import os; from headwise.cli.bench.peers import packages; packages.load('keras'); "
    code += "print('KERAS_HOME' in os.environ)"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KERAS")} | {"HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
    assert not (tmp_path / ".keras").exists()


def test_flex_says_why_it_stays_away_from_the_cpu():
    flex = next(peer for peer in PEERS if peer.name.startswith("Flex"))
    assert flex.refuses(workload()).startswith("on CUDA only")


def test_names_have_no_comma_and_differ():
    names = [peer.name for peer in PEERS]
    assert len(set(names)) == len(names)
    assert not any("," in name for name in names)
    assert names[0] == OURS


def test_words_choose_peers():
    assert [peer.name for peer in matching("KERAS, textbook")] == ["keras", "textbook class", "textbook list"]
    with pytest.raises(OptionError, match="no peer has 'jax' in its name. Known: headwise, SDPA"):
        matching("keras,jax")


def test_a_package_without_installer_files_still_has_a_version(tmp_path, monkeypatch):
    (tmp_path / "folder_package_of_somebody.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("folder_package_of_somebody") == "of unknown version"
    (tmp_path / "told_package_of_somebody.py").write_text("__version__ = '7.5'")
    importlib.import_module("told_package_of_somebody")
    assert version_of("told_package_of_somebody") == "7.5"
