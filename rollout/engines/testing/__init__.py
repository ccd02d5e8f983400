"""The contract test that the author of an engine runs on it, from pytest or by hand.

from rollout.engines.testing import check_engine
print(check_engine(lambda: VllmEngine(...), config=config))
"""

from rlcore.algorithms.testing import ContractError, ContractReport
from rollout.engines.testing.rules import check_engine

__all__ = ["ContractError", "ContractReport", "check_engine"]
