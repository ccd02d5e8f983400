"""Built-in graders and their arguments, refused when a configuration is loaded."""

from __future__ import annotations

import pytest


def part(text: str) -> list[str]:
    return [f"reward.parts={{m: {text}}}"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{function: math, args: {answer: bxed}}",
         "reward.parts.m.args.answer (override): got 'bxed', expected"),
        ("{function: math, args: {strct: true}}",
         "reward.parts.m.args.strct (override): unknown; did you mean 'strict'? (known: answer,"),
        ("{function: math, args: {strict: true}}",
         "reward.parts.m.args (override): strict needs a place"),
        ("{function: overlong}", "reward.parts.m.args.buffer: missing: give it in a file or as"),
        ("{function: overlong, args: {buffer: 0}}",
         "reward.parts.m.args.buffer (override): got 0, expected more than 0"),
        ("{function: overlong, args: {buffer: 5000}}",
         "reward.parts.m.args.buffer (override): got 5000, expected at most the limit of"),
        ("{function: overlong, args: {buffer: '5000'}}",
         "reward.parts.m.args.buffer (override): got 5000, expected at most the limit of"),
        ("{function: choice, args: {choices: abc}}",
         "got 'abc', expected different capital letters"),
        ("{function: maths}", "'maths' is unknown; did you mean 'math'? (known: exact_match,"),
        ("{function: rew.score}", "did you mean 'rew:score', with a colon?"),
    ],
)  # fmt: skip
def test_a_wrong_grader_is_refused_with_the_key(refusal, given, said):
    (line,) = refusal(*part(given))
    assert said in line


JUDGE = "reward.parts.j={{judge: {{url: '{}', model: m, api_key_env: KEY}}}}"
SERVICE = "reward.parts.s={{service: {{url: ['https://h/', '{}'], api_key_env: KEY}}}}"
MCP = "rollout.workflow={{name: env, mcp: [{{command: [cat]}}, {{url: '{}', api_key_env: KEY}}]}}"
EVALUATED = (
    "evaluation.sets.x={{paths: x, reward: {{parts:"
    " {{j: {{judge: {{url: '{}', model: m, api_key_env: KEY}}}}}}}}}}"
)
CLIENTS = {
    "reward.parts.j.judge.url": JUDGE,
    "reward.parts.s.service.url": SERVICE,
    "rollout.workflow.mcp.1.url": MCP,
    "evaluation.sets.x.reward.parts.j.judge.url": EVALUATED,
}


@pytest.mark.parametrize("key", CLIENTS)
def test_a_key_that_leaves_in_clear_is_named_and_with_tls_refused(load, refusal, key):
    away = CLIENTS[key].format("http://10.0.0.7:1/")
    assert [note for note in load(away).warnings if "in clear" in note and key in note]
    lines = refusal(away, "cluster.tls.ca_file=ca.pem")
    [line] = [line for line in lines if line.startswith(key)]
    assert "expected https://" in line
    local = ("http://127.0.0.1:1/", "http://localhost/", "http://[::1]/")
    for safe in ("https://10.0.0.7:1/", *local):
        given = CLIENTS[key].format(safe)
        assert not [note for note in load(given).warnings if "in clear" in note]


@pytest.mark.parametrize("part", ["judge: {model: m, ", "service: {"])
def test_a_server_has_one_way_to_log_in(refusal, part):
    given = f"reward.parts.a={{{part}url: 'http://u:hidden@h/', api_key_env: KEY}}}}"
    [line] = refusal(given)
    assert "either a user in the URL or `api_key_env`" in line
    assert "hidden" not in line


def test_a_grader_of_an_evaluation_set_is_refused_too(refusal):
    own = "evaluation.sets.x={paths: x.jsonl, reward: {parts: {m: {function: maths}}}}"
    (line,) = refusal(own)
    assert line.startswith("evaluation.sets.x.reward.parts.m.function")
    assert "did you mean 'math'?" in line


def test_a_reward_of_an_evaluation_set_has_parts(refusal):
    (line,) = refusal("evaluation.sets.x={paths: x.jsonl, reward: {parts: {}}}")
    assert line.startswith("evaluation.sets.x.reward.parts: empty: give one part")


def test_right_ones_are_taken(load):
    for given in (
        "{function: math, args: {answer: hash, strict: true}}",
        "{function: exact_match}",
        "{function: overlong, args: {buffer: 16}}",
        "{function: overlong, args: {buffer: '16', max_tokens: '32'}}",
        "{function: 'rew:score', args: {anything: [1, {a: b}]}}",
    ):
        load(*part(given))
    parts = "reward.parts={m: {function: math, sources: [a]}}"
    assert load(parts, "reward.by=data_source").config.reward.by == "data_source"
    one = load("reward.parts={m: {function: math}}", "reward.parts.m.args.answer=boxed")
    assert one.config.reward.parts["m"].args == {"answer": "boxed"}
