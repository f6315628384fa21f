"""A process to supervise: answers its health path, and does what the first argument says.

healthy          answers 200
with-child       the same, with a child process in the same group that would run for a minute
sick-later       answers 200 five times, then 503
dies             prints an error and ends with exit code 3
"""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    answered = 0

    def do_GET(self) -> None:
        Handler.answered += 1
        sick = sys.argv[1] == "sick-later" and Handler.answered > 5
        body = str(os.getpid()).encode()
        self.send_response(503 if sick else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    if sys.argv[1] == "dies":
        sys.exit(print("ValueError: there is no such model", file=sys.stderr) or 3)
    if sys.argv[1] == "with-child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
