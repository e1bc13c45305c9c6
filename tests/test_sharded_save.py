"""Weights in shards on the processes of a job: one checkpoint, the same as of whole weights.

Each test runs in real processes, which find each other over gloo.
"""

import json
from pathlib import Path
from zipfile import ZipFile

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
    fail_in_the_background,
    load_state_and_remove,
    memory_of_a_save,
    open_shared,
    save,
    save_changed,
    save_low_bit_states,
    save_on_a_part_of_the_job,
    save_sums,
    save_unlike,
    save_while_training,
    save_with_an_optimizer,
    save_with_little_room,
)
from tests.tiny import (
    ATTENTION,
    EXPERTS,
    MLP,
    assert_same_tensors,
    random_adapter,
    random_native,
    targets_of,
    write_hf,
)
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
    limit = {} if gathers else {"most_gathered": 0}
    saved = run_save(job, tmp_path, cut="fsdp", **limit, **arguments)
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


ADAPTER_CUTS = [None, "rows", "columns", "tensor parallel"]


@pytest.mark.parametrize("adapter_cut", ADAPTER_CUTS)
@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_merged_adapter(job, bases, tmp_path, use_dora, cut, adapter_cut):
    adapter_config = AdapterConfig(4, 6, (*ATTENTION, *MLP), use_dora=use_dora)
    adapter = random_adapter(ODD_HEADS.dims, adapter_config)
    arguments = {
        "format": "hf",
        "base": bases("odd heads"),
        "adapter": (adapter, adapter_config, adapter_cut),
    }
    saved = run_save(job, tmp_path, cut=cut, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def adapter_of(base, **fields):
    """A random adapter on all that a model has, some of it with another rank and alpha."""
    dims = FullModelHFCheckpointer(base).model_config.dims
    targets = targets_of(dims, (*ATTENTION, *MLP, *EXPERTS))
    patterns = {
        "rank_pattern": {"layers.1.attn.k_proj": 5},
        "alpha_pattern": {"layers.0.attn.v_proj": 7},
    }
    fields = {**patterns, **fields}
    return random_adapter(dims, config := AdapterConfig(4, 6, targets, **fields)), config


@pytest.mark.parametrize("adapter_cut", ADAPTER_CUTS[1:])
@pytest.mark.parametrize(
    "name, fields",
    [
        ("llama", {}),  # q, k and v with two groups
        ("llama", {"use_dora": True}),
        ("odd heads", {"use_rslora": True}),
        ("phi3", {}),  # qkv and gate with up are one module each
        ("qwen3_moe", {}),
        ("mixtral", {}),
    ],
)
def test_an_adapter_in_shards_alone(job, bases, tmp_path, name, fields, adapter_cut):
    adapter, adapter_config = adapter_of(bases(name), **fields)
    arguments = {
        "format": "hf",
        "base": bases(name),
        "adapter": (adapter, adapter_config, adapter_cut),
        "adapter_only": True,
    }
    # A base of any kind has larger tensors than that.
    most = max(tensor.numel() for tensor in adapter.values())
    saved = run_save(
        job, tmp_path, cut="columns", leave_out="model", most_gathered=most, **arguments
    )
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))
    assert_same_tensors(torch.load(saved / "adapter_model.pt"), adapter)


def test_modules_that_are_trained_whole_in_shards(job, bases, tmp_path):
    whole = {"modules_to_save": ("output", "norm"), "rank_pattern": {}, "alpha_pattern": {}}
    adapter, adapter_config = adapter_of(bases("llama"), **whole)
    weights = FullModelHFCheckpointer(bases("llama")).load_checkpoint()["model"]
    adapter |= {name: 0.7 * weights[name] for name in ("output.weight", "norm.scale")}
    arguments = {
        "format": "hf",
        "base": bases("llama"),
        "adapter": (adapter, adapter_config, "columns"),
    }
    saved = run_save(job, tmp_path, cut="rows", **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


@pytest.mark.parametrize("format", ["meta", "tune"])
def test_an_adapter_in_shards_in_the_other_formats(job, bases, tmp_path, format):
    adapter_config = AdapterConfig(4, 6, (*ATTENTION, *MLP))
    adapter = random_adapter(META_CONFIG.dims, adapter_config)
    arguments = {
        "format": format,
        "base": bases(format),
        "adapter": (adapter, adapter_config, "tensor parallel"),
    }
    saved = run_save(job, tmp_path, cut="tensor parallel", **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def test_large_tensors_are_gathered_a_few_rows_at_a_time(job, bases, tmp_path):
    adapter, adapter_config = adapter_of(bases("llama"), use_dora=True)
    arguments = {
        "format": "hf",
        "base": bases("llama"),
        "adapter": (adapter, adapter_config, None),
    }
    # Both matrices of vocabulary x hidden have 131 x 42 elements.
    limits = {"range_bytes": 8000, "most_gathered": 2000}
    saved = run_save(job, tmp_path, cut="columns", **limits, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_training_goes_on_while_shards_are_saved_in_the_background(job, bases, tmp_path, cut):
    adapter, adapter_config = adapter_of(bases("llama"))
    answers = job.run(
        save_while_training,
        base=bases("llama"),
        out=tmp_path / "out",
        cut=cut,
        adapter=(adapter, adapter_config),
    )
    (saved, _), *_ = answers
    # The adapter of the moment; the base, which does not change, is not copied.
    whole = saved_whole(
        "hf", bases("llama"), tmp_path / "whole", adapter=(adapter, adapter_config, None)
    )
    for name in ("merged/model-00001-of-00001.safetensors", "adapter_model.pt"):
        assert (saved / name).read_bytes() == (whole / name).read_bytes()
    assert verify(saved).problems == ()
    assert sum(copied for _, copied in answers) == sum(one.numel() for one in adapter.values())


@pytest.mark.parametrize("refused", [0, 1])
def test_what_fails_in_the_background_of_one_process_is_raised_in_all(
    job, bases, tmp_path, refused
):
    room = [60_000 if rank == refused else None for rank in range(len(job))]
    answers = job.run(fail_in_the_background, room, base=bases("llama"), out=tmp_path / "out")
    # Not by a look at a save that may have ended in some processes only, but by the next save.
    assert answers == [["well", "well", "WriteError", "well", "well"]] * len(job)
    check_nothing_left(tmp_path / "out", {"epoch_2"})
    assert verify(tmp_path / "out" / "epoch_2").problems == ()


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_no_process_holds_more_than_its_share_and_a_few_tensors(job, tmp_path, cut):
    sizes = config(hidden=480, ffn=960, heads=12, kv_heads=4, head_dim=40, vocab=12_000)
    base = write_hf(hf_model(sizes), tmp_path / "base")
    answers = job.run(memory_of_a_save, base=base, out=tmp_path / "out", cut=cut)
    whole = sum(share for _, share, _ in answers)
    for needed, _, largest in answers:
        assert needed < 3 * largest < whole / 3, f"{needed} bytes of {whole} beside its share"


def test_a_whole_adapter_alone_of_a_model_in_shards(job, bases, tmp_path):
    adapter_config = AdapterConfig(4, 6, ATTENTION)
    adapter = random_adapter(ODD_HEADS.dims, adapter_config)
    arguments = {
        "format": "hf",
        "base": bases("odd heads"),
        "adapter": (adapter, adapter_config, None),
        "adapter_only": True,
    }
    saved = run_save(job, tmp_path, cut="rows", most_gathered=0, **arguments)
    check_same(saved, saved_whole(out=tmp_path / "whole", **arguments))


def same_content(found, expected):
    """The same plain data, bit for bit, and plain tensors in it."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same_content(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_content(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(
    "cut", ["fsdp", "rows", "columns", "rows twice", "rows and columns", "tensor parallel"]
)
def test_an_optimizer_in_shards(job, bases, tmp_path, cut, is_async):
    arguments = {"base": bases("qwen2"), "cut": cut, "is_async": is_async}
    saved, *_ = job.run(save_with_an_optimizer, out=tmp_path / "out", **arguments)
    # What torch.save makes of the whole state; of what is not in shards, the first process's.
    with ZipFile(tmp_path / "expected.pt") as theirs, ZipFile(saved / "recipe_state.pt") as ours:
        assert ours.testzip() is None
        name = "{}/data.pkl".format
        assert ours.read(name("archive")) == theirs.read(name("expected"))
    found = torch.load(saved / "recipe_state.pt", weights_only=True)
    same_content(found, torch.load(tmp_path / "expected.pt", weights_only=True))
    assert found["plain"][0].tolist() == [0, 1, 2, 3, 4]
    assert verify(saved).problems == ()
    resumed = FullModelHFCheckpointer(
        bases("qwen2"), output_dir=tmp_path / "out", should_load_recipe_state=True
    ).load_checkpoint()
    same_content(resumed["optimizer"], found["optimizer"])


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


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "in the background"])
def test_shards_in_a_job_of_one_process(job, bases, tmp_path, is_async):
    arguments = {"base": bases("qwen2"), "cut": "fsdp", "is_async": is_async}
    (tmp_path / "alone").mkdir()
    alone = Job(1, tmp_path / "alone")
    expected, *_ = alone.run(save_with_an_optimizer, out=tmp_path / "alone" / "out", **arguments)
    alone.stop()
    saved, *_ = job.run(save_with_an_optimizer, out=tmp_path / "out", **arguments)
    name = "model-00001-of-00001.safetensors"
    assert (saved / name).read_bytes() == (expected / name).read_bytes()
    states = [torch.load(one / "recipe_state.pt", weights_only=True) for one in (saved, expected)]
    same_content(*states)


def test_a_recipe_state_is_mapped_by_each_process_and_outlives_its_file(job, tmp_path):
    path = tmp_path / "recipe_state.pt"
    large = torch.arange(12_000_000).reshape(3000, 4000)
    torch.save({"optimizer": {0: {"exp_avg": large}}, "steps_run": 7}, path)
    answers = job.run(load_state_and_remove, path=path)
    for total, last_row, resident in answers:
        assert total == large.shape and torch.equal(last_row, large[-1])
        assert resident < large.nbytes // 4


NAME = "layers.1.attn.k_proj.lora_b.weight"


@pytest.mark.parametrize(
    "change, says",
    [
        ({NAME: torch.ones(28, 5, dtype=torch.bfloat16)}, f"adapter.{NAME}: [28, 5] float32, held"),
        ({NAME: None}, f"adapter.{NAME}: [28, 5] float32, held in 2 ranges of rows on rank 0, not"),
        (
            {"optimizer": {"exp_avg": torch.ones(7, 4), "exp_avg_sq": torch.ones(7)}},
            "optimizer.0.exp_avg: [7, 3] float32",
        ),
        ({"optimizer": {"exp_avg": torch.ones(7, 3)}}, "optimizer.0.exp_avg_sq: [7] float32"),
        (
            {"optimizer": {"exp_avg_sq": torch.ones(7), "exp_avg": torch.ones(7, 3)}},
            "optimizer.0.exp_avg: comes where optimizer.0.exp_avg_sq does on rank 1",
        ),
    ],
    ids=["dtype", "missing", "shape beside", "missing beside", "order beside"],
)
def test_shards_that_differ_in_one_process_fail_all(job, bases, tmp_path, change, says):
    if len(job) > 2:
        says = says.replace("2 ranges", "4 ranges")
    changes = [change if rank == 1 else {} for rank in range(len(job))]
    adapter = adapter_of(bases("llama"))
    answers = job.run(
        save_unlike, changes, base=bases("llama"), out=tmp_path / "out", adapter=adapter
    )
    errors(answers, TensorMismatchError, says)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_cannot_stand_beside_shards_is_refused(job, bases, tmp_path):
    odd = [{"odd": {torch.ones(3)}, "optimizer": {"exp_avg": torch.ones(7)}}] * len(job)
    adapter = adapter_of(bases("llama"))
    answers = job.run(save_unlike, odd, base=bases("llama"), out=tmp_path / "out", adapter=adapter)
    errors(answers, ConfigError, "a Tensor of the shape [3] cannot be saved beside")
    assert not (tmp_path / "out").exists()


def test_quantised_shards_are_refused(job, bases, tmp_path):
    pytest.importorskip("torchao")
    answers = job.run(save_low_bit_states, base=bases("llama"), out=tmp_path / "out")
    errors(answers, ConfigError, "exp_avg: a DTensor whose parts are OptimState8bits")
    assert not (tmp_path / "out").exists()


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
