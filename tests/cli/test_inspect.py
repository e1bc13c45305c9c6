"""`tune inspect` tells what a directory holds."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from checkpointing.cli.main import main
from tests.adapters.test_peft_in import save_peft
from tests.cli.test_convert import convert, weights, write_base
from tests.cli.test_merge import ADAPTER, MODEL, save_adapter
from tests.tiny import random_adapter
from tests.training.peers import DIMS, config, hf_model, native_weights


def inspect_json(capsys, *arguments):
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def row(printed: str, key: str) -> str:
    return re.search(rf"^  {key}  +(.*)$", printed, re.MULTILINE)[1]


@pytest.mark.parametrize("format", ["hf", "meta", "tune"])
def test_a_model_is_described_alike_in_every_format(tmp_path, capsys, format):
    base = write_base(tmp_path / "base", config(tied=True), torch.bfloat16)
    assert convert(base, tmp_path / "model", format) == 0
    model = inspect_json(capsys, tmp_path / "model")["model"]
    assert model["format"] == format
    assert model["family"] == "llama"
    assert model["dims"]["tied"] is True
    sizes = {key: model["dims"][key] for key in ("layers", "vocab", "hidden", "ffn", "head_dim")}
    assert sizes == {key: getattr(DIMS, key) for key in sizes}
    # Meta stores the tied head a second time.
    copies = [weights(base)["model.embed_tokens.weight"]] if format == "meta" else []
    stored = [*weights(base).values(), *copies]
    assert model["tensors"] == len(stored)
    assert model["bytes"] == sum(tensor.nbytes for tensor in stored)
    assert model["bytes_by_dtype"] == {"bfloat16": model["bytes"]}
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "model")]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "format") == format
    assert row(printed, "tied") == "yes"
    assert "layers 3, vocab 131, hidden 42, ffn 56" in row(printed, "sizes")


def test_a_model_of_an_unknown_family_still_has_its_tensors_counted(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(content | {"model_type": "xyzzy"}))
    model = inspect_json(capsys, base)["model"]
    assert model["family"] is None
    assert "xyzzy" in model["problem"]
    assert model["tensors"] == len(weights(base))


def test_an_adapter_is_described_with_its_rank_scale_and_checkpoint(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    adapter_config = replace(ADAPTER, use_dora=True, use_rslora=True, alpha=6.0)
    checkpoint = save_adapter(base, tmp_path / "run", adapter_config)
    facts = inspect_json(capsys, checkpoint)
    adapter = facts["adapter"]
    assert facts["model"] is None
    assert (adapter["kind"], adapter["rank"], adapter["alpha"]) == ("rsDoRA", 4, 6.0)
    assert adapter["scale"] == 3.0
    assert adapter["targets"] == list(ADAPTER.target_modules)
    assert adapter["base"] == str(base)
    assert (facts["checkpoint"]["step"], facts["checkpoint"]["epoch"]) == (17, 2)


def test_the_relative_update_is_the_norm_of_the_update_over_that_of_the_weight(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    updates = inspect_json(capsys, save_adapter(base, tmp_path / "run", ADAPTER))["adapter"][
        "relative_updates"
    ]
    adapter, native = random_adapter(DIMS, ADAPTER), native_weights(hf_model(MODEL), MODEL)
    assert len(updates) == 3 * 7 + 1
    for module, value in updates.items():
        a, b = (adapter[f"{module}.lora_{each}.weight"].double() for each in "ab")
        expected = 6 / 4 * torch.linalg.norm(b @ a) / torch.linalg.norm(native[f"{module}.weight"])
        assert value == pytest.approx(expected.item(), rel=1e-5)


def test_a_base_that_has_moved_is_named_with_base(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    checkpoint = save_adapter(base, tmp_path / "run", ADAPTER)
    shutil.move(base, tmp_path / "moved")
    assert main(["inspect", str(checkpoint)]) == 0
    assert "give it with --base" in capsys.readouterr().out
    assert main(["inspect", str(checkpoint), "--base", str(tmp_path / "moved")]) == 0
    assert "‖U‖/‖W‖" in capsys.readouterr().out


def test_a_peft_directory_is_described_with_its_base_and_without(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=5, lora_alpha=7, target_modules=["q_proj", "down_proj"], use_rslora=True),
    )
    model.save_pretrained(tmp_path / "peft")
    torch.save({"lr": 0.1}, tmp_path / "peft" / "training_args.bin")
    adapter = inspect_json(capsys, tmp_path / "peft")["adapter"]
    assert (adapter["kind"], adapter["rank"], adapter["alpha"]) == ("rsLoRA", 5, 7)
    assert adapter["targets"] == ["q_proj", "w2"]
    # PEFT starts with B = 0.
    assert list(adapter["relative_updates"].values()) == [0.0] * 6
    shutil.move(base, tmp_path / "moved")
    adapter = inspect_json(capsys, tmp_path / "peft")["adapter"]
    assert adapter["relative_updates"] is None
    assert (adapter["rank"], adapter["tensors"]) == (5, 12)
    assert set(adapter["targets"]) == {"q_proj", "down_proj"}
    assert main(["diff", str(tmp_path / "peft"), str(tmp_path / "peft")]) == 0
    assert "12 of 12" in capsys.readouterr().out


def test_an_empty_directory_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "holds no model" in capsys.readouterr().err


def test_an_adapter_with_whole_modules_and_a_bias_that_cannot_be_merged_is_shown(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    settings = {"modules_to_save": ["norm"], "lora_bias": True}
    save_peft(tmp_path / "peft", MODEL, target_modules=["q_proj", "down_proj"], **settings)
    assert main(["inspect", str(tmp_path / "peft"), "--base", str(base)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"trained whole +sa_norm, mlp_norm, norm\n", printed)
    assert re.search(r"bias of B +yes\n", printed)
    assert "mlp.w2" in printed, "the picture of the updates"
