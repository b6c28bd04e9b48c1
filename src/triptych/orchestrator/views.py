"""What `/v1/requests` shows, made from the core's state when somebody asks; nothing here is kept up to date."""

from __future__ import annotations

from triptych.orchestrator.events import RequestView, UnitView
from triptych.orchestrator.forecast import Forecast
from triptych.orchestrator.units import Request, Unit

__all__ = ["request_view"]


def request_view(request: Request, forecast: Forecast | None, *, unix_offset_s: float) -> RequestView:
    """Picture of one request; `forecast` is None for ended ones, `unix_offset_s` turns clock into Unix seconds."""
    finished_at_s = request.finished_at_s
    return RequestView(
        id=request.id,
        client_request_id=request.spec.client_request_id,
        model=request.spec.model,
        owner=request.spec.owner,
        created_at=request.created_at_s + unix_offset_s,
        finished_at=None if finished_at_s is None else finished_at_s + unix_offset_s,
        status=request.status,
        priority=request.priority,
        timeout_s=request.timeout_s,
        units=tuple(_unit_view(unit, forecast) for unit in request.units),
    )


def _unit_view(unit: Unit, forecast: Forecast | None) -> UnitView:
    return UnitView(
        index=unit.index,
        state=unit.state,
        replica=unit.replica_id,
        step=unit.step,
        steps=unit.steps,
        queue_position=None if forecast is None else forecast.positions.get(unit),
        eta_s=None if forecast is None else forecast.etas_s.get(unit),
    )
