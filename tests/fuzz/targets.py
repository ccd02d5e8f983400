"""All targets, by name."""

from __future__ import annotations

from tests.fuzz import control, engine_answers, http_doors, run_files, samples, user_files, weights
from tests.fuzz.harness import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (control, engine_answers, http_doors, run_files, samples, user_files, weights)
    for target in module.TARGETS
}
