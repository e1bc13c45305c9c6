"""The test's side of the process in which torchtune runs."""

import json
import subprocess
from itertools import count
from pathlib import Path
from typing import Any

import torch

WORKER = Path(__file__).with_name("torchtune_worker.py")


class TorchtuneError(Exception):
    """What torchtune raised, with its traceback."""


class Torchtune:
    """torchtune in a process of its own, which is started once: importing it takes seconds.

    Args:
        python: interpreter of an environment with torchtune.
        directory: for the files that are exchanged.
    """

    def __init__(self, python: Path, directory: Path) -> None:
        self._directory = directory
        self._numbers = count()
        self._log = directory / "log.txt"
        with self._log.open("w") as log:
            # -P: the packages of the environment are meant, not those of this checkout.
            self._process = subprocess.Popen(
                [str(python), "-P", str(WORKER)],
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def save(
        self, checkpointer: str, state: dict[str, Any], arguments: dict[str, Any], **options: Any
    ) -> list[str]:
        """Saves a checkpoint; returns the keys that the state dict has left afterwards."""
        return self._call(
            "save",
            checkpointer=checkpointer,
            arguments=arguments,
            state=self._file(state),
            options={"epoch": 0, **options},
        )

    def load(self, checkpointer: str, **arguments: Any) -> dict[str, Any]:
        """Loads a checkpoint."""
        return self._from_file("load", checkpointer=checkpointer, arguments=arguments)

    def load_here(self, model_type: str, **arguments: Any) -> dict[str, Any]:
        """Loads with this project's checkpointer, in torchtune's process."""
        return self._from_file("load_by_model_type", model_type=model_type, arguments=arguments)

    def signature(self, checkpointer: str, method: str) -> list[tuple[str, bool, str]]:
        """Each parameter's name, whether it has a default, and this default's repr."""
        found = self._call("signature", checkpointer=checkpointer, method=method)
        return [tuple(parameter) for parameter in found]

    def merge(
        self, weights: dict[str, Any], adapter: dict[str, Any], rank: int, alpha: float
    ) -> dict[str, Any]:
        """The weights with the adapter folded in."""
        return self._from_file(
            "merge",
            weights=self._file(weights),
            adapter=self._file(adapter),
            rank=rank,
            alpha=alpha,
        )

    def to_meta(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Native weights under Meta's names."""
        return self._from_file("to_meta", weights=self._file(weights))

    def logits(
        self, sizes: dict[str, int], weights: dict[str, Any], tokens: torch.Tensor
    ) -> torch.Tensor:
        """What torchtune's decoder computes."""
        weights_file = self._file(weights)
        result = self._call("logits", sizes=sizes, weights=weights_file, tokens=tokens.tolist())
        return torch.tensor(result)

    def encode(
        self, builder: str, sizes: dict[str, Any], weights: dict[str, Any], tokens: torch.Tensor
    ) -> torch.Tensor:
        """What one of torchtune's encoders computes."""
        weights_file = self._file(weights)
        result = self._call(
            "encode", builder=builder, sizes=sizes, weights=weights_file, tokens=tokens.tolist()
        )
        return torch.tensor(result)

    def fits_vision_model(
        self, encoder: dict[str, Any], decoder: dict[str, Any], weights: dict[str, Any]
    ) -> None:
        """Raises unless native weights are exactly those of torchtune's vision model."""
        weights_file = self._file(weights)
        self._call("fits_vision_model", encoder=encoder, decoder=decoder, weights=weights_file)

    def run_recipe(self, name: str, config: dict[str, Any]) -> None:
        """Runs one of torchtune's recipes."""
        self._call("run_recipe", name=name, config=config)

    def _file(self, state: dict[str, Any]) -> Path:
        path = self._directory / f"{next(self._numbers)}.pt"
        torch.save(state, path)
        return path

    def _from_file(self, function: str, **arguments: Any) -> dict[str, Any]:
        path = self._directory / f"{next(self._numbers)}.pt"
        self._call(function, **arguments, into=path)
        return torch.load(path, weights_only=True)

    def _call(self, function: str, **arguments: Any) -> Any:
        request = json.dumps({"function": function, "arguments": arguments}, default=str)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"torchtune's process ended:\n{self._log.read_text()[-4000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise TorchtuneError(reply["error"])
        return reply["result"]
