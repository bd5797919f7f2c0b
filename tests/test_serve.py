"""`make serve`: compressed files, which a browser keeps until they change."""

import gzip
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
import serve

GZIP = {"Accept-Encoding": "gzip"}


@pytest.fixture
def ask(tmp_path):
    """ask(method, path, headers) asks a server of a small folder."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/index.html").write_text("a page " * 99)
    (tmp_path / "x.png").write_bytes(b"picture")
    server = serve.start(tmp_path)

    def asked(method, path, headers):
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    asked.root = tmp_path
    yield asked
    server.shutdown()


def test_text_is_compressed_for_those_who_ask(ask):
    answer, body = ask("GET", "/folder/index.html", GZIP)
    assert answer.status == 200 and answer.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == b"a page " * 99
    answer, plain = ask("GET", "/folder/", {})
    assert answer.headers["Content-Encoding"] is None and plain == b"a page " * 99
    assert ask("GET", "/x.png", GZIP)[1] == b"picture"


def test_an_unchanged_file_is_not_sent_again(ask):
    first, _ = ask("GET", "/folder/index.html", GZIP)
    assert first.headers["Cache-Control"] == "no-cache"
    known = {**GZIP, "If-None-Match": f'"other", {first.headers["ETag"]}'}
    again, body = ask("GET", "/folder/index.html", known)
    assert (again.status, body) == (304, b"")
    (ask.root / "folder/index.html").write_text("another page")
    changed, body = ask("GET", "/folder/index.html", known)
    assert changed.status == 200 and gzip.decompress(body) == b"another page"


def test_head_has_the_headers_of_get(ask):
    get, _ = ask("GET", "/folder/index.html", GZIP)
    head, body = ask("HEAD", "/folder/index.html", GZIP)
    assert (head.status, body) == (200, b"")
    for name in ("ETag", "Content-Length", "Content-Encoding", "Content-Type"):
        assert head.headers[name] == get.headers[name]


def test_addresses_with_a_hash_are_kept_forever(ask):
    answer, _ = ask("GET", "/x.png?v=0123abcd", {})
    assert "immutable" in answer.headers["Cache-Control"]


@pytest.mark.parametrize("path, status", [("/none", 404), ("/folder", 301)])
def test_other_addresses_lead_nowhere_or_on(ask, path, status):
    answer, _ = ask("GET", path, GZIP)
    assert answer.status == status
    if status == 301:
        assert urlsplit(answer.headers["Location"]).path == "/folder/"
