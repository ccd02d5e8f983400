"""The environment of a reward worker: what is on a list, so that keys of the run are not in it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase

logger = logging.getLogger(__name__)

# Where things are, which language and which GPUs. Whatever may be a key is not here.
ALLOWED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CUDA_*",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "NLTK_DATA",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "PYTHONDONTWRITEBYTECODE",
)
# a worker is one of many on its machine
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def allowed_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables of this process that a worker gets.

    Args:
        more: names that the user asks for: `reward.environment`.
    """
    allowed = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatchcase(name, pattern) for pattern in ALLOWED)
    }
    for name in more:
        if name in os.environ:
            allowed[name] = os.environ[name]
        else:
            logger.warning("reward.environment names %s, which is not set here", name)
    path = os.pathsep.join(path for path in sys.path if path)
    return {**allowed, **ONE_THREAD, "PYTHONPATH": path}
