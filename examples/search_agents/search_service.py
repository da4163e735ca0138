"""A searxng of two pages, for a try without the web: `python .../search_service.py`, then Ctrl-C.

A real one: run searxng (its `search.formats` must hold `json`) and set SEARXNG_BASE_URL to it.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PAGES = [
    {"title": "Zugspitze", "url": "http://a.example", "content": "It is 2962 metres high."},
    {"title": "Rome", "url": "http://b.example", "content": "Rome lies on the river Tiber."},
]


def found(query: str) -> list[dict[str, str]]:
    """The pages that share a word with the query."""
    words = {word.strip("?.,").lower() for word in query.split()}
    return [page for page in PAGES if words & set(" ".join(page.values()).lower().split())]


class Search(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query).get("q", [""])[0]
        body = json.dumps({"results": found(query)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8021
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Search)
    except OSError as error:
        sys.exit(f"Port {port}: {error.strerror}. Name another: search_service.py {port + 1}")
    print(f"export SEARXNG_BASE_URL=http://127.0.0.1:{port}", flush=True)
    server.serve_forever()
