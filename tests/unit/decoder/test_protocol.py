"""Requests as OpenAI's clients send them: what is understood, and what is refused with the field's name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from decoder.protocol import ApiError, Plan, Planner
from decoder.text import Text
from tests.support_serving import Bytes

USER = [{"role": "user", "content": "hi"}]


def refusal(name: str, strategy: str | None, rule: str | None) -> tuple[str, str] | None:
    if strategy not in (None, "plain"):
        return "strategy", f"no {strategy}"
    return None if rule in (None, "lossless") else ("rule", f"no {rule}")


def planner(**options: Any) -> Planner:
    given: dict[str, Any] = {
        "model": "m", "context": 100, "refusal": refusal,
    }  # fmt: skip
    return Planner(Text(Bytes(), bos=1), **(given | options))


def chat(options: dict[str, Any] | None = None, **fields: Any) -> Plan:
    return planner(**(options or {})).chat_completion(json.dumps({"model": "m", "messages": USER} | fields).encode())


def completion(options: dict[str, Any] | None = None, **fields: Any) -> Plan:
    return planner(**(options or {})).completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def test_a_bare_request_gets_the_defaults_of_the_api():
    plan = completion()
    assert plan.prompts == [[1, *b"hi"]] and (plan.n, plan.stream, plan.pinned) == (1, False, False)
    assert (plan.params.max_tokens, plan.params.temperature, plan.params.top_p) == (16, 1.0, 1.0)
    assert chat().params.max_tokens == 100 - 3  # all that the context has left


def test_every_sampling_field_arrives():
    plan = chat(
        max_completion_tokens=9, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, min_tokens=2, stop="a", seed=4,
        logit_bias={"5": -100, "6": 2.5}, logprobs=True, top_logprobs=3, presence_penalty=0, frequency_penalty=0.0,
        n=2, stream=True, stream_options={"include_usage": True}, user="u", metadata={"k": "v"},
    )  # fmt: skip
    p = plan.params
    assert (p.max_tokens, p.temperature, p.top_p, p.top_k, p.min_p, p.min_tokens) == (9, 0.0, 0.5, 0, 0.1, 2)
    assert p.stop == ("a",) and p.logit_bias == {5: -math.inf, 6: 2.5} and p.logprobs == 3
    assert plan.n == 2 and plan.stream and plan.include_usage


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[1, *b"ab"]]),
        (["ab", "c"], [[1, *b"ab"], [1, *b"c"]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_a_prompt_may_be_text_or_tokens_one_or_many(prompt: Any, prompts: list[list[int]]):
    plan = completion(prompt=prompt, n=2)
    assert plan.prompts == prompts and len(plan.choices()) == 2 * len(prompts)
    assert [ids for ids, _ in plan.choices()] == [ids for ids in prompts for _ in range(2)]


def test_outputs_of_one_request_have_seeds_of_their_own_that_repeat():
    first, again, other = chat(seed=7, n=3), chat(seed=7, n=3), chat(seed=8, n=3)
    assert first.seeds == again.seeds and first.seeds[0] == 7
    assert len({*first.seeds, *other.seeds}) == 6
    assert chat().seeds != chat().seeds
    assert all(p.seed == s for (_, p), s in zip(first.choices(), first.seeds, strict=True))
    assert chat(seed=-1).seeds[0] >= 0


@pytest.mark.parametrize(
    ("content", "text"),
    [("hi", b"hi"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], b"ab"), (None, b"")],
)
def test_content_may_be_text_or_parts_of_text(content: Any, text: bytes):
    assert chat(messages=[{"role": "user", "content": content}]).prompts == [[1, *text]]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "greater"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater"),
        ({"n": 0}, "n", "greater"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"frequency_penalty": -0.5}, "frequency_penalty", "not supported"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
        ({"nonsense": 1}, "nonsense", "unknown field"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls", "not supported"),
        ({"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "reads 100"),
        ({"lenity": {"max_loss": 1.01}}, "lenity.max_loss", "only tighten"),
        ({"lenity": {"max_loss": -0.1}}, "lenity.max_loss", "only tighten"),
        ({"lenity": {"strategy": "cascade"}}, "lenity.strategy", "no cascade"),
        ({"lenity": {"rule": "token_v3"}}, "lenity.rule", "no token_v3"),
        ({"lenity": {"traffic_class": "vip"}}, "lenity.traffic_class", "default"),
        ({"lenity": {"theta": 1}}, "lenity.theta", "unknown field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str, says: str):
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param) and says in refused.value.message
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"prompt": []}, "prompt"),
     ({"prompt": [[]]}, "prompt"), ({"prompt": ["ok", 5]}, None), ({"logprobs": True}, "logprobs")],
)  # fmt: skip
def test_completions_refuse_what_they_do_not_do(fields: dict[str, Any], param: str | None):
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert refused.value.status == 400 and (param is None or refused.value.param == param)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "m"}', b"\xff"])
def test_a_body_that_is_no_request_is_refused(body: bytes):
    with pytest.raises(ApiError) as refused:
        planner().chat_completion(body)
    assert refused.value.status == 400


def test_another_model_is_not_found():
    with pytest.raises(ApiError) as refused:
        chat(model="gpt-4")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("kind", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}])
def test_an_answer_in_json_is_one_structured_span(kind: dict[str, Any]):
    plan = chat(response_format=kind)
    assert plan.structured and not plan.pinned and not plan.terms.lossless
    assert not chat(response_format={"type": "text"}).structured


def test_a_schema_that_must_be_met_is_refused_because_nothing_enforces_it():
    schema = {"name": "a", "schema": {"type": "object"}, "strict": True}
    with pytest.raises(ApiError, match="not constrained"):
        chat(response_format={"type": "json_schema", "json_schema": schema})


def test_the_callers_terms_arrive():
    plan = chat({"classes": ("chat", "code")}, lenity={"max_loss": 0.25, "strategy": "plain", "traffic_class": "code"})
    assert (plan.terms.share, plan.terms.strategy, plan.traffic_class, plan.pinned) == (0.25, "plain", "code", False)
    assert chat({"classes": ("chat", "code")}).traffic_class == "chat"
    assert chat(lenity={"max_loss": 0}).pinned and chat(lenity={"rule": "lossless"}).pinned
