"""What the user of a running job sees."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

from paceline.backends.foreground import STREAM_BITS, Event, Output
from paceline.job.quantities import show_duration
from paceline.job.text import a_few, counted, printable

from .write import ColoursOnly, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.foreground import Foreground, RankStreams, Update
    from paceline.contract.records import EventRecord, OtherFailure
    from paceline.contract.stands import Spent


_LONGEST = 1024 * 1024  # bytes of a line; a longer one is shown in pieces
_SLOW_IMPORT = 3.0  # seconds after which it is said also where the output goes to a file or a pipe
_LONG = 200  # characters of a message; the log has all of it


def how_it_started(events: Sequence[EventRecord], verbose: bool = True) -> list[str]:
    """What the events of a job say of how its agents have started; unless verbose, only what is unexpected."""
    lines = []
    for event in events:
        if event["event"] == "cold":
            lines.append(f"started cold{_on(event)}: {event['why']}")
        elif event["event"] == "warm" and verbose:
            lines.append(f"started{_on(event)} from a process that was kept warm")
    return lines or (["started cold: no process is kept warm"] if verbose else [])


class Screen:
    """Shows local rank 0 as it writes, other ranks line by line behind `[rank N]`, and at the end who failed.

    The ranks' output goes to stdout (to stderr what they wrote there, where the two are kept apart); what paceline
    itself says goes to stderr, behind `paceline: `.
    """

    def __init__(self, rank_streams: RankStreams, job: Foreground, *, verbose: bool = False) -> None:
        self._rank_streams = rank_streams
        self._verbose = verbose
        self._how: list[EventRecord] = []  # the events that say how the agents have started
        self._job = job
        self._terminal = sys.stdout.isatty()
        self._rest: dict[tuple[int, str], list[bytes]] = {}  # (rank, stream) → the line it has not finished
        self._first = b""  # what local rank 0 wrote since its last line end: often a progress bar
        self._leading = -1  # the rank that is shown as it writes
        self._local: dict[int, int] = {}  # rank → local rank
        self._prefix_all = rank_streams.several
        self._code: int | None = None
        self._slow_import: threading.Timer | None = None  # says so
        self._spent: list[Spent] = []  # of each node that has said it
        self._causes: set[str] = set()  # why the job is slow, as far as that was said
        self._say(f"job {job.name}: {job.first_line}")

    def show(self, update: Update) -> None:
        """Show what a rank wrote, or say what happened."""
        if isinstance(update, Output):
            self._output(update)
        else:
            self._event(update)

    def _output(self, update: Output) -> None:
        """Show bytes of a rank, if they are to be shown."""
        if not self._rank_streams.of(update.rank, update.local_rank) & STREAM_BITS[update.stream]:
            return
        if self._job.leads(update):
            self._leading = update.rank
        target = 2 if update.stream == "err" else 1
        if update.rank == self._leading and (self._terminal or not self._prefix_all):
            write(target, update.data)
            if target == 1 or self._terminal:
                self._first = (self._first + update.data).rpartition(b"\n")[2][-4096:]
            return
        key = (update.rank, update.stream)
        lines, newline, rest = update.data.rpartition(b"\n")
        before = self._rest.setdefault(key, [])
        if newline:
            self._show_lines(target, update, b"".join([*before, lines]))
            before.clear()
        before.append(rest)
        if sum(map(len, before)) > _LONGEST:
            self._show_lines(target, update, b"".join(before))
            before.clear()

    def _event(self, event: Event) -> None:
        """Say what happened to the job."""
        details = event.details
        if event.name in ("queued", "granted", "importing", "imported"):
            self._begins(event.name, details)
        elif event.name in ("warm", "cold"):
            self._how.append({**details, "event": event.name})
        elif event.name == "started":
            for line in how_it_started(self._how, self._verbose):
                self._say(line)
            self._verbose, self._how = False, []
            self._local.update((log["rank"], log["local_rank"]) for log in details["logs"])
        elif event.name == "exec":
            self._say(
                f"ranks start by exec, not by fork, since {details['why']}; "
                "--start-method exec does the same without this line"
            )
        elif event.name in ("unjoined", "note", "hang", "spent"):
            self._spent += [details["spent"]] if event.name == "spent" else []
            for line in self._new(details["causes"]) if event.name == "spent" else [str(details["why"])]:
                self._say(f"{line}; see: paceline why {self._job.name}" if event.name == "hang" else line)
        elif event.name in ("lost", "joined", "apart"):
            self._say(_of_host(event.name, details))
        elif event.name == "discovery":
            why = details["why"]
            self._say(f"{why}; the job goes on" if why else "--host-discovery-script names the hosts again")
        elif event.name == "stopping":
            name = signal.Signals(details["signal"]).name
            again = ", Ctrl-C again ends them at once" if name == "SIGINT" else ""
            self._say(f"stopping ({name}); ranks have {details['grace']:g} s{again}")
        elif event.name == "resuming":
            self._say("resumed; its ranks start again from the last checkpoint")
        elif event.name in ("waiting", "restarting", "suspended", "finished"):
            self.finish_lines()
            self._attempt_ended(event.name, details)

    def _new(self, causes: list[str]) -> list[str]:
        """What no other node has said."""
        new = [line for line in causes if line not in self._causes]
        self._causes.update(new)
        return new

    def _begins(self, name: str, details: EventRecord) -> None:
        """Say what the job waits for before its ranks start."""
        if name == "queued":
            need, ahead = details["need"], details["ahead"]
            others = f", {counted(ahead, 'job')} ahead" if ahead else ""
            self._say(f"waiting for {_devices(need)}{_on(details)}{others}; Ctrl-C leaves the queue")
        elif name == "granted":
            self._say(f"got {_devices(details['devices'])}{_on(details)}")
        elif name == "imported":
            self._end_import()
        else:
            text = f"importing {', '.join(details['what'])} …"
            if sys.stderr.isatty():
                self._say(text)
                return
            self._slow_import = threading.Timer(_SLOW_IMPORT, self._say, [text])
            self._slow_import.daemon = True  # this process does not wait for it
            self._slow_import.start()

    def _end_import(self) -> None:
        if self._slow_import is not None:
            self._slow_import.cancel()

    def _attempt_ended(self, name: str, details: EventRecord) -> None:
        """Say why, and how it goes on."""
        self._end_import()
        if name == "waiting":
            self._say(f"{details['why']}; looking for the others")
        elif name == "suspended":
            if details["failure"] is not None:
                self._show_failure(details)
            self._say(f"suspended; paceline resume {self._job.name} lets it go on")
        elif name == "restarting" and details["why"]:
            nodes = counted(details["nodes"], "node")
            self._say(f"{details['why']}; starting again with {nodes}, from the last checkpoint")
        elif name == "restarting" and details["failure"] is None:
            self._say("the ranks got a signal to stop, and saved their state; starting again from there")
        elif name == "restarting":
            self._show_failure(details)
            self._say(f"starting again: attempt {details['restarts']} of {self._job.max_restarts}")
        else:
            self._code = details["exit_code"]
            if details["state"] == "FAILED":
                self._show_failure(details)
            else:
                took = "" if details["took"] is None else f" after {show_duration(details['took'])}"
                self._say(f"job {self._job.name} {details['state'].lower()}{took}")

    def close(self) -> int:
        """Report the end once the agent is gone; returns the job's exit code."""
        if self._code is not None:
            return self._code
        self.finish_lines()
        code, lines = self._job.unreported_end()
        for line in (*self._compared(), *lines):
            self._say(line)
        return code

    def _compared(self) -> list[str]:
        """What nodes have said in comparison."""
        from paceline.backends.why import compared  # few jobs have several nodes

        return compared(self._spent) if len(self._spent) > 1 else []

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _show_lines(self, target: int, update: Output, lines: bytes) -> None:
        if update.rank == self._leading:
            write(target, lines + b"\n")
            return
        prefix = b"[rank %d] " % update.rank
        text = prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n"
        if self._terminal and self._first:  # take rank 0's progress bar away and put it back below
            text = b"\r\x1b[K" + text + self._first.rpartition(b"\r")[2]
        write(target, text)

    def finish_lines(self) -> None:
        """End the lines that the ranks left open."""
        for (rank, stream), parts in self._rest.items():
            rest = b"".join(parts)
            if rest:
                write(
                    2 if stream == "err" else 1,
                    rest + b"\n" if rank == self._leading else b"[rank %d] %s\n" % (rank, rest),
                )
        self._rest.clear()
        if self._first and self._terminal:
            write(1, b"\n")
        self._first = b""

    def _say(self, text: str) -> None:
        if self._first and self._terminal:
            write(1, b"\n")
            self._first = b""
        write(2, _encode(f"paceline: {printable(text)}\n"))

    def _cite(self, text: str) -> None:
        """Show what a rank wrote, in paceline's report: on a terminal only its colours pass."""
        data = _encode(text.rstrip("\n") + "\n")
        if sys.stderr.isatty():
            shown = ColoursOnly(sys.stderr)
            data = shown.feed(data) + shown.end()
        write(2, data)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _show_failure(self, details: EventRecord) -> None:
        """The culprit last: its traceback or last lines, then one line that says which rank it was and where."""
        failure, others = details["failure"], details["others"]
        if failure is None:
            self._say("the job failed")
            return
        if failure["rank"] is None:
            self._say(failure["message"])
            return
        rank = failure["rank"]
        if others:
            is_same = others[0]["message"] == failure["message"]
            theirs = ", with the same error" if is_same else f": {_short(others[0]['message'])}"
            self._say(f"{_names(others)} failed after rank {rank}{theirs}")
        if failure["has_traceback"]:
            self._cite(failure["traceback"])
        elif failure["traceback"] and not self._rank_streams.of(rank, self._local.get(rank, -1)):
            self._say(f"the last lines of rank {rank}:")
            self._cite(failure["traceback"])
        if failure.get("advice"):
            self._say(f"what to do: {failure['advice']}")
        code = f"exit code {failure['exit_code']}"
        self._say(
            f"rank {rank} failed first: {_short(failure['message'])} (node {failure['node']} on {failure['host']}, "
            f"pid {failure['pid']}{'' if failure['message'] == code else f', {code}'})"
            f"{'; log ' + failure['log'] if failure['log'] else ''}"
        )


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _short(text: str) -> str:
    """The text, or its first words where it is long."""
    return text if len(text) <= _LONG else f"{text[:_LONG].rpartition(' ')[0] or text[:_LONG]} …"


def _devices(which: int | Sequence[str] | None) -> str:
    if isinstance(which, int):
        return counted(which, "device")
    names = which or ()
    return f"device{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _of_host(name: str, details: EventRecord) -> str:
    """That a host joined, or why its output stopped, or why it takes no part."""
    if name == "joined":
        return f"{details['host']} joins"
    return f"{details['why']}; {'its output is no longer received' if name == 'lost' else 'it takes no part'}"


def _on(details: EventRecord) -> str:
    return f" on {details['on']}" if "on" in details else ""


def _names(others: Sequence[OtherFailure]) -> str:
    """`rank 0` or `ranks 0, 2, 5`, and nodes where no rank is to blame."""
    ranks = [str(o["rank"]) for o in others if o["rank"] is not None]
    nodes = [f"node {o['node']}" for o in others if o["rank"] is None]
    if ranks:
        nodes.insert(0, f"rank{'s' if len(ranks) > 1 else ''} {a_few(ranks)}")
    return a_few(nodes)
