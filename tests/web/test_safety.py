"""Who may use the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.web.conftest import HOST

from paceline.web import safety

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.web.conftest import Page


def test_the_token_is_exchanged_for_a_strict_cookie(new_page: Callable[..., Page]) -> None:
    page = new_page()
    answer = page.post("/api/session", json={"token": page.token})
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert page.token not in cookie
    assert page.get("/api/jobs").status_code == 401  # the cookie alone, as another port of this machine is sent it
    assert page.get("/api/jobs", headers={safety.KEY_HEADER: answer.json()["key"]}).status_code == 200


@pytest.mark.parametrize("token", ["", "x", 1, None, ["x"]])
def test_a_wrong_token_is_refused(new_page: Callable[..., Page], token: object) -> None:
    assert new_page().post("/api/session", json={"token": token}).status_code == 401


def test_a_key_without_its_cookie_is_refused(page: Page) -> None:
    page.cookies.clear()
    assert page.get("/api/jobs").status_code == 401


@pytest.mark.parametrize("value", ["x", "a.b.c", "9999999999.x.y", ".", '"', "1;2", "é"])
def test_a_forged_cookie_is_refused(page: Page, value: str) -> None:
    name = next(iter(page.cookies))
    headers = {"cookie": f"{name}={value}".encode(), safety.KEY_HEADER: page.headers[safety.KEY_HEADER]}
    page.cookies.clear()
    assert page.get("/api/jobs", headers=headers).status_code == 401


def test_a_session_ends(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page.get("/api/about").status_code == 200
    monkeypatch.setattr(safety.time, "time", lambda: 2e10)
    assert page.get("/api/about").status_code == 401


def test_sessions_outlive_the_server_but_not_the_secret() -> None:
    first, second = safety.Sessions(b"s" * 32), safety.Sessions(b"s" * 32)
    assert second.accepts(*first.new())
    assert not second.is_token(first.token)
    assert not safety.Sessions(b"t" * 32).accepts(*first.new())


def test_the_secret_is_one_and_private(home: Path) -> None:
    assert safety.secret() == safety.secret()
    assert [(path.name, path.stat().st_mode & 0o777) for path in home.iterdir()] == [("paceline-web.key", 0o600)]


def test_programs_send_the_token(new_page: Callable[..., Page]) -> None:
    page = new_page()
    assert page.get("/api/jobs", headers={"Authorization": f"Bearer {page.token}"}).status_code == 200
    assert page.get("/api/jobs", headers={"Authorization": f"Basic {page.token}"}).status_code == 401
    assert page.get(f"/api/jobs?token={page.token}").status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:7345", "127.0.0.1.evil.example", "", "localhost.evil.example"),
        *("[::1].evil.example", "[::1]evil.example:7345", "[localhost].evil.example", "localhost:1.evil.example"),
    ],
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(page: Page, host: str) -> None:
    for path in ("/", "/api/jobs", "/app.js"):
        answer = page.get(path, headers={"host": host})
        assert answer.status_code == 421, path


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1:1", "[::1]:7345", "192.0.2.7", "LAB:7345"])
def test_addresses_and_names_of_this_machine_are_known(page: Page, host: str) -> None:
    assert page.get("/api/about", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_are_refused(page: Page, headers: dict[str, str]) -> None:
    assert page.post("/api/jobs/local/x/stop", headers=headers, json={}).status_code == 403
    assert page.get("/api/jobs", headers=headers).status_code == 403
    assert page.post("/api/session", headers=headers, json={"token": page.token}).status_code == 403


def test_no_answer_allows_other_origins(page: Page) -> None:
    for answer in (
        page.options("/api/jobs", headers={"origin": HOST}),
        page.get("/api/jobs", headers={"origin": HOST}),
        page.get("/"),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_the_page_may_run_nothing_but_its_own_files(new_page: Callable[..., Page]) -> None:
    page = new_page()
    for path in ("/", "/api/jobs", "/nowhere"):
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in page.get("/").text  # none inline
    assert page.get("/api/jobs").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/../safety.py", "/static/../safety.py", "/%2e%2e/safety.py", "/vendor/..%2f..%2fsafety.py", "/vendor/VERSIONS",
        "/etc/passwd", "//etc/passwd", "/api/jobs/..%2f../x", "/api/jobs/local/..%2f..%2fetc", "/api/jobs/local/%2e%2e",
        "/api/jobs/local/..%00", "/api/jobs/local/x%2flogs",
    ],
)  # fmt: skip
def test_paths_do_not_reach_the_file_system(page: Page, path: str) -> None:
    assert page.get(path).status_code == 404


def test_read_only_refuses_all_that_changes_something(new_page: Callable[..., Page]) -> None:
    page = new_page(read_only=True).sign_in()
    assert page.get("/api/jobs").status_code == 200
    for path in (
        "/api/submit",
        "/api/jobs/local/x/stop",
        "/api/jobs/local/x/delete",
        "/api/jobs/local/x/resubmit",
        "/api/nowhere",
    ):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert page.request(method, path, json={}).status_code == 403, (method, path)


def test_a_request_has_a_limit(page: Page) -> None:
    assert page.post("/api/submit", content=b"x" * (1 << 20)).status_code == 400
    assert page.post("/api/submit", content=b"x" * ((1 << 20) + 1)).status_code == 413
    assert page.post("/", content=b"x").status_code == 405
