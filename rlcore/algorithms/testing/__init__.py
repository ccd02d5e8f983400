"""Contract tests that the author of a plugin runs on it. They need torch and nothing else.

from rlcore.algorithms.testing import check_estimator
print(check_estimator("my_package.credit:MyCredit", scale=0.5))
"""

from rlcore.algorithms.testing.contract import ContractError, ContractReport
from rlcore.algorithms.testing.estimator import check_estimator
from rlcore.algorithms.testing.policy_loss import check_policy_loss

__all__ = ["ContractError", "ContractReport", "check_estimator", "check_policy_loss"]
