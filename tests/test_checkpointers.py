"""What the checkpointers of all formats promise, each on a checkpoint of its own format."""

import itertools
from dataclasses import replace

import pytest
import torch

from checkpointing import (
    AdapterConfig,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    MergedStateDict,
)
from checkpointing.errors import ConfigError, TensorMismatchError
from tests.formats.test_meta import PARAMS, meta_weights, write_meta
from tests.tiny import ATTENTION, assert_same_tensors, random_adapter, random_native, write_hf
from tests.training.peers import config, hf_model, native_weights

CONFIG = config()
CLASSES = {
    "hf": FullModelHFCheckpointer,
    "meta": FullModelMetaCheckpointer,
    "tune": FullModelTorchTuneCheckpointer,
}
ADAPTER = AdapterConfig(4, 6, ATTENTION)


def write_base(directory, name, dtype=torch.float32):
    """A base in a format; its native weights."""
    if name == "hf":
        model = hf_model(CONFIG).to(dtype)
        write_hf(model, directory)
        return native_weights(model, CONFIG)
    native = random_native(CONFIG, dtype)
    if name == "meta":
        write_meta(directory, meta_weights(native), 1, 0, PARAMS)
    else:
        directory.mkdir(parents=True)
        torch.save(native, directory / "model-00001-of-00001.bin")
        hf_model(CONFIG).config.save_pretrained(directory)
    return native


@pytest.fixture(params=CLASSES)
def name(request):
    return request.param


@pytest.fixture
def base(tmp_path, name):
    write_base(tmp_path / "base", name)
    return tmp_path / "base"


def make(name, base, **options):
    return CLASSES[name](base, output_dir=base.parent / "out", **options)


def adapter_state(weights, adapter=None, **recipe_state):
    adapter = adapter or random_adapter(CONFIG.dims, ADAPTER)
    return {
        "model": MergedStateDict(weights, adapter, ADAPTER),
        "adapter": adapter,
        "adapter_config": ADAPTER.to_state(),
        **recipe_state,
    }


def test_a_full_fine_tune_resumes_from_its_trained_weights(tmp_path, name, base):
    trained = {n: t + 1 for n, t in make(name, base).load_checkpoint()["model"].items()}
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5)}}}
    state = {"model": trained, "optimizer": optimizer, "epochs_run": 1, "steps_run": 9}
    make(name, base).save_checkpoint(state, epoch=0, intermediate_checkpoint=True)

    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert_same_tensors(resumed["model"], trained)
    assert (resumed["epochs_run"], resumed["steps_run"]) == (1, 9)
    assert_same_tensors(resumed["optimizer"]["state"][0], optimizer["state"][0])


def test_an_adapter_run_resumes_from_its_base_and_never_from_merged_weights(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    state = adapter_state(weights, steps_run=4)
    make(name, base).save_checkpoint(state, epoch=0)
    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert_same_tensors(resumed["model"], weights)
    assert_same_tensors(resumed["adapter"], state["adapter"])
    assert AdapterConfig.from_state(resumed["adapter_config"]) == ADAPTER
    assert resumed["steps_run"] == 4


def test_a_saved_model_loads_in_a_checkpointer_of_its_format(tmp_path, name, base):
    weights = make(name, base).load_checkpoint()["model"]
    state = adapter_state(weights)
    saved = make(name, base).save_checkpoint(state, epoch=0)
    merged = saved / "merged" if name == "hf" else saved
    assert_same_tensors(CLASSES[name](merged).load_checkpoint()["model"], dict(state["model"]))
    assert_same_tensors(torch.load(saved / "adapter_model.pt"), state["adapter"])


def test_saving_changes_neither_the_state_dict_nor_any_tensor_in_it(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    weights = {n: t.clone() for n, t in weights.items()}
    adapter = random_adapter(CONFIG.dims, ADAPTER)
    momentum = torch.randn(7)
    state = {
        "model": weights,
        "adapter": adapter,
        "adapter_config": ADAPTER.to_state(),
        "optimizer": {"momentum": momentum},
    }
    keys, config_before = list(state), dict(state["adapter_config"])
    tensors = {**weights, **adapter, "momentum": momentum}
    copies = {n: t.clone() for n, t in tensors.items()}
    make(name, base).save_checkpoint(state, epoch=0, intermediate_checkpoint=True)
    assert list(state) == keys and state["adapter_config"] == config_before
    assert state["model"] is weights and set(weights) == set(random_native(CONFIG))
    assert_same_tensors(tensors, copies)


def test_an_adapter_only_save_never_computes_merged_weights(name, base):
    class NeverRead(dict):
        def __getitem__(self, key):
            raise AssertionError(f"{key} was read")

    weights = make(name, base).load_checkpoint()["model"]
    state = {**adapter_state(weights), "model": NeverRead(weights)}
    saved = make(name, base).save_checkpoint(state, epoch=0, adapter_only=True)
    written = {path.name for path in saved.iterdir()}
    assert "adapter_model.pt" in written
    assert not any(n.startswith(("model", "consolidated", "merged")) for n in written)


def test_step_checkpoints_have_directories_of_their_own(name, base):
    checkpointer = make(name, base)
    state = checkpointer.load_checkpoint()
    saved = [
        checkpointer.save_checkpoint(state, epoch=0, step=step, dir_prefix="step")
        for step in (5, 10)
    ]
    saved.append(checkpointer.save_checkpoint(state, epoch=0, step=12))
    assert [path.name for path in saved] == ["step_5", "step_10", "epoch_0"]
    assert all((path / "manifest.json").is_file() for path in saved)


def test_the_newest_checkpoint_is_the_one_with_the_most_steps_whatever_its_name(name, base):
    checkpointer = make(name, base)
    weights = checkpointer.load_checkpoint()["model"]
    for epoch, step, prefix in ((0, 100, "epoch"), (1, 900, "step"), (7, 50, "epoch")):
        state = {"model": weights, "steps_run": step}
        checkpointer.save_checkpoint(state, epoch, step=step, dir_prefix=prefix)
    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert resumed["steps_run"] == 900


def test_a_directory_may_be_named_to_resume_from_just_that_one(name, base):
    checkpointer = make(name, base)
    weights = checkpointer.load_checkpoint()["model"]
    for epoch in (0, 1):
        checkpointer.save_checkpoint({"model": weights, "steps_run": 10 + epoch}, epoch)
    first = str(base.parent / "out" / "epoch_0")
    assert make(name, base, resume_from_checkpoint=first).load_checkpoint()["steps_run"] == 10


def test_an_unfinished_save_is_neither_resumed_from_nor_left_lying(name, base):
    checkpointer = make(name, base)
    state = {**checkpointer.load_checkpoint(), "steps_run": 1}
    checkpointer.save_checkpoint(state, epoch=0)
    out = base.parent / "out"
    # Above the largest process id that Linux gives.
    (out / ".epoch_1.saving-4194305").mkdir()
    # What torchtune, killed while saving, leaves: the final name without all its files.
    (out / "epoch_2").mkdir()
    (out / "epoch_2" / "model-00001-of-00002.safetensors").write_bytes(b"half")
    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert resumed["steps_run"] == 1
    assert not (out / ".epoch_1.saving-4194305").exists() and (out / "epoch_2").exists()


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(name, base, caplog):
    checkpointer = make(name, base)
    weights = checkpointer.load_checkpoint()["model"]
    for epoch in (0, 1):
        newest = checkpointer.save_checkpoint({"model": weights, "steps_run": 1 + epoch}, epoch)
    state = newest / "recipe_state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    resumed = make(name, base, should_load_recipe_state=True).load_checkpoint()
    assert resumed["steps_run"] == 1
    assert "epoch_1/recipe_state.pt" in caplog.text


def test_only_the_newest_checkpoints_of_this_run_are_kept(name, base):
    other = make(name, base)
    state = other.load_checkpoint()
    other.save_checkpoint(state, epoch=9, step=900)
    (base.parent / "out" / "notes").mkdir()
    (base.parent / "out" / "epoch_8").mkdir()
    checkpointer = make(name, base, keep_last_n_checkpoints=2)
    for epoch, step in ((0, 10), (1, 20), (2, 30)):
        checkpointer.save_checkpoint(state, epoch, step=step)
    kept = {path.name for path in (base.parent / "out").iterdir()}
    assert kept == {"epoch_1", "epoch_2", "epoch_8", "epoch_9", "notes"}


def test_the_checkpoint_just_saved_is_kept_though_one_with_more_steps_is_there(name, base):
    checkpointer = make(name, base, keep_last_n_checkpoints=1)
    state = checkpointer.load_checkpoint()
    checkpointer.save_checkpoint(state, epoch=5, step=500)
    saved = checkpointer.save_checkpoint(state, epoch=0, step=10)
    assert saved.is_dir()


def test_a_resumed_run_goes_on_counting_its_own_checkpoints(name, base):
    state = make(name, base).load_checkpoint()
    make(name, base).save_checkpoint({**state, "steps_run": 1}, epoch=0)
    resumed = make(name, base, should_load_recipe_state=True, keep_last_n_checkpoints=1)
    resumed.load_checkpoint()
    resumed.save_checkpoint({**state, "steps_run": 2}, epoch=1)
    assert {path.name for path in (base.parent / "out").iterdir()} == {"epoch_1"}


def test_an_existing_checkpoint_of_the_name_is_replaced(name, base):
    checkpointer = make(name, base)
    weights = checkpointer.load_checkpoint()["model"]
    checkpointer.save_checkpoint({"model": weights, "steps_run": 1}, epoch=0)
    checkpointer.save_checkpoint({"model": weights, "steps_run": 2}, epoch=0)
    assert make(name, base, should_load_recipe_state=True).load_checkpoint()["steps_run"] == 2
    assert [path.name for path in (base.parent / "out").iterdir()] == ["epoch_0"]


def test_an_adapter_is_resumed_only_on_the_base_it_was_trained_on(tmp_path, name, base):
    weights = make(name, base).load_checkpoint()["model"]
    saved = make(name, base).save_checkpoint(adapter_state(weights), epoch=0)
    other = tmp_path / "other"
    torch.manual_seed(99)
    write_base(other, name, torch.bfloat16)
    for options in (
        {"should_load_recipe_state": True},
        {"adapter_checkpoint": saved / "adapter_model.pt"},
    ):
        checkpointer = CLASSES[name](other, output_dir=tmp_path / "out", **options)
        with pytest.raises(ConfigError, match="was trained on another base"):
            checkpointer.load_checkpoint()


def test_an_adapter_may_be_named_to_start_from(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    state = adapter_state(weights)
    make(name, base).save_checkpoint(state, epoch=3, adapter_only=True)
    relative = make(name, base, adapter_checkpoint="epoch_3/adapter_model.pt")
    assert_same_tensors(relative.load_checkpoint()["adapter"], state["adapter"])


def test_torchtunes_default_file_names_mean_nothing_to_load_unless_resuming(name, base):
    checkpointer = make(
        name, base, adapter_checkpoint="adapter_model.pt", recipe_checkpoint="recipe_state.pt"
    )
    assert set(checkpointer.load_checkpoint()) == {"model"}


def test_without_an_adapter_config_the_native_adapter_is_saved_all_the_same(name, base, caplog):
    weights = make(name, base).load_checkpoint()["model"]
    state = adapter_state(weights)
    del state["adapter_config"]
    saved = make(name, base).save_checkpoint(state, epoch=0)
    assert_same_tensors(torch.load(saved / "adapter_model.pt"), state["adapter"])
    assert not (saved / "adapter_config.json").exists()
    assert ("no 'adapter_config'" in caplog.text) == (name == "hf")


def test_a_recipe_state_that_would_need_to_run_code_is_refused_before_anything_is_written(
    name, base
):
    import numpy as np

    checkpointer = make(name, base)
    state = checkpointer.load_checkpoint()
    for value, kind in (
        (np.float64(1), "float64"),
        (np.ones(2), "ndarray"),
        (itertools.count(), "count"),
    ):
        with pytest.raises(ConfigError, match=rf"recipe state\.rng\.x\[1\]: a {kind} cannot"):
            checkpointer.save_checkpoint({**state, "rng": {"x": [0, value]}}, epoch=0)
    assert not (base.parent / "out").exists()


def test_a_model_that_is_not_whole_is_refused_before_anything_is_written(name, base):
    checkpointer = make(name, base)
    weights = dict(checkpointer.load_checkpoint()["model"])
    del weights["layers.1.mlp.w2.weight"]
    weights["layers.0.attn.q_norm.scale"] = torch.ones(14)
    weights["norm.scale"] = torch.ones(41)
    with pytest.raises(TensorMismatchError) as caught:
        checkpointer.save_checkpoint({"model": weights}, epoch=0)
    assert len(caught.value.problems) == 3
    assert not (base.parent / "out").exists()


def test_a_save_without_what_it_needs_says_which_key(name, base):
    checkpointer = make(name, base)
    with pytest.raises(ConfigError, match="has no 'adapter', which adapter_only=True needs"):
        checkpointer.save_checkpoint(checkpointer.load_checkpoint(), epoch=0, adapter_only=True)
    with pytest.raises(ConfigError, match="has no 'model'"):
        checkpointer.save_checkpoint({}, epoch=0)
    with pytest.raises(ConfigError, match="give 'epoch', or 'step' and the step's number"):
        checkpointer.save_checkpoint({}, epoch=0, dir_prefix="step")


def test_saving_keeps_a_tensor_for_each_thread_in_memory_and_not_the_model(tmp_path, monkeypatch):
    """Merged weights are computed one after the other, each freed before the next."""
    import weakref

    monkeypatch.setenv("TUNEPOINT_THREADS", "2")
    write_base(tmp_path / "base", "hf")
    checkpointer = make("hf", tmp_path / "base")
    merged = adapter_state(checkpointer.load_checkpoint()["model"])["model"]
    alive: list[weakref.ref] = []
    most = 0
    rows = merged.rows

    def counted(name):
        def read(start, stop):
            nonlocal most
            tensor = found.read(start, stop)
            if ".attn." in name:  # the others are the base's own, and live on
                alive.append(weakref.ref(tensor))
                most = max(most, sum(ref() is not None for ref in alive))
            return tensor

        found = rows(name)
        return replace(found, read=read)

    merged.rows = counted
    checkpointer.save_checkpoint({"model": merged}, epoch=0)
    # Another one is what it is computed to in the format's own order of rows.
    assert len(alive) == 4 * CONFIG.dims.layers and most <= 2 * 2


def test_an_exception_in_the_middle_of_a_save_leaves_the_model_as_it_was(name, base):
    weights = {n: t.clone() for n, t in make(name, base).load_checkpoint()["model"].items()}
    before = {n: t.clone() for n, t in weights.items()}
    state = adapter_state(weights)
    rows = state["model"].rows

    def interrupted(start, stop):
        raise RuntimeError("interrupted")

    def fails_at_the_last(name):
        return replace(rows(name), read=interrupted) if name == "norm.scale" else rows(name)

    state["model"].rows = fails_at_the_last
    with pytest.raises(RuntimeError, match="interrupted"):
        make(name, base).save_checkpoint(state, epoch=0)
    assert_same_tensors(weights, before)
    assert list((base.parent / "out").iterdir()) == []


def test_a_named_recipe_state_decides_which_checkpoint_all_of_it_is_of(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    adapters = [random_adapter(CONFIG.dims, ADAPTER, seed) for seed in (1, 2)]
    for epoch, adapter in enumerate(adapters):
        state = adapter_state(weights, adapter, steps_run=10 + epoch)
        make(name, base).save_checkpoint(state, epoch, adapter_only=True)
    resumed = make(
        name, base, should_load_recipe_state=True, recipe_checkpoint="epoch_0/recipe_state.pt"
    ).load_checkpoint()
    assert resumed["steps_run"] == 10
    assert_same_tensors(resumed["adapter"], adapters[0])


def test_an_adapter_to_start_from_is_not_taken_for_that_of_the_resumed_checkpoint(name, base):
    weights = make(name, base).load_checkpoint()["model"]
    start, trained = (random_adapter(CONFIG.dims, ADAPTER, seed) for seed in (1, 2))
    file = base.parent / "start.pt"
    torch.save(start, file)
    make(name, base).save_checkpoint(adapter_state(weights, trained, steps_run=5), epoch=0)
    options = {"adapter_checkpoint": file}
    assert_same_tensors(make(name, base, **options).load_checkpoint()["adapter"], start)
    resumed = make(name, base, should_load_recipe_state=True, **options).load_checkpoint()
    assert_same_tensors(resumed["adapter"], trained)


def test_a_converted_model_in_the_output_directory_is_nothing_to_resume_from(name, base):
    from checkpointing.convert import plan_conversion, write_model
    from checkpointing.errors import CheckpointNotFoundError

    converted = base.parent / "out" / "converted"
    write_model(plan_conversion(base, "tune"), converted)
    for resume in (True, str(converted)):
        with pytest.raises(CheckpointNotFoundError, match="checkpoint"):
            make(name, base, should_load_recipe_state=resume)
    state = {**make(name, base).load_checkpoint(), "steps_run": 3}
    make(name, base).save_checkpoint(state, epoch=0)
    assert make(name, base, should_load_recipe_state=True).load_checkpoint()["steps_run"] == 3
