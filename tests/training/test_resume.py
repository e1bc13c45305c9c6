import json

import pytest
import torch

from checkpointing.errors import CheckpointingError, ConfigError, TensorMismatchError
from tests.training import peers, runs
from tests.training.runs import checkpoints, metrics, run, run_until, same, weights

SAVING = "save_every_n_steps=3"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=["lora", "full"])
def whole(request, base, tmp_path_factory):
    """A run of three epochs, 12 steps, that nothing interrupts."""
    out = tmp_path_factory.mktemp(request.param)
    run(request.param, base, out, SAVING, "epochs=3")
    return request.param, out


@pytest.mark.parametrize(
    ("stopped_after", "newest"),
    [(5, "epoch_0"), (7, "step_6"), (4, "step_3"), (12, "step_9")],
    ids=["at an epoch's end", "in mid-epoch", "in the first epoch", "in the last epoch"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    whole, base, tmp_path, stopped_after, newest
):
    kind, uninterrupted = whole
    run_until(stopped_after, kind, base, tmp_path, SAVING, "epochs=3")
    saved = checkpoints(tmp_path)
    assert newest in saved
    assert f"step_{stopped_after}" not in saved
    # Whatever happens in between must not matter.
    torch.manual_seed(1234)
    run(kind, base, tmp_path, SAVING, "epochs=3", "resume_from_checkpoint=True")
    assert metrics(tmp_path) == metrics(uninterrupted)
    assert checkpoints(tmp_path) == checkpoints(uninterrupted)
    assert same(weights(tmp_path / "epoch_2"), weights(uninterrupted / "epoch_2"))


def test_the_steps_differ_from_each_other(whole):
    _, out = whole
    losses = [line["loss"] for line in metrics(out).values()]
    assert len(losses) == len(set(losses)) == 12


def test_checkpoints_are_at_every_n_steps_and_at_each_epochs_end_once(whole):
    _, out = whole
    assert checkpoints(out) == {"step_3", "epoch_0", "step_6", "epoch_1", "step_9", "epoch_2"}
    steps = {}
    for name in checkpoints(out):
        state = torch.load(out / name / "recipe_state.pt", weights_only=True)
        steps[name] = (state["steps_run"], state["epochs_run"])
    assert steps == {
        "step_3": (3, 0),
        "epoch_0": (4, 1),
        "step_6": (6, 1),
        "epoch_1": (8, 2),
        "step_9": (9, 2),
        "epoch_2": (12, 3),
    }


def test_a_run_that_saves_at_every_step_is_one_that_never_saves(whole, base, tmp_path):
    kind, out = whole
    run(kind, base, tmp_path, "save_every_n_steps=1", "epochs=3")
    assert len(checkpoints(tmp_path)) == 12
    assert metrics(tmp_path) == metrics(out)
    assert same(weights(tmp_path / "epoch_2"), weights(out / "epoch_2"))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_epochs_can_be_added(kind, base, tmp_path):
    constant = "~lr_scheduler"
    run(kind, base, tmp_path / "two", constant)
    run(kind, base, tmp_path / "added", constant, "epochs=1")
    run(kind, base, tmp_path / "added", constant, "resume_from_checkpoint=True")
    assert metrics(tmp_path / "added") == metrics(tmp_path / "two")
    assert same(weights(tmp_path / "added/epoch_1"), weights(tmp_path / "two/epoch_1"))


def test_the_schedule_of_added_epochs_is_that_of_the_longer_run(base, tmp_path):
    run("lora", base, tmp_path / "two")
    run("lora", base, tmp_path / "added", "epochs=1")
    run("lora", base, tmp_path / "added", "resume_from_checkpoint=True")
    two, added = metrics(tmp_path / "two"), metrics(tmp_path / "added")
    assert [added[step]["lr"] for step in (5, 6, 7, 8)] == [
        two[step]["lr"] for step in (5, 6, 7, 8)
    ]
    assert added[4]["lr"] < added[5]["lr"]


def test_a_run_with_nothing_left_says_so(whole, base, tmp_path, capsys):
    kind, out = whole
    before = checkpoints(out), metrics(out)
    run(kind, base, out, "epochs=3", "resume_from_checkpoint=True")
    assert "Nothing left to train: the checkpoint that was resumed has all 3 epochs" in (
        capsys.readouterr().out
    )
    assert (checkpoints(out), metrics(out)) == before


def test_resuming_a_directory_without_checkpoints_is_a_clear_error(base, tmp_path):
    with pytest.raises(CheckpointingError, match="no complete checkpoint"):
        run("full", base, tmp_path, "resume_from_checkpoint=True")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora_rank=4", "r was 3 and is 4"),
        ("model.lora_alpha=9", r"lora_alpha was 7\.0 and is 9\.0"),
        ("model.use_rslora=True", "use_rslora was False and is True"),
        ("model.apply_lora_to_mlp=False", "target_modules was"),
        ("model.use_dora=True", "use_dora was False and is True"),
    ],
)
def test_an_adapter_does_not_go_on_with_other_settings(base, tmp_path, override, message):
    run("lora", base, tmp_path, "epochs=1", "max_steps_per_epoch=1")
    resume = ("resume_from_checkpoint=True", override)
    # Not even where another run is wanted: the tensors would mean something else.
    with pytest.raises(ConfigError, match=message):
        run("lora", base, tmp_path, *resume, "resume_override=True")


def test_the_optimizer_settings_of_the_config_count_not_the_saved_ones(base, tmp_path):
    constant = "~lr_scheduler"
    run("lora", base, tmp_path, constant, "epochs=1")
    changed = ("optimizer.lr=0.00125", "optimizer.weight_decay=0.5")
    run("lora", base, tmp_path, constant, "resume_from_checkpoint=True", *changed)
    assert [metrics(tmp_path)[step]["lr"] for step in (4, 5)] == [0.003, 0.00125]
    state = torch.load(tmp_path / "epoch_1/recipe_state.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5
    assert state["optimizer"]["state"][0]["step"] == 8


def test_the_full_recipe_does_not_pass_over_an_adapter(base, tmp_path):
    run("lora", base, tmp_path, "epochs=1")
    with pytest.raises(ConfigError, match="holds an adapter"):
        run("full", base, tmp_path, "resume_from_checkpoint=True")


def test_the_adapter_of_another_run_can_be_trained_on_afresh(base, tmp_path):
    run("lora", base, tmp_path / "first", "epochs=1")
    adapter = f"checkpointer.adapter_checkpoint={tmp_path}/first/epoch_0/adapter_model.pt"
    run("lora", base, tmp_path / "second", "optimizer.lr=0.0", "epochs=1", f"+{adapter}")
    first = torch.load(tmp_path / "first/epoch_0/adapter_model.pt", weights_only=True)
    second = torch.load(tmp_path / "second/epoch_0/adapter_model.pt", weights_only=True)
    assert same(first, second)
    assert sorted(metrics(tmp_path / "second")) == [1, 2, 3, 4]


def test_a_run_with_whole_modules_and_an_adapted_embedding_resumes_bit_for_bit(base, tmp_path):
    settings = (
        SAVING,
        "epochs=1",
        "dtype=bf16",
        "model.apply_lora_to_embeddings=True",
        "model.modules_to_save=[norm,sa_norm,output]",
    )
    run("lora", base, tmp_path / "whole", *settings)
    run_until(4, "lora", base, tmp_path / "resumed", *settings)
    assert checkpoints(tmp_path / "resumed") == {"step_3"}
    run("lora", base, tmp_path / "resumed", *settings, "resume_from_checkpoint=True")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    whole = weights(tmp_path / "whole" / "epoch_0")
    assert same(weights(tmp_path / "resumed" / "epoch_0"), whole)
    adapter = torch.load(tmp_path / "whole/epoch_0/adapter_model.pt", weights_only=True)
    own = peers.native_weights(peers.hf_model(runs.MODEL), runs.MODEL)
    for name in ("norm.scale", "layers.2.sa_norm.scale", "output.weight"):
        assert adapter[name].dtype == torch.float32
        assert 0 < (adapter[name] - own[name]).abs().max() < 0.1
    # The merged model holds what was trained, in the dtype of the run.
    merged = whole["merged/model-00001-of-00001.safetensors: model.norm.weight"]
    assert torch.equal(merged, adapter["norm.scale"].bfloat16())


def test_other_whole_modules_than_before_are_refused(base, tmp_path):
    run("lora", base, tmp_path, "epochs=1", "max_steps_per_epoch=1", "model.modules_to_save=[norm]")
    with pytest.raises(ConfigError, match=r"modules_to_save was \['norm'\] and is \[\]"):
        run("lora", base, tmp_path, "resume_from_checkpoint=True")


def test_a_bias_of_b_that_no_merged_model_could_hold_is_refused_before_the_first_step(
    base, tmp_path
):
    settings = (
        "epochs=1",
        "max_steps_per_epoch=1",
        "lr_scheduler.num_warmup_steps=0",
        "model.lora_bias=True",
    )
    with pytest.raises(TensorMismatchError, match="save_adapter_weights_only=True"):
        run("lora", base, tmp_path / "merged", *settings)
    assert checkpoints(tmp_path / "merged") == set()
    assert not (tmp_path / "merged" / "logs" / "metrics.jsonl").read_text()
    run("lora", base, tmp_path / "apart", *settings, "save_adapter_weights_only=True")
    adapter = torch.load(tmp_path / "apart/epoch_0/adapter_model.pt", weights_only=True)
    assert adapter["layers.1.attn.q_proj.lora_b.bias"].any()


def meta_directory(directory):
    """The tiny model in Meta's layout, written by hand."""
    directory.mkdir()
    dims = runs.MODEL.dims
    names = {
        "attn.q_proj": "attention.wq",
        "attn.k_proj": "attention.wk",
        "attn.v_proj": "attention.wv",
        "attn.output_proj": "attention.wo",
        "mlp.": "feed_forward.",
        "sa_norm.scale": "attention_norm.weight",
        "mlp_norm.scale": "ffn_norm.weight",
    }
    tensors = {}
    for name, tensor in peers.native_weights(peers.hf_model(runs.MODEL), runs.MODEL).items():
        for native, foreign in names.items():
            name = name.replace(native, foreign)
        tensors["norm.weight" if name == "norm.scale" else name] = tensor
    torch.save(tensors, directory / "consolidated.00.pth")
    params = {
        "dim": dims.hidden,
        "n_layers": dims.layers,
        "n_heads": dims.heads,
        "n_kv_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "vocab_size": dims.vocab,
        "norm_eps": runs.MODEL.norm_eps,
        "rope_theta": runs.MODEL.rope_theta,
    }
    (directory / "params.json").write_text(json.dumps(params))
    return directory


def tune_directory(directory, base):
    """The tiny model in native names, with the config of the Hugging Face directory."""
    directory.mkdir()
    torch.save(peers.native_weights(peers.hf_model(runs.MODEL), runs.MODEL), directory / "model.pt")
    (directory / "config.json").write_bytes((base / "config.json").read_bytes())
    return directory


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("layout", ["meta", "tune"])
def test_the_other_formats_train_and_resume_to_the_same_losses(layout, kind, base, tmp_path):
    if layout == "meta":
        directory = meta_directory(tmp_path / "meta")
        component = "checkpointer=checkpointing.FullModelMetaCheckpointer"
    else:
        directory = tune_directory(tmp_path / "tune", base)
        component = "checkpointer=checkpointing.FullModelTorchTuneCheckpointer"
    args = (component, f"checkpointer.checkpoint_dir={directory}", SAVING)
    run(kind, base, tmp_path / "hf", SAVING)
    run_until(7, kind, base, tmp_path / "out", *args)
    run(kind, base, tmp_path / "out", *args, "resume_from_checkpoint=True")
    assert metrics(tmp_path / "out") == metrics(tmp_path / "hf")
