"""Medusa heads on a real server: the model's own texts in fewer steps, and an operator who sees and steers it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import House, Running, eventually, plugin
from tests.support import heads
from tests.support.server import Server, attempt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Ten rules for a tidy kitchen:\n1.",
    "The difference between a frog and a toad is",
    "Dear friend, I am writing to you because",
    "Question: What is a prime number?\nAnswer:",
    "To make a good loaf of bread, first",
    "The",  # shorter than a draft
)
TOKENS = 64
MEDUSA = ("--plugin", "chunkllm", "--plugin-set", "speculative.plugin=medusa")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], smollm2: Path) -> Iterator[Running]:
    """The heads that are shipped for it; always drafting as much as it may, so that every test meets drafts."""
    with serve(*MEDUSA, "--plugin-set", "plugins.medusa.adaptive=false", model=smollm2) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Running) -> list[str]:
    """The texts with speculation turned off."""
    server.set(speculative__plugin="none")
    texts = [stream.text for stream in server.streams(PROMPTS, TOKENS)]
    server.set(speculative__plugin="medusa")
    assert 0 == server.status()["speculation"]["drafts"]
    return texts


def speculation(server: Running) -> dict[str, Any]:
    return dict(server.wait_idle()["speculation"])


class TestMedusa:
    def test_the_same_texts_in_fewer_steps(self, server, expected) -> None:
        """Eight streams and then one: every text is the one without drafts, at well over a token a step."""
        together = [stream.text for stream in server.streams(PROMPTS, TOKENS)]
        before = server.wait_idle()["kv"]["steps"]
        alone = server.complete(PROMPTS[0], TOKENS)
        after = server.wait_idle()["kv"]["steps"]
        found = speculation(server)

        assert expected == together
        assert expected[0] == alone
        assert after - before < 0.8 * TOKENS
        assert 1.4 < found["acceptance_length_total"] <= 5
        assert 1 + found["accepted"] / found["drafts"] == pytest.approx(found["acceptance_length_total"])
        assert sum(found["accepted_at"]) == found["accepted"] <= found["draft_tokens"]
        assert sorted(found["accepted_at"], reverse=True) == found["accepted_at"]
        assert "active" == plugin(server.status(), "medusa")["state"]

    def test_fewer_tokens_and_none_while_it_serves(self, server, expected) -> None:
        """`speculative.tokens` and `speculative.plugin` hold from the next step on, and change no text."""
        server.set(speculative__tokens=2)
        before = speculation(server)
        assert expected[1] == server.complete(PROMPTS[1], TOKENS)
        fewer = speculation(server)
        server.set(speculative__plugin="none")
        assert expected[1] == server.complete(PROMPTS[1], TOKENS)
        off = speculation(server)
        server.set(speculative__plugin="medusa", speculative__tokens=4)
        assert expected[1] == server.complete(PROMPTS[1], TOKENS)
        on = speculation(server)

        assert [2, 0, 4] == [found["limit"] for found in (fewer, off, on)]
        assert fewer["draft_tokens"] - before["draft_tokens"] <= 2 * (fewer["drafts"] - before["drafts"])
        assert before["accepted_at"][2:] == fewer["accepted_at"][2:]
        assert (fewer["drafts"], fewer["draft_tokens"]) == (off["drafts"], off["draft_tokens"])
        assert off["drafts"] < on["drafts"]

    @pytest.mark.parametrize(
        ("values", "code", "words"),
        [
            ({"speculative.tokens": 5}, 422, "made room for 4"),
            ({"speculative.tokens": 0}, 422, "speculative.tokens"),
            ({"speculative.plugin": "medussa"}, 422, "medusa"),
            ({"speculative.token": 3}, 422, "speculative.tokens"),
        ],
    )
    def test_what_cannot_be_is_refused(self, server, values, code, words) -> None:
        """Who asked hears why, and nothing changes."""
        before = server.control("config").json()
        response = server.control("set", {"set": values})

        assert code == response.status_code
        assert words in response.json()["error"]
        assert before == server.control("config").json()

    def test_a_stop_inside_a_draft(self, server, expected) -> None:
        """The text ends where it would without drafts."""
        word = expected[0].split()[11]
        body = {"model": server.server.model, "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0}
        answer = server.http.post("/v1/completions", json={**body, "stop": word}).json()

        assert expected[0].partition(word)[0] == answer["choices"][0]["text"]
        assert "stop" == answer["choices"][0]["finish_reason"]

    def test_structured_output(self, server) -> None:
        """Drafts that the grammar forbids are not accepted."""
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        asked = {"role": "user", "content": "Tell me about a person, as JSON with a name and an age."}
        wish = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        body = {"model": server.server.model, "messages": [asked], "max_tokens": 80, "temperature": 0}
        answer = server.http.post("/v1/chat/completions", json={**body, "response_format": wish}).json()

        choice = answer["choices"][0]
        assert "stop" == choice["finish_reason"], choice
        assert {"name", "age"} == set(json.loads(choice["message"]["content"]))

    def test_metrics_say_what_the_status_says(self, server, expected) -> None:
        server.complete(PROMPTS[2], TOKENS)
        found = speculation(server)

        server.wait_for_metric(found["drafts"], "spec_drafts_total")
        server.wait_for_metric(found["draft_tokens"], "spec_draft_tokens_total")
        server.wait_for_metric(found["accepted"], "spec_accepted_tokens_total")
        for position, accepted in enumerate(found["accepted_at"], 1):
            assert accepted == server.ours("spec_accepted_at_total", position=str(position))
        assert 4 == server.ours("spec_limit")
        assert 0 == server.ours("spec_stepped_aside")
        assert 0 < server.ours("spec_request_acceptance_length_count")


def test_heads_of_no_use_step_aside(serve, tiny_model: Path, tmp_path: Path) -> None:
    """Heads that are off by one position: after some hundred drafts that were wrong the engine decodes plainly, says
    so, and no text was ever another one."""
    file = heads.shifted(tmp_path / "shifted.safetensors", tiny_model)
    with serve(*MEDUSA, "--plugin-set", f"plugins.medusa.heads={file}") as server:
        server.set(speculative__plugin="none")
        expected = [stream.text for stream in server.streams(PROMPTS, 100)]
        server.set(speculative__plugin="medusa")
        texts = [stream.text for stream in server.streams(PROMPTS, 100)]
        eventually(lambda: speculation(server)["stepped_aside"], lambda: str(speculation(server)))
        medusa = plugin(server.status(), "medusa")
        server.wait_for_metric(1, "spec_stepped_aside")

    assert expected == texts
    assert "active" != medusa["state"]
    assert "off by one position" in medusa["last_failure"]


def test_heads_of_another_model_are_not_served_with(
    engine: str, house: House, tiny_model: Path, tmp_path: Path
) -> None:
    """The launch ends with the reason, before anybody is served."""
    other = heads.changed_model(tmp_path / tiny_model.name, tiny_model)
    file = heads.write_heads(tmp_path / "other.safetensors", other)
    flags = [*house.args, *MEDUSA, "--plugin-set", f"plugins.medusa.heads={file}"]
    server = Server(tiny_model, flags, engine=engine, env=house.env, log_file=tmp_path / "log")

    with attempt(server):
        said = server.log()

    assert 0 != server.process.returncode
    assert "the draft heads must be in step with the model" in said
