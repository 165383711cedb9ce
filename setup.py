"""Package description of megatron-trace. Settings of tools stand in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "megatron_trace" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None, "megatron_trace/__init__.py has no __version__"

CORE = [
    "torch>=2.6",
    "megatron-core>=0.16.1,<0.20",
    "pyyaml>=6.0",
    "numpy>=1.26",
    "safetensors>=0.4",
    "rich>=13",
    "pydantic>=2.7",
    "psutil>=5.9",
]

EXTRAS = {
    "rollout": ["ray", "sglang"],
    "quant": ["nvidia-modelopt", "requests"],
    # Never bare transformer-engine: without its core it raises RuntimeError at import, and takes megatron.core down with it.
    "gpu": ["transformer-engine[pytorch]>=2.19", "triton"],
    "tasks": ["reasoning-gym", "math-verify"],
    "report": ["matplotlib", "tensorboard"],
    "dev": [
        "pytest>=8",
        "hypothesis>=6.100",
        "ruff>=0.9",
        "mypy>=1.13",
        "types-PyYAML",
        "transformers>=4.51",
        "pre-commit",
        # Its interpreter runs the kernels on a CPU; it has wheels for Linux only.
        "triton>=3.5; platform_system == 'Linux'",
    ],
}

setup(
    name="megatron-trace",
    version=VERSION[1],
    description="RL post-training of Mixture-of-Experts language models with FP4 rollouts (TRACE, QuRL) on Megatron-core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_trace*", "transformer_engine_ext*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
)
