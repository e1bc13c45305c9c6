"""torchtune's own recipes, with one line of their config changed to this project's checkpointer."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.peers.models import LLAMA3, hf_base
from tests.peers.states import ALPHA, RANK
from tests.tiny import assert_same_tensors

THEIRS = "torchtune.training.FullModelHFCheckpointer"
OURS = "checkpointing.FullModelHFCheckpointer"
LORA, FULL = "lora_finetune_single_device", "full_finetune_single_device"


def recipe_config(recipe, base, output_dir, checkpointer, **changed):
    """Two epochs of two steps, as torchtune's configs are written."""
    dims = LLAMA3.dims
    sizes = {
        "vocab_size": dims.vocab,
        "num_layers": dims.layers,
        "num_heads": dims.heads,
        "num_kv_heads": dims.kv_heads,
        "embed_dim": dims.hidden,
        "intermediate_dim": dims.ffn,
        "max_seq_len": 64,
        "rope_base": 10000,
    }
    lora = {
        "_component_": "torchtune.models.llama3.lora_llama3",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": True,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
    }
    full = {"_component_": "torchtune.models.llama3.llama3"}
    schedule = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 1,
    }
    return {
        "output_dir": str(output_dir),
        "model": {**(lora if recipe == LORA else full), **sizes},
        "checkpointer": {"_component_": checkpointer, **base.arguments(output_dir)},
        "resume_from_checkpoint": False,
        "tokenizer": {"_component_": "__main__.Tokens"},
        "dataset": {"_component_": "__main__.Rows", "vocab": dims.vocab, "count": 12},
        "shuffle": True,
        "seed": 5,
        "batch_size": 3,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
        "lr_scheduler": schedule if recipe == LORA else None,
        "optimizer_in_bwd": False,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "epochs": 2,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 2,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(Path(output_dir).with_suffix(".logs")),
        },
        "log_every_n_steps": 1,
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        **changed,
    }


def weights_in(directory):
    merged = directory / "merged"
    files = (merged if merged.is_dir() else directory).glob("model-*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("recipe", [LORA, FULL])
def test_a_recipe_saves_and_resumes_here_as_with_its_own_checkpointer(recipe, torchtune, tmp_path):
    base = hf_base(tmp_path / "base", LLAMA3)
    out = {THEIRS: tmp_path / "theirs", OURS: tmp_path / "ours"}

    def same_checkpoint(epoch):
        own, theirs = (out[name] / f"epoch_{epoch}" for name in (OURS, THEIRS))
        assert_same_tensors(weights_in(own), weights_in(theirs))
        if recipe == LORA:
            adapters = [
                torch.load(path / "adapter_model.pt", weights_only=True) for path in (own, theirs)
            ]
            assert_same_tensors(*adapters)
            name = "adapter_model.safetensors"
            assert_same_tensors(load_file(own / name), load_file(theirs / name))
        return weights_in(own)

    for checkpointer, directory in out.items():
        torchtune.run_recipe(recipe, recipe_config(recipe, base, directory, checkpointer))
    first, second = same_checkpoint(0), same_checkpoint(1)
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])

    for checkpointer, directory in out.items():
        shutil.rmtree(directory / "epoch_1")
        config = recipe_config(recipe, base, directory, checkpointer, resume_from_checkpoint=True)
        if recipe == FULL and checkpointer == THEIRS:
            # It resumes a full run from the files that are named, in output_dir.
            config["checkpointer"]["checkpoint_files"] = [f"epoch_0/{name}" for name in base.files]
        torchtune.run_recipe(recipe, config)
    resumed = same_checkpoint(1)
    assert not torch.equal(first["lm_head.weight"], resumed["lm_head.weight"])
