"""Several devices per replica: trees of tensors between ranks, and that many ranks draw what one draws."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tiny.loras import save_lora
from triptych.engine.collation import gather, split
from triptych.engine.overrides import Override
from triptych.engine.parallel import _parts
from triptych.engine.tensor_trees import Packed, join, pack, rows, unpack

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers and transformers

CPU = torch.device("cpu")


def test_a_tree_of_tensors_travels_as_a_small_message_and_a_block_of_bytes() -> None:
    tree = {
        "hidden": torch.randn(3, 5, dtype=torch.bfloat16),
        "mask": torch.tensor([[True, False, True]]),
        "timestep": torch.tensor(7),
        "expanded": torch.tensor(7).reshape(1).expand(1),
        "list": [torch.arange(6).reshape(2, 3).t(), None, 1.5, "x"],
        "shapes": [[(1, 2, 3)]],
        "nothing": torch.empty(0, 4),
        "dtype": torch.float16,
        "device": CPU,
    }
    packed, values = pack(tree, CPU)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Packed)
    found = unpack(message, values)
    assert found.keys() == tree.keys()
    for name in ("hidden", "mask", "timestep", "expanded", "nothing"):
        assert torch.equal(found[name], tree[name])
        assert found[name].dtype == tree[name].dtype
    assert torch.equal(found["list"][0], tree["list"][0])
    assert (found["list"][1:], found["shapes"]) == ([None, 1.5, "x"], [[(1, 2, 3)]])
    assert (found["dtype"], found["device"]) == (torch.float16, CPU)
    with pytest.raises(TypeError, match="a object cannot travel to another rank"):
        pack([object()], CPU)


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (2, 2), (3, 2), (5, 4), (8, 4)])
def test_samples_are_spread_evenly_and_none_twice(size: int, ranks: int) -> None:
    parts = _parts(size, ranks)
    assert [sample for start, stop in parts for sample in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in parts]
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) <= 1
    assert len(parts) <= ranks


def forward(x: Any, timestep: Any, ids: Any, extra: Any, shapes: Any = None) -> Any:
    """Stands for a model: every sample by itself."""
    rescaled = [item * moment for item, moment in zip(x, timestep, strict=True)]
    return Transformer2DModelOutput(sample=torch.stack(rescaled) + extra["text"] + ids.sum())


def test_parts_of_a_forward_make_up_the_whole() -> None:
    override = Override(samples=("x", "shapes"), shared=("ids",))
    arguments = {
        "x": [torch.randn(4) for _ in range(3)],
        "timestep": torch.tensor(0.5),
        "ids": torch.randn(3, 2),
        "extra": {"text": torch.randn(3, 4)},
        "shapes": [(1, 2)] * 3,
    }
    signature = inspect.signature(forward)
    samples = gather(signature, (), arguments, override=override, digest=lambda tensor: None)
    parts = [forward(**rows(samples, start, stop)) for start, stop in ((0, 1), (1, 3))]
    whole = join(parts[0], [dict(part) for part in parts[1:]], samples_in_lists=True)
    assert torch.equal(whole.sample, forward(**rows(samples, 0, 3)).sample)
    assert type(whole) is Transformer2DModelOutput
    listed = join(([torch.ones(1)], None), [([torch.zeros(1), torch.ones(1)], None)], samples_in_lists=True)
    assert len(listed[0]) == 3
    assert split(listed, (1, 2), samples_in_lists=True)[1][0][0] == 0


SPLIT2, SPLIT4 = {"world_size": 2}, {"cfg_parallel_size": 4}
ULYSSES2, ULYSSES4 = {"ulysses_degree": 2}, {"world_size": 4, "ulysses_degree": 4}
TEAMS = {"world_size": 4, "cfg_parallel_size": 2, "ulysses_degree": 2}
# As many steps each, so that they end in the order in which they began, side by side as well.
UNITS: list[dict[str, Any]] = [
    {"num_inference_steps": 3},
    {"num_inference_steps": 3, "prompt": "a longer prompt", "seed": 6},
]
GUIDED = [unit | {"negative_prompt": "blue", "true_cfg_scale": 3.0} for unit in UNITS]
RUNS: list[tuple[str, dict[str, Any], list[dict[str, Any]], int]] = [
    ("qwen", SPLIT2, GUIDED, 1),  # the guidance branches, which this pipeline calls in turn
    ("qwen", SPLIT4, GUIDED, 2),
    ("qwen", ULYSSES2, UNITS, 2),
    ("qwen", ULYSSES4, UNITS, 1),
    ("qwen", TEAMS, GUIDED, 1),
    ("zimage", SPLIT2, UNITS, 2),  # lists of samples, in and out
]


def ranks_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "tiny.rank_runs", json.dumps(runs)],
        cwd=tests,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_several_ranks_draw_what_one_draws(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    lora = save_lora(model_path("sd15"), tmp_path / "lora.safetensors", seed=1, parts=("unet",))
    runs = [
        {
            "model": str(model_path(family)),
            "slots": slots,
            "units": units,
            "engine_args": {"parallel_config": parallel},
        }
        for family, parallel, units, slots in RUNS
    ]
    styled = {"parallel_config": SPLIT2, "lora_modules": {"x": str(lora)}}
    runs.append(
        {
            "model": str(model_path("sd15")),
            "units": [{}, {"lora": {"name": "x"}}, {}],
            "engine_args": styled,
            "slots": 2,
        }
    )
    for run, answer in zip(runs, ranks_of(runs), strict=True):
        assert answer["difference"] < 1e-5 < answer["changed"] / 10, (run, answer)
        world = max(run["engine_args"]["parallel_config"].values())  # type: ignore[index]
        assert (answer["processes"], answer["left"]) == (world - 1, []), (run, answer)
        assert answer["answers"] >= 3, (run, answer)


def test_a_model_without_a_plan_is_told_what_it_can(model_path: Callable[[str], Path]) -> None:
    from triptych.config.tree import ParallelConfig
    from triptych.engine.base import EngineStartError
    from triptych.engine.parallel import Leader

    leader = Leader((), ParallelConfig(ulysses_degree=2), CPU)
    with pytest.raises(EngineStartError, match=r"ulysses_degree: diffusers has no such plan for unet \(Linear\)"):
        leader.spread({"unet": torch.nn.Linear(1, 1)}, lora=lambda: None)
