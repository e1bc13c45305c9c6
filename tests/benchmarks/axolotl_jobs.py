"""Merging with axolotl, as its command does by default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from axolotl.cli.utils.lora_merge import merge_lora_sharded_efficient

from tests.benchmarks.durable import cleared, sync_tree, warm


def merge(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Folds an adapter into its base, from directory to directory."""
    warm(Path(base))
    destination = cleared(Path(out))

    def run() -> None:
        merge_lora_sharded_efficient(base, adapter, destination)
        sync_tree(destination)

    return run
