"""GRPO on one device: a LoRA or DoRA adapter learns from rewards for what the model writes.

Copy this file, change it, and run it by its path. It reads top to bottom. The formula is in
checkpointing/training/grpo.py, a step in grpo_step.py beside it.
"""

from typing import Any

from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.adapters import MergedStateDict
from checkpointing.errors import ConfigError
from checkpointing.nf4 import dequantized
from checkpointing.rl.grpo_step import GRPOStep
from checkpointing.rl.prompts import check_lengths
from checkpointing.rl.reward_function import RewardFunction
from checkpointing.rl.synced_engine import SyncedEngine
from checkpointing.training import (
    Trainer,
    adapter_config_from_recipe,
    adapter_state_dict,
    add_adapter,
    base_rounding,
    base_state_dict,
    build_decoder,
    check_resume,
    check_same_adapter,
    get_device,
    get_dtype,
    get_seed,
    instantiate,
    load_adapter,
    make_schedule,
    next_steps,
    quantize_base,
    require,
    run_record,
    set_seed,
    training_options,
)
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
        "model.quantize_base",
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
    device = get_device(cfg.get("device", "cpu"))
    dtype = get_dtype(cfg.get("dtype", "fp32"))
    resume = cfg.get("resume_from_checkpoint", False)
    reward = RewardFunction(cfg.reward)
    sampling = instantiate(cfg.sampling)
    objective = instantiate(cfg.objective)

    # The checkpoint: its weights, its config, and when resuming all else that the run needs.
    checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    state = checkpointer.load_checkpoint()
    if resume and ROLLOUTS not in state:
        raise ConfigError(
            "the checkpoint is of no run of this recipe: start one from its adapter with "
            "resume_from_checkpoint=False and checkpointer.adapter_checkpoint"
        )
    seed = get_seed(cfg, state)

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    prompts = instantiate(cfg.dataset, tokenizer)
    check_lengths(prompts, sampling.max_new_tokens, checkpointer.model_config.max_seq_len)
    batches = RowLoader(prompts, cfg.get("batch_size", 1), cfg.get("shuffle", True), seed)
    if resume:
        check_resume(cfg, state, batches)

    # The engine that draws completions, which may seed the random numbers as it starts.
    engine = instantiate(cfg.engine)
    set_seed(seed)

    # The policy; with its adapter switched off, it is the reference too.
    adapter_config = adapter_config_from_recipe(cfg.model, checkpointer.model_config)
    if "adapter_config" in state:
        adapter_config = check_same_adapter(state["adapter_config"], adapter_config)
    rounding = base_rounding(cfg.model, dtype, state)
    place = device if rounding is None else "cpu"
    model = build_decoder(checkpointer.model_config, state.pop("model"), dtype, place, copy=False)
    if rounding is not None:
        quantize_base(model, rounding, device)
    add_adapter(model, adapter_config, like=state.get("adapter"))
    if "adapter" in state:
        load_adapter(model, state["adapter"])

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
    )

    # What a checkpoint holds besides the state of the loop.
    def weights() -> dict[str, Any]:
        adapter = adapter_state_dict(model)
        entries: dict[str, Any] = {
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
            "quantized_base": None if rounding is None else rounding.to_state(),
            ROLLOUTS: step.state_dict(),
        }
        if not options.save_adapter_weights_only:
            base = dequantized(base_state_dict(model))
            entries["model"] = MergedStateDict(base, adapter, adapter_config)
        return entries

    record = run_record(cfg)
    saver = checkpointer
    if cfg.get("enable_async_checkpointing", False):
        saver = AsyncCheckpointer(checkpointer)
    trainer = Trainer(model, optimizer, batches, options, saver, weights, device, record, step)
    if resume:
        trainer.load_state_dict(state)
        step.load_state_dict(state[ROLLOUTS])
    schedule = make_schedule(cfg, optimizer, trainer.total_steps)

    logger = instantiate(cfg.metric_logger)
    try:
        checkpoint = trainer.train(schedule, logger)
    finally:
        logger.close()
        synced.close()
    print(next_steps(checkpoint, cfg.checkpointer.checkpoint_dir, options.epochs))
