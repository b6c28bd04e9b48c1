"""Device map: chunks in list order, logical ids, CPU slots with threads and cores."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.config import accelerators
from triptych.config.accelerators import Accelerator, discover_accelerators
from triptych.config.devices import Assignment, Machine, assign_devices, check_devices, discover_machine
from triptych.config.tree import StageConfig
from triptych.errors import ConfigError


def stage(*, engine: str = "diffusers", world_size: int = 1, replicas: int = 1, **runtime: Any) -> StageConfig:
    return StageConfig.model_validate(
        {
            "stage_id": 0,
            "stage_type": "diffusion",
            "runtime": {"num_replicas": replicas, **runtime},
            "engine_args": {"engine": engine, "parallel_config": {"world_size": world_size}},
        }
    )


def machine(*, cards: int = 0, cores: int = 4) -> Machine:
    return Machine(
        accelerators=tuple(Accelerator(f"GPU-{n}", "H200", free_bytes=n + 1) for n in range(cards)),
        cores=tuple(range(cores)),
    )


def assign(config: StageConfig, on: Machine, **environ: str) -> tuple[Assignment, ...]:
    return assign_devices(config, on, origin=str, environ=environ)[0]


def test_eight_devices_make_four_replicas_of_two_in_list_order() -> None:
    config = stage(replicas=4, devices=list("01234567"), world_size=2)
    for on in (machine(cards=8), machine(cores=2)):
        assert [part.devices for part in assign(config, on)] == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]


def test_list_order_decides_not_the_size_of_ids() -> None:
    config = stage(replicas=2, devices=list("3102"), world_size=2)
    assert [part.devices for part in assign(config, machine(cards=4))] == [("3", "1"), ("0", "2")]


def test_accelerators_are_named_as_the_visible_devices_variable_wants_them() -> None:
    parts = assign(stage(replicas=2, devices=["1", "0"]), machine(cards=2))
    assert [(part.kind, part.visible_devices, part.free_bytes) for part in parts] == [
        ("cuda", ("GPU-1",), 2),
        ("cuda", ("GPU-0",), 1),
    ]
    assert parts[0].cpu_affinity == ()
    assert parts[0].labels == ("H200 (GPU-1)",)


def test_devices_left_out_are_the_first_visible_ones() -> None:
    parts = assign(stage(replicas=2, world_size=2), machine(cards=8))
    assert [part.devices for part in parts] == [("0", "1"), ("2", "3")]


def test_more_replicas_than_visible_devices_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"runtime.num_replicas: 3 replica\(s\) x 2 .* = 6, but 4 .*wanted at most 2"):
        assign(stage(replicas=3, world_size=2), machine(cards=4))


def test_an_id_out_of_range_says_so_and_names_the_variable() -> None:
    config = stage(replicas=2, devices=["0", "2"])
    with pytest.raises(ConfigError, match=r"runtime.devices: device 2 is out of range: 2 .* wanted ids 0..1"):
        assign(config, machine(cards=2))
    with pytest.raises(ConfigError, match="ids index CUDA_VISIBLE_DEVICES=2,3"):
        assign(config, machine(cards=2), CUDA_VISIBLE_DEVICES="2,3")


def test_simulated_replicas_take_any_names_and_no_cores() -> None:
    parts = assign(stage(replicas=2, devices=["left", "right"], engine="simulated"), machine(cards=1))
    assert [(part.kind, part.devices, part.cpu_affinity) for part in parts] == [
        ("none", ("left",), ()),
        ("none", ("right",), ()),
    ]


def test_cpu_slots_get_threads_and_cores_of_their_own() -> None:
    parts = assign(stage(replicas=2, devices=["7", "40"]), machine(cores=5))
    assert [(part.kind, part.devices, part.cpu_threads, part.cpu_affinity) for part in parts] == [
        ("cpu", ("7",), 2, (0, 1)),
        ("cpu", ("40",), 2, (2, 3)),
    ]


def test_a_replica_of_several_cpu_slots_gets_the_cores_of_all() -> None:
    parts = assign(stage(replicas=2, world_size=2), machine(cores=4))
    assert [part.cpu_affinity for part in parts] == [(0, 1), (2, 3)]


def test_cpu_slots_beyond_the_cores_share_them() -> None:
    parts = assign(stage(replicas=3), machine(cores=2))
    assert [(part.cpu_threads, part.cpu_affinity) for part in parts] == [(1, ())] * 3


def test_cpu_slots_with_more_threads_than_cores_of_their_own_share_them() -> None:
    parts = assign(stage(replicas=2, cpu_threads=4), machine(cores=4))
    assert [(part.cpu_threads, part.cpu_affinity) for part in parts] == [(4, ())] * 2


def test_omp_num_threads_wins_and_says_so() -> None:
    config = stage(replicas=2, cpu_threads=1)
    parts, warnings = assign_devices(config, machine(cores=8), origin=str, environ={"OMP_NUM_THREADS": "3,1"})
    assert parts[0].cpu_threads == 3
    assert warnings == ("runtime.cpu_threads: 1 gives way to OMP_NUM_THREADS=3",)
    assert assign(stage(replicas=2), machine(cores=8), OMP_NUM_THREADS="")[0].cpu_threads == 4


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "99999"])
def test_a_bad_omp_num_threads_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS: .*found '{value}'"):
        assign(stage(), machine(), OMP_NUM_THREADS=value)


def test_counts_name_the_flag_they_come_from() -> None:
    config = stage(replicas=2, devices=["0"])
    with pytest.raises(ConfigError, match=r"^f: runtime.devices: 2 replica\(s\) \(from --num-replicas\) x 1"):
        check_devices(config, origin=lambda key: "--num-replicas" if key == "runtime.num_replicas" else f"f: {key}")


def test_this_machine_has_cores() -> None:
    assert discover_machine({"CUDA_VISIBLE_DEVICES": ""}).cores


# ---- accelerators


CARDS = tuple(accelerators._Card(uuid=f"GPU-{n}{n}-x", name=f"card {n}", free_bytes=n, total_bytes=9) for n in range(4))


@pytest.fixture
def four_cards(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(accelerators, "_nvml_cards", lambda: CARDS)
    monkeypatch.setattr(accelerators, "_torch_build", lambda: "cu128")
    return monkeypatch


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [("0", "card 0"), ("1", "card 1"), ("2", "card 2"), ("3", "card 3")]),
        ("2,3", [("2", "card 2"), ("3", "card 3")]),
        (" 3 , 0", [("3", "card 3"), ("0", "card 0")]),
        ("GPU-22-x,GPU-0", [("GPU-22-x", "card 2"), ("GPU-0", "card 0")]),
        ("MIG-a,MIG-b", [("MIG-a", "MIG instance"), ("MIG-b", "MIG instance")]),
        ("1,-1,2", [("1", "card 1")]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_filters_and_orders(
    four_cards: pytest.MonkeyPatch, variable: str | None, visible: list[tuple[str, str]]
) -> None:
    found, _ = discover_accelerators({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert [(card.visible_name, card.name) for card in found] == visible


@pytest.mark.parametrize("variable", ["4", "0,9", "GPU-zz", "GPU-", "x", "1,1", "0,GPU-00"])
def test_a_bad_cuda_visible_devices_is_an_error(four_cards: pytest.MonkeyPatch, variable: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES: names a device"):
        discover_accelerators({"CUDA_VISIBLE_DEVICES": variable})


def test_cards_that_the_installed_torch_cannot_use_are_left_out_with_a_warning(four_cards: pytest.MonkeyPatch) -> None:
    four_cards.setattr(accelerators, "_torch_build", lambda: "cpu")
    found, warnings = discover_accelerators({})
    assert found == ()
    assert warnings == ("4 GPU(s) are not used: the installed torch is a CPU build",)


def test_the_helper_process_is_asked_where_torch_is_a_rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "_torch_build", lambda: "rocm6.4")
    monkeypatch.setattr(accelerators.Path, "exists", lambda path: True)
    monkeypatch.setattr(accelerators, "_HELPER", "print('[[\"MI300X\", 1, 2]]')")
    accelerators._ask_torch.cache_clear()
    found, warnings = discover_accelerators({})
    accelerators._ask_torch.cache_clear()
    assert found == (Accelerator("0", "MI300X", free_bytes=1, total_bytes=2),)
    assert warnings == ()
