"""Where an engine of a Ray cluster listens."""

from __future__ import annotations

import pytest
import ray

from rlcore.launch.ray import engine_hosts

OWN = "10.77.0.1"
ROUTES = {"head": "127.0.0.1", "10.77.0.2": OWN, OWN: OWN}


@pytest.mark.parametrize(
    ("mine", "nodes", "expected"),
    [
        pytest.param(OWN, ["10.77.0.2", OWN], OWN, id="an address"),
        pytest.param("head", ["head", "10.77.0.2"], OWN, id="a name that is loopback at home"),
        pytest.param("head", ["head"], "head", id="one node alone"),
        pytest.param("127.0.0.2", ["127.0.0.2", "10.77.0.2"], "127.0.0.2", id="one machine"),
    ],
)
def test_an_engine_listens_where_other_nodes_reach_it(
    monkeypatch: pytest.MonkeyPatch, mine: str, nodes: list[str], expected: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: mine)
    alive = [{"NodeManagerAddress": address, "Alive": True} for address in nodes]
    gone = {"NodeManagerAddress": "10.77.0.9", "Alive": False}
    monkeypatch.setattr(ray, "nodes", lambda: [gone, *alive])
    monkeypatch.setattr(engine_hosts, "route_to", ROUTES.__getitem__)
    assert engine_hosts._address() == expected
