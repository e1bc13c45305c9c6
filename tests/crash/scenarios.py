"""Commands that write checkpoints in every way, and the models that they start from."""

from dataclasses import dataclass
from pathlib import Path

from checkpointing.cli.main import main
from tests.training import peers
from tests.training.runs import recipe_config, write_rows
from tests.training.tiny_tokenizer import write_tokenizer

# Few tensors: each is another call at which a process can be killed.
MODEL = peers.config(vocab=307, layers=1)
# The place of the inputs in a command, and the output directory, which lies where it is run.
INPUTS, OUT = "INPUTS", "out"
RESUME = "resume_from_checkpoint=True"
# What a thread writes from one place on, in bytes: so small that these models are written in many.
RANGE = 4 << 10


@dataclass(frozen=True)
class Scenario:
    """A command, killed while it saves.

    Attributes:
        command: what is killed.
        again: what the user runs then.
        before: commands that were run to their end before.
        saves: the saves that are looked at, by the names of the checkpoints; all if empty.
        exchange: whether the file system can exchange two names.
    """

    command: tuple[str, ...]
    again: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    saves: tuple[str, ...] = ()
    exchange: bool = True

    @property
    def resumes(self) -> bool:
        """The second command goes on where the first one was."""
        return RESUME in self.again


def _run(kind: str, *overrides: str, base: str = "") -> tuple[str, ...]:
    recipe = f"{kind}_finetune_single_device"
    config = f"{INPUTS}/{kind}/recipe.yaml"
    settings = [f"output_dir={OUT}", "epochs=1"]
    if base:
        names = {"meta": "FullModelMetaCheckpointer", "tune": "FullModelTorchTuneCheckpointer"}
        settings += [
            f"checkpointer=checkpointing.{names[base]}",
            f"checkpointer.checkpoint_dir={INPUTS}/{base}",
        ]
    return ("run", recipe, "--config", config, *settings, *overrides)


def _training(
    kind: str, *overrides: str, base: str = "", saves: tuple[str, ...] = ("epoch_0",)
) -> Scenario:
    command = _run(kind, *overrides, base=base)
    return Scenario(command, (*command, RESUME), saves=saves)


def _overwriting(exchange: bool) -> Scenario:
    """Goes back to an earlier checkpoint, and so comes to a later one again."""
    settings = ("~lr_scheduler", "save_every_n_steps=3", "save_adapter_weights_only=True")
    first = _run("lora", *settings)
    longer = _run("lora", *settings, "epochs=2")
    return Scenario(
        command=(*longer, f"resume_from_checkpoint={OUT}/step_3"),
        again=(*longer, RESUME),
        before=(first,),
        saves=("epoch_0",),
        exchange=exchange,
    )


def _fresh() -> Scenario:
    command = _run("full", "seed=6")
    return Scenario(command, command, before=(_run("full"),))


_EVERY_2 = "save_every_n_steps=2"
_CONVERT = ("convert", f"{INPUTS}/hf", f"{OUT}/model", "--overwrite", "--to")
_SMALL_FILES = ("--max-shard-size", "40kB")
_MERGE = ("merge", f"{INPUTS}/hf", f"{INPUTS}/trained/{{}}", f"{OUT}/model", "--overwrite")
_EARLIER, _LATER = ([part.format(name) for part in _MERGE] for name in ("step_2", "epoch_0"))

SCENARIOS = {
    "HF": _training("full", _EVERY_2),
    "HF with an adapter": _training("lora", _EVERY_2),
    "adapter only": _training("lora", _EVERY_2, "save_adapter_weights_only=True", saves=()),
    "asynchronous": _training("lora", _EVERY_2, "enable_async_checkpointing=True", saves=()),
    "Meta": _training("full", _EVERY_2, base="meta"),
    "tune": _training("lora", _EVERY_2, base="tune"),
    "overwriting": _overwriting(exchange=True),
    "overwriting where names cannot be exchanged": _overwriting(exchange=False),
    "a new run in the old directory": _fresh(),
    "retention": _training(
        "lora",
        "save_every_n_steps=1",
        "save_adapter_weights_only=True",
        "+checkpointer.keep_last_n_checkpoints=2",
        saves=("step_3", "epoch_0"),
    ),
    "training goes on after an error": _training(
        "lora",
        _EVERY_2,
        "save_adapter_weights_only=True",
        "on_save_error=continue",
        saves=("step_2",),
    ),
    "convert": Scenario((*_CONVERT, "meta"), (*_CONVERT, "meta"), before=((*_CONVERT, "tune"),)),
    "convert into several files": Scenario(
        (*_CONVERT, "tune", *_SMALL_FILES),
        (*_CONVERT, "tune", *_SMALL_FILES),
        before=((*_CONVERT, "meta"),),
    ),
    "merge": Scenario(tuple(_LATER), tuple(_LATER), before=(tuple(_EARLIER),)),
}


def write_inputs(directory: Path) -> Path:
    """The models, the configs and an adapter that the commands name."""
    hf = directory / "hf"
    peers.hf_model(MODEL).save_pretrained(hf)
    write_tokenizer(hf)
    write_rows(hf / "rows.jsonl")
    for kind in ("lora", "full"):
        recipe_config(kind, hf, directory / kind)
    for to in ("meta", "tune"):
        assert main(["convert", str(hf), str(directory / to), "--to", to]) == 0
    return directory


def placed(command: tuple[str, ...], inputs: Path) -> list[str]:
    """A command with the path of the inputs filled in."""
    return [part.replace(INPUTS, str(inputs)) for part in command]
