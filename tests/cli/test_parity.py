"""`tune parity` compares with transformers and PEFT, and tells rounding from a fault."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.cli.main import main
from tests.tiny import ATTENTION, MLP, random_adapter
from tests.training import peers
from tests.training.tiny_tokenizer import write_tokenizer

MODEL = peers.config(vocab=307)
ADAPTER = AdapterConfig(r=3, alpha=7.0, target_modules=ATTENTION + MLP)
ADAPTERS = {
    "LoRA": ADAPTER,
    "DoRA": replace(ADAPTER, use_dora=True),
    "rsLoRA": replace(ADAPTER, use_rslora=True),
}


def write_base(directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    peers.hf_model(MODEL).to(dtype).save_pretrained(directory)
    return write_tokenizer(directory)


def save_adapter(base: Path, out: Path, config: AdapterConfig, adapter_only: bool = False) -> Path:
    checkpointer = FullModelHFCheckpointer(base, output_dir=out)
    model = checkpointer.load_checkpoint()["model"]
    adapter = random_adapter(MODEL.dims, config)
    state = {
        "model": MergedStateDict(model, adapter, config),
        "adapter": adapter,
        "adapter_config": config.to_state(),
    }
    return checkpointer.save_checkpoint(state, 0, adapter_only=adapter_only, step=1)


def differences(printed: str) -> dict[str, float]:
    rows = re.findall(r"^  (\S.*?)  +(\d\.\de[-+]\d\d|nan|inf)  ", printed, re.MULTILINE)
    return {name: float(value) for name, value in rows}


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_an_adapter_gives_the_same_logits_in_peft_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: AdapterConfig
) -> None:
    checkpoint = save_adapter(write_base(tmp_path / "base"), tmp_path / "out", config)
    assert main(["parity", str(checkpoint)]) == 0
    found = differences(capsys.readouterr().out)
    assert set(found) == {"transformers + PEFT", "merged model in float32"}
    assert found["transformers + PEFT"] < 1e-5
    assert found["merged model in float32"] < 1e-4


def test_rounding_of_merged_weights_is_told_as_such_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base", torch.bfloat16)
    checkpoint = save_adapter(base, tmp_path / "out", ADAPTER)
    assert main(["parity", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    found = differences(printed)
    assert found["transformers + PEFT"] < 1e-5
    assert found["merged model in bfloat16"] > 1e-4
    assert "from rounding the merged weights to bfloat16" in printed


def test_an_adapter_without_a_merged_model_is_compared_with_peft_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    checkpoint = save_adapter(base, tmp_path / "out", ADAPTER, adapter_only=True)
    assert main(["parity", str(checkpoint)]) == 0
    assert set(differences(capsys.readouterr().out)) == {"transformers + PEFT"}


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_other_numbers_in_the_peft_file_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    checkpoint = save_adapter(write_base(tmp_path / "base"), tmp_path / "out", ADAPTER)
    file = checkpoint / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    # The header's length, the header, and then the tensors, all of them fp32.
    start = 8 + int.from_bytes(content[:8], "little")
    torch.frombuffer(content, dtype=torch.float32, offset=start).mul_(factor)
    file.write_bytes(content)
    assert main(["parity", str(checkpoint)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_checkpoint_without_an_adapter_is_compared_with_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", str(write_base(tmp_path / "model", torch.bfloat16))]) == 0
    found = differences(capsys.readouterr().out)
    assert set(found) == {"transformers"}
    assert found["transformers"] < 1e-5


def test_a_base_named_as_a_repository_is_found_where_the_run_had_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    (base / "original_repo_id.json").write_text('{"repo_id": "owner/model"}')
    checkpoint = save_adapter(base, tmp_path / "out", ADAPTER)
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/model"
    assert main(["parity", str(checkpoint)]) == 0


def test_a_base_that_moved_is_given_by_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    checkpoint = save_adapter(base, tmp_path / "out", ADAPTER)
    shutil.move(base, tmp_path / "moved")
    assert main(["parity", str(checkpoint)]) == 1
    shown = capsys.readouterr().err
    assert str(base) in shown
    assert "--base" in shown
    assert main(["parity", str(checkpoint), "--base", str(tmp_path / "moved")]) == 0


def test_a_directory_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", str(tmp_path / "epoch_7")]) == 1
    assert "epoch_7" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base")
    (base / "tokenizer.json").unlink()
    assert main(["parity", str(base)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
