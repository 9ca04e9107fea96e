"""A server of OpenAI's protocol for tests, whose replies are scripted."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def serving(script):
    """Serve `script(number of the request, its body) -> (status, content)`; yields (base_url, list of bodies)."""
    seen, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                seen.append(body)
                number = len(seen) - 1
            status, content = script(number, body)
            message = {"role": "assistant", "content": content}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
            reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            data = json.dumps(reply if status == 200 else {"error": {"message": content}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After-Ms", "1")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
