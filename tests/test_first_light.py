"""The README's path on the real model, as a person walks it. Takes a few minutes."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.cli.command import environment, tune
from tests.training.runs import metrics, same, weights

pytestmark = pytest.mark.slow

RUN = (
    "run",
    "lora_finetune_single_device",
    "--config",
    "smollm2/135M_lora_single_device",
    "max_steps_per_epoch=6",
    "save_every_n_steps=3",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    done = tune("download", "demo", env={"TUNEPOINT_CACHE": str(directory)})
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def out(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole")
    done = tune(*RUN, f"output_dir={directory}", env={"TUNEPOINT_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    assert f"Checkpoint: {directory}/epoch_0" in done.stdout
    return directory


def test_the_adapter_computes_the_same_in_peft_and_merged(cache: Path, out: Path) -> None:
    done = tune("parity", f"{out}/epoch_0", env={"TUNEPOINT_CACHE": str(cache)})
    assert done.returncode == 0, done.stdout + done.stderr
    (peft,) = re.findall(r"transformers \+ PEFT +(\S+)", done.stdout)
    assert float(peft) < 1e-4
    assert "merged model in float32" in done.stdout


def test_a_run_that_is_killed_resumes_as_if_it_had_not_been(
    cache: Path, out: Path, tmp_path: Path
) -> None:
    # As many threads as the run that it is compared with.
    env = environment({"TUNEPOINT_CACHE": str(cache)})
    command = [sys.executable, "-m", "checkpointing", *RUN, f"output_dir={tmp_path}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=env, **quiet)
    deadline = time.monotonic() + 300
    while len(metrics(tmp_path) if (tmp_path / "logs/metrics.jsonl").exists() else ()) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "step_3").is_dir() and not (tmp_path / "epoch_0").exists()

    assert subprocess.run([*command, "resume_from_checkpoint=True"], env=env).returncode == 0
    assert metrics(tmp_path) == metrics(out)
    assert same(weights(tmp_path / "epoch_0"), weights(out / "epoch_0"))


def test_the_merged_model_and_its_tokenizer_load_and_generate(out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "epoch_0" / "merged")
    model = AutoModelForCausalLM.from_pretrained(out / "epoch_0" / "merged")
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
