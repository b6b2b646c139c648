"""Two hosts that do not fit each other: found when ranks first meet, and told on all of them, over each transport."""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.fork_server import REPOSITORY
from tests.harness.set_up_on_hosts import SIZE, Case
from tests.harness.two_hosts import run_on_two_hosts

pytestmark = pytest.mark.extended

IN_TIME_S = 60
# Of interfaces of containers, both hosts have one with the same address. Host 0 has two more: host 1 knows no way to
# the first, and sends what is for the second to somebody who does not exist. Gloo calls lower addresses from higher.
INTERFACES = """
interface() {
    ip link add $1 type veth peer name $1-peer && ip link set $1-peer up
    ip addr add $2/24 dev $1 && ip link set $1 up
}
interface docker0 172.17.0.1
if test $HOST_NUMBER = 0; then
    interface inner 10.66.0.1
    interface silent 10.55.0.1
else
    ip route add 10.55.0.0/24 dev wire && ip neigh add 10.55.0.1 lladdr 02:00:00:00:00:99 dev wire
fi
"""
ON_WIRE = {"TRITONDT_SOCKET_IFNAME": "wire"}
DEAR = {"TRITONDT_COSTS": '{"network": {"latency_s": 1.0}}'}
OWN_NAMES = {"MASTER_ADDR": "one"}  # which is 127.0.1.1 there, and so is "two" on the other host


def on(interface: str) -> tuple[dict[str, str], dict[str, str]]:
    """Ranks of host 0 are at another interface."""
    return {"TRITONDT_SOCKET_IFNAME": interface}, {}


NO_WAY = (
    r"could not connect to rank [01]: \[Errno 101\] ENETUNREACH at 10\.66\.0\.1, port \d+, to which no interface of "
    r"this host has a route; there are lo 127\.0\.0\.1, wire 10\.77\.0\.2"
)
ONE_ADDRESS = (
    r"could not connect to rank [01]: (\[Errno 111\] ECONNREFUSED|somebody else answers) at 172\.17\.0\.1, port \d+"
)
BY_GLOO = r"rank \d on (one|two) could not connect by Gloo to ranks \[\d, \d, \d\]: .*"
NO_ANSWER = (
    r"(calls rank \d at 10\.55\.0\.1, port \d+ from wire 10\.77\.0\.2|"
    r"listens for ranks \[[23, ]+\] at 10\.55\.0\.1, port \d+, of silent)"
)
OTHER_COSTS = (
    r'(has no TRITONDT_COSTS, .*first with TRITONDT_COSTS={"network": {"latency_s": 1\.0}}|has TRITONDT_COSTS={.*'
    r"first with no TRITONDT_COSTS); all ranks must plan alike until the process group ends: set TRITONDT_COSTS alike"
)
# Each case and all ranks' sentence.
CASES = [
    (Case("one address", {"TRITONDT_SOCKET_IFNAME": "docker0"}), ONE_ADDRESS),
    (Case("no way", ON_WIRE, on("inner"), begins_with_collective=True), NO_WAY),
    (Case("other costs", ON_WIRE, ({}, DEAR)), OTHER_COSTS),
    (Case("containers", ON_WIRE, are_apart=True), "right"),
]
OVER_GLOO = [
    (Case("own names over Gloo", OWN_NAMES), BY_GLOO + r"remote=\[127\.0\.1\.1\].*wire 10\.77\.0\.[12]"),
    (
        Case("one address over Gloo", {"TRITONDT_SOCKET_IFNAME": "docker0"}, begins_with_collective=True),
        BY_GLOO + r"remote=\[172\.17\.0\.1\]",
    ),
]
MORE_CASES = [
    (Case("no answer", {**ON_WIRE, "TRITONDT_TIMEOUT": "12"}, on("silent")), NO_ANSWER),
    (Case("own names", OWN_NAMES), "right"),
    (Case("one address, collective", {"TRITONDT_SOCKET_IFNAME": "docker0"}, begins_with_collective=True), ONE_ADDRESS),
    (Case("no way, redistribution", ON_WIRE, on("inner")), NO_WAY),
]
MORE_OVER_GLOO = [
    (
        Case("no way over Gloo", ON_WIRE, on("inner")),
        BY_GLOO + r"Network is unreachable; this host has .*wire 10\.77\.0\.2",
    ),
    (Case("no answer over Gloo", {**ON_WIRE, "TRITONDT_TIMEOUT": "12"}, on("silent")), "by Gloo"),
    (Case("own names over Gloo, collective", OWN_NAMES, begins_with_collective=True), BY_GLOO),
    (Case("other costs over Gloo", ON_WIRE, ({}, DEAR), begins_with_collective=True), OTHER_COSTS),
    (Case("containers over Gloo", ON_WIRE, are_apart=True), "right"),
]


def over(transport: str, cases: Sequence[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """The same over one transport."""
    changed = [case._replace(everywhere={**case.everywhere, "TRITONDT_TRANSPORT": transport}) for case, _ in cases]
    return [(case, sentence) for case, (_, sentence) in zip(changed, cases, strict=True)]


def check(folder: Path, before: str, cases: Sequence[tuple[Case, str]]) -> None:
    """All ranks of each case find its sentence, in time; both hosts have run `before` first."""
    program = ["sh", "-c", f'{before}\nexec "$@"', "sh", sys.executable, "-m", "tests.harness.set_up_on_hosts"]
    variables = {"TRITONDT_TIMEOUT": "90", "FOLDER": str(folder), "CASES": json.dumps([case for case, _ in cases])}
    outputs = run_on_two_hosts(folder, program, names=("one", "two"), environment=variables, timeout_s=500.0)
    lines = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith('{"rank"')]
    found = {(line["case"], line["rank"]): (line["found"], line["seconds"]) for line in lines}
    for case, sentence in cases:
        for rank in range(SIZE):
            text, seconds = found[case.name, rank]
            assert re.search(sentence, text), (case.name, rank, text)
            assert text == "right" or seconds < IN_TIME_S, (case.name, rank, seconds)


def test_hosts_that_do_not_fit(tmp_path: Path) -> None:
    check(tmp_path, INTERFACES, [*CASES, *over("gloo", OVER_GLOO)])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("transport", "cases"),
    [("shared-memory", MORE_CASES), ("sockets", [*CASES, *MORE_CASES]), ("gloo", [*OVER_GLOO, *MORE_OVER_GLOO])],
    ids=["shared-memory", "sockets", "gloo"],
)
def test_hosts_that_do_not_fit_over_each_transport(
    tmp_path: Path, transport: str, cases: Sequence[tuple[Case, str]]
) -> None:
    check(tmp_path, INTERFACES, over(transport, cases))


def test_another_version_on_one_host(tmp_path: Path) -> None:
    for name in ("tritondt", "kernels", "tests"):
        shutil.copytree(REPOSITORY / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other" / "tritondt" / "version.py").write_text('VERSION = "0.0.9"\n')
    elsewhere = f'if test $HOST_NUMBER = 1; then cd "{tmp_path}/other"; export PYTHONPATH="$PWD"; fi'
    cases = [
        (Case("another version", ON_WIRE), r"0\.0\.9.*all ranks must plan alike: install one version on all hosts")
    ]
    check(tmp_path, elsewhere, [*cases, *over("gloo", [(cases[0][0]._replace(name="over Gloo"), cases[0][1])])])
