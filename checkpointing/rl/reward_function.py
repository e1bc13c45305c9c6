"""The reward of a run: a function that its config names, called and checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from checkpointing.errors import CheckpointingError, ConfigError
from checkpointing.training.components import (
    COMPONENT,
    instantiate,
    is_component,
    locate,
    signature,
)


class RewardError(CheckpointingError, RuntimeError):
    """A reward function failed, or did not give a number for each completion."""


class RewardFunction:
    """Calls ``function(prompts, completions, rows, **arguments)``.

    ``prompts`` and ``completions`` are lists of texts, ``rows`` the dataset's row of each; all
    three have an entry for each completion. It returns as many numbers, in the same order.

    Args:
        node: of the config; names the function in ``_component_``, beside other arguments of it.

    Raises:
        ConfigError: if the function does not exist or does not take these arguments.
    """

    def __init__(self, node: DictConfig) -> None:
        if not is_component(node):
            raise ConfigError(
                f"reward: name a function in {COMPONENT}, as in "
                "checkpointing.rl.rewards.matches_answer"
            )
        self._node = node
        self.name = str(node[COMPONENT])
        sign = signature(locate(self.name))
        if sign is not None:
            arguments = {str(key): node[key] for key in node if key != COMPONENT}
            try:
                sign.bind([], [], [], **arguments)
            except TypeError as error:
                raise ConfigError(
                    f"reward: {self.name}{sign} cannot be called with (prompts, completions, rows) "
                    f"and {', '.join(arguments) or 'no arguments of the config'}: {error}"
                ) from error

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        """A finite number for each completion.

        Raises:
            RewardError: if the function raises, or returns something else.
        """
        try:
            found = instantiate(self._node, list(prompts), list(completions), list(rows))
            rewards = [float(reward) for reward in found]
        except Exception as error:  # it is any user's code
            raise RewardError(
                f"the reward function {self.name} raised {type(error).__name__}: {error}"
            ) from error
        if len(rewards) != len(completions):
            raise RewardError(
                f"the reward function {self.name} returned {len(rewards)} numbers for "
                f"{len(completions)} completions; it must return one for each, in their order"
            )
        for number, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise RewardError(
                    f"the reward function {self.name} returned {reward} for completion {number}, "
                    f"{completions[number]!r}; a reward must be finite"
                )
        return rewards
