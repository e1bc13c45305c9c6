"""The real server of vLLM, on the CPU."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

_STARTS_WITHIN = 300.0


@contextmanager
def vllm_server(python: Path, base: Path, log: Path, *options: str) -> Iterator[str]:
    """Yields the URL of a server of the model in a directory, for as long as the block runs.

    Args:
        python: of an environment with vLLM.
        base: directory of the model.
        log: file that the server's output is written to.
        options: of the server.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    own = ["--model", str(base), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    small = [
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        "64",
        "--distributed-executor-backend",
        "uni",
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        # With "uni" below: one process fewer that starts.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            [*module, *own, *small, "--port", str(port), *options],
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
