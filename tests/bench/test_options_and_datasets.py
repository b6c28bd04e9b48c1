"""Datasets give the same requests for the same options and say what they leave out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from triptych.bench.datasets import load_dataset
from triptych.bench.options import DatasetName, LoadOptions, Task
from triptych.bench.traces import read_trace
from triptych.errors import ConfigError

MIXED = '[{"width":512,"height":256,"num_inference_steps":20,"weight":0.25},{"width":64,"height":64,"weight":0.75}]'


def test_random_requests_are_the_same_for_the_same_seed_and_no_two_prompts_are_alike() -> None:
    first, _ = load_dataset(LoadOptions(num_prompts=50))
    again, _ = load_dataset(LoadOptions(num_prompts=50))
    other, _ = load_dataset(LoadOptions(num_prompts=50, random_request_seed=7))
    assert first == again
    assert [request.prompt for request in first] != [request.prompt for request in other]
    assert len({request.prompt for request in first}) == 50


def test_random_requests_take_sizes_and_steps_from_the_weighted_kinds() -> None:
    requests, _ = load_dataset(LoadOptions(num_prompts=400, random_request_config=MIXED, num_inference_steps=7))
    large = [request for request in requests if request.width == 512]
    assert 60 < len(large) < 140
    assert {(request.height, request.num_inference_steps) for request in large} == {(256, 20)}
    small = [request for request in requests if request.width == 64]
    assert {(request.height, request.num_inference_steps) for request in small} == {(64, 7)}
    assert len(large) + len(small) == 400


def test_random_requests_carry_a_negative_prompt_only_when_asked() -> None:
    plain, _ = load_dataset(LoadOptions(num_prompts=2))
    negative, _ = load_dataset(LoadOptions(num_prompts=2, enable_negative_prompt=True))
    assert [request.negative_prompt for request in plain] == [None, None]
    assert all(request.negative_prompt for request in negative)


def test_tasks_with_an_input_picture_send_a_png() -> None:
    requests, _ = load_dataset(LoadOptions(num_prompts=1, task=Task.I2I))
    (image,) = requests[0].images
    assert image.mime == "image/png"
    assert image.data.startswith(b"\x89PNG")


def test_a_trace_keeps_its_own_values_and_is_sorted_by_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text(
        "Request(request_id='b', height=512, width=768, num_inference_steps=20, timestamp=2.5, slo_ms=900)\n"
        "\n"
        "Request(height=256.0, width='256', num_frames=None, timestamp=0.5, prompt='a (big) dog', kind='x')\n"
    )
    options = LoadOptions(dataset=DatasetName.TRACE, dataset_path=trace, request_rate=3.0)
    requests, notes = load_dataset(options)
    early, late = requests
    assert (early.prompt, early.width, early.height, early.num_inference_steps) == ("a (big) dog", 256, 256, 50)
    assert (late.width, late.height, late.num_inference_steps, late.slo_ms) == (768, 512, 20, 900.0)
    assert (early.timestamp_s, late.timestamp_s) == (0.5, 2.5)
    assert late.prompt.strip()
    assert any("kind" in note for note in notes)
    assert any("--request-rate" in note for note in notes)


def test_size_flags_win_over_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"width": 512, "height": 512}\n{"width": 64, "height": 64}\n{"seed": 3}\n')
    requests, notes = load_dataset(
        LoadOptions(dataset=DatasetName.TRACE, dataset_path=trace, width=128, height=96, num_prompts=2)
    )
    assert {(request.width, request.height) for request in requests} == {(128, 96)}
    assert any("the first 2 of 3 lines" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request in it"),
        ("Request(width=1)\nnonsense\n", ":2: not a request"),
        ("Request(1, 2)\n", ":1: not a request"),
        ("Request(width=open('x'))\n", ":1: not a request"),
        ("Other(width=1)\n", ":1: not a request"),
        ("Request(width='wide')\n", ":1"),
        ("Request(width=64, height=0)\n", "trace.txt:1: Expected `int` >= 1 - at `$.height`"),
        ("Request()\nRequest(width=-64)\n", "trace.txt:2: Expected `int` >= 1 - at `$.width`"),
        ('{"num_inference_steps": 0}\n', "`$.num_inference_steps`"),
        ('{"num_frames": "0"}\n', "`$.num_frames`"),
        ('{"width": 1\n', ":1: not a request"),
        ("Request(timestamp=1)\nRequest(width=1)\n", "1 of 2 lines"),
    ],
)
def test_a_bad_trace_is_an_error_with_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text(text)
    with pytest.raises(ConfigError, match="trace") as caught:
        read_trace(trace, limit=10)
    assert words in str(caught.value)


def test_prompts_of_a_file_are_repeated_in_order(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n\n  a blue star \n")
    requests, notes = load_dataset(
        LoadOptions(dataset=DatasetName.PROMPTS, dataset_path=prompts, num_prompts=3, seed=4)
    )
    assert [request.prompt for request in requests] == ["a red circle", "a blue star", "a red circle"]
    assert {request.seed for request in requests} == {4}
    assert any("repeated" in note for note in notes)


def test_prompts_may_be_json_lines(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red circle", "seed": 9, "width": 64, "height": 32, "timestamp": 5}\n')
    (request,), _ = load_dataset(LoadOptions(dataset=DatasetName.PROMPTS, dataset_path=prompts, num_prompts=1))
    assert (request.prompt, request.seed, request.width, request.height) == ("a red circle", 9, 64, 32)
    assert request.timestamp_s is None


def test_vbench_reads_a_local_prompt_file_or_a_folder_of_pictures(tmp_path: Path) -> None:
    prompts = tmp_path / "all.txt"
    prompts.write_text("a dog runs\n")
    (request,), _ = load_dataset(
        LoadOptions(dataset=DatasetName.VBENCH, dataset_path=prompts, num_prompts=1, task=Task.T2V)
    )
    assert request.prompt == "a dog runs"
    (tmp_path / "a cat sits.jpg").write_bytes(b"\xff\xd8\xff")
    (request,), _ = load_dataset(
        LoadOptions(dataset=DatasetName.VBENCH, dataset_path=tmp_path, num_prompts=1, task=Task.I2V)
    )
    assert (request.prompt, request.images[0].mime) == ("a cat sits", "image/jpeg")


def test_the_effective_configuration_is_plain_json(tmp_path: Path) -> None:
    plain = LoadOptions(save_dir=tmp_path).as_json()
    assert plain["request_rate"] == "inf"
    assert plain["backend"] == "triptych"
    assert plain["save_dir"] == str(tmp_path)
    assert math.isinf(LoadOptions().request_rate)
