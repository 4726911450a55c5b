"""The policies by name."""

from __future__ import annotations

from baton.config.choices import PolicyName
from router.routing.policy import Policy, RouteSettings
from router.routing.predictive_policy import PredictivePolicy
from router.routing.simple_policies import (
    LeastLoaded,
    LongestPrefix,
    PowerOfTwo,
    RoundRobin,
    Session,
)


def make_policy(name: PolicyName, settings: RouteSettings, seed: int | None = None) -> Policy:
    """``seed`` is for the one that draws at random; None draws it too."""
    match name:
        case "predictive":
            return PredictivePolicy(settings)
        case "round_robin":
            return RoundRobin(settings)
        case "least_loaded":
            return LeastLoaded(settings)
        case "prefix":
            return LongestPrefix(settings)
        case "power_of_two":
            return PowerOfTwo(settings, seed)
        case "session":
            return Session(settings)
