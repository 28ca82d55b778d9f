import itertools
import os

import pytest
import torch


def pytest_configure(config):
    if "not gpu" in config.option.markexpr:  # the same run everywhere; read when CUDA is first used
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Workers of a parallel run share the cores; results do not depend on the number of threads.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


_number = itertools.count()


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory, monkeypatch):
    """No test reads or writes this user's block list, and each starts from the same random state."""
    from metaplastic.ops import dispatch

    folder = tmp_path_factory.getbasetemp() / f"cache-{next(_number)}"  # made by what needs it: few of thousands do
    monkeypatch.setenv("METAPLASTIC_CACHE", str(folder))
    dispatch._blocked.cache_clear()
    dispatch._choose.cache_clear()
    torch.manual_seed(0)
