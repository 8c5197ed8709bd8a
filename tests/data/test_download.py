"""Downloads from a local server that is slow, breaks off, redirects, lies and refuses."""

import collections
import hashlib
import http.server
import json
import threading
import time

import pytest

from pid_jax.data import command, download, fetching, listing
from pid_jax.data.dataset import Dataset
from pid_jax.data.destination import only_writer
from pid_jax.data.ingest import __main__ as ingest
from pid_jax.errors import UserError
from tests.data import sets

JPEG = sets.encoded(sets.picture(90, 60), "JPEG")
PNG = sets.encoded(sets.picture(40, 30))
LIMITS = fetching.Limits(bytes=1 << 20, retries=2)
IMPATIENT = fetching.Limits(timeout=0.25, seconds=0.35, retries=1)


class Handler(http.server.BaseHTTPRequestHandler):
    """Behaves as its path says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = self.path.strip("/").split("/")[0]
        self.server.asked[self.path] += 1
        with self.server.busy_lock:
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        try:
            getattr(self, f"do_{name}", self.do_good)(self.server.asked[self.path])
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with self.server.busy_lock:
                self.server.busy -= 1

    def answer(self, status=200, body=JPEG, kind="image/jpeg", length=None, **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_good(self, time):
        self.answer()

    def do_png(self, time):
        self.answer(body=PNG, kind="image/png; charset=binary")

    def do_slow(self, attempt):
        time.sleep(0.8)
        self.answer()

    def do_drip(self, attempt):
        self.answer(body=b"", length=len(JPEG))
        for byte in JPEG[:8]:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(0.15)

    def do_busy(self, attempt):
        time.sleep(0.05)
        self.answer()

    def do_breaks(self, attempt):
        self.answer(body=JPEG[:len(JPEG) // 2], length=len(JPEG))
        self.close_connection = True

    def do_breaks_once(self, attempt):
        self.do_breaks(attempt) if attempt == 1 else self.answer()

    def do_silent(self, attempt):
        self.close_connection = True

    def do_short(self, attempt):
        """Says less than there is: what arrives is a cut picture."""
        self.answer(length=len(JPEG) // 2)
        self.close_connection = True

    def do_chunked(self, attempt):
        self.send_response(200)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(JPEG), 500):
            part = JPEG[start:start + 500]
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def do_redirect(self, attempt):
        self.answer(302, b"", Location="/good/redirected")

    def do_loop(self, attempt):
        self.answer(302, b"", Location=self.path)

    def do_file(self, attempt):
        self.answer(301, b"", Location="file:///etc/passwd")

    def do_404(self, attempt):
        self.answer(404, b"gone", "text/html")

    def do_429(self, attempt):
        self.answer(429, b"", Retry_After="7") if attempt < 3 else self.answer()

    def do_503(self, attempt):
        self.answer(503, b"", Retry_After="\xb2")  # a digit, but no number

    def do_nowhere(self, attempt):
        self.answer(302, b"", Location="http://[::1")

    def do_500(self, attempt):
        self.answer(500, b"")

    def do_500_once(self, attempt):
        self.answer(500, b"") if attempt == 1 else self.answer()

    def do_html(self, attempt):
        self.answer(body=b"<html>not found</html>", kind="text/html")

    def do_text(self, attempt):
        self.answer(body=b"<html>not found</html>")

    def do_large(self, attempt):
        self.answer(body=b"", length=2 << 20)

    def do_endless(self, attempt):
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.close_connection = True
        for _ in range(40):
            self.wfile.write(b"x" * (64 << 10))

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def running():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.busy_lock = True, threading.Lock()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02},
                     daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(running):
    running.asked, running.busy, running.most_busy = collections.Counter(), 0, 0
    running.url = f"http://127.0.0.1:{running.server_port}"
    return running


def fetcher(waits, limits=LIMITS) -> fetching.Fetcher:
    return fetching.Fetcher(4, limits, waits.append)


@pytest.mark.parametrize("path, attempts", [
    ("good", 1), ("png", 1), ("chunked", 1), ("breaks_once", 2), ("500_once", 2), ("429", 3)])
def test_pictures_arrive(server, path, attempts):
    waits = []
    picture = fetcher(waits).fetch(f"{server.url}/{path}")
    assert picture.data == (PNG if path == "png" else JPEG)
    assert (picture.width, picture.height) == ((40, 30) if path == "png" else (90, 60))
    assert picture.format == ("PNG" if path == "png" else "JPEG")
    assert server.asked[f"/{path}"] == attempts == len(waits) + 1


def test_redirects_are_followed(server):
    assert fetcher([]).fetch(f"{server.url}/redirect").data == JPEG
    assert server.asked["/good/redirected"] == 1


@pytest.mark.parametrize("path, kind, attempts", [
    ("404", "404 Not Found", 1), ("500", "500 Internal Server Error", 3),
    ("slow", "timed out", 2), ("drip", "timed out", 2), ("breaks", "the connection broke", 3),
    ("silent", "the connection broke", 3), ("short", "a broken picture", 3),
    ("html", "not a picture", 1), ("text", "not a picture", 1), ("large", "too large", 1),
    ("endless", "too large", 1), ("loop", "too many redirects", 1),
    ("file", "not an http address", 1), ("503", "503 Service Unavailable", 3),
    ("nowhere", "an answer that makes no sense", 1)])
def test_what_cannot_be_had_says_why(server, path, kind, attempts):
    waits, limits = [], IMPATIENT if kind == "timed out" else LIMITS
    with pytest.raises(fetching.Failed) as caught:
        fetcher(waits, limits).fetch(f"{server.url}/{path}")
    assert (caught.value.kind, caught.value.attempts) == (kind, attempts)
    assert len(waits) == attempts - 1


def test_waits_double_and_heed_the_server(server):
    waits = []
    with pytest.raises(fetching.Failed):
        fetcher(waits).fetch(f"{server.url}/500")
    assert 0.75 <= waits[0] <= 1.25 and 1.5 <= waits[1] <= 2.5
    waits.clear()
    fetcher(waits).fetch(f"{server.url}/429")
    assert waits == [7.0, 7.0]


@pytest.mark.parametrize("url", [
    "file:///etc/passwd", "ftp://host/a.jpg", "data:image/png;base64,x", "/etc/passwd", "http://",
    "http://[bad/a", "gopher://host/"])
def test_other_addresses_are_refused(url):
    with pytest.raises(fetching.Failed, match="not an http address"):
        fetcher([]).fetch(url)


def test_a_server_that_is_not_there():
    with pytest.raises(fetching.Failed, match="no connection"):
        fetcher([]).fetch("http://127.0.0.1:1/a.jpg")


def rows(path) -> list[dict]:
    return list(map(json.loads, path.read_text().splitlines()))


def write_list(folder, found):
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, found)))
    return list(listing.entries(folder / "list.jsonl"))


def test_a_list_is_downloaded_reported_and_continued(server, tmp_path):
    found = [
        {"key": "b", "url": f"{server.url}/good/1", "license": "CC0", "caption": "one",
         "sha256": hashlib.sha256(JPEG).hexdigest()},
        {"key": "deep/a", "url": f"{server.url}/png/2", "license": "CC-BY", "caption": "two"},
        {"url": f"{server.url}/good/3", "caption": "no key"},
        {"key": "b", "url": f"{server.url}/good/4"}, {"key": "n"}, {"key": "lost",
         "url": f"{server.url}/404"}, {"key": "later", "url": f"{server.url}/500_once/5"},
        {"key": "wrong", "url": f"{server.url}/good/6", "md5": "0" * 32},
        *({"key": key, "url": f"{server.url}/good/7"} for key in (
            "../up", "/etc/x", "a/../../b", ".hidden", "a\\b", "a\0b", "\ud800", "x" * 300))]
    fetch = fetching.Fetcher(4, fetching.Limits(retries=0)).fetch
    entries, out = write_list(tmp_path, found), tmp_path / "out"
    report = download.download(entries, out, fetch, 4)
    assert (report.fetched, report.earlier, report.failed.total()) == (3, 0, 13)
    assert report.failed["a key that is no file name"] == 8
    done = rows(out / "downloads.jsonl")
    assert [row["key"] for row in done] == sorted(row["key"] for row in done)
    row = next(row for row in done if row["key"] == "b")
    assert row == found[0] | {"file_name": "images/b.jpg", "bytes": len(JPEG), "width": 90,
                              "height": 60, "content_type": "image/jpeg"}
    assert (out / "images" / "b.jpg").read_bytes() == JPEG
    assert (out / "images" / "deep" / "a.png").read_bytes() == PNG
    reasons = {row["key"]: row["reason"] for row in rows(out / "failures.jsonl")}
    assert reasons["lost"] == "404 Not Found" and "no address" in reasons["n"]
    assert "another picture" in reasons["wrong"] and "duplicate" in reasons["b"]
    assert {p.name for p in tmp_path.iterdir()} == {"list.jsonl", "out"}

    (out / "images" / "b.jpg").write_bytes(JPEG[:99])  # damaged since
    with open(out / "downloads.jsonl", "ab") as file:
        file.write(b'{"key": "cut by a cra')
    again = download.download(entries, out, fetch, 4)
    assert (again.fetched, again.earlier) == (2, 2)
    assert server.asked["/good/1"] == 2 == server.asked["/500_once/5"]
    assert server.asked["/png/2"] == 1 == server.asked["/good/3"]
    assert sorted(r["key"] for r in rows(out / "downloads.jsonl") if len(r["key"]) < 9) == [
        "b", "deep/a", "later"]
    assert (out / "images" / "b.jpg").read_bytes() == JPEG


def test_connections_are_bounded_and_used(server, tmp_path):
    found = [{"key": f"k{i:02d}", "url": f"{server.url}/busy/{i}"} for i in range(30)]
    entries = write_list(tmp_path, found)
    fetch = fetching.Fetcher(5, fetching.Limits(retries=0)).fetch
    assert download.download(entries, tmp_path / "out", fetch, 5).fetched == 30
    assert 2 <= server.most_busy <= 5


def test_an_interruption_keeps_what_was_fetched(server, tmp_path):
    entries = write_list(tmp_path, [{"key": f"k{i}", "url": f"{server.url}/good/{i}"}
                                    for i in range(8)])

    def stop(report):
        if report.fetched == 3:
            raise KeyboardInterrupt

    fetch = fetching.Fetcher(1, LIMITS).fetch
    with pytest.raises(KeyboardInterrupt):
        download.download(entries, tmp_path / "out", fetch, 1, stop)
    report = download.download(entries, tmp_path / "out", fetch, 1)
    assert (report.earlier, report.fetched) == (3, 5)


def test_metadata_to_a_packed_data_set(server, tmp_path, capsys):
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    for number in range(3):
        (metadata / f"{number}.json").write_text(json.dumps([
            {"image_url": f"{server.url}/good/{number}", "en_caption": f"picture {number}",
             "prompt_short": "not this", "license": "CC0"}, {"image_url": "file:///etc/passwd"}]))
    out = tmp_path / "out"
    assert command.run(download.main, ["--src", str(metadata), "--dst", str(out),
                                       "--max-json-files", "2"]) == 0
    captured = capsys.readouterr()
    assert "downloaded 2 pictures" in captured.out and "2 x not an http address" in captured.out
    assert "4/4, 2 failed" in captured.err
    assert [row["license"] for row in rows(out / "downloads.jsonl")] == ["CC0", "CC0"]
    assert ingest.main(["--format", "list", "--src", str(out / "downloads.jsonl"), "--dst",
                        str(tmp_path / "packed")]) is None
    assert {r.key: r.captions for r in Dataset(tmp_path / "packed")} == {
        "0_000000": {"prompt": "picture 0"}, "1_000000": {"prompt": "picture 1"}}


@pytest.mark.parametrize("options, words", [
    (("--src", "nowhere.jsonl"), "there is no list"), (("--src", "."), "holds no .json"),
    (("--src", "x.txt"), "is neither"), (("--src", "bad.jsonl"), "no picture could be"),
    (("--src", "bad.jsonl", "--connections", "0"), "connections")])
def test_mistaken_calls(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text("{\n")
    assert command.run(download.main, [*options, "--dst", "out"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("tail", ["", '{"key": "cut', "x" * 200_000])
def test_a_row_that_was_cut_is_dropped(tmp_path, tail):
    (tmp_path / "downloads.jsonl").write_text('{"key": "a"}\n' + tail)
    download._Rows(tmp_path)
    assert (tmp_path / "downloads.jsonl").read_text() == '{"key": "a"}\n'


def test_a_damaged_record_of_downloads_is_named(tmp_path):
    (tmp_path / "downloads.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="damaged at byte 0"):
        download.download([], tmp_path, None, 1)


def test_one_process_downloads_into_a_folder(tmp_path):
    with only_writer(tmp_path, "downloading"), pytest.raises(
            UserError, match="another process is downloading into"):
        download.download([], tmp_path, None, 1)


def test_keys_that_are_a_picture_and_a_folder(server, tmp_path):
    for key in ("a", "a.jpg/b", "deep/" * 1000 + "c", "d"):
        write_list(tmp_path, [{"url": f"{server.url}/good/x", "key": key}])
        report = download.download(listing.entries(tmp_path / "list.jsonl"), tmp_path / "out",
                                   fetcher([]).fetch, 1)
        assert report.fetched + report.failed["a key that is no file name"] == 1
    assert [row["key"] for row in rows(tmp_path / "out" / "downloads.jsonl")] == ["a", "d"]
