"""How an attempt ends on a node: what the agent waits for before it reports, and how the ranks are stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.node.failure import node_failure
from paceline.node.ranks.launcher import SERVER_SECONDS, SWEEP_GRACE

from .decision import Step

if TYPE_CHECKING:
    from paceline.contract.records import Failure
    from paceline.node.rendezvous.messages import Alone, Halt, Search, ToCoordinator

FAILURE_GRACE = 5.0  # seconds between SIGTERM and SIGKILL for the peers of a failed rank
SYMPTOM_WAIT = 10.0  # seconds to wait for the cause if all failures look like the consequence of another one
ORDER_WAIT = 1.0  # seconds to wait for this node's own order to stop if a rank was ended by SIGTERM


class Attempt(Step):
    """Decisions about the end of an attempt."""

    def notice_start(self) -> None:
        """Record that the ranks run, also while they are being stopped: they may train until their grace is over."""
        if self.status["state"] != "RUNNING" and self.ranks.have_started and self.ranks.has_live_ranks:
            if self.spec.time_limit is not None and "limit" not in self.state.deadlines:
                left = self.state.limit_left
                self.arm("limit", self.spec.time_limit if left is None else left)
            self.write(state="RUNNING")

    def check_ranks(self) -> None:
        """After a change of the ranks: send the coordinator what it waits for."""
        ranks, state = self.ranks, self.state
        # Where ranks of the job were before, the next attempt starts another fork server; it counts if that ends too.
        is_tried_again = bool(ranks.server_failure) and self.status["start"] is not None
        if state.is_newcomer and (ranks.is_ready or is_tried_again):
            self.set(is_newcomer=False)
            self.send({"do": "prepared"})
        if state.reported or state.halted:
            if ranks.server_failure and (self.state.is_newcomer or not (ranks.current or is_tried_again)):
                self.fail(ranks.server_failure, ranks.server_cause)
        else:
            self.report()

    def report(self) -> None:
        """Send the coordinator the result of the attempt here, unless it is open."""
        ranks, waited = self.ranks, self.state.waited
        failures = ranks.failures()
        if "order" not in waited and any(failure["signal"] == "SIGTERM" for failure in failures):
            self.wait("order", ORDER_WAIT)
        elif ranks.is_over and not failures:
            self.reported({"do": "over"})
        elif "saved" not in waited and ranks.resumes and ranks.has_live_ranks and not failures:
            self.wait("saved", self.spec.grace)
        elif ranks.resumes and not failures:
            self.reported({"do": "preempted", "final": self.state.preempted})
        elif not ranks.has_live_ranks and "elsewhere" not in waited and self.may_be_elsewhere(failures):
            self.send({"do": "symptom"})
            self.wait("elsewhere", SYMPTOM_WAIT)
        elif not ranks.has_live_ranks:
            self.reported(self.failed() if failures or ranks.server_failure else {"do": "done"})
        elif failures and self.spec.framework != "indexed":
            if "cause" not in waited:
                self.wait("cause", SYMPTOM_WAIT)
            else:
                self.reported(self.failed())
        else:
            self.set(waited=frozenset())

    def failed(self) -> ToCoordinator:
        """That a rank has failed; or that it was ended by the signal that asks it to give way, before it could save."""
        if self.state.preempted and any(failure["signal"] == "SIGUSR2" for failure in self.ranks.failures()):
            return {"do": "preempted", "final": True}
        return {"do": "failed"}

    def may_be_elsewhere(self, failures: list[Failure]) -> bool:
        """Whether another node may know soon why the ranks here have failed."""
        is_symptom = bool(failures) and all(failure["symptom"] for failure in failures)
        return is_symptom and self.status["nodes"] > 1 and self.spec.framework != "indexed"

    def wait(self, phase: Literal["order", "saved", "cause", "elsewhere"], seconds: float) -> None:
        """Wait, once, before the report."""
        self.enter(phase, seconds)
        self.set(waited=self.state.waited | {phase})

    def end_wait(self) -> None:
        """What was waited for has come, or the deadline: continue with the report."""
        was_order = self.state.phase == "order"
        self.enter("open")
        if was_order and self.is_to_halt:  # the ranks have not failed
            self.set(waited=frozenset())
        elif self.state.finish is None:
            self.report()

    def reported(self, report: ToCoordinator) -> None:
        """Report how the attempt ended here."""
        self.set(reported=True, waited=frozenset())
        self.send(report)

    # -- stopping the ranks --------------------------------------------------------------------------------------------

    def halt(self, order: Halt) -> None:
        """Stop the ranks of this attempt, and report when none is left."""
        number = order["signal"]
        self.hear_of_stop(order)
        if self.state.start is None and self.state.halted:
            return
        self.set(gone=tuple(order["gone"]) or self.state.gone)
        if self.state.halted:  # it has not begun here; what failed before has been reported
            self.report_stopped([])
            return
        longest = FAILURE_GRACE if order["grace"] is None else order["grace"]
        self.stop(order, self.spec.grace if number else min(longest, self.spec.grace), number, save=order["save"])

    def hear_of_stop(self, order: Halt) -> None:
        """Remember that the job is to stop: its coordinator may die before the ranks have ended."""
        if order["signal"] and not self.state.halted_by:
            self.set(halted_by=order["signal"])
            self.record_stop(order["signal"])

    def failures(self) -> list[Failure]:
        """What has failed here in the attempt."""
        if why := self.ranks.server_failure:
            return [node_failure(self.node_rank, self.host, self.ranks.server_cause, why)]
        if self.state.hung:
            return [node_failure(self.node_rank, self.host, "hang", self.state.hung)]
        return self.ranks.failures()

    def report_stopped(self, failures: list[Failure]) -> None:
        """No rank of the attempt is left here."""
        self.set(start=None)
        self.write()
        self.do({"do": "send stopped", "failures": failures})
        self.await_answer()

    def stop(self, because: Halt | Search | Alone | None, grace: float, number: int, *, save: bool) -> None:
        """Stop the ranks, step by step; `after_stop` follows."""
        self.set(halted=True, stopping=because, grace=grace, signal=number, waited=frozenset())
        if save:
            self.do({"do": "save"})
            self.enter("save", self.spec.grace)
        else:
            self.await_programs()

    def await_programs(self) -> None:
        """How mpirun ends may say why its ranks have."""
        if self.ranks.awaited:
            self.enter("programs", self.ranks.awaited)
        else:
            self.terminate()

    def terminate(self) -> None:
        """SIGTERM."""
        self.do({"do": "terminate", "signal": self.state.signal})
        self.enter("terminate", self.state.grace)

    def kill(self) -> None:
        """SIGKILL to the ranks that are left."""
        if self.ranks.has_live_ranks:
            self.do({"do": "kill"})
            self.enter("kill", SERVER_SECONDS)
        else:
            self.sweep()

    def sweep(self) -> None:
        """End what the ranks have left behind; without a fork server there is nothing."""
        if self.ranks.has_live_ranks or not self.ranks.has_server:
            self.finish_stop()
        else:
            self.do({"do": "sweep", "grace": 0.0 if self.state.at_once else SWEEP_GRACE})
            self.enter("sweep", SWEEP_GRACE + SERVER_SECONDS)

    def finish_stop(self) -> None:
        """If ranks are left, or what they started, nothing helps but to end the fork server, and all with it."""
        if self.ranks.has_live_ranks or (self.state.phase == "sweep" and not self.ranks.is_swept):
            self.do({"do": "end server"})
        self.do({"do": "stopped"})
        self.enter("stopped")
