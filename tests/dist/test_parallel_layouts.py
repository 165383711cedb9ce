"""Every layout gives the step of one process: loss, all gradients, weights, refit bytes, and each guided code (DESIGN.md 3.8).

FP32. What differs is the order of sums (of row-parallel layers, of the vocabulary, of gradients over ranks), about 1e-7
of a sum; codes are compared exactly.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from processes import environment, free_port  # noqa: E402

RELATIVE = 1e-6
SITES = ("fc1_in", "k", "v")
TWO = [
    "pp2",
    "pp2 uneven",
    "pp2 single",
    "pp2 full",
    "pp2 core",
    "pp2 moe",
    "pp2 tied",
    "vpp2",
    "vpp2 full",
    "tp2",
    "tp2 full",
    "tp2 tied",
    "tp2 ep2",
    "tp2 etp2",
    "etp2",
    "cp2",
    "cp2 ep2",
    "cp2 full",
    "ep2 unrounded",
    "ep2 nvfp4",
    "etp2 unrounded",
    "etp2 nvfp4",
    "tp2 packed",
    "pp2 packed",
]
FOUR = [
    "ep2 pp2",
    "ep2 etp2",
    "tp2 pp2",
    "tp2 pp2 ep2 full",
    "tp2 ep2 dp2",
    "tp2 cp2",
    "cp2 pp2",
    "ep4",
    "vpp2 tp2 full",
    "pp4",
]
NAMES = [*TWO, *(pytest.param(name, marks=pytest.mark.slow) for name in FOUR)]


def _outcomes(directory: Path, processes: int, *, timeout: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    worker = [str(Path(__file__).with_name("worker.py")), "layout_cases", str(directory)]
    done = subprocess.run(
        [*command, "--master-port", str(free_port()), *worker],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {path.stem: torch.load(path, weights_only=True) for path in directory.glob("*.pt")}


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of all cases of two gloo processes, from one torchrun."""
    return _outcomes(tmp_path_factory.mktemp("two"), 2, timeout=300)


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of all cases of four."""
    return _outcomes(tmp_path_factory.mktemp("four"), 4, timeout=600)


@pytest.fixture(scope="session")
def alone(lone_process: None) -> dict[bool, dict[str, Any]]:
    """The step of one process without any of it, with untied and with tied embeddings."""
    import layout_cases

    return {tied: layout_cases.run(layout_cases.Case(model=layout_cases.TIED if tied else {})) for tied in (False, True)}


@pytest.fixture
def pair(request: pytest.FixtureRequest, alone: dict[bool, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    name = request.param
    outcomes = request.getfixturevalue("four" if name in FOUR else "two")
    return outcomes[name], alone["tied" in name]


def every(function: Any) -> Any:
    return pytest.mark.parametrize("pair", NAMES, indirect=True)(function)


def test_names_are_those_of_the_worker(lone_process: None) -> None:
    import layout_cases

    for world, names in ((2, TWO), (4, FOUR)):
        assert [n for n, case in layout_cases.CASES.items() if case.world == world] == names


@every
def test_loss_gradients_and_weights(pair: Any) -> None:
    from trainers import assert_equal_tensors

    seen, expected = pair
    assert seen["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
    assert seen["grad_norm"] == pytest.approx(expected["grad_norm"], rel=RELATIVE)
    assert_equal_tensors(seen["gradients"], expected["gradients"], relative=RELATIVE)
    assert_equal_tensors(seen["weights"], expected["weights"], relative=RELATIVE)


@every
def test_every_guided_code_is_equal_and_every_token_was_guided_once(pair: Any) -> None:
    seen, expected = pair
    assert seen["codes"].keys() == expected["codes"].keys() and len(expected["codes"]) == 8 * 3 * 3
    for key, codes in expected["codes"].items():
        n = min(len(codes), len(seen["codes"][key]))
        assert torch.equal(seen["codes"][key][:n], codes[:n]), key
        assert (seen["codes"][key][n:] == -99).all() and (codes[n:] == -99).all()
    assert seen["guided"] == expected["guided"] and min(expected["guided"].values()) > 0
    assert set(seen["fallback"].values()) == {0}


@every
def test_refit_bytes_logprobs_and_kv_range(pair: Any) -> None:
    seen, expected = pair
    assert seen["digest"] == expected["digest"]
    assert seen["logprobs"].keys() == expected["logprobs"].keys()
    for sample, values in expected["logprobs"].items():
        torch.testing.assert_close(seen["logprobs"][sample], values, rtol=1e-5, atol=2e-6)
    assert seen["kv_amax"] == pytest.approx(expected["kv_amax"], rel=RELATIVE) and len(expected["kv_amax"]) == 8
