"""Identifies an engine's weights: by their content if it can be read, else as unknown.

KV data is usable only with the weights that it was computed with. So blocks are shared, with other
engines and over restarts, by the content of the weights: not by the model's path, at which there
may be other weights tomorrow. Weights that cannot be shown to be the same, because they are
streamed or come from an unknown loader, count as new each time (``identity/sharing.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.model_executor.model_loader import get_model_loader

from kvtier.plugin_api.log import printable
from kvtier.settings.weight_sources import NO_WEIGHTS, no_weight_files, why_out_of_sight
from kvtier.vllm.identity.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Mapping

_COMMIT: Final = re.compile("[0-9a-f]{40}")
_REASON_CHARACTERS_MAX: Final = 300


class Weights(NamedTuple):
    """The known facts about a model's weights, as JSON values."""

    facts: Mapping[str, Any]
    local_facts: Mapping[str, Any]  #: of the files on this machine; other copies' differ


def source_of(model: Any) -> str:  # noqa: ANN401 - vLLM has no stubs
    """Return where a model's weights are: a path, a name of the hub, or an address."""
    return str(getattr(model, "model_weights", "") or model.model)


def weights_of(model: Any, load: Any) -> Weights:  # noqa: ANN401 - vLLM has no stubs
    """Return the weights of one model configuration, as the load configuration finds them.

    Reads a small part of the model's files. ``facts`` have ``unknown``, a reason, if nothing
    distinguishes these weights from others.
    """
    load_format, source = str(load.load_format), source_of(model)
    reason = why_out_of_sight(load_format, source) or _why_not_vllms(load)
    if reason is not None:
        # Even under one ``weights_version``, random weights of two seeds are different weights.
        seed = {"seed": int(model.seed)} if load_format == NO_WEIGHTS else {}
        return Weights({**_unknown(reason).facts, **seed}, {})
    return _with_other_models(_weights_at(source, model), model.hf_config)


def _weights_at(source: str, model: Any) -> Weights:  # noqa: ANN401 - vLLM has no stubs
    path = Path(source)
    if path.exists():
        return _in_files(path)
    commit = _commit_of(model)
    if commit is None:
        return _unknown(f"the commit of {source} is unknown")
    return Weights({"commit": commit}, {})


def _with_other_models(own: Weights, config: Any) -> Weights:  # noqa: ANN401 - as above
    """Return the weights, and those of other models from which vLLM loads a part of them.

    Only Ultravox's configuration names any: others with separate weights have them in the
    model's own folder.
    """
    facts, local_facts = dict(own.facts), dict(own.local_facts)
    others = {
        "audio_model_id": getattr(config, "audio_model_id", None),
        "text_model_id": getattr(config, "text_model_id", None),
    }
    for name, other in others.items():
        if not isinstance(other, str):
            continue
        # vLLM loads the hub's current commit.
        found = _unknown(f"the commit of {name} {other} is unknown")
        if Path(other).exists():
            found = _in_files(Path(other))
        if "unknown" in found.facts:
            return found
        facts[name], local_facts[name] = found.facts, found.local_facts
    return Weights(facts, local_facts)


def _why_not_vllms(load: Any) -> str | None:  # noqa: ANN401 - vLLM has no stubs
    """Return why a plugin's loader, which may have the name of one of vLLM's, isn't trusted."""
    try:
        loader = type(get_model_loader(load))
    except Exception:  # noqa: BLE001 - the engine raises the same when it loads the model
        return None
    if loader.__module__.partition(".")[0] == "vllm":
        return None
    name = f"{loader.__module__}.{loader.__qualname__}"
    return f"load_format {str(load.load_format)!r} is that of {name}"


def why_unknown(facts: Mapping[str, Any]) -> str | None:
    """Return why an engine's weights are unknown; None: they are known. ``facts``: its worker's."""
    draft = facts.get("draft_model")
    models = [facts.get("model"), draft.get("model") if isinstance(draft, dict) else None]
    weights = [model.get("weights", {}) for model in models if isinstance(model, dict)]
    return next((each["unknown"] for each in weights if "unknown" in each), None)


def _in_files(path: Path) -> Weights:
    try:
        found = weight_files(path)
    except OSError as problem:
        return _unknown(f"they can't be read: {problem}")
    if found is None:
        return _unknown(no_weight_files(path))
    facts = {"files": found.files, "bytes": found.size_bytes, "sample_digest": found.digest}
    return Weights(facts, {"file_state_digest": found.local_digest})


def _commit_of(model: Any) -> str | None:  # noqa: ANN401 - as above
    """Return the commit of a model on the hub; None if its full hash is not known."""
    for name in (getattr(model.hf_config, "_commit_hash", None), model.revision):
        if isinstance(name, str) and _COMMIT.fullmatch(name):
            return name
    return None


def _unknown(reason: str) -> Weights:
    return Weights({"unknown": printable(reason)[:_REASON_CHARACTERS_MAX]}, {})
