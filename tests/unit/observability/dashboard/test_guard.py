"""Who may see the page."""

import pytest

from smolcluster.observability.dashboard.guard import Access, access_for

TOKEN = "a-secret-that-nobody-knows"
OWN = {"host": "127.0.0.1:8265", "authorization": f"Bearer {TOKEN}"}


def access(host: str = "127.0.0.1") -> Access:
    return access_for(host, "lab.example.org", TOKEN)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8265", "localhost:8265", "[::1]:8265", "localhost:9000"]
)
def test_who_has_the_token_is_welcome_by_any_name_of_this_machine(host: str) -> None:
    """Another port is a tunnel's."""
    assert access().verdict("/api/runs", OWN | {"host": host}) == "welcome"


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer a-secret", "Basic YTpi", "ä=ö", "\x00"])
def test_who_has_another_token_is_unknown(given: str) -> None:
    assert access().verdict("/api/runs", OWN | {"authorization": given}) == "unknown"


def test_a_token_in_a_cookie_or_an_address_is_none() -> None:
    """Browsers send cookies to all ports of a machine, and addresses stand in histories and logs."""
    bare = {"host": "127.0.0.1:8265", "cookie": f"smolcluster-8265={TOKEN}; token={TOKEN}"}
    assert access().verdict("/api/runs", bare) == "unknown"


def test_the_bare_page_is_for_everybody_at_its_own_address() -> None:
    bare = {"host": "127.0.0.1:8265"}
    for path in ("/", "/static/app.js"):
        assert access().verdict(path, bare) == "welcome"
        assert access().verdict(path, bare | {"host": "evil.example.org"}) == "stranger"
    assert access().verdict("/static", bare) == "unknown"


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
    assert access().verdict("/", OWN | {"host": host}) == "stranger"


@pytest.mark.parametrize(
    "origin", ["http://evil.org", "null", "http://127.0.0.1:9", "https://127.0.0.1:8265"]
)
def test_a_request_from_another_page_is_a_strangers(origin: str) -> None:
    assert access().verdict("/api/runs", OWN | {"origin": origin}) == "stranger"
    own = {"origin": "http://127.0.0.1:8265"}
    assert access().verdict("/api/runs", OWN | own) == "welcome"


def test_what_another_page_embeds_is_a_strangers() -> None:
    embedded = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
    assert access().verdict("/static/app.js", OWN | embedded) == "stranger"
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert access().verdict("/", OWN | followed) == "welcome"


def test_a_server_for_all_takes_addresses_and_its_own_names_only() -> None:
    run_on_all = access("0.0.0.0")  # noqa: S104 - a test's words
    for host in ("192.168.1.5:8265", "lab.example.org:8265", "lab.local:8265", "[fe80::1]:8265"):
        assert run_on_all.verdict("/", OWN | {"host": host}) == "welcome"
    assert run_on_all.verdict("/", OWN | {"host": "evil.org:8265"}) == "stranger"
