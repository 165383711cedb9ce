"""Everything one rank of a run owns: trainer, engine, task, log, progress; and what happens around the steps of the loop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_trace.config import ConfigError, RunConfig, validate_world_size
from megatron_trace.diagnostics.memory import PeakMemory
from megatron_trace.diagnostics.run_log import ProgressLine, RunLog
from megatron_trace.guidance.spec import RecordLayout
from megatron_trace.platform.device import init_process_group
from megatron_trace.platform.stop import StopRequest
from megatron_trace.rollout.build import build_engine
from megatron_trace.tasks.factory import build_task
from megatron_trace.trainer import checkpoint, evidence
from megatron_trace.trainer.collectives import global_sum, global_sums
from megatron_trace.trainer.experience import Experience, greedy_accuracy, guidance_spec, probe_engine
from megatron_trace.trainer.megatron import MegatronTrainer
from megatron_trace.trainer.progress import Progress
from megatron_trace.trainer.refit import build_bundle, refit
from megatron_trace.trainer.summary import summarize, summary_table
from megatron_trace.trainer.update import UpdateResult


class Run:
    """One rank's run. Methods that mention it are collective; the others are local."""

    def __init__(self, config: RunConfig, *, provenance: Mapping[str, str]) -> None:
        """``provenance``: where each given setting came from (``config.loading.provenance``), written beside the settings."""
        rank, world = init_process_group()
        validate_world_size(config, world)
        self.config = config
        self.stop = StopRequest()
        self.memory = PeakMemory()
        self.task = build_task(config)
        self.directory = _writable_directory("run.output_dir", config.run.output_dir, Path(config.run.name))
        self.checkpoints = self.directory / "checkpoints"
        if config.checkpoint.directory is not None:
            self.checkpoints = _writable_directory("checkpoint.directory", config.checkpoint.directory)
        resume_from = checkpoint.find(self.checkpoints, config, world_size=world) if config.checkpoint.resume else None
        self.log = RunLog(self.directory, main=rank == 0, append=config.checkpoint.resume)
        self.trainer = MegatronTrainer(config)
        self.engine = build_engine(config)
        self.state = Progress()
        self.stopped = 0
        self._probed = False
        self._cases: list[evidence.EvidenceCase] = []
        if resume_from is not None:
            self.state = Progress(**checkpoint.load(resume_from, self.trainer))
            self.log.keep(self._is_done)
        if rank == 0:
            (self.directory / "config.json").write_text(json.dumps(config.resolved(), indent=1) + "\n")
            (self.directory / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
        self.log.say(self._headline(world))
        if resume_from is not None:
            self.log.say(f"resumed from {resume_from}")
            if changed := checkpoint.changed_settings(resume_from, config):
                self.log.say(f"settings changed since then: {', '.join(changed)}")
        elif (moved := checkpoint.set_aside(self.checkpoints)) is not None:
            self.log.say(f"checkpoints of an earlier run moved to {moved}")

    def _is_done(self, record: dict[str, Any]) -> bool:
        """Whether a line of metrics is of a step that the resumed state has behind it; later ones will be written anew."""
        done = self.state.warmup_steps if record["phase"] == "warmup" else self.state.step
        return bool(record["step"] <= done)

    @property
    def pad_id(self) -> int:
        return self.task.tokenizer.pad_id

    def progress(self, title: str, *, total: int, done: int) -> AbstractContextManager[ProgressLine]:
        return self.log.progress(title, total=total, done=done)

    # ---- around the steps --------------------------------------------------------------------------------------------

    def begin_reinforcement(self) -> None:
        """Fresh optimiser moments: those of imitation say nothing about policy gradients."""
        self.trainer.reset_optimizer(self.config.optimizer)

    def learning_rate(self) -> float:
        """Of the current step: linear rise over ``optimizer.warmup_steps``, then constant or falling linearly to a minimum."""
        section, step, last = self.config.optimizer, self.state.step, self.config.trainer.steps - 1
        if step < section.warmup_steps:
            return section.learning_rate * (step + 1) / (section.warmup_steps + 1)
        if section.min_learning_rate is None or last <= section.warmup_steps:
            return section.learning_rate
        share = (step - section.warmup_steps) / (last - section.warmup_steps)
        return section.learning_rate + share * (section.min_learning_rate - section.learning_rate)

    def serve_weights(self) -> None:
        """Refit this rank's engine if it serves another version; a difference of bytes ends the run. Collective.

        The first time, one short request must bring back everything the trainer relies on, or the run ends here.
        """
        if self.engine.health().weight_version == self.trainer.version:  # every update since was skipped
            return
        quantized = self.config.precision.rollout == "nvfp4"
        bundle = build_bundle(self.trainer, quantized=quantized, contract_fingerprint=self.config.contract.fingerprint)
        refit(self.engine, bundle)
        if not self._probed:
            probe_engine(self.engine, self.task, self.config)
            self._probed = True

    def evaluate(self) -> float:
        """Greedy accuracy on the held-out split with the weights being served. Collective."""
        with self.log.phase("evaluate"):
            right, count = greedy_accuracy(self.engine, self.task, self.config)
            accuracy = global_sum(right) / global_sum(count)
        self.state.accuracies.append((self.state.step, accuracy))
        self.log.say(f"held-out accuracy after step {self.state.step}: {accuracy:.3f}")
        return accuracy

    def collect_evidence(self, *, before_step: int) -> None:
        """Sample evidence trajectories where the data must be some updates older than the final weights. Collective."""
        if before_step in self._evidence_steps():
            with self.log.phase("evidence"):
                self._cases.append(evidence.collect(self.trainer, self.task))

    def _evidence_steps(self) -> set[int]:
        """Steps before which evidence is sampled, so that the final policy is the wanted number of updates newer."""
        if not self.config.evidence.enabled:
            return set()
        per_step, last = self.config.algorithm.updates_per_rollout, self.config.trainer.steps
        return {max(0, last - -(-updates // per_step)) for updates in self.config.evidence.stale_updates}

    def record_warmup(self, metrics: dict[str, float], line: ProgressLine) -> None:
        step, total = self.state.warmup_steps, self.config.warmup.steps
        phases = self.log.take_phases()
        self.log.write({"phase": "warmup", "step": step, **metrics, "seconds": phases})
        note = f"warm-up {step}/{total}  loss {metrics['loss']:.4f}"
        line.advance(note, show=step % 50 == 0 or step == total)

    def record_step(self, experience: Experience, result: UpdateResult, line: ProgressLine) -> None:
        """One line of metrics for the step just finished; evaluation and checkpoint where they are due. Collective."""
        counts = global_sums(
            {
                "samples": len(experience.samples),
                "reward": sum(experience.rewards),
                "tokens": experience.response_tokens,
                "truncated": experience.truncated,
                "zero_variance": experience.zero_variance,
                "invalid_guidance_rows": experience.invalid_guidance_rows,
                "invalid_route_rows": experience.invalid_route_rows,
            }
        )
        reward = counts["reward"] / counts["samples"]
        self.state.rewards.append(reward)
        self.state.updates += self.config.algorithm.updates_per_rollout - result.skipped
        for site in result.sites.values():
            self.state.guided_tokens += site["guided"]
            self.state.fallback_tokens += site["fallback"]
        due = self.config.evaluation.interval and self.state.step % self.config.evaluation.interval == 0
        accuracy = self.evaluate() if due else None
        phases = self.log.take_phases()
        policy = result.policy.finalize()
        record = {
            "phase": "rl",
            "step": self.state.step,
            "version": self.trainer.version,
            "reward": reward,
            "accuracy": accuracy,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "skipped_updates": result.skipped,
            "nonfinite_updates": result.nonfinite,
            "invalid_guidance_rows": counts["invalid_guidance_rows"],
            "invalid_route_rows": counts["invalid_route_rows"],
            "truncated_fraction_of_samples": counts["truncated"] / counts["samples"],
            "zero_variance_fraction": counts["zero_variance"] / counts["samples"],
            "response_tokens": counts["tokens"],
            "policy": policy,
            "sites": {site: _site_record(values) for site, values in result.sites.items()},
            "guidance_bytes_per_token": self.guidance_bytes_per_token(),
            "tokens_per_second": counts["tokens"] / max(phases.get("rollout", 0.0), 1e-9),
            "seconds": phases,
        }
        self.log.write(record)
        note = (
            f"step {self.state.step}/{self.config.trainer.steps}  reward {reward:.3f}  "
            f"|dlogp| {policy.get('dlogp_mean', 0):.5f}  kl {policy.get('kl_k3', 0):.2e}  "
            f"clip {policy.get('clip_fraction', 0):.3f}  {record['tokens_per_second']:.0f} tok/s"
        )
        line.advance(note, show=self.state.step % self.config.trainer.log_every == 0)
        interval = self.config.checkpoint.interval
        if interval and self.state.step % interval == 0:
            self.save()

    def guidance_bytes_per_token(self) -> int:
        """Bytes the engine records for one token of one sample."""
        spec = guidance_spec(self.config)
        return 0 if spec is None else RecordLayout.build(spec, self.config.model).row_bytes

    def should_stop(self) -> bool:
        """Whether a stop was asked for on any rank. Collective."""
        self.stopped = self.stop.agreed()
        return bool(self.stopped)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of the current state. Collective."""
        with self.log.phase("checkpoint"):
            progress = asdict(self.state) | {"seconds": self.seconds()}
            return checkpoint.save(self.checkpoints, self.trainer, progress, keep_last=self.config.checkpoint.keep_last)

    def seconds(self) -> float:
        """Wall-clock seconds of the run, earlier parts included."""
        return self.state.seconds + time.perf_counter() - self.log.started

    def leave(self) -> int:
        """A stop was asked for: checkpoint, say so, and give the exit code of the signal. Collective."""
        path = self.save()
        name = signal.Signals(self.stopped).name
        self.log.say(f"{name}: checkpoint written to {path}; continue with checkpoint.resume=true")
        self.close()
        return 128 + self.stopped

    def finish(self) -> int:
        """Evaluate, checkpoint, measure the evidence, write the summary. Collective."""
        accuracy = self.evaluate()
        self.save()
        measured = []
        with self.log.phase("evidence"):
            for case in self._cases:
                measured.append(evidence.measure(self.trainer, case, pad_id=self.pad_id))
        if len(measured) < len(self._evidence_steps()):
            self.log.say("evidence sampled before the run was interrupted is lost: the summary lacks a newer-policy table")
        values = summarize(
            self.config,
            self.state,
            updates=self.state.updates,
            accuracy_final=accuracy,
            evidence=measured,
            guidance_bytes_per_token=self.guidance_bytes_per_token(),
            seconds=self.seconds(),
            peak_rss_gib=global_sum(self.memory.gib()),
        )
        self.log.summary(values, table=summary_table(values))
        self.close()
        return 0

    def close(self) -> None:
        """Stop what this rank started."""
        self.engine.shutdown()
        self.stop.restore()
        dist.barrier()
        dist.destroy_process_group()

    def _headline(self, world: int) -> str:
        c, m = self.config, self.config.model
        layers = ",".join(map(str, c.guided_layers)) or "none"
        return (
            f"{c.run.name}: {m.num_layers} layers, {m.num_experts} experts top-{m.num_experts_per_tok}; {world} ranks, EP "
            f"{c.parallel.expert}; rollout {c.precision.rollout} by {c.rollout.engine} engine TP {c.rollout.tensor_parallel}; "
            f"trainer forward {c.trainer_forward}, guided layers {layers}, "
            f"{self.guidance_bytes_per_token()} guidance bytes/token; contract {c.contract.fingerprint[:12]}"
        )


def _writable_directory(field: str, given: str, below: Path = Path()) -> Path:
    """``given`` / ``below``, made on every rank alike, so that all of them refuse together; ConfigError naming ``field``."""
    directory = Path(given) / below
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{field}={given}: {directory} cannot be made ({error.strerror}); name a writable directory"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{field}={given}: {directory} cannot be written to; name a writable directory")
    return directory


def _site_record(values: dict[str, Any]) -> dict[str, Any]:
    compared, with_guidance = values["values"], values["with_guidance"]
    return {
        "guided_tokens": values["guided"],
        "fallback_tokens": values["fallback"],
        "flip_rate_without_guidance": values["without_guidance"] / compared if compared else None,
        "flip_rate_with_guidance": with_guidance / compared if compared and with_guidance is not None else None,
        "flip_basis": values["basis"],
    }
