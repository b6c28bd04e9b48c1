from __future__ import annotations

from core_driver import CoreDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule


class RotationMachine(RuleBasedStateMachine):
    """While slots are free the rotation is exact, whatever was aborted, failed or finished before."""

    @initialize(replicas=st.integers(1, 5), slots=st.integers(1, 3))
    def begin(self, replicas: int, slots: int) -> None:
        self.driver = CoreDriver(slots=[slots] * replicas)
        self.replicas = replicas
        self.count = 0

    @rule(outcome=st.sampled_from(["output", "failure", "abort"]))
    def one_request_after_another(self, outcome: str) -> None:
        request_id = f"r{self.count}"
        self.driver.submit(request_id)
        address = self.driver.address(request_id)
        assert self.driver.where(address) == self.count % self.replicas
        self.count += 1
        if outcome == "abort":
            self.driver.abort(request_id)
            self.driver.aborted(address)
        else:
            getattr(self.driver, outcome)(address)
        assert all(replica.in_flight == 0 for replica in self.driver.core.dispatcher.pool.by_id.values())


TestRotationMachine = RotationMachine.TestCase
TestRotationMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
