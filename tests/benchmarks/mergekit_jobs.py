"""Merging with mergekit, as ``mergekit-yaml`` does."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions

from tests.benchmarks.durable import cleared, sync_tree, warm


def merge(base: str, adapter: str, out: str) -> Callable[[], Any]:
    """Folds an adapter into its base, from directory to directory."""
    warm(Path(base))
    destination = cleared(Path(out))
    cache = cleared(destination.with_name("mergekit_cache"))
    config = MergeConfiguration.model_validate(
        {
            "merge_method": "passthrough",
            "models": [{"model": f"{base}+{adapter}"}],
            "dtype": "bfloat16",
        }
    )
    options = MergeOptions(lora_merge_cache=str(cache), copy_tokenizer=False)

    def run() -> None:
        run_merge(config, str(destination), options)
        sync_tree(destination)
        shutil.rmtree(cache)

    return run
