"""Serve the built book on this machine, compressed as a web server would send it.

    python book/_tools/serve.py _build/html --port 8000

On a remote machine forward the port: ssh -L 8000:localhost:8000 HOST
"""

import argparse
import gzip
import http.server
import io
import threading
from functools import partial
from pathlib import Path

COMPRESSIBLE = {".html", ".css", ".js", ".json", ".svg", ".ipynb", ".md", ".txt"}


class Handler(http.server.SimpleHTTPRequestHandler):
    """The standard file handler, sending text with gzip to clients that accept it."""

    def send_head(self):
        path = Path(self.translate_path(self.path))
        if path.is_dir():
            path = path / "index.html"
        if (
            "gzip" not in self.headers.get("Accept-Encoding", "")
            or path.suffix not in COMPRESSIBLE
            or not path.is_file()
        ):
            return super().send_head()
        if not self.path.split("?")[0].endswith(("/", path.suffix)):
            return super().send_head()  # a folder without its slash: the parent class redirects
        body = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)

    def log_message(self, *args):
        """Requests are not worth a line each."""


def open_server(folder, port=0):
    """Bind a server for `folder` to `port` of localhost (0: any free one); `server_port` tells which."""
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(folder)))


def start(folder):
    """Serve `folder` from a background thread, for tests; the caller shuts the returned server down."""
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
        parser.exit(1, f"port {arguments.port}: {error.strerror}. Name another: make serve PORT=8001\n")
    print(f"The book is at http://localhost:{server.server_port}/ (Ctrl-C stops)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
