"""The page of `paceline web`, in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import Paceline, eventually
from tests.lab.web.conftest import Server, many_jobs
from tests.web.test_chinese import everything, said

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster
    from tests.lab.web.browser import Browser

pytestmark = pytest.mark.needs("chromium")
FOREVER = "import time\nprint('it \\x1b[31mruns\\x1b[0m', flush=True)\ntime.sleep(600)\n"


def submit(paceline: Paceline, *args: str) -> None:
    paceline.succeeds("submit", *args)


def state(chromium: Browser, name: str, wanted: str) -> None:
    """Wait until the table shows a job in this state."""
    row = f"[...document.querySelectorAll('tr.job')].find(e => e.textContent.includes({json.dumps(name)}))"
    chromium.until(f"{row}?.textContent.includes('{wanted}')")


def test_a_job_is_shown_followed_and_stopped(chromium: Browser, server: Server, paceline: Paceline) -> None:
    chromium.open(server.url)
    chromium.shows("No jobs yet.")
    assert "token" not in chromium.run("location.href")
    submit(paceline, "--name", "it", "-n", "2", paceline.script(FOREVER))
    state(chromium, "it", "RUNNING")  # by itself
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.until("document.querySelector('.line')?.textContent === 'it runs'")
    assert chromium.run("document.querySelector('.ansi-color-1').textContent") == "runs"
    chromium.fill("input[list]", "99", "change")
    chromium.until("document.querySelector('p.error')?.textContent.endsWith('not rank 99')")  # and no flag to correct
    chromium.fill("input[list]", "all", "change")
    chromium.until("document.querySelectorAll('.line').length === 2")
    chromium.click("button", "Stop")
    chromium.shows("paceline stop it")
    assert not chromium.barriers()
    chromium.click("dialog button", "Stop")
    chromium.until("document.querySelector('.state').textContent === 'STOPPED'")
    chromium.shows("The log has ended.")
    assert paceline.json("get", "it")["state"] == "STOPPED"


LOGS = """
import json, os, time
folder = os.environ["PACELINE_RUN_DIR"]
lines = [{"time": time.time(), "step": step, "loss": 1.0 / step} for step in range(1, 9)]
with open(f"{folder}/metrics.jsonl", "w") as file:
    file.writelines(json.dumps(line) + "\\n" for line in lines)
progress = {"time": time.time(), "epoch": 0, "epochs": 1, "step": 8, "steps": 16, "metrics": {"loss": 0.125}}
progress |= {"samples_per_second": 3.0, "epoch_seconds_left": 9.0, "seconds_left": 9.0, "sync": None, "replicas": None}
with open(f"{folder}/progress.json", "w") as file:
    json.dump(progress, file)
time.sleep(600)
"""


def test_a_machine_is_one_row_and_says_who_has_it(
    chromium: Browser, paceline: Paceline, request: pytest.FixtureRequest
) -> None:
    """It is this machine, and a host of a target too."""
    settings = "[local]\ndevices = 2\n[targets.lab]\nbackend = 'ssh'\nhosts = ['localhost']\n"
    (paceline.folder / "paceline.toml").write_text(settings)
    server = Server(paceline)
    request.addfinalizer(server.end)
    job = ("--name", "a-" + 61 * "x", "-n", "1", "--gpus", "1", "--time-limit", "1h")
    submit(paceline, *job, paceline.script(LOGS))
    chromium.open(server.url)
    chromium.until("document.querySelectorAll('tr.job .spark').length === 1")  # its losses
    chromium.shows("on 1 of 2 slots")  # asked for meanwhile
    chromium.resize(390, 800)
    chromium.until("!!document.querySelector('tr.job td.col-about')")
    is_cut = "const {scrollHeight, clientHeight} = document.querySelector('tr.job'); return scrollHeight > clientHeight"
    assert not chromium.run(f"(() => {{ {is_cut} }})()")
    chromium.open(f"{server.base}#/machines")
    chromium.until("document.querySelector('.machines tbody')?.textContent.includes('lab')")
    for width in (390, 1280):
        chromium.resize(width, 800)
        (row,) = chromium.run("[...document.querySelectorAll('.machines tbody tr')].map(it => it.innerText)")
        for text in ("this machine", "1 of 2 slots", "slots 0", "since", "by its time limit"):
            assert text in row, (text, row)
        assert "devices" not in row.replace("devices\n", "") and chromium.run("scrollX") == 0
        assert chromium.run("document.documentElement.scrollWidth") <= width
        assert not chromium.barriers()
    chromium.click(".holder a", "a-")
    chromium.until("location.hash.startsWith('#/jobs/local/a-')")
    paceline.succeeds("stop", "--now", job[1])


def test_a_hidden_page_notifies_of_jobs_that_fail(chromium: Browser, server: Server, paceline: Paceline) -> None:
    chromium.call("Browser.grantPermissions", origin=server.base.rstrip("/"), permissions=["notifications"])
    chromium.open(server.url)
    chromium.shows("No jobs yet.")
    chromium.run(
        "window.shown = []; const Real = Notification; window.Notification = class { constructor(title, {body}) {"
        " shown.push(title + ': ' + body) } static permission = Real.permission;"
        " static requestPermission() { return Real.requestPermission() } }; 0"
    )
    chromium.click("header summary")
    chromium.click("header button", "Notifications: off")
    chromium.shows("Notifications: on")
    submit(paceline, "--name", "seen", "--framework", "indexed", paceline.script("raise ValueError(5)\n"))
    state(chromium, "seen", "FAILED")
    with chromium.tab("about:blank"):
        chromium.until("document.hidden")
        submit(paceline, "--name", "unseen", "--framework", "indexed", "script.py")
        chromium.until("shown.length")
        port = server.port
        server.end()
        submit(paceline, "--name", "missed", "--framework", "indexed", "script.py")
        assert paceline("wait", "missed").returncode == 1
        server.start(port)
        chromium.until("shown.length > 1")
    why = "has failed: local\nrank 0: ValueError: 5"
    assert chromium.run("shown") == [f"unseen {why}", f"missed {why}"]
    chromium.click("header button", "Notifications: on")
    chromium.shows("Notifications: off")


def test_a_job_is_submitted_again_changed_and_deleted(chromium: Browser, server: Server, paceline: Paceline) -> None:
    paceline.script("import sys\nprint('called with', *sys.argv[1:])\n")
    chromium.open(server.base + "#/submit")
    chromium.shows("Open the address that paceline web has printed.")
    chromium.open(server.url)
    chromium.click("a", "Submit")
    chromium.fill("textarea", "script: nowhere.py\n")
    chromium.click("button", "Dry run")
    chromium.shows("nowhere.py")
    chromium.until("!!document.querySelector('.error')")
    chromium.fill("textarea", "script: script.py\nname: first\nranks: 2\nargs: [a]\n")
    assert chromium.run("document.querySelector('form.submit button.main').disabled")
    chromium.click("button", "Dry run")
    chromium.until("document.querySelector('.dry-run')?.textContent.includes('first')")
    assert not chromium.barriers()
    assert not (paceline.home / "jobs" / "first").exists()
    chromium.click("button.main", "Submit")
    chromium.until("document.querySelector('.state')?.textContent === 'SUCCEEDED'")

    chromium.click("button", "Resubmit")
    chromium.fill("dialog .fields input[type=number]", "1")
    chromium.fill("dialog .fields label:nth-of-type(7) input", "b 'c d'")
    chromium.click("dialog button", "Dry run")
    chromium.shows("paceline resubmit -n 1 first -- b 'c d'")
    assert not chromium.barriers()
    chromium.click("dialog button.main", "Resubmit")
    chromium.until("document.querySelector('h1').textContent === 'first-2'")
    chromium.click("a", "Logs")
    chromium.shows("called with b c d")
    chromium.until("document.querySelector('.state').textContent === 'SUCCEEDED'")

    chromium.click("button", "Delete")
    chromium.shows("0 checkpoints")
    assert not chromium.barriers()
    chromium.click("dialog button", "Delete")
    chromium.until("location.hash === '#/jobs'")
    chromium.until("document.querySelectorAll('tr.job').length === 1")
    assert [path.name for path in (paceline.home / "jobs").iterdir()] == ["first"]


def test_a_read_only_page_has_no_buttons(chromium: Browser, paceline: Paceline) -> None:
    submit(paceline, "--name", "it", "-n", "1", "--no-python", "true")
    server = Server(paceline, "--read-only")
    chromium.open(server.url)
    chromium.click("tr.job a", "it")
    chromium.shows("Overview")
    chromium.shows("Events")
    assert chromium.run("[...document.querySelectorAll('main button')].map(e => e.textContent)") == ["Report"]
    chromium.click("a", "Submit")
    chromium.shows("This server is read-only.")
    server.end()


def test_a_job_has_the_view_of_its_report_and_is_used_for_another(
    chromium: Browser, server: Server, paceline: Paceline
) -> None:
    steps = [
        {"step": step, "time": 1.0 + step, "epoch": 0, "loss": 1 / step, "__proto__": 2e300} for step in range(1, 9)
    ]
    script = f"""
        import json, os
        with open(os.path.join(os.environ["PACELINE_RUN_DIR"], "metrics.jsonl"), "w") as file:
            for step in {steps!r}:
                print(json.dumps(step), file=file)
    """
    for name, rate in (("one", "0.1"), ("two", "0.3")):
        submit(paceline, "--name", name, "-n", "1", "--env", "A=b", paceline.script(script), "--lr", rate)
    chromium.open(server.url)
    state(chromium, "one", "SUCCEEDED")
    state(chromium, "two", "SUCCEEDED")
    chromium.click("tr.job a", "one")
    chromium.shows("__proto__ 2E300")
    chromium.click("a", "Compare")
    chromium.fill("form input[name=other]", "two")
    chromium.click("form button", "Add")
    chromium.until("document.querySelector('.charts').textContent.includes('two')")
    chromium.shows("--lr")
    assert chromium.run("[...document.querySelectorAll('.compared mark')].map(it => it.textContent)") == ["0.1", "0.3"]
    assert not chromium.barriers()
    chromium.open(f"{server.base}#/jobs")
    for name in ("one", "two"):
        chromium.click(f"input[aria-label='Compare {name}']")
    chromium.click("a", "Compare 2")
    chromium.until("document.querySelectorAll('.compared thead th').length === 2")
    chromium.click(".compared th a", "one")
    chromium.shows("__proto__ 2E300")
    chromium.run("URL.createObjectURL = blob => (blob.text().then(text => window.made = text), '#made')")
    chromium.click("button", "Report")
    chromium.until("window.made?.includes('Content-Security-Policy')")
    chromium.click("a", "Use in a new job")
    chromium.until("document.querySelector('textarea')?.value.includes('A: b')")
    paceline.succeeds("report", "one", "two", "-o", "both.html")
    chromium.open(f"file://{paceline.folder}/both.html")
    chromium.shows("Compare")
    chromium.run("localStorage.setItem('paceline.language', 'zh'); location.reload()")
    chromium.shows("比较")
    chromium.shows("__proto__")
    chromium.run("localStorage.clear()")


def test_ten_thousand_jobs(chromium: Browser, tmp_path: Path) -> None:
    paceline = Paceline(tmp_path)
    many_jobs(paceline, 10_000)
    server = Server(paceline)
    chromium.open(server.url)
    chromium.shows("10,000 jobs")
    chromium.shows("job-00000")
    assert chromium.received <= 300_000
    assert chromium.run("document.querySelectorAll('tr.job').length") < 200
    chromium.run("document.querySelector('.scroll').scrollTo(0, 1e9)")
    chromium.shows("job-09998")
    chromium.fill("input[type=search]", "job-0004 local")
    chromium.shows("10 jobs")
    chromium.click("th button", "name")
    chromium.until("document.querySelector('tr.job a').textContent === 'job-00040'")
    chromium.click("th button", "name")
    chromium.until("document.querySelector('tr.job a').textContent === 'job-00049'")
    # The view is in the address.
    chromium.until("location.hash === '#/jobs?q=job-0004+local&sort=-name'")
    columns = "[...document.querySelectorAll('thead th')].map(it => it.textContent.split(' ')[0]).join()"
    assert chromium.run(columns) == "name,state,progress,age"  # others have nothing in them
    chromium.open("about:blank")
    chromium.open(f"{server.base}#/jobs?group=name")
    chromium.until("[...document.querySelectorAll('tr.group')].some(it => it.textContent.includes('9,999'))")
    chromium.click("tr.group button", "job")
    chromium.until("location.hash === '#/jobs?in=name%3Ajob'")
    chromium.shows("9,999 jobs")
    # Another address is another view, by a link too.
    chromium.run("location.hash = '#/jobs?state=FAILED&q=seed'")
    chromium.until("document.querySelector('.chips [aria-pressed=true]')?.textContent.includes('FAILED')")
    chromium.shows("0 jobs")
    chromium.click("header a", "Jobs")
    chromium.shows("10,000 jobs")
    assert chromium.run("document.querySelector('input[type=search]').value") == ""
    chromium.resize(390, 800)
    chromium.until("document.querySelector('tr.job td.col-about')?.textContent.startsWith('1 rank')")
    chromium.resize(1280, 800)
    server.end()


def test_no_line_is_lost_of_a_rank_that_writes_much(chromium: Browser, server: Server, paceline: Paceline) -> None:
    count = 300_000
    script = f"""
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        for number in range({count}):
            print("line", number)
    """
    submit(paceline, "--name", "it", "-n", "1", paceline.script(script))
    chromium.open(server.url)
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.shows("ready")
    (paceline.folder / "go").touch()
    chromium.until(f"document.querySelector('#log-count').dataset.count === '{count + 1}'")
    chromium.until(f"[...document.querySelectorAll('.line')].at(-1)?.textContent === 'line {count - 1}'")
    chromium.shows("The page keeps the last 100,000 lines")
    chromium.click("button", "From the start")
    chromium.until("document.querySelectorAll('.line')[1]?.textContent === 'line 0'")
    assert chromium.run("document.querySelector('.log').scrollTop") == 0
    chromium.click("button", "More")
    chromium.until("document.querySelector('.line')?.textContent === 'line 4999'")
    chromium.click("button", "To the end")
    chromium.until(f"[...document.querySelectorAll('.line')].at(-1)?.textContent === 'line {count - 1}'")
    chromium.click("button", "Earlier")
    chromium.until(f"document.querySelector('.line')?.textContent === 'line {count - 10_000}'")
    chromium.fill(".logs input[type=search]", "9999$")
    chromium.click("button", "Search")
    chromium.until("document.querySelector('#log-count').dataset.count === '30'")
    assert chromium.run("document.querySelector('mark').textContent") == "9999"


def test_lines_that_no_browser_should_hold(chromium: Browser, server: Server, paceline: Paceline) -> None:
    """A line of 30 MB, a bar that was drawn ten thousand times, and what an expression would be tried on for ever."""
    script = """
        for part in range(30):
            print("x" * 1_000_000, end="")
        print()
        print("".join(f"{it:>5} %\\r" for it in range(10_000)))
        print("\\x1b[32m\U0001f600 a\\x1b[31mab", "a" * 60)
    """
    submit(paceline, "--name", "it", "-n", "1", paceline.script(script))
    chromium.open(server.url)
    state(chromium, "it", "SUCCEEDED")
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.shows("The log has ended.")
    assert chromium.run("[...document.querySelectorAll('.line')].slice(0, 2).map(e => e.textContent)") == [
        "x" * 20_000, " 9999 %"]  # fmt: skip
    chromium.fill(".logs input[type=search]", "(a.....)+ab")
    chromium.click("button", "Search")
    chromium.until("document.querySelector('#log-count').dataset.count === '1'")
    assert chromium.run("[...document.querySelectorAll('mark')].map(e => e.textContent)") == ["a", "ab"]
    chromium.fill(".logs input[type=search]", "((a|x)*)*c")
    chromium.click("button", "Search")
    chromium.shows("takes too long")


def test_ten_tabs(chromium: Browser, server: Server, paceline: Paceline) -> None:
    """Browsers have six connections to a server. What a hidden tab has missed is there when it is seen again."""
    script = """
        import os, time
        print("begun", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("gone on", flush=True)
        time.sleep(600)
    """
    submit(paceline, "--name", "it", "-n", "1", paceline.script(script))
    chromium.open(server.url)
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.shows("begun")
    with contextlib.ExitStack() as stack:
        for _ in range(9):
            last = stack.enter_context(chromium.tab(f"{server.base}#/jobs/local/it/logs"))
            last.shows("begun")
        chromium.until("document.hidden && document.body.innerText.includes('paused')")
        (paceline.folder / "go").touch()
        last.shows("gone on")
        table = stack.enter_context(chromium.tab(f"{server.base}#/jobs"))
        state(table, "it", "RUNNING")
        paceline.succeeds("stop", "--now", "it")
        state(table, "it", "STOPPED")
    chromium.shows("gone on")
    chromium.shows("The log has ended.")
    chromium.until("document.querySelector('.state').textContent === 'STOPPED'")


IS_ONLINE = "!document.body.innerText.includes('Connection lost')"


def test_the_page_comes_back_when_its_server_does(chromium: Browser, server: Server, paceline: Paceline) -> None:
    chromium.open(server.url)
    chromium.shows("No jobs yet.")
    server.end()
    chromium.shows("Connection lost")
    submit(paceline, "--name", "new", "-n", "1", "--no-python", "true")
    server.start(server.port)
    state(chromium, "new", "SUCCEEDED")
    chromium.until(IS_ONLINE)  # a request may be answered before the stream of changes is there again
    submit(paceline, "--name", "it", "-n", "1", paceline.script(FOREVER))
    state(chromium, "it", "RUNNING")  # what the page has seen last; its logs may be there before
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.shows("following")
    server.end()
    chromium.shows("Connection lost")
    chromium.click("header a", "Jobs")
    state(chromium, "it", "RUNNING")  # as it was last
    chromium.run("location.hash = '#/jobs/local/it/logs'")
    chromium.until("document.querySelector('h1')?.textContent === 'it'")
    server.start(server.port)
    paceline.succeeds("stop", "--now", "it")
    chromium.shows("The log has ended.")
    chromium.until(IS_ONLINE)


NAMELESS = """[...document.querySelectorAll('button, a, input, select, textarea, summary, [role=img]')]
    .filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.title)).map(e => e.outerHTML)"""
HOSTILE = "<img src=x onerror=pwned=1><script>pwned=1</script>"


def test_what_jobs_write_stays_text(chromium: Browser, server: Server, paceline: Paceline) -> None:
    script = f"""
        print({HOSTILE!r})
        print("\\x1b]0;title\\x07\\x1b[2Jclear\\x1b[1;31mred\\x1b[0m \\u202egnp.exe \\x1bPq\\x1b\\\\end")
        print("a bar  10 %\\rb bar  99 %")
        raise SystemExit({HOSTILE!r})
    """
    submit(paceline, "--name", "it", "--label", f"a={HOSTILE}", "-n", "1", paceline.script(script), HOSTILE)
    chromium.open(server.url)
    state(chromium, "it", "FAILED")
    chromium.click("tr.job a", "it")
    chromium.shows(HOSTILE)
    chromium.click("a", "Logs")
    chromium.until("document.querySelectorAll('.line').length >= 3")
    lines = chromium.run("[...document.querySelectorAll('.line')].slice(0, 3).map(e => e.textContent)")
    assert lines == [HOSTILE, "clearred gnp.exe end", "b bar  99 %"]
    chromium.open(server.base + "#/jobs/%3Cscript%3E/..%2F..%2Fetc%2Fpasswd")
    chromium.shows("Not Found")
    chromium.open(server.base + "#/jobs/local/%E0%A4")
    chromium.shows("no job '%E0%A4' on local")
    assert chromium.run("window.pwned === undefined && !document.querySelector('main img, main script')")


def test_the_report_opened_from_a_file(chromium: Browser, server: Server, paceline: Paceline) -> None:
    script = f"""
        import os, time
        print({HOSTILE!r}, flush=True)
        if os.environ["RANK"] == "1":
            open("written", "w").close()
            time.sleep(600)
        while not os.path.exists("written"):
            time.sleep(0.01)
        raise SystemExit({HOSTILE!r})
    """
    submit(paceline, "--name", "it", "-n", "2", "--label", f"a={HOSTILE}", paceline.script(script), HOSTILE)
    chromium.open(server.url)
    state(chromium, "it", "FAILED")
    file = paceline.folder / "it.html"
    paceline.succeeds("report", "it", "-o", str(file))
    chromium.open(f"file://{file}")
    chromium.shows("Last lines")
    chromium.until("document.querySelectorAll('.last').length === 2")
    assert HOSTILE in chromium.text()
    why = chromium.run("document.querySelector('.why').textContent")
    assert re.search(r"[AP]M where the ranks were that were stopped:", why)
    assert chromium.run("window.pwned === undefined && !document.querySelector('main img, main script')")
    chromium.resize(360, 800)
    assert chromium.run("document.documentElement.scrollWidth") <= 360
    assert not chromium.run(NAMELESS) and not chromium.barriers()
    chromium.run("localStorage.setItem('paceline.language', 'zh'); location.reload()")
    chromium.shows("被停止的 rank 当时所在的位置")
    chromium.run("localStorage.clear()")


def test_the_keyboard_alone(chromium: Browser, server: Server, paceline: Paceline) -> None:
    for name in ("one", "two"):
        submit(paceline, "--name", name, "-n", "1", "--no-python", "true")
    chromium.open(server.url)
    state(chromium, "one", "SUCCEEDED")
    chromium.press("/")
    assert chromium.run("document.activeElement.type") == "search"
    chromium.fill("input[type=search]", "o")  # both have it
    chromium.until("location.hash === '#/jobs?q=o'")
    for _ in range(40):
        chromium.press("Tab")
        if chromium.run("document.activeElement.textContent") == "two":
            break
    chromium.press("ArrowDown")
    assert chromium.run("document.activeElement.textContent") == "one"
    chromium.press("Enter")
    chromium.until("document.querySelector('h1')?.textContent === 'one'")
    chromium.press("Escape")
    chromium.until("location.hash === '#/jobs?q=o' && !!document.querySelector('tr.job')")
    for _ in range(2):
        chromium.press("j")
    assert chromium.run("document.activeElement.textContent") == "one"
    chromium.press("k")
    assert chromium.run("document.activeElement.textContent") == "two"
    chromium.press("?")
    chromium.until("document.activeElement.closest('dialog[open]')?.textContent.includes('the next job')")
    assert not chromium.barriers()
    for key in "gm":
        chromium.press(key)  # a dialog is open
    chromium.press("Escape")
    chromium.until("!document.querySelector('dialog[open]')")
    assert chromium.run("location.hash") == "#/jobs?q=o"
    for key in "gm":
        chromium.press(key)
    chromium.until("location.hash === '#/machines'")
    chromium.press("Escape")
    chromium.until("location.hash === '#/jobs?q=o'")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_view_in_each_size_colour_and_language(
    chromium: Browser, server: Server, paceline: Paceline, language: str
) -> None:
    submit(paceline, "--name", "it", "-n", "1", paceline.script("import nosuch\n"))
    chromium.open(server.url)
    state(chromium, "it", "FAILED")
    chromium.run(f"localStorage.setItem('paceline.language', '{language}')")
    assert chromium.run("document.documentElement.lang")
    for view in ("#/jobs", "#/jobs/local/it", "#/jobs/local/it/logs", "#/machines", "#/submit"):
        chromium.open("about:blank")
        chromium.open(server.base + view)
        chromium.until(f"document.documentElement.lang === '{language}' && !!document.querySelector('main h1')")
        for width, colours in ((360, "dark"), (3840, "light")):
            chromium.resize(width, 800)
            chromium.emulate(prefers_color_scheme=colours)
            chromium.until(f"document.documentElement.scrollWidth <= {width}")  # the table is drawn anew
            red = int(
                chromium.run("getComputedStyle(document.body).backgroundColor").partition("(")[2].partition(",")[0]
            )
            assert (red < 60) is (colours == "dark")
            assert not chromium.barriers(), (view, colours)
        assert not chromium.run(NAMELESS), view
        if view == "#/jobs/local/it":
            chromium.shows({"en": "nosuch is not installed in", "zh": "这个任务的 Python 中没有安装 nosuch"}[language])
            chromium.shows({"en": "1 rank began", "zh": "开始\uff1a1 个 rank"}[language])
    assert ("机器" in chromium.text()) is (language == "zh")


def test_the_page_looks_sentences_up_as_the_tests_do(chromium: Browser, server: Server) -> None:
    chromium.open(server.url)
    chromium.shows("No jobs yet.")
    chromium.run("localStorage.setItem('paceline.language', 'zh'); location.reload()")
    chromium.shows("还没有任务。")
    texts = list(dict.fromkeys(everything()))
    found = chromium.run(f"import('./i18n.js').then(it => {json.dumps(texts)}.map(it.spoken))")
    assert dict(zip(texts, found, strict=True)) == {text: said(text) for text in texts}
    chromium.run("localStorage.clear()")


def test_a_server_that_ends_leaves_no_reader_of_logs(chromium: Browser, server: Server, paceline: Paceline) -> None:
    submit(paceline, "--name", "it", "-n", "1", paceline.script(FOREVER))
    chromium.open(server.url)
    chromium.click("tr.job a", "it")
    chromium.click("a", "Logs")
    chromium.shows("following")
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    eventually(children.read_text, "a process reads")
    chromium.click("a", "Overview")
    eventually(lambda: not children.read_text(), "the page is gone, and so is its reader")
    chromium.click("a", "Logs")
    chromium.shows("following")
    server._process.send_signal(signal.SIGKILL)
    server._process.wait()
    paceline.succeeds("stop", "--now", "it")


def test_a_job_on_a_cluster(chromium: Browser, paceline: Paceline, cluster: Cluster) -> None:
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    submit(paceline, "--on", "kubernetes", "--image", "usual", "--name", "it", "-n", "2", paceline.script(FOREVER))
    server = Server(paceline)
    try:
        chromium.open(server.url)
        state(chromium, "it", "RUNNING")
        chromium.click("tr.job a", "it")
        chromium.click("a", "Logs")
        chromium.fill("input[list]", "all", "change")
        chromium.until(
            "[...document.querySelectorAll('.line')].filter(e => e.textContent.includes('it runs')).length === 2"
        )
        chromium.until("document.querySelector('.state').textContent === 'RUNNING'")
        chromium.click("button", "Scale")
        chromium.shows("paceline scaleout --on kubernetes it --nnodes 1")
        assert not chromium.barriers()
        chromium.click("dialog button.main", "Scale")
        chromium.shows("has a fixed number of pods")
        chromium.click("dialog button", "Cancel")
        chromium.click("button", "Stop")
        chromium.shows("paceline stop --on kubernetes it")
        chromium.click("dialog button", "Stop")
        chromium.until("document.querySelector('.state').textContent === 'STOPPED'")
    finally:
        server.end()


def test_the_tensorboard_of_a_job(chromium: Browser, server: Server, paceline: Paceline) -> None:
    submit(paceline, "--name", "it", "-n", "1", paceline.script(FOREVER))
    chromium.open(server.url)
    chromium.click("tr.job a", "it")
    chromium.click("button", "TensorBoard")
    chromium.open(chromium.until("document.querySelector('p[role=status] a')?.href"))
    chromium.until("document.title === 'TensorBoard' && !!document.querySelector('tb-webapp')")
    chromium.console.clear()  # what it writes there is its own
    paceline.succeeds("stop", "--now", "it")
    paceline.succeeds("tensorboard", "--stop", "it")
