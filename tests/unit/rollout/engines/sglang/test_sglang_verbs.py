"""The calls of an SGLang engine to its server, their order, and refusals.

The server here is scripted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from aiohttp import web
from engine_kit import flatten, layout, request, tiny_qwen3
from patient_loop import run_steadily

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import EngineFailed, EngineHangs
from rollout.asyncio_utils import LoopThread
from rollout.engines.factories import Keys
from rollout.engines.sglang.engine import MARK, SGLangEngine
from rollout.weight_sync.process_group import GroupAddress

INFO = {
    "max_req_input_len": 500,
    "sampling_mask_max_tokens": 10,
    "enable_return_routed_experts": False,
    "device": "cpu",
    "dtype": "float32",
}
BUCKETS = layout(tiny_qwen3())[:2]


class Scripted:
    """A server that records its requests.

    `answers[route]` are the (status, value) that it gives in turn; the last is repeated.
    """

    def __init__(self, info):
        self.asked = []
        self.answers = {"/server_info": [(200, info)]}
        self.held = asyncio.Event()
        self.held.set()
        self.admin = {}
        self.silent = None  # the route that is never answered

    async def serve(self, asked):
        body = await asked.text()
        if asked.path != "/server_info":
            self.asked.append((asked.path, json.loads(body) if body else None))
        self.admin[asked.path] = asked.headers["Authorization"] == "Bearer the-admin-key"
        if asked.path == "/generate":
            await self.held.wait()
        if asked.path == self.silent:
            await asyncio.Event().wait()
        script = self.answers.get(asked.path, [(200, {"success": True, "message": "Success"})])
        status, value = script.pop(0) if len(script) > 1 else script[0]
        return web.json_response(value, status=status)

    @property
    def routes(self):
        return [route for route, _ in self.asked]

    def bodies(self, route):
        return [body for one, body in self.asked if one == route]


class Known:
    """A server that runs at a URL."""

    name = "engine-3"
    managed = True
    ended = None

    def __init__(self, url):
        self.url = url
        self.killed = 0

    async def start(self):
        return self.url

    async def kill(self):
        self.killed += 1

    async def stop(self):
        pass


def with_scripted(folder, use, *, info=INFO, trains_draft=False, **config):
    async def main():
        scripted = Scripted(info)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", scripted.serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        known = Known(f"http://127.0.0.1:{runner.addresses[0][1]}")
        settings = EngineConfig(**{"update_timeout_s": 5.0} | config)
        engine = SGLangEngine(
            known,
            config=settings,
            keys=Keys("the-api-key", "the-admin-key"),
            model_path=str(folder),
            trains_draft=trains_draft,
        )
        try:
            await engine.start()
            return await use(engine, scripted)
        finally:
            await engine.kill()
            assert known.killed
            await runner.cleanup()

    return run_steadily(asyncio.wait_for(main(), 30))


async def publish(engine, mode="drain", version=1):
    await engine.pause(mode)
    await engine.begin_update(BUCKETS)
    for bucket in BUCKETS:
        await engine.receive_serialized(bucket.index, ["bytes"])
    await engine.end_update()
    await engine.set_version(version)
    await engine.resume()


def completion(*tokens, version=f"1{MARK}"):
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        },
    }


@pytest.mark.parametrize(
    ("mode", "pause"),
    [("drain", "retract"), ("retract", "retract"), ("abort", "retract"), ("in_place", "in_place")],
)
def test_the_order_of_a_publication(folder, mode, pause):
    """The cache is flushed once, at the end, with the old version still in force; not where
    requests go on with it.
    """

    async def use(engine, scripted):
        await publish(engine, mode)
        update = [
            "/begin_weight_update",
            *["/update_weights_from_tensor"] * 2,
            "/end_weight_update",
        ]
        flush = [] if mode == "in_place" else ["/flush_cache"]
        assert scripted.routes == [
            "/pause_generation",
            *update,
            *flush,
            "/update_weight_version",
            "/continue_generation",
        ]
        assert scripted.bodies("/pause_generation") == [{"mode": pause}]
        for body in scripted.bodies("/update_weights_from_tensor"):
            assert (body["flush_cache"], body["abort_all_requests"], body["load_format"]) == (
                False,
                False,
                "flattened_bucket",
            )
            assert "weight_version" not in body
            # The draft's layers have names of the policy's.
            assert body["selector"] == "target"
        assert scripted.bodies("/begin_weight_update") == [{"selector": "target"}]
        assert scripted.bodies("/update_weight_version") == [
            {"new_version": f"1{MARK}", "abort_all_requests": False}
        ]
        assert all(scripted.admin[route] for route in scripted.routes)

    with_scripted(folder, use)


def test_a_draft_whose_layers_are_trained_gets_them_too(folder):
    async def use(engine, scripted):
        await publish(engine)
        assert scripted.bodies("/begin_weight_update") == [{"selector": "all"}]
        loaded = scripted.bodies("/update_weights_from_tensor")
        assert [body["selector"] for body in loaded] == ["all"] * 2

    with_scripted(folder, use, trains_draft=True)


def test_requests_are_keyed_by_the_version_and_wait_while_the_engine_is_paused(folder):
    async def use(engine, scripted):
        scripted.answers["/generate"] = [(200, [completion(*range(8), version=f"4{MARK}")])]
        await publish(engine, version=4)
        await engine.generate([request([1, 2])])
        await engine.pause("in_place")
        waiting = asyncio.ensure_future(engine.generate([request([3])]))
        await asyncio.sleep(0.05)
        assert len(scripted.bodies("/generate")) == 1
        scripted.answers["/generate"] = [(200, [completion(*range(8), version=f"5{MARK}")])]
        await publish(engine, "in_place", version=5)
        await waiting
        assert [body["extra_key"] for body in scripted.bodies("/generate")] == ["4", "5"]

    with_scripted(folder, use)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (f"999{MARK}", "says that version 999 made tokens, expected 4 to 4"),
        (f"-3{MARK}", "says that version -3 made"),
        (f"3{MARK}", "says that version 3 made"),
        ("4", "this trainer did not publish: another trainer uses the engine"),
        ("4.deadbeef", "this trainer did not publish"),
        ("default", "this trainer did not publish"),
    ],
    ids=["unknown", "negative", "earlier", "unmarked", "of another trainer", "default"],
)
def test_a_version_that_was_not_in_force_is_the_engines_failure(folder, version, why):
    """It would be a KeyError of the trainer's, or stale tokens taken for fresh ones."""

    async def use(engine, scripted):
        scripted.answers["/generate"] = [(200, [completion(*range(8), version=version)])]
        await publish(engine, version=4)
        with pytest.raises(EngineFailed, match=f"engine-3 .*{why}"):
            await engine.generate([request([1, 2])])

    with_scripted(folder, use)


def test_tokens_of_two_versions_may_come_from_a_request_that_a_publication_met(folder):
    async def use(engine, scripted):
        both = completion(*range(8))
        both["meta_info"]["weight_versions"] = [
            {"version": f"4{MARK}", "start": 0, "end": 3},
            {"version": f"5{MARK}", "start": 3, "end": 8},
        ]
        scripted.answers["/generate"] = [(200, [both])]
        await publish(engine, version=4)
        scripted.held.clear()
        asked = asyncio.ensure_future(engine.generate([request([1, 2])]))
        while not scripted.bodies("/generate"):
            await asyncio.sleep(0.005)
        await publish(engine, "in_place", version=5)
        scripted.held.set()
        [[found]] = await asked
        assert [span.version for span in found.versions] == [4, 5]

    with_scripted(folder, use)


def test_drain_waits_for_what_is_in_flight_and_abort_ends_it(folder):
    async def use(engine, scripted):
        scripted.answers["/generate"] = [(200, [completion(*range(8))])]
        await publish(engine)
        scripted.held.clear()
        running = asyncio.ensure_future(engine.generate([request([1])]))
        await asyncio.sleep(0.05)
        draining = asyncio.ensure_future(engine.pause("drain"))
        await asyncio.sleep(0.1)
        assert not draining.done()
        scripted.held.set()
        await asyncio.gather(draining, running)
        await engine.resume()
        scripted.held.clear()
        running = asyncio.ensure_future(engine.generate([request([1])]))
        await asyncio.sleep(0.05)
        aborting = asyncio.ensure_future(engine.pause("abort"))
        while len(scripted.bodies("/abort_request")) < 2:  # a request may have been on its way
            await asyncio.sleep(0.01)
        assert scripted.bodies("/abort_request")[0]["abort_all"] is True
        scripted.held.set()
        await asyncio.gather(aborting, running)

    with_scripted(folder, use)


def test_requests_that_do_not_end_have_a_limit(folder):
    async def use(engine, scripted):
        await publish(engine)
        scripted.held.clear()
        running = asyncio.ensure_future(engine.generate([request([1])]))
        await asyncio.sleep(0.05)
        with pytest.raises(
            EngineHangs,
            match=r"engine-3 did not end its requests within 0.3 s \(.*update_timeout_s\)",
        ):
            await engine.pause("abort")
        running.cancel()

    with_scripted(folder, use, update_timeout_s=0.3)


def test_requests_are_aborted_by_the_ids_that_the_server_has(folder):
    """It knows an id as a whole: the beginning that its samples share says nothing to it."""

    async def use(engine, scripted):
        await publish(engine)
        scripted.answers["/generate"] = [(200, [completion(3), completion(4)])]
        scripted.held.clear()
        asked = request([1], draw=4, n=2, max_new_tokens=1)
        calls = [engine.generate([one]) for one in (asked, replace(asked, draw=5))]
        running = asyncio.gather(*calls)
        while len(scripted.bodies("/generate")) < 2:
            await asyncio.sleep(0.01)
        await engine.abort([asked.rid])
        [theirs] = [b["rid"] for b in scripted.bodies("/generate") if b["rid"][0][:4] == "0-4-"]
        aborts = [{"rid": rid, "abort_all": False} for rid in theirs]
        assert scripted.bodies("/abort_request") == aborts
        scripted.held.set()
        await running
        await engine.abort([asked.rid])
        assert scripted.bodies("/abort_request") == aborts, "it is answered"

    with_scripted(folder, use)


def test_progress_is_what_the_scheduler_did(folder):
    """Not the time of the report, and not the requests that we gave it."""

    def loads(**changes):
        load = {"decode_moments": [2.0, 4.0], "total_prefill_uncached_tokens": 7}
        idle = {"num_used_tokens": 9, "timestamp": 1.0, "num_waiting_reqs": 0}
        return 200, {"loads": [load | idle | changes]}

    async def use(engine, scripted):
        other = loads(timestamp=2.0, num_waiting_reqs=5), loads(num_used_tokens=10)
        scripted.answers["/v1/loads"] = [loads(), *other, (200, {"loads": []})]
        first = await engine.progress()
        assert first is not None
        assert await engine.progress() == first
        assert await engine.progress() not in (first, None)
        assert await engine.progress() is None, "a server that publishes no load"
        await engine.pause("retract")
        assert await engine.progress() is None
        assert scripted.routes[-1] == "/pause_generation"

    with_scripted(folder, use)


def test_a_session_left_open_is_closed_first(folder):
    async def use(engine, scripted):
        scripted.answers["/begin_weight_update"] = [
            (400, {"success": False, "message": "a weight-update session is already open"}),
            (200, {"success": True}),
        ]
        await publish(engine)
        assert scripted.routes[1:4] == [
            "/begin_weight_update",
            "/end_weight_update",
            "/begin_weight_update",
        ]

    with_scripted(folder, use)


def test_a_server_that_hangs_is_not_asked_to_begin_again(folder):
    async def use(engine, scripted):
        await engine.pause("drain")
        scripted.silent = "/begin_weight_update"
        with pytest.raises(EngineHangs, match="begin_weight_update"):
            await engine.begin_update(BUCKETS)
        assert scripted.routes[1:] == ["/begin_weight_update"]

    with_scripted(folder, use, update_timeout_s=0.3)


@pytest.mark.parametrize("status", [200, 400])
def test_a_refusal_is_the_engines_failure_in_the_servers_words(folder, status):
    async def use(engine, scripted):
        scripted.answers["/update_weights_from_tensor"] = [
            (status, {"success": False, "message": "no such luck"})
        ]
        with pytest.raises(
            EngineFailed, match=r"engine-3.*update_weights_from_tensor.*no such luck"
        ):
            await publish(engine)
        with pytest.raises(EngineFailed, match="ended without buckets 0, 1 of 2"):
            await engine.end_update()
        with pytest.raises(
            EngineFailed, match=r"its weights are stale \(updating\): publish a whole update"
        ):
            await engine.resume()
        assert "/end_weight_update" not in scripted.routes
        assert "/continue_generation" not in scripted.routes

    with_scripted(folder, use)


def test_a_bucket_over_the_group_is_described_and_a_group_left_before_the_next(folder):
    async def use(engine, scripted):
        await engine.pause("drain")
        await engine.begin_update(BUCKETS)
        for name in ("first", "second"):
            await engine.join_group(GroupAddress("127.0.0.1", 1234, 3, "gloo", 5.0, name), 2)
        await engine.receive_bucket(1, None)
        assert scripted.bodies("/init_weights_update_group")[1] == {
            "master_address": "127.0.0.1",
            "master_port": 1234,
            "rank_offset": 2,
            "world_size": 3,
            "group_name": "second",
            "backend": "gloo",
        }
        assert scripted.bodies("/destroy_weights_update_group") == [{"group_name": "first"}]
        [body] = scripted.bodies("/update_weights_from_distributed")
        assert body["names"] == [spec.name for spec in BUCKETS[1].tensors]
        assert set(body["dtypes"]) == {"float32"}
        assert body["shapes"] == [list(spec.shape) for spec in BUCKETS[1].tensors]
        assert (body["group_name"], body["load_format"], body["flush_cache"]) == (
            "second",
            "flattened_bucket",
            False,
        )
        assert body["selector"] == "target"
        with pytest.raises(EngineFailed, match="takes buckets over the process group"):
            await engine.receive_bucket(0, flatten(BUCKETS[0], tiny_qwen3()))

    with_scripted(folder, use)


def address(name):
    return GroupAddress("127.0.0.1", 1234, 3, "gloo", 5.0, name)


def test_a_server_of_the_user_keeps_no_group_of_an_earlier_connection(folder):
    """Each would hold memory on its GPU until it ends."""

    async def use(engine, scripted):
        left = "/destroy_weights_update_group"
        await engine.join_group(address("first"), 2)
        await engine.kill()  # as the fleet does, and connects anew
        await engine.start()
        assert engine.in_group is None
        # it was started again in between
        refusal = {"success": False, "message": "The group to be destroyed does not exist."}
        scripted.answers[left] = [(400, refusal)]
        await engine.join_group(address("second"), 2)
        assert scripted.bodies(left) == [{"group_name": "first"}]
        assert [body["group_name"] for body in scripted.bodies("/init_weights_update_group")] == [
            "first",
            "second",
        ]
        await engine.close()
        assert scripted.bodies(left)[1:] == []
        await engine.start()
        engine.managed = False
        scripted.answers[left] = [(400, refusal)]
        await engine.close()
        assert scripted.bodies(left)[1:] == [{"group_name": "second"}]

    with_scripted(folder, use)


def test_a_server_that_queues_calls_is_told_each_buckets_turn(folder):
    told = INFO | {"internal_states": [{"rlcore_bucket_turns": True}]}

    async def use(engine, scripted):
        await engine.pause("drain")
        await engine.begin_update(BUCKETS)
        await engine.receive_bucket(1, None)
        await engine.receive_bucket(0, None, "xxh3:7")
        formats = [
            body["load_format"] for body in scripted.bodies("/update_weights_from_distributed")
        ]
        assert formats == ["flattened_bucket+turn:1", "flattened_bucket+digest:xxh3:7+turn:0"]

    with_scripted(folder, use, info=told)


def test_out_of_order(folder):
    async def use(engine, scripted):
        with pytest.raises(EngineFailed, match="no weights were published to this engine yet"):
            await engine.generate([request([1])])
        with pytest.raises(EngineFailed, match="only while it is paused; call pause first"):
            await engine.begin_update(BUCKETS)
        await publish(engine, version=5)
        await engine.pause("drain")
        with pytest.raises(EngineFailed, match="version 4 after 5: versions never go back"):
            await engine.set_version(4)
        named = [body["new_version"] for body in scripted.bodies("/update_weight_version")]
        assert named == [f"5{MARK}"]
        with pytest.raises(EngineFailed, match="outside an update; call begin_update first"):
            await engine.load_folder(folder)
        assert "/update_weights_from_disk" not in scripted.routes
        await engine.begin_update(BUCKETS)
        with pytest.raises(EngineFailed, match="bucket 2 of 2"):
            await engine.receive_serialized(2, ["bytes"])
        assert (await engine.health())["version"] is None

    with_scripted(folder, use)


def test_memory_is_released_while_paused_and_takes_the_weights_with_it(folder):
    async def use(engine, scripted):
        await publish(engine)
        with pytest.raises(EngineFailed, match="only while it is paused, and not in_place"):
            await engine.release_memory(["weights"])
        await engine.pause("in_place")
        with pytest.raises(EngineFailed, match="only while it is paused, and not in_place"):
            await engine.release_memory(["weights"])
        await engine.pause("drain")
        await engine.release_memory(["kv_cache"])
        await engine.resume_memory(["kv_cache"])
        assert (await engine.health())["version"] == 1
        await engine.release_memory(["weights"])
        assert scripted.bodies("/release_memory_occupation") == [
            {"tags": ["kv_cache"]},
            {"tags": ["weights"]},
        ]
        with pytest.raises(
            EngineFailed, match="memory of its weights is released, it cannot generate"
        ):
            await engine.resume()
        with pytest.raises(EngineFailed, match="restore it before an update"):
            await engine.begin_update(BUCKETS)
        await engine.resume_memory(["weights"])
        assert scripted.bodies("/resume_memory_occupation") == [
            {"tags": ["kv_cache"]},
            {"tags": ["weights"]},
        ]
        with pytest.raises(EngineFailed, match="no weights were published"):
            await engine.resume()
        await publish(engine, version=2)

    with_scripted(folder, use)


def test_a_new_life_knows_nothing_of_the_last(folder):
    async def use(engine, scripted):
        await publish(engine, version=5)
        await engine.join_group(GroupAddress("127.0.0.1", 1234, 3, "gloo", 5.0, "first"), 2)
        await engine.pause("drain")
        await engine.kill()
        assert engine.in_group is None, "the trainer closes its side"
        await engine.start()
        # at once: nothing waits for a resume
        with pytest.raises(EngineFailed, match="no weights were published"):
            await engine.generate([request([1])])
        with pytest.raises(EngineFailed, match="call pause first"):
            await engine.begin_update(BUCKETS)
        await publish(engine, version=1)

    with_scripted(folder, use)


@pytest.mark.parametrize("info", ["nginx", {}, {k: v for k, v in INFO.items() if k != "device"}])
def test_what_is_no_sglang_does_not_start(folder, info):
    with pytest.raises(
        EngineFailed, match=r"engine engine-3: its /server_info is not that of sglang 0\.5\.23"
    ):
        with_scripted(folder, None, info=info)


def test_requests_go_through_the_users_router_and_everything_else_to_the_server(folder):
    heard = []
    seeds = set()

    async def route(asked):
        body = await asked.json()
        seeds.add(body["sampling_params"]["sampling_seed"])
        heard.append(
            (
                asked.path,
                asked.headers["Authorization"],
                body["input_ids"],
                body["sampling_params"]["max_new_tokens"],
            )
        )
        return web.json_response(completion(3, 4))  # it takes one, and no list

    async def router():
        app = web.Application()
        app.router.add_post("/{path:.*}", route)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def use(engine, scripted):
        await publish(engine)
        [answers] = await engine.generate([request([1, 2], n=2, max_new_tokens=2)])
        assert [answer.tokens.tolist() for answer in answers] == [[3, 4], [3, 4]]
        await engine.abort()
        assert "/generate" not in scripted.routes
        assert scripted.routes[-1] == "/abort_request"

    thread = LoopThread("router")
    runner = thread.call(router(), seconds=10, what="the router")
    with_scripted(folder, use, router_url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    assert heard == [("/generate", "Bearer the-api-key", [1, 2], 2)] * 2
    assert len(seeds) == 2
    thread.call(runner.cleanup(), seconds=10, what="the router")
    thread.close()
