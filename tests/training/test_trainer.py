import hashlib
import random
import shutil
import sys

import numpy
import pytest
import torch

from checkpointing.errors import ConfigError
from checkpointing.training import (
    ChatTokenizer,
    InstructDataset,
    NonFiniteLossError,
    TrainingOptions,
    build_decoder,
)
from checkpointing.training.batches import BatchLoader, collate
from checkpointing.training.rng import rng_state, set_rng_state, set_seed
from checkpointing.training.trainer import summed_loss
from tests.training import peers, runs
from tests.training.runs import MODEL, checkpoints, metrics, run, weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return runs.write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def dataset(base):
    return InstructDataset(ChatTokenizer(base), base / "rows.jsonl")


def first_batches(dataset, number):
    batches = list(BatchLoader(dataset, batch_size=2, seed=5))
    return batches[:number]


def peer_loss(model, batches):
    """Mean of transformers' loss over the labelled tokens of all batches."""
    losses, counts = [], []
    for batch in batches:
        count = (batch.labels[:, 1:] != -100).sum()
        losses.append(model(batch.tokens, labels=batch.labels).loss * count)
        counts.append(count)
    return sum(losses) / sum(counts)


def test_the_loss_of_a_step_is_the_mean_over_the_labelled_tokens_of_its_batches(
    base, dataset, tmp_path
):
    with torch.no_grad():
        expected = peer_loss(peers.hf_model(MODEL), first_batches(dataset, 2))
    run("full", base, tmp_path, "epochs=1", "max_steps_per_epoch=1")
    assert metrics(tmp_path)[1]["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_is_that_of_torch_on_transformers_model(base, dataset, tmp_path):
    peer = peers.hf_model(MODEL)
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1)
    peer_loss(peer, first_batches(dataset, 2)).backward()
    norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), 0.5)
    optimizer.step()
    run(
        "full",
        base,
        tmp_path,
        "~lr_scheduler",
        "optimizer=torch.optim.SGD",
        "optimizer.lr=0.1",
        "clip_grad_norm=0.5",
        "epochs=1",
        "max_steps_per_epoch=1",
    )
    assert metrics(tmp_path)[1]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    found = {key.split(": ")[1]: tensor for key, tensor in weights(tmp_path / "epoch_0").items()}
    for name, tensor in peer.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name


def test_accumulated_small_batches_train_like_one_large_batch(base, tmp_path):
    run("full", base, tmp_path / "small", "batch_size=1", "gradient_accumulation_steps=6")
    run("full", base, tmp_path / "large", "batch_size=6", "gradient_accumulation_steps=1")
    small, large = metrics(tmp_path / "small"), metrics(tmp_path / "large")
    # 13 conversations: two steps of 6 and one of 1.
    assert sorted(small) == sorted(large) == [1, 2, 3, 4, 5, 6]
    for step, line in small.items():
        assert line == pytest.approx(large[step], rel=1e-4), step


def test_without_a_limit_the_gradient_is_not_clipped_but_logged(base, tmp_path):
    for name, limit in (("null", "null"), ("huge", "1e9")):
        run("full", base, tmp_path / name, f"clip_grad_norm={limit}", "epochs=1")
    assert metrics(tmp_path / "null") == metrics(tmp_path / "huge")
    assert metrics(tmp_path / "null")[1]["grad_norm"] > 0


def test_packed_conversations_have_the_loss_of_separate_ones(base, dataset):
    packed = InstructDataset(ChatTokenizer(base, 120), base / "rows.jsonl", packed=True)
    assert len(packed) < len(dataset)
    weights = peers.native_weights(peers.hf_model(MODEL), MODEL)
    model = build_decoder(MODEL, weights, torch.float32)
    with torch.no_grad():
        losses = [
            sum(summed_loss(model, collate([rows[i]], rows.pad_id, rows.packed)) for i in range(n))
            for rows, n in ((packed, len(packed)), (dataset, len(dataset)))
        ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_lowers_the_loss(base, tmp_path, kind, dtype):
    run(kind, base, tmp_path, f"dtype={dtype}", "epochs=6", "optimizer.lr=0.02")
    losses = [line["loss"] for line in metrics(tmp_path).values()]
    assert losses[-1] < 0.75 * losses[0]
    found = weights(tmp_path / "epoch_5")
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    models = {t.dtype for n, t in found.items() if not n.startswith("adapter_model")}
    assert models == {expected}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_training_leaves_the_base_directory_alone(base, tmp_path, kind):
    def state():
        return {file.name: hashlib.sha256(file.read_bytes()).digest() for file in base.iterdir()}

    before = state()
    run(kind, base, tmp_path)
    assert state() == before


def test_saving_only_the_adapter_writes_no_model(base, tmp_path):
    run("lora", base, tmp_path, "save_adapter_weights_only=True", "epochs=1")
    assert not (tmp_path / "epoch_0/merged").exists()
    assert {name.split(":")[0] for name in weights(tmp_path / "epoch_0")} == {
        "adapter_model.safetensors"
    }


def test_epochs_end_after_the_largest_number_of_steps(base, tmp_path):
    run("lora", base, tmp_path, "max_steps_per_epoch=3", "save_every_n_steps=2")
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert checkpoints(tmp_path) == {"step_2", "epoch_0", "step_4", "epoch_1"}


def test_every_n_steps_are_logged(base, tmp_path):
    run("lora", base, tmp_path, "log_every_n_steps=3")
    assert sorted(metrics(tmp_path)) == [3, 6]


def test_a_diverging_run_stops_and_saves_nothing(base, tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"of step 2 is .*Lower optimizer\.lr"):
        run(
            "full",
            base,
            tmp_path,
            "~lr_scheduler",
            "optimizer.lr=1e30",
            "save_every_n_steps=1",
        )
    assert sorted(metrics(tmp_path)) == [1]
    assert checkpoints(tmp_path) == {"step_1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs=0: must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"log_every_n_steps": 0}, "log_every_n_steps=0"),
        ({"max_steps_per_epoch": 0}, "max_steps_per_epoch=0: must be at least 1, or null"),
        ({"save_every_n_steps": -1}, "save_every_n_steps=-1"),
        ({"clip_grad_norm": 0.0}, r"clip_grad_norm=0\.0: must be above 0"),
    ],
)
def test_impossible_options_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainingOptions(**{"epochs": 1, "seed": 0, **change})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=float32", "dtype=float32: there are bf16, fp32"),
        ("device=cuda:77", "device=cuda:77 cannot be used here"),
        ("batch_size=0", "batch_size=0: must be at least 1"),
        ("~epochs", "missing from the config: epochs"),
    ],
)
def test_a_wrong_recipe_value_is_a_clear_error(base, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        run("full", base, tmp_path, override)


def test_a_run_without_a_seed_draws_one_and_keeps_it(base, tmp_path, capsys):
    run("lora", base, tmp_path, "seed=null", "epochs=1")
    state = torch.load(tmp_path / "epoch_0/recipe_state.pt", weights_only=True)
    assert f"seed={state['seed']} was chosen at random" in capsys.readouterr().out


def test_the_end_of_a_run_says_where_the_checkpoint_is_and_what_to_do(base, tmp_path, capsys):
    run("lora", base, tmp_path, "epochs=1")
    out = capsys.readouterr().out
    assert f"Checkpoint: {tmp_path}/epoch_0\n" in out
    assert f"'{base}'), '{tmp_path}/epoch_0')" in out
    assert f"AutoModelForCausalLM.from_pretrained('{tmp_path}/epoch_0/merged')" in out
    assert "resume_from_checkpoint=True epochs=2" in out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_compiled_run_has_the_losses_of_a_plain_one(base, tmp_path, kind):
    dropout = ["model.lora_dropout=0.0"] if kind == "lora" else []
    run(kind, base, tmp_path / "plain", *dropout)
    run(kind, base, tmp_path / "compiled", *dropout, "compile=True")
    plain, compiled = metrics(tmp_path / "plain"), metrics(tmp_path / "compiled")
    assert plain.keys() == compiled.keys()
    for step, line in plain.items():
        assert compiled[step] == pytest.approx(line, rel=1e-3)


def test_the_random_state_is_restored_for_torch_python_and_numpy(tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand()

    set_seed(3)
    random.gauss(0, 1)
    torch.save(rng_state(), tmp_path / "state.pt")
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected
    assert "numpy" in sys.modules
