"""Everything that is listed, described and managed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from smoke.record import Tour, done, refusal
from tinker import types


def manage(tour: Tour, rest: Any, run: Any, paths: dict[str, str | None], model: str) -> None:
    """`paths` are checkpoints of `run`, which uses `model`."""
    state = paths["state"]
    _runs(tour, rest, run.model_id, state)
    _checkpoints(tour, rest, run.model_id, state)
    _sessions(tour, rest, run.model_id)
    tour.call(
        "RestClient.get_weights_info_by_tinker_path",
        lambda: _is(done(rest.get_weights_info_by_tinker_path(state)).base_model, model),
    )
    tour.call("RestClient.get_server_capabilities", lambda: _lists(done(rest.get_server_capabilities()), model))
    tour.call("RestClient.get_audit_log", lambda: done(rest.get_audit_log()))
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, stop = hour - timedelta(hours=1), hour + timedelta(hours=1)
    tour.call("RestClient.get_billing_usage", lambda: done(rest.get_billing_usage(start, stop)).data)
    tour.call(
        "RestClient.get_current_checkpoint_storage_usage",
        lambda: done(rest.get_current_checkpoint_storage_usage()).data,
    )


def _runs(tour: Tour, rest: Any, run_id: str, state: str | None) -> None:
    tour.call(
        "RestClient.list_training_runs",
        lambda: _has([r.training_run_id for r in done(rest.list_training_runs(limit=50)).training_runs], run_id),
    )
    tour.call("RestClient.get_training_run", lambda: _is(done(rest.get_training_run(run_id)).training_run_id, run_id))
    tour.call(
        "RestClient.get_training_run_by_tinker_path",
        lambda: _is(done(rest.get_training_run_by_tinker_path(state)).training_run_id, run_id),
    )


def _checkpoints(tour: Tour, rest: Any, run_id: str, state: str | None) -> None:
    def listed() -> list[Any]:
        return list(done(rest.list_checkpoints(run_id)).checkpoints)

    def row() -> Any:
        return next(c for c in listed() if c.tinker_path == state)

    tour.call("RestClient.list_checkpoints", lambda: _has([c.tinker_path for c in listed()], state))
    tour.call(
        "RestClient.list_user_checkpoints",
        lambda: _has([c.tinker_path for c in done(rest.list_user_checkpoints()).checkpoints], state),
    )
    tour.call(
        "RestClient.publish_checkpoint_from_tinker_path",
        lambda: (done(rest.publish_checkpoint_from_tinker_path(state)), _is(row().public, True)),
    )
    tour.call(
        "RestClient.unpublish_checkpoint_from_tinker_path",
        lambda: (done(rest.unpublish_checkpoint_from_tinker_path(state)), _is(row().public, False)),
    )
    tour.call("RestClient.set_checkpoint_ttl_from_tinker_path", lambda: _ttl(rest, state, row))
    tour.call(
        "RestClient.delete_checkpoint",
        lambda: _gone(rest.delete_checkpoint(run_id, "weights/s2"), listed, "weights/s2"),
    )
    tour.call(
        "RestClient.delete_checkpoint_from_tinker_path",
        lambda: _gone(
            rest.delete_checkpoint_from_tinker_path(f"tinker://{run_id}/weights/short"), listed, "weights/short"
        ),
    )


def _sessions(tour: Tour, rest: Any, run_id: str) -> None:
    session_id = run_id.partition(":")[0]
    tour.call("RestClient.list_sessions", lambda: _has(done(rest.list_sessions()).sessions, session_id))
    tour.call("RestClient.get_session", lambda: _has(done(rest.get_session(session_id)).training_run_ids, run_id))
    sampler_id = f"{session_id}:sample:0"
    tour.call("RestClient.get_sampler", lambda: _is(done(rest.get_sampler(sampler_id)).sampler_id, sampler_id))
    tour.call("RestClient.search_sessions", lambda: _has(_found(rest), session_id))
    tour.call("RestClient.assign_session_project", lambda: done(rest.assign_session_project(session_id, "smoke")))
    tour.call("RestClient.export_session_trace", lambda: _is(bool(done(rest.export_session_trace(session_id))), True))
    tour.call("RestClient.whoami", lambda: _whoami(rest))


def _found(rest: Any) -> list[str]:
    owner = {"type": "own"}
    return [s.session_id for s in done(rest.search_sessions(types.SessionSearchRequest(owner=owner))).sessions]


def _whoami(rest: Any) -> None:
    """Answered without the server: a plain API key says nothing of its owner, and the SDK reports that."""
    assert "API key" in refusal(lambda: done(rest.whoami()))


def _ttl(rest: Any, path: str | None, row: Any) -> None:
    done(rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    assert row().expires_at is not None
    done(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert row().expires_at is None


def _gone(future: Any, listed: Any, checkpoint_id: str) -> None:
    done(future)
    assert checkpoint_id not in [c.checkpoint_id for c in listed()]


def _lists(capabilities: Any, model: str) -> None:
    _has([m.model_name for m in capabilities.supported_models], model)


def _is(found: Any, expected: Any) -> None:
    assert found == expected, (found, expected)


def _has(found: Any, expected: Any) -> None:
    assert expected in list(found), (expected, found)
