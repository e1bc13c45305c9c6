"""LoRA or DoRA fine-tuning on one device: the base is frozen, only the adapter is trained.

Copy this file, change it, and run it by its path. It reads top to bottom.
"""

from typing import Any

from omegaconf import DictConfig

from checkpointing import AsyncCheckpointer
from checkpointing.adapters import MergedStateDict
from checkpointing.nf4 import dequantized
from checkpointing.training import (
    BatchLoader,
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
    }
)


def main(cfg: DictConfig) -> None:
    """Fine-tunes as the config says and prints where the result lies."""
    require(
        cfg, "model", "checkpointer", "tokenizer", "dataset", "optimizer", "metric_logger", "epochs"
    )
    device = get_device(cfg.get("device", "cpu"))
    dtype = get_dtype(cfg.get("dtype", "fp32"))
    resume = cfg.get("resume_from_checkpoint", False)

    # The checkpoint: its weights, its config, and when resuming all else that the run needs.
    checkpointer = instantiate(cfg.checkpointer, should_load_recipe_state=resume)
    state = checkpointer.load_checkpoint()
    seed = get_seed(cfg, state)
    set_seed(seed)

    # The data.
    tokenizer = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, tokenizer)
    batches = BatchLoader(dataset, cfg.get("batch_size", 1), cfg.get("shuffle", True), seed)
    if resume:
        check_resume(cfg, state, batches)

    # The model. The base is never written to, so that it may share the checkpoint's memory.
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
    if cfg.get("compile", False):
        for layer in model.layers:
            layer.compile()

    options = training_options(cfg, seed)

    # What a checkpoint holds besides the state of the loop. The merged model is computed tensor
    # by tensor while it is written; neither the base nor the adapter is changed.
    def weights() -> dict[str, Any]:
        adapter = adapter_state_dict(model)
        entries: dict[str, Any] = {
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
            "quantized_base": None if rounding is None else rounding.to_state(),
        }
        if not options.save_adapter_weights_only:
            base = dequantized(base_state_dict(model))
            entries["model"] = MergedStateDict(base, adapter, adapter_config)
        return entries

    optimizer = instantiate(cfg.optimizer, [p for p in model.parameters() if p.requires_grad])
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
