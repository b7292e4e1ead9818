"""Samples the weights that a worker computes with: a few bytes here and there, of all parameters.

A worker's weights can be written without calling a method of vLLM's engine: by a trainer in the
same process, over CUDA IPC, by a thread of a worker extension. ``identity/weight_updates.py``
compares samples to detect that. A step of training changes nearly every tensor, though with 16-bit
weights and a small learning rate perhaps only one number in a hundred of it: 512 places of 64
bytes hold 16,384 such numbers, so that the odds of seeing none changed are e^-164.

Places are many and tensors are few (``PARAMETERS_MAX``), because each tensor costs a few
microseconds of Python and a place next to nothing. So a change of only a few tensors in a model of
many may go undetected, and so does a change of weights that a platform has packed into an object
that is not a parameter.

A parameter is looked up by module and name each time, since an update may replace it. No tensor
is kept: that would hold the memory of replaced weights.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

PARAMETERS_MAX: Final = 128
PLACES: Final = 512
PLACE_BYTES: Final = 64
DIGEST_BYTES: Final = 16

_AWAKE: Final = "RUNNING"  # of vLLM's ``SleepModeState``


class _Sampled(NamedTuple):
    """A sampled parameter."""

    module: ref[torch.nn.Module]
    name: str
    begins: float  #: offset of the first place, as a fraction of the distance between two


_SAMPLED: Final[WeakKeyDictionary[torch.nn.Module, list[_Sampled]]] = WeakKeyDictionary()


def sample_weights(worker: Any) -> bytes | None:  # noqa: ANN401 - vLLM has no stubs
    """Return a digest of samples of a worker's weights; None if they can't be read.

    Never raises: with several workers, vLLM would leave the replies of the others unread.
    """
    try:
        if _may_be_asleep(worker):
            return None
        models = [worker.get_model(), _draft_model(worker)]
        moves_experts = bool(worker.parallel_config.enable_eplb)
        samples = [
            _sample(model, moves_experts=moves_experts) for model in models if model is not None
        ]
        return hashlib.blake2b(b"".join(samples), digest_size=DIGEST_BYTES).digest()
    except Exception:  # noqa: BLE001 - whatever vLLM's objects raise
        return None


def _may_be_asleep(worker: Any) -> bool:  # noqa: ANN401 - vLLM has no stubs
    """Return whether the memory of the weights may be unmapped: reading it would end the worker."""
    if not worker.model_config.enable_sleep_mode:
        return False
    return bool(worker.sleep_mode_backend.state() != _AWAKE)


def _draft_model(worker: Any) -> torch.nn.Module | None:  # noqa: ANN401 - vLLM has no stubs
    if worker.speculative_config is None:
        return None
    try:
        model: torch.nn.Module | None = worker.get_draft_model()
    except AttributeError:  # a drafter without a model, or of a runner that has no such method
        return None
    return model


def _sample(model: torch.nn.Module, *, moves_experts: bool) -> bytes:
    """Return samples of a model's weights. ``moves_experts``: without experts: vLLM moves them."""
    sampled = _SAMPLED.get(model)
    if sampled is None or not all(map(_is_there, sampled)):
        sampled = _SAMPLED[model] = _choose(model, moves_experts=moves_experts)
    count = PLACES // max(1, len(sampled))
    pieces: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for module, name, begins in sampled:
        home = module()
        parameter = None if home is None else home._parameters.get(name)  # noqa: SLF001 - its dict
        if parameter is None:
            continue
        storage, device = parameter.untyped_storage(), parameter.device
        size = storage.nbytes()
        if not size:
            continue
        # Read its memory as bytes, whatever type, shape and strides a parameter has.
        length = min(PLACE_BYTES, size)
        distance = (size - length) // count
        piece = torch.empty(0, dtype=torch.uint8, device=device)
        piece.set_(storage, int(begins * distance), (count, length), (distance, 1))
        pieces.setdefault((device, length), []).append(piece)
    # Usually one gather and one copy. The device is idle: a sample is taken between two steps.
    return b"".join(torch.cat(each).cpu().numpy().tobytes() for each in pieces.values())


def _is_there(sampled: _Sampled) -> bool:
    module = sampled.module()
    return module is not None and module._parameters.get(sampled.name) is not None  # noqa: SLF001


def _choose(model: torch.nn.Module, *, moves_experts: bool) -> list[_Sampled]:
    """Choose parameters and places, the same for all models of a shape: engines compare digests."""
    owners = [
        (module, name)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()  # noqa: SLF001 - its own, not below
        if parameter is not None and not (moves_experts and "experts" in f"{prefix}.{name}")
    ]
    dice = random.Random(0)  # noqa: S311 - the same in each process, and nobody's secret
    if len(owners) > PARAMETERS_MAX:
        chosen = sorted(dice.sample(range(len(owners)), PARAMETERS_MAX))
        owners = [owners[number] for number in chosen]
    return [_Sampled(ref(module), name, dice.random()) for module, name in owners]
