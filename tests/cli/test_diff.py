"""`tune diff` compares two models, or two adapters, in whatever formats they are."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpointing.cli.main import main
from tests.cli.test_convert import convert, write_base
from tests.cli.test_merge import ADAPTER, MODEL, save_adapter
from tests.training.peers import config


def write(directory: Path, tensors: dict[str, Tensor]) -> Path:
    """Native weights without a config, which can hold any tensors."""
    directory.mkdir()
    torch.save({"layers.0.attn.q_proj.weight": torch.ones(2, 3), **tensors}, directory / "model.pt")
    return directory


def diff(a: Path, b: Path, *more: str) -> int:
    return main(["diff", str(a), str(b), *more])


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_the_same_in_every_format(tmp_path, capsys, tied):
    base = write_base(tmp_path / "base", config(tied=tied), torch.bfloat16)
    for to in ("meta", "tune"):
        assert convert(base, tmp_path / to, to) == 0
    capsys.readouterr()
    assert diff(base, tmp_path / "meta") == 0
    assert f"same, bit for bit: {29 if tied else 30} of" in capsys.readouterr().out
    assert diff(tmp_path / "tune", tmp_path / "meta") == 0


def test_differences_are_named_measured_and_sorted(tmp_path, capsys):
    a = {
        "small": torch.tensor([3.0, 4.0]),
        "large": torch.tensor([0.0, 2.0]),
        "half": torch.tensor([1.0, 2.0]),
        "zero": torch.tensor([0.0]),
        "wide": torch.zeros(2, 5),
        "gone": torch.zeros(7),
        "same": torch.tensor([float("nan")]),
    }
    b = {
        "small": torch.tensor([3.0, 4.5]),
        "large": torch.tensor([3.0, -2.0]),
        "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
        "zero": torch.tensor([-0.0]),
        "wide": torch.zeros(5, 2),
        "new": torch.zeros(11),
        "same": torch.tensor([float("nan")]),
    }
    assert diff(write(tmp_path / "a", a), write(tmp_path / "b", b)) == 1
    printed = capsys.readouterr().out
    assert "same, bit for bit: 2 of 9 tensors" in printed
    assert re.search(r"only in A: 1 tensor\n  gone +\[7\] float32", printed)
    assert re.search(r"only in B: 1 tensor\n  new +\[11\] float32", printed)
    assert re.search(r"wide +\[2, 5\] float32 in A, \[5, 2\] float32 in B", printed)
    rows = re.findall(r"^  (\w+) +([\d.e-]+) +([\d.e-]+)(.*)$", printed, re.MULTILINE)
    # |A-B| = (3, 4), norm 5, over the norm 2; 0.5 over 5; and values that are equal.
    assert [row[:3] for row in rows[:2]] == [("large", "4", "2.5"), ("small", "0.5", "0.1")]
    assert {row[0] for row in rows[2:]} == {"half", "zero"}
    assert "float32 / float16" in printed


def test_a_value_that_is_not_a_number_comes_first(tmp_path, capsys):
    a = {"x": torch.tensor([1.0]), "y": torch.tensor([1.0])}
    b = {"x": torch.tensor([9.0]), "y": torch.tensor([float("nan")])}
    assert diff(write(tmp_path / "a", a), write(tmp_path / "b", b)) == 1
    printed = capsys.readouterr().out
    assert printed.index("  y  ") < printed.index("  x  ")
    assert "nan" in printed


def test_a_long_list_is_cut_unless_all_of_it_is_wanted(tmp_path, capsys):
    a = write(tmp_path / "a", {f"t{n}": torch.tensor([1.0]) for n in range(31)})
    b = write(tmp_path / "b", {f"t{n}": torch.tensor([2.0 + n]) for n in range(31)})
    assert diff(a, b) == 1
    printed = capsys.readouterr().out
    assert "11 more" in printed and "t30" in printed and "t1 " not in printed
    assert diff(a, b, "--all") == 1
    assert "t1 " in capsys.readouterr().out


def test_two_adapters_are_compared_with_each_other(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = save_adapter(base, tmp_path / "first", ADAPTER)
    second = save_adapter(base, tmp_path / "second", ADAPTER)
    assert diff(first, second) == 0
    assert "44 of 44 tensors" in capsys.readouterr().out


def settings(printed: str) -> dict[str, tuple[str, str]]:
    """The hyper-parameters that are printed as different, with their values in A and B."""
    table = printed.partition("other hyper-parameters")[2].partition("same, bit for bit")[0]
    rows = [re.split(r"  +", line.strip()) for line in table.splitlines()[2:]]
    return {name: (a, b) for name, a, b in rows}


def peft_copy(checkpoint: Path, directory: Path) -> Path:
    """The PEFT adapter of a checkpoint in a directory of its own."""
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(checkpoint / name, directory)
    return directory


def write_peft(base: Path, directory: Path, **changes: object) -> Path:
    """An adapter that PEFT has made and saved."""
    torch.manual_seed(3)
    options = {"r": 5, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **changes}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_adapters_of_equal_tensors_and_another_alpha_are_not_the_same(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = save_adapter(base, tmp_path / "first", ADAPTER)
    other = replace(
        ADAPTER, alpha=11.0, use_rslora=True, dropout=0.25, alpha_pattern={"layers.1.mlp.w2": 13.0}
    )
    second = save_adapter(base, tmp_path / "second", other)
    assert diff(first, second) == 1
    printed = capsys.readouterr().out
    assert "44 of 44 tensors" in printed
    assert settings(printed) == {
        "lora_alpha": ("6.0", "11.0"),
        "lora_dropout": ("0.0", "0.25"),
        "use_rslora": ("false", "true"),
        "alpha_pattern[layers.1.mlp.w2]": ("null", "13.0"),
    }


def test_adapters_of_other_ranks_and_targets_differ_in_shapes_and_names(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = save_adapter(base, tmp_path / "first", ADAPTER)
    other = replace(ADAPTER, target_modules=("w2", "q_proj"), rank_pattern={"layers.0.mlp.w2": 3})
    second = save_adapter(base, tmp_path / "second", other)
    assert diff(first, second) == 1
    printed = capsys.readouterr().out
    assert settings(printed) == {
        "target_modules": (json.dumps(sorted(ADAPTER.target_modules)), '["q_proj", "w2"]'),
        "rank_pattern[layers.0.mlp.w2]": ("null", "3"),
    }
    assert "only in A: 32 tensors" in printed
    assert "other shape: 2 tensors" in printed
    assert re.search(
        r"layers\.0\.mlp\.w2\.lora_a\.weight +\[4, 56\] float32 in A, \[3, 56\]", printed
    )


def test_a_native_adapter_and_its_peft_form_are_the_same_given_the_base(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    native = save_adapter(base, tmp_path / "run", ADAPTER)
    foreign = peft_copy(native, tmp_path / "peft")
    for a, b in ((native, foreign), (foreign, native)):
        assert diff(a, b) == 0
        assert "44 of 44 tensors" in capsys.readouterr().out
    shutil.move(base, tmp_path / "moved")
    assert diff(native, foreign) == 1
    error = capsys.readouterr().err
    assert str(base) in error and "--base" in error
    assert diff(native, foreign, "--base", str(tmp_path / "moved")) == 0
    edit_config(foreign, lora_alpha=17, base_model_name_or_path=None)
    assert diff(native, foreign, "--base", str(tmp_path / "moved")) == 1
    assert settings(capsys.readouterr().out) == {"lora_alpha": ("6.0", "17.0")}


def test_peft_adapters_keep_their_names_unless_the_base_is_given(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = write_peft(base, tmp_path / "first")
    second = shutil.copytree(first, tmp_path / "second")
    edit_config(second, target_modules=["down_proj", "q_proj"], base_model_name_or_path="a/b")
    assert diff(first, second) == 0
    assert "12 of 12 tensors" in capsys.readouterr().out
    tensors = load_file(second / "adapter_model.safetensors")
    # The keys of a trainer that saved its own state.
    renamed = {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}
    save_file(renamed, second / "adapter_model.safetensors")
    assert diff(first, second) == 1
    printed = capsys.readouterr().out
    assert "only in A: 12 tensors" in printed and "--base" in printed
    assert diff(first, second, "--base", str(base)) == 0
    name = next(name for name in renamed if "layers.1.mlp.down_proj.lora_B" in name)
    save_file(renamed | {name: renamed[name] * 1.5}, second / "adapter_model.safetensors")
    assert diff(first, second, "--base", str(base)) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^  layers\.1\.mlp\.w2\.lora_b\.weight +[\d.]+ +0\.5$", printed, re.MULTILINE)


def test_settings_of_peft_adapters_differ_by_the_names_in_their_files(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = write_peft(base, tmp_path / "first")
    second = write_peft(base, tmp_path / "second", lora_alpha=9, use_rslora=True)
    assert diff(first, second) == 1
    printed = capsys.readouterr().out
    assert "12 of 12 tensors" in printed
    assert settings(printed) == {"lora_alpha": ("7", "9"), "use_rslora": ("false", "true")}


def test_adapters_of_two_bases_are_not_the_same(tmp_path, capsys):
    bases = [write_base(tmp_path / each, MODEL) for each in ("one", "two")]
    path = bases[1] / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 0.5
    tensors["model.embed_tokens.weight"] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    first, second = (save_adapter(base, tmp_path / f"run_{base.name}", ADAPTER) for base in bases)
    assert diff(first, second) == 1
    printed = capsys.readouterr().out
    assert "44 of 44 tensors" in printed
    assert list(settings(printed)) == ["base"]
    assert str(bases[0]) in printed and str(bases[1]) in printed


def test_an_adapter_of_unknown_alpha_is_compared_by_its_tensors(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    first = save_adapter(base, tmp_path / "run", ADAPTER)
    (tmp_path / "bare").mkdir()
    shutil.copy(first / "adapter_model.pt", tmp_path / "bare")
    assert diff(first, tmp_path / "bare") == 0
    printed = capsys.readouterr().out
    assert "44 of 44 tensors" in printed
    assert re.search(r"note: .*bare.*rank and alpha are not known", printed)


def test_a_model_and_an_adapter_are_refused(tmp_path, capsys):
    base = write_base(tmp_path / "base", MODEL)
    adapter = save_adapter(base, tmp_path / "run", ADAPTER)
    for a, b in ((base, adapter), (adapter, base)):
        assert diff(a, b) == 1
        error = capsys.readouterr().err
        assert f"{base} holds a model and {adapter} an adapter" in error
        assert "tune merge" in error
