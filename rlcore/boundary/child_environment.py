"""The environments of child processes: variables on a list, so that keys of the run stay here.

| child | its variables |
|---|---|
| a command of an agent, `verifiers`, an MCP server | ALLOWED, and the names of its `environment` |
| a reward worker | the same, limited to one thread, with our import path |
| an engine | ALLOWED and ENGINES, and the values of `rollout.engine.environment` |
| a sandboxed program | PATH and LANG |
| a probe of an interpreter | ALLOWED |
| the rollout service, which starts the children above | all but NOT_FOR_SERVICE |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache

from rlcore.errors import ConfigError

logger = logging.getLogger(__name__)

# Paths, languages, threads and GPUs. Variables that may hold a key are absent, such as those of a
# proxy, which hold a password.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "TZ"),
    *("LANG", "LANGUAGE", "LC_*"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_*", "*_NUM_THREADS"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "NLTK_DATA"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NO_PROXY", "no_proxy"),
)
# Variables that the kernels, compilers, allocators and networks of an engine read.
ENGINES = (
    *("NCCL_*", "GLOO_*", "UCX_*", "FI_*", "OFI_*", "EFA_*", "IBV_*", "MLX5_*", "RDMAV_*"),
    *("NVSHMEM_*", "MC_*", "MOONCAKE_*", "NVIDIA_*", "CUDNN_*", "CUBLAS_*", "NVCC_*", "NVRTC_*"),
    *("TORCH*", "PYTORCH_*", "TRITON_*", "FLASHINFER_*", "DG_*", "TVM_*", "CUTE_*", "NUMBA_*"),
    *("SGLANG_*", "SGL_*", "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "MALLOC_*", "LD_PRELOAD"),
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS"),
    *("PYTHONHOME", "PYTHONUNBUFFERED", "XDG_*", "HF_HUB_*", "HF_MODULES_CACHE", "HF_XET_*"),
)
# Keys of the run and of its cluster. No child gets them, even if the user names them.
OURS = ("RLCORE_*", "RAY_AUTH_*")
# Only rank 0 uses the tracker. The launchers use the cluster, and under Ray the service joins it.
TRACKER = ("WANDB_API_KEY",)
NOT_FOR_SERVICE = (*TRACKER, "RAY_AUTH_*")


def allowed_environment(
    names: Sequence[str] = (), *, key: str = "", more: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables of this process that a child gets.

    Args:
        names: variables that the user asks for, under the configuration key `key`.
        more: patterns in addition to ALLOWED.

    Raises:
        ConfigError: one of the names is in OURS.
    """
    for name in names:
        if _is_on(OURS, name):
            raise ConfigError(
                f"{key}: got {name}, a key of the run itself, which no child process gets: leave it"
                " out"
            )
        if name not in os.environ:
            _warn_of_unset(key, name)
    return {
        name: value
        for name, value in os.environ.items()
        if _is_on((*ALLOWED, *more, *names), name) and not _is_on(OURS, name)
    }


def service_environment(*, on_ray: bool = False) -> dict[str, str]:
    """Return the variables of this process that the rollout service gets.

    Args:
        on_ray: the service finds its engines on a Ray cluster, and needs the cluster's token.
    """
    hidden = TRACKER if on_ray else NOT_FOR_SERVICE
    return {name: value for name, value in os.environ.items() if not _is_on(hidden, name)}


def _is_on(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@cache
def _warn_of_unset(key: str, name: str) -> None:
    logger.warning("%s names %s, which is not set here", key, name)
