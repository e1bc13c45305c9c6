"""`tune convert` changes the format of a model and not one bit of it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from checkpointing.cli.main import main
from checkpointing.formats.detect import find_model
from checkpointing.formats.made_configs import params_for
from checkpointing.mapping.model_config import ModelConfig
from checkpointing.mapping.rope_scaling import Llama3RopeScaling, YarnRopeScaling
from checkpointing.storage.manifest import read_manifest
from tests.tiny import assert_same_tensors, random_native, write_hf
from tests.training.peers import config, hf_model, native_weights, tokens
from tests.training.tiny_tokenizer import write_tokenizer

SCALED = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
MODELS = {
    "untied": config(rope_theta=25000.0),
    "tied": config(tied=True),
    "scaled-rope": config(rope_scaling=SCALED, max_seq_len=131072),
    "mistral": config(family="mistral"),
}


def write_base(directory: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    write_hf(hf_model(model).to(dtype), directory)
    write_tokenizer(directory)
    return directory


def weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.inference_mode():
        return model(input_ids=tokens()).logits


def convert(source: Path, destination: Path, to: str, *more: str) -> int:
    return main(["convert", str(source), str(destination), "--to", to, *more])


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_hf_to_meta_and_back_gives_the_same_bits_and_transformers_the_same_logits(tmp_path, model):
    base = write_base(tmp_path / "base", model)
    family = ["--model-type", model.family] if model.family != "llama" else []
    assert convert(base, tmp_path / "meta", "meta") == 0
    assert convert(tmp_path / "meta", tmp_path / "hf", "hf", *family) == 0
    assert_same_tensors(weights(tmp_path / "hf"), weights(base))
    assert torch.equal(logits(tmp_path / "hf"), logits(base))
    made, own = (AutoConfig.from_pretrained(tmp_path / each) for each in ("hf", "base"))
    for key in ("rope_parameters", "rms_norm_eps", "sliding_window", "dtype", "eos_token_id"):
        assert getattr(made, key, None) == getattr(own, key, None), key


def test_the_meta_files_hold_metas_names_and_the_rows_in_metas_order(tmp_path):
    model = config(tied=True)
    base = write_base(tmp_path / "base", model)
    assert convert(base, tmp_path / "meta", "meta") == 0
    stored = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    native = native_weights(hf_model(model), model)
    assert torch.equal(
        stored["layers.1.attention.wq.weight"], native["layers.1.attn.q_proj.weight"]
    )
    assert torch.equal(stored["output.weight"], native["tok_embeddings.weight"])
    assert not (tmp_path / "meta" / "config.json").exists()
    assert (tmp_path / "meta" / "tokenizer.json").exists()
    assert read_manifest(tmp_path / "meta")["converted_from"]["format"] == "hf"


@pytest.mark.parametrize("size", ["5GB", "40kB"])
def test_hf_to_tune_and_back_gives_the_same_bits_and_config(tmp_path, size):
    model = config(attention_bias=True, mlp_bias=True)
    base = write_base(tmp_path / "base", model)
    assert convert(base, tmp_path / "tune", "tune", "--max-shard-size", size) == 0
    assert_same_tensors(weights(tmp_path / "tune"), native_weights(hf_model(model), model))
    assert convert(tmp_path / "tune", tmp_path / "hf", "hf", "--max-shard-size", size) == 0
    assert_same_tensors(weights(tmp_path / "hf"), weights(base))
    assert (len(list((tmp_path / "hf").glob("*.safetensors"))) > 1) == (size == "40kB")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        first, second = ((tmp_path / each / name).read_text() for each in ("base", "hf"))
        assert json.loads(first) == json.loads(second)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_family_that_meta_never_published_goes_to_tune_and_back_but_not_to_meta(
    tmp_path, capsys, family
):
    sizes = {"vocab_size": 131, "hidden_size": 42, "intermediate_size": 56, "head_dim": 14}
    counts = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    model_config = AutoConfig.for_model(family, **sizes, **counts, pad_token_id=0)
    base = write_hf(AutoModelForCausalLM.from_config(model_config), tmp_path / "base")
    assert convert(base, tmp_path / "tune", "tune") == 0
    assert convert(tmp_path / "tune", tmp_path / "hf", "hf") == 0
    assert_same_tensors(weights(tmp_path / "hf"), weights(base))
    assert torch.equal(logits(tmp_path / "hf"), logits(base))
    assert convert(base, tmp_path / "meta", "meta") == 1
    assert f"cannot hold this {family} model's architecture" in capsys.readouterr().err


def test_bfloat16_stays_bfloat16_through_all_formats(tmp_path):
    base = write_base(tmp_path / "base", config(), torch.bfloat16)
    for source, to in (("base", "meta"), ("meta", "tune"), ("tune", "hf")):
        assert convert(tmp_path / source, tmp_path / to, to) == 0
    assert_same_tensors(weights(tmp_path / "hf"), weights(base))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == (
        torch.bfloat16
    )


def test_token_ids_come_from_the_generation_config_and_are_else_null(tmp_path, capsys):
    base = write_base(tmp_path / "base", config())
    assert convert(base, tmp_path / "meta", "meta") == 0
    assert convert(tmp_path / "meta", tmp_path / "known", "hf") == 0
    assert json.loads((tmp_path / "known" / "config.json").read_text())["eos_token_id"] == 2
    (tmp_path / "meta" / "generation_config.json").unlink()
    (tmp_path / "meta" / "manifest.json").unlink()
    capsys.readouterr()
    assert convert(tmp_path / "meta", tmp_path / "unknown", "hf") == 0
    assert "null in config.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "unknown" / "config.json").read_text())["eos_token_id"] is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "unknown").config.eos_token_id is None


def metas_width(params: dict[str, Any]) -> int:
    """llama_models, ``FeedForward.__init__``: the width that Meta's code gives the layer."""
    width = int(2 * (4 * params["dim"]) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    return params["multiple_of"] * math.ceil(width / params["multiple_of"])


@pytest.mark.parametrize(
    ("hidden", "ffn"),
    [(4096, 11008), (4096, 14336), (2048, 8192), (8192, 28672), (576, 1536), (42, 56), (42, 3001)],
)
def test_params_json_gives_metas_code_the_right_feed_forward_width(hidden, ffn):
    assert metas_width(params_for(config(hidden=hidden, ffn=ffn), Path("model"))) == ffn


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (config(attention_bias=True), "attention_bias"),
        (config(mlp_bias=True), "mlp_bias"),
        (config(family="mistral", sliding_window=9), "sliding_window (9)"),
        (config(rope_scaling=replace(SCALED, high_freq_factor=3.0)), "high_freq_factor"),
        (config(rope_scaling=YarnRopeScaling(4.0, 128)), "rope scaling yarn"),
    ],
)
def test_a_model_that_metas_format_cannot_hold_is_refused_by_the_features_name(
    tmp_path, capsys, model, named
):
    base = write_base(tmp_path / "base", model)
    assert convert(base, tmp_path / "meta", "meta") == 1
    assert named in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys):
    base = write_base(tmp_path / "base", config())
    assert convert(base, tmp_path / "meta", "meta", "--dry-run") == 0
    printed = capsys.readouterr().out
    total = sum(tensor.nbytes for tensor in weights(base).values())
    assert f"30 tensors, {total / 1000:.1f} kB, in 1 file" in printed
    assert "tok_embeddings.weight" in printed and "output.weight" in printed
    assert "consolidated.00.pth, params.json" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_nothing_is_overwritten_unless_it_is_asked_for_and_was_written_by_tune(tmp_path, capsys):
    base, out = write_base(tmp_path / "base", config()), tmp_path / "out"
    assert convert(base, out, "tune") == 0
    assert convert(base, out, "hf") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert find_model(out).format.name == "tune"
    assert convert(base, out, "hf", "--overwrite") == 0
    assert find_model(out).format.name == "hf"

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    assert convert(base, tmp_path / "home", "hf", "--overwrite") == 1
    assert "was not written by `tune`" in capsys.readouterr().err
    assert (tmp_path / "home" / "thesis.txt").exists()


@pytest.mark.parametrize("inner", ["base", "base/hf", "."])
def test_source_and_destination_may_not_lie_in_each_other(tmp_path, capsys, inner):
    base = write_base(tmp_path / "base", config())
    assert convert(base, tmp_path / inner, "hf", "--overwrite") == 1
    assert "lie in each other" in capsys.readouterr().err


def test_names_of_tensors_decide_where_file_names_do_not(tmp_path):
    native = random_native(config())
    hf = hf_model(config()).state_dict()
    for name, tensors in (("native", native), ("foreign", hf)):
        (tmp_path / name).mkdir()
        torch.save(dict(tensors), tmp_path / name / "model-00001-of-00001.bin")
        (tmp_path / f"{name}-single").mkdir()
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        save_file(tensors, tmp_path / f"{name}-single" / "model.safetensors")
    for single in ("", "-single"):
        assert find_model(tmp_path / f"native{single}").format.name == "tune"
        assert find_model(tmp_path / f"foreign{single}").format.name == "hf"


def test_native_weights_without_a_config_can_not_change_their_format(tmp_path, capsys):
    (tmp_path / "native").mkdir()
    torch.save(random_native(config()), tmp_path / "native" / "model.pt")
    assert convert(tmp_path / "native", tmp_path / "out", "hf") == 1
    assert "neither config.json nor params.json" in capsys.readouterr().err


def test_a_directory_without_a_model_is_told_apart_from_one_with_checkpoints(tmp_path, capsys):
    base = write_base(tmp_path / "base", config())
    assert convert(base, tmp_path / "runs" / "epoch_0", "hf") == 0
    assert convert(tmp_path / "runs", tmp_path / "out", "hf") == 1
    assert "checkpoints: epoch_0" in capsys.readouterr().err
    assert convert(tmp_path / "nowhere", tmp_path / "out", "hf") == 1
    assert "no such directory" in capsys.readouterr().err
