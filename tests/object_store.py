"""A small server that speaks the JSON API of Google Cloud Storage on loopback.

It has what emulators lack: preconditions on generations, empty objects, delays, and
failures on demand. `python -m tests.object_store PORT DELAY` has a bucket `runs`.
"""

import contextlib
import http.server
import json
import sys
import threading
import time
import urllib.parse


class ObjectStore(http.server.ThreadingHTTPServer):
    """Buckets of objects with generations.

    Attributes:
      objects: for each bucket the (content, generation) of each name.
      delay: seconds that every request takes.
      failures: answers for the next requests, first come first served: a status, or "reset" to
        close the connection without an answer.
      denied: whether every request is refused.
      requests: (method, name of the object) of each request.
    """

    daemon_threads = True

    def __init__(self, *buckets, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.objects = {bucket: {} for bucket in buckets}
        self.delay, self.failures, self.denied = 0.0, [], False
        self.requests, self.lock, self.count = [], threading.Lock(), 0

    @property
    def environment(self):
        """The variables by which tensorstore finds this server."""
        return {
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{self.server_port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }

    def handle_error(self, request, client_address):
        pass  # A client that was killed.


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(self.read)

    def do_POST(self):
        self.answer(self.write)

    def do_DELETE(self):
        self.answer(self.delete)

    def answer(self, act):
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        _, _, rest = address.path.partition("/b/")
        bucket, _, name = rest.partition("/o")
        name = urllib.parse.unquote(name.removeprefix("/")) or query.get("name", "")
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.requests.append((self.command, name))
            failure = self.server.failures.pop(0) if self.server.failures else None
            if failure == "reset":
                self.close_connection = True
                return
            if failure:
                return self.send(failure, b"{}")
            if self.server.denied:
                return self.send(403, b'{"error": {"message": "denied"}}')
            if bucket not in self.server.objects:
                return self.send(404, b'{"error": {"message": "no such bucket"}}')
            act(self.server.objects[bucket], name, query, body)

    def read(self, objects, name, query, _):
        if not name:
            return self.list(objects, query)
        if name not in objects:
            return self.send(404, b"{}")
        content, generation = objects[name]
        self.send(200, content, generation)

    def list(self, objects, query):
        names = sorted(n for n in objects if n.startswith(query.get("prefix", "")))
        names = [n for n in names if n >= query.get("startOffset", "")]
        names = [n for n in names if n < query.get("endOffset", "\U0010ffff")]
        names = [n for n in names if n > query.get("pageToken", "")]
        page, rest = names[:1000], names[1000:]
        items = [{"name": n, "size": str(len(objects[n][0]))} for n in page]
        found = {"kind": "storage#objects", "items": items}
        self.send(200, json.dumps(found | ({"nextPageToken": page[-1]} if rest else {})).encode())

    def write(self, objects, name, query, body):
        if not self.matches(objects, name, query):
            return self.send(412, b"{}")
        self.server.count += 1
        generation = time.time_ns() + self.server.count
        objects[name] = (body, generation)
        found = {"name": name, "generation": str(generation), "size": str(len(body))}
        self.send(200, json.dumps(found).encode())

    def delete(self, objects, name, query, _):
        if not self.matches(objects, name, query):
            return self.send(412, b"{}")
        self.send(204 if objects.pop(name, None) else 404, b"")

    def matches(self, objects, name, query):
        wanted = query.get("ifGenerationMatch")
        there = objects[name][1] if name in objects else 0
        return wanted is None or int(wanted) == there

    def send(self, status, content, generation=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if generation is not None:
            self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serving(*buckets):
    """A server with these buckets, while the block runs."""
    server = ObjectStore(*buckets)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    _server = ObjectStore("runs", port=int(sys.argv[1]))
    _server.delay = float(sys.argv[2])
    _server.serve_forever()
