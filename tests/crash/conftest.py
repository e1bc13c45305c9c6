import sys
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from tests.crash.commands import Server
from tests.crash.reference import make_reference
from tests.crash.scenarios import OUT, SCENARIOS, placed, write_inputs

WORKERS = 2
# The hooks and the fork server rely on Linux.
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]


@pytest.fixture(scope="package")
def servers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("servers")
    servers = [Server(directory / str(number)) for number in range(WORKERS)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="package")
def inputs(servers, tmp_path_factory):
    """Models, configs, and a run that has an adapter at two steps."""
    directory = write_inputs(tmp_path_factory.mktemp("inputs"))
    command = placed(SCENARIOS["HF with an adapter"].command, directory)
    done = servers[0].run(command, directory / OUT)
    assert done.code == 0, done.output
    (directory / OUT).rename(directory / "trained")
    for server in servers[1:]:
        server.import_as(servers[0])
    return directory


@pytest.fixture(scope="package")
def reference(servers, inputs, tmp_path_factory):
    """Gives a scenario that was run to its end."""
    made = {}

    def get(name):
        if name not in made:
            place = tmp_path_factory.mktemp("reference")
            made[name] = make_reference(servers[0], SCENARIOS[name], inputs, place)
        return made[name]

    return get


@pytest.fixture
def each(servers):
    """Calls a function with a server and each of many cases, on all servers at once."""

    def run(function, cases):
        free = SimpleQueue()
        for server in servers:
            free.put(server)

        def one(case):
            server = free.get()
            try:
                return function(server, *case)
            finally:
                free.put(server)

        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(one, cases))

    return run
