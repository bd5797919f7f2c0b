"""Serve the built book on this machine as a web server would: text is compressed, and a
browser that has a file asks only whether it has changed.

    python book/_tools/serve.py _build/html --port 8000

On a remote machine forward the port: ssh -L 8000:localhost:8000 HOST
"""

import argparse
import gzip
import http.server
import io
import threading
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMPRESSIBLE = {".html", ".css", ".js", ".json", ".svg", ".ipynb", ".md", ".txt"}
# Sphinx writes the hash of a style sheet or script into its address as ?v=....
FOREVER = "max-age=31536000, immutable"


@lru_cache(maxsize=256)
def compressed(path, changed):
    """The bytes of a file, changed at this time, with gzip."""
    return gzip.compress(path.read_bytes())


class Handler(http.server.SimpleHTTPRequestHandler):
    """The standard file handler, with gzip, ETag and Cache-Control."""

    protocol_version = "HTTP/1.1"

    def send_head(self):
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        asked = urlsplit(self.path)
        named = unquote(asked.path).endswith(("/", path.name))
        if not path.is_file() or not named:  # an error, or a redirect to the folder
            return super().send_head()
        about = path.stat()
        tag = f'W/"{about.st_mtime_ns:x}-{about.st_size:x}"'
        known = self.headers.get("If-None-Match", "").split(",")
        fresh = tag in [one.strip() for one in known]
        self.send_response(304 if fresh else 200)
        self.send_header("ETag", tag)
        hashed = asked.query.startswith("v=")
        self.send_header("Cache-Control", FOREVER if hashed else "no-cache")
        self.send_header("Vary", "Accept-Encoding")
        if fresh:
            self.end_headers()
            return None
        self.send_header("Content-Type", self.guess_type(str(path)))
        accepted = "gzip" in self.headers.get("Accept-Encoding", "")
        if accepted and path.suffix in COMPRESSIBLE:
            self.send_header("Content-Encoding", "gzip")
            body = compressed(path, about.st_mtime_ns)
        else:
            body = path.read_bytes()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, *args):
        """Print no line for each request."""


def open_server(folder, port=0):
    """Bind a server for `folder` to `port` of localhost; 0 is any free port."""
    handler = partial(Handler, directory=str(folder))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


def start(folder):
    """Serve `folder` from a thread; the caller shuts the returned server down."""
    server = open_server(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        server = open_server(arguments.folder, arguments.port)
    except OSError as error:
        parser.exit(1, f"port {arguments.port}: {error}; try: make serve PORT=8001\n")
    print(
        f"The book is at http://localhost:{server.server_port}/ (Ctrl-C stops)",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
