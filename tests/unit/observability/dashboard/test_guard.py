"""Who may see the page."""

import pytest

from smolcluster.observability.dashboard.guard import Access, access_for

TOKEN = "a-secret-that-nobody-knows"
OWN = {"host": "127.0.0.1:8265", "cookie": f"smolcluster-8265={TOKEN}"}


def access(host: str = "127.0.0.1") -> Access:
    return access_for(host, 8265, "lab.example.org", TOKEN)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8265", "localhost:8265", "[::1]:8265", "localhost:9000"]
)
def test_who_has_the_cookie_is_welcome_by_any_name_of_this_machine(host: str) -> None:
    """Another port is a tunnel's."""
    assert access().verdict("/", "", OWN | {"host": host}) == "welcome"


@pytest.mark.parametrize(
    "cookie",
    ["", "smolcluster-8265=", "smolcluster-8265=a-secret", f"other={TOKEN}", "=;;=\x00", "ä=ö"],
)
def test_who_has_another_cookie_is_unknown(cookie: str) -> None:
    assert access().verdict("/api/runs", "", OWN | {"cookie": cookie}) == "unknown"


@pytest.mark.parametrize(
    "others", ['a={"x":1}', "b=[1, 2]", "c@d=e", "f", "=", "ä=ö", 'g="h', "i=\\"]
)
def test_cookies_of_pages_on_other_ports_lock_nobody_out(others: str) -> None:
    own = OWN["cookie"]
    for cookie in (f"{others}; {own}", f"{own}; {others}"):
        assert access().verdict("/", "", OWN | {"cookie": cookie}) == "welcome"


def test_the_token_is_taken_once_from_the_pages_address() -> None:
    bare = {"host": "127.0.0.1:8265"}
    assert access().verdict("/", f"token={TOKEN}", bare) == "new"
    assert access().verdict("/", "token=wrong", bare) == "unknown"
    assert access().verdict("/", "token=%C3%A4", bare) == "unknown"
    assert access().verdict("/api/runs", f"token={TOKEN}", bare) == "unknown"
    assert access().verdict("/", "token=wrong", OWN) == "unknown"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.org",
        "evil.example.org:8265",
        "127.0.0.1.evil.org",
        "192.168.1.5",
        "",
        "[",
        ":",
    ],
)
def test_a_request_by_another_name_is_a_strangers(host: str) -> None:
    assert access().verdict("/", f"token={TOKEN}", OWN | {"host": host}) == "stranger"


@pytest.mark.parametrize(
    "origin", ["http://evil.org", "null", "http://127.0.0.1:9", "https://127.0.0.1:8265"]
)
def test_a_request_from_another_page_is_a_strangers(origin: str) -> None:
    assert access().verdict("/api/runs", "", OWN | {"origin": origin}) == "stranger"
    own = {"origin": "http://127.0.0.1:8265"}
    assert access().verdict("/api/runs", "", OWN | own) == "welcome"


def test_what_another_page_embeds_is_a_strangers() -> None:
    embedded = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
    assert access().verdict("/static/app.js", "", OWN | embedded) == "stranger"
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert access().verdict("/", "", OWN | followed) == "welcome"


def test_a_server_for_all_takes_addresses_and_its_own_names_only() -> None:
    run_on_all = access("0.0.0.0")  # noqa: S104 - a test's words
    for host in ("192.168.1.5:8265", "lab.example.org:8265", "lab.local:8265", "[fe80::1]:8265"):
        assert run_on_all.verdict("/", "", OWN | {"host": host}) == "welcome"
    assert run_on_all.verdict("/", "", OWN | {"host": "evil.org:8265"}) == "stranger"
