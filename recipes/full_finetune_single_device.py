"""Full fine-tuning on one device: every weight is trained.

Copy this file, change it, and run it by its path. It reads top to bottom.
"""

from typing import Any

from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.errors import ConfigError
from checkpointing.training import (
    BatchLoader,
    Trainer,
    build_decoder,
    check_resume,
    get_device,
    get_dtype,
    get_seed,
    instantiate,
    make_schedule,
    next_steps,
    require,
    run_record,
    set_seed,
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
    }
)


def main(cfg: DictConfig) -> None:
    """Fine-tunes as the config says and prints where the result lies."""
    require(cfg, "checkpointer", "tokenizer", "dataset", "optimizer", "metric_logger", "epochs")
    device = get_device(cfg.get("device", "cpu"))
    dtype = get_dtype(cfg.get("dtype", "fp32"))
    resume = cfg.get("resume_from_checkpoint", False)

    # The checkpoint: its weights, its config, and when resuming all else that the run needs.
    checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    state = checkpointer.load_checkpoint()
    if "adapter" in state:
        raise ConfigError(
            "the checkpoint holds an adapter, which this recipe does not train: use the recipe "
            "lora_finetune_single_device, or fine-tune the merged model by setting "
            "checkpointer.checkpoint_dir to it"
        )
    seed = get_seed(cfg, state)
    set_seed(seed)

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer)
    batches = BatchLoader(dataset, cfg.get("batch_size", 1), cfg.get("shuffle", True), seed)
    if resume:
        check_resume(cfg, state, batches)

    # The model owns its weights: training must not write into the checkpoint's memory.
    model = build_decoder(checkpointer.model_config, state.pop("model"), dtype, device)
    if cfg.get("compile", False):
        for layer in model.layers:
            layer.compile()

    # What a checkpoint holds besides the state of the loop.
    def weights() -> dict[str, Any]:
        return {"model": model.state_dict()}

    optimizer = instantiate(cfg.optimizer, model.parameters())
    options = training_options(cfg, seed)
    record = run_record(cfg)
    saver = checkpointer
    if cfg.get("enable_async_checkpointing", False):
        saver = AsyncCheckpointer(checkpointer)
    trainer = Trainer(model, optimizer, batches, options, saver, weights, device, record)
    if resume:
        trainer.load_state_dict(state)
    schedule = make_schedule(cfg, optimizer, trainer.total_steps)

    logger = instantiate(cfg.metric_logger)
    try:
        checkpoint = trainer.train(schedule, logger)
    finally:
        logger.close()
    print(next_steps(checkpoint, cfg.checkpointer.checkpoint_dir, options.epochs))
