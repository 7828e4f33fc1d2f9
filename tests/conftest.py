"""What holds for every test."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of tests, and their servers, share few cores


def pytest_collection_modifyitems(items):
    """Say which tests stay in one process: ``make test`` divides them between two.

    A server holds 3 to 4 GB. Tests that keep ``ours`` up, and at times ``stock`` beside it, stay together, and so do
    those that have one server of their own: at most three are up at a time. Other tests stay with their file.
    """
    for item in items:
        group = item.path.name
        if item.get_closest_marker("server"):
            group = "session server" if {"ours", "stock"} & set(item.fixturenames) else "one server"
        item.add_marker(pytest.mark.xdist_group(group))
