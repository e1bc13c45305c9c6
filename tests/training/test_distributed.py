"""How processes join a job, and what is refused before they do."""

import pytest
import torch.distributed as dist

from checkpointing.errors import ConfigError, RankLostError
from checkpointing.training import process_group
from checkpointing.training.distributed import lost_another
from tests.training import runs


def test_a_recipe_for_many_processes_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    how = "tune run --nproc_per_node <NUMBER>"
    with pytest.raises(ConfigError, match=how), process_group("cpu", 9):
        pass


@pytest.mark.parametrize(
    ("device", "timeout", "message"),
    [
        ("cuda:1", 9, "device=cuda:1: several processes train on cpu, or on cuda, a GPU each"),
        ("cpu", 0, "process_group_timeout_seconds=0: must be above 0"),
    ],
)
def test_impossible_settings_are_refused_before_others_are_waited_for(
    monkeypatch, device, timeout, message
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=message), process_group(device, timeout):
        pass
    assert not dist.is_initialized()


def test_a_recipe_for_one_process_that_is_started_in_two_trains_nothing(monkeypatch, tmp_path):
    base = runs.write_base(tmp_path / "base")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="trains in one process, but was started in 2"):
        runs.run("lora", base, tmp_path / "out")
    assert runs.checkpoints(tmp_path / "out") == set()


def test_an_error_about_a_lost_process_is_told_from_others():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]")
    assert lost_another(lost)
    assert lost_another(dist.DistNetworkError("the store is gone"))
    assert lost_another(RankLostError("rank 1 has ended"))
    caused = ConfigError("nothing can be saved")
    caused.__cause__ = lost
    assert lost_another(caused)
    assert not lost_another(RuntimeError("shapes do not fit"))
    assert not lost_another(ConfigError("a key is wrong"))
