"""Two processes, experts sharded or replicated, samples dealt out any way: the step of one process (DESIGN.md 3.8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

RELATIVE = 1e-6
NAMES = ["ep2", "ep1", "ep2 by length", "ep1 by length", "ep2 starved", "ep1 starved"]


def pair(name: str, two_processes: list[dict[str, Any]], one_process: dict[bool, Any]) -> tuple[list[dict[str, Any]], Any]:
    return [ranks[name] for ranks in two_processes], one_process["starved" in name]


@pytest.mark.parametrize("name", NAMES)
def test_loss_gradients_and_weights_equal_those_of_one_process(name: str, two_processes, one_process) -> None:
    from trainers import assert_equal_tensors  # imports Megatron-core, which one_process has made ready

    ranks, alone = pair(name, two_processes, one_process)
    for seen in ranks:
        assert seen["applied"] and alone.applied
        assert seen["loss"] == pytest.approx(alone.loss, rel=RELATIVE)
        assert seen["grad_norm"] == pytest.approx(alone.grad_norm, rel=RELATIVE)
        assert_equal_tensors(seen["gradients"], alone.gradients, relative=RELATIVE)
        assert_equal_tensors(seen["weights"], alone.weights, relative=RELATIVE)


def test_the_cases_are_not_degenerate(two_processes, one_process) -> None:
    alone = one_process[False]
    without = [n for n, g in alone.gradients.items() if not g.abs().sum()]
    assert not without, f"no gradient at all: {without}"
    assert two_processes[0]["ep2 by length"]["longest"] < two_processes[1]["ep2 by length"]["longest"]
    shares = [{sample for sample, _, _ in two_processes[0][name]["codes"]} for name in ("ep2", "ep2 by length")]
    assert shares[0] != shares[1] and len(shares[0]) == len(shares[1]) == 4
    assert alone.loss != pytest.approx(one_process[True].loss, rel=1e-3), "starving experts must change the model"


@pytest.mark.parametrize("name", NAMES)
def test_first_refit_bundle_has_the_same_bytes(name: str, two_processes, one_process) -> None:
    ranks, alone = pair(name, two_processes, one_process)
    assert [seen["first_digest"] for seen in ranks] == [alone.first_digest] * 2


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_guided_sites_are_exactly_equal(name: str, two_processes, one_process) -> None:
    ranks, alone = pair(name, two_processes, one_process)
    together = ranks[0]["codes"] | ranks[1]["codes"]
    assert together.keys() == alone.codes.keys() and not ranks[0]["codes"].keys() & ranks[1]["codes"].keys()
    for key, codes in alone.codes.items():
        assert torch.equal(together[key], codes), key


@pytest.mark.parametrize("name", NAMES)
def test_kv_range_is_that_of_all_samples(name: str, two_processes, one_process) -> None:
    ranks, alone = pair(name, two_processes, one_process)
    assert len(alone.kv_amax) == 6 and min(alone.kv_amax.values()) > 0
    for seen in ranks:
        assert seen["kv_amax"] == pytest.approx(alone.kv_amax, rel=RELATIVE)


@pytest.mark.parametrize("name", ["ep2 starved", "ep1 starved"])
def test_experts_without_a_token_have_zero_gradients(name: str, two_processes) -> None:
    for seen in (ranks[name] for ranks in two_processes):
        for parameter, gradient in seen["gradients"].items():
            if ".mlp.experts." in parameter:
                expert = int(parameter.split(".mlp.experts.")[1].split(".")[0])
                assert bool(gradient.abs().sum()) == (expert in (0, 1)), parameter
