"""What a save costs the trainer, and what checksums, syncing and verifying cost.

    python -m tests.benchmarks.saves [--gb 0.6] [--rounds 5] [--directory DIR]

A Llama-shaped bf16 model with random weights, trained in full, so that all of it is saved. The
variants are run in turn, round after round, in one process; the table has the medians and what they
are of one another. Run it on an otherwise idle machine, on the disk that counts.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from checkpointing import AsyncCheckpointer, FullModelHFCheckpointer
from checkpointing.storage import commit, digest
from checkpointing.verify import verify


def write_base(directory: Path, gigabytes: float) -> None:
    """A model of about that size; what it computes does not matter."""
    hidden, ffn, vocab = 2048, 8192, 32768
    per_layer = 2 * (2 * hidden * hidden + 2 * hidden * 512 + 3 * hidden * ffn)
    layers = max(1, round((gigabytes * 1e9 - 2 * vocab * hidden) / per_layer))
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.tie_weights()
    model.save_pretrained(directory)


@contextmanager
def without_checksums():
    """Writing as it would be if nothing were hashed."""

    class Nothing:
        def update(self, data: object) -> None: ...

        def hexdigest(self) -> str:
            return ""

    import xxhash

    with (
        mock.patch.object(xxhash, "xxh3_64", Nothing),
        mock.patch.object(xxhash, "xxh3_64_hexdigest", lambda data: ""),
    ):
        yield


@contextmanager
def without_syncing():
    """Writing as it would be if a power loss did not matter."""
    with mock.patch.object(commit, "_sync", lambda path: None):
        yield


def timed(job: Callable[[], object]) -> float:
    """Seconds that a job takes."""
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def raw_read(directory: Path) -> None:
    """Reads every file, and does nothing with it."""
    buffer = memoryview(bytearray(1 << 22))
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def measure(directory: Path, gigabytes: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round."""
    write_base(directory / "base", gigabytes)
    plain = FullModelHFCheckpointer(directory / "base", output_dir=directory / "out")
    weights = {name: t.clone() for name, t in plain.load_checkpoint()["model"].items()}
    buffers: dict[str, Tensor] = {name: tensor.clone() for name, tensor in weights.items()}
    state = {"model": weights}
    saver = AsyncCheckpointer(plain)
    prepared = timed(lambda: saver.check_save(state))
    times: dict[str, list[float]] = {"prepare (once)": [prepared]}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def copy() -> None:
        for name, tensor in weights.items():
            buffers[name].copy_(tensor)

    def background() -> None:
        saver.save_checkpoint(state, epoch=0)

    def save() -> None:
        shutil.rmtree(directory / "out", ignore_errors=True)
        plain.save_checkpoint(state, epoch=0)

    note("first async save, blocked", timed(background))
    saver.wait()
    copy()
    for _ in range(rounds):
        note("copy of the same bytes", timed(copy))
        note("async save, blocked", timed(background))
        saver.wait()
        assert saver.times is not None
        note("async save, written", saver.times.written)
        note("save", timed(save))
        with without_checksums():
            note("save without checksums", timed(save))
        with without_syncing():
            note("save without syncing", timed(save))
        save()
        note("raw read (cached)", timed(lambda: raw_read(directory / "out")))
        note("verify (cached)", timed(lambda: verify(directory / "out" / "epoch_0")))
    return times


RATIOS = (
    ("async save, blocked", "copy of the same bytes"),
    ("first async save, blocked", "async save, blocked"),
    ("save", "save without checksums"),
    ("save", "save without syncing"),
    ("raw read (cached)", "verify (cached)"),
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=0.6, help="size of the model in GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    arguments = parser.parse_args()
    assert digest.ALGORITHM == "xxh3_64"
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        times = measure(Path(directory), arguments.gb, arguments.rounds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"| {arguments.gb} GB, {arguments.rounds} rounds | median, s | all |\n|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {medians[name]:.3f} | {' '.join(f'{s:.3f}' for s in seconds)} |")
    print("\n| ratio of medians | |\n|---|---|")
    for above, below in RATIOS:
        print(f"| {above} / {below} | {medians[above] / medians[below]:.2f} |")


if __name__ == "__main__":
    main()
