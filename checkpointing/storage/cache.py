"""Where downloaded models, and copies of what lies on other machines, are kept.

The shipped configs spell the same rule out as
`${oc.env:TUNEPOINT_CACHE,${oc.env:XDG_CACHE_HOME,${oc.env:HOME}/.cache}/tunepoint}`.
"""

import os
from pathlib import Path

from checkpointing.errors import ConfigError


def cache_dir() -> Path:
    """``$TUNEPOINT_CACHE``, else ``$XDG_CACHE_HOME/tunepoint``, else ``~/.cache/tunepoint``.

    Raises:
        ConfigError: if the variable that decides is set to nothing, which no config could tell
            from the root directory.
    """
    for variable, below in (("TUNEPOINT_CACHE", ""), ("XDG_CACHE_HOME", "tunepoint")):
        value = os.environ.get(variable)
        if value is None:
            continue
        if not value:
            raise ConfigError(f"the environment variable {variable} is empty; unset it or set it")
        return Path(value, below)
    return Path.home() / ".cache" / "tunepoint"
