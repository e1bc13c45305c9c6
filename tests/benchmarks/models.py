"""The checkpoints that are measured: a Llama of random weights, and an adapter on it.

Each is written when it is first asked for.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from checkpointing.convert import plan_conversion, write_model
from checkpointing.convert_adapter import plan_adapter_conversion, write_adapter
from tests.benchmarks.durable import sync_tree

RANK = 16
MODEL_TYPE = "LLAMA3_2"
_LLAMA_3_2_1B_BYTES = 2.47e9
_HEAD_DIM = 64


@dataclass(frozen=True)
class Size:
    """How large a bf16 model is; its head is its embedding."""

    hidden: int
    layers: int
    vocab: int

    @classmethod
    def of_gigabytes(cls, gigabytes: float) -> "Size":
        """Llama-3.2-1B's shape at 2.47 GB; fewer or more layers, or a smaller vocabulary, else."""
        hidden = 2048 if gigabytes >= 0.25 else 256
        share = min(1.0, gigabytes * 1e9 / _LLAMA_3_2_1B_BYTES)
        vocab = round(128256 * share) if hidden == 2048 else 2048
        empty = cls(hidden, 0, vocab)
        layers = round((gigabytes * 1e9 - empty.largest_bytes) / empty.layer_bytes)
        return replace(empty, layers=max(4, layers) if hidden == 256 else max(2, layers))

    @property
    def layer_bytes(self) -> int:
        """Of the linear modules of a layer."""
        key_value = self.hidden // 4
        rows = 2 * self.hidden + 2 * key_value + 3 * 4 * self.hidden
        return 2 * self.hidden * rows

    @property
    def largest_bytes(self) -> int:
        """Of the largest tensor, the embedding."""
        return 2 * self.hidden * max(self.vocab, 4 * self.hidden)

    @property
    def model_bytes(self) -> int:
        """Of all weights, but for the norms."""
        return 2 * self.hidden * self.vocab + self.layers * self.layer_bytes

    def to_config(self) -> LlamaConfig:
        """As transformers describes it."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // _HEAD_DIM,
            num_key_value_heads=self.hidden // _HEAD_DIM // 4,
            head_dim=_HEAD_DIM,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
            dtype=torch.bfloat16,
        )


class Checkpoints:
    """One model, in all formats, and an adapter on it.

    Args:
        directory: where they are written.
        size: how large the model is.
    """

    def __init__(self, directory: Path, size: Size) -> None:
        self.size = size
        self.directory = directory
        self._others: dict[int, Checkpoints] = {}

    def out(self, name: str) -> Path:
        """Where something is written that is measured."""
        return self.directory / "out" / name

    def with_layers(self, layers: int) -> "Checkpoints":
        """A model that is shorter or longer, beside this one."""
        if layers not in self._others:
            directory = self.directory / f"{layers}_layers"
            self._others[layers] = Checkpoints(directory, replace(self.size, layers=layers))
        return self._others[layers]

    @cached_property
    def base(self) -> Path:
        """The model as transformers writes it, in two files."""
        return _write_base(self.size.to_config(), self.directory / "base", _half(self.size))

    @cached_property
    def adapter(self) -> Path:
        """LoRA of rank 16 on every linear module, as PEFT writes it."""
        return _write_adapter(self.base, self.directory / "adapter")

    @cached_property
    def smollm2(self) -> Path:
        """A model of SmolLM2-135M's shape, whatever the size of the others."""
        return _write_base(_smollm2_config(), self.directory / "smollm2", "5GB")

    @cached_property
    def smollm2_adapter(self) -> Path:
        """LoRA of rank 16 on every linear module of it."""
        return _write_adapter(self.smollm2, self.directory / "smollm2_adapter")

    @cached_property
    def native_adapter(self) -> Path:
        """The adapter's file as torchtune has it."""
        directory = self.directory / "native_adapter"
        write_adapter(plan_adapter_conversion(self.adapter, "tune", self.base), directory)
        return directory / "adapter_model.pt"

    @cached_property
    def meta(self) -> Path:
        """The model in Meta's format."""
        return self._converted("meta")

    @cached_property
    def tune(self) -> Path:
        """The model in torchtune's format."""
        return self._converted("tune")

    def _converted(self, to: str) -> Path:
        directory = self.directory / to
        write_model(plan_conversion(self.base, to), directory)
        return directory


def _half(size: Size) -> int:
    """A limit that cuts the model into two files."""
    # The embedding comes first, then one layer after the other.
    return max(size.model_bytes * 11 // 20, size.largest_bytes + size.layer_bytes)


def _smollm2_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def _write_base(config: LlamaConfig, directory: Path, max_shard_size: int | str) -> Path:
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.tie_weights()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    sync_tree(directory)
    return directory


def _write_adapter(base: Path, directory: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    torch.manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    adapted.save_pretrained(directory)
    sync_tree(directory)
    return directory
