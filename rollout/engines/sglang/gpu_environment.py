"""The variables that an SGLang server on GPUs is given, beside those of the run's own process."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rlcore.config.sections.rollout import EngineConfig
from rlcore.interpreters.ask import cuda_toolkit

logger = logging.getLogger(__name__)

# Graphs are released with the rest only if they were captured for that; SGLang copies what they
# hold to host memory meanwhile.
RELEASED_GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# GPUs that a trainer has been on are not equally free, which SGLang else takes for an error.
UNEQUAL_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
# Else every kernel that FP8 may need is compiled before the server answers: SGLang says 10 to 20
# minutes, more than `start_timeout_s`.
COMPILED_WHEN_NEEDED = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
# Where there is no compiler, the import of DeepGEMM ends the server, on Hopper and newer.
NO_DEEP_GEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def gpu_environment(config: EngineConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables to add, without those that `variables` have already.

    It warns where the server would find no compiler for GPUs.
    """
    added: dict[str, str] = {}
    if config.colocated:
        added |= RELEASED_GRAPHS | UNEQUAL_GPUS
    if config.quantization is not None:
        added |= COMPILED_WHEN_NEEDED
    if cuda_toolkit(variables) is None:
        added |= NO_DEEP_GEMM
        logger.warning(
            "no CUDA toolkit is found for the SGLang server (CUDA_HOME, nvcc on PATH,"
            " /usr/local/cuda): it can use no kernel that it compiles itself, and DeepGEMM is"
            " switched off; install the CUDA toolkit, or set CUDA_HOME in"
            " rollout.engine.environment"
        )
    return {name: value for name, value in added.items() if name not in variables}
