"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """What a checkpoint carries beside weights; plain numbers, so that it is readable JSON."""

    warmup_steps: int = 0
    step: int = 0
    accuracy_warmup: float | None = None
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each finished step."""
    accuracies: list[tuple[int, float]] = field(default_factory=list)
    """(step, held-out accuracy) of each evaluation."""
    updates: int = 0
    """Reinforcement-learning updates that changed the weights."""
    seconds: float = 0.0
    """Seconds of earlier parts of a resumed run."""
    guided_tokens: float = 0.0
    fallback_tokens: float = 0.0
