"""Serve the page live to a browser on this machine. Requests only read.

Other users of a login node also reach its loopback, so every request must have the token of the printed address.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from clusterkit.backends.records import Runs
from clusterkit.observe.report.page import content, content_policy, document
from clusterkit.observe.report.plots import Plots, plots
from clusterkit.observe.report.source import Run, RunReader
from clusterkit.runs.choose import choose_runs
from clusterkit.runs.directory import RunDirectory, runs
from clusterkit.ui.markup import Html, tag
from trainer.errors import RunError, UserError

LIVE_SECONDS = 3.0
"""Seconds between requests of an open page for new content."""

MOST_READERS = 8
"""Records of so many runs are kept in memory, or of those that are shown."""

MOST_LISTED = 200

ADDRESS = "127.0.0.1"
LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}
"""Our names for a browser on this machine or at the other end of an SSH tunnel, where the port may differ."""


class Views:
    """Pages of the runs below a folder, with caches of records and plots. Safe for threads.

    Args:
        experiment: of the run that is shown first; None: any.
        trial: of that run; None: the newest.
        compare: runs over it.
        mirror: where the runs are, which updates copies of remote ones before every look.
    """

    def __init__(
        self,
        fileroot: Path,
        experiment: str | None,
        trial: str | None,
        compare: Sequence[str] = (),
        mirror: Runs | None = None,
    ) -> None:
        self.fileroot = fileroot
        self._mirror = mirror or Runs(fileroot)
        self._preset = (experiment, trial, tuple(compare))
        self._lock = threading.Lock()
        self._readers: dict[RunDirectory, RunReader] = {}
        self._drawn: tuple[list[tuple[Run, int]], Plots] | None = None

    def page(self, run: str, compare: Sequence[str] | None) -> str:
        """Return a whole page.

        Args:
            run: `EXPERIMENT/TRIAL`; empty: that of the command.
            compare: the same of the runs over it; None: those of the command.
        """
        title = " against ".join(name for name in (run, *(compare or ())) if name) or "clusterkit"
        return document(title, self.content(run, compare), self._navigation(run, compare), LIVE_SECONDS)

    def content(self, run: str, compare: Sequence[str] | None, known: str = "") -> Html:
        """Return the changing part of that page, without the parts whose versions are `known`."""
        try:
            directories = self._up_to_date(run, compare)
            with self._lock:
                found = [self._reader(directory).read() for directory in directories]
                while len(self._readers) > max(MOST_READERS, len(directories)):
                    del self._readers[next(iter(self._readers))]
                key = [(one, one.records) for one in found]
                if self._drawn is None or not _same(self._drawn[0], key):
                    self._drawn = (key, plots(found))
                shown = content(found, time.time(), self._drawn[1], known)
                return Html(self._mirror.with_original_paths(shown))
        except (RunError, OSError) as error:  # there is no such run yet, or it cannot be read now
            return tag("p", self._mirror.with_original_paths(str(error)), cls="empty")

    def _up_to_date(self, run: str, compare: Sequence[str] | None) -> list[RunDirectory]:
        self._mirror.index()
        directories = self._choose(run, compare)
        for directory in directories:
            self._mirror.fetch(directory)
            self._mirror.fetch_heldout(directory)
        return directories

    def _choose(self, run: str, compare: Sequence[str] | None) -> list[RunDirectory]:
        experiment, trial, _ = self._preset
        if run:
            experiment, _, trial = run.partition("/")
        return choose_runs(self.fileroot, experiment or None, trial or None, self._over(run, compare))

    def _over(self, run: str, compare: Sequence[str] | None) -> Sequence[str]:
        """Return the runs over the first one: those of the command unless the reader has chosen."""
        return self._preset[2] if compare is None and not run else compare or ()

    def _reader(self, directory: RunDirectory) -> RunReader:
        reader = self._readers.pop(directory, None) or RunReader(directory)
        self._readers[directory] = reader  # the most recently used one is last
        return reader

    def _navigation(self, run: str, compare: Sequence[str] | None) -> Html:
        names = [one.name for one in reversed(runs(self.fileroot))][:MOST_LISTED]
        experiment, trial, _ = self._preset
        preset = "/".join(name for name in (experiment, trial) if name)
        choices = [("", f"newest of {preset}" if preset else "the newest"), *((one, one) for one in names)]
        options = [tag("option", text, value=value, selected=value == run) for value, text in choices]
        over = self._over(run, compare)
        # Of the command, names may be trials alone.
        chosen = {name if "/" in name else f"{(run or experiment or '').partition('/')[0]}/{name}" for name in over}
        boxes = [
            tag("label", tag("input", type="checkbox", name="compare", value=name, checked=name in chosen), name)
            for name in names
        ]
        form = tag(
            "form",
            tag("label", "Run", tag("select", *options, name="run")),
            tag("details", tag("summary", f"against {len(over) or 'none'}"), tag("div", *boxes), cls="choice"),
            tag("button", "Show"),
            method="get",
            action="/",
        )
        return tag("nav", form, tag("span", "live", id="live", role="status"))


def _same(old: list[tuple[Run, int]], new: list[tuple[Run, int]]) -> bool:
    """Whether both are the same runs with the same numbers of records."""
    return len(old) == len(new) and all(a is b and m == n for (a, m), (b, n) in zip(old, new, strict=True))


class Dashboard(ThreadingHTTPServer):
    """The server. It listens on loopback and answers only requests with `token`."""

    daemon_threads = True

    def __init__(self, port: int, views: Views) -> None:
        self.views = views
        self.token = secrets.token_urlsafe(32)
        # A browser sends the cookies of 127.0.0.1 to every port, so every dashboard needs a name of its own.
        self.cookie = f"clusterkit-{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise UserError(
                f"port {port} of {ADDRESS} cannot be had ({error.strerror}): name another with --port; 0 is a free one"
            ) from None

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of our own name, which hangs if DNS does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """The address with the token: a secret, like that of Jupyter."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Ignore a browser that disconnects within an answer."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0 has one connection per request, so none occupies a thread or keeps the server alive.
    server_version, sys_version = "clusterkit", ""
    timeout = 60
    server: Dashboard

    def do_GET(self) -> None:
        """Answer with a page or the changing part of one."""
        if not self._is_local():
            # DNS rebinding: a web site may resolve its name to 127.0.0.1 to read us by the user's browser.
            self._answer(HTTPStatus.FORBIDDEN, "The dashboard answers to 127.0.0.1 and localhost alone.\n")
            return
        address = urlsplit(self.path)
        query = parse_qs(address.query, keep_blank_values=True)
        typed = self._is_token(query.pop("token", [""])[-1])
        if not typed and not self._is_token(self._cookie()):
            self._answer(
                HTTPStatus.FORBIDDEN,
                "Open the address that `clusterkit dashboard` has printed, all of it: it holds the token that only "
                "its user knows. A dashboard that was started again has another one.\n",
            )
            return
        if typed and address.path == "/":  # remove the token from the address that the browser shows and remembers
            location = "/" + (f"?{urlencode(query, doseq=True)}" if query else "")
            self._answer(HTTPStatus.SEE_OTHER, "", location=location)
            return
        run, known = (query.get(name, [""])[-1] for name in ("run", "drawn"))
        # The form sends an empty name for the newest run, and no `compare` where every box is empty.
        compare = query.get("compare", [] if "run" in query else None)
        try:
            if address.path == "/":
                text = self.server.views.page(run, compare)
            elif address.path == "/page":
                text = self.server.views.content(run, compare, known)
            else:
                self._answer(HTTPStatus.NOT_FOUND, "There is nothing here: the dashboard is at /\n")
                return
        except UserError as error:
            self._answer(HTTPStatus.BAD_REQUEST, f"{error}\n")
        except Exception as error:
            traceback.print_exc()
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n")
        else:
            self._answer(HTTPStatus.OK, text, "text/html")

    def do_HEAD(self) -> None:
        """Answer without the text. The base class refuses other methods."""
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    def _is_local(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].strip().lower().rpartition(":")
        if not colon or port.endswith("]"):
            name, port = hosts[0].strip().lower(), "0"
        return name in LOCAL_NAMES and port.isascii() and port.isdigit()

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def _cookie(self) -> str:
        """Return the token in the browser's cookie; empty if there is none."""
        parts = ";".join(self.headers.get_all("Cookie") or []).split(";")
        pairs = (part.strip().partition("=") for part in parts)
        return next((value for name, _, value in pairs if name == self.server.cookie), "")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain", location: str = "") -> None:
        """Send an answer. `location`: redirect there, with the token in a cookie."""
        data = text.encode()
        self.send_response(status)
        if location:
            self.send_header("Location", location)
            # Lax, not Strict: the first click may be on a link in a web terminal. No script can read it.
            self.send_header("Set-Cookie", f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Lax; Path=/")
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{content_policy()}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
