import importlib.util
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpointing.errors import ConfigError
from checkpointing.training import DiskLogger, StdoutLogger, TensorBoardLogger, WandBLogger


def test_the_disk_log_has_all_digits_and_is_appended_to(tmp_path):
    for step, loss in ((1, 0.1 + 0.2), (2, 1e-17)):
        logger = DiskLogger(tmp_path / "logs")
        logger.log_dict({"loss": loss, "lr": 3e-4}, step)
        logger.log("extra", 5.0, step)
        logger.close()
    lines = [
        json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()
    ]
    assert lines == [
        {"step": 1, "loss": 0.1 + 0.2, "lr": 3e-4},
        {"step": 1, "extra": 5.0},
        {"step": 2, "loss": 1e-17, "lr": 3e-4},
        {"step": 2, "extra": 5.0},
    ]


def test_tensorboard_reads_what_two_runs_wrote(tmp_path):
    for step in (1, 2):
        logger = TensorBoardLogger(tmp_path)
        logger.log_dict({"loss": step / 4, "lr": step / 8}, step)
        logger.close()
    assert len(list(tmp_path.glob("events.*"))) == 2
    written = []
    for file in sorted(tmp_path.glob("events.*")):
        events = EventAccumulator(str(file), size_guidance={"tensors": 0}).Reload()
        for tag in ("loss", "lr"):
            written += [(tag, e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)]
    assert sorted(written) == [
        ("loss", 1, 0.25),
        ("loss", 2, 0.5),
        ("lr", 1, 0.125),
        ("lr", 2, 0.25),
    ]


def test_the_stdout_log_is_a_line_per_step(capsys):
    logger = StdoutLogger()
    logger.log_dict({"loss": 0.5, "lr": 1e-4}, 7)
    logger.close()
    assert capsys.readouterr().out == "step 7: loss=0.5 lr=0.0001\n"


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_package_is_a_clear_error():
    with pytest.raises(ConfigError, match="pip install wandb"):
        WandBLogger()


def test_a_line_that_was_cut_short_does_not_spoil_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    logger = DiskLogger(tmp_path)
    logger.log_dict({"loss": 3.0}, 2)
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [lines[0], lines[2]] == ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": 3.0}']
