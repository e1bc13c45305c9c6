"""Full fine-tuning in many processes, each of which holds a part of the model.

Every weight is trained. Copy this file, change it, and run it by its path:
`tune run --nproc_per_node <NUMBER> my_recipe.py --config my_config.yaml`. It reads top to bottom,
in each process.
"""

from typing import Any

import torch
from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.errors import ConfigError
from checkpointing.training import (
    BatchLoader,
    NullLogger,
    Trainer,
    check_resume,
    data_share,
    empty_decoder,
    first_rank_first,
    from_first_rank,
    get_dtype,
    get_seed,
    instantiate,
    is_first_rank,
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
        "checkpointer",
        "resume_from_checkpoint",
        "resume_override",
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
        "optimizer_in_bwd",
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
    require(cfg, "checkpointer", "tokenizer", "dataset", "optimizer", "metric_logger", "epochs")
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

    # The model, without memory at first. Each process then gets memory for its part, and reads it
    # from the checkpoint, and when resuming all else that the run needs.
    with first_rank_first():
        checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    model = empty_decoder(checkpointer.model_config, dtype)
    if cfg.get("compile", False):
        for layer in model.layers:
            layer.compile()
    parallelize(model, mesh)
    materialize(model, device)
    state = checkpointer.load_into(model.state_dict())
    if "adapter" in state:
        raise ConfigError(
            "the checkpoint holds an adapter, which this recipe does not train: use the recipe "
            "lora_finetune_distributed, or fine-tune the merged model by setting "
            "checkpointer.checkpoint_dir to it"
        )
    seed = from_first_rank(get_seed(cfg, state))
    set_seed(seed)
    set_seed_of_share(seed, share.rank)

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer)
    size, shuffle = cfg.get("batch_size", 1), cfg.get("shuffle", True)
    batches = BatchLoader(dataset, size, shuffle, seed, share)
    if resume:
        check_resume(cfg, state, batches)

    # What a checkpoint holds besides the state of the loop: the parts of this process, which all
    # write into the same files.
    def weights() -> dict[str, Any]:
        return {"model": model.state_dict()}

    optimizer = instantiate(cfg.optimizer, model.parameters())
    options = training_options(cfg, seed)
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
