"""GRPO in many processes: an adapter learns from rewards, and each process has a part of the model.

The first process has the engine, which draws the completions for all. Copy this file, change it,
and run it by its path: `tune run --nproc_per_node <NUMBER> my_recipe.py --config my_config.yaml`.
It reads top to bottom, in each process. The formula is in checkpointing/rl/grpo.py, a step in
grpo_step.py beside it.
"""

from typing import Any

import torch
from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.adapters import MergedStateDict
from checkpointing.errors import ConfigError
from checkpointing.rl.grpo_step import GRPOStep
from checkpointing.rl.prompts import check_lengths
from checkpointing.rl.reward_function import RewardFunction
from checkpointing.rl.synced_engine import SyncedEngine
from checkpointing.training import (
    NullLogger,
    Trainer,
    adapter_config_from_recipe,
    adapter_state_dict,
    add_adapter,
    base_state_dict,
    check_resume,
    check_same_adapter,
    data_share,
    empty_decoder,
    first_rank_first,
    from_first_rank,
    get_dtype,
    get_seed,
    init_adapter,
    instantiate,
    is_first_rank,
    load_adapter,
    make_mesh,
    make_schedule,
    materialize,
    next_steps,
    parallelize,
    process_group,
    require,
    run_record,
    set_seed,
    set_seed_of_share,
    training_options,
)
from checkpointing.training.distributed import job
from checkpointing.training.row_loader import RowLoader

CONFIG_KEYS = frozenset(
    {
        "output_dir",
        "model",
        "model.lora_attn_modules",
        "model.apply_lora_to_mlp",
        "model.apply_lora_to_output",
        "model.apply_lora_to_embeddings",
        "model.modules_to_save",
        "model.lora_rank",
        "model.lora_alpha",
        "model.lora_bias",
        "model.use_dora",
        "model.use_rslora",
        "checkpointer",
        "resume_from_checkpoint",
        "resume_override",
        "save_adapter_weights_only",
        "save_every_n_steps",
        "enable_async_checkpointing",
        "on_save_error",
        "stop_deadline_seconds",
        "tokenizer",
        "dataset",
        "shuffle",
        "batch_size",
        "seed",
        "engine",
        "sync",
        "sync_every",
        "sampling",
        "group_size",
        "reward",
        "objective",
        "num_policy_updates",
        "forward_batch_size",
        "optimizer",
        "lr_scheduler",
        "clip_grad_norm",
        "epochs",
        "max_steps_per_epoch",
        "metric_logger",
        "log_every_n_steps",
        "device",
        "dtype",
        "tensor_parallel_dim",
        "process_group_timeout_seconds",
    }
)
# Of the recipe state: which weights the engine holds.
ROLLOUTS = "rollouts"


def main(cfg: DictConfig) -> None:
    """Trains as the config says and prints where the result lies."""
    require(
        cfg,
        *("model", "checkpointer", "tokenizer", "dataset", "optimizer", "metric_logger", "epochs"),
        *("engine", "sampling", "group_size", "reward", "objective"),
    )
    timeout = cfg.get("process_group_timeout_seconds", 600)
    with process_group(cfg.get("device", "cpu"), timeout) as device:
        train(cfg, device)


def train(cfg: DictConfig, device: torch.device) -> None:
    """Does the part of this process.

    Args:
        cfg: as for :func:`main`.
        device: of this process.
    """
    dtype = get_dtype(cfg.get("dtype", "fp32"))
    resume = cfg.get("resume_from_checkpoint", False)
    reward = RewardFunction(cfg.reward)
    sampling = instantiate(cfg.sampling)
    objective = instantiate(cfg.objective)

    # The processes: those of a tensor-parallel group have the same prompts, the groups different
    # ones.
    mesh = make_mesh(device, cfg.get("tensor_parallel_dim", 1))
    share = data_share(mesh)

    # The checkpoint: its config, and when resuming all that the run needs besides the weights.
    with first_rank_first():
        checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    state = checkpointer.load_beside_model()
    if resume and ROLLOUTS not in state:
        raise ConfigError(
            "the checkpoint is of no run of this recipe: start one from its adapter with "
            "resume_from_checkpoint=False and checkpointer.adapter_checkpoint"
        )
    if state.get("quantized_base") is not None:
        raise ConfigError(
            "the adapter was trained on a base of 4 bits (model.quantize_base), which is trained "
            "on one device alone: use the recipe grpo_lora_single_device"
        )
    seed = from_first_rank(get_seed(cfg, state))

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    prompts = instantiate(cfg.dataset, tokenizer)
    check_lengths(prompts, sampling.max_new_tokens, checkpointer.model_config.max_seq_len)
    size, shuffle = cfg.get("batch_size", 1), cfg.get("shuffle", True)
    batches = RowLoader(prompts, size, shuffle, seed, share)
    if resume:
        check_resume(cfg, state, batches)

    # The engine that draws completions, which may seed the random numbers as it starts.
    with job().agreed():
        engine = instantiate(cfg.engine) if is_first_rank() else None

    # The policy, without memory at first. Each process then gets memory for its part, and reads it.
    # With its adapter switched off, it is the reference too.
    adapter_config = adapter_config_from_recipe(cfg.model, checkpointer.model_config)
    if "adapter_config" in state:
        adapter_config = check_same_adapter(state["adapter_config"], adapter_config)
    model = empty_decoder(checkpointer.model_config, dtype)
    add_adapter(model, adapter_config, like=state.get("adapter"))
    parallelize(model, mesh)
    materialize(model, device)
    checkpointer.load_into(base_state_dict(model))
    set_seed(seed)
    init_adapter(model)
    if "adapter" in state:
        load_adapter(model, state["adapter"])
    set_seed_of_share(seed, share.rank)

    # A step: the engine gets the weights of the policy, draws completions of some prompts, and the
    # policy is updated on their rewards.
    options = training_options(cfg, seed)
    optimizer = instantiate(cfg.optimizer, [p for p in model.parameters() if p.requires_grad])
    synced = SyncedEngine(
        engine,
        model,
        cfg.get("sync", "merged"),
        cfg.get("sync_every", 1),
        cfg.checkpointer.checkpoint_dir,
        share,
    )
    step = GRPOStep(
        model,
        optimizer,
        synced,
        tokenizer,
        reward,
        sampling,
        objective,
        seed,
        cfg.group_size,
        cfg.get("num_policy_updates", 1),
        cfg.get("forward_batch_size"),
        options.clip_grad_norm,
        share,
    )

    # What a checkpoint holds besides the state of the loop: the parts of this process, which all
    # write into the same files.
    def weights() -> dict[str, Any]:
        adapter = adapter_state_dict(model)
        entries: dict[str, Any] = {
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
            "quantized_base": None,
            ROLLOUTS: step.state_dict(),
        }
        if not options.save_adapter_weights_only:
            entries["model"] = MergedStateDict(base_state_dict(model), adapter, adapter_config)
        return entries

    record = run_record(cfg)
    saver = checkpointer
    if cfg.get("enable_async_checkpointing", False):
        saver = AsyncCheckpointer(checkpointer)
    trainer = Trainer(
        model, optimizer, batches, options, saver, weights, device, record, step, share
    )
    if resume:
        trainer.load_state_dict(state)
        step.load_state_dict(state[ROLLOUTS])
    schedule = make_schedule(cfg, optimizer, trainer.total_steps)

    logger = instantiate(cfg.metric_logger) if is_first_rank() else NullLogger()
    try:
        checkpoint = trainer.train(schedule, logger)
    finally:
        logger.close()
        synced.close()
    print(next_steps(checkpoint, cfg.checkpointer.checkpoint_dir, options.epochs))
