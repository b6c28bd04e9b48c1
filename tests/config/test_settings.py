"""Flags, environment and defaults."""

from __future__ import annotations

import logging

import pytest

from triptych.config.settings import ServeSettings, flag_specs, read_settings
from triptych.errors import ConfigError


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"TRIPTYCH_PORT": "9000", "TRIPTYCH_HOST": "0.0.0.0"}
    settings = read_settings({"port": "9001", "host": None}, environ)
    assert (settings.port, settings.host, settings.max_pixels) == (9001, "0.0.0.0", 4194304)


def test_defaults_are_those_of_the_contract() -> None:
    settings = ServeSettings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert (settings.request_timeout, settings.shutdown_timeout) == (600, 30)
    assert (settings.max_num_frames, settings.max_num_inference_steps) == (257, 1000)
    assert settings.max_body_size == 64 * 1024 * 1024
    assert (settings.num_replicas, settings.devices, settings.max_num_seqs, settings.max_queue_size) == (None,) * 4


def test_lists_are_separated_by_commas_in_the_environment() -> None:
    environ = {
        "TRIPTYCH_SERVED_MODEL_NAME": "a, b",
        "TRIPTYCH_API_KEY": "x,y",
        "TRIPTYCH_DEVICES": "1,0",
        "TRIPTYCH_LORA_MODULES": "one=/a,two=/b=c",
    }
    settings = read_settings({}, environ)
    assert settings.served_model_names == ("a", "b")
    assert settings.api_keys == ("x", "y")
    assert settings.devices == ("1", "0")
    assert settings.lora_modules == {"one": "/a", "two": "/b=c"}


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 64 * 2**20), ("1GB", 10**9), ("1.5 KiB", 1536), ("2048", 2048), ("7b", 7)]
)
def test_body_size_takes_units_and_plain_bytes(text: str, size: int) -> None:
    assert read_settings({"max_body_size": text}, {}).max_body_size == size


def test_what_kubernetes_injects_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_settings({}, {"TRIPTYCH_PORT": "tcp://10.0.0.1:8000"}).port == 8000
    assert "TRIPTYCH_PORT=tcp://10.0.0.1:8000 is ignored" in caplog.text


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert read_settings({}, {"TRIPTYCH_PORT": " "}).port == 8000


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("port", "x", "an integer"),
        ("port", "65536", "at most 65535"),
        ("num_replicas", "0", "at least 1"),
        ("devices", "0,,1", "distinct ids"),
        ("devices", "0,0", "distinct ids"),
        ("request_timeout", "0", "more than 0"),
        ("request_timeout", "nan", "a finite number"),
        ("request_timeout", "inf", "a finite number"),
        ("max_body_size", "64XB", "a size such as 64MiB"),
        ("max_body_size", "-1", "a size such as 64MiB"),
        ("max_body_size", "2TiB", "at most 1099511627776"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("executor", "thread", "'process' or 'ray'"),
    ],
)
def test_a_bad_value_names_the_flag_or_the_variable(field: str, text: str, wanted: str) -> None:
    option = field.replace("_", "-")
    for given, environ, where in (
        ({field: text}, {}, f"--{option}"),
        ({}, {f"TRIPTYCH_{field.upper()}": text}, f"TRIPTYCH_{field.upper()}"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_settings(given, environ)
        assert str(caught.value).startswith(f"{where}: ")
        assert f"found '{text}'" in str(caught.value)
        assert f"wanted {wanted}" in str(caught.value)


def test_a_bad_element_of_a_list_and_a_bad_switch_are_told() -> None:
    with pytest.raises(ConfigError, match=r"^TRIPTYCH_LORA_MODULES: 'a' names no path; found 'a'; wanted NAME=PATH$"):
        read_settings({}, {"TRIPTYCH_LORA_MODULES": "a"})
    with pytest.raises(ConfigError, match="--lora-modules: name 'a' is given twice"):
        read_settings({"lora_modules": ["a=1", "a=2"]}, {})
    with pytest.raises(ConfigError, match=r"^TRIPTYCH_DRY_RUN: .*wanted true or false"):
        read_settings({}, {"TRIPTYCH_DRY_RUN": "maybe"})


@pytest.mark.parametrize(
    ("field", "text"),
    [("max_body_size", "9" * 400), ("max_body_size", f"{'9' * 400}.5MiB"), ("port", "9" * 5000)],
)
def test_an_absurd_number_is_one_short_message(field: str, text: str) -> None:
    variable = f"TRIPTYCH_{field.upper()}"
    with pytest.raises(ConfigError, match=rf"^{variable}: .*99\.\.\.") as caught:
        read_settings({}, {variable: text})
    assert len(str(caught.value)) < 500


def test_a_setting_is_named_by_where_it_came_from() -> None:
    settings = read_settings({"port": "1", "host": None}, {"TRIPTYCH_HOST": "::1", "TRIPTYCH_PORT": "2"})
    names = [settings.named(field) for field in ("port", "host", "api_keys", "model")]
    assert names == ["--port", "TRIPTYCH_HOST", "--api-key", "MODEL"]
    assert read_settings({"model": "x"}, {}, options={"model": "--model"}).named("model") == "--model"
    assert settings.model_copy(update={"port": 3}).named("host") == "TRIPTYCH_HOST"


def test_limits_are_those_that_were_set() -> None:
    given = {"max_pixels": "1", "max_num_frames": "2", "max_num_inference_steps": "3", "request_timeout": "4"}
    limits = read_settings(given, {}).limits()
    assert (limits.max_pixels, limits.max_num_frames, limits.max_num_inference_steps) == (1, 2, 3)
    assert limits.request_timeout_s == 4


def test_keys_never_show() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({}, {"TRIPTYCH_API_KEY": "s3cret,,"})
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(ServeSettings(api_keys=("s3cret",), admin_api_key="s3cret"))


def test_every_flag_has_help_and_a_variable_of_its_own() -> None:
    specs = flag_specs()
    assert all(spec.flag.help for spec in specs)
    assert len({spec.variable for spec in specs}) == len(specs) == len(ServeSettings.model_fields)
    names = {spec.option for spec in specs}
    assert {"--served-model-name", "--api-key", "--lora-modules", "--stage-configs-path", "MODEL"} <= names
