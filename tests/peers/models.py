"""Tiny models as torchtune takes them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import checkpointing
from checkpointing.mapping.model_config import Dims, ModelConfig
from tests.peers.torchtune_process import Torchtune
from tests.tiny import random_native

HF, META, TUNE = (
    "FullModelHFCheckpointer",
    "FullModelMetaCheckpointer",
    "FullModelTorchTuneCheckpointer",
)


@dataclass(frozen=True)
class TinyModel:
    """Sizes, and the names by which the model goes."""

    model_type: str
    hf_type: str
    dims: Dims

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(self.hf_type, self.dims, 1e-5, 1e4, None, 64)

    def transformers_model(self, dtype: torch.dtype) -> nn.Module:
        """A model of transformers; no weight has the value that it would be initialised to."""
        dims = self.dims
        config = AutoConfig.for_model(
            self.hf_type,
            vocab_size=dims.vocab,
            hidden_size=dims.hidden,
            intermediate_size=dims.ffn,
            num_hidden_layers=dims.layers,
            num_attention_heads=dims.heads,
            num_key_value_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            tie_word_embeddings=dims.tied,
            max_position_embeddings=self.config.max_seq_len,
            rms_norm_eps=self.config.norm_eps,
        )
        generator = torch.Generator().manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0.0, 0.3, generator=generator)
        return model.to(dtype)


def _llama(model_type: str, **changed: Any) -> TinyModel:
    sizes = {"layers": 3, "vocab": 131, "hidden": 48, "ffn": 76, "heads": 6, "kv_heads": 2}
    return TinyModel(model_type, "llama", Dims(**{**sizes, "head_dim": 8, **changed}))


LLAMA2 = _llama("LLAMA2", kv_heads=6)
LLAMA3 = _llama("LLAMA3")
LLAMA3_2 = _llama("LLAMA3_2", tied=True)
WIDE_HEADS = _llama("LLAMA3", head_dim=10)
MISTRAL = TinyModel(
    "MISTRAL",
    "mistral",
    Dims(layers=2, vocab=137, hidden=40, ffn=92, heads=4, kv_heads=1, head_dim=14),
)
MODELS = {
    "Llama 2": LLAMA2,
    "Llama 3": LLAMA3,
    "Llama 3.2, tied": LLAMA3_2,
    "Llama with wide heads": WIDE_HEADS,
    "Mistral": MISTRAL,
}


@dataclass(frozen=True)
class Base:
    """A model on disk, as torchtune's checkpointers take it."""

    directory: Path
    files: list[str]
    model: TinyModel

    def arguments(self, output_dir: Path, **more: Any) -> dict[str, Any]:
        """A checkpointer's arguments, torchtune's and this project's alike."""
        return {
            "checkpoint_dir": str(self.directory),
            "checkpoint_files": self.files,
            "model_type": self.model.model_type,
            "output_dir": str(output_dir),
            **more,
        }


def hf_base(directory: Path, model: TinyModel, dtype: torch.dtype = torch.float32) -> Base:
    """Two shards that transformers wrote."""
    made = model.transformers_model(dtype)
    nbytes = sum(weight.nbytes for weight in made.parameters())
    made.save_pretrained(directory, max_shard_size=int(0.7 * nbytes))
    files = [path.name for path in sorted(directory.glob("model-*.safetensors"))]
    assert len(files) == 2
    return Base(directory, files, model)


def meta_base(directory: Path, model: TinyModel, weights: dict[str, Tensor]) -> Base:
    """A directory as Meta's releases are, of weights that have Meta's names."""
    directory.mkdir(parents=True)
    dims = model.dims
    params = {
        "dim": dims.hidden,
        "n_layers": dims.layers,
        "n_heads": dims.heads,
        "n_kv_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab,
        "norm_eps": model.config.norm_eps,
        "rope_theta": model.config.rope_theta,
    }
    (directory / "params.json").write_text(json.dumps(params))
    torch.save(weights, directory / "consolidated.00.pth")
    return Base(directory, ["consolidated.00.pth"], model)


def tune_base(directory: Path, model: TinyModel, weights: dict[str, Tensor]) -> Base:
    """Native weights without any config, as torchtune itself asks for none."""
    directory.mkdir(parents=True)
    torch.save(weights, directory / "native.pt")
    return Base(directory, ["native.pt"], model)


def base_for(
    checkpointer: str,
    directory: Path,
    model: TinyModel,
    torchtune: Torchtune,
    dtype: torch.dtype = torch.float32,
) -> Base:
    """A base in the format of a checkpointer; its weights are not those of ``random_native``."""
    if checkpointer == HF:
        return hf_base(directory, model, dtype)
    weights = {name: -weight for name, weight in random_native(model.config, dtype).items()}
    if checkpointer == TUNE:
        return tune_base(directory, model, weights)
    if model.dims.tied:
        # Meta's releases store the head, also where it is the embedding.
        weights["output.weight"] = weights["tok_embeddings.weight"].clone()
    return meta_base(directory, model, torchtune.to_meta(weights))


def ours(checkpointer: str, *arguments: Any, **named: Any) -> Any:
    """This project's class of the same name."""
    return getattr(checkpointing, checkpointer)(*arguments, **named)


def weight_files(directory: Path) -> list[str]:
    """The names of the files that hold a model's weights."""
    return [
        path.name
        for path in sorted(directory.iterdir())
        if path.suffix in {".safetensors", ".bin", ".pth", ".pt"}
        and not path.name.startswith(("adapter_model", "recipe_state"))
    ]
