"""Answers of an OpenAI-compatible server: retries, resuming, and features that are the local target's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eyas.cli import main
from eyas.errors import CheckpointError, FetchError, InvalidInputError
from eyas.generate import Session, generate
from eyas.stopping import StopParams
from eyas.train.answer import AnswerSettings
from eyas.train.endpoint import REPLIES, Endpoint, fetch_replies, read_replies
from eyas.train.prompts import Prompt
from eyas.train.store import FeatureStore
from eyas.train.take_in import take_in_replies
from support.table_cli import load_table, use_table

SETTINGS = AnswerSettings(max_tokens=12, max_prompt_tokens=60, batch=3, sampled_share=0.0, seed=1)
PROMPTS = [Prompt(i, (f"w{9 + i} w11",)) for i in range(5)]


@dataclass
class Stub:
    """A server that answers like the table, or with the faults it is told."""

    url: str = ""
    faults: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    body: bytes | None = None
    say: Callable[[dict[str, Any]], tuple[str, str]] = lambda question: ("", "stop")


def table_says(question: dict[str, Any]) -> tuple[str, str]:
    loaded, _ = load_table()
    ids = loaded.tokenizer.encode_chat(question["messages"])
    stop = StopParams(max_tokens=question["max_tokens"])
    tokens = [t for step in generate(Session(loaded.target), ids, stop=stop) for t in step.tokens]
    ended = tokens[-1] in loaded.target.info.eos_token_ids
    return loaded.tokenizer.decode(tokens[:-1] if ended else tokens), "stop" if ended else "length"


@pytest.fixture
def stub() -> Iterator[Stub]:
    state = Stub(say=table_says)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.seen.append(question)
            state.keys.append(self.headers.get("Authorization"))
            if self.path != "/v1/chat/completions":
                self._send(404, b"no such path", {})
            elif state.faults:
                code, headers = state.faults.pop(0)
                self._send(code, b"try later", headers)
            elif state.body is not None:
                self._send(200, state.body, {})
            else:
                text, reason = state.say(question)
                choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
                self._send(200, json.dumps({"choices": [choice]}).encode(), {})

        def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def endpoint(stub: Stub, **settings: Any) -> Endpoint:
    return Endpoint(stub.url, "table", **{"sleep": lambda seconds: None, **settings})


def fetched(stub: Stub, out: Path, prompts: Sequence[Prompt] = PROMPTS, **settings: Any) -> Any:
    return fetch_replies(endpoint(stub, **settings), prompts, out, SETTINGS)


def test_features_are_what_inference_computes(stub: Stub, tmp_path: Path) -> None:
    loaded, _ = load_table()
    replies = fetched(stub, tmp_path)
    done = take_in_replies(loaded.target, loaded.tokenizer, replies, tmp_path, SETTINGS, endpoint(stub))
    documents = {document.prompt_index: document for document in FeatureStore(tmp_path)}
    assert done.documents == len(documents) >= 4
    assert done.agreed == done.judged > 0
    for index, document in documents.items():
        prompt = loaded.tokenizer.encode_chat(PROMPTS[index].opening)
        stop = StopParams(max_tokens=SETTINGS.max_tokens)
        said = [t for step in generate(Session(loaded.target), prompt, stop=stop) for t in step.tokens]
        assert [*document.ids.tolist(), document.last] == [*prompt, *said]
        assert document.answer.tolist() == [False] * len(prompt) + [True] * (len(said) - 1)
        assert document.features[:, 0].tolist() == list(range(len(document)))  # the table's feature is its place ...
        assert document.features[:, 1].tolist() == document.ids.tolist()  # ... and its token
        assert document.greedy
    assert json.loads((tmp_path / "manifest.json").read_text())["settings"]["endpoint_model"] == "table"


def test_answers_of_another_model_show(stub: Stub, tmp_path: Path) -> None:
    stub.say = lambda question: ("w20 w21 w22 w23", "stop")
    loaded, _ = load_table()
    replies = fetched(stub, tmp_path)
    done = take_in_replies(loaded.target, loaded.tokenizer, replies, tmp_path, SETTINGS, endpoint(stub))
    assert done.agreed < 0.5 * done.judged
    assert not any(document.greedy for document in FeatureStore(tmp_path))


def test_conversations_go_on(stub: Stub, tmp_path: Path) -> None:
    loaded, _ = load_table()
    (reply,) = fetched(stub, tmp_path, [Prompt(0, ("w9", "w12"), "w30")])
    assert [message["role"] for message in reply.messages] == ["system", "user", "assistant", "user", "assistant"]
    take_in_replies(loaded.target, loaded.tokenizer, [reply], tmp_path, SETTINGS, endpoint(stub))
    (document,) = FeatureStore(tmp_path)
    whole = loaded.tokenizer.encode_chat(reply.messages[:4])
    assert document.ids[: len(whole)].tolist() == whole
    starts = np.flatnonzero(np.diff(document.answer.astype(int)) == 1)
    assert len(starts) == 2  # both replies are answers


def test_a_busy_server_is_asked_again(stub: Stub, tmp_path: Path) -> None:
    waits: list[float] = []
    stub.faults = [(503, {}), (429, {"Retry-After": "7"}), (500, {})]
    replies = fetched(stub, tmp_path, PROMPTS[:1], sleep=waits.append, api_key="secret")
    assert len(replies) == 1 and len(stub.seen) == 4
    assert waits == [1.0, 7.0, 4.0]
    assert set(stub.keys) == {"Bearer secret"}
    assert stub.seen[0]["temperature"] == 0 and stub.seen[0]["max_tokens"] == 12


def test_what_was_answered_before_a_failure_is_kept(stub: Stub, tmp_path: Path) -> None:
    fetched(stub, tmp_path, PROMPTS[:2])
    stub.faults = [(400, {})] * 9
    with pytest.raises(InvalidInputError, match=r"answered 400: try later"):
        fetched(stub, tmp_path)
    stub.faults = []
    with (tmp_path / REPLIES).open("a") as file:
        file.write('{"prompt_index": 4, "gre')  # killed while writing
    stub.seen.clear()
    replies = fetched(stub, tmp_path)
    assert [reply.prompt_index for reply in replies] == [0, 1, 2, 3, 4]
    assert len(stub.seen) == 3
    assert len(list(read_replies(tmp_path / REPLIES))) == 5


def test_a_server_that_stays_away_is_named(stub: Stub, tmp_path: Path) -> None:
    stub.faults = [(503, {})] * 9
    with pytest.raises(FetchError, match="gave up after 3 tries"):
        fetched(stub, tmp_path, PROMPTS[:1], retries=2)
    gone = Endpoint("http://127.0.0.1:9/v1", "table", retries=0)
    with pytest.raises(FetchError, match="cannot be reached"):
        fetch_replies(gone, PROMPTS[:1], tmp_path, SETTINGS)
    stub.faults, stub.body = [], b"<html>hello"
    with pytest.raises(FetchError, match="chat completion"):
        fetched(stub, tmp_path, PROMPTS[:1])


def test_damaged_replies_are_named(tmp_path: Path) -> None:
    (tmp_path / REPLIES).write_text('{"prompt_index": 0}\n{}\n')
    with pytest.raises(CheckpointError, match="line 1"):
        list(read_replies(tmp_path / REPLIES))


def test_too_long_and_empty_are_counted(stub: Stub, tmp_path: Path) -> None:
    loaded, _ = load_table()
    stub.say = lambda question: ("", "stop")
    replies = fetched(stub, tmp_path, PROMPTS[:1])
    long = [
        replace(replies[0], prompt_index=1, messages=({"role": "user", "content": "w9 " * 80}, replies[0].messages[-1]))
    ]
    done = take_in_replies(loaded.target, loaded.tokenizer, [*replies, *long], tmp_path, SETTINGS, endpoint(stub))
    assert (done.documents, done.empty, done.too_long) == (0, 1, 1)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["data", "answer", *arguments])
    return int(left.value.code or 0)


def test_the_command(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_table(monkeypatch)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "w9"}\n{"prompt": "w10 w12"}\n')
    store = [str(prompts), "--out", str(tmp_path / "s"), "--max-tokens", "8", "--sampled-share", "0"]
    assert run(*store, "--endpoint", stub.url) == 2
    assert "--endpoint-model" in capsys.readouterr().err
    asked = [*store, "--endpoint", stub.url, "--endpoint-model", "table"]
    assert run(*asked, "--api-key-env", "NO_SUCH_KEY_HERE") == 2
    assert "NO_SUCH_KEY_HERE" in capsys.readouterr().err
    assert run(*store, "--endpoint", "ftp://x", "--endpoint-model", "table") == 2
    capsys.readouterr()
    monkeypatch.setenv("STUB_KEY", "k")
    assert run(*asked, "--api-key-env", "STUB_KEY") == 0
    assert "would have said 100.0%" in capsys.readouterr().out
    assert stub.keys[-1] == "Bearer k"
    assert len(FeatureStore(tmp_path / "s")) == 2
