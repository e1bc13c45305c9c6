"""Keeps libraries from giving advice on the terminal that is meant for their own users."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY = ("transformers", "torchao", "torch.utils._pytree", "peft")


@contextmanager
def quiet(*, progress: bool = True) -> Iterator[None]:
    """Shows only errors of transformers, PEFT and torchao, from their import on.

    Args:
        progress: keep transformers' progress bars.
    """
    before = {name: logging.getLogger(name).level for name in _NOISY}
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # transformers sets its logger's level from this when it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not progress:
                from transformers.utils import logging as transformers_logging

                transformers_logging.disable_progress_bar()
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
