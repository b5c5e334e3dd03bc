"""Job files: what is right becomes a job, what is wrong is one line with the place."""

from __future__ import annotations

import dataclasses
import getpass
import json
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from paceline.contract import CONTRACTS
from paceline.contract.nodejob import NodeJob
from paceline.job.errors import UserError
from paceline.job.flags import field_of, flag_of
from paceline.job.model import dotted
from paceline.job.quantities import duration, duration_text
from paceline.job.reading import read
from paceline.job.spec import FIXED_NODES, Code, JobSpec, Mount, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Writes a job file; returns its path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "job.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_every_kind_of_value(job_file: Any) -> None:
    spec = read(
        job_file("""
        script: train.py
        args: [--lr, 1e-3, 0.10, on, 2024-01-01, 007, ~, "quoted", 1:30]
        name: 12
        nodes: 2:4
        ranks: auto
        devices: [0, GPU-1]
        memory: 16Gi
        time_limit: 1h30m
        ttl: 90s
        env: {LR: 1e-3, EMPTY: , YES: yes, N: 0x10}
        labels: {year: 2024, ok: true}
        code: {mode: git, source: https://host/repository@main}
        data:
          - training-data:/data
          - {volume: other, path: /other}
        tensorboard: true
        options: {n: 3, f: 0.5, b: false, s: "3", nothing: null}
    """)
    )
    assert spec.args == ("--lr", "1e-3", "0.10", "on", "2024-01-01", "007", "~", "quoted", "1:30")
    assert (spec.name, spec.nodes, spec.ranks, spec.devices) == ("12", "2:4", "auto", ("0", "GPU-1"))
    assert (spec.memory, spec.time_limit, spec.ttl) == (16 << 30, 5400, 90)
    assert spec.env == {"LR": "1e-3", "EMPTY": "", "YES": "yes", "N": "0x10"}
    assert spec.labels == {"year": "2024", "ok": "true"}
    assert spec.code == Code(mode="git", source="https://host/repository@main")
    assert spec.data == (Mount(volume="training-data", path="/data"), Mount(volume="other", path="/other"))
    assert spec.tensorboard is True
    assert spec.options == {"n": 3, "f": 0.5, "b": False, "s": "3", "nothing": None}


def test_a_key_without_a_value_is_as_good_as_none(job_file: Any) -> None:
    assert read(job_file("script: a.py\nenv:\nargs:\nmemory:\nname:\nnodes:\n")) == JobSpec(script="a.py")


def test_aliases_stand_for_what_they_name(job_file: Any) -> None:
    spec = read(job_file("script: a.py\nargs: [&x 1.0, *x]\nenv: &e {A: 1}\nlabels: *e\n"))
    assert (spec.args, spec.env, spec.labels) == (("1.0", "1.0"), {"A": "1"}, {"A": "1"})


def test_flags_win_key_by_key(job_file: Any) -> None:
    path = job_file("script: a.py\nranks: 2\nmax_restarts: 1\nenv: {A: 1, B: 2}\ncode: {mode: git, source: x}\n")
    spec = read(path, {"ranks": 4, "env": {"B": "3", "C": "4"}, "code": {"mode": "snapshot"}})
    assert (spec.ranks, spec.max_restarts, spec.code) == (4, 1, Code(mode="snapshot"))
    assert spec.env == {"A": "1", "B": "3", "C": "4"}


def test_what_is_wrong_with_a_flag_is_not_laid_to_the_file(job_file: Any) -> None:
    path = job_file("script: a.py\nenv:\n  A: [1]\nmax_restarts: 1\n")
    with pytest.raises(UserError, match=r"^the flag max_restarts 'x': should be a whole number$"):
        read(path, {"max_restarts": "x", "env": {"A": "1"}}, lambda place: f"the flag {dotted(place)}")
    with pytest.raises(UserError, match=r"job.yaml:3: env.A: should be text$"):
        read(path, {"env": {"B": "1"}})


CASES = {
    "unknown key": ("script: a.py\nrank: 2\n", ":2: rank: unknown key; did you mean ranks?"),
    "key of another tool": ("script: a.py\nnprocs: 2\n", ":2: nprocs: unknown key; did you mean ranks?"),
    "unlike any key": ("script: a.py\naccount: x\n", ":2: account: unknown key; choose one of args, backend, "),
    "unknown key comes before what is missing for it": ("data:\n- a:/b\n- volume: x\n  pth: /y\n", ":4: data[1].pth:"),
    "unknown nested key": ("script: a.py\ncode:\n  mod: git\n", ":3: code.mod: unknown key; did you mean mode?"),
    "missing nested key": ("script: a.py\ndata:\n- a:/b\n- volume: x\n", ":4: data[1].path: missing; add it"),
    "wrong type": ("script: a.py\n\nmax_restarts: many\n", ":3: max_restarts 'many': should be a whole number"),
    "boolean that is none": ("script: a.py\ntensorboard: maybe\n", ":2: tensorboard 'maybe': should be true or false"),
    "one of several": ("script: a.py\nranks: foo\n", ":2: ranks 'foo': should be a whole number or 'auto', "),
    "wrong value": ("script: a.py\nname: a b\n", ":2: name 'a b': a job name has"),
    "wrong value of an item": ("script: a.py\ndata:\n  - a:/b\n  - nonsense\n", ":4: data[1] 'nonsense': not VOLUME:/"),
    "list in place of text": ("script: a.py\nenv:\n  A: 1\n  B: [1]\n", ":4: env.B: should be text"),
    "text in place of a list": ("script: a.py\nargs: --lr 1\n", ":2: args '--lr 1': should be a list"),
    "text in place of a mapping": ("script: a.py\ncode: git\n", ":2: code 'git': should be a mapping"),
    "time that is none": ("script: a.py\nttl: soon\n", ":2: ttl: 'soon' is not a duration; write"),
    "time without a unit": ("script: a.py\nttl: 7\n", ":2: ttl: 7 has no unit; did you mean 7d?"),
    "time without a unit, as text": ("script: a.py\nttl: '7'\n", ":2: ttl: '7' has no unit; did you mean 7d?"),
    "limit without a unit": ("script: a.py\ntime-limit: 5\n", ":2: time-limit: 5 has no unit; did you mean 5m or 5h?"),
    "limit in seconds": ("script: a.py\ntime_limit: 3600\n", ":2: time_limit: 3600 has no unit; did you mean 3600s?"),
    "grace without a unit": ("script: a.py\ngrace: 5\n", ":2: grace: 5 has no unit; did you mean 5s?"),
    "no time": ("script: a.py\nttl: 0\n", ":2: ttl: 0 is no time; to keep the job, leave it out"),
    "negative time": ("script: a.py\nttl: -5\n", ":2: ttl: -5 is not a duration; write for example"),
    "framework that is none": ("script: a.py\nframework: torhc\n", ":2: framework: unknown framework 'torhc'; did you"),
    "variable that is none": ("script: a.py\nenv: {1: x}\n", ":2: env: '1' is not a valid name"),
    "given twice": ("script: a.py\nranks: 1\nranks: 2\n", ":3: ranks is given twice"),
    "given twice, nested": ("script: a.py\nenv:\n  A: 1\n  A: 1\n", ":4: A is given twice"),
    "list as key": ("script: a.py\n? [a]\n: b\n", ":2: a list or mapping cannot be a key"),
    "not a mapping": ("- script: a.py\n", ":1: a job is a mapping of keys to values"),
    "text alone": ("train.py\n", ":1: a job is a mapping of keys to values"),
    "empty": ("", " is empty; it needs"),
    "nothing but comments": ("# script: a.py\n---\n", " is empty; it needs"),
    "two documents": ("script: a.py\n---\nscript: b.py\n", ":3: a second document begins here"),
    "nothing to run": ("name: a\n", ": nothing to run; give one of script, module and command"),
    "two things to run": ("script: a.py\nmodule: a\n", ": script and module contradict each other"),
    "no YAML": ("script: a.py\nargs: [1, 2\nranks: 2\n", ":3: not valid YAML: "),
    "tab": ("script: a.py\nenv:\n\tA: 1\n", ":3: not valid YAML: "),
    "character that YAML forbids": ("script: a.py\nname: \x07\n", ":2: not valid YAML: character U+0007"),
    "character that does not exist": ('script: "\\UFFFFFFFF"\n', ": not valid YAML: it holds a character that does"),
    "half a character": ('script: a.py\nargs:\n- "\\ud83d"\n', ":3: '\\ud83d' holds half a character"),
    "not UTF-8": (b"script: a.py\nname: \xe4\n", ":2: this is not UTF-8"),
    "code": ("script: !!python/object/apply:os.system [x]\n", ":1: the tag tag:yaml.org,2002:python/object/apply:os"),
    "tag": ("script: a.py\nname: !mine x\n", ":2: the tag !mine is not allowed"),
    "tag that does not fit": ("script: a.py\nranks: !!int x\n", ":2: 'x' is not a valid int; leave the tag out"),
    "a value in itself": ("script: a.py\noptions: &a\n  b: *a\n", ":2: a value that contains itself"),
    "number without end": (f"script: a.py\npriority: 1{'0' * 5000}\n", ":2: a number with so many digits"),
    "nested deeply": (f"script: a.py\noptions: {'{a: ' * 60}1{'}' * 60}\n", "nested too deeply"),
    "nested very deeply": (f"script: a.py\noptions: {'[' * 5000}{']' * 5000}\n", "nested too deeply"),
    "laughing": (
        "options:\n  a0: &a0 [x]\n" + "".join(f"  a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)),
        ":1: not valid YAML: its aliases (*NAME) stand for more than 10000 values",
    ),
    "large": (b"#" * (1 << 20) + b"\n", " is larger than 1 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_with_the_place(job_file: Any, case: str) -> None:
    content, message = CASES[case]
    path = job_file(content)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no job file .*missing.yaml; check the name and the folder$"):
        read(tmp_path / "missing.yaml")
    with pytest.raises(UserError, match=r" is a folder, not a job file; name the file in it$"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"^cannot read /proc/self/mem: "):  # not even for root
        read("/proc/self/mem")


def test_other_places_have_the_same_words() -> None:
    with pytest.raises(ValueError, match=r"^env: the value of A holds a zero byte$"):
        JobSpec(script="a.py", env={"A": "\0"})
    with pytest.raises(UserError, match=r"^data\[0\].mode\\n: unknown key; choose one of path, volume$"):
        JobSpec(script="a.py", data=[{"volume": "a", "path": 7, "mode\n": 1}])  # type: ignore[arg-type]  # wrong


def test_the_example_is_a_job() -> None:
    assert read(EXAMPLES / "digits.yaml").args == ("--epochs", "30")


# Any text, and any job

KEYS = [*JobSpec.__struct_fields__, "env", "args", "code", "data", "rnaks", "1"]
SNIPPETS = [
    ": ", "\n", "\n  ", "- ", "[", "]", "{", "}", ",", "&a ", "*a", "!!int ", "!!float ", "!!binary ", "!x ", "'", '"',
    "|\n", ">", "#", "---\n", "...\n", "%YAML 1.1\n", "? ", "<<", "null", "~", "true", "1e-3", "0x1F", ".inf", "2:4",
    "\t", "\\u", "script: a.py\n", "mode", "volume", "path", "git", "a:/b",
]  # fmt: skip


def assert_job_or_one_line(path: Path) -> None:
    try:
        assert isinstance(read(path), JobSpec)
    except UserError as error:
        assert str(error).isprintable()
        assert str(path) in str(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_job_or_one_line(job_file: Any, content: bytes) -> None:
    assert_job_or_one_line(job_file(content))


@pytest.mark.soak
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(100, 3000))
@given(content=st.lists(st.sampled_from(KEYS + SNIPPETS) | st.text(max_size=3), max_size=20).map("".join))
def test_anything_like_yaml_is_a_job_or_one_line(job_file: Any, content: str) -> None:
    assert_job_or_one_line(job_file(content.encode("utf-8", "surrogatepass")))


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.soak
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(100, 3000))
@given(data=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
def test_any_values_are_a_job_or_one_line(job_file: Any, data: dict[str, Any]) -> None:
    assert_job_or_one_line(job_file(yaml.safe_dump({"script": "a.py", **data}, allow_unicode=True)))


characters = st.characters(exclude_categories=["Cs"])
text = st.text(characters, max_size=8)
word = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
filled = st.text(characters, min_size=1, max_size=8)
variable = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
options: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
jobs = st.builds(
    JobSpec,
    **{kind: st.none() for kind in ("module", "command")},
    script=word,
    name=st.from_regex(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?", fullmatch=True),
    args=st.lists(word, max_size=3).map(tuple),
    framework=st.none() | st.sampled_from(sorted(CONTRACTS.keys() - set(FIXED_NODES))),
    nodes=st.integers(1, 9) | st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda n: f"{n[0]}:{n[0] + n[1]}"),
    ranks=st.integers(1, 4096) | st.sampled_from(["auto", "gpu", "cpu"]),
    devices=st.none() | st.integers(0, 9) | st.lists(text, max_size=3, unique=True).map(tuple),
    share_devices=st.booleans(),
    cpus=st.none() | st.integers(1, 999),
    memory=st.none() | st.integers(64 << 20, 1 << 50),
    image=st.none() | text,
    env=st.dictionaries(variable, word, max_size=3),
    secrets=st.lists(variable.map("SECRET_{}".format), max_size=3).map(tuple),  # none is in env too
    working_dir=word,
    code=st.none() | st.builds(Code, mode=st.sampled_from(["git", "rsync", "snapshot"]), source=st.none() | text),
    data=st.lists(st.builds(Mount, volume=filled, path=filled), max_size=3).map(tuple),
    tensorboard=st.booleans(),
    time_limit=st.none() | positive.map(duration_text),
    ttl=st.none() | positive.map(duration_text),
    priority=st.integers(-99, 99),
    labels=st.dictionaries(text, text, max_size=3),
    backend=text,
    options=st.dictionaries(text, options, max_size=3),
    grace=st.floats(0, 1e9).map(duration_text),
    node_rank=st.none() | st.integers(0, 9),
    join_timeout=st.floats(0, 1e9, exclude_min=True).map(duration_text),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(spec=jobs)
def test_a_job_that_is_written_down_is_read_back(job_file: Any, spec: JobSpec) -> None:
    assert read(job_file(yaml.safe_dump(spec.dumped()))) == spec
    assert JobSpec.from_stored(json.loads(json.dumps(spec.stored()))) == spec
    assert JobSpec.from_stored(spec.for_node().to_json()) == JobSpec.validated(spec.dumped()) == spec
    again = pickle.loads(pickle.dumps(spec))
    assert (again, again.given) == (spec, spec.given)


def test_nodes_read_every_field_and_have_the_same_defaults() -> None:
    fields = {*JobSpec.__struct_fields__, *Rendezvous.__struct_fields__, "user"} - {"rendezvous"}
    assert {it.name for it in dataclasses.fields(NodeJob)} == fields
    assert dataclasses.replace(JobSpec(script="train.py").for_node(), user=None) == NodeJob(script="train.py")


@given(st.floats(min_value=0, allow_infinity=False) | st.integers(1, 10**9).map(float))
def test_a_duration_is_read_as_it_is_written(seconds: float) -> None:
    assert duration(duration_text(seconds)) == seconds


def test_durations_from_python() -> None:
    spec = JobSpec.validated({"script": "a.py", "ttl": timedelta(days=7), "time_limit": "2h30m"})
    assert (spec.ttl, spec.time_limit) == (604800.0, 9000.0)
    shown = {"script": "a.py", "ttl": "7d", "time_limit": "150m"}
    assert spec.dumped(only_changed=True) == shown
    assert JobSpec.validated({"script": "a.py"}).dumped(only_changed=True) == {"script": "a.py"}
    for value, said in ((7, "7 has no unit; did you mean 7d?"), (True, "True is not a duration")):
        with pytest.raises(UserError, match=re.escape(said)):
            JobSpec.validated({"script": "a.py", "ttl": value})


def test_a_job_that_was_stored_has_its_durations_in_seconds() -> None:
    """Also one of a version that took numbers from its user."""
    stored = {"script": "a.py", "ttl": 60, "time_limit": 0.5, "grace": 0.0, "silence": 20}
    spec = JobSpec.from_stored(stored)
    assert (spec.ttl, spec.time_limit, spec.grace, spec.silence) == (60.0, 0.5, 0.0, 20.0)
    assert spec.stored(only_given=True) == {**stored, "user": getpass.getuser()}  # who runs this
    with pytest.raises(UserError, match="has no unit"):
        JobSpec.from_stored({**stored, "ttl": "60"})


def test_json_is_read_too(job_file: Any) -> None:
    spec = JobSpec(script="\N{GRINNING FACE}/\u2028.py", args=("1", "null"), options={"a": [1, 0.5, None, True, "1"]})
    assert read(job_file(json.dumps(spec.dumped(), indent=2))) == spec


def test_the_fields_of_rendezvous_may_stand_among_the_jobs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("script: a.py\nmain_port: 29600\nrun_id: 7\n")
    spec = read(path, {"rendezvous": {"main_port": 29700}})
    assert (spec.rendezvous.main_port, spec.rendezvous.run_id, spec.for_node().main_port) == (29700, "7", 29700)
    path.write_text("script: a.py\nnodes: 2\nmain_port: 0\n")
    with pytest.raises(UserError, match=r"job.yaml:3: main_port 0: "):
        read(path)
    path.write_text("script: a.py\nrendezvous:\n  main_port: 0\n")
    with pytest.raises(UserError, match=r"job.yaml:3: rendezvous.main_port 0: "):
        read(path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("16", r"memory: 16 is 16 B, in which no rank can start; did you mean 16G\?"),
        ("'16'", r"did you mean 16G\?"),
        ("63Mi", r"63Mi is 63.0 MiB, in which no rank can start; ask for 64Mi or more"),
        ("0", r"ask for 64Mi or more"),
        ("99999", r"ask for 64Mi or more"),
    ],
)
def test_memory_without_a_unit_is_refused(tmp_path: Path, given: str, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"script: a.py\nmemory: {given}\n")
    with pytest.raises(UserError, match=rf"job.yaml:2: .*{said}"):
        read(path)
    path.write_text("script: a.py\nmemory: 64Mi\n")
    assert read(path).memory == 64 << 20


def test_keys_may_be_called_as_flags(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "script: a.py\ngpus: 2\nnproc-per-node: 4\nnnodes: 1:2\nlabel: {team: a}\nsecret: [KEY]\nlogdir: runs\n"
        "tensorboard: true\ntime-limit: 2h\nmaster_port: 29600\nrdzv_id: 7\n"
    )
    spec = read(path)
    assert (spec.devices, spec.ranks, spec.nodes, spec.labels) == (2, 4, "1:2", {"team": "a"})
    assert (spec.secrets, spec.tensorboard_dir, spec.time_limit) == (("KEY",), "runs", 7200.0)
    assert (spec.rendezvous.main_port, spec.rendezvous.run_id) == (29600, "7")
    for text, said in (
        ("gpus: many", r"job.yaml:2: gpus 'many': "),
        ("gpus: 2\ndevices: [0]", r"job.yaml:2: gpus and devices mean the same; leave one of them out"),
        ("gpus: 2\nGPUS: 2", r"job.yaml:3: GPUS: unknown key; "),
        ("nproc-per-node: 2\nnproc_per_node: 3", r"job.yaml:3: nproc_per_node and nproc-per-node mean the same"),
        ("labels: {a: 1}\nlabel: {a: 1}", r"job.yaml:3: label and labels mean the same"),
    ):
        path.write_text(f"script: a.py\n{text}\n")
        with pytest.raises(UserError, match=said):
            read(path)


def test_every_flag_of_a_field_is_a_key() -> None:
    for field in JobSpec.__struct_fields__:
        flag = flag_of((field,))
        if re.fullmatch(r"--[a-z-]+", flag) and field not in ("code", "rendezvous"):
            assert field_of(flag.removeprefix("--")) == field
            assert field_of(flag.removeprefix("--").replace("-", "_")) == field
        assert field_of(field) == field
