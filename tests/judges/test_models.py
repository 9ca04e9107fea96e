"""Where replies come from: an endpoint that limits, fails and answers; a real server; a model in this process."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from sysdpo_lab import errors, judges
from tests.judges.endpoint import serving

ASK = [[{"role": "user", "content": f"question {n}"}] for n in range(5)]


def test_replies_of_an_endpoint_come_with_their_questions():
    with serving(lambda number, body: (200, body["messages"][-1]["content"].upper())) as (url, seen):
        found = dict(judges.OpenAIModel("m", url).replies(ASK))
    assert found == {n: f"QUESTION {n}" for n in range(5)}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 16 and body["model"] == "m" for body in seen)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_repeated(status, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    with serving(lambda number, body: (200, "[[A]]") if number >= 2 else (status, "later")) as (url, seen):
        assert dict(judges.OpenAIModel("m", url, workers=1).replies(ASK[:1])) == {0: "[[A]]"}
    assert len(seen) == 3


def test_a_lasting_refusal_says_what_to_do():
    with serving(lambda number, body: (401, "no")) as (url, seen):
        with pytest.raises(errors.JudgeUnavailableError, match="401.*key"):
            list(judges.OpenAIModel("m", url, retries=0).replies(ASK[:1]))


def test_what_came_before_a_failure_is_yielded_first():
    with serving(lambda number, body: (200, "ok") if number < 3 else (404, "gone")) as (url, seen):
        found = []
        with pytest.raises(errors.JudgeUnavailableError, match="404"):
            for item in judges.OpenAIModel("m", url, retries=0, workers=1).replies(ASK):
                found.append(item)
    assert sorted(found) == [(0, "ok"), (1, "ok"), (2, "ok")] and len(seen) <= 5


def test_no_server_is_a_named_error():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    with pytest.raises(errors.JudgeUnavailableError, match="no answer"):
        list(judges.OpenAIModel("m", url, retries=0).replies(ASK[:1]))


def test_without_key_and_server_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(errors.JudgeUnavailableError, match="OPENAI_API_KEY"):
        judges.OpenAIModel("m")


def test_the_key_is_sent_but_appears_in_no_name_and_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with serving(lambda number, body: (200, "[[A]]")) as (url, seen):
        model = judges.OpenAIModel("m", url, key_variable="JUDGE_KEY")
        judge = judges.PairwiseJudge(model, tmp_path / "replies.jsonl")
        judge.compare(["q"], ["a"], ["b"])
    assert "sk-secret" not in repr(judge.report()) + (tmp_path / "replies.jsonl").read_text()


def test_without_the_package_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(errors.MissingExtraError, match=r"sysdpo-lab\[judge\]"):
        judges.OpenAIModel("m", "http://localhost/v1")


def test_an_always_first_endpoint_gives_exactly_one_half():
    with serving(lambda number, body: (200, "[[A]]")) as (url, seen):
        judge = judges.PairwiseJudge(judges.OpenAIModel("m", url))
        assert judge.compare(["q"] * 4, list("abcd"), list("efgh")) == [0.5] * 4


def test_a_model_in_this_process_judges_like_its_own_component():
    from sysdpo_lab.components import CausalLM
    from sysdpo_lab.worlds.tiny_lm import load_tiny_lm

    model, tokenizer = load_tiny_lm()
    found = dict(judges.LocalModel(model, tokenizer, name="tiny", max_tokens=5, batch_size=2).replies(ASK[:3]))
    alone = CausalLM("judge", ["messages"], model, tokenizer, "{messages}", max_new_tokens=5)
    assert found == {row: alone.greedy({"messages": [ask]})[0].text for row, ask in enumerate(ASK[:3])}


@pytest.fixture(scope="module")
def smollm2_server(tmp_path_factory):
    """`transformers serve` with SmolLM2 on a free port."""
    from sysdpo_lab import loading

    folder = loading.resolved("smollm2-135m-instruct")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        folder,
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1", folder
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)
        log.close()


def _wait(url: str, server, log, seconds: int = 120) -> None:
    for _ in range(seconds * 2):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    log.seek(0)
    pytest.fail(f"the server did not start: {log.read()[-2000:]}")


@pytest.mark.real_weights
def test_a_real_server_judges_as_the_same_model_in_this_process(smollm2_server):
    url, folder = smollm2_server
    questions = [
        [{"role": "user", "content": f"Answer with one word. The capital of {land}?"}] for land in ("France", "Italy")
    ]
    remote = dict(judges.OpenAIModel(folder, url, max_tokens=8, workers=1, timeout=120).replies(questions))
    local = dict(judges.LocalModel(folder, max_tokens=8, batch_size=1).replies(questions))
    assert remote == local and "Paris" in remote[0]


@pytest.mark.real_weights
def test_a_pair_is_judged_by_the_real_server_in_both_orders(smollm2_server):
    url, folder = smollm2_server
    judge = judges.PairwiseJudge(judges.OpenAIModel(folder, url, workers=1, timeout=120))
    (value,) = judge.compare(["Name a fruit."], ["An apple."], ["A brick."])
    assert value in (0.0, 0.5, 1.0) and judge.counts.asked == 2
