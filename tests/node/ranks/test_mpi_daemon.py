"""What mpirun writes for a shell on another machine becomes a command that no shell sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.node.ranks.mpi_daemon import check, parse, with_folders

ARGUMENTS = '-mca ess "env" -mca orte_node_regex "vm,nosuch@0(2)" -mca orte_hnp_uri "5.0;tcp://192.0.2.2:45431"'
WORDS = ["-mca", "ess", "env", "-mca", "orte_node_regex", "vm,nosuch@0(2)"]
WORDS += ["-mca", "orte_hnp_uri", "5.0;tcp://192.0.2.2:45431"]
BOURNE = (
    "PATH=/opt/mpi/bin:$PATH ; export PATH ; LD_LIBRARY_PATH=/opt/mpi/lib:${LD_LIBRARY_PATH:-} ; export "
    "LD_LIBRARY_PATH ; DYLD_LIBRARY_PATH=/opt/mpi/lib:${DYLD_LIBRARY_PATH:-} ; export DYLD_LIBRARY_PATH ; "
)
CSH = (
    "set path = ( /opt/mpi/bin $path ) ; if ( $?LD_LIBRARY_PATH == 1 ) set OMPI_have_llp ; "
    "if ( $?LD_LIBRARY_PATH == 0 ) setenv LD_LIBRARY_PATH /opt/mpi/lib ; "
    "if ( $?OMPI_have_llp == 1 ) setenv LD_LIBRARY_PATH /opt/mpi/lib:$LD_LIBRARY_PATH ; "
)
FOLDERS = {"PATH": "/opt/mpi/bin", "LD_LIBRARY_PATH": "/opt/mpi/lib"}
PROFILE = "( test ! -r ./.profile || . ./.profile; {} )"


@pytest.mark.parametrize(
    ("line", "program", "folders"),
    [
        ("  orted {}", "orted", {}),
        (PROFILE.format("orted {}"), "orted", {}),
        (BOURNE + "/opt/mpi/bin/orted {}", "/opt/mpi/bin/orted", {**FOLDERS, "DYLD_LIBRARY_PATH": "/opt/mpi/lib"}),
        (PROFILE.format(BOURNE + "/opt/mpi/bin/orted {}"), "/opt/mpi/bin/orted",
         {**FOLDERS, "DYLD_LIBRARY_PATH": "/opt/mpi/lib"}),
        (CSH + "/opt/mpi/bin/orted {}", "/opt/mpi/bin/orted", FOLDERS),
    ],
    ids=["bash", "sh", "prefix", "sh with prefix", "csh with prefix"],
)  # fmt: skip
def test_what_mpirun_writes(line: str, program: str, folders: dict[str, str]) -> None:
    command, found = parse(line.replace("{}", ARGUMENTS))
    assert (command, found) == ([program, *WORDS], folders)
    check(command, found)


def test_folders_go_first() -> None:
    env = {"PATH": "/usr/bin", "HOME": "/root"}
    assert with_folders(FOLDERS, env) == {"PATH": "/opt/mpi/bin:/usr/bin", "LD_LIBRARY_PATH": "/opt/mpi/lib"}
    assert with_folders({}, env) == {}


@pytest.mark.parametrize(
    "line",
    ["", "touch /tmp/x", "orted ; touch /tmp/x", "touch /tmp/x && orted", "`orted`", 'orted "', "( )", "PATH=/x:$PATH"],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"is not the command of mpirun's daemon|No closing quotation"):
        parse(line)


@given(st.text(alphabet="$`;&|<>(){}*?~'\\\n #!", min_size=1))
def test_what_a_shell_would_read_stays_one_argument(text: str) -> None:
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if set(text) <= set(";()"):
        return  # reads like the end of a command, and is refused or cut, never run
    assert parse(f"orted -mca x {quoted}") == (["orted", "-mca", "x", text], {})


@pytest.mark.parametrize(
    ("command", "folders"),
    [
        ("touch /tmp/x; orted", {}),
        ([], {}),
        (["sh", "-c", "orted"], {}),
        (["/bin/touch", "/usr/bin/orted"], {}),
        (["orted", 1], {}),
        (["orted", "a\0b"], {}),
        (["orted"], {"LD_PRELOAD": "/tmp/x.so"}),
        (["orted"], {"PATH": 1}),
    ],
)
def test_what_another_node_may_not_ask_for(command: list[str], folders: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="daemon"):
        check(command, folders)
