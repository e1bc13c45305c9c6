"""A stream of named tensors that an engine takes, computed while it is read."""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from checkpointing.errors import CheckpointingError, TensorMismatchError
from checkpointing.export.memory import Memory
from checkpointing.export.shared_window import FEW, OwnWindow, SharedWindow
from checkpointing.mapping.tensors import TensorMeta, TensorSource
from checkpointing.merge import MeasuredMerge, Survival
from checkpointing.storage.digest import checksum_of
from checkpointing.storage.ranks import Ranks
from checkpointing.storage.tensor_bytes import tensor_bytes
from checkpointing.storage.threads import Check, run
from checkpointing.storage.write import plan_shards

# What is computed at a time: enough for several threads, and little beside a model.
_WINDOW = 64 << 20
# What one thread digests at a time.
_DIGESTED = FEW
# Above this ``‖M - W - U‖ / ‖U‖``, what an engine computes is noticeably not what was trained.
_MUCH_LOST = 0.1


class ChangedWeightsError(CheckpointingError, RuntimeError):
    """The weights of a live model were changed while they were streamed."""


class StreamStoppedError(CheckpointingError, RuntimeError):
    """Another process has stopped reading a stream that all of them read together."""


@dataclass(frozen=True)
class Content:
    """What a stream hands out, before any of it is computed.

    Attributes:
        kind: ``"merged"`` or ``"adapter"``.
        source: the tensors, by the engine's names.
        device: where they are computed.
        adapter_config: of an adapter, PEFT's config.
        notes: what its user should know, one line each.
        measured: measures what rounding leaves of an update, where one is merged.
        live: tensors that nobody may change while the stream is open.
    """

    kind: str
    source: TensorSource
    device: torch.device
    adapter_config: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    measured: MeasuredMerge | None = None
    live: tuple[Tensor, ...] = ()


class WeightStream(Iterator[tuple[str, Tensor]]):
    """Names and tensors, in a fixed order, of one version of a model's weights.

    Every tensor owns its memory, and stays as it is when the stream is closed and the model goes on
    training. A few tensors are in memory at a time, beside those that the reader keeps. Nothing is
    left behind by a reader that stops early, or raises.

    Where the model lies in shards all processes read the stream together, each as fast as the
    slowest; all stop if one of them does, and what one raises within the stream's ``with`` block
    all raise.

    Args:
        content: what is handed out.
        version: number of the weights, which the reader chooses.
        digests: whether to take a checksum of each tensor.
        ranks: the processes that read it together.
        readers: ranks of those that get the tensors; for the others the stream has none.

    Attributes:
        metas: shape and dtype of every tensor, by name, in the order of the stream.
        kind: ``"merged"`` or ``"adapter"``.
        version: as given.
        digests: XXH3-64 of the bytes of each tensor that was handed out, in hexadecimal, so that a
            receiver can prove what it holds.
        adapter_config: of an adapter, content of PEFT's ``adapter_config.json``.
        notes: what the user should know, one line each.
    """

    def __init__(
        self,
        content: Content,
        version: int = 0,
        digests: bool = True,
        ranks: Ranks | None = None,
        readers: Collection[int] = (0,),
    ) -> None:
        self.kind = content.kind
        self.metas: Mapping[str, TensorMeta] = dict(content.source.metas)
        self.version = version
        self.digests: dict[str, str] = {}
        self.adapter_config = content.adapter_config
        self.notes = content.notes
        self._handed_out = 0
        self._content = content
        self._takes_digests = digests
        self._ranks = ranks or Ranks()
        self._readers = readers
        self._survival: list[Survival] = []
        self._is_open = True
        self._tensors = self._run()

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(meta.nbytes for meta in self.metas.values())

    @property
    def is_complete(self) -> bool:
        """All tensors were handed out, in this process or in those that get them."""
        return self._handed_out == len(self.metas)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)

    def __enter__(self) -> "WeightStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stop(error)
        self.close()

    def close(self) -> None:
        """Ends the stream; what was handed out stays as it is.

        Raises:
            CheckpointingError: what another process has raised after the last tensor.
        """
        try:
            if self._is_open and self.is_complete:
                self._is_open = False
                self._ranks.exchange()
        finally:
            self._stop(self._stopped())
            self._tensors.close()

    def buckets(self, nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The same tensors, several at a time.

        Args:
            nbytes: at most so many bytes; a larger tensor comes alone. An adapter is never divided,
                since engines load it at once.
        """
        most = None if self.kind == "adapter" else nbytes
        for names in plan_shards(self.metas, most):
            if bucket := list(islice(self, len(names))):
                yield bucket

    def check_expected(self, expected: Mapping[str, Sequence[int]], engine: str) -> None:
        """Checks that an engine gets all that it has, and nothing else, before the first tensor.

        Args:
            expected: shape of each of the engine's tensors, by name.
            engine: names it in the error.

        Raises:
            TensorMismatchError: lists every tensor that is missing, unexpected or misshapen.
        """
        problems = [f"{name}: the engine expects it" for name in expected if name not in self.metas]
        for name, meta in self.metas.items():
            if name not in expected:
                problems.append(f"{name}: the engine has none of that name")
            elif meta.shape != tuple(expected[name]):
                wanted = list(expected[name])
                problems.append(f"{name}: {list(meta.shape)}, and the engine's has {wanted}")
        if problems:
            raise TensorMismatchError(
                f"{engine}: other weights than those of this model",
                problems,
                "Start the engine with the base that is trained here; nothing was sent.",
            )

    @property
    def survival(self) -> Survival | None:
        """What rounding left of the merged adapter's update, of what was handed out so far."""
        total = sum(self._survival, Survival())
        return total if total.updated or total.weight else None

    def report(self) -> str:
        """What was handed out, and what rounding left of a merged update."""
        total = len(self.metas)
        lines = [f"version {self.version}: {self.nbytes / 1e9:.3f} GB in {total} tensors"]
        if not self.is_complete:
            lines = [f"version {self.version}: {self._handed_out} of {total} tensors"]
        survival = self.survival
        if survival is not None:
            lines.append(
                f"of the elements that the adapter changes, {survival.changed_share:.1%} differ "
                f"from the base after rounding; {survival.lost_norm:.1%} of the update is lost"
            )
            if survival.lost_norm > _MUCH_LOST:
                lines.append(
                    "so much is lost that the adapter had better be sent alone "
                    "(adapter_stream), or merged weights in a wider dtype"
                )
        return "\n".join((*lines, *self.notes))

    def _run(self) -> Generator[tuple[str, Tensor], None, None]:
        check = _unchanged(self._content.live)
        memory = Memory(self._content.device, 2 * _WINDOW)
        with self._ranks.watching():
            for names in plan_shards(self.metas, _WINDOW):
                window = self._computed(names, memory, check)
                digests = self._digested(window) if self._takes_digests else {}
                for name in names:
                    self._handed_out += 1
                    if name not in window:
                        continue
                    if self._takes_digests:
                        self.digests[name] = digests[name]
                    try:
                        # No name here for what is handed out, so that it is freed when the reader
                        # is done.
                        yield name, window.pop(name)
                    except GeneratorExit:
                        self._stop(self._stopped())
                        raise
            self._is_open = False
            self._ranks.exchange()

    def _computed(
        self, names: Sequence[str], memory: Memory, check: Callable[[], None]
    ) -> dict[str, Tensor]:
        """The tensors, in a process that gets them; raises in all if it raises in one."""
        with self._ranks.agreed():
            check()
            source = self._content.source
            window = (
                OwnWindow(source, names, memory)
                if self._ranks.count == 1
                else SharedWindow(source, names, self._ranks, self._readers, memory)
            )
        try:
            survival = window.fill(self._content.measured)
            check()
        except BaseException as error:
            self._ranks.tell(error)
            raise
        self._survival += self._ranks.exchange(survival)
        return window.tensors

    def _stop(self, error: BaseException) -> None:
        """Tells the other processes, if they read on, why this one does not."""
        if self._is_open:
            self._is_open = False
            self._ranks.tell(error)

    def _stopped(self) -> StreamStoppedError:
        return StreamStoppedError(
            f"stopped reading the stream after {self._handed_out} of {len(self.metas)} tensors; "
            "all processes must read it to its end, or stop after the same tensor"
        )

    def _digested(self, window: Mapping[str, Tensor]) -> dict[str, str]:
        def digest(names: Sequence[str], check: Check) -> dict[str, str]:
            return {name: checksum_of([tensor_bytes(window[name])]) for name in names}

        metas = {name: self.metas[name] for name in window}
        jobs = [partial(digest, names) for names in plan_shards(metas, _DIGESTED)]
        return {name: found for some in run(jobs) for name, found in some.items()}


def _unchanged(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A check that none of the tensors has been written to since now."""
    versions = [tensor._version for tensor in tensors]

    def check() -> None:
        if [tensor._version for tensor in tensors] != versions:
            raise ChangedWeightsError(
                "the model was changed while its weights were streamed, so that the engine would "
                "hold two versions of it: read a stream to its end before the next optimizer step"
            )

    return check
