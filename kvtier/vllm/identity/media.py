"""Identifies images, audio and video by content; ids that a client chose stay within one engine.

vLLM's block hashes contain an identifier of each medium. It is a digest of the content, unless the
client gave an id (``uuid`` of an item, ``multi_modal_uuids``) or the image has one (EXIF
``ImageID``): then the id stands for the pixels, unchecked. vLLM's trust in it ends with its
process. kvtier would extend that trust over restarts, to other hosts and to other tenants.

So if a block's hash has such an id, this engine's own number is added to it: no other engine, nor
this one after a restart, has that name. Such blocks are kept in host memory, and are not sent to
any tier. Blocks before the first such medium of a prompt are handled like any others.

Only the front end knows the origin of an identifier, and hashes are made in the scheduler's
process. So the front end marks the identifiers that are digests of contents, and the scheduler
removes the mark before vLLM reads it. An identifier without a mark counts as the client's: a front
end in which kvtier was not loaded (``plugin.py``) marks nothing.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4
from weakref import WeakValueDictionary

from PIL import ExifTags, Image
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvtier.plugin_api.log import log
from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

_MARK: Final = "kvtier-content:"
_NOT_A_MARK: Final = "client:"
_TAG: Final = "mm"
_FRONT_END: Final = "vllm.v1.engine.input_processor"


class ContentHash(str):
    """A medium's identifier that vLLM made from the content alone, in the front end's process."""

    __slots__ = ()


class Media:
    """The requests of one process's engine whose media have clients' ids. Any thread."""

    def __init__(self) -> None:
        self.trusts = False
        self._number = uuid4().hex
        self._live: WeakValueDictionary[str, Request] = WeakValueDictionary()
        self._said = False

    def begin(self, *, trusts: bool) -> None:
        """Start for another engine. ``trusts``: clients' ids stand for contents everywhere."""
        self.trusts = trusts
        self._number = uuid4().hex
        self._live.clear()

    def unmark(self, features: Iterable[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
        """Return a request's media without marks, as vLLM had them before."""
        unmarked = []
        for feature in features:
            is_content = feature.identifier.startswith(_MARK)
            plain = replace(feature, identifier=feature.identifier.removeprefix(_MARK))
            plain.kvtier_is_clients = not is_content and not self.trusts
            unmarked.append(plain)
            if plain.kvtier_is_clients and not self._said:
                self._said = True
                log.warning(
                    "a medium has an id that a client chose, or comes from a front end in which "
                    "kvtier is not loaded: blocks of such media stay in host memory. Set "
                    'media_ids to "trust" if ids always stand for the same content',
                    modality=feature.modality,
                )
        return unmarked

    def note(self, request: Request) -> None:
        """Track a request for as long as it runs."""
        if any(map(_is_clients, request.mm_features)):
            self._live[request.request_id] = request

    def owned(
        self, keys: Iterable[bytes], request_id: str, end_of: Mapping[bytes, int]
    ) -> Collection[bytes]:
        """Return those of a request's blocks whose hashes contain a client's id.

        These are all from the first such medium on: a hash also covers the blocks before.
        ``end_of``: the token at which each block ends.
        """
        request = self._live.get(request_id) if self._live else None
        if request is None:
            return ()
        first = min(each.mm_position.offset for each in request.mm_features if _is_clients(each))
        return {key for key in keys if end_of.get(key, first + 1) > first}

    def name(self, identifier: str) -> str:
        """Return the name that replaces a client's id in this engine's hashes."""
        return f"{self._number}:{identifier}"


MEDIA: Final = Media()
"""The media of this process."""


def mark_contents(*, always: bool = True) -> None:
    """Make vLLM's front end in this process mark identifiers that are digests. Any thread.

    ``always``: False if the process may have no front end, and must not import it then.
    """
    if always or _FRONT_END in sys.modules:
        _hook_front_end()


def know_media(*, trusts: bool) -> None:
    """Make block hashes distinguish clients' ids, for an engine that starts in this process."""
    MEDIA.begin(trusts=trusts)
    _hook_scheduler()
    mark_contents(always=False)  # an engine may have its front end in its own process


@once_a_process
def _hook_front_end() -> None:
    from vllm.v1.engine.input_processor import InputProcessor  # noqa: PLC0415 - see above

    ProcessorInputs.get_mm_hashes = _telling_contents(ProcessorInputs.get_mm_hashes)
    InputProcessor.process_inputs = _marking(InputProcessor.process_inputs)


@once_a_process
def _hook_scheduler() -> None:
    Request.from_engine_core_request = classmethod(
        _taking_in(Request.from_engine_core_request.__func__)
    )
    kv_cache_utils.generate_block_hash_extra_keys = _by_owner(
        kv_cache_utils.generate_block_hash_extra_keys
    )


def _telling_contents(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def get_mm_hashes(inputs: ProcessorInputs, *rest: Any, **named: Any) -> dict[str, list[str]]:  # noqa: ANN401 - no stubs
        hashes = real(inputs, *rest, **named)
        given = inputs.mm_uuid_items or {}
        for modality, items in inputs.mm_data_items.items():
            ids = given.get(modality) or [None] * len(items)
            hashes[modality] = [
                each if chosen is not None or _has_id(item) else ContentHash(each)
                for each, chosen, item in zip(
                    hashes[modality], ids, items.get_all_items_for_hash(), strict=True
                )
            ]
        return dict(hashes)

    return get_mm_hashes


def _marking(real: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
    @wraps(real)
    def process_inputs(
        processor: InputProcessor,
        *arguments: Any,  # noqa: ANN401 - no stubs
        **named: Any,  # noqa: ANN401 - as above
    ) -> EngineCoreRequest:
        made = real(processor, *arguments, **named)
        if _has_kvtier(processor.vllm_config):
            for feature in made.mm_features or ():
                feature.identifier = _marked(feature)
        return made

    return process_inputs


def _marked(feature: MultiModalFeatureSpec) -> str:
    """Return an identifier with the mark, if due; a client's own id may begin with the mark."""
    identifier: str = feature.identifier
    if isinstance(feature.mm_hash, ContentHash):
        return _MARK + identifier
    return _NOT_A_MARK + identifier if identifier.startswith(_MARK) else identifier


def _taking_in(real: Callable[..., Request]) -> Callable[..., Request]:
    @wraps(real)
    def from_engine_core_request(
        cls: type[Request],
        request: EngineCoreRequest,
        *rest: Any,  # noqa: ANN401 - no stubs
        **named: Any,  # noqa: ANN401 - as above
    ) -> Request:
        if not request.mm_features:
            return real(cls, request, *rest, **named)
        # Not in place: the samples of one prompt share their media.
        request.mm_features = MEDIA.unmark(request.mm_features)
        made = real(cls, request, *rest, **named)
        MEDIA.note(made)
        return made

    return from_engine_core_request


def _by_owner(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def extra_keys(request: Request, *place: int) -> Any:  # noqa: ANN401 - vLLM has no stubs
        keys, next_input = real(request, *place)
        if not keys or not request.mm_features:
            return keys, next_input
        clients = {each.identifier for each in request.mm_features if _is_clients(each)}
        if not clients:
            return keys, next_input
        return tuple(_owned(key, clients) for key in keys), next_input

    return extra_keys


def _owned(key: Any, clients: set[str]) -> Any:  # noqa: ANN401 - of any kind
    if isinstance(key, tuple) and key[0] == _TAG and key[1] in clients:
        return (_TAG, MEDIA.name(key[1]), *key[2:])
    return key


def _is_clients(feature: MultiModalFeatureSpec) -> bool:
    return bool(getattr(feature, "kvtier_is_clients", False))


def _has_id(item: Any) -> bool:  # noqa: ANN401 - any medium
    """Return whether vLLM may hash an id that an image carries, instead of its pixels."""
    if isinstance(item, MediaWithBytes):
        return _has_id(item.media)
    if isinstance(item, Image.Image):
        try:
            return item.getexif().get(ExifTags.Base.ImageID) is not None
        except Exception:  # noqa: BLE001 - of what a client sent; vLLM hashes the pixels then
            return False
    if isinstance(item, dict):
        return any(map(_has_id, item.values()))
    return isinstance(item, list | tuple) and any(map(_has_id, item))


def _has_kvtier(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM has no stubs
    """Return whether the engine's scheduler has kvtier, which removes the marks."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return "kvtier" in str(getattr(transfer, "kv_connector_extra_config", None))
