"""Rules that involve more than one setting, all in one place. Each finds at most one problem and says it in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_trace.config.errors import ConfigError
from megatron_trace.config.schema import RunConfig

Rule = Callable[[RunConfig], Iterable[str]]

BLOCK = 16
"""Values that share an NVFP4 block scale."""
IMPORTANCE_SAMPLING = frozenset({"tis", "acr", "decoupled", "naive_behavior"})
"""Objectives that divide by the behaviour policy's probability."""


def check(config: RunConfig, *, planned_only: bool = False) -> None:
    """Raise ConfigError with one line for each rule that ``config`` breaks, limits of this version included."""
    problems = [problem for rule in RULES for problem in rule(config) if not (planned_only and rule in SUPPORT_RULES)]
    if problems:
        raise ConfigError(problems)


def unsupported(config: RunConfig) -> tuple[str, ...]:
    """What this version's trainer and engine cannot run yet although nothing is wrong with it, one line each."""
    return tuple(problem for rule in SUPPORT_RULES for problem in rule(config))


def validate_world_size(config: RunConfig, world_size: int) -> None:
    """Check what depends on the number of processes; raises ConfigError."""
    model_parallel = list(_model_parallel_size(config, world_size))
    problems = [*model_parallel, *_expert_parallel_size(config, world_size)]
    if not model_parallel:
        problems += _batch_split(config, world_size)
    if problems:
        raise ConfigError(problems)


def _model_parallel_size(config: RunConfig, world_size: int) -> Iterable[str]:
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % ranks:
        yield (
            f"parallel.tensor={parallel.tensor}: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context "
            f"{parallel.context} = {ranks} must divide the world size {world_size}; start a multiple of {ranks} processes"
        )


def _expert_parallel_size(config: RunConfig, world_size: int) -> Iterable[str]:
    parallel = config.parallel
    others = parallel.expert_tensor * parallel.pipeline
    if others == 1 and world_size % parallel.expert:
        yield (
            f"parallel.expert={parallel.expert}: must divide the world size {world_size}; "
            f"start a multiple of {parallel.expert} processes or set parallel.expert to a divisor of {world_size}"
        )
    elif world_size % (parallel.expert * others):
        yield (
            f"parallel.expert={parallel.expert}: expert {parallel.expert} x expert_tensor {parallel.expert_tensor} x pipeline "
            f"{parallel.pipeline} = {parallel.expert * others} must divide the world size {world_size}; "
            f"start a multiple of {parallel.expert * others} processes"
        )


def _batch_split(config: RunConfig, world_size: int) -> Iterable[str]:
    parallel = config.parallel
    model_parallel = parallel.tensor * parallel.pipeline * parallel.context
    replicas = world_size // model_parallel
    name = f"world size {world_size}"
    if model_parallel > 1:
        name = f"data-parallel size {replicas} ({name} / {model_parallel})"
    algorithm, micro = config.algorithm, config.trainer.micro_batch_size
    sequences = algorithm.prompts_per_step * algorithm.samples_per_prompt
    share = replicas * micro * algorithm.updates_per_rollout
    if sequences % share:
        yield (
            f"algorithm.prompts_per_step={algorithm.prompts_per_step}: {sequences} sequences "
            f"(x samples_per_prompt {algorithm.samples_per_prompt}) must be a multiple of {share} = {name} x "
            f"trainer.micro_batch_size {micro} x algorithm.updates_per_rollout {algorithm.updates_per_rollout}; "
            f"change one of them"
        )
    # Prompts and problems are dealt whole; ranks with unequal shares would wait for each other in the expert all-to-all.
    dealt = {"warmup.batch_size": config.warmup.batch_size}  # calibration reads it even without a warm-up
    if not sequences % share:
        dealt["algorithm.prompts_per_step"] = algorithm.prompts_per_step
    if config.evidence.enabled:
        dealt["evidence.prompts"] = config.evidence.prompts
    for field, count in dealt.items():
        if count % replicas:
            yield f"{field}={count}: must be a multiple of the {name}; the nearest above is {_round_up(count, replicas)}"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _block_alignment(config: RunConfig) -> Iterable[str]:
    """Hidden size, head width and expert width are multiples of 16."""
    model = config.model
    for name in ("hidden_size", "head_dim", "moe_intermediate_size"):
        value = getattr(model, name)
        if value % BLOCK:
            yield f"model.{name}={value}: must be a multiple of {BLOCK} (one NVFP4 block); use {_round_up(value, BLOCK)}"


def _heads(config: RunConfig) -> Iterable[str]:
    """Key/value heads divide attention heads."""
    model = config.model
    if model.num_attention_heads % model.num_key_value_heads:
        yield (
            f"model.num_key_value_heads={model.num_key_value_heads}: must divide model.num_attention_heads="
            f"{model.num_attention_heads}; use a divisor of {model.num_attention_heads}"
        )


def _top_k(config: RunConfig) -> Iterable[str]:
    """A token is routed to no more experts than there are."""
    model = config.model
    if model.num_experts_per_tok > model.num_experts:
        yield (
            f"model.num_experts_per_tok={model.num_experts_per_tok}: a token cannot go to more than "
            f"model.num_experts={model.num_experts} experts; use at most {model.num_experts}"
        )


def _hybrid_stack(config: RunConfig) -> Iterable[str]:
    """A stack with linear attention names its sizes, and whole groups of layers."""
    model = config.model
    if model.full_attention_interval == 1:
        return
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    for name in sizes:
        if not getattr(model, f"linear_{name}"):
            yield (
                f"model.linear_{name}=0: full_attention_interval={model.full_attention_interval} leaves linear-attention "
                f"layers, which need it; give model.linear_{name}=VALUE"
            )
    if model.num_layers % model.full_attention_interval:
        yield (
            f"model.full_attention_interval={model.full_attention_interval}: must divide model.num_layers={model.num_layers}; "
            f"use a divisor of {model.num_layers}"
        )
    if model.linear_num_key_heads and model.linear_num_value_heads % model.linear_num_key_heads:
        yield (
            f"model.linear_num_value_heads={model.linear_num_value_heads}: must be a multiple of model.linear_num_key_heads="
            f"{model.linear_num_key_heads}; use {_round_up(model.linear_num_value_heads, model.linear_num_key_heads)}"
        )


def _model_support(config: RunConfig) -> Iterable[str]:
    """The model is of a family that trainer and engine know: Qwen3-MoE, all layers with softmax attention."""
    model = config.model
    if model.family != "qwen3_moe":
        yield f"model.family={model.family!r}: not supported yet; use qwen3_moe"
        return
    plain = {
        "full_attention_interval": 1,
        "attention_output_gate": False,
        "shared_expert_intermediate_size": 0,
        "mtp_num_layers": 0,
        "other_parameters": 0,
    }
    for name, value in plain.items():
        if getattr(model, name) != value:
            yield f"model.{name}={getattr(model, name)}: not supported yet; use {str(value).lower()}"


def _top_k_support(config: RunConfig) -> Iterable[str]:
    """A token is routed to at least two experts: Megatron-core's router has no softmax over the logits of a single one."""
    if config.model.num_experts_per_tok == 1:
        yield (
            "model.num_experts_per_tok=1: not supported yet (the router's softmax over one selected logit is always 1); "
            "use at least 2"
        )


def _parallel_support(config: RunConfig) -> Iterable[str]:
    """Heads, expert widths and layers can be cut as the trainer's parallel sizes ask."""
    parallel, model = config.parallel, config.model
    if model.num_key_value_heads % parallel.tensor:
        yield (
            f"parallel.tensor={parallel.tensor}: the trainer cuts K and V guidance by head, so it must divide "
            f"model.num_key_value_heads={model.num_key_value_heads}"
        )
    if model.moe_intermediate_size % BLOCK == 0 and model.moe_intermediate_size % (BLOCK * parallel.expert_tensor):
        yield (
            f"parallel.expert_tensor={parallel.expert_tensor}: must leave shards of model.moe_intermediate_size="
            f"{model.moe_intermediate_size} of whole blocks of {BLOCK}"
        )
    if model.num_layers % (parallel.pipeline * parallel.virtual_pipeline):
        yield (
            f"parallel.pipeline={parallel.pipeline}: {parallel.pipeline * parallel.virtual_pipeline} chunks (x "
            f"virtual_pipeline {parallel.virtual_pipeline}) must divide model.num_layers={model.num_layers}"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield f"parallel.virtual_pipeline={parallel.virtual_pipeline}: needs parallel.pipeline of 2 or more; use 1"


def _placement_support(config: RunConfig) -> Iterable[str]:
    """Embedded engines live in the trainer's processes, each with shards of every expert, and nothing is recomputed."""
    for name, value in (("engine", "embedded"), ("placement", "local")):
        given = getattr(config.rollout, name)
        if given != value:
            yield f"rollout.{name}={given!r}: not supported yet; use {value}"
    if config.cluster.rollout_nodes:
        yield f"cluster.rollout_nodes={config.cluster.rollout_nodes}: not supported yet (engines live in the trainer); use 0"
    if config.rollout.expert_parallel != 1:
        yield f"rollout.expert_parallel={config.rollout.expert_parallel}: not supported yet; use 1"
    if config.trainer.recompute != "none":
        yield f"trainer.recompute={config.trainer.recompute!r}: not supported yet; use none"


def _expert_parallel(config: RunConfig) -> Iterable[str]:
    """The expert parallel size divides the number of experts (and the world size, checked at launch)."""
    expert, experts = config.parallel.expert, config.model.num_experts
    if experts % expert:
        divisors = ", ".join(str(d) for d in range(1, experts + 1) if experts % d == 0)
        yield f"parallel.expert={expert}: must divide model.num_experts={experts}; use one of {divisors}"


def _engine_tensor_parallel(config: RunConfig) -> Iterable[str]:
    """The engine's tensor parallel size divides the attention heads and leaves expert shards of whole blocks."""
    tensor, experts, model = config.rollout.tensor_parallel, config.rollout.expert_parallel, config.model
    if tensor % experts or model.num_experts % experts:
        yield (
            f"rollout.expert_parallel={experts}: must divide rollout.tensor_parallel={tensor} and model.num_experts="
            f"{model.num_experts}; use a common divisor"
        )
        return
    kv_heads = model.num_key_value_heads
    if kv_heads % tensor and (model.num_attention_heads % tensor or tensor % kv_heads):
        yield (
            f"rollout.tensor_parallel={tensor}: must divide model.num_attention_heads={model.num_attention_heads}, and "
            f"divide or be a multiple of model.num_key_value_heads={kv_heads}; use a divisor of {kv_heads}"
        )
    width, shards = model.moe_intermediate_size, tensor // experts
    if width % BLOCK == 0 and width % (shards * BLOCK):
        yield (
            f"rollout.tensor_parallel={tensor}: model.moe_intermediate_size={width} must be a multiple of {shards} x {BLOCK} "
            f"for shards of whole NVFP4 blocks; use {_round_up(width, shards * BLOCK)} or a smaller rollout.tensor_parallel"
        )


def _engine_kv_heads(config: RunConfig) -> Iterable[str]:
    """The engine's tensor parallel size divides the key/value heads (it does not replicate them)."""
    tensor, kv_heads = config.rollout.tensor_parallel, config.model.num_key_value_heads
    if kv_heads % tensor and config.model.num_attention_heads % tensor == 0 and tensor % kv_heads == 0:
        yield (
            f"rollout.tensor_parallel={tensor}: must divide model.num_key_value_heads={kv_heads}; use a divisor of {kv_heads}"
        )


def _fc2_row_scale(config: RunConfig) -> Iterable[str]:
    """A fc2 row scale per shard needs equal expert shards in engine and trainer."""
    engine = config.rollout.tensor_parallel // config.rollout.expert_parallel
    trainer = config.parallel.expert_tensor
    if config.precision.rollout == "nvfp4" and config.precision.fc2_row_scale == "per_shard" and engine != trainer:
        yield (
            f"precision.fc2_row_scale='per_shard': the engine has {engine} shards (rollout.tensor_parallel) and the trainer "
            f"{trainer} (parallel.expert_tensor), so their scales differ; use max_reduced or equal sizes"
        )


def _trainer_forward(config: RunConfig) -> Iterable[str]:
    """A trainer forward that rounds needs an NVFP4 rollout."""
    choice = config.precision.trainer_forward
    if config.precision.rollout == "bf16" and choice not in ("auto", "bf16"):
        yield (
            f"precision.trainer_forward={choice!r}: needs precision.rollout=nvfp4, but the rollout is bf16; "
            f"use auto or bf16, or precision.rollout=nvfp4"
        )


def _layers_in_range(config: RunConfig) -> Iterable[str]:
    """Layer lists name layers of the model, each once."""
    total = config.model.num_layers
    lists = {"precision.bf16_layers": config.precision.bf16_layers}
    if not isinstance(config.guidance.layers, str):
        lists["guidance.layers"] = config.guidance.layers
    for name, layers in lists.items():
        outside = [layer for layer in layers if layer >= total]
        if outside:
            yield f"{name}={list(layers)}: layer {outside[0]} is outside 0..{total - 1} (model.num_layers={total}); remove it"
        elif len(set(layers)) != len(layers):
            yield f"{name}={list(layers)}: a layer is listed twice; list each once"


def _guidance(config: RunConfig) -> Iterable[str]:
    """Guidance names each site once, K and V together, no BF16 layer, and at least one layer."""
    guidance = config.guidance
    if len(set(guidance.sites)) != len(guidance.sites):
        yield f"guidance.sites={list(guidance.sites)}: a site is listed twice; list each once"
    elif ("k" in guidance.sites) != ("v" in guidance.sites):
        given, other = ("k", "v") if "k" in guidance.sites else ("v", "k")
        yield f"guidance.sites={list(guidance.sites)}: K and V are guided together; add {other} or remove {given}"
    if config.trainer_forward != "guided":
        return
    if not isinstance(guidance.layers, str):
        both = sorted(set(guidance.layers) & set(config.precision.bf16_layers))
        if both:
            yield (
                f"guidance.layers={list(guidance.layers)}: layer {both[0]} is in precision.bf16_layers and not rounded; "
                f"remove it from one of the two"
            )
            return
    if not config.guided_layers:
        yield (
            f"guidance.layers={guidance.layers!r}: no layer is left to guide; name some or use precision.trainer_forward=qat"
        )


def _top_p(config: RunConfig) -> Iterable[str]:
    """Objectives with importance sampling refuse a nucleus below 1."""
    objective, top_p = config.algorithm.objective, config.rollout.top_p
    if top_p < 1 and objective in IMPORTANCE_SAMPLING:
        yield (
            f"rollout.top_p={top_p}: importance sampling (algorithm.objective={objective}) needs the whole distribution, and "
            f"nucleus sampling cuts it; use rollout.top_p=1.0 or algorithm.objective=naive_proximal"
        )


def _reference_policy(config: RunConfig) -> Iterable[str]:
    """A KL penalty needs a reference policy, which the trainer does not keep yet."""
    if config.algorithm.kl_coef > 0:
        yield f"algorithm.kl_coef={config.algorithm.kl_coef}: not supported yet (no reference policy is kept); use 0"


def _mini_batches(config: RunConfig) -> Iterable[str]:
    """Updates per rollout divide the sequences of a step."""
    algorithm = config.algorithm
    sequences = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if sequences % algorithm.updates_per_rollout:
        yield (
            f"algorithm.updates_per_rollout={algorithm.updates_per_rollout}: must divide the {sequences} sequences of a step "
            f"(prompts_per_step {algorithm.prompts_per_step} x samples_per_prompt {algorithm.samples_per_prompt})"
            f"; use a divisor of {sequences}"
        )


def _lengths(config: RunConfig) -> Iterable[str]:
    """The sequence length holds prompt and response, and the model holds the sequence length."""
    prompt, response = config.task.max_prompt_tokens, config.rollout.max_new_tokens
    longest, length = prompt + response, config.trainer.sequence_length
    if longest > length:
        yield (
            f"trainer.sequence_length={length}: must hold task.max_prompt_tokens={prompt} + rollout.max_new_tokens={response}; "
            f"use at least {longest}"
        )
    limit = config.model.max_position_embeddings
    if length > limit:
        yield f"trainer.sequence_length={length}: must be at most model.max_position_embeddings={limit}; lower it"


def _pages(config: RunConfig) -> Iterable[str]:
    """The KV cache holds at least one longest sequence."""
    rollout = config.rollout
    longest = config.task.max_prompt_tokens + rollout.max_new_tokens
    needed = -(-longest // rollout.page_size)
    if rollout.num_pages < needed:
        yield (
            f"rollout.num_pages={rollout.num_pages}: a sequence of task.max_prompt_tokens + rollout.max_new_tokens = {longest} "
            f"tokens needs {needed} pages of {rollout.page_size}; use at least {needed}"
        )


def _schedule(config: RunConfig) -> Iterable[str]:
    """The learning rate does not grow."""
    low, high = config.optimizer.min_learning_rate, config.optimizer.learning_rate
    if low is not None and low > high:
        yield f"optimizer.min_learning_rate={low}: must be at most optimizer.learning_rate={high}; lower it or leave it out"


def _task_section(config: RunConfig) -> Iterable[str]:
    """Only the section of the chosen task is given, and its settings fit together."""
    task = config.task
    for other in ("arithmetic", "reasoning_gym"):
        if other != task.name and other in task.model_fields_set:
            yield f"task.{other}: given, but task.name={task.name} does not read it; remove it or set task.name={other}"
    arithmetic = task.arithmetic
    if arithmetic.forgetful_fraction > 0 and arithmetic.operands < 3:
        yield (
            f"task.arithmetic.forgetful_fraction={arithmetic.forgetful_fraction}: a solution that leaves out the last of "
            f"task.arithmetic.operands={arithmetic.operands} has no step left; use 0 or at least 3 operands"
        )


def _evidence(config: RunConfig) -> Iterable[str]:
    """The evidence is made on held-out problems, and also with the policy its data came from."""
    evidence = config.evidence
    if not evidence.enabled:
        return
    heldout = config.task.heldout_problems
    if evidence.prompts > heldout:
        yield f"evidence.prompts={evidence.prompts}: must be at most task.heldout_problems={heldout}; use {heldout} or fewer"
    if 0 not in evidence.stale_updates:
        given = list(evidence.stale_updates)
        yield f"evidence.stale_updates={given}: the summary needs the table at 0; use {[0, *given]}"


RULES: tuple[Rule, ...] = (
    _block_alignment,
    _heads,
    _top_k,
    _hybrid_stack,
    _model_support,
    _top_k_support,
    _parallel_support,
    _placement_support,
    _expert_parallel,
    _engine_tensor_parallel,
    _engine_kv_heads,
    _fc2_row_scale,
    _trainer_forward,
    _layers_in_range,
    _guidance,
    _top_p,
    _reference_policy,
    _mini_batches,
    _lengths,
    _pages,
    _schedule,
    _task_section,
    _evidence,
)

SUPPORT_RULES: tuple[Rule, ...] = (
    _model_support,
    _top_k_support,
    _parallel_support,
    _placement_support,
    _engine_kv_heads,
    _reference_policy,
)
"""The rules among ``RULES`` that only say what this version's trainer and engine do not do yet."""
