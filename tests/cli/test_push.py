"""`tune push`, with huggingface_hub itself, against a server on the loopback interface."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file

from checkpointing import AdapterConfig, FullModelHFCheckpointer, MergedStateDict
from checkpointing.cli.main import main
from checkpointing.errors import ConfigError
from checkpointing.push import plan_upload, replaced_files
from tests.cli.command import ROOT, environment, tune
from tests.cli.hub import Hub
from tests.cli.hub import serving as serving_downloads
from tests.cli.hub_push import PushHub, Repository, serving
from tests.tiny import random_adapter, write_hf
from tests.training.peers import config, hf_model, tokens
from tests.training.tiny_tokenizer import write_tokenizer

BASE_ID = "someone/tiny-base"
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "LICENSE", *TOKENIZER}
MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "LICENSE",
    *TOKENIZER,
}


def save(base: Path, output_dir: Path, with_adapter: bool) -> Path:
    """A checkpoint of a run that took 29 steps; its merged model is that of the base."""
    checkpointer = FullModelHFCheckpointer(base, output_dir=output_dir)
    weights = checkpointer.load_checkpoint()["model"]
    state = {"model": weights, "steps_run": 29, "seed": 3}
    if with_adapter:
        adapter_config = AdapterConfig(r=4, alpha=6.0, target_modules=("q_proj", "v_proj"))
        adapter = random_adapter(config().dims, adapter_config)
        state |= {
            "model": MergedStateDict(weights, adapter, adapter_config),
            "adapter": adapter,
            "adapter_config": adapter_config.to_state(),
        }
    return checkpointer.save_checkpoint(state, epoch=0, step=29)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with a tokenizer and what else lies about, and two checkpoints from it."""
    root = tmp_path_factory.mktemp("made")
    base = write_hf(hf_model(config()), root / "base")
    write_tokenizer(base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["name_or_path"] = str(base)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "original_repo_id.json").write_text(json.dumps({"repo_id": BASE_ID}))
    (base / "LICENSE").write_text("do as you like")
    (base / "train.log").write_text("step 1")
    (base / ".secret").write_text("hidden")
    save(base, root / "lora", with_adapter=True)
    save(base, root / "full", with_adapter=False)
    return root


@pytest.fixture
def checkpoints(made: Path, tmp_path: Path) -> Path:
    """Copies of the two checkpoints, in ``lora/epoch_0`` and ``full/epoch_0``."""
    for name in ("lora", "full"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def hub() -> Iterator[PushHub]:
    with serving(PushHub(writers={"hf_me": "me", "hf_them": "them"})) as running:
        yield running


Push = Callable[..., subprocess.CompletedProcess[str]]


def push_in_a_process(hub: PushHub, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user does."""
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cwd / "hf_home"),
        "HF_TOKEN": "hf_me",
        "HF_HUB_DISABLE_XET": "1",
    }
    return tune("push", *arguments, cwd=cwd, env=env)


@pytest.fixture
def push(
    hub: PushHub,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Push:
    """The same in this process, which saves seconds; the settings as the environment gives them."""
    monkeypatch.chdir(checkpoints)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(checkpoints / "hf_home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(checkpoints / "hf_home" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run(*arguments: str, token: str = "hf_me") -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("HF_TOKEN", token)
        capsys.readouterr()
        code = main(["push", *arguments])
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def metadata(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---\n")[1])


def test_an_adapter_comes_to_the_hub_byte_for_byte_and_nothing_of_the_runs_own(
    hub: PushHub, checkpoints: Path
) -> None:
    done = push_in_a_process(hub, checkpoints, "lora/epoch_0", "me/adapter")
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["me/adapter"]
    files = repository.branches["main"]
    assert set(files) == {*ADAPTER_FILES, "README.md"}
    for name in ADAPTER_FILES - {"tokenizer_config.json"}:
        assert files[name] == (checkpoints / "lora" / "epoch_0" / name).read_bytes()
    assert repository.commits["main"][-1] == "Upload LoRA adapter of step 29"
    assert f"{hub.url}/me/adapter/commit/" in done.stdout
    assert "left out: train.log" in done.stdout
    assert "step 1" not in str(files)
    assert not repository.private

    downloads = {"me/adapter": files}
    with serving_downloads(Hub(downloads)) as other:
        env = {"HF_ENDPOINT": other.url, "HF_HOME": str(checkpoints / "home"), "HF_TOKEN": ""}
        done = tune("download", "me/adapter", "--output-dir", "got", cwd=checkpoints, env=env)
        assert done.returncode == 0, done.stderr
    for name, content in files.items():
        assert (checkpoints / "got" / name).read_bytes() == content


def test_no_path_of_this_machine_is_uploaded(made: Path, checkpoints: Path) -> None:
    config_file = checkpoints / "lora" / "epoch_0" / "tokenizer_config.json"
    assert str(made) in config_file.read_text()
    upload = plan_upload(checkpoints / "lora" / "epoch_0")
    content = upload.files["tokenizer_config.json"]
    assert isinstance(content, bytes)
    kept = json.loads(config_file.read_text())
    del kept["name_or_path"]
    assert json.loads(content) == kept
    for content in upload.files.values():
        data = content if isinstance(content, bytes) else content.read_bytes()
        assert str(made).encode() not in data


def test_the_card_says_what_it_is_and_its_code_loads_it(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    base = checkpoints.parent / "base_of_card"
    hub.repositories[BASE_ID] = repository = Repository()
    write_hf(hf_model(config()), base)
    repository.branches["main"] = {path.name: path.read_bytes() for path in base.iterdir()}
    config_name = "smollm2/135M_lora_single_device"
    for arguments in (["me/adapter", "--config", config_name], ["me/whole", "--merged"]):
        done = push("lora/epoch_0", *arguments, "--revision", "first")
        assert done.returncode == 0, done.stderr

    adapter_card = hub.repositories["me/adapter"].branches["first"]["README.md"].decode()
    assert metadata(adapter_card) == {
        "base_model": BASE_ID,
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["tunepoint", "lora"],
    }
    for line in (
        "- Adapter: LoRA, rank 4, alpha 6",
        "- Adapted modules: `q_proj`, `k_proj`, `v_proj`",  # k_proj: zeros, as engines want it
        "- Recipe: `lora_finetune_single_device`",
        f"- Recipe config: `{config_name}`",
        "- Optimizer steps: 29",
    ):
        assert f"\n{line}\n" in adapter_card
    model_card = hub.repositories["me/whole"].branches["first"]["README.md"].decode()
    assert metadata(model_card)["library_name"] == "transformers"
    assert set(hub.repositories["me/whole"].branches["first"]) == {*MODEL_FILES, "README.md"}

    run = "import torch\n"
    for name, card in (("adapter", adapter_card), ("whole", model_card)):
        (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
        run += f"{code}\nassert len(tokenizer)\nwith torch.no_grad():\n"
        run += "    logits = model.double()(torch.load('tokens.pt')).logits\n"
        run += f"torch.save(logits, '{name}.pt')\n"
    torch.save(tokens(), checkpoints / "tokens.pt")
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=checkpoints,
        env=environment({"HF_ENDPOINT": hub.url, "HF_HOME": str(checkpoints / "hf_home")}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = {name: torch.load(checkpoints / f"{name}.pt") for name in ("adapter", "whole")}
    with torch.no_grad():
        plain = hf_model(config()).double()(tokens()).logits
    assert (found["adapter"] - plain).abs().max() > 1e-2
    # The merged weights are rounded once to fp32.
    assert (found["adapter"] - found["whole"]).abs().max() < 1e-5


def test_a_full_model_is_uploaded_as_transformers_loads_it(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    done = push("full/epoch_0", "me/full", "--private", "--message", "Mine")
    assert done.returncode == 0, done.stderr
    repository = hub.repositories["me/full"]
    assert repository.private
    assert repository.commits["main"][-1] == "Mine"
    files = repository.branches["main"]
    assert set(files) == {*MODEL_FILES, "README.md"}
    card = files["README.md"].decode()
    assert metadata(card)["base_model"] == BASE_ID
    assert 'AutoModelForCausalLM.from_pretrained("me/full")' in card


def test_the_merged_directory_means_the_merged_model(checkpoints: Path) -> None:
    by_option = plan_upload(checkpoints / "lora" / "epoch_0", merged=True)
    assert plan_upload(checkpoints / "lora" / "epoch_0" / "merged") == by_option
    assert set(by_option.files) == MODEL_FILES
    merged = load_file(by_option.source / "model-00001-of-00001.safetensors")
    assert "lm_head.weight" in merged


def test_the_card_names_the_recipe_and_the_config_of_the_run_and_no_directory(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = checkpoints / "lora/epoch_0/manifest.json"
    facts = json.loads(manifest.read_text())
    names = {"recipe": "lora_finetune_single_device", "config": "smollm2/135M_lora_single_device"}
    command = ["push", str(manifest.parent), "me/adapter", "--dry-run"]
    manifest.write_text(json.dumps(facts | names))
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"- Recipe: `{names['recipe']}`\n- Recipe config: `{names['config']}`\n" in shown
    assert main([*command, "--config", "smollm2/135M_full_single_device"]) == 0
    assert "- Recipe config: `smollm2/135M_full_single_device`\n" in capsys.readouterr().out
    manifest.write_text(json.dumps(facts | {"recipe": "/home/me/r.py", "config": {"key": "k"}}))
    assert main(command) == 0
    assert "Recipe" not in capsys.readouterr().out


def test_a_dry_run_shows_files_sizes_and_card_and_reaches_nobody(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoints)
    assert main(["push", "lora/epoch_0", "me/adapter", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    size = (checkpoints / "lora" / "epoch_0" / "adapter_model.safetensors").stat().st_size
    assert re.search(rf"adapter_model\.safetensors +{size / 1000:.1f} kB\n", shown)
    assert "\n7 files, " in shown
    assert f"base_model: {BASE_ID}\n" in shown
    assert shown.endswith("nothing was uploaded (--dry-run)\n")


def test_a_base_without_a_repository_is_a_warning_and_can_be_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "base", tmp_path / "my_base")
    (tmp_path / "my_base" / "original_repo_id.json").unlink()
    checkpoint = save(tmp_path / "my_base", tmp_path / "out", with_adapter=True)
    assert main(["push", str(checkpoint), "me/adapter", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "warning: the base's repository is not known" in shown.err
    assert "give it with --base-model" in shown.err
    assert "base_model:" not in shown.out

    def uploaded_name(base_model: str | None) -> str:
        content = plan_upload(checkpoint, base_model=base_model).files["adapter_config.json"]
        assert isinstance(content, bytes)
        return json.loads(content)["base_model_name_or_path"]

    assert uploaded_name(None) == "my_base"
    assert uploaded_name("owner/base") == "owner/base"
    # `tune download` notes where a base is from; it may have been there later than the run.
    (tmp_path / "my_base" / "original_repo_id.json").write_text('{"repo_id": "owner/noted"}')
    assert uploaded_name(None) == "owner/noted"


def test_a_card_that_somebody_has_written_is_kept(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    local = "---\nlicense: mit\ntags:\n- mine\n---\n# My own words\n"
    (checkpoints / "full" / "epoch_0" / "README.md").write_text(local)
    assert push("full/epoch_0", "me/full").returncode == 0
    card = hub.repositories["me/full"].branches["main"]["README.md"].decode()
    assert card.endswith("---\n# My own words\n")
    assert metadata(card) == {
        "license": "mit",
        "tags": ["mine", "tunepoint"],
        "base_model": BASE_ID,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
    }

    assert push("lora/epoch_0", "me/adapter").returncode == 0
    files = hub.repositories["me/adapter"].branches["main"]
    files["README.md"] = files["README.md"].replace(b"steps: 29", b"steps: 2")
    assert push("lora/epoch_0", "me/adapter").returncode == 0
    files = hub.repositories["me/adapter"].branches["main"]
    assert b"steps: 29" in files["README.md"]  # nobody has claimed it
    files["README.md"] = b"Written on the Hub, with no metadata.\n"
    assert push("lora/epoch_0", "me/adapter").returncode == 0
    card = hub.repositories["me/adapter"].branches["main"]["README.md"].decode()
    assert card.endswith("---\nWritten on the Hub, with no metadata.\n")
    assert metadata(card)["base_model"] == BASE_ID


def test_weights_that_would_be_loaded_instead_are_deleted_and_nothing_else(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    hub.repositories["me/full"] = repository = Repository()
    repository.branches["main"] = {
        "model.safetensors": b"older, and loaded before any index",
        "pytorch_model.bin": b"older",
        "model-q4.gguf": b"another file",
        "onnx/model.safetensors": b"another place",
    }
    done = push("full/epoch_0", "me/full")
    assert done.returncode == 0, done.stderr
    assert "deletes model.safetensors" in done.stdout
    kept = {"model-q4.gguf", "onnx/model.safetensors"}
    assert set(repository.branches["main"]) == {*MODEL_FILES, "README.md", *kept}


def test_an_adapter_and_a_model_never_share_a_repository(checkpoints: Path) -> None:
    adapter = plan_upload(checkpoints / "lora" / "epoch_0")
    model = plan_upload(checkpoints / "full" / "epoch_0")
    with pytest.raises(ConfigError, match=r"holds a model already \(config.json\)"):
        replaced_files(["README.md", "config.json"], adapter)
    with pytest.raises(ConfigError, match=r"holds an adapter already \(adapter_model.bin\)"):
        replaced_files([".gitattributes", "adapter_model.bin"], model)
    assert replaced_files(["adapter_model.bin"], adapter) == ["adapter_model.bin"]


def test_a_public_repository_is_not_used_where_a_private_one_is_wanted(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    hub.repositories["me/public"] = repository = Repository()
    done = push("lora/epoch_0", "me/public", "--private")
    assert done.returncode == 1
    assert "me/public exists and is public" in done.stderr
    assert f"{hub.url}/me/public/settings" in done.stderr
    assert repository.branches == {"main": {}}
    assert not hub.stored


def test_a_pull_request_changes_no_branch(hub: PushHub, checkpoints: Path, push: Push) -> None:
    hub.repositories["them/adapter"] = repository = Repository()
    done = push("lora/epoch_0", "them/adapter", "--create-pr")
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/them/adapter/discussions/1" in done.stdout
    assert repository.branches == {"main": {}}
    assert set(repository.pull_requests[0]) == {*ADAPTER_FILES, "README.md"}


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["me/adapter"], "", "me/adapter: the Hub refuses access (401)"),
        (["me/adapter", "--token", "hf_old"], "hf_me", "me/adapter: the Hub refuses access (401)"),
        (["them/adapter"], "hf_me", "them/adapter: the token may not write there (403)"),
        (["me/none", "--create-pr"], "hf_me", "me/none: the Hub has no such repository or branch"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: PushHub, checkpoints: Path, arguments: list[str], token: str, message: str, push: Push
) -> None:
    done = push("lora/epoch_0", *arguments, token=token)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: {message}")
    assert "--token" in error
    assert error.endswith("nothing was committed")
    assert "Traceback" not in done.stderr
    assert not hub.repositories
    assert not hub.stored


def test_without_a_network_the_error_says_so(checkpoints: Path) -> None:
    with serving(PushHub(writers={"hf_me": "me"})) as hub:
        pass
    done = push_in_a_process(hub, checkpoints, "lora/epoch_0", "me/adapter")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot reach {hub.url}")
    assert "check the network" in done.stderr


def test_an_upload_that_breaks_is_sent_again_and_arrives_whole(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    hub.break_uploads = 1
    done = push("lora/epoch_0", "me/adapter")
    assert done.returncode == 0, done.stderr
    assert list(hub.uploads.values()) == [2]
    name = "adapter_model.safetensors"
    files = hub.repositories["me/adapter"].branches["main"]
    assert files[name] == (checkpoints / "lora" / "epoch_0" / name).read_bytes()


def test_a_failed_push_commits_nothing_and_the_next_one_sends_only_what_is_missing(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    hub.refuse_uploads = 403
    done = push("lora/epoch_0", "me/adapter")
    assert done.returncode == 1
    assert "nothing was committed" in done.stderr
    repository = hub.repositories["me/adapter"]
    assert repository.branches == {"main": {}}
    hub.refuse_uploads = None
    hub.break_commits = 1
    done = push("lora/epoch_0", "me/adapter")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot reach {hub.url}, or the")
    assert repository.branches == {"main": {}}
    done = push("lora/epoch_0", "me/adapter")
    assert done.returncode == 0, done.stderr
    assert set(repository.branches["main"]) == {*ADAPTER_FILES, "README.md"}
    assert list(hub.uploads.values()) == [2]  # refused, then taken once


def test_a_commit_of_somebody_else_meanwhile_is_not_written_over(hub: PushHub, push: Push) -> None:
    hub.others_commit = True
    done = push("lora/epoch_0", "me/adapter")
    assert done.returncode == 1
    assert "somebody else has committed to it meanwhile (412)" in done.stderr
    repository = hub.repositories["me/adapter"]
    assert repository.commits["main"][-1] == "of somebody else"
    assert repository.branches == {"main": {}}


def test_what_is_not_whole_is_not_uploaded(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, full = checkpoints / "lora" / "epoch_0", checkpoints / "full" / "epoch_0"

    def error(*arguments: str) -> str:
        assert main(["push", *arguments]) == 1
        return capsys.readouterr().err

    assert "no such directory" in error(str(checkpoints / "none"), "me/x")
    assert "holds no adapter" in error(str(full), "me/x", "--merged")
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    assert f"{weights}: is damaged" in error(str(adapter), "me/x")
    weights.write_bytes(content[:-1])
    assert f"{weights}: has {len(content) - 1} bytes" in error(str(adapter), "me/x", "--dry-run")
    (full / "manifest.json").unlink()
    assert "has no manifest.json" in error(str(full), "me/x", "--dry-run")


def test_what_transformers_and_peft_do_not_load_is_to_be_converted_first(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, form, remedy in (
        ("base", "tune", "--to hf"),
        ("lora/epoch_0", "tune", "--to peft"),
    ):
        out = tmp_path / source.partition("/")[0]
        assert main(["convert", str(made / source), str(out), "--to", form]) == 0
        capsys.readouterr()
        assert main(["push", str(out), "me/x", "--dry-run"]) == 1
        assert f"tune convert {out} OUT {remedy}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["name-alone"], "as in owner/name-alone"),
        (["a/b/c"], "'a/b/c' is not a repository's name"),
        (["me/x", "--base-model", "a/b/c"], "'a/b/c' is not a repository's name"),
        (["me/x", "--create-pr", "--revision", "b"], "leave out --revision"),
        (["me/x", "--config", "no_such"], "there is no config 'no_such'"),
    ],
)
def test_what_is_asked_wrongly_is_an_error_before_anything_is_read(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", "no_such_directory", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_commands_in_docs_push_run_as_they_stand(
    hub: PushHub, checkpoints: Path, push: Push
) -> None:
    (checkpoints / "out").mkdir()
    for name in ("lora", "full"):
        (checkpoints / name).rename(checkpoints / "out" / name)
    text = (ROOT / "docs" / "push.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    commands = [line.split() for line in "".join(blocks).splitlines()]
    assert len(commands) == 5
    for program, name, *arguments in commands:
        assert (program, name) == ("tune", "push")
        done = push(*arguments)
        assert done.returncode == 0, done.stderr
    assert set(hub.repositories) == {"me/my-adapter", "me/my-model"}
