import pytest
import torch

from tests.peers.environment import build_wheel, torchtune_environment
from tests.peers.torchtune_process import Torchtune


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models are fastest, and leave the machine to others, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def torchtune_python(tmp_path_factory):
    """The python of an environment with torchtune and the wheel of this checkout."""
    return torchtune_environment(build_wheel(tmp_path_factory.getbasetemp() / "wheel"))


@pytest.fixture(scope="session")
def torchtune(torchtune_python, tmp_path_factory):
    process = Torchtune(torchtune_python, tmp_path_factory.mktemp("torchtune"))
    yield process
    process.close()
