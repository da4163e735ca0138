"""A judge behind the OpenAI API that needs no model: it compares answers by rules.

`python examples/ruler/judge_service.py` prints the two variables that point trinity at it, and
serves until Ctrl-C. It knows both kinds of question that trinity's judges ask: to rank responses
(RULER), and to check one against criteria (rubrics). For a judge that thinks, set the variables
to any OpenAI-compatible service and JUDGE_MODEL to a model of it.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATA = re.compile(r'<data name="([^"]*)">\n(.*?)\n</data>', re.S)
CRITERION = re.compile(r"^\d+\. (.*)$", re.M)


def verdict(text: str) -> list[float]:
    """The scores of what a message of trinity's judge shows."""
    shown = DATA.findall(text)
    parts = dict(shown)
    if "response" in parts:
        criteria = CRITERION.findall(text.partition("Criteria:")[2].partition("<data")[0])
        return [criterion_met(c, parts["question"], parts["response"]) for c in criteria]
    truth = parts.get("right answer") or answer_of(parts["question"])
    return [rank(body, truth) for name, body in shown if name.startswith("response")]


def rank(response: str, truth: str) -> float:
    """Right answers above wrong ones, short ones above long ones."""
    is_right = re.search(rf"(?<!\d){re.escape(truth)}(?!\d)", response) is not None
    return round(0.6 * is_right + 0.4 / (1 + len(response) / 100), 3)


def criterion_met(criterion: str, question: str, response: str) -> float:
    """Two criteria are known: the right number, and one sentence."""
    if "number" in criterion:
        return float(re.search(rf"(?<!\d){answer_of(question)}(?!\d)", response) is not None)
    return float(len(re.findall(r"[.!?]+(?:\s|$)", response.strip())) <= 1)


def answer_of(question: str) -> str:
    """The sum that a question asks for."""
    return str(sum(map(int, re.findall(r"\d+", question))))


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = json.dumps({"scores": verdict(request["messages"][-1]["content"])})
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": scores},
        }
        reply = {"id": "verdict", "object": "chat.completion", "created": 0, "choices": [choice]}
        self._send(reply | {"model": request["model"]})

    def _send(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Silent."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8020
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Judge)
    except OSError as error:
        sys.exit(f"Port {port}: {error.strerror}. Name another: judge_service.py {port + 1}")
    print(f"export JUDGE_BASE_URL=http://127.0.0.1:{port}/v1 JUDGE_API_KEY=none", flush=True)
    server.serve_forever()
