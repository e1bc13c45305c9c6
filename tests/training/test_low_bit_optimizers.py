"""Optimizers whose states are no plain fp32 tensors: they train, are saved, and go on."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from checkpointing.errors import ConfigError, CorruptCheckpointError
from checkpointing.resume import check_recipe_state, load_recipe_state
from checkpointing.save_plan import SavePlan
from tests.training import peers, runs
from tests.training.runs import checkpoints, metrics, run, run_until, same, weights

REPOSITORY = Path(__file__).parents[2]
# torchao quantises the states of tensors with at least 4096 elements, in blocks of 128 or 256:
# with rank 64 those of the adapter, but for the 28 wide values; of the model w1 to w3.
MODEL = peers.config(vocab=307, layers=2, hidden=96, ffn=112)
SETTINGS = ("model.lora_rank=64", "save_every_n_steps=3")
STATES = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}


pytestmark = pytest.mark.usefixtures("not_compiled")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = runs.write_base(tmp_path_factory.mktemp("base"))
    peers.hf_model(MODEL).save_pretrained(directory)
    return directory


def optimizer(path, *more):
    """Overrides of a recipe's config."""
    return (*SETTINGS, f"optimizer._component_={path}", *more)


def saved_states(checkpoint):
    """Class names of the tensors in an optimizer's state, by key."""
    state = load_recipe_state(checkpoint / "recipe_state.pt")["optimizer"]["state"]
    return {
        key: {type(one[key]).__name__ for one in state.values()}
        for key in next(iter(state.values()))
    }


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("quantize", [False, True], ids=["", "qlora"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(base, tmp_path, name, quantize):
    settings = optimizer(f"torchao.optim.{name}", f"model.quantize_base={quantize}")
    run("lora", base, tmp_path / "whole", *settings)
    run_until(7, "lora", base, tmp_path / "stopped", *settings)
    assert "step_6" in checkpoints(tmp_path / "stopped")
    assert STATES[name] in saved_states(tmp_path / "stopped/step_6")["exp_avg"]
    run("lora", base, tmp_path / "stopped", *settings, "resume_from_checkpoint=True")
    # The learning rate is in the metrics: these optimizers keep it in a tensor.
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    found, expected = (weights(tmp_path / out / "epoch_1") for out in ("stopped", "whole"))
    assert same(found, expected)


def test_the_fused_adamw_of_torch_resumes_bit_for_bit(base, tmp_path):
    settings = optimizer("torch.optim.AdamW", "+optimizer.fused=True")
    run("lora", base, tmp_path / "whole", *settings)
    run_until(7, "lora", base, tmp_path / "stopped", *settings)
    run("lora", base, tmp_path / "stopped", *settings, "resume_from_checkpoint=True")
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")


def test_the_full_recipe_resumes_with_8_bit_states_too(base, tmp_path):
    settings = ("save_every_n_steps=3", "optimizer._component_=torchao.optim.AdamW8bit")
    run("full", base, tmp_path / "whole", *settings)
    run_until(5, "full", base, tmp_path / "stopped", *settings)
    assert "OptimState8bit" in saved_states(tmp_path / "stopped/epoch_0")["exp_avg_sq"]
    run("full", base, tmp_path / "stopped", *settings, "resume_from_checkpoint=True")
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert same(weights(tmp_path / "stopped/epoch_1"), weights(tmp_path / "whole/epoch_1"))


@pytest.fixture(scope="module")
def recipe_state(tmp_path_factory):
    """A file with the state of an AdamW8bit after a step."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(5)
    parameter = torch.nn.Parameter(torch.randn(64, 84))
    parameter.grad = torch.randn(64, 84)
    adam = AdamW8bit([parameter])
    torch.compiler.set_stance("force_eager")
    adam.step()
    path = tmp_path_factory.mktemp("state") / "recipe_state.pt"
    torch.save({"optimizer": adam.state_dict()}, path)
    return path


def python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )


def test_torchao_is_imported_for_a_file_that_needs_it_and_for_no_other(recipe_state, tmp_path):
    torch.save({"optimizer": {}}, tmp_path / "plain.pt")
    code = (
        "import sys; from pathlib import Path\n"
        "from checkpointing.resume import load_recipe_state\n"
        "load_recipe_state(Path(sys.argv[1]))\n"
        "print('torchao' in sys.modules)\n"
        "state = load_recipe_state(Path(sys.argv[2]))['optimizer']['state'][0]\n"
        "print(type(state['exp_avg']).__name__, state['exp_avg'].dequantize().abs().max() > 0)"
    )
    result = python(code, tmp_path / "plain.pt", recipe_state)
    assert result.stdout.splitlines() == ["False", "OptimState8bit tensor(True)"], result.stderr


def edited(path, out, old, new):
    """A copy of a file of torch.save that names another class."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new)
            target.writestr(name, data)
    return out


def test_a_file_of_a_torchao_that_had_the_class_elsewhere_loads(recipe_state, tmp_path):
    new, old = b"torchao.optim.subclass_8bit", b"torchao.prototype.low_bit_optim.subclass_8bit"
    older = load_recipe_state(edited(recipe_state, tmp_path / "older.pt", new, old))
    newer = load_recipe_state(recipe_state)
    moments = [state["optimizer"]["state"][0]["exp_avg"].dequantize() for state in (older, newer)]
    assert torch.equal(*moments)


def test_other_classes_of_torchao_are_not_let_in(recipe_state, tmp_path):
    path = edited(recipe_state, tmp_path / "other.pt", b"\nOptimState8bit\n", b"\nscale_tensor\n")
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        load_recipe_state(path)


def test_a_torchao_without_the_class_is_named_with_its_version_and_what_to_install(
    recipe_state, tmp_path
):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").touch()
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from checkpointing.resume import load_recipe_state\n"
        "load_recipe_state(Path(sys.argv[1]))"
    )
    message = python(code, recipe_state, tmp_path).stderr.splitlines()[-1]
    assert f"ConfigError: {recipe_state}: holds the state of a torchao optimizer" in message
    assert "has no torchao.optim.subclass_8bit.OptimState8bit" in message
    assert message.endswith("torchao that the run was trained with, or torchao 0.18")


class Odd(torch.Tensor):
    """A tensor class that only its own program knows."""


def test_a_tensor_that_could_not_be_read_again_is_refused_before_it_is_written():
    odd = torch.ones(3).as_subclass(Odd)
    with pytest.raises(ConfigError, match=r"recipe state\.optimizer\[1\]: a Odd cannot be saved"):
        check_recipe_state({"optimizer": [torch.ones(2), odd]})


def test_the_room_that_is_asked_for_is_that_of_the_stored_8_bit_states(recipe_state):
    state = load_recipe_state(recipe_state)["optimizer"]
    for key in ("exp_avg", "exp_avg_sq"):
        plan = SavePlan(None, None, None, None, {"one": state["state"][0][key]})
        # A byte for each element, an fp32 scale for every 256, and the table of 256 values.
        assert plan.nbytes == 64 * 84 + 4 * (64 * 84 // 256) + 4 * 256
