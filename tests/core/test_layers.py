"""Who may import whom: core rooms know no SGLang, nothing imports upwards, no two modules need each other."""

import pytest

from tests.support import layers


@pytest.fixture(scope="module")
def package():
    return layers.package_sources()


def test_core_rooms_know_no_sglang(package):
    assert layers.knows_engine(package) == []


def test_nothing_imports_upwards(package):
    assert layers.upwards(package) == []


def test_no_two_modules_need_each_other_to_load(package):
    assert layers.circles(package, late=False) == []


def test_no_import_inside_a_function_hides_a_circle(package):
    assert layers.circles(package, late=True) == []


def test_a_policy_builds_on_few_rooms(package):
    assert layers.policy_reaches(package) == []


def test_the_package_stands_without_tests_benchmarks_and_examples(package):
    assert layers.leaves_package(package) == []


def test_quick_tests_load_no_sglang(package):
    """``make test-fast`` would take half a minute to import it."""
    tests = layers.sources_in("tests")
    quick = {name: text for name, text in tests.items() if name.startswith(("tests.core.", "tests.packaging."))}
    assert layers.loads_engine({**package, **tests}, quick) == []
    fault = planted(tests, "tests.support.bench", "from nexus_sglang.sglang_plugin.scheduler import tree")
    assert "tests.core.test_evictor" in layers.loads_engine({**package, **fault}, quick)


def planted(package, module, line):
    return {**package, module: package[module] + f"\n{line}\n"}


IN_A_FUNCTION = "def hidden():\n    from {} import {}"


@pytest.mark.parametrize(
    "check, module, line, fault",
    [
        ("knows_engine", "eviction.evictor", "import sglang", "nexus_sglang.eviction.evictor imports sglang"),
        (
            "knows_engine",
            "kernels.dispatch",
            IN_A_FUNCTION.format("flashinfer.decode", "Wrapper"),
            "nexus_sglang.kernels.dispatch imports flashinfer.decode",
        ),
        (
            "upwards",
            "kv_slots.page_table",
            "from nexus_sglang.eviction import evictor",
            "nexus_sglang.kv_slots.page_table imports nexus_sglang.eviction.evictor",
        ),
        (
            "upwards",
            "policy.base",
            "from ..kv_slots import page_table",
            "nexus_sglang.policy.base imports nexus_sglang.kv_slots.page_table",
        ),
        (
            "upwards",
            "evaluation.runner",
            IN_A_FUNCTION.format("nexus_sglang.sglang_plugin.entry", "register"),
            "nexus_sglang.evaluation.runner imports nexus_sglang.sglang_plugin.entry",
        ),
        (
            "policy_reaches",
            "policy.nexus",
            "from nexus_sglang.device import upload",
            "nexus_sglang.policy.nexus imports nexus_sglang.device",
        ),
        ("leaves_package", "cli", "from tests.support import bench", "nexus_sglang.cli imports tests.support"),
    ],
)
def test_a_planted_import_is_found(package, check, module, line, fault):
    assert getattr(layers, check)(planted(package, f"nexus_sglang.{module}", line)) == [fault]


PAIR = "nexus_sglang.kv_slots.block_ledger <-> nexus_sglang.kv_slots.capacity"


def test_a_planted_circle_is_found(package):
    there = planted(package, "nexus_sglang.kv_slots.block_ledger", "from . import capacity")
    both = planted(there, "nexus_sglang.kv_slots.capacity", "from .block_ledger import BlockLedger")
    late = planted(there, "nexus_sglang.kv_slots.capacity", IN_A_FUNCTION.format(".block_ledger", "BlockLedger"))
    assert layers.circles(both, late=False) == [PAIR]
    assert layers.circles(late, late=False) == []
    assert PAIR in layers.circles(late, late=True)


def test_a_room_without_a_floor_is_found(package):
    found = layers.upwards({**package, "nexus_sglang.attic": ""})
    assert found == ["nexus_sglang.attic: its room is on no floor"]
