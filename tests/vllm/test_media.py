"""Ids of media that a client chose: in the hashes of one engine, and in no tier."""

from __future__ import annotations

import uuid
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtier.vllm.identity import media as module
from kvtier.vllm.identity.adapters import know_adapters
from kvtier.vllm.identity.media import Media, know_media, mark_contents
from tests.vllm.support.stepped_manager import FS, context, keys, stepped

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 4
PROMPT = list(range(4 * BLOCK_TOKENS))
AT = 2 * BLOCK_TOKENS  #: where the medium begins: two blocks are before it
KVTIER = {"spec_module_path": "kvtier.vllm"}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Media:
    """No request runs yet. The front end and the scheduler are in this process."""
    made = Media()
    monkeypatch.setattr(module, "MEDIA", made)
    monkeypatch.setattr("kvtier.vllm.scheduler.manager.MEDIA", made)
    know_adapters()
    know_media(trusts=False)
    mark_contents()
    return made


def picture(seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def with_exif_id(image: Image.Image) -> Image.Image:
    image.getexif()[Image.ExifTags.Base.ImageID] = uuid.UUID(int=7)
    return image


def identifier(
    image: Any, chosen: str | None = None, extra: dict[str, Any] | None = None, **factors: Any
) -> str:
    """Return what vLLM's front end calls an image."""
    inputs = ProcessorInputs(
        prompt=[],
        mm_data_items=MultiModalDataItems({"image": ImageProcessorItems([image])}),
        mm_uuid_items=None if chosen is None else {"image": [chosen]},
        hf_processor_mm_kwargs=factors,
    )
    prompt = mm_input(
        PROMPT,
        {"image": [None]},
        inputs.get_mm_hashes("model", "sha256"),
        {"image": [PlaceholderRange(offset=AT, length=2)]},
    )
    made = front_end(KVTIER if extra is None else extra).process_inputs(
        "r", prompt, PoolingParams(), supported_tasks=("embed",)
    )
    (feature,) = made.mm_features
    return feature.identifier


def front_end(extra_config: dict[str, Any]) -> Any:
    """Return what makes requests for an engine's process, without its checks."""
    made = InputProcessor.__new__(InputProcessor)
    made.vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_config),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
        ),
    )
    made.lora_config = None
    for check in ("_validate_params", "_validate_lora", "_validate_model_inputs"):
        setattr(made, check, lambda *_: None)
    return made


def sent(*identifiers: str, name: str = "r") -> EngineCoreRequest:
    """Return a request as it comes to the engine's process, with media one after the other."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=each,
            mm_position=PlaceholderRange(offset=AT + number * BLOCK_TOKENS, length=2),
            mm_hash="h",
        )
        for number, each in enumerate(identifiers)
    ]
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        mm_features=features,
        sampling_params=SamplingParams(max_tokens=9),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))


def taken_in(request: EngineCoreRequest) -> Request:
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    return Request.from_engine_core_request(request, hasher)


def hashes(*identifiers: str) -> list[bytes]:
    return list(taken_in(sent(*identifiers)).block_hashes)


def of_another_engine(*identifiers: str, trusts: bool = False) -> list[bytes]:
    know_media(trusts=trusts)
    return hashes(*identifiers)


def test_a_digest_of_the_content_names_blocks_everywhere() -> None:
    found = hashes(identifier(picture()))
    assert of_another_engine(identifier(picture())) == found
    assert hashes(identifier(picture(1)))[:2] == found[:2]
    assert hashes(identifier(picture(1)))[2] != found[2]


@pytest.mark.parametrize(
    "chosen",
    [
        lambda: identifier(picture(), "cat"),
        lambda: identifier(picture(), "0" * 64),  # looks like a digest
        lambda: identifier(picture(), "cat", do_resize=True),  # vLLM digests the id
        lambda: identifier(with_exif_id(picture())),
        lambda: identifier(MediaWithBytes(with_exif_id(picture()), b"jpeg")),
        lambda: identifier(picture(), module._MARK + "0" * 64),  # as if it were marked
        lambda: "0" * 64,  # of a front end that marks nothing
    ],
    ids=["text", "hex", "with-arguments", "exif", "exif-of-bytes", "forged", "unmarked"],
)
def test_an_id_of_a_client_names_blocks_in_one_engine(chosen: Any) -> None:
    """It says nothing of the pixels: after a restart, or for a tenant elsewhere, they are others.

    The blocks before it are as any others.
    """
    found = hashes(chosen())
    assert hashes(chosen()) == found
    other = of_another_engine(chosen())
    assert other[:2] == found[:2]
    assert not set(other[2:]) & set(found[2:])


def test_an_image_whose_exif_cannot_be_read_is_known_by_its_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client sent it: its request is served, and vLLM hashes the pixels."""

    def getexif(_: Image.Image) -> None:
        raise SyntaxError("not a TIFF file")

    monkeypatch.setattr(Image.Image, "getexif", getexif)
    found = hashes(identifier(picture()))
    assert of_another_engine(identifier(picture())) == found


def test_ids_that_are_trusted_name_blocks_everywhere() -> None:
    know_media(trusts=True)
    found = hashes(identifier(picture(), "cat"))
    assert of_another_engine(identifier(picture(1), "cat"), trusts=True) == found


def test_vllm_sees_the_identifiers_that_it_would_without_kvtier() -> None:
    """Encoder caches, and connectors for them, go by these names, in other processes, too."""
    request = taken_in(sent(identifier(picture()), identifier(picture(), "cat")))
    told = [each.identifier for each in request.mm_features]
    assert told == [identifier(picture(), extra={}), "cat"]
    assert len(told[0]) == 64


def test_samples_of_one_prompt_share_their_media() -> None:
    """In one process they are the same objects, and each sample comes by itself."""
    first, second = sent(identifier(picture())), sent(name="s")
    second.mm_features = first.mm_features
    assert taken_in(first).block_hashes == taken_in(second).block_hashes


def test_only_a_client_id_warns_and_once() -> None:
    with capture_logs() as logs:
        hashes(identifier(picture()))
        assert logs == []
        for _ in range(2):
            hashes(identifier(picture(), "cat"))
    (warning,) = logs
    assert "stay in host memory" in warning["event"]


def ended(played: Any, name: str, order: Sequence[bytes]) -> list[bytes]:
    """Store the blocks of a request; return what a tier is given."""
    made = played.start(context(name, order))
    output = played.manager.prepare_store(order, made)
    played.manager.complete_store(set(output.keys_to_store), made)
    played.manager.on_request_finished(made)
    given = [key for batch in played.answer() for key in batch.keys]
    played.step()
    return given


def with_medium(known: Media, chunk_tokens: int, *identifiers: str) -> Request:
    """Have a request run whose medium begins in the third chunk."""
    request = taken_in(sent(*identifiers))
    for each in request.mm_features:
        each.mm_position = replace(each.mm_position, offset=2 * chunk_tokens + 1)
    known.note(request)
    return request


@pytest.mark.parametrize("offload_policy", ["chunk_level", "request_level"])
def test_blocks_with_a_clients_id_are_in_host_memory_and_no_tier_is_given_them(
    known: Media, offload_policy: str
) -> None:
    """Those before it are stored. A tier that wants whole requests gets no more, either."""
    order = keys("abcd")
    with stepped(tiers=[FS | {"offload_policy": offload_policy}]) as played:
        request = with_medium(known, played.manager._chunk_tokens, identifier(picture(), "cat"))
        assert ended(played, request.request_id, order) == order[:2]
        assert [played.facade.lookup(key, "x") for key in order] == [True] * 4
        assert not set(order[2:]) & set(ended(played, request.request_id, order))


def test_blocks_with_a_digest_are_given_to_tiers(known: Media) -> None:
    order = keys("abcd")
    with stepped(tiers=[FS]) as played:
        request = with_medium(known, played.manager._chunk_tokens, identifier(picture()))
        assert ended(played, request.request_id, order) == order
