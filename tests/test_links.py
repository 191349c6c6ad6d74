"""Shaped links: what is counted and predicted, and one real run where it can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.links import (
    calibration,
    counters,
    ddp,
    hosts,
    namespaces,
    race,
    tables,
    wire,
)
from experiments.links.__main__ import main
from experiments.links.counters import HEADERS, Counters
from experiments.links.hosts import PACKET, Host, connecting, shaping
from experiments.links.job import Broken, Job
from experiments.links.methods import TIMED, racing
from lowcomm.ledger import Row, Traffic
from lowcomm.network import Link, collective_seconds

DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
    lo:     100       2    0    0    0     0          0         0      100       2 0 0
  eth0: 1837568    1300    0    0    0     0          0         0  2000000    1400 0 0
"""
SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 2 64
Tcp: RtoAlgorithm InSegs OutSegs RetransSegs
Tcp: 1 1300 1400 7
"""


def test_counters_are_those_of_what_the_interface_sent():
    assert counters.parse(DEV, SNMP, "eth0") == Counters(2_000_000, 1400, 7)


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match=r"'eth1', only \['eth0', 'lo'\]"):
        counters.parse(DEV, SNMP, "eth1")


def test_payload_is_what_was_handed_over_however_it_was_cut():
    # 100,000 bytes in segments of 1,448, and 30 acknowledgements of nothing.
    whole, rest = divmod(100_000, 1448)
    segments = [1448] * whole + [rest] + [0] * 30
    sent = Counters(sum(HEADERS + n for n in segments), len(segments), 0)
    assert sent.payload == 100_000


@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_a_ring_puts_on_the_wire_what_its_formula_says(k):
    parts, sent = np.zeros((k, k)), np.zeros(k, int)
    values = np.arange(k * k, dtype=float).reshape(k, k)
    parts[:] = values
    for phase in range(2):
        for turn in range(k - 1):
            now = parts.copy()
            for host in range(k):  # each hands one part of k entries to the next
                part, to = (host - turn + phase) % k, (host + 1) % k
                heard = now[host, part]
                parts[to, part] = heard if phase else now[to, part] + heard
                sent[host] += 1
    np.testing.assert_array_equal(parts, np.tile(values.sum(0), (k, 1)))
    volume, messages = wire.volume("all_reduce", k, hosts=k)
    assert (sent == volume).all()
    assert (2 * sent == messages).all()  # in two segments each


def test_what_is_expected_counts_every_message_as_often_as_it_ran():
    rows = (
        Row("all_gather", "workers", "uint8", 1000),
        Row("permute", "workers", "float32", 400),
    )
    # Three gathers of 2 · 1000 bytes in 4 messages, five permutations in one each.
    assert wire.expected(Traffic(rows), [3, 5], hosts=3) == (
        3 * (2000 + 4 * wire.MESSAGE) + 5 * (400 + wire.MESSAGE)
    )
    with pytest.raises(ValueError, match="'broadcast' is none of"):
        wire.volume("broadcast", 1, hosts=2)


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "permute"])
@pytest.mark.parametrize("k", [2, 4])
def test_a_fitted_link_takes_as_long_as_the_probes_did(collective, k):
    link = Link(bandwidth=50e6, latency=0.0002)
    price = lambda nbytes, link: collective_seconds(
        collective, nbytes, workers=k, link=link, algorithm=calibration.ALGORITHM
    )
    n = 1 << 20
    found = calibration.fit(collective, price(0, link), price(n, link), n, k)
    for nbytes in (0, 10_000, n):
        assert price(nbytes, found) == pytest.approx(price(nbytes, link), rel=0.01)


def test_a_probe_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="measure again on a quiet machine"):
        calibration.fit("permute", 0.004, 0.003, 1 << 20, 2)


def test_only_the_first_collective_of_a_step_finds_hosts_that_were_computing():
    one = {"collective": "permute", "bytes": 1_000_000}
    links = {
        "permute": Link(1e6),  # one way at a time
        "permute" + calibration.AFTER: Link(2e6),
    }
    talking = lambda steps: calibration.talking(steps, links, hosts=2)
    assert talking([[one], [], [one]]) == pytest.approx(16.0)
    assert talking([[one, one]]) == pytest.approx(12.0)
    assert calibration.computing([17.0, 99.0, 13.0], [[one]], links, 2) == (
        pytest.approx(9.0)
    )


def test_both_ends_of_a_cable_are_shaped_and_two_packets_fit_the_bucket():
    for rate in (1e6, 50e6, 1e9):
        inside, outside = shaping(Host(holder=7, number=3), rate)
        assert inside.startswith("nsenter --target=7 --net")
        assert "dev eth0" in inside
        assert "dev port3" in outside
        assert f"rate {int(rate)}bit" in inside
        assert int(inside.split("burst ")[1].split()[0]) >= 2 * PACKET
    assert connecting(Host(7, 3))[0].endswith("peer name eth0 netns 7")


def test_the_machine_s_own_network_is_never_touched():
    with (
        pytest.raises(RuntimeError, match="would change the machine's network"),
        hosts.network(2),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("os.geteuid", lambda: 1000), "only root"),
        (("shutil.which", lambda name: None), "tc not found"),
        (("sys.platform", "darwin"), "this is darwin"),
    ],
)
def test_where_no_link_can_be_the_reason_is_said(monkeypatch, capsys, change, reason):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(*change)
    assert main(["--task", "toy"]) == namespaces.SKIPPED
    assert reason in capsys.readouterr().err


def test_one_host_talks_to_nobody(capsys):
    assert main(["--processes", "1"]) == 2
    assert "2 or more" in capsys.readouterr().err


def test_a_command_that_fails_says_what_it_said():
    with pytest.raises(namespaces.Refused, match=r"`ls /nowhere`: .*cannot access"):
        namespaces.run("ls /nowhere")


class Here(Host):
    """A host that is this machine itself."""

    def command(self, command: str) -> str:
        return command


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such luck')", "host1 ended.*no such luck"),
        ("input(); import sys; sys.exit('mid-way')", "while it was to do.*mid-way"),
    ],
)
def test_a_process_that_ends_is_named_with_its_last_words(program, message):
    code = "import os\nif os.environ['RANK'] == '0': input(); print('{}'); input()\n"
    command = [sys.executable, "-c", f"{code}else:\n  {program}"]
    with Job([Here(0, 0), Here(0, 1)], command) as job:
        ask = lambda: [job.ask("anything", patience=20) for _ in range(2)]
        with pytest.raises(Broken, match=f"(?s){message}"):
            ask()


def test_all_answers_come_in_the_order_of_the_hosts():
    program = "import os\nwhile input(): print(os.environ['RANK'], flush=True)"
    with Job([Here(0, 0), Here(0, 1)], [sys.executable, "-c", program]) as job:
        assert job.ask("anything", patience=20) == [0, 1]
        processes = job.processes
    assert all(process.poll() is not None for process in processes)


def test_a_racing_method_needs_its_period_and_no_other():
    with pytest.raises(ValueError, match="diloco / 30"):
        racing("diloco")
    with pytest.raises(ValueError, match="'sign'"):
        racing("sign / 8")


def test_a_table_says_how_far_off_predictions_were():
    timed = lambda median, predicted: {"median": median, "predicted": predicted}
    at = lambda rate, *pair: {"asked": rate, "methods": {"one": timed(*pair)}}
    found = {"rates": {"b": at(5e7, 1, 1.1), "c": at(1e9, 1, 1.2), "d": at(2e7, 2, 2)}}
    said = "Predicted seconds are off by 10.0 % in the median and 20.0 % at most"
    assert tables.summary(found).startswith(said)


def test_a_race_says_how_many_times_sooner_and_who_never_came():
    end = lambda step, seconds, loss: [{"step": step, "seconds": seconds, "loss": loss}]
    found = {
        "asked": 5e7,
        "targets": [2.1, 2.2],
        "chosen": "quick / 30",
        "expected": {"data_parallel": 70.0, "quick / 30": 5.0},
        "advice": "none",
        "curves": {
            "data_parallel": [end(200, 60.0, 2.1), end(200, 80.0, 2.2)],
            "quick / 30": [end(240, 6.0, 2.0), end(210, 4.0, 2.2)],
            "late": [end(240, 6.0, 2.0), end(600, 4.0, 2.3)],
        },
    }
    rows = [line for line in race.markdown(found).splitlines() if line[:1] == "|"]
    assert rows[3].startswith("| **quick / 30** | 2.000 / 2.200 | 240 / 210 | 25.0 ms")
    assert rows[3].endswith("| 15.0 × |")  # the mean of 10 and 20
    assert rows[4].endswith("| not reached |")


def test_without_pytorch_it_is_said_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(SystemExit, match="no PyTorch: pip install torch"):
        ddp.torch()


def test_a_shaped_link_is_as_slow_as_asked_and_the_kernel_counts_what_is_sent(
    tmp_path,
):
    if reason := namespaces.why_not():
        pytest.skip(reason)
    rate, names = 100e6, ("data_parallel", "sign_sgd")
    assert set(names) <= set(TIMED)
    before = Path("/etc/hosts").read_text(), sorted(os.listdir("/sys/class/net"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.links", "--task", "toy"),
            *("--rate", "100Mbit", "--methods", *names),
            *("--seconds", "0.2", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert before == (
        Path("/etc/hosts").read_text(),
        sorted(os.listdir("/sys/class/net")),
    )
    found = json.loads((tmp_path / "toy-2.json").read_text())
    shaped = found["rates"]["1e+08"]
    assert 0.85 * rate <= shaped["obtained"] <= rate
    assert found["unshaped"]["obtained"] > rate
    for name in names:
        read = found["readings"][name]
        assert read["formula"] == read["compiled"] == read["meter"]
        one = shaped["methods"][name]
        for kernel in one["kernel"]:  # of each host
            assert kernel == pytest.approx(read["wire"], rel=0.03)
        # No host sends faster than its link.
        assert read["wire"] * 8 / min(one["seconds"]) <= 1.05 * rate
    assert (tmp_path / "toy-2.md").read_text().startswith("Bytes that a worker")
