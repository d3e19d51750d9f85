"""An S3 server on this machine, whose answers can be spoilt: what real stores do to a client."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import pytest


class Store:
    """The server, and the faults of its coming answers.

    `faults` (503, 403, cut, slow) are taken one after another by requests of objects' bytes (`GET`),
    or by all where `everywhere` is set; `asked` has method, path and range of each request.
    """

    def __init__(self, application: Callable[..., Any]) -> None:
        self.application = application
        self.faults: list[str] = []
        self.everywhere = False
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        self.asked.append((method, path, environ.get("HTTP_RANGE", "")))
        if not self.faults or not (self.everywhere or (method == "GET" and path.count("/") > 1)):
            return self.application(environ, start_response)
        fault = self.faults.pop(0)
        if fault == "slow":
            time.sleep(1.0)
        if fault == "cut":
            return cut_off(self.application(environ, start_response))
        if fault.isdigit():
            code = {"503": "SlowDown", "403": "AccessDenied"}[fault]
            start_response(f"{fault} {code}", [("Content-Type", "application/xml")])
            return (
                []
                if method == "HEAD"
                else [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]
            )
        return self.application(environ, start_response)

    def read(self, name: str = "") -> list[tuple[str, str, str]]:
        """The requests of objects' bytes whose path holds `name`."""
        return [ask for ask in self.asked if ask[0] == "GET" and ask[2] and name in ask[1]]


def cut_off(body: Any) -> Iterator[bytes]:
    """The first half of an answer; then the connection ends."""
    data = b"".join(body)
    yield data[: len(data) // 2]
    raise ConnectionAbortedError("cut")


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A context in which fsspec reaches `s3://` on this machine; the bucket `lake` is there."""
    pytest.importorskip("s3fs", reason="pip install s3fs 'moto[s3]' flask flask-cors")
    pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    store = Store(DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, store, threaded=True)
    http.daemon_threads = True
    http.block_on_close = False  # connections of clients stay open
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{http.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    urlopen(Request(f"http://127.0.0.1:{http.server_port}/moto-api/reset", method="POST")).close()
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").mkdir("lake")
    try:
        yield store
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        s3fs.S3FileSystem.clear_instance_cache()
