import subprocess
import sys

import pytest

from checkpointing.errors import ConfigError
from checkpointing.storage.run_lock import claimed

HOLD = (
    "import sys\n"
    "from pathlib import Path\n"
    "from checkpointing.storage.run_lock import claimed\n"
    "with claimed(Path(sys.argv[1])):\n"
    "    print('claimed', flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_a_second_process_is_refused_until_the_first_one_is_killed(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes) as first:
        assert first.stdout.readline() == "claimed\n"
        with (
            pytest.raises(ConfigError, match=rf"another run .*process {first.pid} on"),
            claimed(tmp_path),
        ):
            pass
        first.kill()
        first.wait()
        with claimed(tmp_path):
            assert (tmp_path / ".run.lock").exists()
    assert list(tmp_path.iterdir()) == [], "what a killed process left is used and removed"


def test_a_process_may_claim_a_directory_within_a_claim_of_its_own(tmp_path):
    with claimed(tmp_path):
        with claimed(tmp_path / "." / ""):
            pass
        result = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert "another run saves into it" in result.stderr
    assert list(tmp_path.iterdir()) == []
