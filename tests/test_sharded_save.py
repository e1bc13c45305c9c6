"""Weights in shards on the processes of a job: one checkpoint, the same as of whole weights.

Each test runs in real processes, which find each other over gloo.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    MergedStateDict,
)
from checkpointing.errors import ConfigError, TensorMismatchError, WriteError
from checkpointing.verify import verify
from tests.families.variants import write
from tests.formats.test_meta import CONFIG as META_CONFIG
from tests.formats.test_meta import PARAMS, meta_weights, write_meta
from tests.sharded_worker import (
    CLASSES,
    CUTS,
    Job,
    open_shared,
    save,
    save_changed,
    save_on_a_part_of_the_job,
    save_sums,
    save_with_an_optimizer,
    save_with_little_room,
)
from tests.tiny import ATTENTION, MLP, assert_same_tensors, random_adapter, random_native, write_hf
from tests.training.peers import config, hf_model

# Three key-value heads of 14 rows: two or four processes have parts of heads.
ODD_HEADS = config(kv_heads=3)
# What is of one save alone.
_OWN = {"run_id", "saved_at_ns", "files"}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    job = Job(request.param, tmp_path_factory.mktemp("job"))
    yield job
    job.stop()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Bases by name, each written when it is first asked for."""
    directory = tmp_path_factory.mktemp("bases")

    def base(name: str) -> Path:
        path = directory / name
        if path.exists():
            return path
        if name == "odd heads":
            write_hf(hf_model(ODD_HEADS), path)
        elif name == "meta":
            write_meta(path, meta_weights(random_native(META_CONFIG)), 1, 0, PARAMS)
        elif name == "meta, two shards":
            write_meta(path, meta_weights(random_native(META_CONFIG)), 2, 1, PARAMS)
        elif name.startswith("tune"):
            path.mkdir()
            hf_model(META_CONFIG).config.save_pretrained(path)
            torch.save(random_native(META_CONFIG), path / "model-00001-of-00001.bin")
        else:
            write(name, path)
        return path

    return base


def saved_whole(format, base, out, options=None, adapter=None, **arguments):
    """What one process saves that has all the weights."""
    checkpointer = CLASSES[format](base, output_dir=out, **(options or {}))
    state = {"model": checkpointer.load_checkpoint()["model"], "epochs_run": 1, "steps_run": 7}
    if adapter is not None:
        tensors, adapter_config, _ = adapter
        state |= {
            "model": MergedStateDict(state["model"], tensors, adapter_config),
            "adapter": tensors,
            "adapter_config": adapter_config.to_state(),
        }
    return checkpointer.save_checkpoint(state, epoch=0, show_progress=False, **arguments)


def check_same(saved, whole):
    """The same files, bit for bit; the manifest tells the same, and of the files what they are."""
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    found = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert found == names
    for name in names:
        if name != "manifest.json":
            assert (saved / name).read_bytes() == (whole / name).read_bytes(), name
    facts, expected = (json.loads((path / "manifest.json").read_text()) for path in (saved, whole))
    assert {key: facts[key] for key in facts if key not in _OWN} == {
        key: expected[key] for key in expected if key not in _OWN
    }
    sizes = {name: entry["size"] for name, entry in expected["files"].items()}
    assert {name: entry["size"] for name, entry in facts["files"].items()} == sizes
    assert verify(saved).problems == ()
    check_nothing_left(saved.parent, {saved.name})


def check_nothing_left(out, names=frozenset()):
    assert {path.name for path in out.iterdir()} == set(names)


def run_save(job, tmp_path, **arguments):
    answers = job.run(save, out=tmp_path / "out", **arguments)
    assert answers == [tmp_path / "out" / "epoch_0"] * len(answers)
    return answers[0]


@pytest.mark.parametrize(
    "name, gathers",
    [
        ("llama", False),
        ("llama, biases", False),
        ("llama, tied", False),
        ("odd heads", True),
        ("phi3", False),
        ("qwen3_moe", True),
        ("gemma2", False),
    ],
)
def test_a_model_cut_by_fsdp(job, bases, tmp_path, name, gathers):
    arguments = {"format": "hf", "base": bases(name), "max_shard_size": "90KB"}
    gathers = gathers or len(job) > 2  # of four processes some have parts of heads
    saved = run_save(job, tmp_path, cut="fsdp", gathers=gathers, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))
    stored = [load_file(path) for path in saved.glob("*.safetensors")]
    assert len(stored) > 1
    # What transformers wrote.
    original = load_file(bases(name) / "model.safetensors")
    assert_same_tensors({name: one for file in stored for name, one in file.items()}, original)
    weights = FullModelHFCheckpointer(bases(name)).load_checkpoint()["model"]
    assert_same_tensors(FullModelHFCheckpointer(saved).load_checkpoint()["model"], weights)


@pytest.mark.parametrize("cut", [*CUTS, "tensor parallel", "fsdp over tensor parallel"])
@pytest.mark.parametrize("name", ["odd heads", "phi3", "qwen3_moe"])
def test_every_other_cut(job, bases, tmp_path, name, cut):
    arguments = {"format": "hf", "base": bases(name)}
    saved = run_save(job, tmp_path, cut=cut, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


@pytest.mark.parametrize("cut", ["rows", "columns", "tensor parallel"])
@pytest.mark.parametrize(
    "format, name, options",
    [
        ("hf", "llama", {"safe_serialization": False}),
        ("meta", "meta", {}),
        ("meta", "meta, two shards", {}),
        ("tune", "tune", {}),
    ],
)
def test_files_of_torch_save(job, bases, tmp_path, format, name, options, cut):
    # They hold a CRC of each tensor, which is of what several processes have written.
    arguments = {"format": format, "base": bases(name), "options": options}
    saved = run_save(job, tmp_path, cut=cut, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def test_sums_are_added_up(job, bases, tmp_path):
    saved, *_ = job.run(save_sums, base=bases("llama"), out=tmp_path / "out")
    original = load_file(bases("llama") / "model.safetensors")
    assert_same_tensors(load_file(saved / "model-00001-of-00001.safetensors"), original)


@pytest.mark.parametrize("is_cut", [False, True], ids=["adapter whole", "adapter cut"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_merged_adapter(job, bases, tmp_path, use_dora, cut, is_cut):
    adapter_config = AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=use_dora)
    adapter = random_adapter(ODD_HEADS.dims, adapter_config)
    arguments = {
        "format": "hf",
        "base": bases("odd heads"),
        "adapter": (adapter, adapter_config, is_cut),
    }
    saved = run_save(job, tmp_path, cut=cut, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def test_an_adapter_alone_is_written_by_one_process(job, bases, tmp_path):
    adapter_config = AdapterConfig(4, 6, ATTENTION)
    adapter = random_adapter(ODD_HEADS.dims, adapter_config)
    arguments = {
        "format": "hf",
        "base": bases("odd heads"),
        "adapter": (adapter, adapter_config, False),
        "adapter_only": True,
    }
    saved = run_save(job, tmp_path, cut="rows", gathers=False, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def test_a_checkpoint_is_replaced_and_old_ones_are_removed(job, bases, tmp_path):
    arguments = {"format": "hf", "base": bases("llama"), "cut": "rows"}
    options = {"keep_last_n_checkpoints": 1}
    first = run_save(job, tmp_path, **arguments, options=options)
    number = (first / "config.json").stat().st_ino
    assert run_save(job, tmp_path, **arguments, options=options) == first
    assert (first / "config.json").stat().st_ino != number
    check_nothing_left(tmp_path / "out", {"epoch_0"})


def errors(answers, kind, text):
    """Every process raised this."""
    for found, message in answers:
        assert found is kind, message
        assert text in message, message
    return [message for _, message in answers]


@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("refused", [0, 1])
def test_a_disk_that_refuses_one_process_fails_all(job, bases, tmp_path, cut, refused):
    room = [60_000 if rank == refused else None for rank in range(len(job))]
    arguments = {"format": "hf", "base": bases("llama"), "out": tmp_path / "out", "cut": cut}
    answers = job.run(save_with_little_room, room, **arguments)
    messages = errors(answers, WriteError, "model-00001-of-00001.safetensors")
    for rank, message in enumerate(messages):
        assert (f": rank {refused}: " in message) == (rank != refused), message
    check_nothing_left(tmp_path / "out")
    # The processes still understand each other.
    saved = run_save(job, tmp_path, format="hf", base=bases("llama"), cut=cut)
    assert verify(saved).problems == ()


@pytest.mark.parametrize(
    "change, says",
    [
        (torch.ones(131, 42, dtype=torch.bfloat16), "[131, 42] bfloat16"),
        (torch.ones(131, 43), "[131, 43] float32"),
        (None, "not there"),
    ],
    ids=["dtype", "shape", "missing"],
)
def test_a_tensor_that_is_another_in_one_process_fails_all(job, bases, tmp_path, change, says):
    changes = [{"output.weight": change} if rank == 1 else {} for rank in range(len(job))]
    answers = job.run(save_changed, changes, base=bases("llama"), out=tmp_path / "out")
    messages = errors(answers, TensorMismatchError, "output.weight: [131, 42] float32")
    assert all(f"{says}" in one and "on rank 1" in one for one in messages)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_wrong_in_all_processes(job, bases, tmp_path):
    changes = [{"layers.1.attn.q_proj.weight": torch.ones(83, 42)}] * len(job)
    answers = job.run(save_changed, changes, base=bases("llama"), out=tmp_path / "out")
    messages = errors(answers, TensorMismatchError, "[83, 42], expected [84, 42]")
    assert not any("rank" in one for one in messages), "each found it itself"


def test_only_what_the_first_process_has_beside_the_weights_is_saved(job, bases, tmp_path):
    changes = [{"epochs_run": 3} if rank == 0 else {"other": 5} for rank in range(len(job))]
    saved, *_ = job.run(save_changed, changes, base=bases("llama"), out=tmp_path / "out")
    assert torch.load(saved / "recipe_state.pt") == {"epochs_run": 3}


def test_an_unsaveable_recipe_state_in_one_process_fails_all(job, bases, tmp_path):
    changes = [{"recipe": save} if rank == 1 else {} for rank in range(len(job))]
    answers = job.run(save_changed, changes, base=bases("llama"), out=tmp_path / "out")
    assert errors(answers, ConfigError, "recipe")[0].startswith("rank 1: ")


def test_shards_beside_the_weights_are_refused(job, bases, tmp_path):
    answers = job.run(save_with_an_optimizer, base=bases("llama"), out=tmp_path / "out")
    errors(answers, ConfigError, "optimizer.state.0.exp_avg is a DTensor")


def test_shards_are_not_saved_in_the_background(job, bases, tmp_path):
    nothing = [{}] * len(job)
    arguments = {"base": bases("llama"), "out": tmp_path / "out", "is_async": True}
    errors(job.run(save_changed, nothing, **arguments), ConfigError, "without AsyncCheckpointer")


def test_a_mesh_of_some_processes_is_refused(job, bases, tmp_path):
    answers = job.run(save_on_a_part_of_the_job, base=bases("llama"), out=tmp_path / "out")
    errors(answers, ConfigError, "a DTensor of the ranks [0]")


def test_processes_that_save_into_other_directories_are_refused(job, bases, tmp_path):
    places = [tmp_path / f"out_{min(rank, 1)}" for rank in range(len(job))]
    nothing = [{}] * len(job)
    answers = job.run(_save_into, places, nothing, base=bases("llama"))
    errors(answers, ConfigError, "output_dir is")


def _save_into(out, changes, base):
    return save_changed(changes, base, out)


def test_a_process_that_does_not_see_the_file_says_so(job, tmp_path):
    places = [tmp_path / f"{int(rank == 1)}" / "file" for rank in range(len(job))]
    for place in places:
        place.parent.mkdir(exist_ok=True)
    messages = errors(job.run(open_shared, places), WriteError, "rank 1 does not see the file")
    assert messages[0].startswith("rank 1: ")
