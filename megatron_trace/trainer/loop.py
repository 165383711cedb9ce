"""The algorithm.

prompts -> rollout engine (quantised) -> trajectories with guidance -> rewards -> advantages -> trainer forward (routes
replayed, rounding guided) -> loss -> backward -> optimiser -> quantise once -> refit engines with exactly those bytes -> next
step
"""

from __future__ import annotations

from megatron_trace.trainer.experience import collect
from megatron_trace.trainer.run import Run
from megatron_trace.trainer.update import update
from megatron_trace.trainer.warmup import calibrate, warmup_step


def train(run: Run) -> int:
    """Run to the end or to a stop request; returns the process exit code (128 + signal when stopped). Collective."""
    warm_up(run)
    if run.stopped:
        return run.leave()
    reinforce(run)
    if run.stopped:
        return run.leave()
    return run.finish()


def warm_up(run: Run) -> None:
    """Supervised steps that make a random model a partly right policy; then calibrate K and V and serve the first weights."""
    with run.progress("warm-up", total=run.config.warmup.steps, done=run.state.warmup_steps) as line:
        while run.state.warmup_steps < run.config.warmup.steps:
            with run.log.phase("train"):
                metrics = warmup_step(run.trainer, run.task, run.state.warmup_steps)
            run.state.warmup_steps += 1
            run.record_warmup(metrics, line)
            if run.should_stop():
                return
    if run.state.step == 0 and run.state.accuracy_warmup is None:
        calibrate(run.trainer, run.task)
        run.begin_reinforcement()
    run.serve_weights()
    if run.state.accuracy_warmup is None:
        run.state.accuracy_warmup = run.evaluate()


def reinforce(run: Run) -> None:
    """Reinforcement-learning steps: roll out, update, refit."""
    with run.progress("rl", total=run.config.trainer.steps, done=run.state.step) as line:
        while run.state.step < run.config.trainer.steps:
            run.collect_evidence(before_step=run.state.step)
            with run.log.phase("rollout"):
                experience = collect(run.engine, run.task, run.config, step=run.state.step)
            with run.log.phase("train"):
                result = update(run.trainer, experience, learning_rate=run.learning_rate(), pad_id=run.pad_id)
            with run.log.phase("refit"):
                run.serve_weights()
            run.state.step += 1
            run.record_step(experience, result, line)
            if run.should_stop():
                return
    run.collect_evidence(before_step=run.state.step)
