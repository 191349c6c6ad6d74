"""Two processes that hold a worker each, then half of both: the numbers of one."""

import os
import sys

import numpy as np
import pytest
import sharded_program as program

from experiments.launch import launch


def read(folder, n=0):
    with np.load(folder / f"{n}.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """What one process found alone, and what each of two did."""
    alone, folder = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("two")
    program.main(alone)
    before = os.environ | {}
    os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        command = [sys.executable, program.__file__, str(folder)]
        assert launch(command, 2, devices=2) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    return read(alone), [read(folder, n) for n in range(2)]


def of(method, when, found):
    return {k: x for k, x in found.items() if k.startswith(f"{method} {when} ")}


def workers(parts):
    """Whose they are: a name ends in places such as ``[(1, 2), (0, 8)]``."""
    return {name.rpartition(" [(")[2][0] for name in parts}


@pytest.mark.parametrize("method", program.METHODS)
def test_each_process_holds_its_part_of_what_one_process_has(group, method):
    alone, each = group
    assert [workers(of(method, "saved", found)) for found in each] == [{"0"}, {"1"}]
    assert [workers(of(method, "ended", found)) for found in each] == [{"0", "1"}] * 2
    for when in ("saved", "ended"):
        both = [of(method, when, found) for found in each]
        assert both[0].keys() | both[1].keys() == of(method, when, alone).keys()
        for name, part in (both[0] | both[1]).items():
            # Sums of two have one order, on one machine and between processes.
            np.testing.assert_array_equal(part, alone[name], err_msg=name)


@pytest.mark.parametrize("method", program.METHODS)
def test_what_is_restored_is_what_was_saved(group, method):
    _, each = group
    for found in each:
        for name, part in of(method, "saved", found).items():
            again = found[name.replace(" saved ", " same ")]
            np.testing.assert_array_equal(again, part, err_msg=name)
