"""Which address of a host ranks of other hosts are given: variables, interfaces, routes, and never the loopback's."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import tritondt as T
from tritondt.comm import processes
from tritondt.comm.processes import machine
from tritondt.comm.transports import gloo, interfaces
from tritondt.comm.transports.interfaces import (
    InterfaceFilter,
    address_towards,
    asked_filter,
    asked_interface,
    outer_addresses,
)

VARIABLES = ("TRITONDT_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
FOUND = [
    ("lo", "127.0.0.1"),
    ("docker0", "172.17.0.1"),
    ("eth0", "10.0.0.1"),
    ("eth10", "10.0.10.1"),
    ("eth1", "10.0.1.1"),
    ("ib0", "10.1.0.1"),
    ("lo", "::1"),
    ("eth0", "fd00::1"),
    ("eth0", "fe80::1"),
    ("own", "127.0.1.1"),
]
OUTER = ["10.0.0.1", "10.0.10.1", "10.0.1.1", "10.1.0.1"]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: FOUND)


def test_without_a_variable_containers_come_last_and_loopback_addresses_never() -> None:
    assert outer_addresses() == [*OUTER, "172.17.0.1", "fd00::1"]


@pytest.mark.in_ci(20)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eth1", ["10.0.1.1", "10.0.10.1"]),
        ("=eth1", ["10.0.1.1"]),
        ("ib,eth0", ["10.1.0.1", "10.0.0.1", "fd00::1"]),
        ("=eth10, ib0", ["10.0.10.1", "10.1.0.1"]),
        ("docker", ["172.17.0.1"]),
        ("^eth", ["10.1.0.1", "172.17.0.1"]),
        ("^=eth1", [*OUTER[:2], *OUTER[3:], "172.17.0.1", "fd00::1"]),
        ("^=eth1,docker0,ib0", ["10.0.0.1", "10.0.10.1", "fd00::1"]),
        ("lo", []),
        ("own", []),
        ("wlan", []),
    ],
)
def test_a_variable_names_interfaces_as_nccl_documents(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", text)
    assert outer_addresses() == expected


def test_the_first_variable_that_is_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "=eth1", "TRITONDT_SOCKET_IFNAME": "=eth10"}
    addresses = []
    for variable, text in chosen.items():
        monkeypatch.setenv(variable, text)
        addresses += outer_addresses()
    assert addresses == ["10.1.0.1", "10.0.1.1", "10.0.10.1"]
    monkeypatch.setenv("TRITONDT_SOCKET_IFNAME", "")
    assert outer_addresses() == ["10.0.1.1"]


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("text", ["^", "=", "^=", ",", " "])
def test_a_value_that_names_no_interface(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(T.WorldError) as told:
        asked_filter()
    assert str(told.value) == (
        f"{variable}={text!r} is set; allowed is a list of interfaces or of beginnings of their names, such as "
        "eth,ib0, with = in front for whole names, and ^ in front of all for every interface but those"
    )


def test_what_has_no_address_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces.no_address().startswith(
        "its interfaces have no address that another host could reach: lo 127.0.0.1, docker0 172.17.0.1"
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interfaces.no_address().startswith(
        "GLOO_SOCKET_IFNAME='lo' names no interface with an address that another host could reach; there are lo 127.0"
    )


def test_the_filter_of_no_name_is_none() -> None:
    assert InterfaceFilter.parse("") is None


def test_the_address_of_a_route_counts_where_it_is_allowed() -> None:
    assert address_towards(["127.0.0.1"], ["127.0.0.1"]) == "127.0.0.1"
    assert address_towards(["127.0.0.1"], ["10.0.0.1"]) is None
    assert address_towards(["no.such.host.invalid", "127.0.0.1"], ["127.0.0.1"]) == "127.0.0.1"


def test_the_interfaces_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ("lo", "127.0.0.1") in vars(interfaces)["interface_addresses"]()


def test_a_machine_is_more_than_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Containers on one kernel may share names, hosts of one image, too; each kernel numbers its namespaces."""
    here = machine()
    assert machine() == here
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another kernel\n")
    found = {here}
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_BOOT_ID", boot_id)
        found.add(machine())
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_NAMESPACES", tmp_path)
        found.add(machine())
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    found.add(machine())
    assert len(found) == 4


@pytest.mark.in_ci(20)
@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("TRITONDT_SOCKET_IFNAME", "eth1", "eth1"),
        ("TRITONDT_SOCKET_IFNAME", "=ib0", "ib0"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", "eth0"),
        ("TRITONDT_SOCKET_IFNAME", "lo", "lo"),
        ("GLOO_SOCKET_IFNAME", "eth1", None),
    ],
)
def test_gloo_is_given_the_first_interface_that_a_variable_names(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: str | None
) -> None:
    assert asked_interface() is None
    monkeypatch.setenv(variable, text)
    assert asked_interface() == expected


def test_gloo_connects_where_our_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")  # which Gloo refuses
    monkeypatch.setenv("TRITONDT_SOCKET_IFNAME", "lo")
    assert gloo._group(dist.HashStore(), 0, 1, timedelta(seconds=7)).size() == 1


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONDT_SOCKET_IFNAME", "absent0")
    with pytest.raises(T.WorldError, match=r"SOCKET_IFNAME='absent0' names no interface of this host; .* lo 127"):
        asked_interface()
