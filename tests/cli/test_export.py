"""`tune export` gives servers and directories what computes the same as the checkpoint."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from checkpointing import AdapterConfig
from checkpointing.cli.main import main
from checkpointing.storage.manifest import read_manifest
from tests.cli.test_convert import logits, weights, write_base
from tests.cli.test_merge import save_adapter
from tests.export.sglang_server import MODEL, sglang_server
from tests.tiny import ATTENTION, MLP, assert_same_tensors, random_adapter
from tests.training.peers import config, tokens

ADAPTER = AdapterConfig(r=4, alpha=6.0, target_modules=(*ATTENTION, *MLP))


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base", config())


@pytest.fixture
def adapter(tmp_path, base):
    return save_adapter(base, tmp_path / "run", ADAPTER)


def export(*arguments):
    return main(["export", *map(str, arguments)])


def failed(capsys, *arguments):
    assert export(*arguments) == 1
    shown = capsys.readouterr().err
    assert "error: " in shown
    return shown


def adapted_logits(base, adapter):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        return model.eval()(tokens()).logits


def test_an_adapter_and_the_merged_model_compute_the_same(tmp_path, base, adapter, capsys):
    assert export(adapter, "--to", "dir", "--out", tmp_path / "adapter") == 0
    assert re.search(r"wrote .*/adapter \(adapter of rank 4, ", capsys.readouterr().out)
    assert export(adapter, "--to", "dir", "--out", tmp_path / "merged", "--merged") == 0
    assert "left of the update" in capsys.readouterr().out
    expected = adapted_logits(base, adapter)
    torch.testing.assert_close(adapted_logits(base, tmp_path / "adapter"), expected)
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)
    assert (expected - logits(base)).abs().max() > 0.01
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    for name in ("adapter", "merged"):
        assert read_manifest(tmp_path / name)


def test_base_and_adapter_may_be_given_and_lie_elsewhere(tmp_path, base, adapter):
    expected = adapted_logits(base, adapter)
    assert main(["convert", str(base), str(tmp_path / "meta"), "--to", "meta"]) == 0
    base.rename(tmp_path / "moved")
    common = (tmp_path / "meta", adapter, "--to", "dir", "--out")
    assert export(*common, tmp_path / "adapter") == 0
    assert export(*common, tmp_path / "merged", "--merged") == 0
    found = adapted_logits(tmp_path / "moved", tmp_path / "adapter")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_an_adapter_is_written_bit_for_bit(tmp_path, base):
    assert main(["convert", str(base), str(tmp_path / "meta"), "--to", "meta"]) == 0
    assert export(tmp_path / "meta", "--to", "dir", "--out", tmp_path / "out") == 0
    assert_same_tensors(weights(tmp_path / "out"), weights(base))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base))


def test_what_no_engine_serves_can_be_written_merged(tmp_path, base, capsys):
    dora = save_adapter(base, tmp_path / "dora", replace(ADAPTER, use_dora=True))
    shown = failed(capsys, dora, "--to", "dir", "--out", tmp_path / "out")
    assert "DoRA, which no inference engine serves" in shown and "--merged" in shown
    assert not (tmp_path / "out").exists()
    assert export(dora, "--to", "dir", "--out", tmp_path / "out", "--merged") == 0
    expected = adapted_logits(base, dora)
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)


def test_a_base_that_is_not_here_is_asked_for(tmp_path, base, adapter, capsys):
    base.rename(tmp_path / "moved")
    for to in (["dir", "--out", tmp_path / "out"], ["vllm", "--url", "http://127.0.0.1:9"]):
        shown = failed(capsys, adapter, "--to", *to)
        assert f"says {base}, which is not here" in shown
        assert f"tune export BASE {adapter} --to {to[0]}" in shown


WRONG = {
    "no place": (["--to", "dir"], "--to dir needs --out, such as"),
    "a server for a directory": (
        ["--to", "dir", "--out", "{out}", "--url", "http://127.0.0.1:9"],
        "--url: not for --to dir",
    ),
    "no server": (["--to", "sglang"], "--to sglang needs --url, such as http://"),
    "a directory for a server": (
        ["--to", "server", "--url", "http://127.0.0.1:9", "--out", "{out}"],
        "--out: not for --to server",
    ),
    "merged weights for a server": (
        ["--to", "server", "--url", "http://127.0.0.1:9", "--merged"],
        "write these with --to dir --merged --out DIR",
    ),
    "no URL": (["--to", "vllm", "--url", "127.0.0.1:9"], "is no server's URL"),
    "nobody there": (["--to", "vllm", "--url", "http://127.0.0.1:9"], "cannot be reached"),
    "a name": (["--to", "vllm", "--url", "http://127.0.0.1:9", "--name", "a b"], "name: 'a b'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_do_not_fit_are_told(tmp_path, adapter, capsys, what):
    arguments, message = WRONG[what]
    filled = [each.format(out=tmp_path / "out") for each in arguments]
    assert message in failed(capsys, adapter, *filled)
    assert not (tmp_path / "out").exists()


def test_a_command_line_that_cannot_be_read_exits_with_2(adapter, capsys):
    for arguments in ([adapter], [adapter, "--to", "vlm"], ["--to", "dir"]):
        with pytest.raises(SystemExit) as caught:
            export(*arguments)
        assert caught.value.code == 2


def test_a_model_is_not_given_to_a_server(base, capsys):
    shown = failed(capsys, base, "--to", "server", "--url", "http://127.0.0.1:9")
    assert "holds no adapter" in shown and "--to dir" in shown


def test_an_adapter_is_pushed_to_a_server_and_a_later_one_replaces_it(
    tmp_path, base, adapter, capsys, monkeypatch
):
    monkeypatch.setenv("TUNE_API_KEY", "secret")
    later = tmp_path / "run" / "step_30"
    shutil.copytree(adapter, later)
    with sglang_server(base) as server:
        server.api_key = "secret"
        common = ("--to", "server", "--url", server.url, "--adapter-dir", tmp_path / "served")
        assert export(adapter, *common) == 0
        shown = capsys.readouterr()
        (first,) = server.adapters
        assert re.fullmatch(r"run-[0-9a-f]{12}", first)
        assert f'"model": "{MODEL}:{first}"' in shown.out and "warning: for" not in shown.err
        assert "note: the server serves" not in shown.out
        expected = adapted_logits(base, adapter)
        torch.testing.assert_close(adapted_logits(base, server.adapters[first]), expected)

        assert export(later, *common) == 0
        assert list(server.adapters) == [first]
        change(base, later)
        assert export(base, later, *common) == 0
        (second,) = server.adapters
        assert f"unloaded {first}" in capsys.readouterr().out and second.startswith("run-")
        assert export(later, *common, "--name", "other") == 0
        assert set(server.adapters) > {second} and len(server.adapters) == 2

        server.max_rank = 3
        message = failed(capsys, base, adapter, *common)
        assert "with rank 4 is incompatible" in message and second in server.adapters


def change(base, checkpoint):
    """Other weights in the checkpoint's adapter, of a directory that is no checkpoint of ours."""
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "adapter_model.pt").unlink()
    from safetensors.torch import load_file, save_file

    file = checkpoint / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)


def test_what_changes_nothing_or_has_another_base_is_told(tmp_path, base, capsys):
    zero = random_adapter(config().dims, ADAPTER)
    for name, tensor in zero.items():
        if "lora_b" in name:
            tensor.zero_()
    from checkpointing import FullModelHFCheckpointer

    state = {"adapter": zero, "adapter_config": ADAPTER.to_state()}
    saver = FullModelHFCheckpointer(base, output_dir=tmp_path / "run")
    adapter = saver.save_checkpoint(state, epoch=0, adapter_only=True, step=1)
    other = shutil.copytree(base, tmp_path / "other")
    with sglang_server(other) as server:
        common = ("--url", server.url, "--adapter-dir", tmp_path / "served")
        assert export(adapter, "--to", "sglang", *common) == 0
        shown = capsys.readouterr()
        assert f"note: the server serves {other}, and the adapter's base is {base}" in shown.out
        assert (
            "warning: for a few tokens the server computes the same as without the adapter"
            in shown.err
        )
        assert "is a server of SGLang" in failed(capsys, adapter, "--to", "vllm", *common)
