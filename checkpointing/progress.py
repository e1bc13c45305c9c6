"""Progress bars, which short work does not show."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from checkpointing.storage.new_file import Progress

_QUIET_SECONDS = 2.0


@contextmanager
def bytes_progress(description: str, total: int, show: bool = True) -> Iterator[Progress]:
    """A bar that counts bytes, shown once the work has taken two seconds, or never."""
    # Comes with huggingface_hub; imported here because `import checkpointing` shows no bar.
    from tqdm.auto import tqdm

    with tqdm(
        total=total,
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        delay=_QUIET_SECONDS,
        leave=False,
        disable=not show,
    ) as bar:
        lock = Lock()

        def advance(nbytes: int) -> None:
            with lock:
                bar.update(nbytes)

        yield advance
