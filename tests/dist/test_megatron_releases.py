"""Other Megatron-core releases: an unknown one is refused by name; a second tested one gives the step of the first.

Set ``MEGATRON_CORE_PATH`` to a folder that holds another release (docs/layouts.md says how to make it) to run the second part.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, environment, free_port

OTHER = os.environ.get("MEGATRON_CORE_PATH", "")
CASES = ["pp2 full", "vpp2", "tp2 etp2", "cp2 ep2", "ep2 nvfp4", "tp2 packed"]


@pytest.mark.parametrize("found", ["0.15.3", "0.17.0", "0.20.0", "1.0"])
def test_an_untested_release_is_refused(lone_process: None, found: str) -> None:
    from megatron_trace.modeling import compat

    with pytest.raises(compat.UnsupportedMegatronError, match=rf"megatron-core {found}: .*install one of 0.16.x, 0.19.x"):
        compat.require_supported(found)


@pytest.mark.parametrize("found", ["0.16.1", "0.19.2"])
def test_tested_releases_are_not(lone_process: None, found: str) -> None:
    from megatron_trace.modeling import compat

    compat.require_supported(found)
    compat.require_supported()


@pytest.mark.slow
@pytest.mark.skipif(not OTHER, reason="MEGATRON_CORE_PATH names no folder with another Megatron-core release")
def test_another_release_gives_the_same_step(lone_process: None, tmp_path: Path) -> None:
    import layout_cases
    from trainers import assert_equal_tensors

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    worker = [str(Path(__file__).with_name("worker.py")), "layout_cases", str(tmp_path), *CASES]
    env = environment() | {"PYTHONPATH": os.pathsep.join((OTHER, str(ROOT)))}
    done = subprocess.run([*command, *worker], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = layout_cases.run(layout_cases.Case())
    for name in CASES:
        seen = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert seen["digest"] == expected["digest"]
        assert_equal_tensors(seen["gradients"], expected["gradients"])
        for key, codes in expected["codes"].items():
            n = min(len(codes), len(seen["codes"][key]))
            assert torch.equal(seen["codes"][key][:n], codes[:n]), (name, key)
