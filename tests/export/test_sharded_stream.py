"""Streams of a model that lies in shards: each process gets what a single one would.

Each test runs in real processes, which find each other over gloo.
"""

import pytest
import torch
from safetensors.torch import load_file

from checkpointing import FullModelHFCheckpointer, MergedStateDict
from checkpointing.errors import CheckpointingError, ConfigError, TensorMismatchError
from checkpointing.export import merged_stream
from checkpointing.export.stream import ChangedWeightsError, StreamStoppedError
from checkpointing.training import adapter_state_dict, base_state_dict
from tests.export.live import KINDS, bits, live_model, loaded_model
from tests.export.stream_worker import (
    CUTS,
    expect,
    make,
    measure_memory,
    merge_in_place,
    read,
    read_all_again,
    stop_early,
    sync_engine,
)
from tests.families.variants import write
from tests.sharded_worker import Job


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request, tmp_path_factory):
    job = Job(request.param, tmp_path_factory.mktemp("job"))
    yield job
    job.stop()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What one process saves of the same model, merged and as PEFT has it."""
    found = {}

    def get(variant, kind):
        if (variant, kind) not in found:
            place = tmp_path_factory.mktemp("saved")
            model = live_model(place / "base", variant, KINDS[kind])
            adapter = adapter_state_dict(model)
            state = {
                "model": MergedStateDict(base_state_dict(model), adapter, model.adapter_config),
                "adapter": adapter,
                "adapter_config": model.adapter_config.to_state(),
            }
            saver = FullModelHFCheckpointer(place / "base", output_dir=place / "out")
            directory = saver.save_checkpoint(state, epoch=0, show_progress=False)
            found[variant, kind] = {
                "merged": load_file(directory / "merged" / "model-00001-of-00001.safetensors"),
                "adapter": load_file(directory / "adapter_model.safetensors"),
                "base": place / "base",
                "config": model.adapter_config,
            }
        return found[variant, kind]

    return get


def described(tensors):
    return {name: (t.dtype, tuple(t.shape), bits(t)) for name, t in tensors.items()}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("what", ["merged", "adapter"])
@pytest.mark.parametrize(
    "variant, kind",
    [
        ("llama", "lora"),
        pytest.param("phi3", "dora", marks=pytest.mark.slow),
        ("qwen3_moe", "lora"),
        pytest.param("llama, tied", "modules trained whole", marks=pytest.mark.slow),
        pytest.param("gemma2", "rslora, patterns", marks=pytest.mark.slow),
        pytest.param("qwen2", "dora", marks=pytest.mark.slow),
    ],
)
def test_every_process_gets_what_one_would_save(job, saved, cut, what, variant, kind):
    own = saved(variant, kind)
    expected = described(own[what])
    arguments = {"base": own["base"], "cut": cut, "kind": what, "config": KINDS[kind]}
    answers = job.run(read, window=30_000, version=3, **arguments)
    for answer in answers:
        assert {n: tuple(rest) for n, *rest in answer["tensors"]} == expected
        assert answer["is whole"] and answer["is unchanged"] and answer["version"] == 3
    assert len({tuple(n for n, *_ in answer["tensors"]) for answer in answers}) == 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    job = Job(1, tmp_path_factory.mktemp("alone"))
    yield job
    job.stop()


@pytest.mark.parametrize("few", [32 << 20, 0], ids=["at once", "in threads"])
@pytest.mark.parametrize("cut", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("what", ["merged", "adapter"])
def test_a_job_may_be_one_process(alone, saved, what, cut, few):
    own = saved("phi3", "lora")
    arguments = {"base": own["base"], "cut": cut, "kind": what, "config": KINDS["lora"]}
    (answer,) = alone.run(read, few=few, window=30_000, **arguments)
    assert {n: tuple(rest) for n, *rest in answer["tensors"]} == described(own[what])
    assert answer["is whole"] and answer["is unchanged"]


@pytest.fixture(scope="module")
def llama(saved):
    """A base and an adapter for it, and how many tensors a stream of both has."""
    own = saved("llama", "lora")
    return {"base": own["base"], "config": KINDS["lora"]}


@pytest.mark.parametrize("cut", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("what", ["merged", "adapter"])
def test_one_process_gets_the_tensors_and_the_others_keep_in_step(job, saved, llama, what, cut):
    expected = described(saved("llama", "lora")[what])
    arguments = {"cut": cut, "kind": what, "to_ranks": [1], "window": 30_000, **llama}
    first, second, *others = job.run(read, **arguments)
    assert {n: tuple(rest) for n, *rest in second["tensors"]} == expected
    assert second["digests"].keys() == expected.keys()
    for other in (first, *others):
        assert other["tensors"] == [] and other["digests"] == {}
        assert other["is whole"] and other["is unchanged"]


@pytest.mark.parametrize("cut", ["fsdp", "tensor parallel"])
def test_all_processes_tell_what_rounding_takes_away(job, llama, cut):
    whole = merged_stream(loaded_model(llama["base"], llama["config"], torch.bfloat16))
    dict(whole)
    answers = job.run(read, cut=cut, to_ranks=[0], dtype=torch.bfloat16, **llama)
    found = answers[0]["survival"]
    assert [answer["survival"] for answer in answers] == [found] * len(job)
    # Of a large weight some rows are measured, which are others where it is cut.
    assert found.changed_share == pytest.approx(whole.survival.changed_share, abs=0.02)
    assert found.lost_norm == pytest.approx(whole.survival.lost_norm, rel=0.1)
    assert found.relative_update == pytest.approx(whole.survival.relative_update, rel=0.1)


def errors(answers, kind, *texts):
    """What every process raised, each with its text."""
    for (found, message), text in zip(answers, texts, strict=True):
        assert found is kind, message
        assert text in message, message


@pytest.mark.parametrize("end", ["break", "close"])
def test_all_may_stop_after_the_same_tensor(job, llama, end):
    assert job.run(stop_early, [end] * len(job), **llama) == [6] * len(job)
    assert job.run(read_all_again, **llama) == [30] * len(job)


# What one process does, what it ends with itself, and what the others raise.
ENDS = {
    "break": (6, StreamStoppedError, "rank 1: stopped reading the stream after 6 of 30 tensors"),
    "close": (6, StreamStoppedError, "rank 1: stopped reading the stream after 6 of 30 tensors"),
    "raise": (KeyError, CheckpointingError, "rank 1: KeyError"),
    "change": (ChangedWeightsError, ChangedWeightsError, "rank 1: the model was changed"),
    "compute": (OSError, OSError, "rank 1: Input/output error"),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_stream_in_one_process_ends_it_in_all(job, llama, end):
    own, kind, text = ENDS[end]
    ends = [end if rank == 1 else "read on" for rank in range(len(job))]
    answers = job.run(stop_early, ends, **llama)
    at_fault = answers.pop(1)
    assert at_fault == own if isinstance(own, int) else at_fault[0] is own
    errors(answers, kind, *[text] * len(answers))
    # The processes still understand each other.
    assert job.run(read_all_again, **llama) == [30] * len(job)


def test_an_engine_that_does_not_fit_is_refused_in_all_processes(job, llama):
    expected = [{"model.norm.weight": (43,)} if rank == 0 else None for rank in range(len(job))]
    answers = job.run(expect, expected, **llama)
    texts = ["model.norm.weight: [42], and the engine's has [43]"] * len(job)
    errors(answers, TensorMismatchError, *texts)


def test_all_must_stream_the_same(job, llama):
    given = [{"dtype": torch.bfloat16} if rank == 1 else {} for rank in range(len(job))]
    answers = job.run(make, given, **llama)
    text = "merged_stream: all ranks must be given the same, but dtype is None on rank 0 and torch."
    errors(answers, ConfigError, *[text] * len(job))
    given = [{"other model": True} if rank == 1 else {} for rank in range(len(job))]
    answers = job.run(make, given, **llama)
    errors(answers, ConfigError, *["adapter_config is {'r': 4"] * len(job))
    answers = job.run(make, [{"to_ranks": [len(job)]}] * len(job), **llama)
    errors(answers, ConfigError, *["give at least one of the ranks 0 to"] * len(job))


def test_shards_are_not_merged_in_place(job, llama):
    errors(job.run(merge_in_place, **llama), ConfigError, *["lies in shards"] * len(job))


@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_an_engine_of_one_process_is_synced_by_all(job, llama, way):
    first, *others = job.run(sync_engine, engine_in=0, way=way, **llama)
    assert others == [[]] * len(others)
    (first_version, first_gap, second_version, second_gap) = first
    assert (first_version, second_version) == (1, 2)
    assert first_gap < 1e-5 and second_gap < 1e-5


def test_there_must_be_an_engine(job, llama):
    answers = job.run(sync_engine, engine_in=None, way="merged", **llama)
    errors(answers, ConfigError, *["there is no engine"] * len(job))


def test_an_engine_that_refuses_in_one_process_fails_all(job, llama, tmp_path):
    write("qwen2", tmp_path / "other")
    arguments = {**llama, "engine_base": tmp_path / "other"}
    answers = job.run(sync_engine, engine_in=1, way="merged", **arguments)
    errors(
        answers, TensorMismatchError, *["self_attn.q_proj.bias: the engine expects it"] * len(job)
    )
    assert job.run(read_all_again, **llama) == [30] * len(job)


@pytest.mark.parametrize("to_ranks", [None, [0]], ids=["to all", "to one"])
def test_no_process_holds_more_than_its_part_and_a_few_tensors(job, to_ranks):
    for answer in job.run(measure_memory, to_ranks=to_ranks):
        assert answer["part"] > 10 * answer["largest"]
        assert answer["grown"] < 6 * answer["largest"], answer
