"""`tune convert` of adapters: native to PEFT's form and back."""

import json
import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpointing import AdapterConfig, FullModelHFCheckpointer
from checkpointing.cli.main import main
from checkpointing.nf4 import NF4Rounding
from checkpointing.storage.manifest import read_manifest
from tests.adapters.test_peft_in import files, save_peft
from tests.cli.test_convert import convert, write_base
from tests.tiny import assert_same_tensors, random_adapter
from tests.training.peers import config, tokens

MODEL = config(attention_bias=True, mlp_bias=True)
PATTERNS = {"use_rslora": True, "rank_pattern": {"down_proj": 7}, "alpha_pattern": {"q_proj": 3}}
ALL_KINDS = {
    "target_modules": ["q_proj", "o_proj", "down_proj"],
    "modules_to_save": ["norm", "lm_head"],
    "lora_bias": True,
    **PATTERNS,
}


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base", MODEL)


def run_checkpoint(base, out, adapter_config, **more):
    """A checkpoint of an adapter run, without a merged model."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    state = {
        "adapter": random_adapter(MODEL.dims, adapter_config),
        "adapter_config": adapter_config.to_state(),
        **more,
    }
    return checkpointer.save_checkpoint(state, epoch=0, adapter_only=True)


def logits(base, adapter):
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        return model.double().eval()(tokens()).logits


@pytest.mark.parametrize("settings", [ALL_KINDS, {"target_modules": ["v_proj"], **PATTERNS}])
def test_a_peft_adapter_goes_to_native_and_back_bit_for_bit(tmp_path, base, settings):
    peer = save_peft(tmp_path / "peft", MODEL, **settings)
    assert convert(tmp_path / "peft", tmp_path / "native", "tune", "--base", str(base)) == 0
    stored = torch.load(tmp_path / "native" / "adapter_model.pt", weights_only=True)
    assert {".lora_a." in name or ".lora_b." in name for name in stored} == (
        {True, False} if "modules_to_save" in settings else {True}
    )
    manifest = read_manifest(tmp_path / "native")
    assert manifest["base"]["directory"] == str(base)
    assert manifest["adapter_config"]["use_rslora"] is True
    # The base is found through the manifest.
    assert convert(tmp_path / "native", tmp_path / "back", "peft", "--adapter-form", "exact") == 0
    tensors, back_config = files(tmp_path / "back")
    assert_same_tensors(tensors, files(tmp_path / "peft")[0])
    assert back_config["base_model_name_or_path"] == str(base)
    with torch.no_grad():
        expected = peer.double()(tokens()).logits
    assert (logits(base, tmp_path / "back") - expected).abs().max() < 1e-5


def test_a_checkpoint_of_a_run_is_written_in_either_form_and_computes_the_same(tmp_path, base):
    adapter_config = AdapterConfig(
        4, 6, ("q_proj", "w2"), use_rslora=True, rank_pattern={"layers.1.mlp.w2": 7}
    )
    saved = run_checkpoint(base, tmp_path / "run", adapter_config)
    assert convert(saved, tmp_path / "portable", "peft") == 0
    file = saved / "adapter_model.pt"
    assert convert(file, tmp_path / "exact", "peft", "--adapter-form", "exact") == 0
    portable, exact = (files(tmp_path / form)[1] for form in ("portable", "exact"))
    assert (portable["r"], portable["use_rslora"], portable["rank_pattern"]) == (7, False, {})
    assert (exact["r"], exact["use_rslora"]) == (4, True)
    assert exact["rank_pattern"] == {"model.layers.1.mlp.down_proj": 7}
    expected = logits(base, saved)
    for directory in ("portable", "exact"):
        assert (logits(base, tmp_path / directory) - expected).abs().max() < 1e-5
    assert not (tmp_path / "exact" / "config.json").exists()
    assert (tmp_path / "exact" / "tokenizer.json").exists()
    assert read_manifest(tmp_path / "exact")["converted_from"]["format"] == "tune"


def test_the_native_form_is_where_a_run_starts_and_tune_merge_too(tmp_path, base, capsys):
    save_peft(tmp_path / "peft", MODEL, **ALL_KINDS)
    assert convert(tmp_path / "peft", tmp_path / "native", "tune", "--base", str(base)) == 0
    for start in ("peft", "native"):
        state = FullModelHFCheckpointer(base, adapter_checkpoint=tmp_path / start).load_checkpoint()
        if start == "peft":
            expected = state
    assert_same_tensors(state["adapter"], expected["adapter"])
    assert state["adapter_config"] == expected["adapter_config"]
    capsys.readouterr()
    assert main(["merge", str(base), str(tmp_path / "native"), str(tmp_path / "merged")]) == 0
    assert "trained whole take the place of the base's: sa_norm, " in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").double().eval()
    with torch.no_grad():
        difference = merged(tokens()).logits - logits(base, tmp_path / "peft")
    assert difference.abs().max() < 1e-4


def test_the_base_may_be_in_metas_format_and_keeps_the_name_of_its_repository(tmp_path):
    model = config()
    base = write_base(tmp_path / "base", model)
    assert convert(base, tmp_path / "meta", "meta") == 0
    save_peft(tmp_path / "peft", model, target_modules=["q_proj", "k_proj", "v_proj"])
    file = tmp_path / "peft" / "adapter_config.json"
    told = {**json.loads(file.read_text()), "base_model_name_or_path": "someone/model"}
    file.write_text(json.dumps(told))
    meta = str(tmp_path / "meta")
    assert convert(tmp_path / "peft", tmp_path / "out", "peft", "--base", meta) == 0
    tensors, peft_config = files(tmp_path / "out")
    assert_same_tensors(tensors, files(tmp_path / "peft")[0])
    assert peft_config["base_model_name_or_path"] == "someone/model"


def test_without_its_base_an_adapter_is_not_converted(tmp_path, base, capsys):
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    save_peft(tmp_path / "peft", MODEL, target_modules=["q_proj"])
    base.rename(tmp_path / "moved")
    assert convert(saved, tmp_path / "out", "peft") == 1
    assert f"it says {base}, which is not here; give its directory with --base" in (
        capsys.readouterr().err
    )
    assert convert(tmp_path / "peft", tmp_path / "out", "tune") == 1
    assert "give its directory with --base" in capsys.readouterr().err
    assert convert(saved, tmp_path / "out", "peft", "--base", str(tmp_path / "moved")) == 0


def test_another_base_of_the_same_shape_is_refused(tmp_path, base, capsys):
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    other = write_base(tmp_path / "other", MODEL, torch.bfloat16)
    assert convert(saved, tmp_path / "out", "peft", "--base", str(other)) == 1
    assert "was trained on another base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_only_peft_reads_is_noted_and_so_is_a_base_in_nf4(tmp_path, base, capsys):
    rounding = {"quantized_base": NF4Rounding(torch.bfloat16).to_state()}
    dora = AdapterConfig(4, 6, ("q_proj",), use_dora=True)
    saved = run_checkpoint(base, tmp_path / "run", dora, **rounding)
    assert convert(saved, tmp_path / "out", "peft") == 0
    printed = capsys.readouterr().out
    assert "note: the adapter has DoRA, which no inference engine serves" in printed
    assert "note: the adapter was trained on the base rounded to NF4" in printed


def test_a_dry_run_of_an_adapter_shows_the_plan_and_writes_nothing(tmp_path, base, capsys):
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    assert convert(saved, tmp_path / "out", "peft", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "18 tensors" in printed, "q, k and v are named together for engines"
    assert "files: adapter_model.safetensors, adapter_config.json, " in printed
    assert not (tmp_path / "out").exists()


def test_options_of_adapters_are_refused_for_models_and_models_for_peft(tmp_path, base, capsys):
    assert convert(base, tmp_path / "out", "meta", "--base", str(base)) == 1
    assert "--base and --adapter-form are for adapters" in capsys.readouterr().err
    assert convert(base, tmp_path / "out", "peft") == 1
    assert "holds neither adapter_model.pt nor adapter_config.json" in capsys.readouterr().err
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    assert convert(saved, tmp_path / "out", "hf") == 1
    assert "merge it with `tune merge`" in capsys.readouterr().err


def test_a_native_file_without_a_manifest_does_not_tell_its_alpha(tmp_path, base, capsys):
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    (tmp_path / "alone").mkdir()
    shutil.copyfile(saved / "adapter_model.pt", tmp_path / "alone" / "adapter_model.pt")
    assert convert(tmp_path / "alone", tmp_path / "out", "peft", "--base", str(base)) == 1
    assert "tells the adapter's rank and alpha" in capsys.readouterr().err


def test_nothing_is_overwritten_unless_asked_for(tmp_path, base, capsys):
    saved = run_checkpoint(base, tmp_path / "run", AdapterConfig(4, 6, ("q_proj",)))
    assert convert(saved, tmp_path / "out", "peft") == 0
    assert convert(saved, tmp_path / "out", "tune") == 1
    assert "--overwrite" in capsys.readouterr().err
    assert convert(saved, tmp_path / "out", "tune", "--overwrite") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"adapter_model.pt"}
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert convert(saved, base / "inside", "peft") == 1
    assert "lie in each other" in capsys.readouterr().err
