"""Chooses the sandbox that the configuration asks for."""

from __future__ import annotations

import logging

from rlcore.config.sections.sandbox import SandboxConfig
from rollout.sandbox.base import Sandbox
from rollout.sandbox.confinement import candidates, interpreter
from rollout.sandbox.fusion import FusionSandbox
from rollout.sandbox.local import LocalSandbox

logger = logging.getLogger(__name__)

ADVICE = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces (docker run"
    " --security-opt seccomp=unconfined --cap-add SYS_ADMIN, or a user other than root where"
    " kernel.unprivileged_userns_clone is 1), or start a SandboxFusion server elsewhere and set"
    " reward.sandbox.kind: fusion and reward.sandbox.url; rlimits is UNSAFE and works anywhere"
)


def build_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox; nothing is started yet."""
    output_bytes = config.output_kb << 10
    if config.kind == "fusion":
        return FusionSandbox(
            str(config.url),
            concurrency=config.concurrency,
            output_bytes=output_bytes,
            retries=config.retries,
        )
    if config.kind == "rlimits":
        logger.warning(
            "reward.sandbox.kind is rlimits: code that a model wrote can read your files, talk to"
            " your processes and use the network"
        )
    settings = {
        "python": interpreter(config.python),
        "folders": tuple(config.folders),
        "processes": config.processes,
        "files_mb": config.files_mb,
    }
    return LocalSandbox(
        candidates(config.kind, settings),
        concurrency=config.concurrency,
        output_bytes=output_bytes,
        advice=ADVICE,
    )
