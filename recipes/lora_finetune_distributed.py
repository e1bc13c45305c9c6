"""LoRA or DoRA fine-tuning in many processes, each of which holds a part of the model.

The base is frozen, only the adapter is trained. Copy this file, change it, and run it by its path:
`tune run --nproc_per_node <NUMBER> my_recipe.py --config my_config.yaml`. It reads top to bottom,
in each process.
"""

from typing import Any

import torch
from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.adapters import MergedStateDict
from checkpointing.errors import ConfigError
from checkpointing.training import (
    BatchLoader,
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
        "model.lora_dropout",
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
        "optimizer",
        "lr_scheduler",
        "clip_grad_norm",
        "epochs",
        "max_steps_per_epoch",
        "gradient_accumulation_steps",
        "metric_logger",
        "log_every_n_steps",
        "device",
        "dtype",
        "compile",
        "tensor_parallel_dim",
        "process_group_timeout_seconds",
    }
)


def main(cfg: DictConfig) -> None:
    """Fine-tunes as the config says and prints where the result lies."""
    require(
        cfg, "model", "checkpointer", "tokenizer", "dataset", "optimizer", "metric_logger", "epochs"
    )
    timeout = cfg.get("process_group_timeout_seconds", 600)
    with process_group(cfg.get("device", "cpu"), timeout) as device:
        finetune(cfg, device)


def finetune(cfg: DictConfig, device: torch.device) -> None:
    """Does the part of this process.

    Args:
        cfg: as for :func:`main`.
        device: of this process.
    """
    dtype = get_dtype(cfg.get("dtype", "fp32"))
    resume = cfg.get("resume_from_checkpoint", False)

    # The processes: those of a tensor-parallel group have the same rows, the groups different ones.
    mesh = make_mesh(device, cfg.get("tensor_parallel_dim", 1))
    share = data_share(mesh)

    # The checkpoint: its config, and when resuming all that the run needs besides the weights.
    with first_rank_first():
        checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    state = checkpointer.load_beside_model()
    if state.get("quantized_base") is not None:
        raise ConfigError(
            "the adapter was trained on a base of 4 bits (model.quantize_base), which is trained "
            "on one device alone: use the recipe lora_finetune_single_device"
        )
    seed = from_first_rank(get_seed(cfg, state))

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer)
    size, shuffle = cfg.get("batch_size", 1), cfg.get("shuffle", True)
    batches = BatchLoader(dataset, size, shuffle, seed, share)
    if resume:
        check_resume(cfg, state, batches)

    # The model, without memory at first. Each process then gets memory for its part, and reads it.
    adapter_config = adapter_config_from_recipe(cfg.model, checkpointer.model_config)
    if "adapter_config" in state:
        adapter_config = check_same_adapter(state["adapter_config"], adapter_config)
    model = empty_decoder(checkpointer.model_config, dtype)
    add_adapter(model, adapter_config, like=state.get("adapter"))
    if cfg.get("compile", False):
        for layer in model.layers:
            layer.compile()
    parallelize(model, mesh)
    materialize(model, device)
    checkpointer.load_into(base_state_dict(model))
    # All draw the same adapter, and other random numbers (dropout) for other rows.
    set_seed(seed)
    init_adapter(model)
    if "adapter" in state:
        load_adapter(model, state["adapter"])
    set_seed_of_share(seed, share.rank)

    options = training_options(cfg, seed)

    # What a checkpoint holds besides the state of the loop: the parts of this process, which all
    # write into the same files. The merged model is computed tensor by tensor meanwhile.
    def weights() -> dict[str, Any]:
        adapter = adapter_state_dict(model)
        entries: dict[str, Any] = {
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
            "quantized_base": None,
        }
        if not options.save_adapter_weights_only:
            entries["model"] = MergedStateDict(base_state_dict(model), adapter, adapter_config)
        return entries

    optimizer = instantiate(cfg.optimizer, [p for p in model.parameters() if p.requires_grad])
    record = run_record(cfg)
    saver = checkpointer
    if cfg.get("enable_async_checkpointing", False):
        saver = AsyncCheckpointer(checkpointer)
    trainer = Trainer(
        model, optimizer, batches, options, saver, weights, device, record, share=share
    )
    if resume:
        trainer.load_state_dict(state)
    schedule = make_schedule(cfg, optimizer, trainer.total_steps)

    logger = instantiate(cfg.metric_logger) if is_first_rank() else NullLogger()
    try:
        checkpoint = trainer.train(schedule, logger)
    finally:
        logger.close()
    print(next_steps(checkpoint, cfg.checkpointer.checkpoint_dir, options.epochs))
