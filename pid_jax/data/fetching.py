"""One picture from the web: bounded in time and size, checked, tried again where that may help."""

import dataclasses
import email.utils
import http.client
import random
import time
import urllib.parse
from collections.abc import Callable

import urllib3

import pid_jax
from pid_jax import images
from pid_jax.errors import UserError, one_line

REDIRECTS = 5
# Too early, too many, and what a server may get over.
TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504, 520, 522, 524))
_REDIRECTING = frozenset((301, 302, 303, 307, 308))
_CHUNK = 1 << 16


class Failed(UserError):
    """A picture that was not fetched.

    Attributes:
      kind: what to count it as, such as "404 Not Found".
      attempts: how often it was tried.
    """

    attempts = 1

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class _Transient(Failed):
    """Worth another attempt, perhaps after `wait` seconds."""

    def __init__(self, kind: str, detail: str = "", wait: float = 0.0):
        super().__init__(kind, detail)
        self.wait = wait


@dataclasses.dataclass(frozen=True)
class Limits:
    """Attributes:
      timeout: seconds without an answer, or without further bytes.
      seconds: for one whole picture.
      bytes: of one picture.
      retries: further attempts after the first.
      backoff: seconds before the second attempt; doubled before each further one.
      longest_wait: most seconds before an attempt, also where the server asks for more.
    """

    timeout: float = 20.0
    seconds: float = 300.0
    bytes: int = 200 << 20
    retries: int = 4
    backoff: float = 1.0
    longest_wait: float = 60.0


@dataclasses.dataclass(frozen=True)
class Picture:
    """A fetched file: bytes, its Content-Type, and what it decodes to."""

    data: bytes
    content_type: str
    width: int
    height: int
    format: str


class Fetcher:
    """Fetches pictures over up to `connections` kept-alive connections; safe for threads."""

    def __init__(self, connections: int, limits: Limits = Limits(),
                 sleep: Callable[[float], None] = time.sleep):
        self._limits, self._sleep = limits, sleep
        self._pool = urllib3.PoolManager(
            num_pools=connections, maxsize=connections, retries=False,
            headers={"User-Agent": f"pid_jax/{pid_jax.__version__}", "Accept": "image/*"},
            timeout=urllib3.Timeout(connect=limits.timeout, read=limits.timeout))

    def fetch(self, url: str) -> Picture:
        """The picture at `url`. Raises: Failed when it cannot be had, with the last reason."""
        for attempt in range(1, self._limits.retries + 2):
            try:
                return self._once(url)
            except Failed as error:
                error.attempts = attempt
                if not isinstance(error, _Transient) or attempt > self._limits.retries:
                    raise
                self._sleep(self._wait(attempt, error.wait))
        raise AssertionError("unreachable")

    def _wait(self, attempt: int, asked: float) -> float:
        backoff = self._limits.backoff * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
        return min(self._limits.longest_wait, max(asked, backoff))

    def _once(self, url: str) -> Picture:
        deadline = time.monotonic() + self._limits.seconds
        try:
            with self._open(url) as response:
                content_type = response.headers.get("Content-Type", "")
                _check_type(content_type)
                data = self._read(response, deadline)
        except urllib3.exceptions.NewConnectionError as error:
            raise _Transient("no connection", one_line(error, 200)) from error
        except urllib3.exceptions.TimeoutError as error:
            raise _Transient("timed out") from error
        except (urllib3.exceptions.LocationValueError, urllib3.exceptions.SSLError) as error:
            raise Failed("no connection", one_line(error, 200)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _Transient("the connection broke", one_line(error, 200)) from error
        except Failed:
            raise
        except ValueError as error:  # an address or a header that is no text, no number
            raise Failed("an answer that makes no sense", one_line(error, 200)) from error
        return _checked(data, content_type)

    def _open(self, url: str) -> urllib3.BaseHTTPResponse:
        """The answer with status 200, redirects followed."""
        for _ in range(REDIRECTS + 1):
            check_url(url)
            response = self._pool.request("GET", url, redirect=False, preload_content=False)
            if response.status == 200:
                return response
            target = response.headers.get("Location")
            status, wait = response.status, _retry_after(response.headers.get("Retry-After"))
            response.close()
            if status not in _REDIRECTING or not target:
                raise _status_failure(status, wait)
            url = urllib.parse.urljoin(url, target)
        raise Failed("too many redirects", f"more than {REDIRECTS}")

    def _read(self, response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
        limit = self._limits.bytes
        length = response.headers.get("Content-Length", "")
        if _is_number(length) and int(length) > limit:
            raise Failed("too large", f"{length} bytes, at most {limit}")
        data = bytearray()
        while chunk := response.read1(_CHUNK, decode_content=True):
            data += chunk
            if len(data) > limit:
                raise Failed("too large", f"more than {limit} bytes")
            if time.monotonic() > deadline:
                raise _Transient("timed out", f"not whole after {self._limits.seconds:.0f} s")
        return bytes(data)


def check_url(url: str) -> None:
    """Raises Failed unless `url` is an address of the web."""
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme.lower() in ("http", "https") and bool(parts.hostname)
    except ValueError:
        sound = False
    if not sound:
        raise Failed("not an http address", url[:200])


def _status_failure(status: int, wait: float) -> Failed:
    kind = f"{status} {http.client.responses.get(status, '')}".strip()
    return _Transient(kind, wait=wait) if status in TRANSIENT else Failed(kind)


def _retry_after(value: str | None) -> float:
    """Seconds that a server asks to wait, from a number or a date; 0 when it does not."""
    if not value:
        return 0.0
    if _is_number(value.strip()):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _check_type(content_type: str) -> None:
    if not content_type.lower().strip().startswith("image/"):
        raise Failed("not a picture", f"its Content-Type is {content_type[:80]!r}")


def _checked(data: bytes, content_type: str) -> Picture:
    """Decoding is the only proof that the file is whole; a cut one is worth another attempt."""
    try:
        kind = images.format_of(data)
    except UserError as error:
        raise Failed("not a picture", str(error)) from error
    try:
        return Picture(data, content_type, *images.decode(data).size, kind)
    except UserError as error:
        raise _Transient("a broken picture", str(error)) from error
