"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import (
    engine_answers,
    run_files,
    samples,
)
from tests.fuzz.harness import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (
        engine_answers,
        run_files,
        samples,
    )
    for target in module.TARGETS
}
