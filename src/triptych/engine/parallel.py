"""One forward on several devices: the leader's side, and the loop of its followers.

By batch, which needs nothing from the model: the samples of a forward (guidance branches, and requests that share it)
are spread over the ranks, each runs its part, the leader joins the outputs. By sequence or by weight, through plans of
diffusers: every rank gets all arguments and runs the same forward. Both: teams of ranks get parts, and each team runs
its own by the plan. Small messages go over a channel per follower, tensors over `torch.distributed`, as bytes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import diffusers
import msgspec
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from triptych.config.tree import EngineArgs, ParallelConfig
from triptych.engine.base import EngineStartError
from triptych.engine.collation import Samples, Unmergeable, gather
from triptych.engine.failures import is_out_of_memory, one_line
from triptych.engine.loading import device_of, load_pipeline, locate_model
from triptych.engine.overrides import override_of
from triptych.engine.ranks import Follower, Followers, fork_ranks
from triptych.engine.switches import denoisers
from triptych.engine.tensor_trees import Packed, join, pack, rows, unpack
from triptych.messages import ReplicaSpec

__all__ = ["Leader", "fork_followers"]

_log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where ranks listen for each other
_JOIN_TIMEOUT = timedelta(hours=1)  # the slowest rank may load that long; the watchdog bounds it for all
_REPORT_S = 30.0  # between the leader's failure in a shared forward and those of its followers


class _Join(msgspec.Struct, frozen=True, tag=True):
    port: int


class _Loaded(msgspec.Struct, frozen=True, tag=True):
    error: str | None = None


class _Forward(msgspec.Struct, frozen=True, tag=True):
    """Run a model on these arguments; `state` is that of its LoRAs."""

    model: str
    arguments: Packed
    state: tuple[str, float] | None = None


class _Done(msgspec.Struct, frozen=True, tag=True):
    output: Packed | None = None
    error: str | None = None
    out_of_memory: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Join | _Loaded | _Forward | _Done).decode


def _team_size(parallel: ParallelConfig) -> int:
    """Ranks that run the same samples by a plan of the model; 1: there is no plan, only parts."""
    return parallel.ulysses_degree * parallel.ring_degree * parallel.tensor_parallel_size


def fork_followers(spec: ReplicaSpec, args: EngineArgs) -> Followers:
    """The further ranks of a replica, waiting to be told to load; none for one device."""
    title = f"triptych: stage {spec.stage_id} replica {spec.replica_id}"
    count = args.parallel_config.devices_per_replica - 1
    return fork_ranks(count, title, functools.partial(_follow, spec=spec, args=args))


class Leader:
    """Rank 0: lets the followers load with `begin`, and shares forwards with them after `spread`."""

    def __init__(self, followers: Sequence[Follower], parallel: ParallelConfig, device: torch.device) -> None:
        self._followers = followers
        self._parallel = parallel
        self._team_size = _team_size(parallel)
        self._teams = (len(followers) + 1) // self._team_size
        self._device = device
        self._store: Any = None
        self._group: _Group

    def begin(self) -> None:
        """Let the followers load."""
        # A port that the kernel chooses, so replicas never meet, and nobody outside this machine can reach.
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            _HOST,
            port,
            len(self._followers) + 1,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        for follower in self._followers:
            follower.channel.send_bytes(_encode(_Join(port)))

    def spread(self, models: dict[str, Any], *, lora: Callable[[], Hashable]) -> None:
        """Run the forwards of `models` on all ranks from now on, with the state of LoRAs that `lora` tells.

        Waits until every rank has loaded. Raises `EngineStartError`.
        """
        _check_plans(models, self._parallel)
        for follower in self._followers:
            with _end_without(follower):
                message = _decode(follower.channel.recv_bytes())
            assert isinstance(message, _Loaded)
            if message.error is not None:
                raise EngineStartError(f"rank {follower.rank}: {message.error}")
        self._group = _Group(self._store, 0, len(self._followers) + 1, self._device)
        self._group.apply_plans(models, self._parallel)
        for name, model in models.items():
            self._replace(name, model, lora)

    def close(self) -> None:
        """Give up the process group (for tests and embedding)."""
        distributed.destroy_process_group()

    def _replace(self, name: str, model: Any, state: Callable[[], Hashable]) -> None:
        forward = model.forward
        run = self._share if self._teams == 1 else self._split
        in_lists = bool(override_of(type(model)).samples)
        gathered = functools.partial(
            gather, inspect.signature(forward), override=override_of(type(model)), digest=lambda tensor: None
        )

        @functools.wraps(forward)
        def shared(*args: Any, **kwargs: Any) -> Any:
            try:
                samples = gathered(args, kwargs)
            except (Unmergeable, TypeError):
                if self._team_size == 1:
                    return forward(*args, **kwargs)
                raise
            return run(name, forward, samples, state(), in_lists)

        model.forward = shared

    def _split(self, name: str, forward: Callable[..., Any], samples: Samples, state: Hashable, in_lists: bool) -> Any:
        parts = _parts(samples.size, self._teams)
        busy = self._followers[: len(parts) * self._team_size - 1]
        packed = {
            team: pack(rows(samples, *part), self._device)
            for team, part in enumerate(parts)
            if team or self._team_size > 1
        }
        for follower in busy:
            arguments, values = packed[follower.rank // self._team_size]
            with _end_without(follower):
                follower.channel.send_bytes(_encode(_Forward(name, arguments, _state(state))))
                self._group.send(values, follower.rank)
        error: Exception | None = None
        try:
            first = forward(**rows(samples, *parts[0]))
        except Exception as failure:  # noqa: BLE001 - raised below, after the followers' answers are read
            error = failure
            self._require_answers(busy[: self._team_size - 1], error)
        answers = [self._answer(follower) for follower in busy]
        if error is not None:
            raise error
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        others = [answer for answer in answers if answer is not None]
        return join(first, others, samples_in_lists=in_lists) if others else first

    def _share(self, name: str, forward: Callable[..., Any], samples: Samples, state: Hashable, in_lists: bool) -> Any:
        packed, values = pack(samples.arguments, self._device)
        message = _encode(_Forward(name, packed, _state(state)))
        for follower in self._followers:
            with _end_without(follower):
                follower.channel.send_bytes(message)
        with _end_without(self._followers[0]):
            self._group.broadcast(values)
        try:
            output = forward(**samples.arguments)
        except Exception as error:
            self._require_answers(self._followers, error)
            for follower in self._followers:
                self._answer(follower)
            raise
        for follower in self._followers:
            if isinstance(answer := self._answer(follower), Exception):
                raise answer
        return output

    def _require_answers(self, team: Sequence[Follower], error: Exception) -> None:
        """What stops every rank alike leaves them together; what stopped this one alone leaves the others waiting."""
        if not all(follower.channel.poll(_REPORT_S) for follower in team):
            _log.critical("rank 0 failed in a shared forward, and the replica ends with it", exc_info=error)
            os._exit(1)

    def _answer(self, follower: Follower) -> Any:
        """Output of a follower, or the exception that it met."""
        with _end_without(follower):
            done = _decode(follower.channel.recv_bytes())
        assert isinstance(done, _Done)
        if done.error is not None:
            kind = torch.OutOfMemoryError if done.out_of_memory else RuntimeError
            return kind(f"rank {follower.rank}: {done.error}")
        if done.output is None:
            return None
        with _end_without(follower):
            values = self._group.receive(done.output.size, follower.rank)
        return unpack(done.output, values)


@contextmanager
def _end_without(follower: Follower) -> Iterator[None]:
    """End this process if a rank cannot be reached: no request is at fault, so none may be told of it."""
    try:
        yield
    except (EOFError, OSError, RuntimeError) as error:
        _log.error("rank %d cannot be reached, and the replica ends: %s", follower.rank, one_line(error))
        os._exit(1)


def _state(state: Hashable) -> tuple[str, float] | None:
    return state if isinstance(state, tuple) else None


def _parts(size: int, ranks: int) -> list[tuple[int, int]]:
    """Ranges of samples, as even as can be; no more than there are samples."""
    ranks = min(ranks, size)
    bounds = [size * rank // ranks for rank in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


def _follow(rank: int, channel: Connection, *, spec: ReplicaSpec, args: EngineArgs) -> None:
    """The life of a follower: load, then forwards until the leader ends."""
    message = _decode(channel.recv_bytes())
    assert isinstance(message, _Join)
    try:
        pipe, loras = load_pipeline(spec, args, locate_model(spec), rank=rank)
    except EngineStartError as error:
        channel.send_bytes(_encode(_Loaded(str(error))))
        channel.recv_bytes()  # the leader tells the server, and ends this process with its own
        return
    models, device = denoisers(pipe), device_of(spec, rank)
    world, team_size = args.parallel_config.devices_per_replica, _team_size(args.parallel_config)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        _HOST, message.port, world, is_master=False
    )
    channel.send_bytes(_encode(_Loaded()))
    group = _Group(store, rank, world, device)
    group.apply_plans(models, args.parallel_config)
    while True:
        asked = _decode(channel.recv_bytes())
        assert isinstance(asked, _Forward)
        size = asked.arguments.size
        values = group.broadcast_in(size) if team_size == world else group.receive(size, 0)
        if asked.state != loras.active:
            loras.activate(asked.state)
        output, failure = _outcome(models[asked.model], unpack(asked.arguments, values))
        if failure is not None:
            channel.send_bytes(_encode(_Done(error=one_line(failure), out_of_memory=is_out_of_memory(failure))))
        elif rank % team_size == 0:
            packed, values = pack(output, device)
            channel.send_bytes(_encode(_Done(packed)))
            group.send(values, 0)
        else:
            channel.send_bytes(_encode(_Done()))


@torch.no_grad()
def _outcome(model: Any, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    try:
        return model.forward(**arguments), None
    except Exception as error:  # noqa: BLE001 - told to the leader, whose request it is
        _log.warning("a forward failed", exc_info=error)
        return None, error.with_traceback(None)


class _Group:
    """The process group of one replica, and what goes through it: blocks of bytes."""

    def __init__(self, store: Any, rank: int, world: int, device: torch.device) -> None:
        self._device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for variable in _INTERFACES:
            os.environ.setdefault(variable, "lo")
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_JOIN_TIMEOUT)

    def send(self, values: torch.Tensor, rank: int) -> None:
        if values.numel():
            distributed.send(values, rank)

    def receive(self, size: int, rank: int) -> torch.Tensor:
        values = torch.empty(size, dtype=torch.uint8, device=self._device)
        if size:
            distributed.recv(values, rank)
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        distributed.broadcast(values, 0)
        return values

    def broadcast_in(self, size: int) -> torch.Tensor:
        return self.broadcast(torch.empty(size, dtype=torch.uint8, device=self._device))

    def apply_plans(self, models: dict[str, Any], parallel: ParallelConfig) -> None:
        """Let diffusers share the forwards of `models` by its plans, if that is what `parallel` says."""
        if _team_size(parallel) == 1:
            return
        mesh = _mesh(parallel, self._device)
        for name, model in models.items():
            with _device_count():
                try:
                    model.enable_parallelism(config=_plan(parallel, mesh))
                except Exception as error:
                    raise EngineStartError(f"engine_args.parallel_config: {name}: {one_line(error)}") from error


def _mesh(parallel: ParallelConfig, device: torch.device) -> Any:
    """The ranks of each team, by the names of diffusers' plans; None for one team: diffusers takes all ranks."""
    teams = parallel.cfg_parallel_size
    if teams == 1:
        return None
    if parallel.tensor_parallel_size > 1:
        return init_device_mesh(device.type, (teams, parallel.tensor_parallel_size), mesh_dim_names=("batch", "tp"))[
            "tp"
        ]
    shape = (teams, parallel.ring_degree, parallel.ulysses_degree)
    return init_device_mesh(device.type, shape, mesh_dim_names=("batch", "ring", "ulysses"))["ring", "ulysses"]


def _plan(parallel: ParallelConfig, mesh: Any) -> Any:
    if parallel.tensor_parallel_size > 1:
        return diffusers.TensorParallelConfig(tp_degree=parallel.tensor_parallel_size, mesh=mesh)
    # Text of any length: without "anything" it would have to be a multiple of the degree.
    return diffusers.ContextParallelConfig(
        ulysses_degree=parallel.ulysses_degree,
        ring_degree=parallel.ring_degree,
        ulysses_anything=parallel.ulysses_degree > 1,
        ring_anything=parallel.ring_degree > 1,
        mesh=mesh,
    )


@contextmanager
def _device_count() -> Iterator[None]:
    """diffusers counts accelerators, and divides by their number; CPUs are one."""
    if torch.accelerator.device_count():
        yield
        return
    count = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count


def _check_plans(models: dict[str, Any], parallel: ParallelConfig) -> None:
    """Raises `EngineStartError` if a model cannot be shared as `parallel` says, naming what can be done."""
    if _team_size(parallel) == 1:
        return
    key, plan = ("tensor_parallel_size", "_tp_plan") if parallel.tensor_parallel_size > 1 else ("", "_cp_plan")
    key = key or ("ulysses_degree" if parallel.ulysses_degree > 1 else "ring_degree")
    for name, model in models.items():
        if not getattr(model, plan, None):
            raise EngineStartError(
                f"engine_args.parallel_config.{key}: diffusers has no such plan for {name} ({type(model).__name__}); "
                "cfg_parallel_size, or world_size alone, splits any model by batch"
            )
