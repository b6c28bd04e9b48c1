"""Routing policies by name. A new policy is one file here and one line in the registry."""

from __future__ import annotations

from triptych.errors import ConfigError
from triptych.orchestrator.cost import Estimator
from triptych.orchestrator.routing.least_work import LeastWork
from triptych.orchestrator.routing.policy import RoutingPolicy
from triptych.orchestrator.routing.round_robin import RoundRobin
from triptych.orchestrator.routing.strict_round_robin import StrictRoundRobin

__all__ = ["POLICIES", "RoutingPolicy", "create_policy"]

POLICIES: dict[str, type[RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "strict_round_robin": StrictRoundRobin,
    "least_work": LeastWork,
}


def create_policy(name: str, estimator: Estimator) -> RoutingPolicy:
    """A fresh policy by its name in `runtime.routing`. Raises `ConfigError` that lists the names."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(
            "unknown routing policy", where="runtime.routing", found=name, wanted=f"one of {', '.join(POLICIES)}"
        )
    return policy(estimator)
