"""What paceline says of jobs has Chinese on the page: the sentences in the code are looked up in zh.json.

The lookup is that of `spoken` in i18n.js; tests/lab/web compares the two.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from tests.node.test_usual_messages import MESSAGES
from tests.node.watching.test_hang import stand

from paceline.backends import story
from paceline.contract.records import Cause, FinalState
from paceline.job.quantities import show_duration
from paceline.node.host.slurm.look import reasons
from paceline.node.usual_messages import advice
from paceline.node.watching import slowness, spent, typical
from paceline.node.watching.hang import find, stood

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(slowness.__file__).parents[2]
STATIC = SOURCE / "web" / "static"
SENTENCES: dict[str, str] = json.loads((STATIC / "zh.json").read_text())
KINDS = {
    "n": r"[\d.,]*\d", "w": r"\S+", "l": r"\d[\d, to]*", "f": r"\S+:\d+",
    "r": r"ranks? \d[\d, to]*(?: on \S+)?(?: \([^)]*\))?", "p": r"(?: \([^)]*\))?", "?": ".*?",
}  # fmt: skip
PLACE = re.compile(r"\{(\w+)(?::(.))?\}")
HAN = re.compile("[一-鿿]")
WIDE = "[\\u3000-\\u9fff\\uff00-\\uffef]"
# What stays in English: commands, and names of files and settings.
COMMANDS = re.compile(
    r"paceline( [a-z]+)+|scontrol \w+|kubectl get|docker |`[^`]+`|Slurm：[^）]+|__name__ == '__main__'"
)
ENGLISH = re.compile(r"[a-z]{2,}[,;:]? [a-z]{2,}[,;:]? [a-z]+")  # three words


# -- the lookup --------------------------------------------------------------------------------------------------------


def pattern(key: str) -> tuple[int, re.Pattern[str], dict[str, str]]:
    """How many letters a sentence has without its values, what matches it, and the kinds of its values."""
    words = PLACE.split(key)
    kinds = dict(zip(words[1::3], words[2::3], strict=True))
    source = re.escape(words[0])
    for name, kind, text in zip(words[1::3], words[2::3], words[3::3], strict=True):
        source += f"(?P<{name}>{KINDS.get(kind, '.+?')})" + re.escape(text)
    return len("".join(words[::3])), re.compile(source, re.DOTALL), kinds


PATTERNS = sorted(
    ((*pattern(key), chinese) for key, chinese in SENTENCES.items() if PLACE.search(key)), key=lambda it: -it[0]
)


@functools.cache
def said(text: str) -> str:
    """A sentence in Chinese; what has none as it is."""
    it = text.strip()
    if it in SENTENCES:
        return SENTENCES[it]
    loose = ""
    for _, known, kinds, chinese in PATTERNS:
        if found := known.fullmatch(it):
            values = found.groupdict()
            is_strict = not any("; " in value for name, value in values.items() if kinds[name] != "m")
            if is_strict or not loose:
                loose = filled(chinese, values, kinds)
            if is_strict:
                return loose
    for found in re.finditer("; ", it):
        head, tail = it[: found.start()], it[found.end() :]
        if head.count("(") == head.count(")") and said(head) != head:
            return f"{said(head)}{'; ' if said(tail) == tail else '；'}{said(tail)}"
    if loose:
        return loose
    parts = it.split(", ")
    if len(parts) > 1 and all(said(part) != part for part in parts):
        return "，".join(map(said, parts))
    return text


def filled(chinese: str, values: dict[str, str], kinds: dict[str, str]) -> str:
    """A sentence with its values; beside Chinese letters and marks they stand without a space."""

    def value(found: re.Match[str]) -> str:
        before, name, after = found.groups()
        one, kind = values[name].strip(), kinds[name]
        if kind == "n":
            one = re.sub(r"^0+(?=\d)", "", one)
        elif kind == "l":
            one = one.replace(", ", "、").replace(" to ", " 至 ")
        elif kind not in ("w", "f"):
            one = said(one)
        is_open, is_closed = (bool(re.match(WIDE, letter)) for letter in (one[:1], one[-1:]))
        return f"{'' if is_open or not one else before}{one}{'' if is_closed else after}"

    return re.sub(r"( ?)\{(\w+)\}( ?)", value, chinese)


# -- what is said ------------------------------------------------------------------------------------------------------


def of_source(path: Path, least: int = 3) -> Iterator[str]:
    """The sentences in a file, with 7 in the place of values; those of at least some words, and no docstrings."""
    tree = ast.parse(path.read_text())
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
                if part is not node}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) not in skipped and isinstance(node, (ast.JoinedStr, ast.Constant)):
            for text in variants(node):
                if len(re.findall(r"(?<![\w<-])[a-z]{2,}(?= |$|[,;:])", text)) >= least:
                    yield text


def variants(node: ast.expr) -> Iterator[str]:
    """The texts that an expression makes, with each choice of two words."""
    if isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        yield from map("".join, itertools.product(*(list(variants(part)) for part in node.values)))
    elif isinstance(node, ast.FormattedValue):
        choice = node.value
        is_words = isinstance(choice, ast.IfExp) and all(
            isinstance(it, (ast.Constant, ast.JoinedStr)) for it in (choice.body, choice.orelse)
        )
        if is_words:
            assert isinstance(choice, ast.IfExp)
            yield from itertools.chain(variants(choice.body), variants(choice.orelse))
        else:
            yield "7"


# Files whose sentences are shown, and parts of sentences in them, which `everything` has as a whole, or other texts.
SHOWN = {
    "node/agent/decider.py": "asked to stop|leave or stop",
    "node/devicequeue/policy.py": "",
    "node/host/slurm/end/finish.py": "",
    "node/host/slurm/look/reasons.py": "launch failed|are DOWN|allows7",
    "node/host/slurm/look/scheduler.py": "could not start its batch|on the target tries",
    "node/host/slurm/place/step.py": "",
    "node/journal/fold.py": "",
    "node/rendezvous/coordinator.py": "leave or stop|themselves|give each its own",
    "node/rendezvous/participant.py": "coordinates the job, 7",
    "node/store/records.py": "is not a time|was killed7|^, or the guard",
    "node/watching/typical.py": "Python's7|^[,;] ",
    "node/watching/unjoined.py": "^7 ",
    "backends/kubernetes/look/describe.py": "of the pods",
    "backends/kubernetes/look/pods.py": "not found|^low on|^; ",
    "backends/why.py": "^7the last",
    "backends/watch.py": "",
}
WHOLE = (
    "Slurm ended it for a job with a higher priority, not by paceline",
    "n7 could not start its batch script; most likely it does not see /x of the machine that submitted the job; set "
    "root in the settings to a folder that all nodes share; paceline check --on the target tries that",
    "two machines call themselves node 1, a and b; give each its own --node-rank",
    "node 0 (a), which coordinates the job, is gone",
    "node 0, which coordinates the job, is gone: it ended the connection",
    "its agent (pid 7 on a) was killed, and its ranks with it; paceline resubmit x starts it again",
    "its agent (pid 7 on a) was killed, or the guard above it (pid 8), and its ranks with it",
    "it does not answer; C code may hold the interpreter's lock, or the program is not Python's; py-spy cannot read it",
    "it waits in all_gather 7, within a distributed checkpoint, which all ranks have to call",
    *(
        f"it waits for a worker of a DataLoader; {how}"
        for how in (
            "there is none left",
            "1 of 2 have ended",
            "1 of 2 are stopped (SIGSTOP)",
            "2 are there, and do nothing",
        )
    ),
    "it waits to write to pipe:7, which nobody reads",
    "ranks 0 to 3 write over each other in /data/out, and the script has not asked which rank it is, as if each rank "
    "did all of the work",
    "ranks 0, 1 use mpi4py, each in a world of its own (--framework mpi makes it one)",
    "evicted by its node: x; ask for what it needs with --memory, or keep data on a volume",
    "the last collective that it had entered: all_reduce 7, which had not ended",
    "use in the last 3m07s: GPUs 30 % busy, 3.4 GiB of 80 GiB, 300 W; 1.2 of 8 cores; 1.2 GiB of 8 GiB memory (2 GiB "
    "in use); 3 MiB/s read and 1 B/s written; 3 MiB/s received and 1 B/s sent",
    "job digits: FAILED (exit code 1) after 3m07s",
    "waits for 2 devices; 1 job ahead; held by: digits",
    "12 ms a step: data 62 %, forward_backward 20 %, sync 3 %, other 2 %",
)
LIMITS = (
    "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit", "QOSMaxWallDurationPerJobLimit", "AssocGrpCPURunMinutesLimit",
    "QOSMinGRES", "QOSMaxNodePerUserLimit", "AssocGrpBillingMinutes", "QOSGrpOddLimit",
)  # fmt: skip
WORDS = {
    "percent": 62, "of": "each step", "at": " at train.py:31", "saved": "35 ms of 120 ms", "tune": "", "workers": 2,
    "more": 8, "size": " 1.2 MB a sample", "reads": 70.0, "read": "3.4 kB", "could": 4, "late": 1, "objects": 30,
    "fairly": "OMP_NUM_THREADS=2 for each", "as_could": "torch.set_num_threads(4) at a.py:3", "objects_at": "",
    "queued": 20, "rate": "12 MB", "by_more": "12 % of the time", "idle": 50, "further": 8, "local": "1.2 GB",
    "buckets": 90, "enough": 4, "bucket": "12 kB", "collectives": 80.0, "sending": "1 GB", "link": "1.2 GB",
    "elsewhere": "3.5", "crowded": 20, "swapped": "12 MB", "host": "other processes use 3 of 8 cores, it swaps 3 MB/s",
    "stalled": ", and 12 % of the time processes wait", "gpu_use": 30, "gpu_memory": 20, "computing": 8, "ranks": 2,
    "cores": 8, "others": 40, "rank": 3, "line": "train.py:31", "part": "loading",
}  # fmt: skip


def everything() -> Iterator[str]:
    """Sentences that a user may meet."""
    yield from (advice(message).text for message in MESSAGES)
    for cause in slowness._CAUSES:
        yield f"{cause.what}; {cause.helps}".format(**WORDS)
    yield from (f"{part} 62 %" for *_, part in (*spent._OF_FRAMES, *spent._ONCE))
    yield from (*get_args(Cause), *get_args(FinalState))
    yield from (reasons.waiting(word, "4711", None) for word in (*reasons._WAITING, *LIMITS))
    yield reasons.waiting("Priority", "4711", 4e9)
    yield from (reasons.ended(word).reason or "time" for word in (*reasons.ENDED, "ODD"))
    yield from (words for *_, words in typical._OF_FRAMES)
    yield from (*typical._OF_CALLS.values(), *typical._STATES.values())
    yield from hangs()
    failure = {"rank": 1, "host": "gpu-1", "message": "exit code 3", "advice": advice(MESSAGES[2]).text}
    yield story.failed(failure)
    yield story.details({"event": "finished", "failure": failure, "state": "FAILED"}).replace("FAILED", "")
    yield from WHOLE
    yield from map(show_duration, (1, 42, 187, 7500, 273_600))


def hangs() -> Iterator[str]:
    """Lines about ranks that do not go on."""
    late = {"call": "futex", "line": 9}
    two: list[dict[str, Any]] = [{}, {"kind": "all_gather", "line": 6}]
    for ranks in (
        [stand(0, {"0": 7}), stand(1, {"0": 6}, **late)],
        [stand(0, {"0": 7}), stand(1, {"0": 6}, **late), stand(2, {"0": 7})],
        [stand(0, {"0": 7}), stand(1, {"0": 6}, **late), stand(2, {"0": 6}, **late), stand(3, {"0": 7})],
        [stand(rank, {"0": 7}) for rank in range(4)],
        [stand(rank, {"0": 7}, **more) for rank, more in enumerate(two)],
        [stand(rank, {"0": 7}, **more) for rank, more in enumerate([*two, {}])],
        [stand(rank, {}, line=line) for rank, line in enumerate([5, 5, 5, 6])],
        [stand(rank, {}, line=line) for rank, line in enumerate([5, 6])],
    ):
        found = find(ranks, 60.0)
        assert found is not None
        yield f"it hangs: {found['line']}"
        yield from map(stood, found["places"])


# -- tests -------------------------------------------------------------------------------------------------------------


def unsaid(texts: Iterator[str]) -> list[str]:
    """The sentences that have no Chinese, or only for a part."""
    found = {}
    for text in texts:
        chinese = said(text)
        if not HAN.search(chinese) or ENGLISH.search(COMMANDS.sub("", chinese)):
            found[f"{text!r} is {chinese!r}"] = None
    return list(found)


def test_what_is_said_of_jobs_has_chinese() -> None:
    assert not (lines := unsaid(everything())), "add to web/static/zh.json:\n" + "\n".join(lines)


@pytest.mark.parametrize("name", SHOWN)
def test_the_sentences_of_a_file_have_chinese(name: str) -> None:
    texts = (text for text in of_source(SOURCE / name) if not (SHOWN[name] and re.search(SHOWN[name], text)))
    assert not (lines := unsaid(texts)), "add to web/static/zh.json:\n" + "\n".join(lines)


def test_the_sentences_of_events_are_in_the_table_of_the_page() -> None:
    table = (STATIC / "i18n.js").read_text()
    assert [it for it in story._SENTENCES.values() if f'"{it}": "' not in table] == []


def test_a_sentence_has_the_values_of_its_key_and_no_other() -> None:
    for key, chinese in SENTENCES.items():
        assert sorted(re.findall(r"\{(\w+)\}", chinese)) == sorted(name for name, _ in PLACE.findall(key)), key


def test_values_are_whole() -> None:
    assert said("num_workers=8 would save about 35 ms of 120 ms") == "num_workers=8 约可节省 120 毫秒中的 35 毫秒"
    assert said("1.2 MB to 3 MB") == "1.2 MB 至 3 MB"


def test_the_words_of_users_stay() -> None:
    for text in ("ValueError: bad value on disk: 3", "rank and file", "Traceback (most recent call last):\n  x",
                 "cannot find the file; nothing was done"):  # fmt: skip
        assert said(text) == text
    assert said("rank 1 on b: ValueError: it waits; try again") == "b 上的 rank 1：ValueError: it waits; try again"
